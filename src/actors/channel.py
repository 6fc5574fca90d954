"""Channel: a bounded queue between actors.

It touches the event loop only when it has to wait: `put_nowait` and `get_nowait` are plain method calls on a deque.
Waiting is fair. A putter that waits carries its item, and the getter that makes room moves the item in, so later
puts cannot overtake it. A getter that is woken holds a reservation on one item, so others cannot overtake it either.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

import anyio

from .._errors import ChannelClosed
from .lanes import Lanes

T = TypeVar("T")


@dataclass(frozen=True)
class ChannelStatistics:
    """A snapshot of a channel.

    A `put_wait_seconds` that grows means that the consumer is the bottleneck; a `get_wait_seconds` that grows
    means that the producer is.

    Attributes:
        depth: items held now.
        capacity: items it may hold; None if unbounded.
        high_water: the most items it ever held.
        bytes_held: bytes held now, where the size of items is known.
        puts: items that entered since the channel was made.
        waiting_putters: tasks that wait for room now.
        waiting_getters: tasks that wait for an item now.
        put_wait_seconds: time that putters spent waiting, in total.
        get_wait_seconds: time that getters spent waiting, in total.
    """

    depth: int
    capacity: int | None
    high_water: int
    bytes_held: int
    puts: int
    waiting_putters: int
    waiting_getters: int
    put_wait_seconds: float
    get_wait_seconds: float


class _Putter(Generic[T]):
    __slots__ = ("future", "item", "size_bytes")

    def __init__(self, item: T, size_bytes: int, future: "asyncio.Future[None]") -> None:
        self.item = item
        self.size_bytes = size_bytes
        self.future = future


class Channel(Generic[T]):
    """A bounded queue of items for one event loop; any number of producers and consumers.

    Args:
        capacity: the most items it holds; None for no bound.
        max_bytes: the most bytes it holds, for items whose size `size_of` knows. An item larger than that enters
            only an empty channel.
        size_of: the size of an item in bytes, 0 where unknown; needed with `max_bytes`.
    """

    __slots__ = (
        "_bytes", "_closed", "_get_wait", "_getters", "_items", "_put_wait", "_putters", "_reserved", "_size_of",
        "capacity", "high_water", "max_bytes", "puts",
    )  # fmt: skip

    def __init__(
        self,
        capacity: int | None,
        *,
        max_bytes: int | None = None,
        size_of: Callable[[T], int] | None = None,
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if max_bytes is not None and (max_bytes < 1 or size_of is None):
            raise ValueError("max_bytes must be at least 1 and needs size_of")
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.high_water = 0
        self.puts = 0
        self._size_of = size_of if max_bytes is not None else None
        # With a bytes limit an entry is (item, size): an item may change while it is queued, its size here may not.
        self._items: Lanes[T | tuple[T, int]] = Lanes()
        self._putters: Lanes[_Putter[T]] | None = None
        self._getters: deque[asyncio.Future[None]] | None = None
        self._reserved = 0  # items promised to getters that are woken but have not run yet
        self._bytes = 0
        self._closed = False
        self._put_wait = 0.0
        self._get_wait = 0.0

    def __len__(self) -> int:
        return self._items.count

    @property
    def closed(self) -> bool:
        """Whether `close` was called; items may still be there to get."""
        return self._closed

    def put_nowait(self, item: T, priority: int = 0) -> bool:
        """Put an item if there is room and nobody waits before it.

        Returns:
            Whether the item entered.

        Raises:
            ChannelClosed: the channel is closed.
        """
        if self._closed:
            raise ChannelClosed("put into a closed channel")
        size_bytes = self._size_of(item) if self._size_of is not None else 0
        if self._putters or not self._fits(size_bytes):
            return False
        self._enter(item, size_bytes, priority)
        return True

    async def put(self, item: T, priority: int = 0) -> None:
        """Put an item; waits while the channel is full.

        Raises:
            ChannelClosed: the channel is closed, or was closed while waiting; the item did not enter.
        """
        if self.put_nowait(item, priority):
            return
        if self._putters is None:
            self._putters = Lanes()
        size_bytes = self._size_of(item) if self._size_of is not None else 0
        putter = _Putter(item, size_bytes, asyncio.get_running_loop().create_future())
        self._putters.push(putter, priority)
        began = perf_counter()
        try:
            await putter.future
        except BaseException:
            # Still in line: leave it, and let smaller items behind this one in. Already moved in: the item stays put.
            if self._putters.discard(putter, priority):
                self._admit_putters()
            raise
        finally:
            self._put_wait += perf_counter() - began

    def get_nowait(self) -> T:
        """Take the next item.

        Raises:
            anyio.WouldBlock: there is none, or those that are there are promised to getters that waited before.
            ChannelClosed: the channel is closed and drained.
        """
        if self._items.count <= self._reserved:
            if self._closed and not self._items.count:
                raise ChannelClosed("get from a closed and drained channel")
            raise anyio.WouldBlock
        return self._take()

    def get_many_nowait(self, max_items: int) -> list[T]:
        """Take what is there, at most `max_items`, in one go; an empty list if there is nothing."""
        return [self._take() for _ in range(min(max_items, self._items.count - self._reserved))]

    async def get(self) -> T:
        """Take the next item; waits while there is none.

        Raises:
            ChannelClosed: the channel is closed and drained.
        """
        if self._items.count > self._reserved:
            return self._take()
        if self._closed:
            raise ChannelClosed("get from a closed and drained channel")
        if self._getters is None:
            self._getters = deque()
        getter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._getters.append(getter)
        began = perf_counter()
        try:
            await getter
        except BaseException:
            if getter.done() and not getter.cancelled() and getter.exception() is None:
                self._reserved -= 1  # woken and cancelled at once: pass the wake-up on
                self._wake_getters()
            elif getter in self._getters:
                self._getters.remove(getter)
            raise
        finally:
            self._get_wait += perf_counter() - began
        self._reserved -= 1
        return self._take()

    def discard(self, item: T, priority: int = 0) -> bool:
        """Take one particular item out, making room; returns whether it was queued.

        If it still waits with its putter to enter, it does not enter any more, and the putter goes on.
        """
        entry = item if self._size_of is None else self._entry_of(item)
        if entry is not None and self._items.discard(entry, priority):
            if self._size_of is not None:
                self._bytes -= entry[1]  # type: ignore[index]
            self._admit_putters()
            return True
        for putter in self._putters or ():
            if putter.item is item:
                assert self._putters is not None
                self._putters.discard(putter, priority)
                if not putter.future.done():
                    putter.future.set_result(None)
                self._admit_putters()
                break
        return False

    def _entry_of(self, item: T) -> T | tuple[T, int] | None:
        return next((entry for entry in self._items if isinstance(entry, tuple) and entry[0] is item), None)

    def close(self) -> None:
        """Refuse further puts; what is queued can still be taken, then getters see `ChannelClosed`."""
        self._closed = True
        while self._putters:
            putter = self._putters.pop()
            if not putter.future.done():
                putter.future.set_exception(ChannelClosed("the channel was closed while this put waited"))
        while self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_exception(ChannelClosed("the channel was closed while this get waited"))

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot of the counters."""
        return ChannelStatistics(
            depth=self._items.count,
            capacity=self.capacity,
            high_water=self.high_water,
            bytes_held=self._bytes,
            puts=self.puts,
            waiting_putters=len(self._putters) if self._putters is not None else 0,
            waiting_getters=len(self._getters) if self._getters is not None else 0,
            put_wait_seconds=self._put_wait,
            get_wait_seconds=self._get_wait,
        )

    def _fits(self, size_bytes: int) -> bool:
        count = self._items.count
        if self.capacity is not None and count >= self.capacity:
            return False
        return self.max_bytes is None or not count or self._bytes + size_bytes <= self.max_bytes

    def _enter(self, item: T, size_bytes: int, priority: int) -> None:
        if self._size_of is None:
            self._items.push(item, priority)
        else:
            self._items.push((item, size_bytes), priority)
            self._bytes += size_bytes
        self.puts += 1
        if self._items.count > self.high_water:
            self.high_water = self._items.count
        if self._getters:
            self._wake_getters()

    def _take(self) -> T:
        entry = self._items.pop()
        if self._size_of is None:
            item: T = entry  # type: ignore[assignment]
        else:
            item, size_bytes = entry  # type: ignore[misc]
            self._bytes -= size_bytes
        if self._putters:
            self._admit_putters()
        return item

    def _admit_putters(self) -> None:
        putters = self._putters
        while putters:
            putter, priority = putters.head()
            if putter.future.done():  # cancelled, and about to leave the line by itself
                putters.pop()
                continue
            if not self._fits(putter.size_bytes):
                return
            putters.pop()
            self._enter(putter.item, putter.size_bytes, priority)
            putter.future.set_result(None)

    def _wake_getters(self) -> None:
        getters = self._getters
        while getters and self._items.count > self._reserved:
            getter = getters.popleft()
            if not getter.done():
                self._reserved += 1
                getter.set_result(None)
