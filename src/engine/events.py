"""Events out of a graph: `emit`, which nodes call, and the buffer from which the reader of the call takes them."""

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


# Not frozen, because that takes as long as all else that is done for an event.
@dataclass(slots=True)
class Event(Generic[E_co]):
    """A value that a node has handed to the reader of its call, with `penstock.emit`.

    Attributes:
        value: the value.
        node: the name of the node, as drawn.
        item: the index of the item in its `map_each` or loop, from 0.
        attempt: the number of the attempt, from 1. What an attempt has emitted before it failed is not taken back.
        kind: "event"; the values of a stream that is read together with its events have "value".
    """

    value: E_co
    node: str
    item: int
    attempt: int
    _after: int = field(default=0, repr=False, compare=False)  # how many values the graph had given by then
    kind: ClassVar[Literal["event"]] = "event"


@dataclass(frozen=True, slots=True)
class Value(Generic[T_co]):
    """A value of the stream that a graph returns, where events are read together with it.

    Attributes:
        value: the value.
        kind: "value"; events have "event".
    """

    value: T_co
    kind: ClassVar[Literal["value"]] = "value"


# What an emitter waits with while there is no room: of asyncio on the loop, of `concurrent.futures` in a thread.
_Turn: TypeAlias = "asyncio.Future[None] | concurrent.futures.Future[None]"


class EventBuffer(StreamBuffer[Event[Any]]):
    """The events of one call: a stream buffer that several nodes fill. Those that find no room wait in line.

    Args:
        wanted: the class of the events that are read; others are dropped.
        capacity: the most events that it holds.

    Attributes:
        values: the buffer of the stream that the graph returns; None before that is open, or if there is none.
        thread: the thread of the loop, by its `get_ident`.
    """

    __slots__ = ("_kept", "_restored_end", "_waiters", "_wanted", "thread", "values")

    def __init__(self, wanted: type[Any], capacity: int) -> None:
        super().__init__(capacity)
        self.values: StreamBuffer[Any] | None = None
        self.thread = get_ident()
        self._kept: WeakValueDictionary[int, Any] | None = None  # by their ids, the arrays in events
        self._wanted = wanted
        self._restored_end = 0  # the position behind the events of a snapshot
        self._waiters: deque[tuple[Event[Any], Cancellable, _Turn]] = deque()

    @property
    def _given(self) -> int:
        """How many values the graph has given so far."""
        values = self.values
        return 0 if values is None else values.position + len(values.held)

    def add(self, value: object, frame: "Frame", actor: "NodeActor", attempt: int) -> Awaitable[None]:
        """Add an event that a node emits for an item; to be awaited, since it may have to wait for room."""
        if self.ended or self.abandoned or frame.state != "running" or not isinstance(value, self._wanted):
            return _NOTHING
        if self._kept is not None:
            self._keep(value)
        after = 0 if self.values is None else self._given
        event = Event(value, actor.name, frame.item, attempt, after)
        held = self.held
        if len(held) >= self.capacity:  # so is it while others wait in line: `take` lets them in at once
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
        """Return the ids of the arrays in events, which their reader may hold; noted from now on."""
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
        """Move events from the line into the buffer, as far as there is room and they are still wanted."""
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
        """Return the events that the reader has not taken, to be stored; or those of them that were stored before."""
        count = max(0, self._restored_end - self.position) if only_restored else None
        return [[one.value, one.node, one.item, one.attempt, one._after] for one in islice(self.held, count)]

    def restore(self, stored: Iterable[Any]) -> None:
        """Put events that were stored before those that are there."""
        restored = [Event[Any](*one) for one in stored]
        self._restored_end = self.position + len(restored)
        self.held.extendleft(reversed(restored))

    def take(self) -> Event[Any]:
        """Take the next event, and let the first in line in."""
        self.position += 1
        event = self.held.popleft()
        if self._waiters:
            self._let_in()
        return event

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, and drop what waits in line: the call has its outcome."""
        super().end(error)
        self._let_in()

    def abandon(self) -> None:
        """Drop all events, those to come as well."""
        super().abandon()
        self._let_in()

    def values_opened(self, values: StreamBuffer[Any]) -> None:
        """Note the stream that the graph returns, and tell a reader that waits."""
        self.values = values
        self._wake_reader()


class _Nothing:
    """What `emit` returns where there is nothing to wait for."""

    __slots__ = ()

    # Not a function in Python: that would take as long as the whole `await` does now.
    __await__ = staticmethod(cast("Callable[[], Generator[Any, Any, None]]", ().__iter__))


_NOTHING: Final = cast("Awaitable[None]", _Nothing())

# `asyncio.current_task`, which is a function in Python before 3.12. The loop is passed along, since to find out which
# one runs takes a system call.
_task_on: Callable[[asyncio.AbstractEventLoop], "asyncio.Task[Any] | None"] = (
    asyncio.current_task if sys.version_info >= (3, 12) else cast("Any", asyncio.tasks)._current_tasks.get
)

# How often a thread that waits for room looks whether its attempt has timed out, or its loop was closed.
_LOOK_SECONDS: Final = 1.0


def emit(value: object, /) -> Awaitable[None]:
    """Hand a value to the reader of the call: `await penstock.emit(value)`, inside of a node.

    The node is an `async def`, with or without `yield`, that says `effectful="unordered"`; or `effectful=True`, where
    effects have to keep their order. A `def` with `runs_on="thread"` says the same, and calls it without `await`. It
    waits while the reader is `capacity` events behind. If the events of the call, or those of this class, are not read,
    the value is dropped; so is one that comes after the outcome. In a thread, the end of the item raises here, and so
    does that of an attempt which has timed out.

    Args:
        value: the value, of any class; the reader says which class it reads.

    Returns:
        An awaitable. A node that is called directly, without an engine, may await it as well.

    Raises:
        TypeError: the node is not `effectful`, is a plain `def` on the event loop, runs in a worker process, gets
            its items in batches, or owns its loop.
        GraphTraceError: it was called in a graph instead of a node.
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
        return _beside(where, value)  # the task runs just now, while a thread that it has started is here
    if not actor.bound._emits or is_tracing() is not None:
        _refuse(actor)
    return _NOTHING if events is None else events.add(value, frame, actor, position.attempt)


def _outside(value: object) -> Awaitable[None]:
    """Hand on a value of a worker somewhere else; drop it in a node that is called directly; refuse it in a process."""
    _refuse_graph()
    if (elsewhere := emit_elsewhere()) is not None:
        return elsewhere(value)
    if (place := no_item.get()) is not None:
        raise TypeError(f"penstock.emit was called {place}")
    return _NOTHING


def _beside(where: Position | Handling, value: object) -> Awaitable[None]:
    """Emit a value in a thread, or in a task that a handler has started."""
    loop = asyncio._get_running_loop()  # it returns None where no loop runs
    frame = where.frame
    events = None if frame is None else frame.group.events
    if isinstance(where, Position):
        if events is None:  # its item is not always known, but that its call has no reader
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
            'it into a node with effectful="unordered"'
        )


def _refuse(actor: "NodeActor") -> None:
    """Raise the reason why a node cannot emit; return if it can, and a graph was traced around here before."""
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
