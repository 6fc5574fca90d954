"""ValuesStream: the values that one call gives, for graphs that return an `AsyncIterator`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

from ..._errors import EngineClosedError
from ...actors.parts import Parts
from ..progress import StreamProgress
from ..streaming import Outcome, Stream, StreamStatistics
from .streaming_call import StreamingCall

T_co = TypeVar("T_co", covariant=True)


class ValuesStream(Stream[T_co]):
    """The values of one call.

    Args:
        start: starts the call.
        shows_progress: whether it is shown how many there were.
    """

    def __init__(self, start: Callable[[], StreamingCall], *, shows_progress: bool = False) -> None:
        self._shows_progress = shows_progress
        # Not its own method: a stream that is dropped has to go at once, and not when cycles are collected.
        self._start_call = start
        self._call: StreamingCall | None = None
        self._parts: Parts[Any] | None = None
        self._closed = False

    async def __anext__(self) -> T_co:
        """Return the next value.

        Raises:
            Exception: what the call failed with; the stream is closed then.
        """
        parts = self._parts or await self._open()
        if parts.held:
            value: T_co = parts.take()
            return value
        return await self._next(parts)

    async def outcomes(self) -> AsyncIterator[Outcome[T_co]]:
        """Iterate over one `Outcome` for each value; an error of the call is in the last one and never raised."""
        while True:
            try:
                value = await self.__anext__()
            except StopAsyncIteration:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the last outcome
                yield Outcome(self.position, None, error)
                return
            yield Outcome(self.position - 1, value, None)

    async def started(self) -> None:
        """Wait for the first value, and leave it there; for a server, before it sends its headers.

        Raises:
            Exception: what the call failed with before, a refusal (`Overloaded`) included.
        """
        parts = self._parts or await self._open()
        with self._start().reader_wait:
            while not parts.held and not parts.ended:
                await parts.wait()
        if not parts.held and parts.error is not None:
            await self._next(parts)  # raises it

    async def aclose(self) -> None:
        """End the stream: cancel what runs for the call, wait until nothing is left. Idempotent."""
        if self._call is not None:
            self._call.refuse_from_inside()
        self._closed = True
        if self._call is not None:
            await self._call.aclose()

    @property
    def position(self) -> int:
        """How many values were taken out."""
        return 0 if self._parts is None else self._parts.position

    def statistics(self) -> StreamStatistics:
        """Return a snapshot of the counters."""
        return StreamStatistics(0, 0, 0, 0, 0, 0, ()) if self._call is None else _statistics_of(self._call)

    def _start(self) -> StreamingCall:
        if self._call is None:
            if self._closed:
                raise EngineClosedError("this stream was closed; a stream is read once: make a new one")
            call = self._call = self._start_call()
            if self._shows_progress:
                call.progress = StreamProgress(call.loop, lambda: call.name, None, partial(_statistics_of, call))
        return self._call

    async def _open(self) -> Parts[Any]:
        if self._closed and self._call is not None:
            raise StopAsyncIteration
        call = self._start()
        try:
            with call.reader_wait:
                self._parts = (await call.opened()).parts
        except asyncio.CancelledError:
            raise  # the reader was cancelled, which does not end the stream
        except BaseException:
            await self.aclose()
            raise
        return self._parts

    async def _next(self, parts: Parts[Any]) -> T_co:
        if self._closed:
            raise StopAsyncIteration
        error: BaseException | None = None
        try:
            with self._start().reader_wait:
                value: T_co = await parts.get()
            return value
        except StopAsyncIteration:
            pass
        except BaseException as failure:
            if not parts.abandoned:
                raise  # the reader was cancelled, which does not end the stream
            error = failure
        call = self._start()
        call.was_read(error)
        error = None  # its traceback refers to this very call
        with call.reader_wait:
            await call.ended()
        raise StopAsyncIteration

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None and not self._closed and not call.loop.is_closed():
            # Perhaps in another thread: the garbage collector chooses where it runs.
            call.loop.call_soon_threadsafe(call.abort)


def _statistics_of(call: StreamingCall) -> StreamStatistics:
    parts = None if call.reader is None else call.reader.parts
    position, held = (0, 0) if parts is None else (parts.position, len(parts.held))
    given = position + held
    actors = tuple(actor.statistics() for actor in call.actors())
    counting = call.actors_uptime
    return StreamStatistics(
        given, given, int(call.has_failed), 0, position, held, actors,
        call.uptime.seconds, None if counting is None else counting.seconds, int(call.has_expired),
    )  # fmt: skip
