"""Requests: work of an actor that owns its loop, seen from who asked for it."""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, ClassVar, Generic, TypeVar

from .._errors import WorkSettledError
from .frame import plain_error
from .parts import DEFAULT_PARTS, Parts
from .work import StreamWork, Work

In = TypeVar("In")
Out = TypeVar("Out")


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

    Attributes:
        outcome: what its caller awaits. It is cancelled together with its caller, at that moment.
    """

    __slots__ = ("outcome",)

    def __init__(self, value: In, priority: int = 0, deadline: float | None = None) -> None:
        super().__init__(value, priority, deadline)
        self.outcome: asyncio.Future[Out] = asyncio.get_running_loop().create_future()

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
        parts: what the reader reads.
    """

    __slots__ = ("_poured", "parts")

    _face = "StreamWork"

    def __init__(
        self, value: In, priority: int = 0, deadline: float | None = None, capacity: int = DEFAULT_PARTS
    ) -> None:
        super().__init__(value, priority, deadline)
        self.parts: Parts[Out] = Parts(capacity)
        self.parts.on_abandoned = self.cancel
        self._poured: asyncio.Future[None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether nobody reads it any more; parts go nowhere then, and settling it does nothing."""
        return self._cancelled or (self._poured is not None and self._poured.cancelled())

    def _over(self) -> None:
        if self._poured is None:  # else the parts are somebody else's
            self.parts.on_abandoned = None
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
        return self.parts.put_nowait(part)

    def finish(self) -> None:
        """End the stream; the reader gets what is there.

        Raises:
            WorkSettledError: it was finished or failed before.
        """
        if self._claim():
            self.parts.end()
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
                self.parts.end(error)
            else:
                self._poured.set_exception(error)

    async def pour(self, parts: Parts[Out]) -> None:
        """Move what is left into `parts`, and have what follows put there; for whoever passes it on to another reader.

        Returns when the work is settled or the reader of `parts` has left.

        Raises:
            BaseException: what the work is failed with.
        """
        own = self.parts
        try:
            while own.held:
                if not await parts.put(own.take()):
                    return
            if not own.ended:
                self.parts = parts
                self._poured = asyncio.get_running_loop().create_future()
                await self._poured
            elif own.error is not None:
                raise own.error
        finally:
            self.cancel()
            self._poured = None  # an error refers to this call
