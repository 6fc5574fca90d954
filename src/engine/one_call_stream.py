"""Streams of one call: `StreamingCall`, and the objects of its reader: `ValuesStream`, or `EventStream` with events."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar, cast

from .._errors import EngineClosedError, Interrupted, NodeCancelledError, OptionsError, PlanError, plain_error
from ..actors.accepted import OptionRule, check, whole
from ..actors.frame import AnyDeployment, Frame, Listener
from ..actors.generators import GeneratorTask
from ..actors.node_actor import NodeActor
from ..actors.stream_buffer import DEFAULT_CAPACITY, BarrierBuffer, Reader, StreamBuffer
from ..actors.tasks import start_task, until
from .call import RunningCall
from .call_scopes import CallScope
from .call_stream import OpenStream, OwnStream, Stream, T_co, length_of
from .events import Event, EventBuffer, Value
from .graph import Call
from .options import CallOptions, ExecutionOptions, OnFinished
from .program import Wired
from .scope import Scope
from .statistics import StreamStatistics, Uptime


class OfCalls(CallOptions, total=False):
    """The options of `stream` for many calls."""

    progress: bool


class OfCall(OfCalls, total=False):
    """The options of `stream` for one call."""

    durable_key: str | None
    answer: object
    on_finished: OnFinished


_END: Any = object()


class StreamingCall(OpenStream, Listener):
    """A call that gives a stream: of values, of events, or of both. This object listens to the frame of the call.

    Attributes:
        events: the events of the call; None if they are not read.
        reader: the reader of the stream; None until the stream is opened.
        saving: the snapshots of the call; None if the call is not saved.
        has_expired: whether the call has ended with `DeadlineExceeded`.
        interruption: the error of a call that has ended because a node asked a question.
    """

    # States. Waiting: `_scope` is None, and the task of `_run` waits for the admission. `abort` cancels the task; one
    # that has not had its first step finds `_error` there instead. Running: `_scope` is set, and the frame has the
    # outcome; `abort` ends the frame. Settled: the last handler has unwound, and the task leaves the scope and ends
    # the progress bar, if any. Over: `_over` is set, and nothing of the call is left. If a deployment has a free place,
    # the call runs from the start. Then it has no task, except for a progress bar at its end: a task would cost more
    # than several values. `_opened` is set with the reader, or once there can be none: at the outcome of the frame, or
    # at the end of a call that never ran.
    #
    # Ownership: all of it is of the event loop. A dropped stream may be collected in any thread; it schedules `abort`.

    def __init__(
        self, where: CallScope, call: Call[Any], options: ExecutionOptions, events: EventBuffer | None = None
    ) -> None:
        super().__init__(asyncio.get_running_loop())
        self._kept = where.kept(call, options)
        self.events = events
        self.reader: Reader[Any] | None = None
        self.saving = where.saving
        self._where = where
        self._call = call
        seconds = options.timeout_seconds
        self._frame = frame = RunningCall(
            self.loop, call.graph.name, options, call._trace_headers, timeout_seconds=seconds
        )
        frame.listener = self
        frame.on_result_stream = self._open
        if events is not None:
            frame.events = events
            if self.saving is not None:
                self.saving.events = events
        if options.collect_metrics:  # admission counts the calls in flight of a deployment
            frame.count(where.runtime.counted_runs if where.service is None else None)
        # Noted when the call ends: its frame forgets the error once the reader has it.
        self.has_expired = False
        self.interruption: Interrupted | None = None
        self._scope: Scope | None = None  # set when the call is launched
        self._error: BaseException | None = None
        self._was_read = False
        self._was_left = self._has_discarded = False
        self._begun = False
        self._opened = asyncio.Event()  # there is a reader, or there will never be a reader
        self._settled = asyncio.Event()
        self._over = asyncio.Event()
        # The loop knows its tasks only weakly: without this, the task of a dropped stream would be collected, not
        # ended.
        where.runtime.stream_opened(self)
        self._task: asyncio.Task[None] | None = None
        begins = None if self._kept is not None else where.admit_nowait(call, frame)
        if begins is None:
            self._start_task()
        else:
            self._launch(*begins)

    @property
    def listener(self) -> Listener:
        """This object."""
        return self

    @property
    def name(self) -> str:
        """The name of the graph."""
        return self._call.graph.name

    def look(self) -> None:
        """Return None, for a profile: the values of a stream have no window."""

    def inputs(self) -> list[StreamBuffer[Any]]:
        """Return the buffers of the streams that are arguments of the call, once these are open."""
        open_now = [member for member in list(self._frame.group.workers) if isinstance(member, GeneratorTask)]
        given = [member for member in open_now if any(member.given is one for one in self._call.arguments)]
        return [buffer for member in given for buffer in member.buffers]

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, and no task of it is left."""
        return self._over.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended with an error, and not with a question."""
        return self._frame.state == "failed" and self.interruption is None

    @property
    def actors_uptime(self) -> Uptime | None:
        """The time that the counters of the actors cover; None before there are any actors."""
        return None if self._scope is None else self._scope.uptime

    def statistics(self) -> StreamStatistics:
        """Return a snapshot of the counters."""
        buffers: list[StreamBuffer[Any]] = [] if self.reader is None else [self.reader.buffer]
        buffers += [] if self.events is None else [self.events]
        position, held = sum(one.position for one in buffers), sum(len(one.held) for one in buffers)
        given = position + held
        actors = tuple(actor.statistics() for actor in self.actors())
        counting = self.actors_uptime
        return StreamStatistics(
            given, given, int(self.has_failed), 0, position, held, actors,
            self.uptime.seconds, None if counting is None else counting.seconds, int(self.has_expired),
            int(self.interruption is not None),
            *((0, 0, 0, 0) if self.saving is None else (*self.saving.costs[:3], self.saving.costs.most_values)),
        )  # fmt: skip

    def actors(self) -> list[NodeActor]:
        """Return the actors that the call goes through."""
        return [] if self._scope is None else self._scope.wiring.actors()

    def frames(self) -> Iterator[Frame]:
        """Yield the call, once it has begun."""
        if self._scope is not None:
            yield self._frame

    async def opened(self) -> Reader[Any]:
        """Wait until the stream is open and, for a saved call, no source was refused; return the reader.

        Raises:
            BaseException: the error that ended the call first, such as a refusal, the deadline, or an error of a node.
        """
        await self._opened.wait()
        if self.saving is not None and self.reader is not None:
            await self.saving.all_begun.wait()
        if self.reader is None or (self.saving is not None and self._frame.state == "failed"):
            await self.ended()
            raise EngineClosedError("this stream was closed")
        return self.reader

    async def read(self, buffer: StreamBuffer[Any]) -> Any:
        """Return the next value; `_END` at the end, or after an error, which becomes the outcome of the call."""
        error: BaseException | None = None
        try:
            with self.reader_wait:
                return await buffer.get()
        except StopAsyncIteration:
            pass
        except BaseException as failure:
            if not buffer.abandoned:
                raise  # the reader was cancelled, which does not end the stream
            error = failure
        frame = self._frame
        if not self._was_read:
            self._was_read = True
            if error is None:
                frame.remove_pending()
            elif frame.state == "running":  # if not, the call has ended with this error already
                frame.fail(error)
        error = None  # breaks a cycle: its traceback refers to this stack frame
        return _END

    def result(self) -> Any:
        """Return the result of the call, which has ended.

        Raises:
            EngineClosedError: the call has ended without a result; its error was raised before.
        """
        if self._kept is not None and self._kept.is_finished:
            return self._kept.result
        if self._has_discarded:
            raise EngineClosedError("this stream was closed before its result was taken, so the result was discarded")
        self._frame.unread = None  # the result belongs to the reader
        if self._frame.state != "done":
            raise EngineClosedError("this call has ended without a result; its error was raised at the reader before")
        return self._frame.result

    async def ended(self) -> None:
        """Wait until the call has ended and none of its tasks is left.

        Raises:
            BaseException: the error of the call, if it failed.
        """
        await self._over.wait()
        if self._frame.state == "failed" and self._frame.error is not None:
            self._frame.outcome()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # breaks a cycle: its traceback refers to this stack frame

    def abort(self, error: BaseException | None = None) -> None:
        """Begin to end the call; see `OpenStream`. A call that has a result or an error keeps it for its reader."""
        if self._over.is_set() or self._frame.state in ("done", "failed"):
            if error is None and self._frame.unread:
                self._has_discarded = True
                self._frame.drop_unread()
            return
        self._was_left = self._was_left or error is None
        if self._error is None:
            self._error = error if error is not None else EngineClosedError("this stream was closed")
        if self._scope is None:
            if self._begun and self._task is not None:  # before its first step, a cancelled task would never run
                self._task.cancel()
        elif error is None:
            self._frame.cancel()
        else:
            self._frame.fail(error)

    async def gone(self) -> None:
        """Wait until the call has ended, and none of its tasks is left."""
        await until(self._over.is_set, self._over.wait)
        await until(lambda: not self._frame.workers, self._frame.members_left)

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment that is called; None outside of deployments."""
        return self._where.service

    def frame_done(self, frame: Frame) -> None:
        """Take the outcome of the call. The reader gets an error at once, before the remaining values."""
        self.has_expired = frame.has_expired
        self.interruption = frame.error if isinstance(frame.error, Interrupted) else None
        self._frame.close()
        if frame.state != "done" and self.reader is not None and not self.reader.buffer.abandoned:
            error = frame.error or self._error or NodeCancelledError("the call was cancelled")
            if self.reader.buffer.error is not None:  # the generator has failed, and the reader gets another error
                self.reader.buffer.tell_abandoned()
            self.reader.buffer.fail(error)
        self._opened.set()
        if self.events is not None:
            self.events.end()
        if frame.ends_program:
            self._where.abort_soon()
        if frame.settled:
            self.frame_settled(frame)

    def frame_settled(self, frame: Frame) -> None:
        """Report the outcome, and give the place back: the last handler of the call has ended."""
        self._frame.report()
        self._where.settled(frame)
        self._settled.set()
        if self._task is None and self.progress is None:
            self._finish()
        elif self._task is None:
            self._start_task()

    def _start_task(self) -> None:
        self._task = start_task(self.loop, self._run(), context=self._frame.context.copy(), name="penstock-stream")
        self._task.add_done_callback(self._finish)

    async def _run(self) -> None:
        """Take the call through its life."""
        self._begun = True
        try:
            if self._scope is None and self._error is not None:  # closed before the first step of this task
                self._where.withdrawn()
            else:
                async with self._kept or nullcontext():
                    await self._live()
        finally:
            await self.progress_ended()

    def _finish(self, task: asyncio.Task[None] | None = None) -> None:
        """Note that nothing of the call is left. Keep the error of its task, which the reader raises."""
        self._task = None  # breaks a cycle: the traceback of the error refers to this object
        if task is not None:
            cancelled = NodeCancelledError("the task of this stream was cancelled")  # by `abort`, or with the loop
            error = cancelled if task.cancelled() else task.exception()
            if error is not None and error is not self._frame.error:
                self._error = self._error or plain_error(error, "a function of this call")
        self.uptime.stop()
        if self._scope is None:
            was_kept = self._kept is not None and self._kept.is_finished
            self._frame.report("cancelled" if self._was_left else "done" if was_kept else "running", self._error)
        self._opened.set()
        if self.events is not None:
            self.events.end()
        self._where.runtime.stream_closed(self)
        self._frame.listener, self._frame.on_result_stream = Listener(), None  # breaks cycles
        self._over.set()

    async def _live(self) -> None:
        """Begin the call once it is admitted, wait for its last handler, and leave the scope."""
        kept, frame = self._kept, self._frame
        try:
            if kept is not None:
                kept.belong(frame.context)
            if kept is None or not kept.is_finished:
                if self._scope is None:
                    self._launch(*await self._where.admit(self._call, frame))
                await until(self._settled.is_set, self._settled.wait)
        finally:
            await self._where.call_ended(frame)  # fails if a stateful node could not be left
        if kept is not None and self._scope is not None:
            if frame.state != "done":
                raise self.interruption or self._error or frame.error or asyncio.CancelledError
            if self.reader is None:
                kept.result = frame.result

    def _launch(self, scope: Scope, wired: Wired, item: int) -> None:
        self._scope = scope
        frame = self._frame
        frame.join(scope)
        frame.launch(wired, self._call.arguments, item)

    def _open(self, reader: Reader[Any]) -> None:
        if self.saving is not None:
            self.saving.opened(reader.buffer)
        self.reader = reader
        self._opened.set()
        if self.events is not None:
            self.events.values_opened(reader.buffer)


class ValuesStream(OwnStream[StreamingCall, T_co]):
    """The values of one call, as an async iterator."""

    _buffer: StreamBuffer[Any] | None = None

    async def __aenter__(self) -> Self:
        """Start the call. A call that is saved goes on from its newest snapshot now, so that `position` says where.

        Raises:
            CheckpointError: the folder cannot be used, or its snapshots are of another run.
            Exception: the error of a saved call before its stream was open.
        """
        if self._start().saving is not None:
            try:
                await self._open()
            finally:
                if self._buffer is None:  # such as after a cancel: where `__aenter__` fails, `__aexit__` is not called
                    await self.aclose()
            self._reader = None  # perhaps another task reads
        return self

    async def __anext__(self) -> T_co:
        """Return the next value. In a saved stream, asking for the value behind a barrier completes the snapshot.

        Raises:
            Exception: the error of the call; the stream is closed then.
        """
        buffer = self._buffer or await self._open()
        if isinstance(buffer, BarrierBuffer):
            await self._look_at_barrier(buffer)
        if (
            not buffer.held
            and not buffer.ended
            and buffer.waiter is None
            and not self._closed
            and self._work is not None
        ):
            # `StreamBuffer.wait`, in a block of `ReaderWait`, written out: each value of a slow stream comes here, and
            # a further coroutine or context manager would cost a tenth of the whole time of a value.
            wait = self._work.reader_wait
            wait.begin()
            waiter = buffer.waiter = self._work.loop.create_future()
            try:
                await waiter
            except asyncio.CancelledError as error:
                raise asyncio.CancelledError(*error.args)  # noqa: B904 - the error that arrived is its context
            finally:
                buffer.waiter = None
                wait.end()
        if buffer.held:
            value: T_co = buffer.take()
            return value
        return await self._next(buffer)

    async def wait_started(self) -> None:
        """Wait for the first value without taking it; for a server, before it sends its headers.

        Raises:
            Exception: the error of the call before its first value, such as `Overloaded`.
        """
        buffer = self._buffer or await self._open()
        with self._start().reader_wait:
            while not buffer.held and not buffer.ended:
                await buffer.wait()
        if not buffer.held and buffer.error is not None:
            await self._next(buffer)  # raises it

    @property
    def position(self) -> int:
        """How many values the reader has taken."""
        return 0 if self._buffer is None else self._buffer.position

    @property
    def ready(self) -> int:
        """How many values can be read without waiting."""
        return 0 if self._buffer is None else len(self._buffer.held)

    async def _open(self) -> StreamBuffer[Any]:
        if self._closed and self._work is not None:
            raise StopAsyncIteration
        call = self._start()
        if call.saving is not None:  # of other streams, the object would be kept by the task that has dropped it
            self._reader = asyncio.current_task()
        try:
            with call.reader_wait:
                self._buffer = (await call.opened()).buffer
        except asyncio.CancelledError:
            raise  # the reader was cancelled, which does not end the stream
        except BaseException:
            await self.aclose()
            raise
        return self._buffer

    async def _next(self, buffer: StreamBuffer[Any]) -> T_co:
        if self._closed:
            raise StopAsyncIteration
        call = self._start()
        value: T_co = await call.read(buffer)
        if value is not _END:
            return value
        with call.reader_wait:
            await call.ended()
        raise StopAsyncIteration

    async def _look_at_barrier(self, buffer: BarrierBuffer[Any]) -> None:
        """Pass the barriers that the reader has reached; or the next barrier, if a snapshot is due before it."""
        self._reader, saving = asyncio.current_task(), self._start().saving
        if self._closed:
            return
        if buffer.held and buffer.barrier is not None and saving is not None and saving.is_late(buffer.position):
            await buffer.pass_barrier()
        while not buffer.held and buffer.barrier is not None:
            await buffer.pass_barrier()

    async def _checkpoint(self, *, is_reader: bool, unread: Sequence[Any] = ()) -> None:
        call = self._start()
        saving = call.saving
        if saving is None:
            await super()._checkpoint(is_reader=is_reader, unread=unread)  # refuses
            return
        if self._closed or call.is_over:
            saved = "its end is saved" if saving.is_done else "its last snapshot is the one before that"
            raise EngineClosedError(f"this stream has ended, so checkpoint() has nothing to save; {saved}")
        if self._buffer is None:
            await self._open()
        for value in unread:
            saving.put_back(value)
        await saving.checkpoint(is_reader=is_reader)


E = TypeVar("E")
R = TypeVar("R")


class EventStream(ValuesStream[Event[E]], Generic[E, R]):
    """The events of one call, and its result; made by `engine.stream(call, events=...)`.

    A `Stream` of events, and of the values of the call if its graph gives a stream. Values and events of one node come
    in their order. The stream ends with the call. An error of the call comes after the events before it.
    """

    # Further arguments: the buffer of the events, and the name of the graph if it gives a stream.
    def __init__(self, begin: Callable[[], StreamingCall], events: EventBuffer, gives_stream: str | None) -> None:
        super().__init__(begin)
        self._events = events
        self._gives_stream = gives_stream

    @property
    def gives_values(self) -> bool:
        """Whether the graph gives a stream, whose values are read here as well."""
        return self._gives_stream is not None

    async def __anext__(self) -> Event[E]:
        """Return the next event, or the next value. In a saved stream, reading past a barrier completes its snapshot.

        Raises:
            Exception: the error of the call; the stream is closed then.
        """
        events, call = self._events, self._work or self._start()
        if call.saving is not None:
            buffer, self._reader = self._buffer or await self._open(), asyncio.current_task()
            if buffer.held and isinstance(buffer, BarrierBuffer):
                await self._look_at_barrier(buffer)
        elif events.held and events.values is None and not self._closed:
            return events.take()
        while not (self._closed or events.abandoned):
            held, values = events.held, events.values
            if held and (values is None or not values.held or held[0]._after <= values.position):
                return events.take()
            if values is not None and values.held:
                return cast("Event[E]", Value(values.take()))
            if not await self._more(call):
                break
        raise StopAsyncIteration

    async def result(self) -> R:
        """Wait for the result of the call; unread events, and later events, are dropped.

        Returns:
            The result of the graph.

        Raises:
            Exception: the error of the call.
            EngineClosedError: the stream was closed, or the error of the call was raised before.
            PlanError: the graph gives a stream, whose values are read here as well.
        """
        if self._gives_stream is not None:
            raise PlanError(f"graph {self._gives_stream!r} gives a stream, which has no result but its values")
        call = self._start()
        self._events.abandon()
        with call.reader_wait:
            await call.ended()
        return cast("R", call.result())

    async def wait_started(self) -> None:
        """Wait for the first event or value without taking it; for a server, before it sends its headers.

        Raises:
            Exception: the error of the call before its first event or value, such as `Overloaded`.
        """
        call, events = self._start(), self._events
        while not (events.held or (events.values is not None and events.values.held)) and await self._more(call):
            pass

    async def _more(self, call: StreamingCall) -> bool:
        """Wait for an event or a value, when none is held; return False at the end.

        Raises:
            BaseException: the error of the call.
        """
        events, values = self._events, self._events.values
        if values is not None and values.ended and not values.abandoned:
            await call.read(values)  # it does not wait: no value is held
            return True
        if events.ended:
            with call.reader_wait:
                await call.ended()
            return False
        if isinstance(values, BarrierBuffer) and values.barrier is not None:
            await values.pass_barrier()
            return True
        if events.waiter is not None:
            raise RuntimeError("this stream is being read by another task; a stream has one reader")
        with call.reader_wait:
            events.waiter = call.loop.create_future()
            if values is not None:
                values.waiter = events.waiter
            try:
                await events.waiter
            finally:
                events.waiter = None
                if values is not None:
                    values.waiter = None
        return True

    @property
    def position(self) -> int:
        """How many values of the stream the reader has taken; for a graph without a stream, how many events."""
        return self._events.position if not self.gives_values else self._taken - self._events.position

    @property
    def ready(self) -> int:
        """How many events and values can be read without waiting."""
        values = self._events.values
        return len(self._events.held) + (0 if values is None else len(values.held))

    @property
    def _taken(self) -> int:
        values = self._events.values
        return self._events.position + (0 if values is None else values.position)

    async def _open(self) -> StreamBuffer[Any]:
        with self._events.unbounded():  # steps before the stream may emit, too, and nothing is read meanwhile
            return await super()._open()

    async def _checkpoint(self, *, is_reader: bool, unread: Sequence[Any] = ()) -> None:
        with self._events.unbounded() if is_reader else nullcontext():
            await super()._checkpoint(is_reader=is_reader, unread=unread)


def stream_of(
    call: Call[Any],
    start: Callable[[EventBuffer | None], StreamingCall],
    events: type[Any] | None,
    capacity: int | None,
    *,
    shows_progress: bool,
) -> Stream[Any]:
    """Return the stream of one call, with or without events.

    Args:
        call: the call.
        start: starts it, with the buffer of its events.
        events: the class of the events that are read; None for none.
        capacity: the most events that wait for the reader; None for the default.
        shows_progress: whether a bar shows the progress.
    """
    buffer = None if events is None else EventBuffer(events, DEFAULT_CAPACITY if capacity is None else capacity)

    def begin() -> StreamingCall:
        begun = start(buffer)
        if shows_progress:
            begun.show_progress(*_progress_of(begun))
        return begun

    if buffer is None:
        return ValuesStream[Any](begin)
    name = call.graph.name if call.graph._present_trace().gives_stream else None
    return EventStream[Any, Any](begin, buffer, name)


def check_events(events: object, capacity: object, *, is_one_call: bool) -> None:
    """Check the options `events=` and `capacity=` of `stream`.

    Raises:
        OptionsError: they do not accept their values, or do not apply.
    """
    if events is None:
        if capacity is not None:
            raise OptionsError("capacity= bounds the events of a call, which events= reads")
        return
    if not is_one_call:
        raise OptionsError("events= reads the events of one call, stream(call, events=...), and not of many")
    check("events", events, _CLASS)
    if capacity is not None:
        check("capacity", capacity, whole(1))


_CLASS = OptionRule(
    "the class of the events to read: one that isinstance takes, such as a dataclass; a class that they have in "
    "common; or `object` for all",
    lambda value: isinstance(value, type) and not hasattr(value, "__args__"),
)


def _progress_of(call: StreamingCall) -> tuple[int | None, Callable[[], StreamStatistics]]:
    """Return the total and the counters for a progress bar.

    If the source has a length, the values of the source are counted, since the result may have more or fewer values.
    """
    sources = [given for given in call._call.arguments if hasattr(given, "__aiter__")]
    total = length_of(sources[0]) if len(sources) == 1 else None
    buffers: list[StreamBuffer[Any]] = []

    def look() -> StreamStatistics:
        now = call.statistics()
        if total is None:
            return now
        if not buffers:
            buffers.extend(call.inputs())
        # A source that is not open any more, although its graph has begun, was read to its end.
        read = sum(buffer.position for buffer in buffers) if buffers or call.reader is None else total
        return replace(now, completed=max(0, read - now.failed))

    return total, look
