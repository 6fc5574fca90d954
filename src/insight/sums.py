"""The sums of a profile, by graph and node, and the evidence that a verdict is based on."""

from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from sys import getswitchinterval
from typing import Final

from ..telemetry.observation import (
    ActorStatistics,
    Bound,
    Capacity,
    SavedSnapshots,
    ScopeSnapshot,
    StepSnapshot,
    TimedReading,
    WindowLook,
    changed,
    counted,
)
from ..telemetry.tables import milliseconds, significant
from ..telemetry.text import printable

Name = tuple[str, str]  # graph and node

# A holder of the GIL: a node that runs in threads, or whose work a thread enqueues on a device; the event loop; or
# another thread, by its name.
Holder = Name | str
EVENT_LOOP: Final = "the event loop"


@dataclass(frozen=True)
class GilUse:
    """Who uses the GIL, if the GIL limits; without holders otherwise.

    Attributes:
        held: for each holder, the share of the time for which it computed, and others had to wait.
        wait_seconds: how long a thread that asks for the GIL waits, on average.
    """

    held: Mapping[Holder, float] = field(default_factory=dict[Holder, float])
    wait_seconds: float = 0.0


@dataclass
class NodeSum:
    """One node, over all scopes.

    Attributes:
        step: the last snapshot of the node, which says where it runs, and which nodes wait for it.
        counters: the counters for the time of the profile.
        timed: the counters that only profiles keep.
        queue_seconds: for how long the node's inboxes were watched, summed over the inboxes.
        open_seconds: for how long the node's scopes were open, summed over the scopes.
        held_seconds: for how long items took the node's places, summed over items; items still in the node count, too.
        places: the keys of the groups whose places its items take.
        scale: in a model, the factor by which the times of its batches are multiplied.
    """

    step: StepSnapshot
    counters: ActorStatistics
    timed: TimedReading = field(default_factory=TimedReading)
    queue_seconds: float = 0.0
    open_seconds: float = 0.0
    held_seconds: float = 0.0
    places: dict[Hashable, None] = field(default_factory=dict[Hashable, None])
    scale: float = 1.0

    @property
    def name(self) -> Name:
        """The name of the graph, and the name of the node."""
        return self.step.name

    @property
    def ended(self) -> int:
        """How many items have left the node."""
        return self.counters.completed + self.counters.failed

    @property
    def busy_seconds(self) -> float | None:
        """The time in the node's handler, summed over items; None if the node is not timed."""
        return self.counters.busy_seconds

    def batch_seconds(self, delay_seconds: float) -> float:
        """Return how long the node's batches take at least, if all are full; 0 for a node without batches.

        Args:
            delay_seconds: how long each batch has waited for the event loop, as an estimate.
        """
        if not self.step.holds:
            return 0.0
        least = max(0.0, (self.timed.durations.quantile(0.0) or 0.0) - delay_seconds) * self.scale
        return self.ended / self.step.holds * least

    @property
    def mean_seconds(self) -> float:
        """The mean time of an item in the handler; 0 if there were no items, or if the node is not timed."""
        return (self.busy_seconds or 0.0) / max(1, self.ended)

    @property
    def spread_seconds(self) -> float:
        """How much longer than the median item the slowest items take, in seconds."""
        return (self.timed.durations.quantile(1.0) or 0.0) - (self.timed.durations.quantile(0.5) or 0.0)

    @property
    def occupancy(self) -> float:
        """The share of the time for which items waited in its inbox."""
        return self.timed.queue.occupied_seconds / self.queue_seconds if self.queue_seconds else 0.0

    @property
    def inbox_full_share(self) -> float:
        """The share of the time for which its inbox was full."""
        return self.timed.queue.full_seconds / self.queue_seconds if self.queue_seconds else 0.0

    def share_of_busy(self, seconds: float) -> float | None:
        """Return the share of the node's busy time that some seconds are, from 0 to 1; None if it is unknown or 0.

        If a node hands on a result before its device has computed it, the device's work counts as busy time as well.
        """
        total = max(self.busy_seconds or 0.0, self.timed.outside.device_seconds)
        return None if self.busy_seconds is None or not total else seconds / total


@dataclass
class Group:
    """Places that some nodes share, over all scopes.

    Attributes:
        bound: the option or rule that sets the number of places.
        limit: how many places there are in one scope.
        is_pool: whether they are the places of a pool, and not the nodes' own places.
        busy: for each of the nodes, for how long its items took places.
        place_seconds: the number of places, times the seconds for which they existed.
        is_of_runs: whether each run of a `map_each` over lists has `limit` places.
        at: "file:line" of the `map_each` that bounds them; empty for other places.
    """

    bound: Bound
    limit: int
    is_pool: bool
    busy: dict[Name, float] = field(default_factory=dict[Name, float])
    place_seconds: float = 0.0
    is_of_runs: bool = False
    at: str = ""
    began: float | None = None  # for places that outlive scopes: overlapping scopes share them, so they count once

    @property
    def utilisation(self) -> float:
        """The used share of the place-seconds, from 0 to 1."""
        return min(sum(self.busy.values()) / self.place_seconds, 1.0) if self.place_seconds else 0.0


# The bounds of places that belong to a pool of the Engine.
POOLS: Final = "threads", "processes"


class Sums:
    """Adds up what scopes did.

    Attributes:
        nodes: the nodes, by graph and name; nodes of one graph in topological order.
        groups: the places that nodes share, by their keys.
        readers: the readers of streams, by the names of the streams.
        compiled_again: for each program that was compiled again, its node, and the causes with their remedies.
        snapshots: the costs of snapshots of calls with `checkpoint=`, by graph.
    """

    def __init__(self) -> None:
        self.nodes: dict[Name, NodeSum] = {}
        self.groups: dict[Hashable, Group] = {}
        self.readers: dict[str, ReaderSum] = {}
        self.compiled_again: list[tuple[str, tuple[tuple[str, str], ...]]] = []
        self.snapshots: dict[str, SavedSnapshots] = {}
        self._paths: dict[str, CriticalPath] | None = None
        # For nodes that share places with other scopes: for how long items that have left held places, for how long
        # items were seen there, and from when until when.
        self._held: dict[tuple[Name, Hashable], tuple[float, float, float, float]] = {}

    @property
    def critical_paths(self) -> "dict[str, CriticalPath]":
        """The critical path of each graph that ran."""
        if self._paths is None:
            self._paths = _critical_paths(self.nodes)
        return self._paths

    def add(self, before: ScopeSnapshot, after: ScopeSnapshot) -> None:
        """Add the work of a scope between two snapshots; if its nodes had no items between them, add nothing."""
        self._paths = None
        earlier_steps = {step.key: step for step in before.steps}
        began, ended = before.seconds, after.seconds
        if not any(
            step.counters.in_flight or _ended(step) > _ended(earlier_steps.get(step.key)) for step in after.steps
        ):
            return
        sharing: dict[Hashable, set[Name]] = {}
        for step in after.steps:
            for places in step.places:
                sharing.setdefault(places.key, set()).add(step.name)
        known: set[Hashable] = set()
        opened: set[Name] = set()
        for step in after.steps:
            name = step.name
            earlier = _comparable(earlier_steps.get(step.key), step)
            done = counted(step.counters, None if earlier is None else earlier.counters)
            node = self.nodes.get(name)
            if node is None:
                node = self.nodes[name] = NodeSum(step, done)
            else:
                node.step, node.counters = step, ActorStatistics.total((node.counters, done))
            if step.timed is not None:
                node.queue_seconds += ended - began
                node.timed = node.timed.plus(step.timed, None if earlier is None else earlier.timed)
            if name not in opened:
                opened.add(name)
                node.open_seconds += ended - began
            sharers = max([len(sharing[own.key]) for own in step.places[:1]], default=1)
            held = _held_seconds(done, step, earlier, ended - began, sharers)
            held_seconds = self._held_in_scope(step, *held, began, ended)
            node.held_seconds += held_seconds
            for index, places in enumerate(step.places):
                key = places.key if places.is_shared else (places.bound, frozenset(sharing[places.key]))
                is_pool = index > 0 and places.bound in POOLS
                group = self.groups.setdefault(key, Group(places.bound, places.limit, is_pool, at=places.at))
                node.places[key] = None
                group.busy[name] = group.busy.get(name, 0.0) + held_seconds
                if places.key not in known:
                    known.add(places.key)
                    was = () if earlier is None else [one for one in earlier.places if one.key == places.key]
                    _add_time(group, places, began, ended, next(iter(was), None))

    def _held_in_scope(self, step: StepSnapshot, left: float, held: float, began: float, ended: float) -> float:
        """Add the time for which items of a scope held places of a node, and return by how much the sum has grown.

        If several scopes share the places, the looks at each scope see the items of all scopes. So items that are still
        in the node count once for the time that the scopes have in common.

        Args:
            step: the node.
            left: for how long items that have left the node in this scope held places, in seconds.
            held: for how long items held places, as the looks at this scope have seen it.
            began: when the time that is added begins, in seconds of `perf_counter`.
            ended: when it ends.
        """
        own = [one for one in step.places if one.bound not in POOLS]
        shared = next((key for one in own if (key := one.key if one.is_shared else one.around) is not None), None)
        if shared is None:
            return held
        all_left, seen, since, until = self._held.get((step.name, shared), (0.0, 0.0, began, began))
        before, common = max(all_left, seen), max(0.0, min(ended, until) - max(began, since))
        seen += max(0.0, held - (seen * common / (until - since) if common else 0.0))
        all_left += min(left, held)
        self._held[step.name, shared] = all_left, seen, min(since, began), max(until, ended)
        return max(all_left, seen) - before

    def copy(self) -> "Sums":
        """Return a copy, to which scopes can be added."""
        twin = copy(self)
        twin._held, twin.readers, twin.snapshots = dict(self._held), dict(self.readers), dict(self.snapshots)
        twin.compiled_again = [*self.compiled_again]
        twin.nodes = {name: changed(node, places=dict(node.places)) for name, node in self.nodes.items()}
        twin.groups = {key: changed(group, busy=dict(group.busy)) for key, group in self.groups.items()}
        return twin

    def with_changes(
        self, nodes: Mapping[Name, NodeSum] | None = None, groups: Mapping[Hashable, Group] | None = None
    ) -> "Sums":
        """Return sums in which some nodes and groups are replaced; no scopes can be added to the returned sums."""
        twin = copy(self)
        twin.groups = {**self.groups, **(groups or {})}
        if nodes:
            twin.nodes, twin._paths = {**self.nodes, **nodes}, None
        return twin

    def items(self, graph: str) -> int:
        """Return how many items went through a graph: the most items that ended in any of its nodes."""
        return max((node.ended for name, node in self.nodes.items() if name[0] == graph), default=0)

    def busy_share(self, node: NodeSum) -> float | None:
        """Return the share of the time for which a node's own places were busy; None if the node is not timed."""
        groups = [(group.busy[node.step.name], group.place_seconds) for group in self.own_places(node)]
        shares = [held / seconds for held, seconds in groups or [(node.held_seconds, node.open_seconds)] if seconds]
        return max(shares, default=None) if node.busy_seconds is not None else None

    def on_devices(self) -> set[Name]:
        """Return the nodes whose busy time counts as work of a device.

        An actor that calls functions on a device does other work as well, except while such a function is compiled. So
        it counts only if compilations take most of its time.
        """
        return {
            name
            for name, node in self.nodes.items()
            if node.timed.outside.device_seconds
            and (node.step.gathers or node.timed.outside.compile_seconds > (node.busy_seconds or 0.0) / 2)
        }

    def own_places(self, node: NodeSum) -> list[Group]:
        """Return the groups of a node's own places, without groups of a pool."""
        return [group for group in map(self.groups.__getitem__, node.places) if not group.is_pool]


def _ended(step: StepSnapshot | None) -> int:
    return 0 if step is None else step.counters.completed + step.counters.failed


def _held_seconds(
    done: ActorStatistics, step: StepSnapshot, earlier: StepSnapshot | None, seconds: float, sharers: int
) -> tuple[float, float]:
    """Return for how long items took places of a node between two snapshots: items that have left it, and all items.

    The counters add the time of an item when the item leaves. An item that leaves counts for at most the time between
    the snapshots. For items that are still in the node, the looks at the event loop have seen how many there were; they
    have not seen handlers that hold the loop. Without such looks, the mean of the items in flight at the two snapshots
    counts.

    Args:
        done: the counts between the snapshots, and the items in flight at the later one.
        step: the later snapshot.
        earlier: the earlier snapshot; None if there is none.
        seconds: the time between the two snapshots.
        sharers: how many nodes share the places.
    """
    if done.busy_seconds is None:
        return 0.0, 0.0
    ended, before = done.completed + done.failed, 0 if earlier is None else earlier.counters.in_flight
    left = min(done.busy_seconds, ended * seconds)
    if not before and not done.in_flight:
        return left, left
    held, looked = (0.0, 0.0) if step.timed is None else step.timed.held
    if earlier is not None and earlier.timed is not None:
        held, looked = held - earlier.timed.held[0], looked - earlier.timed.held[1]
    if looked > _LEAST_LOOKED * seconds:
        taken = held / looked * seconds / sharers
        limit = step.places[0].limit * seconds if step.places else inf
        return left, taken if done.busy_seconds > max(left, limit) else max(left, taken)
    mean = (before + done.in_flight) / 2 * seconds / sharers
    return left, left if ended and done.busy_seconds <= left else mean


# The share of the time for which a node must have been looked at, for these looks to count.
_LEAST_LOOKED: Final = 0.5


def _comparable(before: StepSnapshot | None, now: StepSnapshot) -> StepSnapshot | None:
    """Return the earlier snapshot without counters that were reset since then, because earlier profiles have ended."""
    if before is None or before.timed is None or now.timed is None or before.timed.begin == now.timed.begin:
        return before
    busy_seconds = None if now.timed.counts_busy else before.counters.busy_seconds
    return before._replace(timed=None, counters=changed(before.counters, busy_seconds=busy_seconds))


def _add_time(group: Group, places: Capacity, began: float, ended: float, was: Capacity | None) -> None:
    group.limit = max(group.limit, places.limit)
    if not places.is_shared:
        group.is_of_runs = places.runs is not None
        runs = _runs_at_a_time(places, was, ended - began) if group.is_of_runs else 1.0
        group.place_seconds += places.limit * runs * (ended - began)
        return
    group.began = began if group.began is None else min(group.began, began)
    group.place_seconds = max(group.place_seconds, places.limit * (ended - group.began))


def _runs_at_a_time(now: Capacity, was: Capacity | None, elapsed_seconds: float) -> float:
    """Return how many runs of a `map_each` there were at a time, on average; at least one.

    The time of a run is known when the run ends. So the times of runs tell the average only if no run had begun before
    the first snapshot.
    """
    before, run_seconds = (was.runs or 0, was.run_seconds) if was is not None else (0, 0.0)
    average = (now.run_seconds - run_seconds) / elapsed_seconds if elapsed_seconds and not before else 0.0
    return max(1.0, before, now.runs or 0, average)


# The critical path of a graph is the chain of nodes that takes longest; each node of a chain waits for the node before.
# Nodes that run beside the critical path do not add to the time of a run. This is the critical path method of project
# planning (Kelley and Walker, 1959), with the mean time of each node.


@dataclass(frozen=True)
class CriticalPath:
    """The chain of nodes that takes longest in one run of a graph, without waits in queues. `str()` gives one line.

    Attributes:
        graph: the name of the graph, or of the body of control flow.
        nodes: the names of the nodes of the chain, in order.
        seconds: how long the whole chain takes in one run, on average.
    """

    graph: str
    nodes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return printable(f"{' → '.join(self.nodes)}: {milliseconds(self.seconds)} of each run of {self.graph}")


def _consumers_first(nodes: Mapping[Name, NodeSum]) -> list[Name]:
    order: dict[Name, None] = {}
    for first in nodes:
        stack = [(first, False)]
        while stack:
            name, is_done = stack.pop()
            if is_done:
                order[name] = None
            elif name in nodes and name not in order:
                stack.append((name, True))
                stack += [((name[0], reader), False) for reader in nodes[name].step.consumers]
    return list(order)


def _critical_paths(nodes: dict[Name, NodeSum]) -> dict[str, CriticalPath]:
    seconds: dict[Name, float] = {}
    following: dict[Name, Name] = {}  # for each node, the next node on the longest path that begins there
    begins: dict[str, Name] = {}
    for name in _consumers_first(nodes):  # a profile may have seen two plans of one graph, in which the order differs
        graph, rest = name[0], 0.0
        for consumer in nodes[name].step.consumers:
            reader = graph, consumer
            if (found := seconds.get(reader, -1.0)) > rest or (found >= 0 and name not in following):
                following[name], rest = reader, found
        seconds[name] = rest = rest + nodes[name].mean_seconds
        if graph not in begins or rest > seconds[begins[graph]]:
            begins[graph] = name
    paths: dict[str, CriticalPath] = {}
    for graph, name in begins.items():
        path: list[str] = []
        at: Name | None = name
        while at is not None:
            path.append(at[1])
            at = following.get(at)
        paths[graph] = CriticalPath(graph, tuple(path), seconds[name])
    return paths


@dataclass
class WindowSum:
    """The sum of looks at the window of a stream; each look counts for the time since the look before.

    Attributes:
        size: how many items may be in flight.
        ordered: whether the reader gets items in input order.
        seconds: the time that the looks stand for.
        in_flight_seconds: for how long items were in flight, summed over items.
        behind_seconds: for how long finished items waited for an item before them, summed over items.
        asking_seconds: for how long the stream waited for an item of its source.
        key_seconds: for how long items waited for earlier calls of their keys, summed over items.
        key: the key that most of these items waited for at the last look.
    """

    size: int
    ordered: bool
    seconds: float = 0.0
    in_flight_seconds: float = 0.0
    behind_seconds: float = 0.0
    asking_seconds: float = 0.0
    key_seconds: float = 0.0
    key: str = ""

    def add(self, look: WindowLook, seconds: float) -> None:
        """Add a look, which counts for some seconds."""
        self.size = max(self.size, look.size)
        self.ordered = look.ordered
        self.seconds += seconds
        self.in_flight_seconds += look.in_flight * seconds
        self.behind_seconds += 0 if look.is_ready else look.ended * seconds
        self.asking_seconds += look.is_asking * seconds
        self.key_seconds += look.waiting_for_keys * seconds
        self.key = look.key if look.waiting_for_keys else self.key


@dataclass(frozen=True)
class ReaderSum:
    """The readers of all streams of one name.

    Attributes:
        name: the name of the streams.
        open_seconds: for how long the streams were open.
        waited_seconds: for how long their readers waited for items.
        window: the sum of the looks at their windows; None before the first look, or if they have no windows.
        at: "file:line" that opened one of the streams; empty if unknown.
    """

    name: str
    open_seconds: float = 0.0
    waited_seconds: float = 0.0
    window: WindowSum | None = None
    at: str = ""

    @property
    def busy_share(self) -> float:
        """The share of the time for which the reader did not wait."""
        return max(0.0, 1 - self.waited_seconds / self.open_seconds) if self.open_seconds else 0.0


@dataclass(frozen=True)
class Evidence:
    """The measurements that a verdict is based on.

    Attributes:
        sums: the sums of all nodes.
        elapsed_seconds: how long the profile was taken.
        loop_cpu_seconds: for how long the thread of the event loop ran in that time; None if unknown.
        loop_late_share: the share of the time for which the event loop was held, as far as the loop watch has looked.
        loop_delay_seconds: how long a handler waited for its turn on the loop once its awaited result was ready.
        disturbed: the nodes that do not hold the event loop, because other executions began or ended during theirs.
        covered_seconds: for each node on a device, for how long it had at least one item.
        admitted: the share of the time for which the places of a deployment were taken, and how many places there are;
            for the deployment with the largest share.
        gil: the use of the GIL, if the GIL limits.
        starting_seconds: for how long worker processes started, while none had done any work.
    """

    sums: Sums
    elapsed_seconds: float
    loop_cpu_seconds: float | None = None
    loop_late_share: float = 0.0
    loop_delay_seconds: float = 0.0
    disturbed: frozenset[Name] = frozenset()
    covered_seconds: Mapping[Name, float] = field(default_factory=dict[Name, float])
    admitted: tuple[float, int] = (0.0, 0)
    gil: GilUse = field(default_factory=GilUse)
    starting_seconds: float = 0.0

    @cached_property
    def held_seconds(self) -> dict[Name, float]:
        """For how long each plain function held the event loop."""
        nodes = self.sums.nodes.items()
        return {name: node.counters.busy_seconds or 0.0 for name, node in nodes if node.step.holds_loop}

    @property
    def has_source(self) -> bool:
        """Whether items come from the source of a stream; items that callers stream from a deployment do not."""
        is_deployed = bool(self.admitted[1])
        return any(reader.window is not None or not is_deployed for reader in self.sums.readers.values())

    def sentences(self) -> tuple[str, ...]:
        """Return sentences about event loops, the GIL, admission and the windows of streams."""
        said: list[str] = []
        if self.loop_cpu_seconds is not None and self.elapsed_seconds:
            said.append(f"the event loop computes for {self.loop_cpu_seconds / self.elapsed_seconds:.0%} of the time")
        if self.loop_late_share >= _LEAST_TOLD:
            said.append(f"something holds the event loop for {self.loop_late_share:.0%} of the time")
        for holder, share in self.gil.held.items():
            if share >= _LEAST_TOLD:
                name = holder if isinstance(holder, str) else holder[1]
                said.append(f"others wait for the GIL, which {name} has, for {share:.0%} of the time")
        if self.admitted[1]:
            said.append(f"of {self.admitted[1]:,} places of a deployment, {self.admitted[0]:.0%} are taken")
        for reader in self.sums.readers.values():
            said.append(f"the reader of {reader.name} is busy for {reader.busy_share:.0%} of the time")
            if (window := reader.window) is not None and window.seconds:
                held, behind = window.in_flight_seconds / window.seconds, window.behind_seconds / window.seconds
                said.append(
                    f"{reader.name} has {significant(held)} of {window.size:,} items in flight; {significant(behind)} "
                    "of these have ended and wait for their turn"
                )
        return tuple(map(printable, said))


_LEAST_TOLD: Final = 0.05

# How many cores threads use of which one at a time can run: less than one, as threads that wait for it leave others
# without items; or a little more, as calls of the system go on without it.
_ONE_CORE: Final = 0.7, 1.1
# A larger share of the time without a core, summed over threads, means that other programs use the cores.
_MOST_WITHOUT_CORE: Final = 0.3
# The share of the time for which calls must wait for the GIL on their way to a thread or back, summed over calls.
_LEAST_AT_HOPS: Final = 0.25


def explained(evidence: Evidence, core_wait_seconds: float | None) -> Evidence:
    """Return evidence that says whether the GIL limits, and with less time for which something holds the event loop.

    Code that releases the GIL uses more than one core, or nobody has to wait for it. So the GIL limits if threads and
    loop use about one core together, and calls are on their way to a thread or back for long, although the loop and the
    cores are free. While other programs use the cores, the numbers do not tell.

    A loop that waits for the GIL, or for a core, is late as well, but nothing holds it. It waits one switch interval
    for each thread that wants the GIL; if it is later than that, something else blocks it.

    Args:
        evidence: the measurements.
        core_wait_seconds: for how long threads of this process could run, but had no core, summed over threads; None
            if unknown.
    """
    elapsed, late, delay = evidence.elapsed_seconds or inf, evidence.loop_late_share, evidence.loop_delay_seconds
    # For a node that gathers items, each item counts the time of its whole batch.
    outside = {node.name: node.timed.outside for node in evidence.sums.nodes.values() if not node.step.gathers}
    held: dict[Holder, float] = {name: one.cpu_seconds / elapsed for name, one in outside.items() if one.cpu_seconds}
    in_threads, loop = sum(held.values()), (evidence.loop_cpu_seconds or 0.0) / elapsed
    without_core = (core_wait_seconds or 0.0) / elapsed
    at_a_time = sum(one.thread_seconds for one in outside.values()) / elapsed
    if delay > late * (1 + at_a_time) * getswitchinterval():
        return replace(evidence, loop_late_share=max(0.0, late - without_core))
    found = replace(evidence, loop_late_share=max(0.0, late - in_threads - without_core))
    hops = sum(one.hops for one in outside.values())
    hopping = sum(one.hop_seconds for one in outside.values()) / elapsed
    hopping -= loop * (at_a_time + hopping) + without_core  # nobody waits for the GIL then
    is_known = core_wait_seconds is not None and without_core <= _MOST_WITHOUT_CORE
    if not (is_known and hopping >= _LEAST_AT_HOPS and _ONE_CORE[0] <= in_threads + loop <= _ONE_CORE[1]):
        return found
    return replace(found, gil=GilUse({EVENT_LOOP: loop, **held}, hopping * elapsed / hops))


# The largest share of the time for which other threads are assumed to have the GIL: with a share of 1,
# `TimeBreakdown.by` would divide by 0.
_MOST_HELD: Final = 0.99


@dataclass(frozen=True)
class TimeBreakdown:
    """How the busy time of a node, over all of its items, divides into waits and computing, as far as that is known.

    Attributes:
        cpu_seconds: for how long the node's threads computed.
        gil_seconds: for how long the node waited for the GIL. An estimate: each way to a thread or back counts as one
            mean wait for the GIL, and a thread is assumed to need the GIL for as long as it computes. The estimate is
            never more than the measured time of these ways.
        loop_seconds: for how long ready results waited until the event loop took them.
        hop_seconds: the remaining time of the ways to threads and back.
    """

    cpu_seconds: float = 0.0
    gil_seconds: float = 0.0
    loop_seconds: float = 0.0
    hop_seconds: float = 0.0

    @classmethod
    def by(cls, node: NodeSum, evidence: Evidence) -> "TimeBreakdown":
        """Divide the busy time of a node, from the measurements of a profile."""
        outside, gil = node.timed.outside, evidence.gil
        loop_delay = max(0.0, evidence.loop_delay_seconds - gil.wait_seconds)
        if outside.hops:
            waits = outside.hop_seconds
            at_hops = min(waits, outside.hops * gil.wait_seconds)
            others = min(sum(share for holder, share in gil.held.items() if holder != node.name), _MOST_HELD)
            wanted = outside.hops / 2 * gil.wait_seconds + outside.cpu_seconds * others / (1 - others)
            inside = min(max(0.0, outside.thread_seconds - outside.cpu_seconds), wanted)
            for_loop = min(waits - at_hops, outside.hops / 2 * loop_delay)
            return cls(outside.cpu_seconds, at_hops + inside, for_loop, waits - at_hops - for_loop)
        if node.step.holds_loop or node.step.gathers:
            return cls()
        # An item waits for its turn on the loop once. The quickest item hardly waited, so on average an item waited for
        # at most the difference between the mean time and the time of the quickest item.
        least_seconds = min(node.timed.durations.quantile(0.0) or 0.0, node.mean_seconds)
        waits = node.ended * min(evidence.loop_delay_seconds, node.mean_seconds - least_seconds)
        for_gil = min(waits, node.ended * gil.wait_seconds)
        return cls(0.0, for_gil, waits - for_gil)


@dataclass(frozen=True)
class NodeProfile:
    """One node in a profile, over all scopes of its graph. The counters cover the items that left it meanwhile.

    If a node runs very often, only a sample of its executions is timed, and the sample stands for all of them.

    Attributes:
        graph: the name of its graph, or of the body of control flow that it belongs to.
        node: the name of the node, as drawn.
        count: how many items it finished with a result.
        errors: how many items ended here with an error.
        busy_seconds: the time in its handler, waits included, summed over items. For a node in threads, the wait for a
            free thread counts; for a node in processes, time counts from when a worker begins with the item. None for a
            node that gives or reads a stream, whose time would include the time of other nodes.
        busy_share: the time for which its places were taken, divided by the place-seconds: how many items it may have
            at a time, times the seconds for which its scopes were open inside of the profile. 1 means always busy.
            Items that are still in the node count, too. Of several limits, the one that is taken most counts. A node
            without a limit counts as one place; its share is the mean number of items in it. None if `busy_seconds` is
            None.
        p50_seconds: half of its executions, with all attempts of each, took at most this long. None if none was timed.
        p90_seconds: 90 % of its executions took at most this long.
        p99_seconds: 99 % of its executions took at most this long.
        put_wait_seconds: for how long items waited for room in its inbox, summed over items.
        queue_wait_seconds: for how long items waited in its inbox, summed over items.
        blocked_seconds: for how long its finished items waited for room in the inboxes after it, summed over items.
        occupancy: the share of the time for which items waited in its inbox. Near 0, the node is starved, and a node
            before it limits; near 1, this node limits, or a node after it.
        inbox_full_share: the share of the time for which its inbox was full.
        compile_share: the share of `busy_seconds` for which its items waited for programs to be compiled. If the node
            hands on results before its device has computed them, the device's work counts as busy time, too. None if
            `busy_seconds` is None or 0.
        transfer_share: the share for transfers of arrays to a device, from another device, or back.
        device_share: the share for computing on a device.
        cpu_share: the share for which threads computed for the node. None if it uses no threads.
        gil_share: the share for waiting for the GIL, an estimate. None if unknown.
        loop_share: the share for waiting for the event loop, once a result was ready.
        hop_share: the share for the remaining time of hand-overs to a thread and back. The shares do not add up to 1 if
            items waited for something else: the items of their batch, the device, an awaited result.
        gil_held_share: if the GIL limits, the share of the time of the profile for which the node's threads computed,
            while others waited for the GIL. None if the GIL does not limit, or if the node uses no threads.
    """

    graph: str
    node: str
    count: int
    errors: int
    busy_seconds: float | None
    busy_share: float | None
    p50_seconds: float | None
    p90_seconds: float | None
    p99_seconds: float | None
    put_wait_seconds: float
    queue_wait_seconds: float
    blocked_seconds: float
    occupancy: float
    inbox_full_share: float
    compile_share: float | None
    transfer_share: float | None
    device_share: float | None
    cpu_share: float | None = None
    gil_share: float | None = None
    loop_share: float | None = None
    hop_share: float | None = None
    gil_held_share: float | None = None

    @property
    def mean_seconds(self) -> float | None:
        """The mean of `busy_seconds` per item; None if there were no items, or if the node is not timed."""
        ended = self.count + self.errors
        return None if self.busy_seconds is None or not ended else self.busy_seconds / ended

    @property
    def mean_queue_wait_seconds(self) -> float | None:
        """The mean of `queue_wait_seconds` per item; None if there were no items."""
        ended = self.count + self.errors
        return self.queue_wait_seconds / ended if ended else None


def node_profile_of(evidence: Evidence, node: NodeSum) -> NodeProfile:
    """Return the profile of one node."""
    sums, spent = evidence.sums, TimeBreakdown.by(node, evidence)
    outside = node.timed.outside
    uses_threads = outside.hops > 0
    waits_for_turns = uses_threads or not (node.step.holds_loop or node.step.gathers)
    counters, queue, durations = node.counters, node.timed.queue, node.timed.durations
    return NodeProfile(
        graph=counters.graph, node=counters.node, count=counters.completed, errors=counters.failed,
        busy_seconds=node.busy_seconds, busy_share=sums.busy_share(node), p50_seconds=durations.quantile(0.5),
        p90_seconds=durations.quantile(0.9), p99_seconds=durations.quantile(0.99),
        put_wait_seconds=counters.inbox.put_wait_seconds, queue_wait_seconds=queue.waited_seconds,
        blocked_seconds=node.timed.blocked_seconds, occupancy=node.occupancy,
        inbox_full_share=node.inbox_full_share,
        compile_share=node.share_of_busy(outside.compile_seconds),
        transfer_share=node.share_of_busy(outside.transfer_seconds),
        device_share=node.share_of_busy(outside.compute_seconds),
        cpu_share=node.share_of_busy(spent.cpu_seconds) if uses_threads else None,
        gil_share=node.share_of_busy(spent.gil_seconds) if waits_for_turns else None,
        loop_share=node.share_of_busy(spent.loop_seconds) if waits_for_turns else None,
        hop_share=node.share_of_busy(spent.hop_seconds) if uses_threads else None,
        gil_held_share=evidence.gil.held.get(node.name),
    )  # fmt: skip
