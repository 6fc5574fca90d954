"""Tasks of the engine: how they begin, how cancellation waits for what must be finished, and what tasks wait with."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from time import monotonic
from types import CodeType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import anyio

T = TypeVar("T")

# Beginning: each task takes its first step in a later turn of the loop, or at once where that is asked for.

# Of `asyncio.eager_task_factory`, and of all that `asyncio.create_eager_task_factory` makes; from Python 3.12 on.
_EAGER: CodeType | None = getattr(getattr(asyncio, "eager_task_factory", None), "__code__", None)

# Of a service, in one turn of the loop: 256 calls of a handler that does nothing are about 2 ms on the slowest of our
# machines, and 1 ms is what the loop of a busy server takes for a turn anyway.
MOST_EAGER_CALLS = 256
MOST_EAGER_SECONDS = 0.001


def start_task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    context: Context | None = None,
) -> "asyncio.Task[T]":
    """Start a task of the engine; it takes its first step in a later turn of the loop, also where tasks are eager.

    An eager task runs before whoever starts it knows the task: a handler would be run in the midst of what starts it,
    and could not be cancelled there.
    """
    if _EAGER is None:  # Python 3.11
        return loop.create_task(work, name=name, context=context)
    factory: Any = loop.get_task_factory()
    if factory is None:
        return loop.create_task(work, name=name, context=context)
    if getattr(factory, "__code__", None) is not _EAGER:
        return _start_task_of_another_factory(loop, work, name, context)
    make_task: Callable[..., asyncio.Task[T]] = factory.__closure__[0].cell_contents
    return make_task(work, loop=loop, name=name, context=context)


class EagerStarts:
    """Whether a call may begin at once, in the midst of what makes it, instead of in the next turn of the loop.

    So a call whose handlers do not suspend takes no turn at all. But a task that makes one such call after the other
    would keep the loop from all others: after so many calls, or so long, in one turn the next call waits for another.
    """

    __slots__ = ("_left", "_loop", "_until")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = -1  # in this turn; below 0 if it has none yet
        self._until = 0.0

    def may_start(self) -> bool:
        """Count one call more; returns whether it may begin now."""
        if _EAGER is None:  # Python 3.11
            return False
        if self._left < 0:
            if self._loop.get_task_factory() is not None:
                return False
            self._left, self._until = MOST_EAGER_CALLS, monotonic() + MOST_EAGER_SECONDS
            self._loop.call_soon(self._turn_ended)
        elif not self._left or monotonic() >= self._until:  # the time of uvloop stands still, and jumps by 1 ms
            return False
        self._left -= 1
        return True

    def _turn_ended(self) -> None:
        self._left = -1


def start_eagerly(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, object], context: Context) -> None:
    """Run a coroutine up to its first suspension, as a task of its own; see `EagerStarts`."""
    make_task: Any = asyncio.Task  # the argument is there from Python 3.12 on
    make_task(work, loop=loop, context=context, eager_start=True)


def _start_task_of_another_factory(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], name: str | None, context: Context | None
) -> "asyncio.Task[T]":
    """Start a task where nobody can tell whether tasks are eager: one that is comes back in a later turn."""

    async def begin_later() -> T:
        if is_starting:
            await asyncio.sleep(0)
        return await work

    is_starting = True
    task = loop.create_task(begin_later(), name=name, context=context)
    is_starting = False
    task.add_done_callback(lambda _: work.close())  # one that was cancelled before its first step has not begun it
    return task


# Postponed cancellation: one that arrived where it must not interrupt, and is raised at the task's next await.
#
# The count of `Task.cancelling()` stays as it was all the time, so whoever has sent the cancellation can still take it
# back: `asyncio.timeout`, a `TaskGroup` and a scope of anyio do so at the end of their blocks. Then it is not raised.

# The arguments of the `CancelledError`, by which a scope of anyio knows its own, and how often the task was cancelled
# before.
_postponed: "WeakKeyDictionary[asyncio.Task[Any], tuple[tuple[Any, ...], int]]" = WeakKeyDictionary()


def postpone(args: tuple[Any, ...], undisturbed: int) -> None:
    """Have a cancellation that was caught arrive where the running task waits next.

    A task that ends without another wait ends with its result: what it was not interrupted for must not be lost.

    Args:
        args: of the `CancelledError`.
        undisturbed: `cancelling()` of the task before the cancellation.
    """
    task = _running_task()
    _postponed[task] = args, undisturbed
    # Not `task.cancel()` now: that could not be taken back before Python 3.13.
    task.get_loop().call_soon(_deliver, task)


def raise_postponed() -> None:
    """Raise what was postponed in the running task and has not arrived yet; at an await that would postpone it again.

    Raises:
        asyncio.CancelledError: there is such a cancellation.
    """
    args = _still_wanted(_running_task())
    if args is not None:
        raise asyncio.CancelledError(*args)


def _deliver(task: "asyncio.Task[Any]") -> None:
    args = _still_wanted(task)
    if args is not None:
        task.uncancel()  # it was counted when it was sent
        task.cancel(*args)


def _still_wanted(task: "asyncio.Task[Any]") -> tuple[Any, ...] | None:
    args, undisturbed = _postponed.pop(task, (None, 0))
    return args if not task.done() and task.cancelling() > undisturbed else None


def _running_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task


# Waiting: for what has to be finished, for what others change, for a context manager that has a task of its own.


async def until(is_over: Callable[[], bool], wait: Callable[[], Awaitable[object]]) -> None:
    """Wait until something is over, also while being cancelled; the cancellation is raised afterwards.

    Args:
        is_over: whether it is.
        wait: waits for a change; called again for as long as it is not over.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile.
    """
    try:
        while not is_over():
            await wait()
        return
    except asyncio.CancelledError as error:
        cancelled = error
    # `Task.cancel()` arrives once, whatever shields there are. A cancel scope of anyio cancels again in every turn of
    # the loop, which would keep the processor busy until all is over: from that, its own shield protects.
    with anyio.CancelScope(shield=True):
        while not is_over():
            try:
                await wait()
            except asyncio.CancelledError as error:
                cancelled = error  # perhaps a scope was first: it must not catch what another has sent
    try:
        raise cancelled
    finally:
        del cancelled  # it refers to this frame


async def uninterrupted(work: Any) -> Any:
    """Finish some work also while being cancelled; the cancellation is raised afterwards.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile.
        Exception: what the work raised.
    """
    task = asyncio.ensure_future(work)
    try:
        await until(task.done, lambda: asyncio.wait([task]))
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # it is retrieved; the cancellation is what the caller has to see
        raise
    return task.result()


class Condition:
    """A condition variable for the tasks of one event loop: as asyncio's, without the lock that one loop does not need.

    For those who look again after every change. Who is given something when it is its turn, such as a place or an item,
    waits in a line of futures instead; what happens once and for all is an `asyncio.Event`.
    """

    __slots__ = ("_changed",)

    def __init__(self) -> None:
        # An Event costs 760 bytes, and a server may have a thousand deployments: made when somebody waits for it.
        self._changed: asyncio.Event | None = None

    def notify_all(self) -> None:
        """Have all those look again who wait."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait(self) -> None:
        """Wait for the next change."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait until a predicate is true; it is asked at once, and after every change."""
        while not predicate():
            await self.wait()


_opened = itertools.count(1)


class ContextTask(Generic[T]):
    """Enters an async context manager in a task of its own, keeps it open, and leaves it in the same task.

    What is opened may hold a task group or a cancel scope, which must be left by the task that entered it; and
    whoever asked for it first may be cancelled while others go on using it.

    Args:
        manager: what to enter.
        name: name of the task.
        context: what it runs in; a copy of the caller's if None.

    Attributes:
        task: the task.
        number: grows with every opening that has succeeded, over all context tasks; 0 before.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T], name: str, context: Context | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.number = 0
        self._entered: asyncio.Future[T] = loop.create_future()
        self._closing: asyncio.Future[None] = loop.create_future()
        self.task = start_task(loop, self._keep(manager), name=name, context=context)

    @property
    def was_opened(self) -> bool:
        """Whether it has ever been open."""
        return self._entered.done()

    @property
    def is_open(self) -> bool:
        """Whether it was opened, has not ended, and is not about to be closed."""
        return self._entered.done() and not self._closing.done() and not self.task.done()

    @property
    def is_leaving(self) -> bool:
        """Whether it was open, and is being closed, or ends by itself."""
        return self._entered.done() and not self.is_open and not self.task.done()

    @property
    def value(self) -> T:
        """What the context manager gave."""
        return self._entered.result()

    @property
    def error(self) -> BaseException | None:
        """What it ended with; None if it ended well, or was cancelled, or has not ended."""
        return None if not self.task.done() or self.task.cancelled() else self.task.exception()

    async def settled(self) -> None:
        """Wait until it is open, or has ended: it failed to open, or was lost before anybody could use it."""
        either: list[asyncio.Future[Any]] = [self.task, self._entered]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self.is_open:  # what it has ended with is known when it has been left
            await asyncio.wait([self.task])

    def end_soon(self) -> None:
        """Begin to close it; an opening that goes on is cancelled."""
        if self._closing.done():
            return
        self._closing.set_result(None)  # also for an opening: it may swallow the cancellation, and go on
        if not self._entered.done():
            self.task.cancel()

    async def ended(self) -> BaseException | None:
        """Begin to close it, and wait until it is closed, also while being cancelled; returns what that raised."""
        self.end_soon()
        await uninterrupted(asyncio.wait([self.task]))
        return self.error

    async def _keep(self, manager: AbstractAsyncContextManager[T]) -> None:
        async with manager as value:
            self.number = next(_opened)
            self._entered.set_result(value)
            del value
            await self._closing
