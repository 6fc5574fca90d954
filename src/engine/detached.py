"""Detached calls of a deployment, which go on without a reader, and `DetachedStream`, which a reader of one holds."""

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

# Events and values of a key that wait for readers to come: 1,000 of 1 kB for each of 1,000 keys are 1 GB.
KEPT: Final = 1000
# Ended calls whose events are still there for a reader that has lost its connection just before.
_ENDED: Final = 100

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
_Place: TypeAlias = "tuple[Durable, str]"  # where a key is kept, and the key


@dataclass(frozen=True)
class Missed:
    """What a reader of a detached call gets first if events and values behind its number are not kept any more.

    Attributes:
        count: how many; None if that is not known, because the number is that of another process.
        kind: "missed"; events have "event", and values "value".
    """

    count: int | None
    kind: ClassVar[Literal["missed"]] = "missed"


class EventLog:
    """The last events and values of a key in this process, and the outcome of its present call.

    Args:
        before: the log of its last call in this process, which this one goes on with; None if there is none.

    Attributes:
        items: the events and values, by their numbers, which follow each other.
        first: the number before that of the first one that there was.
        last: the number of the last one.
        gives_values: whether the graph gives a stream.
        changed: notified at each of them, and at the end.
        outcome: the outcome of the call.
        stream: what the call itself is read from; None if there is no call in this process.
    """

    def __init__(self, before: "EventLog | None" = None) -> None:
        self.items: dict[int, Any] = {} if before is None else dict(before.items)
        # Numbers grow in the next process as well, so that one of this process is none there.
        self.first: int = int(time.time() * 1e6) if before is None else before.first
        self.last: int = self.first if before is None else before.last
        self.gives_values: bool = before is not None and before.gives_values
        self.changed = Condition()
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stream: Any = None  # an `EventStream`, whose file knows this one

    async def record(self, stream: Any) -> Any:
        """Read a call to its end, whatever readers do; return its result."""
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
        self.ended: dict[_Place, EventLog] = {}  # without their calls and outcomes; those that ended last come last
        self._changed = changed

    def begin(self, place: _Place, stream: Stream[Any]) -> EventLog:
        """Begin a call, which goes on whatever becomes of the caller.

        Raises:
            KeyInUse: a detached call has the key.
        """
        if place in self.running:
            key = place[1]
            raise KeyInUse(f"the key {key!r} is under way here, in a detached call: service.attach({key!r}) reads it")
        log = EventLog(self.ended.get(place))
        log.stream = events = cast("Any", stream)
        log.gives_values = events.gives_values
        # The call belongs to no item of the caller, and ends with none.
        context = copy_context()
        context.run(source.set, None)
        loop = context.run(events._start).loop
        log.outcome = start_task(loop, log.record(events), name="penstock-detached", context=context)
        self.running[place] = log
        log.outcome.add_done_callback(lambda outcome: self._ended(place, log))
        return log

    def find(self, key: str) -> EventLog | None:
        """Return the log of the call that has a key; None if there is none."""
        return next((log for (_, other), log in self.running.items() if other == key), None)

    async def end(self, make_error: Callable[[], PenstockError]) -> None:
        """End those calls that have not begun, and wait until all have ended; the others were ended before."""
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
            log.outcome.exception()  # marks it as retrieved: there may be no reader
        del self.running[place]
        self.ended.pop(place, None)
        self.ended[place] = EventLog(log)
        if len(self.ended) > _ENDED:
            del self.ended[next(iter(self.ended))]
        log.changed.notify_all()
        self._changed.notify_all()


class DetachedStream(Stream[T_co], Generic[T_co, R]):
    """The events and values of a detached call for one of its readers, and its result.

    Made by `service.stream(call, detached=True, ...)` and `service.attach(key)`. It may end, or be dropped, at any
    time: the call goes on. It holds nothing back: a reader that is too slow, or has come too late, gets a `Missed` in
    the place of what is not kept any more. The error of a call comes after the events before it.

    Attributes:
        number: the number of what was read last, which `service.attach(key, after=number)` goes on from. Numbers of a
            key grow, over calls and processes.
    """

    # Made with more than the reader sees: the log, or what finds it; the class of its events, and its number.
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
            Exception: the error of the call, or why there is none, as for `service.attach`; the stream is closed then.
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
        """Wait for the result of the call; what was not read stays unread.

        Returns:
            The result of the graph.

        Raises:
            Exception: the error of the call, or why there is none, as for `service.attach`.
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
            Exception: the error of the call before that.
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
        """Return a snapshot of the counters of the call, which is zero if that is none of this process."""
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
        """Return what comes next; None if there is nothing yet."""
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
    """Return the result of a call that has ended; each reader gets an error object of its own."""
    if log.outcome.cancelled():
        raise NodeCancelledError("the task of this detached call was cancelled")
    error = log.outcome.exception()
    if error is not None:
        raise copy_of(error)
    return log.outcome.result()
