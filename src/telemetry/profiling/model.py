"""Model: a profile as a network of limits, and what becomes of it when a node changes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .durations import NO_DEPTH
from .evidence import CriticalPath, Evidence, critical_paths
from .limits import holding, limits
from .loop_watch import WindowSum
from .sums import Name, NodeSum, Sums

# Model: a profile as a network of limits, and what becomes of it when a node changes.
#
# Operational analysis (Denning and Buzen, 1978): of the time that is observed, each resource is used for a share, which
# is the throughput times what an item demands of it (the utilisation law). No share exceeds 1, so whichever is used
# most bounds the throughput: with `u` the largest share, at most 1/u times as much can go through. What may be in
# flight is such a resource as well, by Little's law (1961): throughput times how long an item stays.
#
# No waits are modelled, only what they are for. So the bound before a change and the one after it are compared, and the
# throughput that was measured is expected to grow as they do: what was lost below the bound before is lost after it.


@dataclass(frozen=True)
class Change:
    """A change of one node.

    Attributes:
        name: which.
        speedup: how many times as fast its handler becomes.
        concurrency: how many items it may have at a time; None for as many as now.
    """

    name: Name
    speedup: float
    concurrency: int | None = None


@dataclass(frozen=True)
class Model:
    """A profile without its waits.

    Attributes:
        evidence: the numbers, without the time that handlers waited for threads, processes and the event loop.
        callers: who calls, if there is no stream.
    """

    evidence: Evidence
    callers: "Callers | None"

    @classmethod
    def of(cls, evidence: Evidence) -> "Model":
        """Return the model of a profile."""
        plain = _without_turns(without_pool_waits(evidence))
        return cls(plain, None if evidence.readers else _callers(plain))

    def bound(self) -> float:
        """Return how much is used of what is used most: the throughput that was measured, over the one that may be."""
        used = [limit.used for limit in limits(self.evidence)]
        if self.callers is not None:
            used.append(self.callers.used(self.evidence))
        return max(used, default=0.0)

    def changed(self, change: Change) -> "Model":
        """Return what would have been measured if a node had been another, and as many items had come."""
        evidence, name, factor = self.evidence, change.name, 1 / change.speedup
        node = evidence.sums.nodes[name]
        saved = (node.busy_seconds or 0.0) * (1 - factor)
        sums = _scaled(evidence.sums, {name: factor})
        if change.concurrency is not None:
            for group in sums.own_places(sums.nodes[name]):
                group.place_seconds *= change.concurrency / group.limit
                group.limit = change.concurrency
        # An async handler that only waits keeps nobody from the loop: what is left of it is what all others need.
        freed = saved if node.reading.holds_loop or holding(evidence) == name else 0.0
        before, after = critical_paths(evidence.sums.nodes), critical_paths(sums.nodes)
        readers = tuple(
            reader
            if reader.window is None
            else replace(reader, window=_order_of(reader.window, before.get(reader.name), after.get(reader.name)))
            for reader in evidence.readers
        )
        covered = dict(evidence.covered_seconds)
        if name in covered:
            covered[name] *= factor
        return replace(
            self,
            evidence=replace(
                evidence,
                sums=sums,
                loop_cpu_seconds=max(0.0, (evidence.loop_cpu_seconds or 0.0) - freed),
                loop_late_share=max(0.0, evidence.loop_late_share - freed / evidence.elapsed_seconds),
                readers=readers,
                covered_seconds=covered,
            ),
        )

    def sped_up(self, factor: float) -> "Model":
        """Return what would have been measured if the same items had come in a part of the time."""
        evidence, sums = self.evidence, self.evidence.sums.copy()
        for group in sums.groups.values():
            group.place_seconds /= factor
        for node in sums.nodes.values():
            # Nobody knows how full inboxes would have been.
            node.timed, node.queue_seconds = replace(node.timed, queue=NO_DEPTH, blocked_seconds=0.0), 0.0
        readers = tuple(
            replace(
                reader,
                open_seconds=reader.open_seconds / factor,
                waited_seconds=max(0.0, reader.waited_seconds - reader.open_seconds * (1 - 1 / factor)),
                window=None
                if reader.window is None
                else replace(reader.window, seconds=reader.window.seconds / factor),
            )
            for reader in evidence.readers
        )
        faster = replace(
            evidence,
            sums=sums,
            elapsed_seconds=evidence.elapsed_seconds / factor,
            readers=readers,
            loop_late_share=min(1.0, evidence.loop_late_share * factor),
        )
        return replace(self, evidence=faster)


@dataclass(frozen=True)
class Callers:
    """Who calls a graph, each of them one call after the other.

    Attributes:
        graph: name of the graph.
        count: how many there are.
        pause_seconds: between the end of a call and the next one.
    """

    graph: str
    count: int
    pause_seconds: float

    def used(self, evidence: Evidence) -> float:
        """Return how much of their time they need at least, by Little's law."""
        path = critical_paths(evidence.sums.nodes)[self.graph]
        per_second = evidence.sums.items(self.graph) / evidence.elapsed_seconds
        return min(per_second * (self.pause_seconds + path.seconds) / self.count, 1.0)


def _callers(evidence: Evidence) -> Callers | None:
    """Return those who call the graph in which most calls are at a time; None if none was called."""
    found: list[tuple[float, Callers]] = []
    for graph, path in critical_paths(evidence.sums.nodes).items():
        items = evidence.sums.items(graph)
        if not items:
            continue
        nodes = (evidence.sums.nodes[graph, node] for node in path.nodes)
        waited = sum((node.put_wait_seconds + node.timed.queue.waited_seconds) / items for node in nodes)
        stay = path.seconds + waited
        at_a_time = stay * items / evidence.elapsed_seconds
        count = max(1, math.ceil(at_a_time - 0.05))  # what is measured is never exact
        pause = max(0.0, count * evidence.elapsed_seconds / items - stay)
        found.append((at_a_time, Callers(graph, count, pause)))
    return max(found, key=lambda each: each[0], default=(0.0, None))[1]


def without_pool_waits(evidence: Evidence) -> Evidence:
    """Return evidence without what handlers waited for threads and processes: it is part of what was measured."""
    factors: dict[Name, float] = {}
    for group in evidence.sums.groups.values():
        total = sum(group.busy.values())
        if group.is_pool and total > group.place_seconds > 0:
            factors |= dict.fromkeys(group.busy, group.place_seconds / total)
    return replace(evidence, sums=_scaled(evidence.sums, factors))


def _without_turns(evidence: Evidence) -> Evidence:
    """Return evidence without what handlers waited for their turn on the event loop, once for each item."""
    holder = holding(evidence)
    factors = {
        name: _without_turn(node, evidence.loop_delay_seconds)
        for name, node in evidence.sums.nodes.items()
        if node.mean_seconds and name != holder and not node.reading.holds_loop and not node.reading.gathers
    }
    return replace(evidence, sums=_scaled(evidence.sums, factors))


def _without_turn(node: NodeSum, delay_seconds: float) -> float:
    """Return how much of the time of a handler is left without one wait for its turn on the loop."""
    least_seconds = min(node.timed.durations.quantile(0.0) or 0.0, node.mean_seconds)
    return max(node.mean_seconds - delay_seconds, least_seconds) / node.mean_seconds


def _scaled(sums: Sums, factors: Mapping[Name, float]) -> Sums:
    """Return sums in which handlers take some multiples of their time."""
    scaled = sums.copy()
    for name, factor in factors.items():
        node = scaled.nodes[name]
        if node.busy_seconds is not None:
            node.counters = replace(node.counters, busy_seconds=node.busy_seconds * factor)
        for key in node.places:
            group = scaled.groups[key]
            if name in group.busy:
                group.busy[name] *= factor
    return scaled


def _order_of(window: WindowSum, before: CriticalPath | None, after: CriticalPath | None) -> WindowSum:
    """Return a stream whose items wait in their turn as much less as they take less."""
    if before is None or after is None or not before.seconds:
        return window
    return replace(window, behind_seconds=window.behind_seconds * after.seconds / before.seconds)
