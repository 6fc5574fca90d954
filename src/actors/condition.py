"""Condition: waiting until something that others change has become true."""

import asyncio
from collections.abc import Callable


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
