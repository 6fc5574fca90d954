"""Keeper: a task that keeps one thing open, from its opening to its closing."""

import asyncio
import itertools
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import Any, Generic, TypeVar

from .started_tasks import start_task
from .uninterrupted import uninterrupted

T = TypeVar("T")

_opened = itertools.count(1)


class Keeper(Generic[T]):
    """Enters an async context manager in a task of its own, keeps it open, and leaves it in the same task.

    What is opened may hold a task group or a cancel scope, which must be left by the task that entered it; and
    whoever asked for it first may be cancelled while others go on using it.

    Args:
        manager: what to enter.
        name: name of the task.
        context: what it runs in; a copy of the caller's if None.

    Attributes:
        task: the task.
        number: grows with every opening that has succeeded, over all keepers; 0 before.
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
