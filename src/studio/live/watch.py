"""Looker: the work of all nodes of this process between two looks, as records and as a table."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, TypeAlias

from ...engine import ActorStatistics
from ...extension import Figure
from ...telemetry import (
    Capacity,
    Cuts,
    FailureLook,
    ItemLook,
    NodeWork,
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


@dataclass(slots=True)  # not frozen: to make a frozen record takes five times as long, and each look makes many
class NodeLook:
    """One node, over all scopes of its graph.

    Attributes:
        graph: the name of its graph, or of the body of control flow that it belongs to.
        node: the name of the node, as drawn.
        runs_on: "loop", "thread", "process", or another place.
        completed: items that the node finished with a result since the look before.
        failed: items that ended here with an error since the look before.
        total_completed: items that the node finished with a result, in the scopes that are open now.
        total_failed: items that ended here with an error, in the scopes that are open now.
        busy_share: the share of the time since the look before for which its places were taken, also by items that are
            still in it; for a node without a limit, the mean number of items in it. None if unknown.
        inbox_depth: items that wait in its inbox now.
        inbox_capacity: how many items may wait in the inbox; None if unbounded.
        in_flight: items in the node now.
        limit: how many items may be in the node; None if unlimited.
        figures: the figures that its execution reports, as they are now.
        outage: for how long its items are retried, and after which error, as a sentence; empty if no item is retried.
        drawing: the digest of the drawing of its graph; empty if unknown.
        step: the id of its box in this drawing; in a body, "owner.number of the body.id".
        retried: how many further attempts there were, in the scopes that are open now.
        hedged: how many items got a second attempt beside the first, in these scopes.
        failed_over: how many items its failover took over, in these scopes.
        cache_hits: how many calls got a cached result, in these scopes.
        cache_misses: how many calls began a computation, in these scopes.
        p50: half of its executions in the last minute took at most this long, in seconds; None if none was timed.
        p99: 99 % of these executions took at most this long; None if fewer than 20 were timed.
        timed: how many executions `p50` and `p99` rest on.
        shared: the limit that it shares with other nodes, in words; empty if `limit` is its own.
        device_share: the share of its busy time for which a device computed for it; None if unknown.
        blocked: finished items that wait for room after the node; they are not in `in_flight`.
        waits: items that wait for room in its full inbox.
        buffer_depth: for a node that gives a stream, values in the stream that wait for their reader; None for others.
        buffer_capacity: how many values may wait in the stream.
        values: how many values the node has given.
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
        id: a text that identifies the scope, also once it has ended.
        graph: the names of its graphs.
        kind: "runs" for all calls of `run` of a graph, "stream", "call" or "deployment".
        opened: when the scope was opened, in seconds since 1970.
        drawings: the digests of the drawings of its graphs.
        admitted: for a deployment, how many calls are in flight; None for other scopes.
        max_admitted: how many calls may be in flight.
        cut_age: how old its newest cut is, in seconds: a snapshot with `checkpoint=`, or a stored state of a durable
            loop. None before the first cut.
        cut_bytes: the size of the newest cut.
        cut_asked: how often cuts are asked for, such as "every 60 s"; empty for a scope without cuts.
        cut_reached: the time between the last two cuts, in seconds; None before the second cut.
        cuts: how many cuts there were.
        done: for a stream, how many items have ended; for a call with `checkpoint=`, how many records its source has
            given, or how many values were taken. None for other scopes.
        total: how many items or records there will be; None if unknown.
        left: how long the remaining items take at the rate since the scope was opened, in seconds; None if unknown.
    """

    id: str
    graph: str
    kind: str = "runs"
    opened: float = 0.0
    drawings: tuple[str, ...] = ()
    admitted: int | None = None
    max_admitted: int | None = None
    cut_age: float | None = None
    cut_bytes: int = 0
    cut_asked: str = ""
    cut_reached: float | None = None
    cuts: int = 0
    done: int | None = None
    total: int | None = None
    left: float | None = None

    def words(self) -> str:
        """Return a text about the progress and the cuts of the scope; empty if it has neither."""
        said: list[str] = []
        if self.done is not None:
            said.append(f"{count(self.done) if self.total is None else of(self.done, self.total)} done")
        if self.left is not None:
            said.append(f"{duration(self.left)} left")
        if self.cut_age is not None:
            size = f"{self.cut_bytes / 1e6:,.3g} MB" if self.cut_bytes >= 1e6 else f"{self.cut_bytes / 1e3:.3g} kB"
            said.append(f"newest cut {duration(self.cut_age)} old, {size}")
        if self.cut_asked:
            reached = "" if self.cut_reached is None else f", {duration(self.cut_reached)} between the last two"
            said.append(f"cuts {self.cut_asked}{reached}")
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """The state of a process, at one look.

    Attributes:
        process: the id of the process.
        seconds: how long ago the look before was; None for the first look, which has no rates.
        nodes: the nodes of scopes that are open or have ended since the look before.
        verdict: the verdict: what limits the throughput; None if no item has left a node since the look before.
        lines: pairs of a label and a text that belong to no node, such as the consumers of the process.
        when: when the look was taken, in seconds since 1970.
        scopes: the scopes that are open.
        items: the oldest items in flight, the oldest first.
        in_flight: how many items are in flight.
        failures: the newest failures of the process, by node and class, the newest first.
        stuck: the event loops that have not answered for a second.
        evidence: sentences with the measurements behind the verdict.
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
    """A request of a client.

    Attributes:
        request: a look, the drawing of a graph, or a profile.
        digest: the digest of the drawing.
        show_messages: whether a look has the messages of errors, which may hold values of items.
        show_keys: whether a look has the keys of items; if not, it has eight digits that stand for each key.
        scope: the id of the scope whose nodes a look has; empty for the nodes of all scopes.
        seconds: for how long the profile is recorded.
        matching: a text; a look has only items whose graph, node, state or key contains it.
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
Pauses: TypeAlias = Callable[[Iterable[Any]], Iterable[Any]]


class _Present:
    """The counters and places of the nodes of some scopes.

    Attributes:
        totals: the sum of the counters of each node.
        last: the last snapshot of each node.
        places: the places of each node by their keys; None where a node has no limit in a scope.
        names: the nodes by the keys of their snapshots.
    """

    def __init__(self, steps: Iterable[StepSnapshot], rest: "_Present | None" = None) -> None:
        """Add further steps to the rest."""
        counters: dict[Name, list[ActorStatistics]] = {}
        self.totals: dict[Name, ActorStatistics] = {}
        self.last: dict[Name, StepSnapshot] = {}
        self.places: dict[Name, dict[Hashable, Capacity | None]] = {}
        self.names: dict[Hashable, Name] = {}
        if rest is not None:
            counters = {name: [total] for name, total in rest.totals.items()}
            self.last, self.names = dict(rest.last), dict(rest.names)
            self.places = {name: dict(places) for name, places in rest.places.items()}
        for step in steps:
            name = step.name
            counters.setdefault(name, []).append(step.counters)
            place = step.places[0] if step.places else None
            self.places.setdefault(name, {})[place and place.key] = place
            self.last[name], self.names[step.key] = step, name
        self.totals = {name: ActorStatistics.total(found) for name, found in counters.items()}

    def limit_of(self, name: Name) -> int | None:
        """Return how many items may be in a node: by its own limit, or by the limit of the stream or call around it."""
        places = [*self.places.get(name, {None: None}).values()]
        return None if None in places else sum(place.limit for place in places if place is not None)

    def shared_limits(self) -> dict[Name, str]:
        """Return, for each node whose limit is not its own, a text that says whose limit it is."""
        sharing: dict[Hashable, tuple[Capacity, list[Name]]] = {}
        for name, places in self.places.items():
            for key, place in places.items():
                if place is not None:
                    sharing.setdefault(key, (place, []))[1].append(name)
        found: dict[Name, str] = {}
        for place, names in sharing.values():
            if place.bound in ("threads", "processes"):
                found |= dict.fromkeys(names, f"{place.limit:,} {place.bound} of the Engine")
            elif len(names) > 1 and place.bound not in ("max_in_flight", "map_each", "call", "max_workers"):
                several = [f"{node} of {graph}" for graph, node in names]
                of = ", ".join([*several[:3], *([f"{len(several) - 3:,} more"] if len(several) > 3 else [])])
                found |= dict.fromkeys(names, f"{place.bound}={place.limit:,}, shared by {of}")
        return found


class Looker:
    """Turns snapshots into looks, one after the other; it keeps the numbers of scopes in which nothing has moved."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[StepSnapshot, ...]] = {}
        self._idle: list[int] = []
        self._rest = _Present(())
        self._ended: dict[str, dict[Name, ActorStatistics]] = {}  # counters of the scope that the last look asked for

    def look(self, snapshot: Snapshot, asked: Request = LOOK, in_turns: Pauses = iter) -> LiveSnapshot:
        """Return the look that shows a snapshot; nodes of one graph stand together.

        Args:
            snapshot: the snapshot.
            asked: which scope to show, and whether to show messages and keys.
            in_turns: yields items, with pauses for event loops.
        """
        scopes, work = snapshot.scopes, snapshot.work
        if asked.scope:
            scopes = tuple([scope for scope in scopes if scope.id == asked.scope])
        now = self._present([scope.steps for scope in scopes], in_turns)
        before, self._ended = self._ended.get(asked.scope, {}), {}
        if asked.scope:
            self._ended = {asked.scope: now.totals}
            work = {
                name: _work_of_scope(work.get(name) or NodeWork(), total, before.get(name, total))
                for name, total in now.totals.items()
            }
        # Nodes whose scopes have ended meanwhile count, too.
        names = dict.fromkeys((*now.last, *[name for name, did in work.items() if did.runs_on]))
        graphs = {graph: place for place, graph in enumerate(dict.fromkeys(graph for graph, _ in names))}
        holds: dict[Name, StepContents] = {}
        for key, held in snapshot.contents.items():
            if (owner := now.names.get(key)) is not None:
                holds[owner] = holds.get(owner, StepContents()).plus(*held)
        shared, nothing = now.shared_limits(), StepContents()
        nodes = [
            _look_of(name, now, work.get(name) or NodeWork(), holds.get(name, nothing), shared.get(name, ""))
            for name in in_turns(sorted(names, key=lambda name: graphs[name[0]]))
        ]
        seconds = None if snapshot.lately is None else snapshot.lately.elapsed_seconds
        failures = snapshot.failures
        return LiveSnapshot(
            snapshot.process, seconds, tuple(nodes), snapshot.verdict,
            snapshot.lines, snapshot.when, tuple([_scope_look(scope, snapshot.when) for scope in scopes]),
            snapshot.items if asked.show_keys else tuple(map(_without_key, snapshot.items)), snapshot.in_flight,
            failures if asked.show_messages else tuple([replace(one, message="") for one in failures]),
            snapshot.stuck, snapshot.evidence,
        )  # fmt: skip

    def _present(self, scopes: list[tuple[StepSnapshot, ...]], in_turns: Pauses) -> _Present:
        idle = [id(steps) for steps in scopes if id(steps) in self._before]
        if idle != self._idle:
            self._idle, self._rest = idle, _Present(in_turns(step for one in idle for step in self._before[one]))
        moved = [steps for steps in scopes if id(steps) not in self._before]
        self._before = {id(steps): steps for steps in scopes}
        return _Present(in_turns(step for steps in moved for step in steps), self._rest) if moved else self._rest


def _work_of_scope(did: NodeWork, now: ActorStatistics, before: ActorStatistics) -> NodeWork:
    """Return the work of a node in one scope, from its work in all scopes and its counters in this scope."""
    completed, failed = now.completed - before.completed, now.failed - before.failed
    return did._replace(runs_on="", completed=completed, failed=failed, busy_share=None)


def _without_key(item: ItemLook) -> ItemLook:
    digits = blake2b(item.key.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return replace(item, key=digits) if item.key else item


def _scope_look(scope: ScopeSnapshot, now: float) -> ScopeLook:
    admitted, most = scope.admitted or (None, None)
    done, total, begun = scope.progress or (None, None, 0)
    left = (now - scope.opened) * (total - done) / (done - begun) if done and total and done > begun else None
    cuts = scope.cuts or Cuts("")
    digests, names = zip(*scope.graphs, strict=True) if scope.graphs else ((), ())
    return ScopeLook(
        scope.id, ", ".join(names), scope.kind, scope.opened, digests, admitted, most,
        max(0.0, now - cuts.newest) if cuts.made else None, cuts.bytes, cuts.asked, cuts.reached, cuts.made, done,
        total, left,
    )  # fmt: skip


def _look_of(name: Name, present: _Present, did: NodeWork, holds: StepContents, shared: str) -> NodeLook:
    limit, last = present.limit_of(name), present.last.get(name)
    share = did.busy_share
    if share is not None and limit is not None:
        share = min(share, 1.0)  # the time of an item counts when it leaves, so it may exceed the time between looks
    runs_on, counts = did.runs_on, (did.completed, did.failed)
    if last is None:
        found = NodeLook(*name, runs_on, *counts, 0, 0, share, 0, 0, 0, limit)
    else:
        now = present.totals[name]
        found = NodeLook(
            *name, runs_on or last.runs_on, *counts, now.completed, now.failed, share, now.inbox.depth,
            now.inbox.capacity, holds.working if shared else max(0, now.in_flight - holds.blocked), limit, now.figures,
            now.outage, last.drawing, last.step, now.retried, now.hedged, now.failed_over, blocked=holds.blocked,
            waits=now.inbox.waiting_putters,
        )  # fmt: skip
        if now.cache is not None:
            found.cache_hits, found.cache_misses = now.cache.hits, now.cache.misses
        if holds.capacity:
            found.buffer_depth, found.buffer_capacity, found.values = holds.buffered, holds.capacity, holds.values
    found.shared, found.device_share = shared, did.device_share
    found.p50, found.p99, found.timed = did.p50, did.p99, did.timed
    return found


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


def look_table(look: LiveSnapshot) -> Table:
    """Return the table that shows a look."""
    over = "" if look.seconds is None else f", over {duration(look.seconds)}"
    outages = tuple(("outage", node.outage) for node in look.nodes if node.outage)
    facts = (
        ("process", f"{look.process}{over}"), ("limits", _limits(look)), *map(stuck_line, look.stuck), *outages,
        *[(scope.kind, f"{scope.graph}: {words}") for scope in look.scopes if (words := scope.words())],
        *look.lines,
    )  # fmt: skip
    ordered = [look.nodes[at] for at in by_graph([node.graph for node in look.nodes])]
    rows = ((node.graph, _row(look, node), node.figures) for node in ordered)
    return table_with_figures(facts, _COLUMNS, rows, "" if look.nodes else "no nodes yet")


def stuck_line(loop: StuckLoop) -> tuple[str, str]:
    """Return the label and the text of a table about an event loop that does not answer."""
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
        busy_words(node) if look.seconds else UNKNOWN,
        count(node.total_completed),
        count(node.total_failed) + (f" (+{node.failed:,})" if look.seconds and node.failed else ""),
    )


def busy_words(node: NodeLook) -> str:
    """Return the share of the time for which the places of a node were taken, in words."""
    if node.busy_share is None:
        return UNKNOWN
    return f"{node.busy_share:.0%}" if node.limit is not None else f"{significant(node.busy_share)} at once"


def _is_limit(look: LiveSnapshot, node: NodeLook) -> bool:
    return look.verdict is not None and (look.verdict.graph, look.verdict.node) == (node.graph, node.node)
