"""Tasks of the engine: each takes its first step in a later turn of the loop, or at once where that is asked for."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from time import monotonic
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")

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
