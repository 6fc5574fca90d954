"""The table of nodes in the statistics of streams, services and Engines: its columns and the format of numbers."""

from collections.abc import Callable, Sequence
from typing import Final

from ..telemetry.counters import ActorStatistics
from ..telemetry.tables import (
    UNKNOWN,
    Column,
    Table,
    by_graph,
    count,
    duration,
    figure_cells,
    figure_columns,
    milliseconds,
    of,
    rate,
    seconds,
)

_Facts = tuple[tuple[str, str], ...]

_COLUMNS = (
    Column("node", is_number=False),
    Column("state", is_number=False),
    Column("done"),
    Column("failed"),
    Column("in flight"),
    Column("inbox"),
    Column("busy per item"),
    Column("put wait"),
    Column("retried"),
    Column("high water"),
)
# Optional columns, shown if a node has a value.
_RARE: Final[tuple[tuple[Column, Callable[[ActorStatistics], int | None]], ...]] = (
    (Column("failed over"), lambda actor: actor.failed_over),
    (Column("hedged"), lambda actor: actor.hedged),
    (Column("hedges won"), lambda actor: actor.hedges_won),
    (Column("cache hits"), lambda actor: None if actor.cache is None else actor.cache.hits),
    (Column("joined"), lambda actor: None if actor.cache is None else actor.cache.joined),
    (Column("evicted"), lambda actor: None if actor.cache is None else actor.cache.evicted),
    (Column("kept bytes"), lambda actor: None if actor.cache is None else actor.cache.bytes_held),
)


def table_of(facts: _Facts, actors: Sequence[ActorStatistics]) -> Table:
    """Return a table: `facts` above, and below a row for each node."""
    ordered = [actors[at] for at in by_graph([actor.graph for actor in actors])]
    headings = tuple(actor.graph for actor in ordered)
    rare = [(column, of_actor) for column, of_actor in _RARE if any(of_actor(actor) for actor in ordered)]
    figures = figure_columns(actor.figures for actor in ordered)
    columns = (*_COLUMNS, *[column for column, _ in rare], *[Column(name) for name in figures])
    rows = tuple(
        (*_row(one), *[count(of_actor(one)) for _, of_actor in rare], *figure_cells(one.figures, figures))
        for one in ordered
    )
    outages = tuple(("outage", actor.outage) for actor in actors if actor.outage)
    return Table((*facts, *outages), columns, rows, "" if actors else "no nodes yet", headings)


def _state(actor: ActorStatistics) -> str:
    if actor.state is None:
        return ""
    restarts = f", {count(actor.restarts)} restart{'s' * (actor.restarts != 1)}" if actor.restarts else ""
    return f"{actor.state}{restarts}"


def _row(actor: ActorStatistics) -> tuple[str, ...]:
    ended = actor.completed + actor.failed
    busy = actor.busy_seconds / ended if ended and actor.busy_seconds is not None else None
    return (
        actor.node,
        _state(actor),
        count(actor.completed),
        count(actor.failed),
        of(actor.in_flight, actor.concurrency),
        of(actor.inbox.depth, actor.inbox.capacity),
        milliseconds(busy),
        seconds(actor.inbox.put_wait_seconds),
        count(actor.retried),
        count(actor.inbox.high_water),
    )


def mean_rate(completed: int, elapsed_seconds: float | None) -> str:
    """Return how many items were completed per second, and over how long a time, as text."""
    per_second = completed / elapsed_seconds if elapsed_seconds else None
    return f"{rate(per_second)} over {duration(elapsed_seconds)}"


def or_unknown(value: object) -> str:
    """Return a value as text; for None, the mark of an unknown value."""
    return UNKNOWN if value is None else str(value)
