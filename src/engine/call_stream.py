"""Streams: `Stream`, an async iterator of results, and `OpenStream`, a stream that has begun; and progress bars."""

import asyncio
import importlib
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, Generic, Protocol, Self, TypeVar

from .._errors import EngineClosedError, MissingExtraError, OptionsError
from ..actors.accepted import SWITCH, check
from ..actors.frame import Listener
from ..telemetry.profiling import collectors
from .control import Outcome, Tag_co
from .nesting import refuse_to_close_from_inside
from .statistics import StreamStatistics, Uptime
from .tracing.ref import call_location

T_co = TypeVar("T_co", covariant=True)


class Stream(ABC, Generic[T_co, Tag_co]):
    """An async iterator of results, and an async context manager; made by `engine.stream`.

    The items are the results of many calls, in input order; or the values of a single call, whose graph returns an
    `AsyncIterator`. A stream starts with `async with`, or when the reader asks for the first item. The end of the
    `async with` waits until no task or thread of the stream is left. Without `async with`, the stream is cancelled when
    the object is garbage collected.
    """

    _reader: asyncio.Task[Any] | None = None  # the task that has read last, in a stream that is saved

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
        await self._checkpoint(is_reader=self._reader in (None, asyncio.current_task()))

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


def is_shown(wanted: bool) -> bool:
    """Whether a progress bar is wanted and can be shown, because standard error is a terminal.

    Raises:
        OptionsError: `progress=` is neither True nor False.
        MissingExtraError: a bar can be shown, but rich is not installed.
    """
    check("progress", wanted, SWITCH)
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        return False
    try:
        importlib.import_module("..studio.progress", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        raise MissingExtraError(
            'progress=True needs rich to show something on a terminal: pip install "penstock[rich]"', name=error.name
        ) from error
    return True


def length_of(calls: object) -> int | None:
    """Return the number of calls; None if it is unknown, as for a generator."""
    length = -1
    with suppress(Exception):  # user code; a bar without a total is better than no stream
        length = operator.length_hint(calls, -1)
    return None if length < 0 else length


class Progress(Protocol):
    """The progress bar of a stream that has begun."""

    def end(self) -> None:
        """Show the present numbers as the last numbers, before the end of the stream changes the counters."""
        ...

    async def aclose(self) -> None:
        """End the bar, and wait until the last numbers are on the terminal, even if the caller is cancelled."""
        ...


class ReaderWait:
    """A stopwatch that runs while the reader of a stream waits: a context manager around each wait.

    The stopwatch measures nothing before `seconds` is read for the first time: two readings of the clock cost as much
    as a hop between two nodes.

    A second reader, which is refused, may come while the first reader waits; the watch runs until both have left.

    If the reader is cancelled while it waits, a new `CancelledError` is raised, with the arrived error as its context.
    The reason: the traceback of an error refers to the stack frames that it passes, and so to the stream. The task
    groups of anyio, which servers cancel when a client leaves, keep the innermost `CancelledError` in a cycle with
    their own frame. With the new error, the innermost error has passed no frame outside of the engine. So a stream is
    closed as soon as its reader drops it, before the garbage collector runs.
    """

    __slots__ = ("_before", "_is_timed", "_readers", "_since")

    def __init__(self) -> None:
        self._before = 0.0
        self._is_timed = False
        self._readers = 0
        self._since: float | None = None

    def begin(self) -> None:
        """Note that a reader begins to wait."""
        if self._is_timed and not self._readers:
            self._since = perf_counter()
        self._readers += 1

    def end(self) -> None:
        """Note that a reader no longer waits."""
        if self._is_timed and self._readers == 1:
            self._before, self._since = self.seconds, None
        self._readers -= 1

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.end()
        if isinstance(error, asyncio.CancelledError):
            raise asyncio.CancelledError(*error.args)

    @property
    def seconds(self) -> float:
        """How long readers waited since the first reading of this property, in seconds, with the present wait."""
        if not self._is_timed:
            if self._readers:
                self._since = perf_counter()
            self._is_timed = True
        since = self._since
        # Profiles read this property in other threads: the reader may have stopped waiting since the lines above.
        return self._before if since is None or not self._readers else self._before + perf_counter() - since


class OpenStream(ABC):
    """A stream that has begun: of many calls, or of the values of one call.

    This object does not refer to the `Stream`. So Python collects a `Stream` that its reader drops, which ends this
    stream.

    Attributes:
        loop: the event loop.
        uptime: how long the stream has been open.
        reader_wait: how long the reader has waited.
        at: the "file:line" that opened the stream; empty if no profile was taken then, to save time.
        progress: the progress bar; None without one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.uptime = Uptime()
        self.reader_wait = ReaderWait()
        self.at = call_location() if collectors.running else ""
        self.progress: Progress | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the graph of the calls."""

    @property
    @abstractmethod
    def listener(self) -> Listener:
        """The listener of the frames of the calls."""

    @property
    def reader_wait_seconds(self) -> float:
        """How long the reader has waited since the first reading of this property, in seconds."""
        return self.reader_wait.seconds

    @abstractmethod
    def statistics(self) -> StreamStatistics:
        """Return a snapshot of the counters."""

    def show_progress(self, total: int | None, look: Callable[[], StreamStatistics] | None = None) -> None:
        """Show a progress bar until the end of the stream; see `StreamProgress`."""
        from ..studio.progress import StreamProgress

        self.progress = StreamProgress(self.loop, lambda: self.name, total, look or self.statistics)

    async def progress_ended(self) -> None:
        """End the progress bar, if there is one."""
        progress, self.progress = self.progress, None
        if progress is not None:
            await progress.aclose()

    @abstractmethod
    def abort(self, error: BaseException | None = None) -> None:
        """Begin to end the stream; `gone` waits for the end.

        Args:
            error: the reason; None if the reader has left, so that the results that it has not taken are discarded.
        """

    async def aclose(self) -> None:
        """End the stream for its reader: cancel its calls, and wait until nothing of it is left."""
        refuse_to_close_from_inside(self.listener)
        self.abort()
        await self.gone()

    @abstractmethod
    async def gone(self) -> None:
        """Wait until nothing of the stream is left, even if the caller is cancelled."""

    async def end(self) -> None:
        """End the stream because its Engine is closed; the next read raises an error that says so."""
        self.abort(EngineClosedError("the Engine was closed while this stream was open"))
        refuse_to_close_from_inside(self.listener)
        await self.gone()


W = TypeVar("W", bound=OpenStream)


class OwnStream(Stream[T_co, Tag_co], Generic[W, T_co, Tag_co]):
    """A stream that its reader starts and ends.

    Args:
        begin: starts the stream.
    """

    # `begin` is not a bound method of this object: the cycle would keep a dropped stream alive until the garbage
    # collector runs.
    def __init__(self, begin: Callable[[], W]) -> None:
        self._begin: Callable[[], W] | None = begin
        self._work: W | None = None
        self._closed = False

    async def aclose(self) -> None:
        """End the stream: cancel its calls, and wait until none of its tasks is left. Idempotent."""
        if self._work is not None:
            refuse_to_close_from_inside(self._work.listener)
        self._closed = True
        if self._work is not None:
            await self._work.aclose()

    def statistics(self) -> StreamStatistics:
        """Return a snapshot of the counters."""
        return StreamStatistics(0, 0, 0, 0, 0, 0, ()) if self._work is None else self._work.statistics()

    def _start(self) -> W:
        if self._work is None:
            if self._closed:
                raise EngineClosedError("this stream was closed; a stream is read once: make a new one")
            assert self._begin is not None
            self._work = self._begin()
            self._begin = None  # it refers to the source
        return self._work

    def __del__(self) -> None:
        work = getattr(self, "_work", None)
        if work is not None and not self._closed and not work.loop.is_closed():
            # The garbage collector may run in any thread, so the loop has to be told in a thread-safe way.
            work.loop.call_soon_threadsafe(work.abort)
