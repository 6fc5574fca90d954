"""The steps that give streams: generators, and `map_each` over a stream."""

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span

from ..actors.cancellation import until
from ..actors.frame import Frame
from ..actors.generators import open_stream
from ..actors.loop_host import LoopHost, LoopStream
from ..actors.node_actor import Invoke, NodeActor
from ..actors.stream_buffer import STREAM_CAPACITY, Reader, StreamBuffer
from ..actors.worker import Worker, WorkerGroup
from ..telemetry import logs, spans

if TYPE_CHECKING:
    from .scope import Wired


class StreamMap:
    """Runs a body for each value of a stream, a bounded number at a time. It listens to their frames.

    A value counts from before it is taken until its result is given on, in its turn: so no node waits for the window.
    """

    def __init__(
        self, wired: "Wired", parent: Frame, items: StreamBuffer[Any], outside: tuple[Any, ...], limit: int
    ) -> None:
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
        self._group = parent.group.for_bodies(self._ended)

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
        frame = self._parent.inner(self._wired.program, inputs, self._group, self, self._started)
        if self._span is not None:
            frame.span = spans.FrameSpan(self._span, self._wired.program.name)
        self._started += 1
        self._window.append(frame)
        self._group.start(frame, self._wired.entries)

    async def _wait(self) -> None:
        """Wait until the first of the window has ended, or there is a value that has room in it."""
        changed = self._changed = self._parent.group.loop.create_future()
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
        self._group.close()
        await until(self._empty.is_set, self._empty.wait)

    def _ended(self, group: WorkerGroup) -> None:
        self._empty.set()


def opening(capacity: int, streams: tuple[int, ...]) -> Invoke:
    """Return what opens the stream of a node.

    Args:
        capacity: values that it holds for its reader.
        streams: slots of the streams that the node reads itself.
    """

    async def open_node(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        args, kwargs = actor.arguments(frame.values)
        readers = [frame.values[slot] for slot in streams]
        return open_stream(actor, frame, capacity, lambda: actor.fn(*args, **kwargs), readers)

    return open_node


def opening_in_loop(host: LoopHost, capacity: int, streams: tuple[int, ...]) -> Invoke:
    """Return what opens the stream of an actor that owns its loop; takes what `opening` takes, and the actor's host."""

    async def open_in_loop(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        args, _ = actor.arguments(frame.values)
        readers = [frame.values[slot] for slot in streams]
        start = functools.partial(LoopStream, host, args[0], frame.priority, frame.deadline, capacity)
        return open_stream(actor, frame, capacity, start, readers)

    return open_in_loop


def mapping(limit: int, body: "Wired") -> Invoke:
    """Return what opens the stream of a `map_each`, with at most `limit` items in flight."""

    async def open_map(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        (items, *outside), _ = actor.arguments(frame.values)
        stream_map = StreamMap(body, frame, items.buffer, tuple(outside), limit)
        return open_stream(actor, frame, STREAM_CAPACITY, stream_map.results, [items])

    return open_map


def input_of(parameter: str) -> Invoke:
    """Return what opens a stream that was passed as an argument."""

    async def open_input(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        given = frame.values[actor.slot]
        if not hasattr(given, "__aiter__"):
            raise TypeError(
                f"parameter {parameter!r} of graph {actor.graph!r} is a stream: pass an async iterator, got {given!r}"
            )
        return open_stream(actor, frame, STREAM_CAPACITY, lambda: given, given=given)

    return open_input


async def hand_over(worker: Worker, actor: NodeActor, frame: Frame) -> None:
    """Give the stream that a graph returns to whoever reads it; the frame goes on until it has been read."""
    assert frame.on_result_stream is not None
    frame.hold()
    frame.on_result_stream(frame.values[actor.slot])
