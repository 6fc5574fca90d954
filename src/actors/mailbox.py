"""Mailbox: an inbox, seen from who gives the actor its work."""

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from .._errors import ChannelClosed, InboxClosed
from .channel import Channel
from .channel_statistics import ChannelStatistics
from .inbox import Inbox
from .requests import AnyRequest

if TYPE_CHECKING:
    from ..telemetry.profiling.depth import DepthWatch

W = TypeVar("W", bound=AnyRequest[Any])


class Mailbox(Inbox[W]):
    """An inbox, and what may be done with it beside taking work out.

    Args:
        capacity: the most work that it holds; who puts more has to wait. None for no bound.
        max_bytes: the most bytes of values that it holds, for values that know their size.
    """

    __slots__ = ("_channel", "_suspended")

    def __init__(self, capacity: int | None = None, *, max_bytes: int | None = None) -> None:
        self._channel: Channel[W] = Channel(capacity, max_bytes=max_bytes, size_of=_size_of)
        self._suspended = False

    def __len__(self) -> int:
        """Return how many items wait."""
        return len(self._channel)

    async def get(self) -> W:
        """Take the next work; waits while there is none.

        Raises:
            InboxClosed: no more work will come; let it pass, and the actor ends cleanly.
        """
        while True:
            if self._suspended:
                await asyncio.sleep(0)  # as below
                raise InboxClosed("this actor is about to be restarted, and gets no more work")
            try:
                work = await self._channel.get()
            except ChannelClosed:
                # A loop that catches this and goes on must not keep everybody else from running.
                await asyncio.sleep(0)
                raise InboxClosed("the scope of this actor ends, and no more work will come") from None
            if _hand_out(work):
                return work

    def get_nowait(self, max_items: int) -> list[W]:
        """Take what is there, at most `max_items`; an empty list if there is nothing."""
        taken: list[W] = []
        while len(taken) < max_items and not self._suspended:
            try:
                work = self._channel.get_nowait()
            except (anyio.WouldBlock, ChannelClosed):
                break
            if _hand_out(work):
                taken.append(work)
        return taken

    def put_nowait(self, work: W) -> bool:
        """Give the actor work if there is room; returns whether there was.

        Raises:
            ChannelClosed: it takes no more.
        """
        return self._channel.put_nowait(work, work.priority)

    async def put(self, work: W) -> None:
        """Give the actor work; waits while the inbox is full.

        Raises:
            InboxClosed: it takes no more.
        """
        try:
            await self._channel.put(work, work.priority)
        except ChannelClosed:
            raise InboxClosed("this inbox takes no more work") from None

    def withdraw(self, work: W) -> None:
        """Take work back that is still queued, or that waits for room."""
        self._channel.discard(work, work.priority)

    def close(self) -> None:
        """Take no more work; what is queued can still be taken out."""
        self._channel.close()

    @property
    def closed(self) -> bool:
        """Whether it takes no more work."""
        return self._channel.closed

    def suspend(self) -> None:
        """Hand out nothing: the loop is about to be ended, and what is queued is for its successor."""
        self._suspended = True

    def reopen(self) -> None:
        """Take work again, and hand it out."""
        self._suspended = False
        if self._channel.closed:
            self._channel.reopen()

    def watch(self, watch: "DepthWatch | None") -> None:
        """Tell a watch of every change of the depth from now on; None: nobody any more."""
        self._channel.watch(watch)

    @property
    def capacity(self) -> int | None:
        """How much work it may hold; None if unbounded."""
        return self._channel.capacity

    @property
    def put_wait_seconds(self) -> float:
        """Time that those who give it work spent waiting, in total."""
        return self._channel.put_wait_seconds

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot of the counters."""
        return self._channel.statistics()


def _size_of(work: AnyRequest[Any]) -> int:
    try:
        return bytes_of(work.value)
    except Exception:  # noqa: BLE001 - user code, which the loop will meet when it looks at the value
        return 0


def bytes_of(value: object) -> int:
    """Return the size of a value in bytes; 0 where unknown."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    return len(value) if isinstance(value, bytes | bytearray | str) else 0


def _hand_out(work: AnyRequest[Any]) -> bool:
    """Mark work as handed out, provided that somebody still waits for it."""
    if work.cancelled or (work.deadline is not None and asyncio.get_running_loop().time() >= work.deadline):
        return False
    work.taken = True
    return True
