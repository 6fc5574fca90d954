"""Monitor: snapshots of all scopes of the process, and the work of their nodes from one snapshot to the next."""

import os
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nsmallest
from time import perf_counter, time
from typing import Final, NamedTuple, TypeAlias

from ..telemetry import logs, observation
from ..telemetry.observation import Durations, Host, ItemLook, ScopeSnapshot, StepContents, told
from .limits import Verdict
from .recording import Profile
from .sums import Sums
from .timeline import TimelineRecorder
from .watching import OpenScopes, StuckLoop, settled, snapshot_of


class NodeWork(NamedTuple):
    """The work of a node since the snapshot before, over all scopes of its graph.

    Args:
        runs_on: where it runs, as in its snapshot; empty if it did no work.
        completed: how many items it finished with a result.
        failed: how many items ended here with an error.
        busy_share: the share of the time for which its places were taken; None if unknown.
        device_share: the share of its busy time for which a device computed for it; None if unknown.
        p50: the median time of its executions in the last minute, in seconds; None if none was timed.
        p99: the 99th percentile of these times; None if fewer than 20 executions were timed.
        timed: how many timed executions `p50` and `p99` rest on.
    """

    runs_on: str = ""
    completed: int = 0
    failed: int = 0
    busy_share: float | None = 0.0
    device_share: float | None = None
    p50: float | None = None
    p99: float | None = None
    timed: int = 0


@dataclass(frozen=True, slots=True)
class FailureLook:
    """Items that have failed in one node with one class of errors, among the newest failures of the process.

    Attributes:
        graph: the name of the graph.
        node: the name of the node, as drawn; empty if no node has raised the error.
        type: the class of the error.
        count: how many of these items there are.
        last: when the last of these items failed, in seconds since 1970.
        message: the text of the last error, which may hold values of the item; empty unless asked for.
    """

    graph: str
    node: str
    type: str
    count: int
    last: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All scopes of the process at one moment: runs, streams and deployments.

    Attributes:
        process: the id of the process.
        scopes: the scopes that are open.
        lately: a profile of the time since the snapshot before, without a timeline; scopes that have ended meanwhile
            count, too. None for the first snapshot.
        lines: pairs of a label and a text that belong to no node, such as the consumers of the process.
        when: when the snapshot was taken, in seconds since 1970.
        items: the oldest 50 items in flight, the oldest first.
        in_flight: how many items are in flight.
        failures: the newest failures of the process, by node and class, the newest first.
        stuck: the event loops that have not answered for a second.
        verdict: the verdict of `lately`; a new verdict only once two snapshots in a row agree on the limit. None if no
            item was in a node since the snapshot before.
        evidence: sentences about event loops, the GIL, admission and the windows of streams.
        contents: the contents of each step that holds items, by the key of its snapshot.
        work: the work of nodes since the snapshot before, and how long their executions took, by graph and name.
    """

    process: int
    scopes: tuple[ScopeSnapshot, ...]
    lately: Profile | None = None
    lines: tuple[tuple[str, str], ...] = field(default_factory=told)
    when: float = field(default_factory=time)
    items: tuple[ItemLook, ...] = ()
    in_flight: int = 0
    failures: tuple[FailureLook, ...] = ()
    stuck: tuple[StuckLoop, ...] = ()
    verdict: Verdict | None = None
    evidence: tuple[str, ...] = ()
    contents: Mapping[Hashable, StepContents] = field(default_factory=dict[Hashable, StepContents])
    work: Mapping[tuple[str, str], NodeWork] = field(default_factory=dict[tuple[str, str], NodeWork])


def snapshot() -> Snapshot:
    """Take a snapshot of all scopes of this process, of all Engines in all threads; it waits for no event loop.

    Returns:
        The snapshot. A `Monitor` also tells what happens between two snapshots.
    """
    hosts = settled(lambda: observation.hosts)
    scopes = [snapshot_of(scope) for host in hosts for scope in settled(host.open_scopes)]
    return Snapshot(os.getpid(), tuple(scopes))


def failures() -> tuple[FailureLook, ...]:
    """Return the newest failures of the process, by node and class, the newest first."""
    found: dict[tuple[str, str, str], FailureLook] = {}
    for graph, node, kind, text, when in settled(lambda: logs.failures):
        before = found.pop((graph, node, kind), None)  # taken out and added again, so that the newest comes last
        count = 1 if before is None else before.count + 1
        found[graph, node, kind] = FailureLook(graph, node, kind, count, when, str(text))
    return tuple(reversed(found.values()))


_MOST_ITEMS: Final = 50
_seen: dict[int, float] = {}  # when each item in flight was first seen, by any monitor


def _items(hosts: Iterable[Host], now: float, matching: str) -> tuple[tuple[ItemLook, ...], int]:
    """Return the oldest items in flight, and how many items are in flight.

    Args:
        hosts: the Engines.
        now: the time of `perf_counter`.
        matching: as for `Monitor.snapshot`.
    """
    found = [(host, settled(host.frames_in_flight)) for host in hosts]
    ages = {item.identity: _seen.get(item.identity, now) for _, items in found for item in items}
    _seen.update(ages)
    for gone in settled(lambda: [one for one in _seen if one not in ages]):
        _seen.pop(gone, None)
    looks: list[ItemLook] = []
    for host, items in found:
        first = items if matching else nsmallest(_MOST_ITEMS, items, key=lambda one: (ages[one.identity], one.item))
        aged = {one: now - ages[one.identity] for one in first}
        looks += settled(partial(host.looked_at, aged))
    if matching:
        looks = [one for one in looks if any(matching in text for text in (one.graph, one.node, one.state, one.key))]
    oldest = nsmallest(_MOST_ITEMS, looks, key=lambda one: (-one.age, one.item))
    return tuple(oldest), len(looks) if matching else len(ages)


def _contents(hosts: Iterable[Host]) -> dict[Hashable, StepContents]:
    found: dict[Hashable, StepContents] = {}
    for key, held in [one for host in hosts for one in settled(host.contents)]:
        found[key] = found[key, 0] = held  # the first function of a chain has the key of the actor, and 0
    return found


_MINUTE: Final = 60.0
_PARTS: Final = 6
# With fewer durations, the 99th percentile is unknown.
_LEAST_FOR_P99: Final = 20


class LastMinute:
    """The durations of executions in the last minute, for many nodes, in parts of ten seconds."""

    def __init__(self) -> None:
        self._parts: deque[tuple[float, dict[tuple[str, str], Durations]]] = deque()
        self._all: dict[tuple[str, str], Durations] = {}

    def add(self, now: float, durations: Iterable[tuple[tuple[str, str], Durations]]) -> None:
        """Add the durations since the last call, and remove durations older than a minute.

        Args:
            now: the time, in seconds.
            durations: pairs of the graph and name of a node, and its durations.
        """
        if not self._parts or now - self._parts[-1][0] >= _MINUTE / _PARTS:
            self._parts.append((now, {}))
        newest = self._parts[-1][1]
        for key, added in durations:
            if added.count:
                newest.setdefault(key, Durations()).merge(added)
                self._all.setdefault(key, Durations()).merge(added)
        while now - self._parts[0][0] >= _MINUTE:
            for key, gone in self._parts.popleft()[1].items():
                left = self._all.pop(key).since(gone)
                if left.count:
                    self._all[key] = left

    def latencies(self) -> dict[tuple[str, str], tuple[float | None, float | None, int]]:
        """Return, by graph and node, the median and the 99th percentile of its durations, and how many there are.

        The times are in seconds; the 99th percentile is None with fewer than 20 durations.
        """
        return {node: _latency(every) for node, every in self._all.items()}


def _latency(of: Durations) -> tuple[float | None, float | None, int]:
    return of.quantile(0.5), of.quantile(0.99) if of.count >= _LEAST_FOR_P99 else None, round(of.count)


_Limit: TypeAlias = tuple[str | None, str | None, str]  # graph, node and kind


class Monitor:
    """Takes snapshots of all scopes of this process, each with a profile of the time since the snapshot before.

    Until it is closed, it gets a report of each scope that opens or closes, and `async def` nodes are timed, as by
    `profile()`. It looks at event loops ten times a second. It waits for no event loop, so it also sees a blocked
    event loop. One thread at a time may use it.

    Attributes:
        turns: the turns of the thread that takes snapshots, and of event loops.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._scopes = OpenScopes(is_live=True)
        self.turns = self._scopes.turns
        self._looked: float | None = None
        self._minute = LastMinute()
        self._verdict: Verdict | None = None
        # The limit since the last snapshot, and the limit that the verdict names.
        self._limits: tuple[_Limit | None, _Limit | None] = None, None
        observation.begin(self._scopes)

    def snapshot(self, matching: str = "") -> Snapshot:
        """Take a snapshot.

        Args:
            matching: a text; the snapshot has only items whose graph, node, state or key contains it.

        Returns:
            The snapshot; the first snapshot has no `lately`.
        """
        now, before = perf_counter(), self._looked
        hosts = settled(lambda: observation.hosts)
        scopes = tuple([one for host in hosts for _, one in self._scopes.look(host)])
        sums = self._scopes.taken()
        self._minute.add(now, [(name, node.timed.durations) for name, node in sums.nodes.items()])
        loop_seconds = self._scopes.loop_seconds(resets=True)
        core_wait_seconds = self._scopes.core_wait_seconds(resets=True)
        self._looked = now
        items, in_flight = _items(hosts, now, matching)
        lately: Profile | None = None
        told: tuple[str, ...] = ()
        if before is not None:
            # Without a timeline, a device counts as used while items are in its node.
            covered = {name: min(sums.nodes[name].held_seconds, now - before) for name in sums.on_devices()}
            found = self._scopes.evidence_of(sums, now - before, loop_seconds, core_wait_seconds)
            evidence = replace(found, covered_seconds=covered)
            lately, told = Profile(lambda: evidence, TimelineRecorder(now)), evidence.sentences()
            self.turns.pause()
            self._agree_on(lately.verdict if sums.nodes else None)
        self._scopes.look_anew()
        self.turns.pause()
        return Snapshot(
            self._process, scopes, lately, items=items, in_flight=in_flight, failures=failures(),
            stuck=self._scopes.stuck(), verdict=self._verdict, evidence=told, work=self._work(sums),
            contents=_contents(hosts),
        )  # fmt: skip

    def _work(self, sums: Sums) -> dict[tuple[str, str], NodeWork]:
        latencies = self._minute.latencies()
        found = {name: NodeWork("", 0, 0, 0.0, None, *latency) for name, latency in latencies.items()}
        for name, node in sums.nodes.items():
            counters, on_device = node.counters, node.timed.outside.compute_seconds
            found[name] = NodeWork(
                node.step.runs_on, counters.completed, counters.failed, sums.busy_share(node),
                node.share_of_busy(on_device), *latencies.get(name, (None, None, 0)),
            )  # fmt: skip
        return found

    def _agree_on(self, found: Verdict | None) -> None:
        """Take the verdict of the time since the last snapshot; show it once two verdicts in a row agree."""
        limit, before = None if found is None else (found.graph, found.node, found.limit), self._limits
        self._limits = (limit, before[1])
        if limit in before or before[1] is None:
            self._verdict, self._limits = found, (limit, limit)

    def drawing(self, digest: str) -> object:
        """Return the drawing of a graph of an open scope, an `engine.Drawing`.

        Args:
            digest: the digest of the drawing, as in the snapshots of steps and scopes.

        Returns:
            The drawing; None if no open scope has it.
        """
        scopes = [scope for host in settled(lambda: observation.hosts) for scope in settled(host.open_scopes)]
        found = [drawn[digest] for scope in scopes if digest in (drawn := scope.drawings())]
        return found[0][1] if found else None

    def close(self) -> None:
        """End the timing and the looks. A second call does nothing."""
        self.turns.stop()
        if self._scopes not in observation.running:
            return
        observation.end(self._scopes)
        if os.getpid() == self._process:  # in a process that was forked, a thread of the parent may hold the lock
            self._scopes.end()
