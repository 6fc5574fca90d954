"""Actors that own their loop: the inbox, the work that it holds, and both as the engine sees them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import anyio

from .._errors import ChannelClosed, InboxClosed, WorkSettledError
from ..telemetry.counters import ChannelStatistics
from .channel import Channel
from .stream_buffer import DEFAULT_CAPACITY, StreamBuffer, plain_error

if TYPE_CHECKING:
    from ..telemetry.profiling.durations import DepthWatch


# Work: what an actor that owns its loop takes out of its inbox, and settles.
#
# This is the side of the actor. The engine's classes, `Request` and `StreamRequest`, have the side of the caller too.

In = TypeVar("In")
Out = TypeVar("Out")


class Work(ABC, Generic[In, Out]):
    """One item of an actor that owns its loop. It is settled once, with `finish` or `fail`, in any order.

    The engine makes it, and in a test `penstock.testing.inbox`.

    Attributes:
        value: what the actor was called with.
        priority: that of the call, higher first.
        deadline: when nobody will wait for it any more, in the loop's time (`loop.time()`); None without one.
    """

    __slots__ = ()

    value: In
    priority: int
    deadline: float | None

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more; settling it then does nothing."""

    @abstractmethod
    def on_cancelled(self, callback: Callable[[], object], /) -> None:
        """Have `callback` called soon after nobody waits for it any more; never after it was settled."""

    @abstractmethod
    def finish(self, result: Out, /) -> None:
        """Give the result to the caller.

        Raises:
            WorkSettledError: it was finished or failed before.
        """

    @abstractmethod
    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the caller.

        Raises:
            WorkSettledError: it was finished or failed before.
        """


class StreamWork(ABC, Generic[In, Out]):
    """One item of an actor that owns its loop and gives many parts for it.

    The engine makes it, and in a test `penstock.testing.stream_inbox`.

    Attributes:
        value: what the actor was called with.
        priority: that of the call, higher first.
        deadline: when nobody will wait for it any more, in the loop's time (`loop.time()`); None without one.
    """

    __slots__ = ()

    value: In
    priority: int
    deadline: float | None

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """Whether nobody reads it any more; parts go nowhere then, and settling it does nothing."""

    @abstractmethod
    def on_cancelled(self, callback: Callable[[], object], /) -> None:
        """Have `callback` called soon after nobody reads it any more; never after it was settled."""

    @abstractmethod
    def put_nowait(self, part: Out, /) -> bool:
        """Give the reader one more part.

        Returns:
            False if the reader does not keep up and holds as many parts as it may: the part is not taken. A part of
            cancelled work goes nowhere, which is no reason to wait: True.

        Raises:
            WorkSettledError: it was finished or failed before.
        """

    @abstractmethod
    def finish(self) -> None:
        """End the stream; the reader gets what is there.

        Raises:
            WorkSettledError: it was finished or failed before.
        """

    @abstractmethod
    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the reader, after the parts that are there.

        Raises:
            WorkSettledError: it was finished or failed before.
        """


# Inbox: where an actor that owns its loop finds its work.
#
# This is the side of the actor. The engine's class, `Mailbox`, has the side of those who give it work, too.

W_co = TypeVar("W_co", covariant=True)


class Inbox(ABC, Generic[W_co]):
    """Work that waits for an actor: higher priorities first, first in first out within one.

    Work whose caller has gone, and work whose deadline has passed, is not handed out. The engine makes it, and in a
    test `penstock.testing.inbox`.
    """

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return how many items wait."""

    @abstractmethod
    async def get(self) -> W_co:
        """Take the next work; waits while there is none.

        Raises:
            InboxClosed: no more work will come; let it pass, and the actor ends cleanly.
        """

    @abstractmethod
    def take_nowait(self, max_items: int) -> list[W_co]:
        """Take what is there, at most `max_items`; an empty list if there is nothing."""


class AnyRequest(Generic[In]):
    """What a request for one result and one for many parts have in common.

    Attributes:
        value: what the actor was called with.
        priority: that of the call, higher first.
        deadline: when nobody will wait for it any more, in the loop's time (`loop.time()`); None without one.
        taken: whether it was handed out to the loop.
        on_over: called once with the request when it is settled or cancelled.
    """

    __slots__ = ("_callbacks", "_cancelled", "_settled", "deadline", "on_over", "priority", "taken", "value")

    _face: ClassVar[str] = "Work"  # as the actor knows it

    def __init__(self, value: In, priority: int = 0, deadline: float | None = None) -> None:
        self.value = value
        self.priority = priority
        self.deadline = deadline
        self.taken = False
        self.on_over: Callable[[Any], None] | None = None
        self._callbacks: tuple[tuple[Callable[[], object], Context], ...] = ()
        self._settled = False
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more; finishing it then does nothing."""
        return self._cancelled

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if not self._settled and not self._cancelled:
            self._cancelled = True
            for callback, context in self._callbacks:
                asyncio.get_running_loop().call_soon(callback, context=context)
            self._over()

    def on_cancelled(self, callback: Callable[[], object], /) -> None:
        """Have `callback` called soon after nobody waits for it any more; never after it was settled."""
        if self.cancelled:
            asyncio.get_running_loop().call_soon(callback)
        elif not self._settled:
            self._callbacks = (*self._callbacks, (callback, copy_context()))

    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the caller."""
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Fail it, because its actor is gone: what that still does to it does nothing."""
        self.fail(error)
        self._cancelled = True

    def _claim(self) -> bool:
        """Settle it; returns whether somebody waits for it."""
        if self.cancelled:
            return False
        if self._settled:
            raise WorkSettledError(
                f"{self!r} was settled before; call finish() or fail() once for each work, and forget it then"
            )
        self._settled = True
        self._over()
        return True

    def _over(self) -> None:
        told, self.on_over = self.on_over, None
        if told is not None:
            told(self)

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "settled" if self._settled else "open"
        return f"<{self._face} of {self.value!r:.60}, {state}>"


class Request(AnyRequest[In], Work[In, Out]):
    """A request for one result.

    Args:
        value: what the actor was called with.
        priority: higher first.
        deadline: when nobody will wait for it any more, in the loop's time.
        outcome: what its result is given to; by default a future.

    Attributes:
        outcome: what its caller awaits. It is cancelled together with its caller, at that moment.
    """

    __slots__ = ("outcome",)

    def __init__(
        self,
        value: In,
        priority: int = 0,
        deadline: float | None = None,
        outcome: "asyncio.Future[Out] | None" = None,
    ) -> None:
        super().__init__(value, priority, deadline)
        self.outcome: asyncio.Future[Out] = asyncio.get_running_loop().create_future() if outcome is None else outcome

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more; settling it then does nothing."""
        return self._cancelled or self.outcome.cancelled()

    def finish(self, result: Out, /) -> None:
        """Give the result to the caller.

        Raises:
            WorkSettledError: it was finished or failed before.
        """
        if self._claim():
            self.outcome.set_result(result)

    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the caller.

        Raises:
            WorkSettledError: it was finished or failed before.
        """
        if self._claim():
            self.outcome.set_exception(plain_error(error, "the actor"))

    def withdraw(self) -> None:
        """Nobody waits for it any more."""
        self.cancel()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        super().cancel()
        self.outcome.cancel()  # of one that is settled, too: then an error that nobody has seen is not reported as lost


class StreamRequest(AnyRequest[In], StreamWork[In, Out]):
    """A request for many parts.

    Args:
        value: what the actor was called with.
        priority: higher first.
        deadline: when nobody will wait for it any more, in the loop's time.
        capacity: parts that it holds for its reader.

    Attributes:
        buffer: what the reader reads.
    """

    __slots__ = ("_poured", "buffer")

    _face = "StreamWork"

    def __init__(
        self, value: In, priority: int = 0, deadline: float | None = None, capacity: int = DEFAULT_CAPACITY
    ) -> None:
        super().__init__(value, priority, deadline)
        self.buffer: StreamBuffer[Out] = StreamBuffer(capacity)
        self.buffer.on_abandoned = self.cancel
        self._poured: asyncio.Future[None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether nobody reads it any more; parts go nowhere then, and settling it does nothing."""
        return self._cancelled or (self._poured is not None and self._poured.cancelled())

    def _over(self) -> None:
        if self._poured is None:  # else the parts are somebody else's
            self.buffer.on_abandoned = None
        super()._over()

    def put_nowait(self, part: Out, /) -> bool:
        """Give the reader one more part.

        Returns:
            False if the reader does not keep up and holds as many parts as it may: the part is not taken. A part of
            cancelled work goes nowhere, which is no reason to wait: True.

        Raises:
            WorkSettledError: it was finished or failed before.
        """
        poured = self._poured
        if self._cancelled or (poured is not None and poured.cancelled()):  # as `cancelled`, without a call per part
            return True
        if self._settled:
            raise WorkSettledError(f"{self!r} was settled before, and takes no more parts")
        return self.buffer.put_nowait(part)

    def finish(self) -> None:
        """End the stream; the reader gets what is there.

        Raises:
            WorkSettledError: it was finished or failed before.
        """
        if self._claim():
            self.buffer.end()
            if self._poured is not None:
                self._poured.set_result(None)

    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the reader, after the parts that are there.

        Raises:
            WorkSettledError: it was finished or failed before.
        """
        if self._claim():
            error = plain_error(error, "the actor")
            if self._poured is None:
                self.buffer.end(error)
            else:
                self._poured.set_exception(error)

    async def pour(self, buffer: StreamBuffer[Out]) -> None:
        """Move what is left into `buffer`, and have what follows put there; for whoever passes it on to another reader.

        Returns when the work is settled or the reader of `buffer` has left.

        Raises:
            BaseException: what the work is failed with.
        """
        own = self.buffer
        try:
            while own.held:
                if not await buffer.put(own.take()):
                    return
            if not own.ended:
                self.buffer = buffer
                self._poured = asyncio.get_running_loop().create_future()
                await self._poured
            elif own.error is not None:
                raise own.error
        finally:
            self.cancel()
            self._poured = None  # an error refers to this call


W = TypeVar("W", bound=AnyRequest[Any])


class Mailbox(Inbox[W]):
    """An inbox, and what may be done with it beside taking work out.

    Args:
        capacity: the most work that it holds; who puts more has to wait. None for no bound.
        max_bytes: the most bytes of values that it holds, for values that know their size.
    """

    __slots__ = ("_channel", "_suspended")

    def __init__(self, capacity: int | None = None, *, max_bytes: int | None = None) -> None:
        self._channel: Channel[W] = Channel(capacity, max_bytes=max_bytes, size_of=_size_of)
        self._suspended = False

    def __len__(self) -> int:
        """Return how many items wait."""
        return len(self._channel)

    async def get(self) -> W:
        """Take the next work; waits while there is none.

        Raises:
            InboxClosed: no more work will come; let it pass, and the actor ends cleanly.
        """
        while True:
            if self._suspended:
                await asyncio.sleep(0)  # as below
                raise InboxClosed("this actor is about to be restarted, and gets no more work")
            try:
                work = await self._channel.get()
            except ChannelClosed:
                # A loop that catches this and goes on must not keep everybody else from running.
                await asyncio.sleep(0)
                raise InboxClosed("the scope of this actor ends, and no more work will come") from None
            if _hand_out(work):
                return work

    def take_nowait(self, max_items: int) -> list[W]:
        """Take what is there, at most `max_items`; an empty list if there is nothing."""
        taken: list[W] = []
        while len(taken) < max_items and not self._suspended:
            try:
                work = self._channel.get_nowait()
            except (anyio.WouldBlock, ChannelClosed):
                break
            if _hand_out(work):
                taken.append(work)
        return taken

    def put_nowait(self, work: W) -> bool:
        """Give the actor work if there is room; returns whether there was.

        Raises:
            ChannelClosed: it takes no more.
        """
        return self._channel.put_nowait(work, work.priority)

    async def put(self, work: W) -> None:
        """Give the actor work; waits while the inbox is full.

        Raises:
            InboxClosed: it takes no more.
        """
        try:
            await self._channel.put(work, work.priority)
        except ChannelClosed:
            raise InboxClosed("this inbox takes no more work") from None

    def withdraw(self, work: W) -> None:
        """Take work back that is still queued, or that waits for room."""
        self._channel.discard(work, work.priority)

    def close(self) -> None:
        """Take no more work; what is queued can still be taken out."""
        self._channel.close()

    @property
    def closed(self) -> bool:
        """Whether it takes no more work."""
        return self._channel.closed

    def suspend(self) -> None:
        """Hand out nothing: the loop is about to be ended, and what is queued is for its successor."""
        self._suspended = True

    def reopen(self) -> None:
        """Take work again, and hand it out."""
        self._suspended = False
        if self._channel.closed:
            self._channel.reopen()

    def watch(self, watch: "DepthWatch | None") -> None:
        """Tell a watch of every change of the depth from now on; None: nobody any more."""
        self._channel.watch(watch)

    @property
    def capacity(self) -> int | None:
        """How much work it may hold; None if unbounded."""
        return self._channel.capacity

    @property
    def put_wait_seconds(self) -> float:
        """Time that those who give it work spent waiting, in total."""
        return self._channel.put_wait_seconds

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot of the counters."""
        return self._channel.statistics()


def _size_of(work: AnyRequest[Any]) -> int:
    try:
        return bytes_of(work.value)
    except Exception:  # noqa: BLE001 - user code, which the loop will meet when it looks at the value
        return 0


def bytes_of(value: object) -> int:
    """Return the size of a value in bytes; 0 where unknown."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    return len(value) if isinstance(value, bytes | bytearray | str) else 0


def _hand_out(work: AnyRequest[Any]) -> bool:
    """Mark work as handed out, provided that somebody still waits for it."""
    if work.cancelled or (work.deadline is not None and asyncio.get_running_loop().time() >= work.deadline):
        return False
    work.taken = True
    return True
