"""`map_each` over a stream: a window of private sub-frames between one stream and the next."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span

from ...actors.crew import Crew
from ...actors.frame import Frame
from ...actors.parts import Parts
from ...actors.uninterrupted import until
from ...telemetry import logs, spans

if TYPE_CHECKING:
    from ..wiring import Wired


class StreamMap:
    """Runs a body for each value of a stream, a bounded number at a time. It listens to their frames.

    A value counts from before it is taken until its result is given on, in its turn: so no node waits for the window.
    """

    def __init__(self, wired: "Wired", parent: Frame, items: Parts[Any], outside: tuple[Any, ...], limit: int) -> None:
        self._wired = wired
        self._parent = parent
        self._items = items
        self._outside = outside
        self._limit = limit
        self._window: deque[Frame] = deque()
        self._failed = False
        self._changed: asyncio.Future[None] | None = None
        self._started = 0
        self._span: Span | None = None
        self._empty = asyncio.Event()
        crew = parent.crew
        self._crew = Crew(
            crew.loop, copy_context(), self._ended, traced=crew.traced, deadline=crew.deadline, threads=crew.threads
        )

    async def results(self) -> AsyncGenerator[Any, None]:
        """Yield the results, in the order of the values; the first error ends it, in its turn."""
        window, items, parent = self._window, self._items, self._parent
        self._span = None if parent.span is None else spans.present()  # that of the step that drives this
        parent.body_begun(self)
        try:
            while True:
                while items.held and len(window) < self._limit and not self._failed:
                    self._start(items.take())
                if window and window[0].state != "running":
                    yield window.popleft().outcome()
                elif window or not items.ended:
                    await self._wait()
                elif items.error is not None:
                    await items.get()  # raises it
                else:
                    return
        finally:
            parent.body_ended(self)
            await self._close()

    def stop(self) -> None:
        """Begin nothing more, and cancel what runs: the frame around it has ended."""
        self._failed = True
        for frame in list(self._window):
            frame.cancel()

    @property
    def service(self) -> None:
        """A body belongs to the frame around it."""

    def frame_done(self, frame: Frame) -> None:
        """Have the result given on, if it is its turn; after a failure nothing new is started."""
        self._failed |= frame.state != "done"
        if self._changed is not None and not self._changed.done() and self._window[0] is frame:
            self._changed.set_result(None)

    def frame_settled(self, frame: Frame) -> None:
        """The end of the last worker says so, too."""

    def _start(self, value: Any) -> None:
        inputs = (value, *self._outside)
        frame = self._parent.inner(self._wired.program, inputs, self._crew, self, self._started)
        if self._span is not None:
            frame.span = spans.FrameSpan(self._span)
        self._started += 1
        self._window.append(frame)
        self._crew.start(frame, self._wired.entries)

    async def _wait(self) -> None:
        """Wait until the first of the window has ended, or there is a value that has room in it."""
        changed = self._changed = self._parent.crew.loop.create_future()
        if len(self._window) < self._limit and not self._failed and not self._items.ended:
            self._items.waiter = changed
        try:
            await changed
        finally:
            self._changed = self._items.waiter = None

    async def _close(self) -> None:
        for frame in self._window:
            frame.cancel()
            if frame.error is not None:
                logs.warning(
                    "frame.late_failure", graph=frame.layout.name, node=None, item=frame.item, error=repr(frame.error)
                )
        self._window.clear()
        self._crew.close()
        await until(self._empty.is_set, self._empty.wait)

    def _ended(self, crew: Crew) -> None:
        self._empty.set()
