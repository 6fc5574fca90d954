"""Events out of a graph: `emit`, which nodes call, and the buffer from which the reader of the call takes them."""

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Awaitable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar, cast

from .._errors import GraphTraceError
from ..actors.current import Handling, Position, no_item, position_outside, source
from ..actors.stream_buffer import StreamBuffer
from .tracing.ref import call_location
from .tracing.tracer import active, is_tracing

if TYPE_CHECKING:
    from ..actors.frame import Frame
    from ..actors.node_actor import NodeActor

E_co = TypeVar("E_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
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
    kind: Literal["event"] = field(default="event", init=False)


@dataclass(frozen=True, slots=True)
class Value(Generic[T_co]):
    """A value of the stream that a graph returns, where events are read together with it.

    Attributes:
        value: the value.
        kind: "value"; events have "event".
    """

    value: T_co
    kind: Literal["value"] = field(default="value", init=False)


# What an emitter waits with while there is no room: of asyncio on the loop, of `concurrent.futures` in a thread.
_Turn: TypeAlias = "asyncio.Future[None] | concurrent.futures.Future[None]"


class EventBuffer(StreamBuffer[Event[Any]]):
    """The events of one call: a stream buffer that several nodes fill. Those that find no room wait in line.

    Args:
        wanted: the class of the events that are read; others are dropped.
        capacity: the most events that it holds.

    Attributes:
        values: the buffer of the stream that the graph returns; None before that is open, or if there is none.
    """

    __slots__ = ("_line", "_wanted", "values")

    def __init__(self, wanted: type[Any], capacity: int) -> None:
        super().__init__(capacity)
        self.values: StreamBuffer[Any] | None = None
        self._wanted = wanted
        self._line: deque[tuple[Event[Any], Frame, _Turn]] = deque()

    def add(self, value: object, frame: "Frame", actor: "NodeActor", attempt: int) -> Awaitable[None]:
        """Add an event that a node emits for an item; to be awaited, since it may have to wait for room."""
        event = self._event(value, frame, actor, attempt)
        if event is None or (not self._line and self.put_nowait(event)):
            return _NOTHING
        return self._wait_in_line(event, frame)

    def add_from_thread(
        self, value: object, frame: "Frame", actor: "NodeActor", attempt: int, turn: "concurrent.futures.Future[None]"
    ) -> None:
        """Add an event for a thread, which waits for `turn`."""
        event = self._event(value, frame, actor, attempt)
        if event is None or (not self._line and self.put_nowait(event)):
            turn.set_result(None)
        else:
            self._line.append((event, frame, turn))

    def _event(self, value: object, frame: "Frame", actor: "NodeActor", attempt: int) -> Event[Any] | None:
        """Return the event; None if it is dropped, because nobody wants it or its item has ended."""
        if self.ended or self.abandoned or frame.state != "running" or not isinstance(value, self._wanted):
            return None
        values = self.values
        after = 0 if values is None else values.position + len(values.held)
        return Event(value, actor.name, frame.item, attempt, after)

    async def _wait_in_line(self, event: Event[Any], frame: "Frame") -> None:
        if not self._line and self.put_nowait(event):  # there is room by now
            return
        if not (self.ended or self.abandoned):
            turn = asyncio.get_running_loop().create_future()
            self._line.append((event, frame, turn))
            await turn

    def take(self) -> Event[Any]:
        """Take the next event, and let the first in line in."""
        self.position += 1
        event = self.held.popleft()
        while self._line:
            following, frame, turn = self._line.popleft()
            if turn.done():  # the emitter was cancelled
                continue
            turn.set_result(None)
            if frame.state == "running":
                self.held.append(following)
                break
        return event

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, and drop what waits in line: the call has its outcome."""
        super().end(error)
        self._drop_line()

    def abandon(self) -> None:
        """Drop all events, those to come as well."""
        super().abandon()
        self._drop_line()

    def values_opened(self, values: StreamBuffer[Any]) -> None:
        """Note the stream that the graph returns, and tell a reader that waits."""
        self.values = values
        self._wake_reader()

    def _drop_line(self) -> None:
        while self._line:
            _, _, turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)


class _Nothing:
    """What `emit` returns where there is nothing to wait for."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return cast("Generator[Any, Any, None]", iter(()))


_NOTHING: Final = _Nothing()

# How often a thread that waits for room looks whether its loop was closed without ending the call.
_LOOK_SECONDS: Final = 1.0


def emit(value: object, /) -> Awaitable[None]:
    """Hand a value to the reader of the call: `await penstock.emit(value)`, inside of a node.

    The node is an `async def`, with or without `yield`, that says `effectful=True`; or a `def` with `runs_on="thread"`,
    which calls it without `await`. It waits while the reader is `capacity` events behind. If nobody reads the events of
    the call, or those of this class, the value is dropped; so is one that comes after the outcome. In a thread, the
    end of the item raises here.

    Args:
        value: the value, of any class; the reader says which class it reads.

    Returns:
        An awaitable. A node that is called directly, without an engine, may await it as well.

    Raises:
        TypeError: the node is not `effectful=True`, is a plain `def` on the event loop, runs in a worker process, gets
            its items in batches, or owns its loop.
        GraphTraceError: it was called in a graph instead of a node.
        UnknownItemError: a task that a handler has started calls this, and its item is not known.
        asyncio.CancelledError: in a thread, the item has ended.
    """
    where = source.get()
    if where is None:
        return _outside()
    position = where if isinstance(where, Position) else where.position
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        task = None
    if task is None or task is not position.task:
        return _beside(where, value)
    frame, actor = position.frame, position.actor
    if frame is None or actor is None:
        return _NOTHING
    if not actor.emits or is_tracing() is not None:
        _refuse(actor)
    events = frame.group.events
    return _NOTHING if events is None else cast("EventBuffer", events).add(value, frame, actor, position.attempt)


def _outside() -> Awaitable[None]:
    """Drop a value where there is no item, as in a node that is called directly; refuse it where there never is one."""
    _refuse_graph()
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
    if not where.actor.emits:
        _refuse(where.actor)
    if frame is None or events is None:
        return _NOTHING
    buffer = cast("EventBuffer", events)
    if not is_in_thread:
        return buffer.add(value, frame, where.actor, where.attempt)
    turn: concurrent.futures.Future[None] = concurrent.futures.Future()
    try:
        frame.group.loop.call_soon_threadsafe(buffer.add_from_thread, value, frame, where.actor, where.attempt, turn)
        _wait(turn, frame.group.loop)
    except RuntimeError as error:  # the loop is closed
        raise _ended() from error
    if where.cancelled:
        raise _ended()
    return _NOTHING


def _wait(turn: "concurrent.futures.Future[None]", loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            return turn.result(_LOOK_SECONDS)
        except TimeoutError:
            if loop.is_closed():
                raise RuntimeError("the event loop is closed") from None


def _ended() -> asyncio.CancelledError:
    return asyncio.CancelledError("the item is not wanted any more")


def _refuse_graph() -> None:
    if active() is not None:
        raise GraphTraceError(
            f"{call_location()}: penstock.emit is for nodes, which run for each item; a graph is traced once, so put "
            "it into a node with effectful=True"
        )


def _refuse(actor: "NodeActor") -> None:
    """Raise the reason why a node cannot emit; return if it can, and a graph was traced around here before."""
    _refuse_graph()
    if actor.emits:
        return
    if not actor.policy.effectful:
        raise TypeError(
            f"node {actor.label()!r} calls penstock.emit, and does not say that its calls have an effect: declare it "
            "with @ps.node(effectful=True)"
        )
    raise TypeError(
        f"node {actor.label()!r} is a plain `def` on the event loop, where penstock.emit cannot wait for its reader: "
        'write `async def`, or use runs_on="thread"'
    )
