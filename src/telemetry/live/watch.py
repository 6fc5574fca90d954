"""Watch: what all nodes of this process do between two looks, as records and as a table."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final, NamedTuple

from ..counters import ActorStatistics, SavedCuts, total
from ..profiling import collectors
from ..profiling.limits import Verdict
from ..profiling.records import DeviceWork, Execution, Host, NodeReading, ProfiledScope, ProfiledStream
from ..profiling.sums import Evidence, Name, NodeSum, ReaderSum, Sums
from ..profiling.verdict import find_verdict
from ..profiling.watching import OpenScopes, settled, thread_seconds
from ..tables import UNKNOWN, Column, Table, by_graph, count, duration, of, significant


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
        busy_share: share of the time since the look before for which its places were busy with items that have left it
            since; for a node without a limit, the number of items in it at a time. None if it is not known.
        inbox_depth: items that wait in its inbox now.
        inbox_capacity: how many may wait there; None if unbounded.
        in_flight: items in it now.
        limit: how many may be in it; None if unlimited.
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


@dataclass(frozen=True, slots=True)
class Look:
    """What a process does, at one look.

    Attributes:
        process: its process id.
        seconds: how long ago the look before was; None if this is the first, which has no rates.
        nodes: the nodes of scopes that are open or have ended since the look before.
        verdict: what limits the throughput; None if no item has left a node since the look before.
    """

    process: int
    seconds: float | None
    nodes: tuple[NodeLook, ...]
    verdict: Verdict | None


def node_looks(sums: Sums, readings: Iterable[NodeReading]) -> tuple[NodeLook, ...]:
    """Return a record of each node; nodes of one graph stand together.

    Args:
        sums: what the nodes did since the look before.
        readings: the present counters of all nodes in open scopes.
    """
    found: dict[Name, list[NodeReading]] = {}
    for reading in readings:
        found.setdefault(reading.name, []).append(reading)
    names = dict.fromkeys((*found, *sums.nodes))  # also nodes whose scopes have ended meanwhile
    graphs = {graph: place for place, graph in enumerate(dict.fromkeys(graph for graph, _ in names))}
    return tuple(
        _look_of(name, found.get(name, []), sums.nodes.get(name), sums)
        for name in sorted(names, key=lambda name: graphs[name[0]])
    )


def _look_of(name: Name, readings: Sequence[NodeReading], node: NodeSum | None, sums: Sums) -> NodeLook:
    now = total(map(_in_its_places, readings)) if readings else None
    runs_on = readings[0].runs_on if node is None else node.reading.runs_on
    limit = None if now is None else now.concurrency
    share = 0.0 if node is None else sums.busy_share(node)
    if share is not None and limit is not None:
        share = min(share, 1.0)  # the whole time of an item counts when it leaves, so it may be more than passed
    return NodeLook(
        *name,
        runs_on,
        0 if node is None else node.counters.completed,
        0 if node is None else node.counters.failed,
        0 if now is None else now.completed,
        0 if now is None else now.failed,
        share,
        0 if now is None else now.inbox.depth,
        0 if now is None else now.inbox.capacity,
        0 if now is None else now.in_flight,
        limit,
    )


def _in_its_places(reading: NodeReading) -> ActorStatistics:
    """Return the counters of a node with the limit that bounds it: its own, or that of the stream or call around it."""
    if not reading.places:
        return replace(reading.counters, places=hash(reading.key), concurrency=None)
    own = reading.places[0]
    return replace(reading.counters, places=hash(own.key), concurrency=own.limit)


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


def look_table(look: Look, max_rows: int | None = None) -> Table:
    """Return the table that shows a look.

    Args:
        look: the look.
        max_rows: how many nodes there is room for; None for all.
    """
    over = "" if look.seconds is None else f", over {duration(look.seconds)}"
    facts = (("process", f"{look.process}{over}"), ("limits", _limits(look)))
    shown = _most_telling(look, max_rows)
    remark = "" if look.nodes else "no nodes yet"
    if len(shown) < len(look.nodes):
        remark = f"and {count(len(look.nodes) - len(shown))} nodes that do less; --json has all of them"
    ordered = [shown[at] for at in by_graph([node.graph for node in shown])]
    headings = tuple(node.graph for node in ordered)
    return Table(facts, _COLUMNS, tuple(_row(look, node) for node in ordered), remark, headings)


def _limits(look: Look) -> str:
    if look.seconds is None:
        return UNKNOWN
    return "nothing has left a node meanwhile" if look.verdict is None else str(look.verdict)


def _row(look: Look, node: NodeLook) -> tuple[str, ...]:
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


def _is_limit(look: Look, node: NodeLook) -> bool:
    return look.verdict is not None and (look.verdict.graph, look.verdict.node) == (node.graph, node.node)


def _most_telling(look: Look, max_rows: int | None) -> Sequence[NodeLook]:
    """Return the nodes to show, in their order: the one that limits, and those with most items."""

    def weight(index: int) -> tuple[bool, int, int, int]:
        node = look.nodes[index]
        return _is_limit(look, node), node.inbox_depth, node.in_flight, node.completed + node.failed

    if max_rows is None or len(look.nodes) <= max_rows:
        return look.nodes
    chosen = sorted(range(len(look.nodes)), key=weight, reverse=True)[: max(max_rows, 1)]
    return [look.nodes[index] for index in sorted(chosen)]


class _ReaderSince(NamedTuple):
    """A stream at the look before, or when it was opened."""

    seconds: float
    waited_seconds: float


class Watch:
    """Looks at all nodes of the process, again and again.

    It does not need the event loops, so it also sees one that is blocked. Scopes that open and close between two looks
    count, too: every thread reports here the scopes that it opens and closes.
    """

    def __init__(self) -> None:
        self._scopes = OpenScopes()
        self._lock = self._scopes.lock
        self._readers: dict[ProfiledStream, _ReaderSince] = {}
        self._read: dict[str, tuple[float, float]] = {}
        self._threads: dict[int, float] = {}
        self._looked: float | None = None
        collectors.begin(self)

    def look(self) -> Look:
        """Return what the nodes have done since the last look, and what they do now."""
        now, before = perf_counter(), self._looked
        hosts = settled(lambda: collectors.hosts)
        nodes = [reading for host in hosts for _, readings in self._scopes.look(host) for reading in readings]
        self._look_at_readers(hosts)
        with self._lock:
            sums = self._scopes.taken()
            read, self._read = self._read, {}
        self._looked = now
        seconds = None if before is None else now - before
        readers = tuple(ReaderSum(name, *times) for name, times in read.items())
        evidence = Evidence(sums, seconds or 0.0, self._loop_seconds(hosts), readers)
        verdict = find_verdict(evidence) if seconds and sums.nodes else None
        return Look(os.getpid(), seconds, node_looks(sums, nodes), verdict)

    def end(self) -> None:
        """End the watch."""
        collectors.end(self)
        self._scopes.end()
        with self._lock:
            self._readers.clear()

    def scope_opened(self, scope: ProfiledScope) -> None:
        """Count the work of a new scope from zero."""
        self._scopes.opened(scope)

    def scope_closed(self, scope: ProfiledScope) -> None:
        """Read the counters of a scope for the last time."""
        self._scopes.closed(scope)

    def scope_vanished(self, scope: ProfiledScope) -> None:
        """Read the counters of a scope that is being collected as garbage; in any thread, at any moment."""
        self._scopes.vanished(scope)

    def reader_opened(self, reader: ProfiledStream) -> None:
        """Count from zero how long the reader of a new stream waits."""
        with self._lock:
            self._readers[reader] = _ReaderSince(perf_counter(), reader.reader_wait_seconds)

    def reader_closed(self, reader: ProfiledStream) -> None:
        """Read for the last time how long the reader of a stream has waited."""
        with self._lock:
            since = self._readers.pop(reader, None)
            if since is not None:
                self._add_reader(reader, since, perf_counter())

    def executed(self, graph: str, node: str, executions: Sequence[Execution]) -> None:
        """Do nothing: a look needs no single executions."""

    def depth_changed(self, graph: str, node: str, points: Sequence[tuple[float, int]]) -> None:
        """Do nothing: a look needs only the present depth of an inbox."""

    def device_worked(self, work: DeviceWork) -> None:
        """Do nothing: a look needs no single pieces of work of a device."""

    def cuts_saved(self, graph: str, cuts: SavedCuts) -> None:
        """Do nothing: a look needs no cuts."""

    def _look_at_readers(self, hosts: Iterable[Host]) -> None:
        readers = [reader for host in hosts for reader in settled(host.open_readers)]
        with self._lock:
            now = perf_counter()
            for reader, since in self._readers.items():
                self._add_reader(reader, since, now)
            self._readers = {reader: _ReaderSince(now, reader.reader_wait_seconds) for reader in readers}

    def _add_reader(self, reader: ProfiledStream, since: _ReaderSince, now: float) -> None:
        [name] = settled(lambda: [reader.name])
        open_seconds, waited_seconds = self._read.get(name, (0.0, 0.0))
        waited = reader.reader_wait_seconds - since.waited_seconds
        self._read[name] = open_seconds + now - since.seconds, waited_seconds + waited

    def _loop_seconds(self, hosts: Iterable[Host]) -> float | None:
        """Return how long the busiest of the event loops' threads has run since the last look; None if unknown."""
        before, self._threads = self._threads, {}
        for thread in {host.loop_thread for host in hosts}:
            ran = None if thread is None else thread_seconds(thread)
            if thread is not None and ran is not None:
                self._threads[thread] = ran
        return max((ran - before[thread] for thread, ran in self._threads.items() if thread in before), default=None)
