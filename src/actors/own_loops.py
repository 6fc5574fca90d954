"""The inbox of an actor that owns its loop, and the work in the inbox: the actor's side and the engine's side."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

from .._errors import ChannelClosed, InboxClosed, WorkSettledError, plain_error
from ..telemetry import spans
from .accepted import POSITIVE, check, optional
from .channel import Channel
from .stream_buffer import DEFAULT_CAPACITY, StreamBuffer

if TYPE_CHECKING:
    from ..telemetry.spans import DeviceWait


# Work: the items that an actor takes out of its inbox, and settles.
#
# These classes have the methods that the actor calls. The engine's classes `Request` and `StreamRequest` derive from
# these classes, and add the methods for the caller.

In = TypeVar("In")
Out = TypeVar("Out")


class _AnyWork(ABC, Generic[In]):
    """The common part of `Work` and `StreamWork`."""

    __slots__ = ()

    value: In
    priority: int
    deadline: float | None
    key: Hashable

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """Whether the caller or reader has left; `finish` and `fail` then do nothing, and parts are dropped."""

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether nothing is left to do: the work was finished or failed, or its caller or reader has left."""

    @abstractmethod
    def on_cancelled(self, callback: Callable[[], object], /) -> None:
        """Have `callback` called soon after the caller has left; it is not called once the work was settled."""

    def __enter__(self) -> Self:
        """Begin a block whose error fails this work alone: `with work:`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        """Fail the work with an `Exception` that the block has raised; the loop goes on after the block.

        Other exceptions, such as the cancellation of the loop, are raised. An `Exception` after the work was settled is
        raised as well, since no caller would get it.
        """
        if not isinstance(error, Exception) or (self.settled and not self.cancelled):
            return False
        self.fail(error)  # ignored, if the caller has left
        return True

    @abstractmethod
    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the caller, or in the reader, after the parts that were put.

        Raises:
            WorkSettledError: the work was finished or failed before.
        """


class Work(_AnyWork[In], ABC, Generic[In, Out]):
    """One item of an actor that owns its loop. The actor settles it once, with `finish` or `fail`.

    Works may be settled in any order. An error in a block `with work:` fails that work alone. The engine makes the
    works; in a test, `penstock.testing.inbox` makes them.

    Attributes:
        value: the argument that the actor was called with; of several, their tuple.
        priority: the priority of the call; higher first.
        deadline: the deadline of the call, in the loop's time (`loop.time()`); None without one.
        key: the key of the call, in a deployment with `key=`; None without.
    """

    __slots__ = ()

    @abstractmethod
    def finish(self, result: Out, /) -> None:
        """Give the result to the caller.

        Raises:
            WorkSettledError: the work was finished or failed before.
        """


class StreamWork(_AnyWork[In], ABC, Generic[In, Out]):
    """One item of an actor that owns its loop and gives many parts for each item.

    An error in a block `with work:` fails that work alone. The engine makes the work; in a test,
    `penstock.testing.stream_inbox` makes it.

    Attributes:
        value: the argument that the actor was called with; of several, their tuple.
        priority: the priority of the call; higher first.
        deadline: the deadline of the call, in the loop's time (`loop.time()`); None without one.
        key: the key of the call, in a deployment with `key=`; None without.
    """

    __slots__ = ()

    @abstractmethod
    def put_nowait(self, part: Out, /) -> bool:
        """Give the reader one more part.

        Returns:
            False if the buffer of the reader is full: the part was not taken, and has to be put again later. True if
            the part was taken, or if the work is settled and the part was dropped.
        """

    @property
    @abstractmethod
    def room(self) -> int:
        """How many parts the buffer of the reader takes now; the whole capacity, if the work is settled."""

    @abstractmethod
    async def wait_room(self, timeout_seconds: float | None = None) -> None:
        """Wait until the buffer of the reader takes a part, or the work is settled.

        A loop computes nothing for a work without `room`. It waits for that work in a separate task, so that a slow
        reader does not delay other readers.

        Args:
            timeout_seconds: how long the reader may take nothing, in seconds; after that, the work fails with
                `TimeoutError`. None without a limit.

        Raises:
            OptionsError: `timeout_seconds` is not a finite number above 0.
        """

    @abstractmethod
    def finish(self) -> None:
        """End the stream; the reader still gets the parts that were put.

        Raises:
            WorkSettledError: the work was finished or failed before.
        """


# Inbox: the queue of work of an actor.
#
# This class has the methods that the actor calls. The engine's class `Mailbox` derives from it.

W_co = TypeVar("W_co", covariant=True)


class Inbox(ABC, Generic[W_co]):
    """The work that waits for an actor: higher priorities first, and first in, first out within a priority.

    The inbox hands out no work whose caller has left or whose deadline has passed. The engine makes the inbox; in a
    test, `penstock.testing.inbox` makes it.
    """

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return how many works wait."""

    @abstractmethod
    async def get(self) -> W_co:
        """Take the next work; wait while the inbox is empty.

        Raises:
            InboxClosed: no more work will come. Do not catch it: it ends the loop of the actor cleanly.
        """

    @abstractmethod
    def take_nowait(self, max_items: int) -> list[W_co]:
        """Take up to `max_items` works without waiting; return an empty list if the inbox is empty."""


class AnyRequest(Generic[In]):
    """The common part of `Request` and `StreamRequest`.

    Attributes:
        value: the argument that the actor was called with; of several, their tuple.
        priority: the priority of the call; higher first.
        deadline: the deadline of the call, in the loop's time (`loop.time()`); None without one.
        key: the key of the call, in a deployment with `key=`; None without.
        taken: whether the request was handed out to the loop.
        runs: whether a function runs with the request in its batch; the batch goes on if the caller leaves.
        on_over: called once with the request when the request is settled, or cancelled and in no batch.
        arrived_at: when the request began to wait for a batch, in the loop's time; not set before that.
        cost: the share of the request in the `max_cost` of a batch; not set without such a limit.
        wait: the span of the item, for the steps of the loop; None, or not set, if the item is not sampled.
        group: None: any requests of one actor may be in one batch.
    """

    __slots__ = (
        "_callbacks", "_cancelled", "_settled", "arrived_at", "cost", "deadline", "key", "on_over", "priority", "runs",
        "taken", "value", "wait",
    )  # fmt: skip

    arrived_at: float
    cost: float
    wait: "DeviceWait | None"
    group: Hashable = None

    _public_name: ClassVar[str] = "Work"  # the class that the author of the actor knows, for the repr

    def __init__(self, value: In, priority: int = 0, deadline: float | None = None, key: Hashable = None) -> None:
        self.value = value
        self.priority = priority
        self.deadline = deadline
        self.key = key
        self.taken = self.runs = False
        self.on_over: Callable[[Any], None] | None = None
        self._callbacks: tuple[tuple[Callable[[], object], Context], ...] = ()
        self._settled = False
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether the caller or reader has left; settling the request then does nothing."""
        return self._cancelled

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do: the request was finished or failed, or its caller or reader has left."""
        return self._settled or self.cancelled

    def is_wanted(self, now: float) -> bool:
        """Return whether the caller still waits, and has time left."""
        return not self.cancelled and (self.deadline is None or now < self.deadline)

    def cancel(self) -> None:
        """Note that the caller or reader has left; ignored if the request is settled."""
        if not self._settled and not self._cancelled:
            self._cancelled = True
            for callback, context in self._callbacks:
                asyncio.get_running_loop().call_soon(callback, context=context)
            if not self.runs:
                self._over()

    def on_cancelled(self, callback: Callable[[], object], /) -> None:
        """Have `callback` called soon after the caller has left; it is not called once the work was settled."""
        if self.cancelled:
            asyncio.get_running_loop().call_soon(callback)
        elif not self._settled:
            self._callbacks = (*self._callbacks, (callback, copy_context()))

    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the caller."""
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Fail the request, because its actor has ended. Later calls on it are ignored."""
        self.fail(error)
        self._cancelled = True

    def abandon(self) -> bool:
        """Return whether a batch has the request, although its caller has left. A method of `OutsideCall`."""
        return self.runs and self.on_over is not None

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the batch has ended. A method of `OutsideCall`."""
        told = self.on_over

        def over(work: Any) -> None:
            if told is not None:
                told(work)
            callback()

        self.on_over = over

    def leave_batch(self) -> None:
        """Note that no batch has the request any more, whether the request is settled or not."""
        self.runs = False
        if self.cancelled:
            self._over()

    def _claim(self) -> bool:
        """Mark the request as settled; return False if its caller has left and nothing is to be done.

        Raises:
            WorkSettledError: the request was settled before.
        """
        if self.cancelled:
            self._over()
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
        return f"<{self._public_name} of {self.value!r:.60}, {state}>"


class Request(AnyRequest[In], Work[In, Out]):
    """A request for one result.

    Args:
        value: the argument of the call.
        priority: the priority of the call; higher first.
        deadline: the deadline of the call, in the loop's time; None without one.
        key: the key of the call; None without one.
        outcome: a detached step that takes the result, and cancels the request when its caller leaves; None for a new
            future.

    Attributes:
        outcome: the future that the caller awaits; it is cancelled at the same moment as the caller.
    """

    __slots__ = ("_has_left", "outcome")

    def __init__(
        self,
        value: In,
        priority: int = 0,
        deadline: float | None = None,
        key: Hashable = None,
        outcome: "asyncio.Future[Out] | None" = None,
    ) -> None:
        # `AnyRequest.__init__` written out: without this copy and the copy in `finish`, a call of an actor takes 1.05
        # times as long.
        self.value = value
        self.priority = priority
        self.deadline = deadline
        self.key = key
        self.taken = self.runs = False
        self.on_over = None
        self._callbacks = ()
        self._settled = False
        self._cancelled = False
        # Returns whether the caller has left, before `_cancelled` says so. `bool()` is False.
        self._has_left: Callable[[], bool] = bool
        if outcome is None:
            outcome = asyncio.get_running_loop().create_future()
            self._has_left = outcome.cancelled
        self.outcome: asyncio.Future[Out] = outcome

    @property
    def cancelled(self) -> bool:
        """Whether the caller has left; settling the request then does nothing."""
        return self._cancelled or self._has_left()

    def finish(self, result: Out, /) -> None:
        """Give the result to the caller.

        Raises:
            WorkSettledError: the work was finished or failed before.
        """
        if self._settled or self._cancelled or self._has_left():
            self._claim()
            return
        # `_claim` written out
        self._settled = True
        told, self.on_over = self.on_over, None
        if told is not None:
            told(self)
        self.outcome.set_result(result)

    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the caller.

        Raises:
            WorkSettledError: the work was finished or failed before.
        """
        if self._claim():
            self.outcome.set_exception(plain_error(error, "the actor"))

    def cancel(self) -> None:
        """Note that the caller has left."""
        super().cancel()
        # Also if the request is settled: asyncio would log the exception of a future that nobody retrieves.
        self.outcome.cancel()


class StreamRequest(AnyRequest[In], StreamWork[In, Out]):
    """A request for many parts.

    Args:
        value: the argument of the call.
        priority: the priority of the call; higher first.
        deadline: the deadline of the call, in the loop's time; None without one.
        key: the key of the call; None without one.
        capacity: how many parts the buffer holds for the reader.

    Attributes:
        buffer: the buffer that parts are put into.
    """

    __slots__ = ("_poured", "buffer")

    _public_name = "StreamWork"

    def __init__(
        self,
        value: In,
        priority: int = 0,
        deadline: float | None = None,
        key: Hashable = None,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        super().__init__(value, priority, deadline, key)
        self.buffer: StreamBuffer[Out] = StreamBuffer(capacity)
        self.buffer.on_abandoned = self.cancel
        self._poured: asyncio.Future[None] | None = None  # while `pour` waits: resolved when the work is settled

    @property
    def cancelled(self) -> bool:
        """Whether the reader has left; parts are then dropped, and settling the request does nothing."""
        return self._cancelled or (self._poured is not None and self._poured.cancelled())

    def _over(self) -> None:
        if self._poured is None:  # otherwise the buffer belongs to the caller of `pour`
            self.buffer.on_abandoned = None
        self.buffer.wake_producer()  # which may be in `wait_room`
        super()._over()

    def put_nowait(self, part: Out, /) -> bool:
        """Give the reader one more part.

        Returns:
            False if the buffer of the reader is full: the part was not taken, and has to be put again later. True if
            the part was taken, or if the work is settled and the part was dropped.
        """
        if self.settled:
            return True
        return self.buffer.put_nowait(part)

    @property
    def room(self) -> int:
        """How many parts the buffer of the reader takes now; the whole capacity, if the work is settled."""
        buffer = self.buffer
        return buffer.capacity if self.settled else max(0, buffer.capacity - len(buffer.held))

    async def wait_room(self, timeout_seconds: float | None = None) -> None:
        """Wait until the buffer of the reader takes a part, or the work is settled.

        Args:
            timeout_seconds: how long the reader may take nothing, in seconds; after that, the work fails with
                `TimeoutError`. None without a limit.

        Raises:
            OptionsError: `timeout_seconds` is not a finite number above 0.
        """
        check("timeout_seconds", timeout_seconds, optional(POSITIVE), "wait_room(")
        while not self.room:
            buffer = self.buffer
            taken = buffer.position
            # All tasks that wait here share the future.
            buffer.putter = buffer.putter or asyncio.get_running_loop().create_future()
            done, _ = await asyncio.wait([buffer.putter], timeout=timeout_seconds)
            # The buffer may stay full although the reader takes parts, because the loop puts as many new parts. Then
            # this task is not woken, but the position has changed.
            if not done and buffer.position == taken and not self.room:
                self.fail(TimeoutError(f"the reader has taken nothing for {timeout_seconds} seconds"))

    def finish(self) -> None:
        """End the stream; the reader still gets the parts that were put.

        Raises:
            WorkSettledError: the work was finished or failed before.
        """
        if self._claim():
            self.buffer.end()
            if self._poured is not None:
                self._poured.set_result(None)

    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the reader, after the parts that were put.

        Raises:
            WorkSettledError: the work was finished or failed before.
        """
        if self._claim():
            error = plain_error(error, "the actor")
            if self._poured is None:
                self.buffer.end(error)
            else:
                self._poured.set_exception(error)

    async def pour(self, buffer: StreamBuffer[Out]) -> None:
        """Move the buffered parts into `buffer`, and have further parts put straight into it.

        `pour` returns when the work is settled, or when the reader of `buffer` has left.

        Raises:
            BaseException: the error with which the actor failed the work.
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
            self._poured = None  # breaks a cycle: the error of the future refers to this stack frame


def waits_of(works: "Iterable[Work[Any, Any] | StreamWork[Any, Any]]") -> "list[DeviceWait | None]":
    """Return the spans of works, None for a work that is not sampled; an empty list where nothing is traced."""
    return [] if spans.tracer_provider() is None else [getattr(work, "wait", None) for work in works]


W = TypeVar("W", bound=AnyRequest[Any])


class Mailbox(Inbox[W]):
    """The engine's side of an inbox: its channel, and the pause of a restart.

    Args:
        capacity: how many works the inbox holds; a further `put` waits. None without a bound.
        max_bytes: how many bytes of values the inbox holds, counted for values that know their size.

    Attributes:
        channel: the works that wait, each with its priority; closed once no more work will come.
    """

    __slots__ = ("_suspended", "channel")

    def __init__(self, capacity: int | None = None, *, max_bytes: int | None = None) -> None:
        self.channel: Channel[W] = Channel(capacity, max_bytes=max_bytes, size_of=lambda work: bytes_of(work.value))
        self._suspended = False

    def __len__(self) -> int:
        """Return how many works wait."""
        return len(self.channel)

    async def get(self) -> W:
        """Take the next work; wait while the inbox is empty.

        Raises:
            InboxClosed: no more work will come. Do not catch it: it ends the loop of the actor cleanly.
        """
        while True:
            if self._suspended:
                await asyncio.sleep(0)  # for the reason below
                raise InboxClosed("this actor is about to be restarted, and gets no more work")
            try:
                work = await self.channel.get()
            except ChannelClosed:
                # A loop that catches the error and calls `get` again must not keep other tasks from running.
                await asyncio.sleep(0)
                raise InboxClosed("the scope of this actor ends, and no more work will come") from None
            if work.is_wanted(asyncio.get_running_loop().time()):
                work.taken = True
                return work

    def take_nowait(self, max_items: int) -> list[W]:
        """Take up to `max_items` works without waiting; return an empty list if the inbox is empty."""
        taken: list[W] = []
        while not self._suspended and (works := self.channel.get_many_nowait(max_items - len(taken))):
            now = asyncio.get_running_loop().time()
            taken += [work for work in works if work.is_wanted(now)]
        for work in taken:
            work.taken = True
        return taken

    def suspend(self) -> None:
        """Hand out no work, because the loop is about to be restarted; the queued work is for the next loop."""
        self._suspended = True

    def reopen(self) -> None:
        """Undo `suspend` and `close`."""
        self._suspended = False
        if self.channel.closed:
            self.channel.reopen()


def filled_inbox(values: Iterable[In]) -> tuple[Inbox[Work[In, Any]], list["asyncio.Future[Any]"]]:
    """Return an inbox with a work for each value, and a future for each outcome. The inbox ends after the last work.

    Args:
        values: the arguments of the calls. To cancel a future cancels its work.
    """
    requests: list[Request[In, Any]] = [Request(value) for value in values]
    for request in requests:
        request.outcome.add_done_callback(partial(_cancel_too, request))
    return _filled(requests), [request.outcome for request in requests]


def filled_stream_inbox(
    values: Iterable[In], capacity: int = DEFAULT_CAPACITY
) -> tuple[Inbox[StreamWork[In, Any]], list[AsyncGenerator[Any, None]]]:
    """Return an inbox with a work for each value, and an iterator over the parts of each work.

    The inbox ends after the last work.

    Args:
        values: the arguments of the calls. To close or drop an iterator cancels its work.
        capacity: how many parts each work holds.
    """
    requests: list[StreamRequest[In, Any]] = [StreamRequest(value, capacity=capacity) for value in values]
    return _filled(requests), [cast("Any", request.buffer.reader()) for request in requests]


def _filled(requests: list[W]) -> Mailbox[W]:
    mailbox: Mailbox[W] = Mailbox()
    for request in requests:
        mailbox.channel.put_nowait(request)
    mailbox.channel.close()
    return mailbox


def _cancel_too(request: Request[Any, Any], outcome: "asyncio.Future[Any]") -> None:
    if outcome.cancelled():
        request.cancel()


def bytes_of(value: object) -> int:
    """Return the size of a value in bytes; 0 if unknown."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    return len(value) if isinstance(value, bytes | bytearray | str) else 0
