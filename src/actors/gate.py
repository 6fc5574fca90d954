"""Gate: lets attempts into the instance of a node that may be restarted, and gets them out again."""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from .._errors import ActorRestarted, ActorStopped, PenstockError
from .condition import Condition

if TYPE_CHECKING:
    from .invocation import Runner

_ENDED = "penstock: the actor is restarted"


class Gate:
    """Stands before an instance: open, closed while it is restarted, or closed for good.

    An attempt that finds it closed waits there, in order, and keeps the place of its item in the node: so the items
    behind it wait in the inbox as always, and nothing on the way to the gate has to know of it.

    Args:
        name: name of the node, for errors.
        restart_on: what an attempt raises if the instance is broken.
        on_crash: called with such an exception, once the attempt has left.
    """

    __slots__ = (
        "_cause", "_inside", "_left", "_line", "_name", "_on_crash", "_restart_on", "_state", "_threads",
        "_why",
    )  # fmt: skip

    def __init__(
        self, name: str, restart_on: tuple[type[Exception], ...], on_crash: Callable[[Exception], None]
    ) -> None:
        self._name = name
        self._restart_on = restart_on
        self._on_crash = on_crash
        self._state: Literal["open", "held", "stopped"] = "held"
        self._cause: BaseException | None = None
        self._why: str | None = None
        self._inside: dict[Stay, None] = {}
        self._line: deque[asyncio.Future[None]] = deque()
        self._threads = 0  # that run on although their attempt has ended
        self._left = Condition()

    @property
    def is_stopped(self) -> bool:
        """Whether it is closed for good."""
        return self._state == "stopped"

    def open(self) -> None:
        """Let attempts in: the first in line, which lets in the next."""
        self._state = "open"
        self._wake()

    def hold(self) -> None:
        """Let no more attempts in for now; those inside go on."""
        self._state = "held"

    def stop(self, cause: BaseException | None, why: str | None = None) -> None:
        """Let no more attempts in: they end with `ActorStopped`, until it is opened again.

        Args:
            cause: what was raised.
            why: what has ended the instance; None if it has crashed itself.
        """
        self._state = "stopped"
        self._cause = cause
        self._why = why
        self._wake()

    async def clear(self, cause: BaseException | None) -> None:
        """End the attempts inside, with `ActorRestarted` or `ActorStopped`; wait until they and threads have left."""
        for stay in self._inside:
            stay.end(cause)
        await self._left.wait_for(lambda: not self._inside and not self._threads)

    def admit(self, worker: "Runner") -> "Stay":
        """Return a context manager around an attempt."""
        return Stay(self, worker)

    async def enter(self, stay: "Stay") -> None:
        """Wait until the gate is open, and for those who came before.

        Raises:
            ActorStopped: it is closed for good.
        """
        if self._state == "held" or self._line:
            await self._wait()
        if self._state == "stopped":
            raise self._stopped_error()
        self._inside[stay] = None

    def leave(self, stay: "Stay", error: BaseException | None) -> None:
        """An attempt has ended; its thread may go on."""
        del self._inside[stay]
        call = stay.worker.outside_call
        if call is not None and call.abandon():
            self._threads += 1
            call.then(self._thread_returned)
        self._left.notify_all()
        if isinstance(error, self._restart_on):
            self._on_crash(error)

    def error(self, cause: BaseException | None) -> PenstockError:
        """Return the error of an attempt that had to leave."""
        if self._state == "stopped":
            return self._stopped_error()
        error = ActorRestarted(f"node {self._name!r} was restarted while it worked on this item, after: {cause!r}")
        error.__cause__ = cause
        return error

    def _stopped_error(self) -> ActorStopped:
        why = self._why or f"it is not restarted after: {self._cause!r}"
        error = ActorStopped(f"node {self._name!r} takes no more items: {why}")
        error.__cause__ = self._cause
        return error

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(waiter)
        try:
            while True:
                await waiter
                if self._state != "held":
                    return
                # Closed again before it was its turn to run: it stays the first in line.
                self._line[0] = waiter = asyncio.get_running_loop().create_future()
        finally:
            self._line.remove(waiter)
            self._wake()

    def _wake(self) -> None:
        if self._line and self._state != "held" and not self._line[0].done():
            self._line[0].set_result(None)

    def _thread_returned(self) -> None:
        self._threads -= 1
        self._left.notify_all()


class Stay:
    """One attempt inside an instance: an async context manager, entered and left by the task that runs it."""

    __slots__ = ("_cancelling", "_cause", "_gate", "_is_ended", "worker")

    def __init__(self, gate: Gate, worker: "Runner") -> None:
        self._gate = gate
        self._cancelling = 0
        self.worker = worker
        self._is_ended = False
        self._cause: BaseException | None = None

    async def __aenter__(self) -> None:
        assert self.worker.task is not None
        self._cancelling = self.worker.task.cancelling()
        await self._gate.enter(self)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._gate.leave(self, error)
        if not self._is_ended:
            return
        task = self.worker.task
        assert task is not None
        if task.cancelling() > self._cancelling:  # a handler may have undone it itself
            task.uncancel()
        if task.cancelling() > self._cancelling or not isinstance(error, Exception | asyncio.CancelledError | None):
            return  # its item, or its worker, was cancelled as well
        raise self._gate.error(self._cause)

    def end(self, cause: BaseException | None) -> None:
        """Cancel the attempt; whatever it does then, it ends with the error of its gate."""
        task = self.worker.task
        if self._is_ended or self.worker.cancels or task is None:
            return  # it is unwinding already, and a second cancel would break into that
        self._is_ended = True
        self._cause = cause
        task.cancel(_ENDED)
