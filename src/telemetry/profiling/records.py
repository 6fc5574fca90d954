"""The records that a profile reads: counters of nodes, executions, and work of devices."""

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from operator import add
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from ..counters import ActorStatistics, Cuts
from .durations import NO_DEPTH, NO_DURATIONS, NOTHING_OUTSIDE, DepthTotals, Durations, OutsideSeconds

# One execution of a node: when it began and ended, with all its attempts, in seconds of `time.perf_counter`; a number
# that identifies the item on its way through the graph, and its index in its stream, deployment or `map_each`; both are
# None if unknown. A plain tuple: making another object would take longer than all other work for an execution.
Execution: TypeAlias = tuple[float, float, int | None, int | None]


# The records, and the protocols of the objects that make them. Telemetry does not import the engine, which implements
# the protocols.

# What bounds the items in flight in a node: `concurrency=`; that a stateful node, or a plain function, takes one at a
# time; a pool; `max_workers`, `max_in_flight`, `map_each(concurrency=)`; or that there is one call of the graph.
Bound: TypeAlias = Literal[
    "concurrency", "state", "loop", "threads", "processes", "max_workers", "max_in_flight", "map_each", "call"
]


class Capacity(NamedTuple):
    """Room for a number of items at a time, which several nodes may share.

    Args:
        key: a key that is equal for nodes that share the places; within one snapshot or, if `is_shared`, everywhere.
        limit: how many items there is room for.
        bound: the option or rule that sets the limit.
        is_shared: whether the places outlive the scope that was read.
        runs: of a `map_each` over lists, each run of which has places of its own: how many of its runs there are now;
            None for other places.
        run_seconds: how long the runs that have ended took, all together.
        at: "file:line" of the `map_each` that bounds them; empty for other places.
    """

    key: Hashable
    limit: int
    bound: Bound
    is_shared: bool = False
    runs: int | None = None
    run_seconds: float = 0.0
    at: str = ""


class TimedReading(NamedTuple):
    """The counters of a node that are only kept while profiles are taken, since the first of these began.

    Args:
        durations: how long executions took, with all attempts; nothing is added to this afterwards.
        queue: how full its inbox was.
        blocked_seconds: for how long its finished items waited for room in the inboxes after it.
        outside: what its items waited for on devices and in threads.
        counts_busy: whether the `busy_seconds` of the node are also counted only while profiles are taken.
        begin: a number that changes each time such counting begins.
        held: for how long items were in it, over all items, and for how long it was looked at, in seconds.
    """

    durations: Durations = NO_DURATIONS
    queue: DepthTotals = NO_DEPTH
    blocked_seconds: float = 0.0
    outside: OutsideSeconds = NOTHING_OUTSIDE
    counts_busy: bool = False
    begin: int = 0
    held: tuple[float, float] = (0.0, 0.0)

    def plus(self, now: "TimedReading", before: "TimedReading | None") -> "TimedReading":
        """Return this, plus the difference of two snapshots of a node; plus the later one if there is no earlier."""
        before, durations, outside, queue = before or _NOTHING_TIMED, self.durations, self.outside, self.queue
        if now.durations is not before.durations:
            durations = now.durations.since(before.durations)
            durations.merge(self.durations)
        if now.queue != before.queue:
            queue = DepthTotals(*map(_grown, queue, now.queue, before.queue))
        if now.outside is not before.outside:
            outside = OutsideSeconds(*map(_grown, outside, now.outside, before.outside))
        return TimedReading(
            durations, queue, self.blocked_seconds + now.blocked_seconds - before.blocked_seconds, outside
        )


def _grown(total: float, now: float, before: float) -> float:
    return total + now - before


_NOTHING_TIMED: Final = TimedReading()


@dataclass(frozen=True, slots=True)
class BodyPlace:
    """The place of a body of control flow in the graph around it.

    Attributes:
        graph: the name of that graph.
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
            also of nodes that only profiles time.
        key: a key that is unique in the scope.
        runs_on: "loop", "thread", "process", or the name of another executor, as tables show it.
        holds_loop: whether the event loop can do nothing else while its handler runs.
        gathers: whether it holds items that wait for their turn: then it is busy with all of them.
        places: the places that an item in it takes; the first are its own, further ones are those of a pool.
        consumers: the nodes of the same graph that wait for its value, also behind control flow.
        behind: the consumers that only wait for it behind control flow.
        around: the place of its graph, if that is a body of control flow.
        timed: the counters that are only kept while a profile is taken; None otherwise.
        holds: of a function that takes batches: how many items those hold that are worked on at a time; else None.
        is_on_loop: whether its handler runs on the event loop.
        owns_loop: whether it is an actor with a loop of its own.
        pool: the pool of the Engine in which its handler runs; None for others.
        at: "file:line" of its function or class, where its options are; or else of its call in the graph.
        batch_size: of a function that takes batches: how many items one holds at most; else 0.
        batch_wait_seconds: how long the first item of a batch waits for others.
        drawing: the digest of the drawing of its graph.
        step: the place of its box there: its id; in a body, "owner.number of the body.id".
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
    """What the items of a stream do at one moment.

    Attributes:
        size: how many items may count at a time: `max_in_flight`.
        ordered: whether the reader gets items in input order.
        in_flight: how many items count now.
        ended: how many of these have ended, and were not taken yet.
        is_ready: whether the item whose turn it is has ended, so that the stream waits for its reader.
        is_asking: whether the source was asked for an item, and has not given it yet.
        waiting_for_keys: with `order_by=`, how many wait for the calls of their keys before them.
        key: the key behind which most of these wait.
    """

    size: int
    ordered: bool
    in_flight: int
    ended: int
    is_ready: bool
    is_asking: bool
    waiting_for_keys: int = 0
    key: str = ""


# All calls of `run` of a graph; one call, run or read as a stream; a stream of calls; a deployment; calls of a graph
# with a durable loop.
ScopeKind: TypeAlias = Literal["runs", "call", "stream", "deployment", "durable loop"]


@dataclass(frozen=True, slots=True)
class ScopeSnapshot:
    """The nodes of a run, a stream, a deployment, or of all calls of `run` of a graph, at one moment.

    Attributes:
        key: a number that stands for the scope while it is open.
        seconds: when it was read, in seconds of `time.perf_counter`.
        steps: its nodes, also those in bodies of control flow; nodes of one graph in topological order.
        admitted: how many calls of a deployment are in flight, and how many may be; None for other scopes.
        id: a text that stands for the scope, also once it has ended.
        kind: what kind of scope it is.
        opened: when it was opened, in seconds since 1970.
        graphs: the digest of the drawing of each graph, and the name of the graph.
        cuts: the snapshots that it makes, or the states that its durable loops store; None if it makes none.
        progress: of a stream or a saved call: how many items have ended, or values were taken; how many there will be,
            None if unknown; and how many had ended before it was opened. None for other scopes.
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
        node: the name of the node that it is in or waits for, as drawn; empty between two nodes.
        item: its index in its stream, deployment or `map_each`.
        state: whether a node works on it, or it waits: for a place, for room or for its turn.
        age: for how long looks have seen it, in seconds; it is at least as old.
        attempt: the number of the attempt, from 1.
        deadline: the time that it has left, in seconds; None without a deadline.
        key: its key, or eight hexadecimal digits that stand for the key; empty without one.
        trace: the id of its trace, 32 hexadecimal digits; empty if it is not sampled.
        scope: the id of its scope; empty if that is not known.
        drawing: the digest of the drawing of its graph.
        step: the place of the box of the node there, as in `StepSnapshot`.
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


class NodeWork(NamedTuple):
    """What a node did since the snapshot before, over all scopes of its graph.

    Args:
        runs_on: where it runs, as in its snapshot; empty if it did nothing.
        completed: items that it finished with a result.
        failed: items that ended in an error here.
        busy_share: the share of the time for which its places were taken; None if that is unknown.
        device_share: the share of its time for which a device computed for it; None if unknown.
        p50: the median time of its executions of the last minute, in seconds; None if none was timed.
        p99: the 99th percentile; None if fewer than 20 were timed.
        timed: how many executions the two stand for.
    """

    runs_on: str = ""
    completed: int = 0
    failed: int = 0
    busy_share: float | None = 0.0
    device_share: float | None = None
    p50: float | None = None
    p99: float | None = None
    timed: int = 0


class StepContents(NamedTuple):
    """What one step holds now.

    Args:
        working: items that it works on.
        blocked: finished items that wait for room in the inbox after it.
        buffered: values that wait in the streams that it gives.
        capacity: how many may wait there; 0 if it gives none.
        values: how many values it has given to the streams that are open.
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


@dataclass(frozen=True, slots=True)
class FailureLook:
    """Items that have failed in one node with one class of errors, among the newest failures of the process.

    Attributes:
        graph: the name of the graph.
        node: the name of the node, as drawn; empty if no node has raised the error.
        type: the class of the error.
        count: how many items there are.
        last: when the last of them failed, in seconds since 1970.
        message: the text of the last error, which may hold values of the item; empty unless asked for.
    """

    graph: str
    node: str
    type: str
    count: int
    last: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class StuckLoop:
    """An event loop that has not answered for a second.

    Attributes:
        thread: the name of its thread.
        seconds: for how long it has not answered.
        stack: what its thread does, "file:line function", the outermost function first.
    """

    thread: str
    seconds: float
    stack: tuple[str, ...] = ()


class ProfiledScope(Protocol):
    """Nodes whose counters begin and end together: a run, a stream, a deployment, or all calls of `run`.

    Attributes:
        admitted: returns how many calls of a deployment are in flight, and how many may be; None for other scopes.
        opened_at: when it was opened, in seconds since 1970.
        progress: returns how many items have ended, and how many there will be, as in `ScopeSnapshot`; or None.
    """

    admitted: Callable[[], tuple[int, int]] | None
    opened_at: float
    progress: Callable[[], tuple[int, int | None, int]] | None

    @property
    def cuts(self) -> Cuts | None:
        """The snapshots that it makes, as in `ScopeSnapshot`."""
        ...

    @property
    def id(self) -> str:
        """A text that stands for the scope, also once it has ended."""
        ...

    @property
    def kind(self) -> ScopeKind:
        """What kind of scope it is."""
        ...

    def drawings(self) -> dict[str, tuple[str, object]]:
        """Return the name and the drawing of each graph, by the digest of the drawing."""
        ...

    def step_snapshots(self) -> Iterable[StepSnapshot]:
        """Return what its nodes do now."""
        ...

    def activity(self) -> int | None:
        """Return a number that changes with the counters of its nodes; None if these may change without it."""
        ...

    def measure(self, *, on: bool, depths: bool = True) -> None:
        """Time the handlers that are not timed otherwise, until this was turned off as often as on.

        Args:
            on: whether it is turned on.
            depths: whether inboxes tell of each change of their depth.
        """
        ...

    def look(self, now: float) -> None:
        """Note what its nodes hold now, if it is measured; on its loop.

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
        """The "file:line" that opened it; empty if no profile was taken then."""
        ...

    @property
    def reader_wait_seconds(self) -> float:
        """How long its reader has waited for items since this was first read, in seconds."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it runs on."""
        ...

    def look(self) -> WindowLook | None:
        """Return what its items in flight do now; None for a stream without a window."""
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

    def looked_at(self, items: "Collection[ItemInFlight]") -> list[ItemLook]:
        """Return where items in flight are; their ages are not known here."""
        ...

    def contents(self) -> Iterable[tuple[int, StepContents]]:
        """Return what the steps hold that items are in, each behind the key of its snapshot."""
        ...

    def open_scopes(self) -> Iterable[ProfiledScope]:
        """Return the scopes that are open now."""
        ...

    def open_readers(self) -> Iterable[ProfiledStream]:
        """Return the streams that are open now."""
        ...

    @property
    def loop_thread(self) -> int | None:
        """The thread of its event loop, by the number that the operating system gives it; None before its first use."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop; None before its first use."""
        ...


# Computing a batch or a call; compiling a program; arrays on their way to a device, or from it.
DeviceWorkKind: TypeAlias = Literal["compute", "compile", "to device", "from device"]


class DeviceWork(NamedTuple):
    """One piece of work of a device, or of the compiler.

    Args:
        kind: the kind of work.
        device: the name of the device or mesh; for a compilation, the device that the program is for.
        node: the name of the node; for a region that became one program, the names of all its nodes.
        began: when it began, in seconds of `time.perf_counter`.
        ended: when it ended.
        items: for how many items it was done; 0 if for none in particular.
        rows: how many rows the batch has, including padding; 0 if it was not a batch.
        padding_share: the share of padding, in rows and in lengths, in the elements of the batch's arrays: 0 to 1.
        frames: the numbers of the items, as in the executions of nodes; for a large batch, of the first items.
        again: of a program that its node would not have needed: the causes, "shape of x", each with a remedy.
    """

    kind: DeviceWorkKind
    device: str
    node: str
    began: float
    ended: float
    items: int = 0
    rows: int = 0
    padding_share: float = 0.0
    frames: tuple[int, ...] = ()
    again: tuple[tuple[str, str], ...] = ()
