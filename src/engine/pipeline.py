"""Pipeline: feeds calls from a source through actors, a bounded number at a time, and collects their outcomes."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog
from opentelemetry.trace import Span

from .._errors import DeadlineExceeded, EngineClosedError
from ..actors.actor import Actor
from ..actors.crew import Crew
from ..actors.frame import Frame
from ..telemetry import spans
from .admission import Admission
from .graph import Call, Graph
from .options import ExecutionOptions
from .scope import Scope, enclosing_frame, end_span, start_span, uninterrupted
from .wiring import Wired

Calls: TypeAlias = Iterable[Call[Any]] | AsyncIterable[Call[Any]]

# Items that are taken from a source that never waits before the loop gets its turn.
_BURST = 64

_log: structlog.stdlib.BoundLogger = structlog.get_logger("penstock")


@dataclass
class Counters:
    """What has become of the items of a stream so far."""

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    skipped: int = 0
    yielded: int = 0


class Pipeline:
    """The running part of a stream. It does not know the `Stream` object, so a stream that is dropped can end it.

    The reorder window is enforced here: an item counts in `max_in_flight` until it has been taken out in its turn.

    Args:
        scope: whose actors the items go through.
        calls: where they come from.
        options: the options of the stream.
        prepare: returns the actors of a graph; asked once for each graph, so a stream keeps the plan that it began with.
        owns_scope: whether the scope ends with the pipeline.
        admission: for a stream of a deployment, its admission: every item needs a place there as well.
        context: what handlers run in; a copy of the caller's.
    """

    def __init__(
        self,
        scope: Scope,
        calls: Calls,
        options: ExecutionOptions,
        *,
        prepare: Callable[[Graph[..., Any]], Awaitable[Wired]],
        owns_scope: bool,
        admission: Admission | None = None,
        context: Context | None = None,
    ) -> None:
        self.counters = Counters()
        self.position = 0  # the index of the next item to be yielded
        self._scope = scope
        self._calls = calls
        self._options = options
        self._owns_scope = owns_scope
        self._admission = admission
        self._context = copy_context() if context is None else context
        self.loop = scope.loop
        self._in_flight = 0  # places taken in the window
        self._running: set[Frame] = set()
        self._crews: dict[Frame, Crew] = {}  # of the items that have one of their own
        self._unwinding: set[int] = set()  # items that were taken out before they had unwound
        self._ended: dict[int, Frame] = {}
        self._completion_order: deque[int] = deque()
        self._exhausted = False
        self._error: BaseException | None = None  # what ends the whole stream
        self._reader: asyncio.Future[None] | None = None
        self._window: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._prepare = prepare
        self._wired: dict[Graph[..., Any], Wired] = {}
        self._pull_again: Callable[[], None] | None = None  # pauses while the window is full
        self._parent = enclosing_frame()
        self._span: Span | None = spans.start_stream(self._context)
        # Unsampled items share a context and the workers that run in it. An item that is sampled, or that belongs to
        # a deployment, has a context of its own, and so workers of its own.
        self._own_crews = admission is not None or (self._span is not None and self._span.is_recording())
        self._crew: Crew | None = None if self._own_crews else scope.crew(self._context)
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if options.timeout_seconds is not None:
            self._deadline = self.loop.time() + options.timeout_seconds
            self._timer = self.loop.call_at(self._deadline, self._expire)
        self.on_closed: Callable[[], None] | None = None
        self._pump = self.loop.create_task(self._feed(), context=self._context.copy(), name="penstock-source")

    def next_nowait(self) -> Frame | None:
        """Take out the next item in its turn, if it has ended."""
        if self._options.ordered:
            frame = self._ended.pop(self.position, None)
            if frame is None:
                return None
        elif self._completion_order:
            frame = self._ended.pop(self._completion_order.popleft())
        else:
            return None
        self.position += 1
        if frame.unwinding:
            self._unwinding.add(frame.item)
            return frame
        # `_release`, written out: a call here costs a twentieth of an item's way through ten plain functions.
        self._in_flight -= 1
        if self._pull_again is not None or self._window is not None or self._exhausted:
            self._make_room()
        return frame

    async def next_frame(self) -> Frame | None:
        """Take out the next item that has ended, in its turn; None at the end of the stream.

        Raises:
            BaseException: what ended the whole stream: an error of the source, the deadline, KeyboardInterrupt.
        """
        while True:
            frame = self.next_nowait()
            if frame is not None:
                return frame
            if self._error is not None:
                raise self._error
            if self._exhausted and not self._in_flight:
                return None
            await self._something()

    async def first_ended(self) -> Frame | None:
        """Wait until an item can be taken out, and leave it there; None at the end of the stream."""
        while (index := self._next_index()) is None:
            if self._error is not None:
                raise self._error
            if self._exhausted and not self._in_flight:
                return None
            await self._something()
        return self._ended[index]

    async def _something(self) -> None:
        self._reader = self.loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def actors(self) -> list[Actor]:
        """Return the actors that the items go through."""
        return self._scope.wiring.actors()

    @property
    def in_flight(self) -> int:
        """Items that count in `max_in_flight`."""
        return self._in_flight

    def abort(self, error: BaseException | None = None) -> None:
        """Begin to end everything; `aclose` waits for it."""
        if self._error is None:
            self._error = error if error is not None else EngineClosedError("this stream was closed")
        if self._closing is None:
            self._closing = self.loop.create_task(self._close(), name="penstock-stream-close")
        self._wake_reader()

    async def aclose(self) -> None:
        """End everything: cancel what runs, close the source, release stateful nodes; waits until nothing is left."""
        self.abort()
        assert self._closing is not None
        await uninterrupted(asyncio.shield(self._closing))

    def frame_done(self, frame: Frame) -> None:
        """An item has ended."""
        self._running.discard(frame)
        item = frame.item
        if frame.state == "done":
            self.counters.completed += 1
        elif frame.state == "failed":
            self.counters.failed += 1
            if not isinstance(frame.error, Exception):
                self.abort(frame.error)  # KeyboardInterrupt and SystemExit end the scope
        if frame.state != "cancelled":
            self._ended[item] = frame
            if not self._options.ordered:
                self._completion_order.append(item)
            if self._reader is not None and (item == self.position or not self._options.ordered):
                self._wake_reader()
        if self._own_crews and not frame.unwinding:
            self.frame_settled(frame)

    def frame_settled(self, frame: Frame) -> None:
        """Nothing runs for an item any more."""
        crew = self._crews.pop(frame, None)
        if crew is not None:
            crew.close()
            end_span(frame.span, frame)
        if self._admission is not None:
            self._admission.release()
        if frame.item in self._unwinding:
            self._unwinding.discard(frame.item)
            self._release()

    def _next_index(self) -> int | None:
        if self._options.ordered:
            return self.position if self.position in self._ended else None
        return self._completion_order[0] if self._completion_order else None

    def _release(self) -> None:
        self._in_flight -= 1
        self._make_room()

    def _make_room(self) -> None:
        if self._pull_again is not None and self._crew is not None:
            self._crew.feed, self._pull_again = self._pull_again, None
            if not self._crew.armed:
                self._crew.arm()
        if self._window is not None and not self._window.done():
            self._window.set_result(None)
        if self._exhausted and not self._in_flight:
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _expire(self) -> None:
        self.abort(DeadlineExceeded(f"the stream did not end within {self._options.timeout_seconds:g} s"))

    async def _feed(self) -> None:
        """Ask the source for calls, and start them; the task of the source, from its first step to its last."""
        calls = self._calls
        try:
            if isinstance(calls, AsyncIterable):
                await self._feed_from(calls.__aiter__())
            elif self._crew is None:
                await self._feed_from(_Steps(iter(calls)))
            else:
                await self._let_workers_pull(iter(calls), self._crew)
        except Exception as error:  # of the source, or of a stateful node that does not start: it ends the stream
            if self._error is None:
                self._error = error
        self._exhausted = True
        self._wake_reader()

    async def _feed_from(self, source: AsyncIterator[Any]) -> None:
        index = 0
        try:
            while True:
                while self._in_flight >= self._options.max_in_flight:
                    self._window = self.loop.create_future()
                    await self._window
                self._in_flight += 1  # the place is reserved before the source is asked
                try:
                    call = await source.__anext__()
                    frame, full = await self._submit(call, index)
                except BaseException:
                    self._in_flight -= 1
                    raise
                for actor in full:
                    await actor.queue(frame)
                index += 1
                if index % _BURST == 0:
                    await asyncio.sleep(0)
        except StopAsyncIteration:
            pass
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    async def _let_workers_pull(self, iterator: Iterator[Any], crew: Crew) -> None:
        """Have a worker that has nothing to do take the next call itself: no hop between the source and its item.

        What a worker cannot do, because it has to wait, it leaves to this task: entering a stateful node, and an inbox
        that is full.
        """
        index = 0
        frame: Frame | None = None
        full: list[Actor] = []
        unprepared: Any = None
        stopped: asyncio.Future[None] = self.loop.create_future()

        def pull() -> None:
            nonlocal index, frame, full, unprepared
            crew.feed = None
            if self._in_flight >= self._options.max_in_flight:
                self._pull_again = pull
                return
            self._in_flight += 1
            try:
                call = next(iterator)
                wired = self._wired.get(call.graph) if isinstance(call, Call) else None
            except BaseException as error:
                self._in_flight -= 1
                stopped.set_exception(_Ended() if isinstance(error, StopIteration) else error)
                return
            if wired is None:
                unprepared = call
                stopped.set_result(None)
                return
            frame = Frame(wired.program, call.arguments, crew, self, index, self._parent)
            index += 1
            full = self._begin(frame, crew, wired)
            if full:
                stopped.set_result(None)
            else:
                crew.feed = pull

        try:
            while True:
                crew.feed = pull
                crew.arm()
                await stopped
                stopped = self.loop.create_future()
                if unprepared is not None:
                    call, unprepared = unprepared, None
                    try:
                        frame, full = await self._submit(call, index)
                    except BaseException:
                        self._in_flight -= 1
                        raise
                    index += 1
                for actor in full:
                    assert frame is not None
                    await actor.queue(frame)
                frame = None
        except _Ended:
            pass
        finally:
            crew.feed = self._pull_again = None
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    async def _submit(self, call: Any, index: int) -> tuple[Frame, list[Actor]]:
        if not isinstance(call, Call):
            raise TypeError(f"a stream is made of calls of graphs, such as search(url); item {index} is {call!r}")
        wired = self._wired.get(call.graph)
        if wired is None:
            wired = self._wired[call.graph] = await self._prepare(call.graph)
        if self._admission is not None:
            await self._admission.reserve(self._options.priority, call.graph.name)
        crew, span, traced = self._crew, None, False
        if crew is None:
            context = self._context.copy()
            span, traced = start_span(call, context, item=index, parent=self._span)
            crew = self._scope.crew(context, traced=traced)
        frame = Frame(wired.program, call.arguments, crew, self, index, self._parent)
        frame.priority = self._options.priority
        frame.span = span if traced else None
        return frame, self._begin(frame, crew, wired)

    def _begin(self, frame: Frame, crew: Crew, wired: Wired) -> list[Actor]:
        self.counters.submitted += 1
        if self._deadline is not None:
            frame.deadline = self._deadline
        self._running.add(frame)
        if crew is self._crew:
            return crew.start(frame, wired.entries)
        self._crews[frame] = crew
        crew.launch(frame, wired.entries)
        return []

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._pump.cancel()
        await asyncio.wait([self._pump])
        for frame in list(self._running):
            frame.cancel()
        if self._crew is not None:
            self._crew.feed = None
            self._crew.close()
        if self._owns_scope:
            await self._scope.close()
        if self._span is not None:
            self._span.end()
        if self.on_closed is not None:
            self.on_closed()


class _Ended(Exception):  # noqa: N818 - not an error
    """The source has no more calls. A StopIteration cannot travel through a future."""


class _Steps(AsyncIterator[Any]):
    """A plain iterator as an async one."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    async def __anext__(self) -> Any:
        for call in self._iterator:
            return call
        raise StopAsyncIteration

    async def aclose(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


def log_skipped(frame: Frame) -> None:
    """Log an item that a stream skips."""
    _log.warning(
        "stream.item_skipped", graph=frame.layout.name, item=frame.item, error=repr(frame.error),
    )  # fmt: skip


