"""Detached calls of a deployment, which go on without a reader, and `DetachedStream`, which a reader holds."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeAlias, TypeVar, cast

from .._errors import KeyInUse, NodeCancelledError, PenstockError, PlanError, copy_of
from ..actors.current import source
from ..actors.tasks import Condition, start_task
from .call_stream import Stream
from .events import Event
from .statistics import StreamStatistics

if TYPE_CHECKING:
    from ..saving.durable import Durable

# How many events and values of a key wait for later readers: 1,000 of 1 kB for each of 1,000 keys are 1 GB.
KEPT: Final = 1000
# How many ended calls keep their events, for readers that lost their connection shortly before.
_ENDED: Final = 100

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
_Place: TypeAlias = "tuple[Durable, str]"  # the store of a key, and the key


@dataclass(frozen=True)
class Missed:
    """The first item for a reader of a detached call, if events and values after its number are no longer kept.

    Attributes:
        count: how many events and values are missed; None if unknown, because the number comes from another process.
        kind: "missed"; events have "event", and values "value".
    """

    count: int | None
    kind: ClassVar[Literal["missed"]] = "missed"


class EventLog:
    """The last events and values of a key in this process, and the outcome of its present call.

    Args:
        before: the log of the last call of the key in this process, which this log continues; None without one.

    Attributes:
        items: the events and values, by consecutive numbers.
        first: the number before the first event or value that there was.
        last: the number of the last event or value.
        gives_values: whether the graph gives a stream.
        changed: notified at each event and value, and at the end.
        outcome: the outcome of the call.
        stream: the stream of the call itself; None if the call is not in this process.
    """

    def __init__(self, before: "EventLog | None" = None) -> None:
        self.items: dict[int, Any] = {} if before is None else dict(before.items)
        # Numbers grow from process to process, so that a number of this process is never used in the next one.
        self.first: int = int(time.time() * 1e6) if before is None else before.first
        self.last: int = self.first if before is None else before.last
        self.gives_values: bool = before is not None and before.gives_values
        self.changed = Condition()
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stream: Any = None  # an `EventStream`, whose file imports this file

    async def record(self, stream: Any) -> Any:
        """Read a call to its end, independently of readers; return the result of the call."""
        async with stream:
            async for item in stream:
                self.last += 1
                self.items[self.last] = item
                self.items.pop(self.last - KEPT, None)
                self.changed.notify_all()
            return None if self.gives_values else await stream.result()


class DetachedCalls:
    """The detached calls of one deployment.

    Args:
        changed: notified whenever `is_busy` may have become false.
    """

    def __init__(self, changed: Condition) -> None:
        self.running: dict[_Place, EventLog] = {}
        self.ended: dict[_Place, EventLog] = {}  # logs without calls and outcomes; calls that ended last come last
        self._changed = changed

    def begin(self, place: _Place, stream: Stream[Any]) -> EventLog:
        """Begin a call, which goes on even if the caller ends.

        Raises:
            KeyInUse: a detached call has the key.
        """
        if place in self.running:
            key = place[1]
            raise KeyInUse(f"the key {key!r} is under way here, in a detached call: service.attach({key!r}) reads it")
        log = EventLog(self.ended.get(place))
        log.stream = events = cast("Any", stream)
        log.gives_values = events.gives_values
        # The call belongs to no item of the caller, and ends with no item.
        context = copy_context()
        context.run(source.set, None)
        loop = context.run(events._start).loop
        log.outcome = start_task(loop, log.record(events), name="penstock-detached", context=context)
        self.running[place] = log
        log.outcome.add_done_callback(lambda outcome: self._ended(place, log))
        return log

    def find(self, key: str) -> EventLog | None:
        """Return the log of the call that has a key; None without such a call."""
        return next((log for (_, other), log in self.running.items() if other == key), None)

    async def end(self, make_error: Callable[[], PenstockError]) -> None:
        """End the calls that have not begun, and wait until all calls have ended; begun calls were ended before."""
        for log in self.running.values():
            assert log.stream is not None
            call = log.stream._start()
            if next(call.frames(), None) is None:
                call.abort(make_error())
        if self.running:
            await asyncio.wait([log.outcome for log in self.running.values()])
        self.ended.clear()

    def _ended(self, place: _Place, log: EventLog) -> None:
        if not log.outcome.cancelled():
            log.outcome.exception()  # mark the error as retrieved: there may be no reader
        del self.running[place]
        self.ended.pop(place, None)
        self.ended[place] = EventLog(log)
        if len(self.ended) > _ENDED:
            del self.ended[next(iter(self.ended))]
        log.changed.notify_all()
        self._changed.notify_all()


class DetachedStream(Stream[T_co], Generic[T_co, R]):
    """The events, values and result of a detached call, for one reader.

    Made by `service.stream(call, detached=True, ...)` and `service.attach(key)`. The stream may end, or be dropped, at
    any time: the call goes on. The stream does not slow the call: a reader that is too slow or too late gets a `Missed`
    in the place of events and values that are no longer kept. The error of a call comes after the events before it.

    Attributes:
        number: the number of the event or value that was read last; `service.attach(key, after=number)` goes on from
            there. Numbers of a key grow, across calls and processes.
    """

    # Arguments: the log, or a function that finds the log; the class of the events; and the number to go on from.
    def __init__(
        self, log: EventLog | None, find: Callable[[], Awaitable[EventLog]] | None, events: type[Any], after: int
    ) -> None:
        self.number = after
        self._log = log
        self._find = find
        self._events = events
        self._position = 0
        self._closed = False

    @property
    def gives_values(self) -> bool:
        """Whether the graph gives a stream, whose values are read here as well; known at the first read."""
        return self._log is not None and self._log.gives_values

    async def __anext__(self) -> T_co:
        """Return the next event or value, or a `Missed`.

        Raises:
            Exception: the error of the call; or, without a call, the errors of `service.attach`. Then the stream is
                closed.
        """
        log = self._log or await self._found()
        while not self._closed:
            item = self._next(log)
            if item is not None:
                self._position += 1
                return item
            if log.outcome.done():
                self._closed = True
                _result(log)
                break
            await log.changed.wait()
        raise StopAsyncIteration

    async def result(self) -> R:
        """Wait for the result of the call; unread events stay unread.

        Returns:
            The result of the graph.

        Raises:
            Exception: the error of the call; or, without a call, the errors of `service.attach`.
            PlanError: the graph gives a stream, whose values are read here as well.
        """
        log = self._log or await self._found()
        await log.changed.wait_for(log.outcome.done)
        result = _result(log)
        if log.gives_values:
            raise PlanError("this call gives a stream, which has no result but its values")
        return cast("R", result)

    async def wait_started(self) -> None:
        """Wait for the first event or value without taking it; for a server, before it sends its headers.

        Raises:
            Exception: the error of the call before its first event or value.
        """
        log, number = self._log or await self._found(), self.number
        while self._next(log) is None:
            if log.outcome.done():
                _result(log)
                break
            await log.changed.wait()
        self.number = number

    async def aclose(self) -> None:
        """End the reading; the call goes on."""
        self._closed = True
        if self._log is not None:
            self._log.changed.notify_all()

    @property
    def position(self) -> int:
        """How many events and values the reader has taken."""
        return self._position

    def statistics(self) -> StreamStatistics:
        """Return a snapshot of the counters of the call; all zero if the call is not in this process."""
        stream = None if self._log is None else self._log.stream
        found: StreamStatistics = StreamStatistics(0, 0, 0, 0, 0, 0, ()) if stream is None else stream.statistics()
        return found

    def _start(self) -> None:
        """Do nothing: a detached call has begun before."""

    async def _found(self) -> EventLog:
        assert self._find is not None
        self._log = await self._find()
        return self._log

    def _next(self, log: EventLog) -> T_co | None:
        """Return the next event, value or `Missed`; None if there is nothing yet."""
        before = log.last - len(log.items)
        if not before <= self.number <= log.last:
            is_known = self.number == 0 or log.first <= self.number <= log.last
            count = before - max(self.number, log.first) if is_known else None
            self.number = before
            if count != 0:
                return cast("T_co", Missed(count))
        while self.number < log.last:
            self.number += 1
            item = log.items[self.number]
            if not isinstance(item, Event) or isinstance(cast("Any", item).value, self._events):
                return cast("T_co", item)
        return None


def _result(log: EventLog) -> Any:
    """Return the result of a call that has ended; each reader gets its own copy of an error."""
    if log.outcome.cancelled():
        raise NodeCancelledError("the task of this detached call was cancelled")
    error = log.outcome.exception()
    if error is not None:
        raise copy_of(error)
    return log.outcome.result()
