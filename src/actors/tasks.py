"""Tasks of the engine: how they begin, how a cancellation is postponed, and how tasks wait."""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from contextvars import Context, ContextVar
from time import monotonic
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import anyio

T = TypeVar("T")

# Set where the running task works for an item that this process does not know: a text that ends the sentence of an
# error, and says where the task runs and what to do instead.
no_item: ContextVar[str | None] = ContextVar("penstock_no_item", default=None)

# Beginning: tasks take their first step in a later turn of the loop, or at once with `start_eagerly`.

_HAS_EAGER_TASKS: Final = hasattr(asyncio, "eager_task_factory")  # from Python 3.12 on

# How many calls of a service may begin at once in one turn of the loop, and for how many seconds. 256 calls of a
# handler that does nothing take about 2 ms on the slowest machine measured; a turn of a busy server's loop takes 1 ms.
MOST_EAGER_CALLS = 256
MOST_EAGER_SECONDS = 0.001


def start_task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    context: Context | None = None,
) -> "asyncio.Task[T]":
    """Start a task of the engine. The task takes its first step in a later turn of the loop.

    The task factory of the loop is not asked, because its tasks may be eager. An eager task runs before its starter has
    the task object: its handler would run in the midst of the starting code, and could not be cancelled there.
    """
    return asyncio.Task(work, loop=loop, name=name, context=context)


class EagerStarts:
    """Decides whether a call begins at once, inside of the caller's step, instead of in the next turn of the loop.

    A call that begins at once, and whose handlers do not suspend, takes no turn of the loop at all: 8.7 us instead of
    13.4 us on asyncio, and 8.5 us instead of 10.6 us on uvloop. A call whose handlers suspend takes as long as before.
    But a task that makes many such calls in a row would keep the loop from all other tasks. So after `MOST_EAGER_CALLS`
    calls, or `MOST_EAGER_SECONDS`, in one turn, the next call begins in the next turn.
    """

    __slots__ = ("_left", "_loop", "_until")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = -1  # how many calls may still begin in this turn; -1 before the first call of the turn
        self._until = 0.0

    def may_start(self) -> bool:
        """Count a call; return whether it may begin at once."""
        if not _HAS_EAGER_TASKS:
            return False
        if self._left < 0:
            if self._loop.get_task_factory() is not None:
                return False
            self._left, self._until = MOST_EAGER_CALLS, monotonic() + MOST_EAGER_SECONDS
            self._loop.call_soon(self._turn_ended)
        elif not self._left or monotonic() >= self._until:  # not loop.time(): uvloop's stands still during a turn
            return False
        self._left -= 1
        return True

    def _turn_ended(self) -> None:
        self._left = -1


def start_eagerly(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, object], context: Context) -> None:
    """Run a coroutine up to its first suspension, as a task of its own; see `EagerStarts`."""
    make_task: Any = asyncio.Task  # typed as Any, because `eager_start` exists only from Python 3.12 on
    make_task(work, loop=loop, context=context, eager_start=True)


class ResumingFuture(asyncio.Future[T]):
    """A future whose result resumes the task that waits for the future, without another turn of the loop.

    This class is for callbacks of the loop that set one result. An error or a cancellation resumes the task in the next
    turn, as in any future.
    """

    _waiter: "tuple[Callable[[ResumingFuture[T]], object], Context] | None" = None

    def add_done_callback(
        self, fn: "Callable[[ResumingFuture[T]], object]", /, *, context: Context | None = None
    ) -> None:
        """Keep the callback of the waiting task, which alone passes its context; other callbacks are called later."""
        if context is None or self._waiter is not None or self.done():
            super().add_done_callback(fn, context=context)
        else:
            self._waiter = fn, context

    def set_result(self, result: T, /) -> None:
        """Set the result, and resume the task that waits."""
        super().set_result(result)
        waiter = self._waiter
        if waiter is None or asyncio.current_task(self.get_loop()) is not None:
            self._resume_soon()  # a task cannot run inside of another task
        else:
            self._waiter = None
            waiter[1].run(waiter[0], self)

    def set_exception(self, exception: type | BaseException, /) -> None:
        """Set an error, and have the task that waits resumed."""
        super().set_exception(exception)
        self._resume_soon()

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future, and have the task that waits resumed."""
        is_cancelled = super().cancel(msg)
        self._resume_soon()
        return is_cancelled

    def _resume_soon(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self.get_loop().call_soon(waiter[0], self, context=waiter[1])


# Postponed cancellation: a cancellation that has arrived where it must not interrupt. The next await of the task raises
# it.
#
# The count of `Task.cancelling()` does not change meanwhile, so the sender can still take the cancellation back, as
# `asyncio.timeout`, a `TaskGroup` and a scope of anyio do at the end of their blocks. Then no await raises it.

# For each task: the arguments of the `CancelledError`, by which a scope of anyio recognises its own cancellation, and
# the value of `cancelling()` before.
_postponed: "WeakKeyDictionary[asyncio.Task[Any], tuple[tuple[Any, ...], int]]" = WeakKeyDictionary()


def postpone(args: tuple[Any, ...], undisturbed: int) -> None:
    """Raise a cancellation that was caught at the next await of the running task.

    A task that ends without another await ends with its result, so that finished work is not lost.

    Args:
        args: the arguments of the `CancelledError`.
        undisturbed: the value of `cancelling()` of the task before the cancellation.
    """
    task = _running_task()
    _postponed[task] = args, undisturbed
    # `task.cancel()` is called later, because before Python 3.13 the sender could not take it back.
    task.get_loop().call_soon(_deliver, task)


def raise_postponed() -> None:
    """Raise a cancellation that was postponed in the running task and not raised yet.

    Call this before an await that would postpone the cancellation once more.

    Raises:
        asyncio.CancelledError: there is such a cancellation.
    """
    args = _still_wanted(_running_task()) if _postponed else None  # nearly always, `_postponed` is empty
    if args is not None:
        raise asyncio.CancelledError(*args)


def _deliver(task: "asyncio.Task[Any]") -> None:
    args = _still_wanted(task)
    if args is not None:
        task.uncancel()  # the cancellation was counted when it was sent
        task.cancel(*args)


def _still_wanted(task: "asyncio.Task[Any]") -> tuple[Any, ...] | None:
    args, undisturbed = _postponed.pop(task, (None, 0))
    return args if not task.done() and task.cancelling() > undisturbed else None


def _running_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task


# Waiting: for work that has to be finished, for a change, and for a context manager that has a task of its own.


async def until(is_over: Callable[[], bool], wait: Callable[[], Awaitable[object]]) -> None:
    """Wait until `is_over()` is true, even if the caller is cancelled; the cancellation is raised afterwards.

    Args:
        is_over: whether the wait is over.
        wait: waits for a change; called again until the wait is over.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile.
    """
    try:
        while not is_over():
            await wait()
        return
    except asyncio.CancelledError as error:
        cancelled = error
    # `Task.cancel()` arrives once, and no shield stops it. A cancel scope of anyio cancels again in each turn of the
    # loop, which would keep the processor busy until the end of the wait; the shield of anyio stops that.
    with anyio.CancelScope(shield=True):
        while not is_over():
            try:
                await wait()
            except asyncio.CancelledError as error:
                cancelled = error  # the last error counts: if the first came from a scope, that scope would catch it
    try:
        raise cancelled
    finally:
        del cancelled  # breaks a cycle: the error refers to this frame


async def uninterrupted(work: Any) -> Any:
    """Finish some work even if the caller is cancelled; the cancellation is raised afterwards.

    Returns:
        The result of the work.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile.
        Exception: the error of the work.
    """
    has_begun = not asyncio.iscoroutine(work)

    async def begin() -> Any:
        nonlocal has_begun
        has_begun = True
        return await work

    task = asyncio.ensure_future(work if has_begun else begin())

    async def wait() -> None:
        nonlocal task
        await asyncio.wait([task])
        if not has_begun:  # the task was cancelled before its first step, as when the loop is shut down
            task = asyncio.ensure_future(begin())

    try:
        await until(lambda: has_begun and task.done(), wait)
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller has to see the cancellation
        raise
    return task.result()


class Condition:
    """A condition variable for the tasks of one event loop: as asyncio's, without the lock that one loop does not need.

    This class is for tasks that test a predicate again after each change. A task that waits for its turn, such as for a
    place or an item, waits with a future in a line instead. An event that happens once is an `asyncio.Event`.
    """

    __slots__ = ("_changed",)

    def __init__(self) -> None:
        # Made when a task waits: an Event takes 760 bytes, and a server may have a thousand deployments.
        self._changed: asyncio.Event | None = None

    def notify_all(self) -> None:
        """Wake all tasks that wait."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait(self) -> None:
        """Wait for the next change."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait until a predicate is true; it is tested at once, and after each change."""
        while not predicate():
            await self.wait()


_opened = itertools.count(1)


class ContextTask(Generic[T]):
    """Enters an async context manager in a task of its own, keeps it open, and leaves it in the same task.

    The context manager may hold a task group or a cancel scope, which must be left by the task that entered it. The
    task that first needed the context manager may be cancelled while other tasks still use it.

    Args:
        manager: the context manager.
        name: the name of the task.
        context: the context of the task; None for a copy of the caller's.
        work: awaited with the value of the context manager, which is left when the work is over; `end_soon` cancels the
            work. None: the context manager stays open until `end_soon`.

    Attributes:
        task: the task.
        number: a number that says in which order context tasks were opened; 0 before this task is open.
        closing: done once the context manager is about to be left.
    """

    def __init__(
        self,
        manager: AbstractAsyncContextManager[T],
        name: str,
        context: Context | None = None,
        work: Callable[[T], Awaitable[None]] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.number = 0
        self.closing: asyncio.Future[None] = loop.create_future()
        self._entered: asyncio.Future[T] = loop.create_future()
        self._work = work
        self.task = start_task(loop, self._keep(manager), name=name, context=context)

    @property
    def was_opened(self) -> bool:
        """Whether the context manager was entered; it may have been left since."""
        return self._entered.done()

    @property
    def is_open(self) -> bool:
        """Whether the context manager is entered, and is not about to be left."""
        return self._entered.done() and not self.closing.done() and not self.task.done()

    @property
    def is_leaving(self) -> bool:
        """Whether the context manager is being left, because it is closed or has ended by itself."""
        return self._entered.done() and not self.is_open and not self.task.done()

    @property
    def value(self) -> T:
        """The value of the context manager (`async with manager as value`)."""
        return self._entered.result()

    @property
    def error(self) -> BaseException | None:
        """The error of entering or leaving; None without an error, or if the task was cancelled or has not ended."""
        return None if not self.task.done() or self.task.cancelled() else self.task.exception()

    async def settled(self) -> None:
        """Wait until the context manager is entered, or until the task has ended because entering failed."""
        either: list[asyncio.Future[Any]] = [self.task, self._entered]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self.is_open:  # the error is known once the context manager has been left
            await asyncio.wait([self.task])

    def end_soon(self) -> None:
        """Begin to leave the context manager; if it is still being entered, or the work runs, cancel that."""
        if self.closing.done():
            return
        self.closing.set_result(None)  # in any case, because an `__aenter__` may swallow the cancellation and go on
        if not self._entered.done() or self._work is not None:
            self.task.cancel()

    async def ended(self) -> BaseException | None:
        """Leave the context manager, and wait for that, even if the caller is cancelled; return the error, if any."""
        self.end_soon()
        await uninterrupted(asyncio.wait([self.task]))
        return self.error

    async def _keep(self, manager: AbstractAsyncContextManager[T]) -> None:
        async with manager as value:
            self.number = next(_opened)
            self._entered.set_result(value)
            if self._work is not None and not self.closing.done():
                try:
                    await self._work(value)
                finally:
                    if not self.closing.done():
                        self.closing.set_result(None)
            del value
            await self.closing


async def close_stream(iterator: Any) -> None:
    """Close an async iterator, if it has `aclose`."""
    aclose: Callable[[], Awaitable[None]] | None = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


def when_main_thread_ends(end_threads: Callable[[], None]) -> None:
    """Call a function once the main thread has ended; functions that were registered later are called first.

    The interpreter waits for other threads only then, and calls `atexit` after that wait, so threads that were not
    closed would hold it for ever. `concurrent.futures` uses this hook for the same reason; there is no public hook.
    """
    threading._register_atexit(end_threads)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
