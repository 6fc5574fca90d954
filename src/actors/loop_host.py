"""Loop host: runs an actor that owns its loop, for one scope, and gives it items."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol, Self

from .._errors import ActorStopped, InboxClosed, NodeCancelledError
from ..telemetry import logs
from . import current
from .mailbox import Mailbox
from .requests import AnyRequest, Request
from .started_tasks import start_task
from .uninterrupted import until

# As many as a node's inbox in a pipeline.
DEFAULT_CAPACITY = 16
# OTP's default for workers. A loop that still runs then waits for something else than its inbox, which was closed.
SHUTDOWN_SECONDS = 5.0


class OwnsLoop(Protocol):
    """An actor that owns its loop; one with `__aenter__` is entered before, and left after it."""

    async def loop(self, inbox: Any, /) -> None:
        """Take work and settle it, until `inbox.get()` raises `InboxClosed`."""
        ...


class LoopHost:
    """An actor that owns its loop, at work: an async context manager.

    The actor has a task of its own, in which it is entered, runs its loop, and is left.

    Args:
        make: makes the instance whose loop runs.
        name: name of its node, for errors.
        capacity: the most items that wait in its inbox.
        max_bytes: the most bytes of values that wait there, for values that know their size.
        shutdown_seconds: how long the loop may go on after its inbox was closed; then it is cancelled.
        on_exit: called with the host and the error (None if the loop just returned) when the loop ends before its
            inbox was closed: that is a crash. It decides what becomes of the items, by `abandon`, or by `fail_taken`
            and `start`. Without it, all of them fail.

    Attributes:
        inbox: what waits for the loop.
    """

    def __init__(
        self,
        make: Callable[[], OwnsLoop],
        name: str,
        *,
        capacity: int | None = None,
        max_bytes: int | None = None,
        shutdown_seconds: float | None = None,
        on_exit: "Callable[[LoopHost, BaseException | None], None] | None" = None,
    ) -> None:
        self.name = name
        self.inbox: Mailbox[Any] = Mailbox(capacity or DEFAULT_CAPACITY, max_bytes=max_bytes)
        self._make = make
        self._shutdown_seconds = SHUTDOWN_SECONDS if shutdown_seconds is None else shutdown_seconds
        self._on_exit = on_exit
        self._unsettled: dict[AnyRequest[Any], None] = {}  # in order
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._halting = False
        self._loop_over: asyncio.Future[None] | None = None  # after it the instance is left, which nothing breaks into
        self._why = "its scope ends"
        self._cause: BaseException | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Make an instance, enter it, and begin its loop; again after its end, with what its inbox holds.

        Raises:
            Exception: what its `__aenter__` raised.
        """
        self.inbox.reopen()  # it was halted, or abandoned, and comes back
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        self._loop_over = loop.create_future()
        work = self._run(entered, self._loop_over)
        self._task = task = start_task(loop, work, name=f"penstock-loop-{self.name}")
        try:
            await asyncio.wait([task, entered], return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            entered.cancel()  # an `__aenter__` may swallow the cancellation and go on
            self._task = None
            self._halting = True
            try:
                await self._end(task)
            finally:
                self._halting = False
                if not task.cancelled() and (error := task.exception()) is not None:
                    logs.warning("actor.not_released", node=self.name, error=repr(error))
            raise
        if not entered.done():
            self._task = None
            if task.cancelled():
                raise NodeCancelledError(f"the start of actor {self.name!r} was cancelled, but not by the engine")
            task.result()  # raises what kept it from being entered

    async def halt(self) -> None:
        """End the loop now, and leave the instance; what its inbox holds stays there, and `start` goes on with it.

        Raises:
            Exception: what the loop, or the end of the instance, raised meanwhile.
        """
        self.inbox.suspend()  # tasks of the loop that run on until its cancellation reaches them take no more
        task = self._task
        if task is None or task.done():
            return
        self._halting = True
        try:
            await self._end(task)
        finally:
            self._halting = False
            self._task = None
        if not task.cancelled():
            task.result()

    async def close(self) -> None:
        """End the loop: no more work comes, what is queued is done, and `inbox.get()` raises `InboxClosed` then.

        A loop that goes on is cancelled after `shutdown_seconds`. Leaving the instance may take as long as it takes.

        Raises:
            Exception: what the loop, or the end of the instance, raised meanwhile.
        """
        self._closing = True
        self.inbox.close()
        task, loop_over = self._task, self._loop_over
        if task is None or loop_over is None:
            return
        try:
            seconds = self._shutdown_seconds
            await asyncio.wait([task, loop_over], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self._end(task)
            raise
        if not task.done() and not loop_over.done():
            logs.warning(
                "actor.shutdown_timeout", node=self.name, seconds=seconds,
                remedy="let InboxClosed end the loop, and wait for nothing but the inbox while there is no work; or "
                "give it longer: @node(shutdown_seconds=...)",
            )  # fmt: skip
        await self._end(task)
        if not task.cancelled():
            task.result()

    async def run(self, value: Any, priority: int = 0, deadline: float | None = None) -> Any:
        """Have the actor handle one item; returns its result.

        Args:
            value: what the actor is called with.
            priority: higher first.
            deadline: when nobody will wait for it any more, in the loop's time.

        Raises:
            Exception: what the actor failed it with.
            ActorStopped: the loop has ended.
        """
        work: Request[Any, Any] = Request(value, priority, deadline)
        try:
            await self.submit(work)
            return await work.outcome
        finally:
            work.cancel()
            del work  # an error refers to this call, and the work to the error

    async def submit(self, work: AnyRequest[Any]) -> None:
        """Give the actor work, and look after it until it is settled or cancelled.

        Raises:
            ActorStopped: the loop has ended.
        """
        self._unsettled[work] = None
        work.on_over = self._forget
        try:
            await self.inbox.put(work)
        except InboxClosed:
            work.cancel()
            raise self._stopped_error() from self._cause
        except BaseException:
            work.cancel()
            raise

    def fail_taken(self, make_error: Callable[[], Exception]) -> None:
        """Fail what the loop has taken out of its inbox and not settled; each gets an error of its own."""
        for work in [work for work in self._unsettled if work.taken]:
            work.give_up(make_error())

    def abandon(self, error: BaseException | None, why: str | None = None) -> None:
        """Fail everything, now and later.

        Args:
            error: what was raised; None if the loop just returned.
            why: what has ended the loop; None if it has ended by itself.
        """
        if why is not None:
            self._why = why
        elif error is not None:
            self._why = f"its loop raised {error!r}"
        elif not self._closing:
            self._why = "its loop returned, although its scope goes on"
        self._cause = error
        self.inbox.close()
        for work in list(self._unsettled):
            work.give_up(self._stopped_error())

    async def _end(self, task: "asyncio.Task[None]") -> None:
        """Cancel the loop if it still runs, and wait until the instance has been left."""
        if self._loop_over is None or not self._loop_over.done():
            task.cancel()
        try:
            await until(task.done, lambda: asyncio.wait([task]))
        finally:
            if not task.cancelled():
                task.exception()  # it is retrieved; one who is cancelled meanwhile sees only that

    async def _run(self, entered: "asyncio.Future[None]", loop_over: "asyncio.Future[None]") -> None:
        current.source.set(None)  # the loop works for no item in particular
        instance = self._make()
        crash: BaseException | None = None
        try:
            async with AsyncExitStack() as stack:
                if hasattr(instance, "__aenter__"):
                    enter: Any = instance
                    await stack.enter_async_context(enter)
                try:
                    if entered.cancelled():
                        return
                    entered.set_result(None)
                    await self._loop(instance)
                finally:
                    loop_over.set_result(None)
        except BaseException as error:
            if not entered.done() or self._halting:
                raise
            # Cancelled by nobody here, or an end of the whole program: there is nothing to restart it in.
            if self._closing or isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                self.abandon(error)
                raise
            crash = error
        if self._halting:
            return
        if self._closing:
            self.abandon(None)
            return
        if self._on_exit is None:
            logs.warning("actor.stopped", node=self.name, error=repr(crash))
            self.abandon(crash)
        else:
            self._on_exit(self, crash)

    async def _loop(self, instance: OwnsLoop) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await instance.loop(self.inbox)
        except InboxClosed:
            pass  # the clean end
        except BaseExceptionGroup as group:
            if group.split(InboxClosed)[1] is not None:  # else the clean end of the tasks of a task group
                raise
        except asyncio.CancelledError as error:
            if task.cancelling():
                raise
            # Nobody cancelled it: something that it awaited was cancelled, which is as bad as any other error.
            raise RuntimeError(f"the loop of actor {self.name!r} awaited something that was cancelled") from error

    def _stopped_error(self) -> ActorStopped:
        error = ActorStopped(f"actor {self.name!r} takes no more items: {self._why}")
        error.__cause__ = self._cause
        return error

    def _forget(self, work: AnyRequest[Any]) -> None:
        self._unsettled.pop(work, None)
        if not work.taken:
            self.inbox.withdraw(work)
