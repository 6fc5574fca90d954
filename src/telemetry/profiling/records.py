"""What a profile reads of whatever runs nodes: records of counters, executions and device work."""

import asyncio
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from ..counters import ActorStatistics
from .durations import NO_DEPTH, NOTHING_OUTSIDE, DepthTotals, Durations, OutsideSeconds

# When it began and ended, with all its attempts, in seconds of `time.perf_counter`; a number that stands for the item
# on its whole way through a graph, and its index in its stream, deployment or `map_each`, both None if unknown.
# A plain tuple: to make anything else takes longer than all else that is done for an execution.
Execution: TypeAlias = tuple[float, float, int | None, int | None]


# What a profile reads of whatever runs nodes: records of counters, and the protocols of those who keep them.
#
# Telemetry knows no engine. An engine that wants to be seen implements these.

# What bounds the items in flight in a node: `concurrency=`; that a stateful node, or a plain function, takes one at a
# time; a pool; `max_workers`, `max_in_flight`, `map_each(concurrency=)`; or that there is one call of the graph.
Bound: TypeAlias = Literal[
    "concurrency", "state", "line", "threads", "processes", "max_workers", "max_in_flight", "map_each", "call"
]


@dataclass(frozen=True, slots=True)
class Places:
    """Room for a number of items at a time, which several nodes may share.

    Attributes:
        key: equal for the nodes that share them; within one reading, or, if `is_shared`, everywhere.
        limit: how many items.
        bound: what makes it that many.
        is_shared: whether it outlives the scope that was read.
    """

    key: Hashable
    limit: int
    bound: Bound
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class TimedReading:
    """What is only counted while a profile is taken, since the first of those that are being taken.

    Attributes:
        durations: how long executions took, with all attempts.
        queue: how full its inbox was.
        blocked_seconds: time that items which it had finished waited for room in the inboxes after it.
        outside: what its items waited for on devices and in threads.
        counts_busy: whether the `busy_seconds` of the node are counted only meanwhile, too.
        begin: a number that is another one each time that such counting begins.
    """

    durations: Durations = field(default_factory=Durations)
    queue: DepthTotals = NO_DEPTH
    blocked_seconds: float = 0.0
    outside: OutsideSeconds = NOTHING_OUTSIDE
    counts_busy: bool = False
    begin: int = 0

    def plus(self, now: "TimedReading", before: "TimedReading | None") -> "TimedReading":
        """Return this with what was counted between two looks at one node; all of it, if there was no earlier one."""
        before = before or _NOTHING_TIMED
        durations = self.durations.since(None)
        durations.merge(now.durations.since(before.durations))
        return TimedReading(
            durations,
            self.queue + (now.queue - before.queue),
            self.blocked_seconds + now.blocked_seconds - before.blocked_seconds,
            self.outside.plus(now.outside.minus(before.outside)),
        )


_NOTHING_TIMED: Final = TimedReading()


@dataclass(frozen=True, slots=True)
class Around:
    """Where a body of control flow stands in the graph around it.

    Attributes:
        graph: name of that graph.
        sources: what its step reads: names of nodes, and of the bodies of other control flow.
        consumers: what reads the value of its step; likewise.
    """

    graph: str
    sources: tuple[str, ...]
    consumers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeReading:
    """The counters of one node in one scope, with what a profile has to know of the node to judge them.

    Attributes:
        counters: the counters. While a profile is taken, their `busy_seconds` say how long all handlers took that were
            begun since, also of nodes that are timed only by profiles.
        key: what tells it from the others of the scope.
        runs_on: "loop", "thread", "process", or where else.
        holds_loop: whether nothing else runs on the loop while its handler does.
        gathers: whether it holds items that wait for their turn: then it is busy with all of them.
        places: the places that an item in it takes; the first is its own, further ones are those of a pool.
        consumers: the nodes of the same graph that wait for its value, behind control flow as well.
        behind: those of them that only wait for it behind control flow.
        around: where its graph stands, if that is a body of control flow.
        timed: what is only known while a profile is taken; None otherwise.
    """

    counters: ActorStatistics
    key: Hashable
    runs_on: str
    holds_loop: bool
    gathers: bool
    places: tuple[Places, ...]
    consumers: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    around: Around | None = None
    timed: TimedReading | None = None

    @property
    def name(self) -> tuple[str, str]:
        """Its graph, or the body of control flow that it belongs to, and its own name as drawn."""
        return self.counters.graph, self.counters.node


@dataclass(frozen=True, slots=True)
class WindowLook:
    """What the items of a stream do at one moment.

    Attributes:
        size: the most that count at a time: `max_in_flight`.
        ordered: whether they are taken out in input order.
        in_flight: those that count now.
        ended: those of them that have ended, and were not taken out yet.
        is_ready: whether the next one in its turn has ended: then it is the reader that is not there.
        is_asking: whether the source was asked for an item, and has not given it yet.
    """

    size: int
    ordered: bool
    in_flight: int
    ended: int
    is_ready: bool
    is_asking: bool


class Scope(Protocol):
    """Nodes whose counters begin and end together: a run, a stream, a deployment, or all calls of `run`."""

    def node_readings(self) -> Iterable[NodeReading]:
        """Return what the counters of its nodes say now."""
        ...

    def measure(self, *, on: bool) -> None:
        """Have handlers timed that otherwise are not, until it was turned off as often as on."""
        ...


class Reader(Protocol):
    """A stream whose reader is the application, and no node."""

    @property
    def name(self) -> str:
        """What is read, for a sentence."""
        ...

    @property
    def reader_wait_seconds(self) -> float:
        """How long its reader has waited for items."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it runs on."""
        ...

    def look(self) -> WindowLook | None:
        """Return what its items do now; None for one that has no places for them."""
        ...


class Host(Protocol):
    """Where scopes and streams are opened: an Engine."""

    def open_scopes(self) -> Iterable[Scope]:
        """Return those that are open now."""
        ...

    def open_readers(self) -> Iterable[Reader]:
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
    """What a device, or the compiler, did in one piece.

    Args:
        kind: what it did.
        device: name of the device or mesh; for a compilation, the device that the program is for.
        node: name of the node; of a region that became one program, the names of all its nodes.
        began: when it began, in seconds of `time.perf_counter`.
        ended: when it ended.
        items: for how many items; 0 if it was for none in particular.
        rows: of the batch, with those of padding; 0 if it was no batch.
        padding_share: how much of the elements of the batch's arrays was padding, of rows or of lengths: 0 to 1.
        frames: a number for each of the items, as in the executions of nodes; for a large batch, of the first ones.
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
