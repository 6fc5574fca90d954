"""Stream buffer: a bounded stream of values from one producer to one reader."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, Self, TypeVar

from .._errors import DataError

# A stream buffer touches the event loop only when one side has to wait: `put_nowait`, and a reader that finds a value,
# are plain calls on a deque. The producer holds the buffer, and the reader holds a `Reader`: so the producer also
# notices a reader that is dropped without being closed.

T = TypeVar("T")

# How many frames an inbox holds, and how many values a stream holds. 16 hides the gap between two turns of the loop (a
# burst is rarely longer), and is small enough that a slow node or reader holds back the steps before it at once. Larger
# capacities made no measurable difference (benchmarks, "chain").
DEFAULT_CAPACITY = 16


class StreamBuffer(Generic[T]):
    """A bounded queue of values with one producer and one reader, on one event loop.

    Args:
        capacity: the most values that the buffer holds.

    Attributes:
        held: the values that wait for the reader.
        position: how many values the reader has taken.
        ended: whether no more values will come.
        error: the error with which the stream has ended; None without an error, and once the reader has got it.
        abandoned: whether the reader has left, or has read to the end, so that further values are useless.
        on_abandoned: called once when the reader leaves before it has read to the end; None if nobody needs to know,
            for instance when the producer has ended.
        waiter: the future with which the reader waits; resolved when there is a value, or at the end.
        putter: the future with which the producer waits; resolved when a quarter of the room is free, or the reader has
            left.
        filled_by: the `GeneratorTask` of the producer; None without one.
        read_by: the `Worker` or `GeneratorTask` that reads the stream, if it is known, with all streams that it reads.
        reader_is_busy: whether the reader also makes progress without a value.
    """

    __slots__ = (
        "abandoned", "capacity", "ended", "error", "filled_by", "held", "on_abandoned", "position", "putter", "read_by",
        "reader_is_busy", "waiter",
    )  # fmt: skip

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.held: deque[T] = deque()
        self.position: int = 0
        self.ended = False
        self.abandoned = False
        self.on_abandoned: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.filled_by: object = None
        self.read_by: tuple[object, Sequence[Reader[Any]]] | None = None
        self.reader_is_busy = False
        self.waiter: asyncio.Future[None] | None = None
        self.putter: asyncio.Future[None] | None = None

    def put_nowait(self, value: T) -> bool:
        """Put a value if there is room; return False without room, or if the reader has left."""
        held = self.held
        if len(held) >= self.capacity or self.ended or self.abandoned:
            return False
        held.append(value)
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return True

    async def put(self, value: T) -> bool:
        """Put a value, waiting for room; return False if the reader has left."""
        while not self.put_nowait(value):
            if self.ended or self.abandoned:
                return False
            self.putter = asyncio.get_running_loop().create_future()
            try:
                await self.putter
            finally:
                self.putter = None
        return True

    def end(self, error: BaseException | None = None) -> None:
        """End the stream: the reader gets the remaining values, and then the error or the end.

        Only the first call has an effect.
        """
        if not self.ended:
            self.ended = True
            self.error = error
            self._wake_reader()

    def fail(self, error: BaseException) -> None:
        """End at once: drop the values that the reader has not taken, and raise `error` at it, even after `end`."""
        self.ended = True
        self.error = error
        self.held.clear()
        self._wake_reader()
        self.wake_producer()

    def reader(self) -> "Reader[T]":
        """Return the reading end; to be called once."""
        return Reader(self)

    async def get(self) -> T:
        """Take the next value, for the reader.

        Raises:
            StopAsyncIteration: the stream has ended, or the reader has left.
            BaseException: the error at the end of the stream.
        """
        while not self.held:
            if self.abandoned:
                raise StopAsyncIteration
            if self.ended:
                self.abandoned, self.on_abandoned = True, None
                error, self.error = self.error, None
                try:
                    raise StopAsyncIteration if error is None else error
                finally:
                    del error  # breaks a cycle: the traceback of the error refers to this stack frame
            await self.wait()
        return self.take()

    def take(self) -> T:
        """Take the next value; there must be one in `held`."""
        self.position += 1
        value = self.held.popleft()
        # Do not wake the producer for each value of a large buffer: a turn of the loop costs more than making a value.
        if self.putter is not None and 4 * len(self.held) <= 3 * self.capacity:
            self.wake_producer()
        return value

    pass_on = take  # for a step that passes values on to other steps

    async def wait(self) -> None:
        """Wait until there is a value, or the end.

        Raises:
            RuntimeError: another task waits already.
        """
        if self.waiter is not None:
            raise RuntimeError("this stream is being read by another task; a stream has one reader")
        waiter = self.waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self.waiter = None

    def abandon(self) -> None:
        """Note that the reader has left: drop the values, and tell the producer."""
        if self.abandoned:
            return
        self.abandoned = True
        self.held.clear()
        self._wake_reader()
        self.wake_producer()
        self.tell_abandoned()
        self.error = None  # breaks a cycle: its traceback may refer to this buffer

    def tell_abandoned(self) -> None:
        """Tell the producer, once, that the reader takes nothing more, nor the error at the end."""
        on_abandoned, self.on_abandoned = self.on_abandoned, None
        if on_abandoned is not None:
            on_abandoned()

    def _wake_reader(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def wake_producer(self) -> None:
        """Let a producer that waits for room look again."""
        putter, self.putter = self.putter, None  # once: the reader may take many values before the producer runs
        if putter is not None and not putter.done():
            putter.set_result(None)


class Barrier:
    """A place between two values of a stream. Each step that the barrier passes adds its state to the barrier.

    Attributes:
        record: how many records the source had given before the barrier.
        is_asked: whether a `checkpoint()` has asked for the snapshot; then the source waits until it is made.
        states: the states of the steps that the barrier has passed, by name.
        copied_bytes: how many bytes were copied for these states.
    """

    __slots__ = ("copied_bytes", "is_asked", "record", "states")

    def __init__(self, record: int, *, is_asked: bool = False) -> None:
        self.record = record
        self.is_asked = is_asked
        self.states: dict[str, Any] = {}
        self.copied_bytes = 0

    @property
    def array_bytes(self) -> int:
        """How many bytes the arrays of the states have."""
        return sum(state.array_bytes for state in self.states.values())


class BarrierBuffer(StreamBuffer[T]):
    """A stream buffer that may contain barriers.

    The values behind the first barrier are kept apart. So a reader that has taken all values before the barrier finds
    the buffer empty, and has to wait as usual. At this moment the reader asks for the value behind the barrier, and the
    barrier is passed.

    Attributes:
        barrier: the first barrier; None without a barrier.
        given: how many values were put, with the values before a restart.
        on_barrier: passes the first barrier on and removes it with `release`; called when the reader asks for the value
            behind the barrier.
        is_draining: whether values are put without a bound, until the next barrier.
    """

    __slots__ = ("_behind", "_end", "barrier", "given", "is_draining", "on_barrier")

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        super().__init__(capacity)
        self.barrier: Barrier | None = None
        self.given = 0
        self.on_barrier: Callable[[], Awaitable[None]] | None = None
        self.is_draining = False
        self._behind: deque[tuple[Barrier, list[T]]] = deque()  # each barrier, and the values between it and the next
        self._end: tuple[BaseException | None] | None = None  # the end behind the barriers

    def put_barrier(self, barrier: Barrier) -> None:
        """Put a barrier behind all values that were put; there is always room for a barrier."""
        if not self.ended and not self.abandoned:
            self._behind.append((barrier, []))
            self.barrier = self.barrier or barrier
            self.is_draining = False
            self._wake_reader()

    def release(self) -> None:
        """Remove the first barrier, so that the reader gets the values behind it."""
        if self.barrier is None:  # the stream has failed, or the reader has left
            return
        _, values = self._behind.popleft()
        self.barrier = self._behind[0][0] if self._behind else None
        self.capacity += len(values)
        self.held += values
        if self.barrier is None and self._end is not None:
            end, self._end = self._end, None
            self.end(*end)
        self._wake_reader()
        self.wake_producer()

    async def pass_barrier(self) -> None:
        """Pass the first barrier on: the reader asks for the value behind it."""
        assert self.on_barrier is not None
        await self.on_barrier()

    async def until_barrier(self) -> bool:
        """Wait for the next barrier without passing it on. Return False if the stream ended before."""
        while self.barrier is None and not self.ended and not self.abandoned:
            await super().wait()
        return self.barrier is not None

    def drain(self) -> None:
        """Let the producer put values without a bound until the next barrier."""
        self.is_draining = True
        self.wake_producer()

    def put_nowait(self, value: T) -> bool:
        """Put a value; behind the last barrier, if the buffer has barriers."""
        is_full = len(self.held) >= self.capacity and not self.is_draining
        if is_full or self._end is not None or self.ended or self.abandoned:
            return False
        self.given += 1
        if self.barrier is not None:
            self._behind[-1][1].append(value)
            self.capacity -= 1  # so that every check for room counts the value
        else:
            self.held.append(value)
            self._wake_reader()
        return True

    def end(self, error: BaseException | None = None) -> None:
        """End the stream; the end stays behind the barriers, too."""
        if self.barrier is None:
            super().end(error)
        elif self._end is None:
            self._end = (error,)

    def fail(self, error: BaseException) -> None:
        """End at once, and forget the barriers."""
        self._forget()
        super().fail(error)

    def abandon(self) -> None:
        """Note that the reader has left, and forget the barriers."""
        self._forget()
        super().abandon()

    # Not `async`: otherwise each wait of a call that is saved would take a further coroutine.
    def wait(self) -> Coroutine[Any, Any, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for a value or the end, or pass the barrier on; the caller looks again."""
        return super().wait() if self.barrier is None or self.held else self.pass_barrier()

    def _forget(self) -> None:
        self.capacity += sum(len(values) for _, values in self._behind)
        self._behind.clear()
        self.barrier = self._end = None


# How often a split that waits for room checks whether there can ever be room. A person who waits for the error does not
# notice this delay, and the checks cost nothing compared with the values.
_LOOK_SECONDS = 0.25


class SplitBuffer(Generic[T]):
    """Several streams of the same values, each with its own reader; for the producer they are like one stream.

    Args:
        parts: the streams. Each stream holds as many values as its capacity, while other streams wait for more.
        is_stuck: whether the reader of a stream waits, directly or through other steps, for this producer.

    Attributes:
        parts: the streams.
        on_abandoned: called once when the last reader has left.
    """

    def __init__(self, parts: Sequence[StreamBuffer[T]], is_stuck: Callable[[StreamBuffer[Any]], bool]) -> None:
        self.parts = parts
        self.on_abandoned: Callable[[], None] | None = None
        self._is_stuck = is_stuck
        self._next_look: asyncio.TimerHandle | None = None
        for part in self.parts:
            part.on_abandoned = self._left

    @property
    def ended(self) -> bool:
        """Whether no more values will come."""
        return self.parts[0].ended

    @property
    def abandoned(self) -> bool:
        """Whether all readers have left, or read to the end."""
        return all(part.abandoned for part in self.parts)

    @property
    def error(self) -> BaseException | None:
        """The error at the end of the streams, as long as a reader has not seen it."""
        return next((part.error for part in self.parts if part.error is not None), None)

    def put_nowait(self, value: T) -> bool:
        """Put a value if each stream has room; return False without room, or if all readers have left."""
        read = [part for part in self.parts if not part.abandoned]
        if not read or self.ended or any(len(part.held) >= part.capacity for part in read):
            return False
        for part in read:
            part.put_nowait(value)
        return True

    async def put(self, value: T) -> bool:
        """Put a value, waiting for room in each stream; return False if all readers have left.

        Raises:
            DataError: the readers wait for each other.
        """
        loop = asyncio.get_running_loop()
        while not self.put_nowait(value):
            if self.ended or self.abandoned:
                return False
            full = next(part for part in self.parts if not part.abandoned and len(part.held) >= part.capacity)
            full.putter = loop.create_future()
            self._next_look = loop.call_later(_LOOK_SECONDS, self._look, full)
            try:
                await full.putter
            finally:
                self._next_look.cancel()
                self._next_look = None
                full.putter = None
        return True

    def _look(self, full: StreamBuffer[T]) -> None:
        if full.putter is None or full.putter.done():
            return
        if not self._is_stuck(full):
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look, full)
            return
        asked = next(number for number, part in enumerate(self.parts) if part.waiter is not None)
        full.putter.set_exception(
            DataError(
                f"the branches of a split wait for each other: branch {self.parts.index(full)} holds {full.capacity} "
                f"values, and its reader waits for branch {asked}, which has none; read the branches in step with "
                "ps.map_each(fn, a, b), or let a branch get further ahead, with ahead="
            )
        )

    def end(self, error: BaseException | None = None) -> None:
        """End all streams; see `StreamBuffer.end`."""
        for part in self.parts:
            part.end(error)

    def fail(self, error: BaseException) -> None:
        """End all streams at once; see `StreamBuffer.fail`."""
        for part in self.parts:
            part.fail(error)

    def reader(self) -> "list[Reader[T]]":
        """Return the reading ends; to be called once."""
        return [part.reader() for part in self.parts]

    def _left(self) -> None:
        on_abandoned = self.on_abandoned
        if on_abandoned is not None and self.abandoned:
            self.on_abandoned = None
            on_abandoned()


class Reader(Generic[T]):
    """The reading end of a stream of values: an async iterator with `aclose`, like an async generator.

    A task that is cancelled while it waits for a value may go on reading. Closing or dropping the reader leaves the
    stream, which ends the producer.
    """

    __slots__ = ("_loop", "buffer")

    def __init__(self, buffer: StreamBuffer[T]) -> None:
        self.buffer = buffer
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next value; see `StreamBuffer.get`."""
        buffer = self.buffer
        if buffer.held:
            return buffer.take()
        return await buffer.get()

    def leave(self) -> None:
        """Stop reading, which ends the producer."""
        self.buffer.abandon()

    async def aclose(self) -> None:
        """Stop reading, like `aclose` of an async generator. Idempotent."""
        self.buffer.abandon()

    def __del__(self) -> None:
        buffer: StreamBuffer[Any] | None = getattr(self, "buffer", None)
        if buffer is not None and buffer.on_abandoned is not None and not self._loop.is_closed():
            # The garbage collector may run in any thread, so the loop has to be told in a thread-safe way.
            self._loop.call_soon_threadsafe(buffer.abandon)
