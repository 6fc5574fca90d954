"""Waiting until an event loop has nothing left to do but wait."""

import asyncio
import gc
import weakref
from collections import deque
from collections.abc import Sized
from typing import Any

# The tasks of each loop that are inside `wait_quiescent`: they take turns for ever, but that is not activity. Beside
# each its number of cancel requests when it came, since one that is being cancelled is about to do something else.
_waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[asyncio.Task[Any], int]] = (
    weakref.WeakKeyDictionary()
)


async def wait_quiescent() -> None:
    """Returns when every other task of the running loop is blocked and no callback is due.

    Use it in place of a sleep: after it, everything that could happen has happened, until time passes or something
    arrives from outside. Timers in the future, threads, processes and remote peers are not waited for. Several tasks
    may wait at once. A task that never blocks (a loop around `sleep(0)`) keeps it waiting for ever.

    Works on asyncio's own loops, on uvloop, and on the loops of this package.

    Raises:
        RuntimeError: the running loop is of a kind that this function cannot look into.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None  # a running coroutine of a running loop is in a task
    due = _due_callbacks(loop)
    waiting = _waiting.setdefault(loop, {})
    waiting[task] = task.cancelling()
    try:
        while True:
            # One turn of the loop: it runs what is due, polls its descriptors and timers, and comes back here.
            await asyncio.sleep(0)
            # A task that can run has its step in this queue, so if only those of the other waiting tasks are there, all
            # the rest are blocked.
            if len(due) < sum(other.cancelling() == requests for other, requests in waiting.items()):
                return
    finally:
        del waiting[task]


def _due_callbacks(loop: asyncio.AbstractEventLoop) -> Sized:
    """Returns the loop's live queue of callbacks to run.

    No public call tells whether a loop has something to run. A number of `sleep(0)` rounds would be a guess that a
    longer chain of callbacks defeats without a word, so this looks at the queue itself: asyncio has kept it under this
    name since 3.4, and uvloop holds it in C, where the garbage collector's view shows it as the loop's only deque.
    """
    known: Sized | None = vars(loop).get("_ready")
    if known is not None:
        return known
    deques: list[deque[Any]] = [found for found in gc.get_referents(loop) if isinstance(found, deque)]
    if len(deques) != 1:
        raise RuntimeError(
            f"wait_quiescent() cannot see what is due on a {type(loop).__qualname__}; run the test on asyncio or uvloop"
        )
    return deques[0]
