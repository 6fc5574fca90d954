"""Loop mailbox: brings results of other threads to an event loop, with one wake-up per burst."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class LoopMailbox:
    """Calls functions on an event loop, for threads.

    `call_soon_threadsafe` wakes the loop once per call, which costs 6 us on asyncio. Here calls gather in a deque that
    is emptied once per wake-up, in the order in which they came.

    Args:
        loop: where they are called.
    """

    __slots__ = ("_armed", "_calls", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._armed = False

    def __len__(self) -> int:
        return len(self._calls)

    def post(self, callback: Callable[..., None], *args: Any) -> bool:
        """Have `callback(*args)` called on the loop; from any thread. Returns False if the loop is closed."""
        self._calls.append((callback, args))
        if self._armed:
            return True
        self._armed = True
        return self._wake()

    def empty(self) -> None:
        """Call what waits here now; on the loop's thread."""
        # Disarmed before: what arrives meanwhile is either called here or arms the next wake-up.
        self._armed = False
        calls = self._calls
        try:
            # No more than what is here: each call may give a thread work whose result is here before the last one is
            # called, and the loop would do nothing else until there is no work left.
            for _ in range(len(calls)):
                if not calls:  # a callback has emptied it
                    break
                callback, args = calls.popleft()
                callback(*args)
                del callback, args  # what waits for the next call must not hold the last one's result
        finally:
            if calls and not self._armed:  # a callback raised: the others must still be called
                self._armed = True
                self._wake()

    def _wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self.empty)
        except RuntimeError:  # the loop is closed: nobody can receive these results
            self._armed = False
            self._calls.clear()
            return False
        return True
