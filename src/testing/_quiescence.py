"""Wait until all tasks of an event loop are blocked."""

import asyncio
import gc
import weakref
from collections import deque
from collections.abc import Sized
from typing import Any

# For each loop, the tasks inside of `wait_quiescent`. They run in each turn, which does not count as activity. The
# value for a task is its `cancelling()` at the beginning of the wait: a task that was cancelled since counts as active.
_waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[asyncio.Task[Any], int]] = (
    weakref.WeakKeyDictionary()
)


async def wait_quiescent() -> None:
    """Wait until every other task of the running loop is blocked and no callback is due.

    Use this function in place of a sleep. After it, the loop can do nothing more until a timer fires or input arrives
    from outside. `wait_quiescent` does not wait for timers, threads, processes and remote peers. Several tasks may wait
    at the same time. A task that never blocks (a loop around `sleep(0)`) makes the wait endless.

    This works on asyncio's own loops, on uvloop, and on the loops of this package.

    Raises:
        RuntimeError: this function cannot read the queue of the running loop, because it does not know the loop's type.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None  # a running coroutine of a running loop is in a task
    due = _due_callbacks(loop)
    waiting = _waiting.setdefault(loop, {})
    waiting[task] = task.cancelling()
    try:
        while True:
            # One turn of the loop: the loop runs the due callbacks, polls its descriptors and timers, and resumes here.
            await asyncio.sleep(0)
            # Each task that can run has its step in this queue. If only the steps of other waiting tasks are left, all
            # remaining tasks are blocked.
            if len(due) < sum(other.cancelling() == requests for other, requests in waiting.items()):
                return
    finally:
        del waiting[task]


def _due_callbacks(loop: asyncio.AbstractEventLoop) -> Sized:
    """Return the queue of callbacks that the loop is going to run.

    No public function tells whether a loop has callbacks to run. A fixed number of `sleep(0)` calls would be too few
    for a long chain of callbacks, and nobody would notice. So this function reads the queue itself. asyncio has had the
    queue under this name since 3.4. uvloop holds the queue in C, but the garbage collector shows the queue as the only
    deque of the loop.
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
