"""Host: a task that keeps one thing open, from its opening to its closing."""

import asyncio
import itertools
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import Any, Generic, TypeVar

from ...actors.uninterrupted import uninterrupted

T = TypeVar("T")

_opened = itertools.count(1)


class Host(Generic[T]):
    """Enters an async context manager in a task of its own, keeps it open, and leaves it in the same task.

    What is opened may hold a task group or a cancel scope, which must be left by the task that entered it; and
    whoever asked for it first may be cancelled while others go on using it.

    Args:
        manager: what to enter.
        name: name of the task.
        context: what it runs in.

    Attributes:
        task: the task.
        number: grows with every opening that has succeeded, over all hosts; 0 before.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T], name: str, context: Context) -> None:
        loop = asyncio.get_running_loop()
        self.number = 0
        self._entered: asyncio.Future[T] = loop.create_future()
        self._closing: asyncio.Future[None] = loop.create_future()
        self.task = loop.create_task(self._stay(manager), name=name, context=context)

    @property
    def is_open(self) -> bool:
        """Whether it was opened and has not ended."""
        return self._entered.done() and not self.task.done()

    @property
    def value(self) -> T:
        """What the context manager gave."""
        return self._entered.result()

    async def settled(self) -> None:
        """Wait until it is open, or has failed to open."""
        either: list[asyncio.Future[Any]] = [self.task, self._entered]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    def end_soon(self) -> None:
        """Begin to close it; an opening that goes on is cancelled."""
        if not self._entered.done():
            self.task.cancel()
        elif not self._closing.done():
            self._closing.set_result(None)

    async def ended(self) -> BaseException | None:
        """Begin to close it, and wait until it is closed, also while being cancelled; returns what that raised."""
        self.end_soon()
        await uninterrupted(asyncio.wait([self.task]))
        return self.error

    @property
    def error(self) -> BaseException | None:
        """What it ended with; None if it ended well, or was cancelled, or has not ended."""
        return None if not self.task.done() or self.task.cancelled() else self.task.exception()

    async def _stay(self, manager: AbstractAsyncContextManager[T]) -> None:
        async with manager as value:
            self.number = next(_opened)
            self._entered.set_result(value)
            del value
            await self._closing
