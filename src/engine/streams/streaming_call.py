"""Streaming call: the running part of a stream that one call gives: from its admission until nothing of it is left."""

import asyncio
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

from opentelemetry.trace import Span

from ..._errors import EngineClosedError, NodeCancelledError
from ...actors.current import calling_actor, enclosing_frame, is_detached
from ...actors.frame import AnyDeployment, Frame
from ...actors.node_actor import NodeActor
from ...actors.parts import Reader
from ...actors.started_tasks import start_task
from ...actors.uninterrupted import uninterrupted
from ...telemetry import spans
from ..graph import Call
from ..inside import refuse_to_close_from_inside
from ..metering import RunMeter, end_call
from ..options import ExecutionOptions
from ..progress import StreamProgress
from ..reader_wait import ReaderWait
from ..scope import Scope
from ..uptime import Uptime
from ..wiring import Wired
from .call_scope import CallScope


class StreamingCall:
    """One call that gives a stream. It listens to the call's frame.

    It does not know the `Stream` object, so a stream that is dropped can end it.

    Attributes:
        loop: its event loop.
        reader: what the call gives; None until it is opened.
        uptime: how long it has been open.
        reader_wait: how long its reader has waited for values.
        progress: what shows how many values there were; None if nobody wants to see that.
    """

    def __init__(self, where: CallScope, call: Call[Any], options: ExecutionOptions) -> None:
        self.loop = asyncio.get_running_loop()
        self.reader: Reader[Any] | None = None
        self._where = where
        self._call = call
        self._options = options
        self._context = copy_context()
        self._parent = enclosing_frame()
        self._is_detached = is_detached()
        self._caller = calling_actor()
        is_counted = options.collect_metrics
        in_flight = where.runtime.counted_runs if where.service is None else None  # a deployment counts its own
        self._meter = RunMeter(call.graph.name, in_flight) if is_counted else None
        seconds = options.timeout_seconds
        self._deadline = None if seconds is None else self.loop.time() + seconds
        self.uptime = Uptime()
        self.reader_wait = ReaderWait()
        self.progress: StreamProgress | None = None
        self._scope: Scope | None = None
        self._frame: Frame | None = None
        self._span: Span | None = None
        self._error: BaseException | None = None
        self._was_read = False
        self._was_left = False
        self._begun = False
        self._opened = asyncio.Event()  # there is a reader, or there will never be one
        self._settled = asyncio.Event()
        # The loop knows its tasks only weakly: without this, that of a dropped stream would be collected, not ended.
        where.runtime.stream_opened(self)
        self._task = start_task(self.loop, self._run(), context=self._context.copy(), name="penstock-stream")

    @property
    def reader_wait_seconds(self) -> float:
        """How long its reader has waited for values."""
        return self.reader_wait.seconds

    @property
    def name(self) -> str:
        """The name of the graph."""
        return self._call.graph.name

    def look(self) -> None:
        """Return what its items do now, for a profile: they have no places, only those of the nodes."""

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended with an error."""
        return self._frame is not None and self._frame.state == "failed"

    @property
    def has_expired(self) -> bool:
        """Whether its time was over before it had ended."""
        return self._frame is not None and self._frame.expired

    @property
    def actors_uptime(self) -> Uptime | None:
        """How long the actors have been counting; None before there are any."""
        return None if self._scope is None else self._scope.uptime

    def actors(self) -> list[NodeActor]:
        """Return the actors that it goes through."""
        return [] if self._scope is None else self._scope.wiring.actors()

    def frames(self) -> Iterator[Frame]:
        """Yield the call, once it has begun."""
        if self._frame is not None:
            yield self._frame

    async def opened(self) -> Reader[Any]:
        """Wait until there is something to read.

        Raises:
            BaseException: what ended the call before: a refusal, the deadline, a failed node.
        """
        await self._opened.wait()
        if self.reader is None:
            await self.ended()
            raise EngineClosedError("this stream was closed")
        return self.reader

    def was_read(self, error: BaseException | None) -> None:
        """The reader has come to the end, or to the error: that is the call's outcome, unless it has one already."""
        frame = self._frame
        if self._was_read or frame is None:
            return
        self._was_read = True
        if error is None:
            frame.let_go()
        elif frame.state == "running":  # else the call has ended with it
            frame.fail(error)

    async def ended(self) -> None:
        """Wait until the call has ended and nothing of it is left.

        Raises:
            BaseException: what the call ended with, if that was an error.
        """
        await asyncio.wait([self._task])
        if self._frame is not None and self._frame.state == "failed" and self._frame.error is not None:
            self._frame.outcome()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this very call

    def abort(self, error: BaseException | None = None) -> None:
        """Begin to end everything; `aclose` waits for it."""
        if self._task.done():
            return
        self._was_left = self._was_left or error is None
        if self._error is None:
            self._error = error if error is not None else EngineClosedError("this stream was closed")
        if self._frame is None:
            if self._begun:  # before its first step, a task would just be thrown away
                self._task.cancel()
        elif error is None:
            self._frame.cancel()
        else:
            self._frame.fail(error)

    async def aclose(self) -> None:
        """End everything: cancel what runs, wait until nothing is left."""
        self.refuse_from_inside()
        self.abort()
        await uninterrupted(asyncio.wait([self._task]))

    def refuse_from_inside(self) -> None:
        """Refuse what waits for this call in one of its own nodes.

        Raises:
            ReentrantCallError: that is where it is called.
        """
        refuse_to_close_from_inside(self)

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment that the call belongs to."""
        return self._where.service

    def frame_done(self, frame: Frame) -> None:
        """The outcome is known: an error is raised at the reader, at once."""
        frame.crew.close()
        if frame.state != "done" and self.reader is not None and not self.reader.parts.abandoned:
            error = frame.error or self._error or NodeCancelledError("the call was cancelled")
            self.reader.parts.fail(error)
        self._opened.set()
        if frame.error is not None and not isinstance(frame.error, Exception):
            self._where.abort_soon()
        if frame.settled:
            self.frame_settled(frame)

    def frame_settled(self, frame: Frame) -> None:
        """Give the place back, now that nothing runs for the call any more."""
        end_call(frame.state, frame.error, self._span, self._meter)
        self._where.settled(frame)
        self._settled.set()

    async def _run(self) -> None:
        """Its only task, from first to last: admission, the call, the end of the scope."""
        self._begun = True
        try:
            if self._error is None:
                self._launch(*await self._where.admit(self._call, self._options.priority, self._deadline))
                await uninterrupted(self._settled.wait())
            else:
                self._where.withdrawn()
        except asyncio.CancelledError as error:
            self._cancelled(error)
        except BaseException as error:  # noqa: BLE001 - whoever reads the stream raises it
            self._error = error
        try:
            await uninterrupted(self._ended())
        except asyncio.CancelledError as error:
            self._cancelled(error)
        except BaseException as error:  # noqa: BLE001 - as above: a stateful node did not end well
            self._error = self._error or error
        finally:
            self.uptime.stop()
            if self._frame is None:
                end_call("cancelled" if self._was_left else "running", self._error, None, self._meter)
            self._opened.set()
            self._where.runtime.stream_closed(self)

    async def _ended(self) -> None:
        """Leave the scope, and have the last numbers shown."""
        progress, self.progress = self.progress, None
        try:
            await self._where.call_ended()
        finally:
            if progress is not None:
                await progress.aclose()

    def _cancelled(self, cause: BaseException) -> None:
        """Its task was cancelled: by `abort`, or else by whoever shuts the loop down."""
        if self._error is None:
            self._error = NodeCancelledError("the task of this stream was cancelled")
            self._error.__cause__ = cause

    def _launch(self, scope: Scope, wired: Wired, item: int) -> None:
        self._scope = scope
        context = self._context.copy()
        is_wanted, headers = self._options.trace_execution, self._call._trace_headers
        self._span, traced = spans.start_run(self._call.graph.name, context, is_wanted=is_wanted, headers=headers)
        crew = scope.crew(context, traced=traced, deadline=self._deadline)
        crew.caller = self._caller
        frame = Frame(wired.program, self._call.arguments, crew, self, item, self._parent)
        frame.priority = self._options.priority
        if self._span is not None and traced:
            frame.span = spans.FrameSpan(self._span)
        frame.on_result_stream = self._open
        self._frame = frame
        self._where.begun(frame)
        if self._deadline is not None and self._options.timeout_seconds is not None:
            frame.expire_at(self._deadline, self._options.timeout_seconds)
        if self._is_detached:
            frame.expire_with_parent()
        if frame.state == "running":
            crew.launch(frame, wired.entries)

    def _open(self, reader: Reader[Any]) -> None:
        self.reader = reader
        self._opened.set()
