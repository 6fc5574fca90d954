"""Postponed cancellation: one that arrived where it must not interrupt, and is raised at the task's next await.

The count of `Task.cancelling()` stays as it was all the time, so whoever has sent the cancellation can still take it
back: `asyncio.timeout`, a `TaskGroup` and a scope of anyio do so at the end of their blocks. Then it is not raised.
"""

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

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
