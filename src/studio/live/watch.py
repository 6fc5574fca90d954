"""LiveSampler: what all nodes of this process do between two looks, as records and as a table."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, TypeAlias

from ...engine import ActorStatistics
from ...extension import Figure
from ...telemetry import (
    Capacity,
    FailureLook,
    ItemLook,
    NodeProfile,
    ScopeSnapshot,
    Snapshot,
    StepContents,
    StepSnapshot,
    StuckLoop,
    Verdict,
)
from ...telemetry.tables import (
    UNKNOWN,
    Column,
    Table,
    by_graph,
    count,
    duration,
    of,
    seconds,
    significant,
    table_with_figures,
)


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One node, over all scopes of its graph.

    Attributes:
        graph: name of its graph, or of the body of control flow that it belongs to.
        node: name of the node, as drawn.
        runs_on: "loop", "thread", "process", or another place.
        completed: items that it finished with a result since the look before.
        failed: items that ended in an error here since then.
        total_completed: items that it has finished with a result in the scopes that are open now.
        total_failed: items that have ended in an error there.
        busy_share: share of the time since the look before for which its places were taken, also by items that are
            still in it; for a node without a limit, the number of items in it at a time. None if it is not known.
        inbox_depth: items that wait in its inbox now.
        inbox_capacity: how many may wait there; None if unbounded.
        in_flight: items in it now.
        limit: how many may be in it; None if unlimited.
        figures: what its execution tells besides, now.
        outage: for how long its items are retried, and after which error, as a sentence; empty if none is.
        drawing: the digest of the drawing of its graph; empty if unknown.
        step: the place of its box there: its id; in a body, "owner.number of the body.id".
        retried: how many further attempts there were, in the scopes that are open now.
        hedged: how many items have got a second attempt beside the first, there.
        failed_over: how many items its failover took over, there.
        cache_hits: how many calls got a result that was kept, there.
        cache_misses: how many calls have begun a computation, there.
        p50: half of its executions of the last minute took at most this long, in seconds; None if none was timed.
        p99: 99 % of them took at most this long; None if fewer than 20 were timed.
        timed: how many executions the two stand for.
        shared: the limit that it shares with other nodes, in words; empty if `limit` is its own.
        device_share: the share of its time for which a device computed for it; None if unknown.
        blocked: finished items that wait for room behind it; they are not in `in_flight`.
        waits: items that wait for room in its full inbox.
        buffer_depth: of a node that gives a stream: values in the stream that wait for their reader; else None.
        buffer_capacity: how many may wait there.
        values: how many values it has given.
    """

    graph: str
    node: str
    runs_on: str
    completed: int
    failed: int
    total_completed: int
    total_failed: int
    busy_share: float | None
    inbox_depth: int
    inbox_capacity: int | None
    in_flight: int
    limit: int | None
    figures: tuple[Figure, ...] = ()
    outage: str = ""
    drawing: str = ""
    step: str = ""
    retried: int = 0
    hedged: int = 0
    failed_over: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    p50: float | None = None
    p99: float | None = None
    timed: int = 0
    shared: str = ""
    device_share: float | None = None
    blocked: int = 0
    waits: int = 0
    buffer_depth: int | None = None
    buffer_capacity: int | None = None
    values: int | None = None


@dataclass(frozen=True, slots=True)
class ScopeLook:
    """A run, a stream or a deployment.

    Attributes:
        id: stands for the scope, also once it has ended.
        graph: the names of its graphs.
        kind: "runs" for all calls of `run` of a graph, "stream", "call" or "deployment".
        opened: when it was opened, in seconds since 1970.
        drawings: the digests of the drawings of its graphs.
        admitted: how many calls of a deployment are in flight; None for others.
        max_admitted: how many may be.
    """

    id: str
    graph: str
    kind: str = "runs"
    opened: float = 0.0
    drawings: tuple[str, ...] = ()
    admitted: int | None = None
    max_admitted: int | None = None


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """What a process does, at one look.

    Attributes:
        process: its process id.
        seconds: how long ago the look before was; None if this is the first, which has no rates.
        nodes: the nodes of scopes that are open or have ended since the look before.
        verdict: what limits the throughput; None if no item has left a node since the look before.
        lines: what belongs to no node, each with its label, such as the consumers of the process.
        when: when it was taken, in seconds since 1970.
        scopes: the scopes that are open.
        items: the oldest items in flight, the oldest first.
        in_flight: how many items there are.
        failures: the newest failures of the process, by node and class, the newest first.
        stuck: the event loops that have not answered for a second.
        evidence: what the verdict stands on, in sentences.
    """

    process: int
    seconds: float | None
    nodes: tuple[NodeLook, ...]
    verdict: Verdict | None
    lines: tuple[tuple[str, str], ...] = ()
    when: float = 0.0
    scopes: tuple[ScopeLook, ...] = ()
    items: tuple[ItemLook, ...] = ()
    in_flight: int = 0
    failures: tuple[FailureLook, ...] = ()
    stuck: tuple[StuckLoop, ...] = ()
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for.

    Attributes:
        request: a look, the drawing of a graph, or a profile.
        digest: that of the drawing.
        show_messages: whether a look tells the messages of errors, which may hold values of items.
        show_keys: whether it tells the keys of items, and not eight digits that stand for each.
        scope: the id of the scope whose nodes it tells of; empty for all.
        seconds: how long the profile is recorded.
        matching: a text that the graph, the node, the state or the key of items contains, to tell of these alone.
    """

    request: str = ""
    digest: str = ""
    show_messages: bool = False
    show_keys: bool = False
    scope: str = ""
    seconds: float = 0.0
    matching: str = ""


Name: TypeAlias = tuple[str, str]  # graph and node
LOOK: Final = Request("look")


def look_of(snapshot: Snapshot, asked: Request = LOOK) -> LiveSnapshot:
    """Return what a snapshot tells; nodes of one graph stand together.

    Args:
        snapshot: the snapshot.
        asked: which scope to tell of, and whether to tell messages and keys.
    """
    if asked.scope:
        scopes = tuple([scope for scope in snapshot.scopes if scope.id == asked.scope])
        snapshot = replace(snapshot, scopes=scopes)
    lately = snapshot.lately
    now: dict[Name, list[StepSnapshot]] = {}
    for step in [step for scope in snapshot.scopes for step in scope.steps]:
        now.setdefault(step.name, []).append(step)
    then: dict[Name, tuple[NodeProfile, str]] = {}
    if lately is not None:
        then = {step.name: (node, step.runs_on) for node, step in zip(lately.nodes, lately.steps, strict=True)}
    names = dict.fromkeys((*now, *then))  # also nodes whose scopes have ended meanwhile
    graphs = {graph: place for place, graph in enumerate(dict.fromkeys(graph for graph, _ in names))}
    shared = _shared_limits(snapshot)
    nodes = [
        _look_of(name, now.get(name, []), then.get(name), snapshot, shared.get(name, ""))
        for name in sorted(names, key=lambda name: graphs[name[0]])
    ]
    seconds = None if lately is None else lately.elapsed_seconds
    return LiveSnapshot(
        snapshot.process, seconds, tuple(nodes), snapshot.verdict,
        snapshot.lines, snapshot.when, tuple(map(_scope_look, snapshot.scopes)),
        snapshot.items if asked.show_keys else tuple(map(_without_key, snapshot.items)), snapshot.in_flight,
        snapshot.failures if asked.show_messages else tuple([replace(one, message="") for one in snapshot.failures]),
        snapshot.stuck, snapshot.evidence,
    )  # fmt: skip


def _without_key(item: ItemLook) -> ItemLook:
    digits = blake2b(item.key.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return replace(item, key=digits) if item.key else item


def _scope_look(scope: ScopeSnapshot) -> ScopeLook:
    admitted, most = scope.admitted or (None, None)
    digests, names = zip(*scope.graphs, strict=True) if scope.graphs else ((), ())
    return ScopeLook(scope.id, ", ".join(names), scope.kind, scope.opened, digests, admitted, most)


def _look_of(
    name: Name, steps: Sequence[StepSnapshot], then: tuple[NodeProfile, str] | None, snapshot: Snapshot, shared: str
) -> NodeLook:
    node, runs_on = then or (None, steps[0].runs_on)
    limit = _limit_of(steps)
    told: dict[str, Any] = dict(_NOTHING, limit=limit, shared=shared)
    if name in snapshot.latencies:
        told["p50"], told["p99"], told["timed"] = snapshot.latencies[name]
    if node is not None:
        share = node.busy_share
        if share is not None and limit is not None:
            share = min(share, 1.0)  # the whole time of an item counts when it leaves, so it may be more than passed
        told.update(completed=node.count, failed=node.errors, busy_share=share, device_share=node.device_share)
    if steps:
        _add_present(told, steps, snapshot)
    return NodeLook(*name, runs_on, **told)


_NOTHING: Final = {
    "completed": 0, "failed": 0, "total_completed": 0, "total_failed": 0, "busy_share": 0.0, "inbox_depth": 0,
    "inbox_capacity": 0, "in_flight": 0,
}  # fmt: skip


def _add_present(told: dict[str, Any], steps: Sequence[StepSnapshot], snapshot: Snapshot) -> None:
    """Add what a node holds now, and has done, in the scopes that are open."""
    now = ActorStatistics.total([step.counters for step in steps])
    holds = StepContents()
    for one in [snapshot.contents[step.key] for step in steps if step.key in snapshot.contents]:
        holds = holds.plus(*one)
    told.update(
        total_completed=now.completed, total_failed=now.failed, inbox_depth=now.inbox.depth,
        inbox_capacity=now.inbox.capacity, figures=now.figures, outage=now.outage, drawing=steps[-1].drawing,
        step=steps[-1].step, retried=now.retried, hedged=now.hedged, failed_over=now.failed_over,
        in_flight=holds.working if told["shared"] else max(0, now.in_flight - holds.blocked), blocked=holds.blocked,
        waits=now.inbox.waiting_putters,
    )  # fmt: skip
    if now.cache is not None:
        told.update(cache_hits=now.cache.hits, cache_misses=now.cache.misses)
    if holds.capacity:
        told.update(buffer_depth=holds.buffered, buffer_capacity=holds.capacity, values=holds.values)


def _shared_limits(snapshot: Snapshot) -> dict[Name, str]:
    """Return for each node whose limit is not its own whose it is, in words."""
    sharing: dict[Hashable, tuple[Capacity, dict[Name, None]]] = {}
    for step in [step for scope in snapshot.scopes for step in scope.steps if step.places]:
        place = step.places[0]
        sharing.setdefault(place.key, (place, {}))[1][step.name] = None
    found: dict[Name, str] = {}
    for place, names in sharing.values():
        if place.bound in ("threads", "processes"):
            found |= dict.fromkeys(names, f"{place.limit:,} {place.bound} of the Engine")
        elif len(names) > 1 and place.bound not in ("max_in_flight", "map_each", "call", "max_workers"):
            several = [f"{node} of {graph}" for graph, node in names]
            of = ", ".join([*several[:3], *([f"{len(several) - 3:,} more"] if len(several) > 3 else [])])
            found |= dict.fromkeys(names, f"{place.bound}={place.limit:,}, shared by {of}")
    return found


def _limit_of(steps: Sequence[StepSnapshot]) -> int | None:
    """Return how many items may be in a node: by its own limit, or by that of the stream or call around it."""
    limits = {step.places[0].key if step.places else None: step.places[0].limit if step.places else 0 for step in steps}
    return None if None in limits or not limits else sum(limits.values())


_COLUMNS: Final = (
    Column("node", is_number=False),
    Column("", is_number=False),
    Column("items/s"),
    Column("in flight"),
    Column("inbox"),
    Column("busy"),
    Column("done"),
    Column("failed"),
)


def look_table(look: LiveSnapshot, max_rows: int | None = None) -> Table:
    """Return the table that shows a look.

    Args:
        look: the look.
        max_rows: how many nodes there is room for; None for all.
    """
    over = "" if look.seconds is None else f", over {duration(look.seconds)}"
    outages = tuple(("outage", node.outage) for node in look.nodes if node.outage)
    facts = (
        ("process", f"{look.process}{over}"), ("limits", _limits(look)), *map(stuck_line, look.stuck), *outages,
        *look.lines,
    )  # fmt: skip
    shown = _most_telling(look, max_rows)
    remark = "" if look.nodes else "no nodes yet"
    if len(shown) < len(look.nodes):
        remark = f"and {count(len(look.nodes) - len(shown))} nodes that do less; --json has all of them"
    ordered = [shown[at] for at in by_graph([node.graph for node in shown])]
    return table_with_figures(
        facts, _COLUMNS, ((node.graph, _row(look, node), node.figures) for node in ordered), remark
    )


def stuck_line(loop: StuckLoop) -> tuple[str, str]:
    """Return what a table says of an event loop that does not answer."""
    at = f", at {loop.stack[-1]}" if loop.stack else ""
    return "stuck", f"the event loop of {loop.thread} has not answered for {duration(loop.seconds)}{at}"


def items_table(look: LiveSnapshot) -> Table:
    """Return the table of the oldest items in flight."""
    hidden = look.in_flight - len(look.items)
    facts = ("process", str(look.process)), ("in flight", count(look.in_flight)), *map(stuck_line, look.stuck)
    rows = [
        (
            one.node or UNKNOWN, count(one.item), one.state, duration(one.age), count(one.attempt),
            seconds(one.deadline), one.key,
        )
        for one in look.items
    ]  # fmt: skip
    titles = "node", "item", "state", "age", "attempt", "deadline", "key"
    columns = tuple([Column(title, is_number=title in ("item", "age", "attempt", "deadline")) for title in titles])
    order = by_graph([one.graph for one in look.items])
    return Table(
        facts, columns, tuple([rows[at] for at in order]), f"and {count(hidden)} younger ones" if hidden else "",
        tuple([look.items[at].graph for at in order]),
    )  # fmt: skip


def failures_table(look: LiveSnapshot) -> Table:
    """Return the table of the newest failures of the process."""
    rows = [
        (one.node or UNKNOWN, one.type, count(one.count), f"{duration(look.when - one.last)} ago", one.message)
        for one in look.failures
    ]
    columns = (
        Column("node", is_number=False), Column("error", is_number=False), Column("items"), Column("last"),
        Column("message", is_number=False),
    )  # fmt: skip
    order = by_graph([one.graph for one in look.failures])
    return Table(
        (("process", str(look.process)),), columns, tuple([rows[at] for at in order]),
        "" if rows else "nothing has failed", tuple([look.failures[at].graph for at in order]),
    )  # fmt: skip


def _limits(look: LiveSnapshot) -> str:
    if look.seconds is None:
        return UNKNOWN
    return "nothing has left a node meanwhile" if look.verdict is None else str(look.verdict)


def _row(look: LiveSnapshot, node: NodeLook) -> tuple[str, ...]:
    ended = node.completed + node.failed
    return (
        node.node,
        "◀ limits" if _is_limit(look, node) else "",
        UNKNOWN if not look.seconds else significant(ended / look.seconds),
        of(node.in_flight, node.limit),
        of(node.inbox_depth, node.inbox_capacity),
        UNKNOWN if not look.seconds or node.busy_share is None else _share(node),
        count(node.total_completed),
        count(node.total_failed) + (f" (+{node.failed:,})" if look.seconds and node.failed else ""),
    )


def _share(node: NodeLook) -> str:
    assert node.busy_share is not None
    return f"{node.busy_share:.0%}" if node.limit is not None else f"{significant(node.busy_share)} at once"


def _is_limit(look: LiveSnapshot, node: NodeLook) -> bool:
    return look.verdict is not None and (look.verdict.graph, look.verdict.node) == (node.graph, node.node)


def _most_telling(look: LiveSnapshot, max_rows: int | None) -> Sequence[NodeLook]:
    """Return the nodes to show, in their order: the one that limits, and those with most items."""

    def weight(index: int) -> tuple[bool, int, int, int]:
        node = look.nodes[index]
        return _is_limit(look, node), node.inbox_depth, node.in_flight, node.completed + node.failed

    if max_rows is None or len(look.nodes) <= max_rows:
        return look.nodes
    chosen = sorted(range(len(look.nodes)), key=weight, reverse=True)[: max(max_rows, 1)]
    return [look.nodes[index] for index in sorted(chosen)]
