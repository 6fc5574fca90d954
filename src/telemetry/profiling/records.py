"""The records that a profile reads: counters of nodes, executions, and work of devices; and who makes them."""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from operator import add
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from ..counters import ActorStatistics, Cuts
from .durations import NO_DEPTH, NO_DURATIONS, NOTHING_OUTSIDE, DepthTotals, Durations, OutsideSeconds

# One execution of a node, with all its attempts: its begin and its end, in seconds of `time.perf_counter`; a number
# that identifies the item on its way through the graph; and the item's index in its stream, deployment or `map_each`.
# The last two are None if unknown. A plain tuple, because the making of any other object would take longer than all
# other work for an execution.
Execution: TypeAlias = tuple[float, float, int | None, int | None]


# The records, and the protocols of the objects that make them. Telemetry does not import the engine, which implements
# the protocols.

# The options and rules that bound the items in flight in a node: `concurrency=`; one item at a time in a stateful node,
# or in a plain function on the loop; a pool; `max_workers`, `max_in_flight`, `map_each(concurrency=)`; or that there is
# only one call of the graph.
Bound: TypeAlias = Literal[
    "concurrency", "state", "loop", "threads", "processes", "max_workers", "max_in_flight", "map_each", "call"
]


class Capacity(NamedTuple):
    """Places for a number of items at a time, which several nodes may share.

    Args:
        key: a key that is equal for nodes that share the places; within one snapshot or, if `is_shared`, everywhere.
        limit: the number of places.
        bound: the option or rule that sets this number.
        is_shared: whether the places outlive the scope that was read.
        runs: for a `map_each` over lists, each run of which has places of its own: how many runs there are now. None
            for other places.
        run_seconds: how long the ended runs took, summed over runs.
        at: "file:line" of the `map_each` that bounds the items; empty for other places.
        around: the key of more places, which several scopes share, if the items in a node are counted over all of them.
    """

    key: Hashable
    limit: int
    bound: Bound
    is_shared: bool = False
    runs: int | None = None
    run_seconds: float = 0.0
    at: str = ""
    around: Hashable = None


class TimedReading(NamedTuple):
    """The counters of a node that are only kept while profiles are taken, from the begin of the first profile on.

    Args:
        durations: how long executions took, with all attempts; nothing is added to this afterwards.
        queue: how full its inbox was.
        blocked_seconds: for how long its finished items waited for room in the inboxes after it.
        outside: how long its items took on devices and in threads, by the kind of work.
        counts_busy: whether the `busy_seconds` of the node are also counted only while profiles are taken.
        begin: a number that changes each time that these counters begin anew.
        held: for how long items were in the node, summed over items, and for how long it was looked at, in seconds.
    """

    durations: Durations = NO_DURATIONS
    queue: DepthTotals = NO_DEPTH
    blocked_seconds: float = 0.0
    outside: OutsideSeconds = NOTHING_OUTSIDE
    counts_busy: bool = False
    begin: int = 0
    held: tuple[float, float] = (0.0, 0.0)

    def plus(self, now: "TimedReading", before: "TimedReading | None") -> "TimedReading":
        """Return this, plus the difference of two readings of a node; without an earlier reading, plus the later."""
        before, durations = before or _NOTHING_TIMED, self.durations
        if now.durations is not before.durations:
            durations = now.durations.since(before.durations)
            durations.merge(self.durations)
        queue = DepthTotals(*map(_grown, self.queue, now.queue, before.queue))
        outside = OutsideSeconds(*map(_grown, self.outside, now.outside, before.outside))
        blocked_seconds = _grown(self.blocked_seconds, now.blocked_seconds, before.blocked_seconds)
        return TimedReading(durations, queue, blocked_seconds, outside)


def _grown(total: float, now: float, before: float) -> float:
    return total + now - before


_NOTHING_TIMED: Final = TimedReading()


@dataclass(frozen=True, slots=True)
class BodyPlace:
    """The place of a body of control flow in the graph around it.

    Attributes:
        graph: the name of the graph around it.
        sources: the names of the nodes, and of the bodies of other control flow, that its step reads.
        consumers: the names of the nodes and bodies that read the value of its step.
    """

    graph: str
    sources: tuple[str, ...]
    consumers: tuple[str, ...]


class StepSnapshot(NamedTuple):
    """One node in one scope at one moment: its counters, where it runs, and which nodes wait for it.

    Args:
        counters: the counters. While a profile is taken, their `busy_seconds` cover all handlers since its beginning,
            also for nodes that only profiles time.
        key: a key that is unique in the scope.
        runs_on: "loop", "thread", "process", or the name of another executor, as tables show it.
        holds_loop: whether the event loop can do nothing else while its handler runs.
        gathers: whether it holds items that wait for their turn; it counts as busy with all of these items.
        places: the places that an item in it takes: first its own places, then the places of a pool.
        consumers: the nodes of the same graph that wait for its value, directly or through control flow.
        behind: the consumers that wait for its value only through control flow.
        around: the place of its graph, if its graph is a body of control flow.
        timed: the counters that are only kept while a profile is taken; None otherwise.
        holds: for a function that takes batches, how many items the batches hold that are worked on at a time; None for
            other functions.
        is_on_loop: whether its handler runs on the event loop.
        owns_loop: whether it is an actor with a loop of its own.
        pool: the pool of the Engine in which its handler runs; None if it runs in no pool.
        at: "file:line" of its function or class, where its options are; or else of its call in the graph.
        batch_size: for a function that takes batches, how many items a batch holds at most; 0 for other functions.
        batch_wait_seconds: how long the first item of a batch waits for further items.
        drawing: the digest of the drawing of its graph.
        step: the id of its box in this drawing; in a body, "owner.number of the body.id".
    """

    counters: ActorStatistics
    key: Hashable
    runs_on: str
    holds_loop: bool
    gathers: bool
    places: tuple[Capacity, ...]
    consumers: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    around: BodyPlace | None = None
    timed: TimedReading | None = None
    holds: int | None = None
    is_on_loop: bool = False
    owns_loop: bool = False
    pool: Literal["threads", "processes"] | None = None
    at: str = ""
    batch_size: int = 0
    batch_wait_seconds: float = 0.0
    drawing: str = ""
    step: str = ""

    @property
    def name(self) -> tuple[str, str]:
        """The name of its graph, or of its body of control flow, and the name of the node as drawn."""
        return self.counters.graph, self.counters.node


@dataclass(frozen=True, slots=True)
class WindowLook:
    """The states of the items of a stream at one moment.

    Attributes:
        size: how many items may be in flight: `max_in_flight`.
        ordered: whether the reader gets items in input order.
        in_flight: how many items are in flight now, ended items that wait for the reader included.
        ended: how many items have ended, and were not taken by the reader yet.
        is_ready: whether the item whose turn it is has ended, so that the stream waits for its reader.
        is_asking: whether the stream waits for an item of its source.
        waiting_for_keys: with `order_by=`, how many items wait for earlier calls of their keys.
        key: the key that most of these items wait for.
    """

    size: int
    ordered: bool
    in_flight: int
    ended: int
    is_ready: bool
    is_asking: bool
    waiting_for_keys: int = 0
    key: str = ""


# In this order: all calls of `run` of a graph; one call, run or read as a stream; a stream of calls; a deployment; and
# calls of a graph with a durable loop.
ScopeKind: TypeAlias = Literal["runs", "call", "stream", "deployment", "durable loop"]


@dataclass(frozen=True, slots=True)
class ScopeSnapshot:
    """The nodes of a run, a stream, a deployment, or of all calls of `run` of a graph, at one moment.

    Attributes:
        key: a number that identifies the scope while it is open.
        seconds: when the snapshot was taken, in seconds of `time.perf_counter`.
        steps: its nodes, also nodes in bodies of control flow; nodes of one graph in topological order.
        admitted: for a deployment, how many calls are in flight, and how many may be; None for other scopes.
        id: a text that identifies the scope, also once it has ended.
        kind: the kind of the scope.
        opened: when the scope was opened, in seconds since 1970.
        graphs: the digest of the drawing of each graph, and the name of the graph.
        cuts: the snapshots of its call with `checkpoint=`, or the states that its durable loops store; None without
            these.
        progress: for a stream of calls, how many items have ended, how many there will be (None if unknown), and how
            many had ended before the scope was opened; for a call with `checkpoint=`, the same of the records of its
            source, or of the values taken. None for other scopes.
    """

    key: int
    seconds: float
    steps: tuple[StepSnapshot, ...] = ()
    admitted: tuple[int, int] | None = None
    id: str = ""
    kind: ScopeKind = "runs"
    opened: float = 0.0
    graphs: tuple[tuple[str, str], ...] = ()
    cuts: Cuts | None = None
    progress: tuple[int, int | None, int] | None = None


@dataclass(frozen=True, slots=True)
class ItemLook:
    """An item in flight, at one look.

    Attributes:
        graph: the name of its graph.
        node: the name of the node that the item is in or waits for, as drawn; empty between two nodes.
        item: its index in its stream, deployment or `map_each`.
        state: "working" if a node works on the item; "waiting" if it waits for a place, for room or for its turn.
        age: for how long looks have seen the item, in seconds; the item is at least as old.
        attempt: the number of the attempt, from 1.
        deadline: the time until its deadline, in seconds; None without a deadline.
        key: its key, or eight hexadecimal digits that stand for the key; empty without a key.
        trace: the id of its trace, 32 hexadecimal digits; empty if the item is not sampled.
        scope: the id of its scope; empty if unknown.
        drawing: the digest of the drawing of its graph.
        step: the id of the node's box in this drawing, as in `StepSnapshot`.
    """

    graph: str
    node: str
    item: int
    state: Literal["working", "waiting"]
    age: float = 0.0
    attempt: int = 1
    deadline: float | None = None
    key: str = ""
    trace: str = ""
    scope: str = ""
    drawing: str = ""
    step: str = ""


class StepContents(NamedTuple):
    """The items and values that one step holds now.

    Args:
        working: items that the step works on.
        blocked: finished items that wait for room in the inbox after the step.
        buffered: values that wait in the streams that the step gives.
        capacity: how many values may wait in these streams; 0 if the step gives no stream.
        values: how many values the step has given to the streams that are open.
    """

    working: int = 0
    blocked: int = 0
    buffered: int = 0
    capacity: int = 0
    values: int = 0

    def plus(
        self, working: int = 0, blocked: int = 0, buffered: int = 0, capacity: int = 0, values: int = 0
    ) -> "StepContents":
        """Return the sum."""
        return StepContents(*map(add, self, (working, blocked, buffered, capacity, values)))


class ProfiledScope(Protocol):
    """Nodes whose counters begin and end together: a run, a stream, a deployment, or all calls of `run`.

    Attributes:
        admitted: for a deployment, returns how many calls are in flight, and how many may be; None for other scopes.
    """

    admitted: Callable[[], tuple[int, int]] | None

    def drawings(self) -> dict[str, tuple[str, object]]:
        """Return the name and the drawing of each graph, by the digest of the drawing."""
        ...

    def step_snapshots(self) -> Iterable[StepSnapshot]:
        """Return a snapshot of each node of the scope."""
        ...

    def snapshot(self, seconds: float, steps: tuple[StepSnapshot, ...]) -> ScopeSnapshot:
        """Return a snapshot of the scope, which is taken at this time, with these snapshots of its nodes."""
        ...

    def activity(self) -> int | None:
        """Return a number that changes whenever counters of its nodes change; None if there is no such number."""
        ...

    def measure(self, *, on: bool, depths: bool = True) -> None:
        """Turn the timing of handlers that are not always timed on or off; it ends once turned off as often as on.

        Args:
            on: whether to turn the timing on.
            depths: whether inboxes report each change of their depth.
        """
        ...

    def look(self, now: float) -> None:
        """Note how many items its nodes hold now, if the scope is measured; called in the thread of its event loop.

        Args:
            now: the time of `perf_counter`.
        """
        ...


class ProfiledStream(Protocol):
    """A stream that the application reads, as a profile sees it."""

    @property
    def name(self) -> str:
        """The name of the stream, for a sentence."""
        ...

    @property
    def at(self) -> str:
        """The "file:line" that opened the stream; empty if no profile was taken at its opening."""
        ...

    @property
    def reader_wait_seconds(self) -> float:
        """How long its reader has waited for items since the first access to this property, in seconds."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the stream runs on."""
        ...

    def look(self) -> WindowLook | None:
        """Return the states of its items in flight; None for a stream without a window."""
        ...


class ItemInFlight(Protocol):
    """An item on its way through a graph, as a look sees it."""

    @property
    def identity(self) -> int:
        """A number that no other item has."""
        ...

    @property
    def item(self) -> int:
        """Its index in its stream or deployment."""
        ...


class Host(Protocol):
    """An Engine, as a profile sees it: it opens scopes and streams."""

    def frames_in_flight(self) -> "Iterable[ItemInFlight]":
        """Return the items in flight."""
        ...

    def looked_at(self, items: "Mapping[ItemInFlight, float]") -> list[ItemLook]:
        """Return a look at each of these items in flight; `items` has the age of each, in seconds."""
        ...

    def contents(self) -> Iterable[tuple[int, StepContents]]:
        """Return the contents of each step that holds items, as pairs of the key of its snapshot and the contents."""
        ...

    def open_scopes(self) -> Iterable[ProfiledScope]:
        """Return the scopes that are open now."""
        ...

    def open_readers(self) -> Iterable[ProfiledStream]:
        """Return the streams that are open now."""
        ...

    @property
    def loop_thread(self) -> int | None:
        """The native id of the thread of its event loop; None before the first use of the Engine."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop; None before the first use of the Engine."""
        ...


# The computation of a batch or a call; the compilation of a program; the transfer of arrays to a device, or from it.
DeviceWorkKind: TypeAlias = Literal["compute", "compile", "to device", "from device"]


@dataclass(frozen=True, slots=True)
class DeviceSlice:
    """One piece of work of a device, or of the compiler.

    Attributes:
        kind: "compute" for a batch or a call, "compile" for a program, "to device" or "from device" for arrays.
        device: the name of the device or mesh; for a compilation, the device that the program is for.
        node: the name of the node; for a region that became one program, the names of all its nodes.
        began_seconds: when it began, since the begin of the profile; negative if it began before the profile.
        ended_seconds: when it ended, since the begin of the profile.
        items: for how many items the work was done; 0 if for no item in particular.
        rows: how many rows the batch has, including padding; 0 for other work than a batch.
        padding_share: the share of padding in the elements of the batch's arrays: 0 to 1.
        frames: a number for each of the items, as in `Slice.frame`; for a large batch, only for the first items.
        again: for the compilation of a further program of a node, the causes, such as "shape of x", each with a remedy.
    """

    kind: DeviceWorkKind
    device: str
    node: str
    began_seconds: float
    ended_seconds: float
    items: int = 0
    rows: int = 0
    padding_share: float = 0.0
    frames: tuple[int, ...] = ()
    again: tuple[tuple[str, str], ...] = ()
