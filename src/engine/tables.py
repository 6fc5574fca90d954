"""The tables of streams, services and Engines: which numbers are shown, in which words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..telemetry.counters import ActorStatistics
from ..telemetry.tables import UNKNOWN, Column, Table, by_graph, count, duration, milliseconds, of, rate, seconds

if TYPE_CHECKING:
    from ..actors.threads import ProcessPoolStatistics, ThreadPoolStatistics
    from .admission import AdmissionStatistics
    from .engine import EngineStatistics
    from .service import ServiceStatistics
    from .streaming import StreamStatistics


MAX_ROWS = 60  # about a screen, as in drawings

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


def service_table(statistics: "ServiceStatistics") -> Table:
    """Return the table of a deployment."""
    return _table(service_summary(statistics).facts, statistics.actors)


def service_summary(statistics: "ServiceStatistics") -> Table:
    """Return the state of a deployment and its totals, without its nodes."""
    calls = [
        f"{count(statistics.completed)} completed", f"{count(statistics.failed)} failed",
        f"{count(statistics.cancelled)} cancelled", f"{count(statistics.expired)} expired",
        _mean_rate(statistics.completed, statistics.elapsed_seconds),
    ]  # fmt: skip
    facts = (
        ("service", statistics.state),
        ("calls", ", ".join(calls)),
        ("admission", _admission(statistics.admission)),
        ("bottleneck", _or_unknown(statistics.bottleneck)),
    )
    return Table(facts)


def stream_table(statistics: "StreamStatistics") -> Table:
    """Return the table of a stream."""
    numbers = ("submitted", "completed", "failed", "skipped", "yielded")
    items = [f"{count(getattr(statistics, name))} {name}" for name in numbers]
    if statistics.expired:
        items[2] += f" ({count(statistics.expired)} expired)"
    facts = (
        ("stream", f"{count(statistics.in_flight)} in flight"),
        ("items", ", ".join([*items, _mean_rate(statistics.completed, statistics.elapsed_seconds)])),
        ("bottleneck", _or_unknown(statistics.bottleneck)),
    )
    return _table(facts, statistics.actors)


def engine_table(statistics: "EngineStatistics") -> Table:
    """Return the table of an Engine."""
    facts = (
        ("engine", f"{count(statistics.runs_in_flight)} runs in flight, {count(statistics.scopes)} scopes open"),
        ("threads", _threads(statistics.threads)),
        ("processes", _processes(statistics.processes)),
    )
    return _table(facts, statistics.actors)


def _table(facts: _Facts, actors: Sequence[ActorStatistics]) -> Table:
    shown = actors if len(actors) <= MAX_ROWS else _most_telling(actors)
    ordered = [shown[at] for at in by_graph([actor.graph for actor in shown])]
    headings = tuple(actor.graph for actor in ordered)
    return Table(facts, _COLUMNS, tuple(map(_row, ordered)), _rest(actors, shown), headings)


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


def _most_telling(actors: Sequence[ActorStatistics]) -> list[ActorStatistics]:
    """Return those that do not run, for which most waited, which failed most, or were busiest, in the common order."""

    def trouble(index: int) -> tuple[bool, float, int, float, int]:
        actor = actors[index]
        is_down = actor.state in ("restarting", "stopped")
        return is_down, actor.inbox.put_wait_seconds, actor.failed, actor.busy_seconds or 0.0, actor.completed

    return [actors[index] for index in sorted(sorted(range(len(actors)), key=trouble)[-MAX_ROWS:])]


def _rest(actors: Sequence[ActorStatistics], shown: Sequence[ActorStatistics]) -> str:
    if not actors:
        return "no nodes yet"
    if len(shown) == len(actors):
        return ""
    completed, failed = (
        sum(getattr(actor, name) for actor in actors) - sum(getattr(actor, name) for actor in shown)
        for name in ("completed", "failed")
    )
    return (
        f"and {count(len(actors) - len(shown))} nodes that were waited for less: {count(completed)} completed, "
        f"{count(failed)} failed; `actors` has all of them"
    )


def _admission(admission: "AdmissionStatistics") -> str:
    parts = [
        f"{of(admission.in_flight, admission.max_in_flight)} in flight",
        f"{of(admission.queued, admission.max_queue)} queued",
        f"{count(admission.refused)} refused",
        f"{rate(admission.calls_per_second, 'calls')} while full",
    ]
    return ", ".join(parts)


def _threads(threads: "ThreadPoolStatistics | None") -> str:
    if threads is None:
        return UNKNOWN
    return f"{of(threads.busy, threads.threads)} busy, {count(threads.queued)} queued, {count(threads.completed)} done"


def _processes(processes: "ProcessPoolStatistics | None") -> str:
    if processes is None:
        return UNKNOWN
    ended = f"{count(processes.died)} died, {count(processes.killed)} killed"
    busy = f"{of(processes.busy, processes.workers)} busy, {count(processes.queued)} queued"
    return f"{busy}, {count(processes.completed)} done, {ended}"


def _mean_rate(completed: int, elapsed_seconds: float | None) -> str:
    per_second = completed / elapsed_seconds if elapsed_seconds else None
    return f"{rate(per_second)} over {duration(elapsed_seconds)}"


def _or_unknown(value: object) -> str:
    return UNKNOWN if value is None else str(value)
