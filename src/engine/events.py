"""Events out of a graph: `emit`, which nodes call, and the buffer from which the reader of the call takes events."""

import asyncio
import concurrent.futures
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Container, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

from .._errors import GraphTraceError
from ..actors.current import Cancellable, Handling, Position, emit_elsewhere, position_outside, source
from ..actors.frame import values_inside
from ..actors.stream_buffer import StreamBuffer
from ..actors.tasks import no_item
from .tracing.ref import call_location
from .tracing.tracer import active, is_tracing

if TYPE_CHECKING:
    from ..actors.frame import Frame
    from ..actors.node_actor import NodeActor

E_co = TypeVar("E_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)


# Not frozen, because freezing would double the cost of an event.
@dataclass(slots=True)
class Event(Generic[E_co]):
    """A value that a node has handed to the reader of its call, with `penstock.emit`.

    Attributes:
        value: the value.
        node: the name of the node, as in drawings.
        item: the index of the item in its `map_each` or loop, from 0.
        attempt: the number of the attempt, from 1. Events of an attempt that fails later are not taken back.
        kind: "event"; the values of a stream that is read together with its events have "value".
    """

    value: E_co
    node: str
    item: int
    attempt: int
    _after: int = field(default=0, repr=False, compare=False)  # how many values the graph had given before the event
    kind: ClassVar[Literal["event"]] = "event"


@dataclass(frozen=True, slots=True)
class Value(Generic[T_co]):
    """A value of the stream that a graph returns, in a stream that also has events.

    Attributes:
        value: the value.
        kind: "value"; events have "event".
    """

    value: T_co
    kind: ClassVar[Literal["value"]] = "value"


# The future with which an emitter waits for room: of asyncio on the loop, of `concurrent.futures` in a thread.
_Turn: TypeAlias = "asyncio.Future[None] | concurrent.futures.Future[None]"


class EventBuffer(StreamBuffer[Event[Any]]):
    """The events of one call: a stream buffer that several nodes fill. Nodes that find no room wait in line.

    Args:
        wanted: the class of the events that are read; other events are dropped.
        capacity: the most events that the buffer holds.

    Attributes:
        values: the buffer of the stream that the graph returns; None before the stream is open, or without a stream.
        thread: the thread of the loop, by its `get_ident`.
    """

    __slots__ = ("_kept", "_restored_end", "_waiters", "_wanted", "thread", "values")

    def __init__(self, wanted: type[Any], capacity: int) -> None:
        super().__init__(capacity)
        self.values: StreamBuffer[Any] | None = None
        self.thread = get_ident()
        self._kept: WeakValueDictionary[int, Any] | None = None  # the arrays in events, by their ids
        self._wanted = wanted
        self._restored_end = 0  # the position behind the events of a snapshot
        self._waiters: deque[tuple[Event[Any], Cancellable, _Turn]] = deque()

    @property
    def _given(self) -> int:
        """How many values the graph has given so far."""
        values = self.values
        return 0 if values is None else values.position + len(values.held)

    def add(self, value: object, frame: "Frame", actor: "NodeActor", attempt: int) -> Awaitable[None]:
        """Add an event that a node emits for an item. Await the result, since the event may have to wait for room."""
        if self.ended or self.abandoned or frame.state != "running" or not isinstance(value, self._wanted):
            return _NOTHING
        if self._kept is not None:
            self._keep(value)
        after = 0 if self.values is None else self._given
        event = Event(value, actor.name, frame.item, attempt, after)
        held = self.held
        if len(held) >= self.capacity:  # also true while other events wait in line: `take` lets these in at once
            return self._wait_turn(event, frame)
        self.put_nowait(event)
        return _NOTHING

    def add_from_thread(
        self, value: object, frame: "Frame", where: Handling, turn: "concurrent.futures.Future[None]"
    ) -> None:
        """Add an event for a thread, which waits for `turn`."""
        if isinstance(value, self._wanted):
            if self._kept is not None:
                self._keep(value)
            self._waiters.append((Event(value, where.actor.name, frame.item, where.attempt, self._given), where, turn))
            self._let_in()
        else:
            turn.set_result(None)

    def kept(self) -> Container[int]:
        """Return the ids of the arrays in events, which the reader may hold; arrays are noted from now on."""
        if self._kept is None:
            self._kept = WeakValueDictionary()
        return self._kept

    def _keep(self, value: object) -> None:
        assert self._kept is not None
        self._kept.update((id(one), one) for one in values_inside([value]) if hasattr(one, "is_deleted"))

    async def _wait_turn(self, event: Event[Any], frame: "Frame") -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiters.append((event, frame, turn))
        self._let_in()  # there may be room by now
        await turn

    def _let_in(self) -> None:
        """Move events from the line into the buffer, while there is room; drop events that are no longer wanted."""
        line = self._waiters
        is_over = self.ended or self.abandoned
        while line and (is_over or len(self.held) < self.capacity):
            event, work, turn = line.popleft()
            if not turn.done():  # else the emitter was cancelled
                turn.set_result(None)
                if not is_over and not work.cancelled:
                    self.put_nowait(event)

    @contextmanager
    def unbounded(self) -> Generator[None, None, None]:
        """Take events without a bound, while the reader waits for something else."""
        capacity, self.capacity = self.capacity, sys.maxsize
        self._let_in()
        try:
            yield
        finally:
            self.capacity = capacity

    def stored(self, *, only_restored: bool) -> list[Any]:
        """Return the events to store, which the reader has not taken; or only the events that were stored before."""
        count = max(0, self._restored_end - self.position) if only_restored else None
        return [[one.value, one.node, one.item, one.attempt, one._after] for one in islice(self.held, count)]

    def restore(self, stored: Iterable[Any]) -> None:
        """Put stored events in front of the present events."""
        restored = [Event[Any](*one) for one in stored]
        self._restored_end = self.position + len(restored)
        self.held.extendleft(reversed(restored))

    def take(self) -> Event[Any]:
        """Take the next event, and let the first event in line in."""
        self.position += 1
        event = self.held.popleft()
        if self._waiters:
            self._let_in()
        return event

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, and drop the events in line: the call has its outcome."""
        super().end(error)
        self._let_in()

    def abandon(self) -> None:
        """Drop all events, also later events."""
        super().abandon()
        self._let_in()

    def values_opened(self, values: StreamBuffer[Any]) -> None:
        """Note the stream that the graph returns, and tell a reader that waits."""
        self.values = values
        self._wake_reader()


class _Nothing:
    """The awaitable that `emit` returns if nothing has to be awaited."""

    __slots__ = ()

    # Not a Python function, which would take as long as the whole `await` takes now.
    __await__ = staticmethod(cast("Callable[[], Generator[Any, Any, None]]", ().__iter__))


_NOTHING: Final = cast("Awaitable[None]", _Nothing())

# `asyncio.current_task`, which is a Python function before 3.12. The loop is passed along, since finding the running
# loop takes a system call.
_task_on: Callable[[asyncio.AbstractEventLoop], "asyncio.Task[Any] | None"] = (
    asyncio.current_task if sys.version_info >= (3, 12) else cast("Any", asyncio.tasks)._current_tasks.get
)

# How often a thread that waits for room checks whether its attempt has timed out, or its loop was closed.
_LOOK_SECONDS: Final = 1.0


def emit(value: object, /) -> Awaitable[None]:
    """Hand a value to the reader of the call: `await penstock.emit(value)`, inside of a node.

    The node is an `async def`, with or without `yield`, with `effectful="unordered"`; or with `effectful=True`, where
    effects have to keep their order. A `def` with `runs_on="thread"` needs the same option, and calls `emit` without
    `await`. `emit` waits while the reader is `capacity` events behind. The value is dropped if no reader reads events
    of its class, or if the call has its outcome already. In a thread, `emit` raises after the end of the item, or after
    a timeout of the attempt.

    Args:
        value: the value, of any class; the reader says which class it reads.

    Returns:
        An awaitable. A node that is called directly, without an engine, may await it as well.

    Raises:
        TypeError: the node is not `effectful`, is a plain `def` on the event loop, runs in a worker process, gets
            its items in batches, or owns its loop.
        GraphTraceError: `emit` was called in a graph instead of a node.
        UnknownItemError: a task that a handler has started calls this, and its item is not known.
        asyncio.CancelledError: in a thread, the item or the attempt has ended.
    """
    where = source.get()
    if where is None:
        return _outside(value)
    position = where if isinstance(where, Position) else where.position
    frame, actor, task = position.frame, position.actor, position.task
    if frame is None or actor is None or task is None or _task_on((group := frame.group).loop) is not task:
        return _beside(where, value)
    events: EventBuffer | None = group.events
    if events is not None and events.thread != get_ident():
        return _beside(where, value)  # the call comes from a thread that the task has started, while the task runs
    if not actor.bound._emits or is_tracing() is not None:
        _refuse(actor)
    return _NOTHING if events is None else events.add(value, frame, actor, position.attempt)


def _outside(value: object) -> Awaitable[None]:
    """Pass on a value of a worker elsewhere; drop it in a node that is called directly; refuse it in a process."""
    _refuse_graph()
    if (elsewhere := emit_elsewhere()) is not None:
        return elsewhere(value)
    if (place := no_item.get()) is not None:
        raise TypeError(f"penstock.emit was called {place}")
    return _NOTHING


def _beside(where: Position | Handling, value: object) -> Awaitable[None]:
    """Emit a value in a thread, or in a task that a handler has started."""
    loop = asyncio._get_running_loop()  # None where no loop runs
    frame = where.frame
    events = None if frame is None else frame.group.events
    if isinstance(where, Position):
        if events is None:  # the call has no reader, whatever the item is
            return _NOTHING
        where = position_outside(where, "penstock.emit")
    is_in_thread = loop is None or (frame is not None and loop is not frame.group.loop)
    if is_in_thread and where.cancelled:
        raise _ended()
    if not where.actor.bound._emits:
        _refuse(where.actor)
    if frame is None or events is None:
        return _NOTHING
    buffer: EventBuffer = events
    if not is_in_thread:
        return _NOTHING if where.has_failed else buffer.add(value, frame, where.actor, where.attempt)
    turn: concurrent.futures.Future[None] = concurrent.futures.Future()
    try:
        frame.group.loop.call_soon_threadsafe(buffer.add_from_thread, value, frame, where, turn)
        _wait(turn, where, frame.group.loop)
    except RuntimeError as error:  # the loop is closed
        raise _ended() from error
    if where.cancelled:
        raise _ended()
    return _NOTHING


def _wait(turn: "concurrent.futures.Future[None]", where: Handling, loop: asyncio.AbstractEventLoop) -> None:
    while not where.cancelled:
        try:
            turn.result(_LOOK_SECONDS)
            break
        except TimeoutError:
            if loop.is_closed():
                raise RuntimeError("the event loop is closed") from None


def _ended() -> asyncio.CancelledError:
    return asyncio.CancelledError("the item has ended")


def _refuse_graph() -> None:
    if active() is not None:
        raise GraphTraceError(
            f"{call_location()}: penstock.emit is for nodes, which run for each item; a graph is traced once, so put "
            'the call into a node with effectful="unordered"'
        )


def _refuse(actor: "NodeActor") -> None:
    """Raise the reason why a node cannot emit. Return if the node can emit, and only a trace is active around it."""
    _refuse_graph()
    if actor.bound._emits:
        return
    if not actor.policy.effectful:
        raise TypeError(
            f"node {actor.label()!r} calls penstock.emit, and does not say that its calls have an effect: declare it "
            'with @ps.node(effectful="unordered")'
        )
    raise TypeError(
        f"node {actor.label()!r} is a plain `def` on the event loop, where penstock.emit cannot wait for its reader: "
        'write `async def`, or use runs_on="thread"'
    )
