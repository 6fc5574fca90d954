"""Stream, an async iterator of results; and CallsStream, the results of many calls run as a pipeline."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar

from .._errors import EngineClosedError, OptionsError
from ..actors.accepted import TIMEOUT, check
from ..actors.frame import Frame
from .control import Outcome, Tag_co
from .graph import Graph, as_call, one_value
from .node import Node
from .options import ExecutionOptions
from .pipeline import Pipeline, length_of, progress_of
from .scope import Runtime, Scope
from .source import Calls, ReorderWindow
from .statistics import StreamStatistics

T_co = TypeVar("T_co", covariant=True)


class Stream(ABC, Generic[T_co, Tag_co]):
    """An async iterator of results, and an async context manager; made by `engine.stream`.

    The items are the results of many calls, in input order; or the values of a single call, whose graph returns an
    `AsyncIterator`. A stream starts with `async with`, or when the reader asks for the first item. The end of the
    `async with` waits until no task or thread of the stream is left. Without `async with`, the stream is cancelled when
    the object is garbage collected.
    """

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @abstractmethod
    async def __anext__(self) -> T_co:
        """Return the next item.

        Raises:
            Exception: the error of this item, with on_error="raise", or the error of the single call; the stream is
                closed then.
        """

    async def outcomes(self) -> AsyncIterator[Outcome[T_co, Tag_co]]:
        """Iterate over one `Outcome` for each item. The error of an item is in its outcome, and is not raised."""
        while True:
            try:
                value = await self.__anext__()
            except StopAsyncIteration:
                return
            except Exception as error:  # noqa: BLE001 - any error is the last outcome
                yield Outcome(self._taken, None, error)
                return
            yield Outcome(self._taken - 1, value, None)

    @abstractmethod
    async def wait_started(self) -> None:
        """Wait for the first item without taking it out; for a server, before it sends its headers.

        Raises:
            Exception: the error of the first item, or the error that ended the stream before it, such as `Overloaded`.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End the stream: cancel items in flight, close the source, wait until nothing is left. Idempotent."""

    async def drain(self, timeout_seconds: float | None = None) -> int:
        """Take no more calls from the source, and wait until the calls that it has given have ended.

        A source that waits for its next call is cancelled and closed. The loop of the reader goes on to the last
        outcome, and ends as after the end of a source. The drain does not wait for the reader, so the reader itself may
        call it. A second drain waits for the first, and `aclose` ends both.

        Args:
            timeout_seconds: how long to wait, in seconds; None waits as long as the calls take. Items that are left
                after this time end with `NotFinished`, in their turn.

        Returns:
            How many items were left.

        Raises:
            OptionsError: `timeout_seconds` is neither None nor a number of seconds; or this is not a stream of calls.
            ReentrantCallError: a node of the stream calls this, and would wait for itself.
        """
        raise OptionsError("drain() is for a stream of calls, and this is one call: read it to its end, or aclose() it")

    async def checkpoint(self) -> None:
        """Make a snapshot now, and wait until it is written, in a stream with `checkpoint=`; on SIGTERM, for instance.

        In the `async for` of the stream, values that the reader has not taken yet are stored as well, and come first
        after a restart. Another task that calls this waits until the reader has taken these values.

        Raises:
            OptionsError: the stream has no `checkpoint=`.
            CheckpointError: the snapshot could not be written.
            EngineClosedError: the stream ended before.
        """
        await self._checkpoint(is_reader=True)

    async def _checkpoint(self, *, is_reader: bool, unread: Sequence[Any] = ()) -> None:
        """Make a snapshot now.

        Args:
            is_reader: whether the reader itself waits for the snapshot.
            unread: the value that was taken last for the reader, if the reader has not received it.
        """
        raise OptionsError(
            "this stream is not saved: for a saved stream, write engine.stream(call, checkpoint=ps.Checkpoint(folder))"
        )

    @property
    @abstractmethod
    def position(self) -> int:
        """How many items the reader has taken, with skipped items; with `checkpoint=`, also items before a restart.

        With `ordered=True` this is the index of the next item: the place in the input to go on from after a restart.
        With `ordered=False` it is only a count: `outcomes()` says which items they were.
        """

    @property
    def ready(self) -> int:
        """How many values and events of a single call can be read without waiting; 0 for a stream of calls.

        So a reader that writes to a file or a socket may write several items at once.
        """
        return 0

    @property
    def _taken(self) -> int:
        """How many items of any kind the reader has taken."""
        return self.position

    @abstractmethod
    def statistics(self) -> StreamStatistics:
        """Return a snapshot of the counters: they count calls, or the values of a single call."""

    @abstractmethod
    def _start(self) -> object: ...

    async def _collect(self) -> list[T_co]:
        """Return the results that were not read yet."""
        return [result async for result in self]


class CallsStream(Stream[T_co, Tag_co]):
    """The results of many calls."""

    def __init__(
        self,
        runtime: Runtime,
        calls: Calls,
        options: ExecutionOptions,
        make_pipeline: Callable[[Calls, ExecutionOptions], Pipeline] | None = None,
        *,
        shows_progress: bool = False,
    ) -> None:
        if not hasattr(calls, "__iter__") and not hasattr(calls, "__aiter__"):
            if isinstance(calls, Graph | Node | Coroutine):
                as_call(calls, "engine.stream")  # raises an error with the remedy
            raise TypeError(
                f"engine.stream takes an iterable of calls, such as (search(u) for u in urls), got {calls!r}"
            )
        self._runtime = runtime
        self._options = options
        self._calls: Calls | None = calls
        # Not the bound method `_own_pipeline` as the default: the cycle would keep a dropped stream alive until the
        # garbage collector runs.
        self._make_pipeline = make_pipeline
        self._pipeline: Pipeline | None = None
        self._window: ReorderWindow | None = None
        self._closed = False
        self._shows_progress = shows_progress

    def _own_pipeline(self, calls: Calls, options: ExecutionOptions) -> Pipeline:
        scheduler = "actors" if options.scheduler == "auto" else options.scheduler
        scope = Scope(self._runtime, options, scheduler)
        return Pipeline(
            scope, calls, options, prepare=lambda graph: scope.prepare(one_value(graph, options)), owns_scope=True
        )

    async def __anext__(self) -> T_co:
        """Return the next result.

        Raises:
            Exception: the error of this item, with on_error="raise"; the stream is closed then.
        """
        window = self._window or self._start().window
        while not self._closed:
            frame = window.take() or await self._next()
            if frame is None:
                break
            if frame.state == "done":
                result: T_co = frame.result
                return result
            pipeline = self._start()
            if self._options.on_error == "raise" or not isinstance(frame.error, Exception):
                pipeline.raised(frame.error)
                try:
                    frame.outcome()
                finally:
                    await self.aclose()
            pipeline.skip(frame)
        raise StopAsyncIteration

    async def outcomes(self) -> AsyncIterator[Outcome[T_co, Tag_co]]:
        """Iterate over one `Outcome` for each item. The error of an item is in its outcome, and is not raised."""
        pipeline = self._start()
        while not self._closed and (frame := pipeline.window.take() or await self._next()) is not None:
            error = frame.error
            # KeyboardInterrupt or SystemExit, not the error of an item
            if error is not None and not isinstance(error, Exception):
                await self.aclose()
                frame.outcome()
            else:
                outcome: Outcome[T_co, Tag_co] = Outcome(frame.item, frame.result, error)
                if pipeline.tags:
                    outcome.__dict__["_tag"] = pipeline.tags.pop(frame.item, None)
                yield outcome

    async def wait_started(self) -> None:
        """Wait for the first item without taking it out; for a server, before it sends its headers.

        Raises:
            Exception: the error of the first item, or the error that ended the stream before it.
        """
        frame = await self._next(takes=False)
        if frame is not None and frame.state != "done" and self._options.on_error == "raise":
            await self.aclose()
            frame.outcome()

    async def aclose(self) -> None:
        """End the stream: cancel items in flight, close the source, wait until nothing is left. Idempotent."""
        self._closed = True
        if self._pipeline is not None:
            await self._pipeline.aclose()

    async def drain(self, timeout_seconds: float | None = None) -> int:
        """Take no more calls from the source, and wait until the calls in flight have ended; see `Stream`."""
        check("timeout_seconds", timeout_seconds, TIMEOUT, "drain(")
        return 0 if self._closed else await self._start().drain(timeout_seconds)

    @property
    def position(self) -> int:
        """How many items the reader has taken, with skipped items.

        With `ordered=True` this is the index of the next item: the place in the input to go on from after a restart.
        With `ordered=False` it is only a count: `outcomes()` says which items they were.
        """
        return 0 if self._pipeline is None else self._pipeline.window.position

    def statistics(self) -> StreamStatistics:
        """Return a snapshot of the counters."""
        if self._pipeline is None:
            return StreamStatistics(0, 0, 0, 0, 0, 0, ())
        return _statistics_of(self._pipeline)

    def _start(self) -> Pipeline:
        if self._pipeline is None:
            if self._closed:
                raise EngineClosedError("this stream was closed; a stream is read once: make a new one")
            self._runtime.check_loop()
            assert self._calls is not None
            make_pipeline = self._make_pipeline or self._own_pipeline
            total = length_of(self._calls) if self._shows_progress else None
            pipeline = self._pipeline = make_pipeline(self._calls, self._options)
            if self._shows_progress:
                look = partial(_statistics_of, pipeline)
                pipeline.progress = progress_of(pipeline.loop, lambda: pipeline.name, total, look)
            if isinstance(self._calls, (list, tuple, range)):
                pipeline.tell_progress(len(self._calls))
            self._calls = None
            self._window = self._pipeline.window
        return self._pipeline

    async def _next(self, *, takes: bool = True) -> Frame | None:
        """Wait for the next item that has ended, and take it if `takes`; None at the end of the stream."""
        pipeline = self._start()
        if pipeline.window.has_reader:
            raise RuntimeError("this stream is being read by another task; a stream has one reader")
        try:
            frame = await (pipeline.next_frame() if takes else pipeline.first_ended())
        except asyncio.CancelledError:
            raise  # the reader was cancelled, which does not end the stream
        except BaseException:
            await self.aclose()
            raise
        if frame is None and takes:
            await self.aclose()
        return frame

    async def _collect(self) -> list[T_co]:
        """Return the results that were not read yet. The reader is woken only for errors and at the end."""
        results: list[T_co] = []
        window = self._start().window
        window.collected = results
        try:
            async for result in self:
                results.append(result)  # noqa: PERF401 - the window appends to the same list in between
        finally:
            window.collected = None  # breaks a cycle through the results
        return results

    def __del__(self) -> None:
        pipeline = getattr(self, "_pipeline", None)
        if pipeline is not None and not self._closed and not pipeline.loop.is_closed():
            # The garbage collector may run in any thread, so the loop has to be told in a thread-safe way.
            pipeline.loop.call_soon_threadsafe(pipeline.abort)


def _statistics_of(pipeline: Pipeline) -> StreamStatistics:
    window = pipeline.window
    waiting, key = pipeline.waiting_for_keys()
    return StreamStatistics(
        window.submitted,
        window.completed,
        window.failed,
        pipeline.skipped,
        window.position - pipeline.skipped,
        window.in_flight,
        tuple(actor.statistics() for actor in pipeline.actors()),
        pipeline.uptime.seconds,
        pipeline.actors_uptime.seconds,
        window.expired,
        waiting_for_keys=waiting,
        busiest_key=key,
    )
