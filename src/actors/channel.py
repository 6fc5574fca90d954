"""Channel: a bounded queue between actors, ordered by priority, and its counters."""

import asyncio
import sys
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import anyio

from .._errors import ChannelClosed
from ..telemetry.counters import ChannelStatistics, changed

if TYPE_CHECKING:
    from ..telemetry.profiling.durations import DepthWatch


T = TypeVar("T")


class PriorityFifo(Generic[T]):
    """A queue of entries: higher priorities first, and first in, first out within a priority.

    Each priority in use has an ordered dict, so that an entry can be removed from the middle as quickly as from the
    front. In a deque, a thousand waiting callers that are cancelled at once would take quadratic time. Entries are
    compared by identity, so their class must not define equality.
    """

    __slots__ = ("_fifo", "_priorities", "count")

    def __init__(self) -> None:
        self._fifo: dict[int, OrderedDict[T, None]] = {}
        # The priorities that have entries, ascending. An empty lane is removed at once, so that lanes cannot pile up
        # when each call has another priority.
        self._priorities: list[int] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def highest(self) -> int:
        """The priority of the next entry; raises IndexError if the queue is empty."""
        return self._priorities[-1]

    def lane(self, priority: int) -> Iterable[T]:
        """Return the entries of one priority, in order."""
        return self._fifo.get(priority, ())

    def head(self) -> T:
        """Return the next entry; raises IndexError if the queue is empty."""
        return next(iter(self._fifo[self._priorities[-1]]))

    def heads(self) -> Iterator[T]:
        """Yield the first entry of each priority."""
        for lane in self._fifo.values():
            yield next(iter(lane))

    def last_first(self) -> Iterator[tuple[int, T]]:
        """Yield each entry as (priority, entry), in reverse order: the entry that is popped last comes first."""
        for priority in self._priorities:
            for entry in reversed(self._fifo[priority]):
                yield priority, entry

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._fifo.values())

    def in_order(self) -> Iterator[T]:
        """Yield the entries in the order in which they are popped."""
        for priority in reversed(self._priorities):
            yield from self._fifo[priority]

    def push(self, entry: T, priority: int = 0) -> None:
        """Append an entry to the lane of `priority`."""
        lane = self._fifo.get(priority)
        if lane is None:
            lane = self._fifo[priority] = OrderedDict()
            insort(self._priorities, priority)
        lane[entry] = None
        self.count += 1

    def pop(self) -> T:
        """Remove and return the next entry; raises IndexError if the queue is empty."""
        priority = self._priorities[-1]
        lane = self._fifo[priority]
        entry, _ = lane.popitem(last=False)
        self.count -= 1
        if not lane:
            del self._fifo[priority], self._priorities[-1]
        return entry

    def pop_many(self, number: int) -> list[T]:
        """Remove and return the next `number` entries, or all if there are fewer."""
        found: list[T] = []
        while self._priorities and len(found) < number:
            priority = self._priorities[-1]
            lane = self._fifo[priority]
            room = number - len(found)
            if len(lane) <= room:
                found += lane
                del self._fifo[priority], self._priorities[-1]
            else:
                found += [lane.popitem(last=False)[0] for _ in range(room)]
        self.count -= len(found)
        return found

    def discard(self, entry: T, priority: int = 0) -> bool:
        """Remove an entry from the lane of `priority`; return whether it was there."""
        lane = self._fifo.get(priority)
        if lane is None or entry not in lane:
            return False
        del lane[entry]
        self.count -= 1
        if not lane:
            del self._fifo[priority], self._priorities[bisect_left(self._priorities, priority)]
        return True


# Channel: a bounded queue between actors.
#
# A channel touches the event loop only to wait: `put_nowait` and `get_nowait` are plain method calls on a deque.
# Waiting is fair. A put that waits leaves its item with the channel, and the get that makes room moves the item in: so
# later puts cannot overtake that item. A get that is woken holds a reservation for one item, which no other get can
# take.


class _Entry(Generic[T]):
    """An item and its size when it was put: the item may change while it is queued."""

    __slots__ = ("item", "size_bytes")

    def __init__(self, item: T, size_bytes: int) -> None:
        self.item = item
        self.size_bytes = size_bytes


class _Putter(_Entry[T]):
    """An item that waits to enter, and the future that its `put` awaits."""

    __slots__ = ("entered",)

    def __init__(self, item: T, size_bytes: int, entered: "asyncio.Future[None]") -> None:
        super().__init__(item, size_bytes)
        self.entered = entered


# Many records are made at a look: to change one takes a third of the time of making one.
EMPTY: Final = ChannelStatistics(0, None, 0, 0, 0, 0, 0, 0.0, 0.0)


class Channel(Generic[T]):
    """A bounded queue of items for one event loop; any number of producers and consumers.

    An idle channel is small: the queues for waiting tasks, for priorities and for sizes are made at their first use.

    Args:
        capacity: the most items that the channel holds; None without a bound.
        max_bytes: the most bytes that the channel holds, counted for items whose size `size_of` knows. A larger item
            enters only if the channel is empty.
        size_of: returns the size of an item in bytes, 0 if unknown; needed with `max_bytes`.

    Attributes:
        count: how many items the channel holds; the same as `len`, without the cost of a call.
        high_water: the most items that the channel has held.
        puts: how many items have been put.
        closed: whether puts are refused.
        watch: is told each change of the depth while a profile is taken; None for none.
    """

    __slots__ = (
        "_bytes", "_capacity", "_fifo", "_get_wait", "_getters", "_max_bytes", "_plain", "_put_waits", "_putters",
        "_reserved", "_size_of", "closed", "count", "high_water", "puts", "watch",
    )  # fmt: skip

    def __init__(
        self, capacity: int | None, *, max_bytes: int | None = None, size_of: Callable[[T], int] | None = None
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if max_bytes is not None and (max_bytes < 1 or size_of is None):
            raise ValueError("max_bytes must be at least 1 and needs size_of")
        self.high_water = 0
        self.puts = 0
        self._capacity = sys.maxsize if capacity is None else capacity
        self._max_bytes = max_bytes
        self._size_of = size_of if max_bytes is not None else None
        self.count = 0
        self._bytes = 0
        # Items are in `_plain` while all have priority 0 and there is no `max_bytes`, which is nearly always; otherwise
        # items are in `_fifo`.
        self._plain: deque[T] | None = None
        self._fifo: PriorityFifo[_Entry[T]] | None = None if max_bytes is None else PriorityFifo()
        self._putters: PriorityFifo[_Putter[T]] | None = None
        self._getters: OrderedDict[asyncio.Future[None], None] | None = None
        self._reserved = 0  # how many getters are woken but have not run yet: each will take an item
        self.closed = False
        self.watch: DepthWatch | None = None
        # How many puts wait; and the sum of the end times of all waits, minus the sum of their start times. A reader
        # adds the present time once for each put that still waits. Both numbers are in one tuple, because other threads
        # read them, and need two numbers of the same moment.
        self._put_waits = 0, 0.0
        self._get_wait = 0.0

    def __len__(self) -> int:
        return self.count

    def put_nowait(self, item: T, priority: int = 0) -> bool:
        """Put an item if there is room, and no other put waits before it.

        Returns:
            Whether the item entered.

        Raises:
            ChannelClosed: the channel is closed.
        """
        count = self.count
        if priority or count >= self._capacity or self._fifo is not None or self.closed:
            return self._put_by_rule(item, priority)
        # The short way. Without sizes, puts wait only while the channel is full, so this put overtakes no other.
        if self._plain is None:
            self._plain = deque()
        self._plain.append(item)
        self.count = count + 1
        self.puts += 1
        if count >= self.high_water:
            self.high_water = count + 1
        if self.watch is not None:
            self.watch.changed(count + 1)
        if self._getters:
            self._wake_getters()
        return True

    async def put(self, item: T, priority: int = 0) -> None:
        """Put an item; wait while the channel is full.

        If the put is cancelled after the item was moved in and before the put returned, the item stays in the channel;
        `discard` takes the item out.

        Raises:
            ChannelClosed: the channel is closed, or was closed while the put waited; the item did not enter.
        """
        if not self.put_nowait(item, priority):
            await self.put_queued(item, priority)

    async def put_queued(self, item: T, priority: int = 0) -> None:
        """Put an item that `put_nowait` has just refused; wait while the channel is full, as `put` does."""
        if self._putters is None:
            self._putters = PriorityFifo()
        putter = _Putter(item, self._size(item), asyncio.get_running_loop().create_future())
        self._putters.push(putter, priority)
        putting, put_wait = self._put_waits
        self._put_waits = putting + 1, put_wait - perf_counter()
        try:
            await putter.entered
        except asyncio.CancelledError:
            if self._putters.discard(putter, priority):
                self._admit_putters()  # a smaller item behind the cancelled put may fit
            raise
        finally:
            putting, put_wait = self._put_waits
            self._put_waits = putting - 1, put_wait + perf_counter()

    def get_nowait(self) -> T:
        """Take the next item.

        Raises:
            anyio.WouldBlock: there is no item, or all items are reserved for gets that waited before.
            ChannelClosed: the channel is closed and empty.
        """
        if self.count > self._reserved:
            plain = self._plain
            if plain and self._putters is None and self.watch is None:  # the short way
                self.count -= 1
                return plain.popleft()
            return self._take()
        if self.closed and not self.count:
            raise ChannelClosed("get from a closed and drained channel")
        raise anyio.WouldBlock

    def get_many_nowait(self, max_items: int) -> list[T]:
        """Take up to `max_items` items at once; return an empty list if the channel has none to take."""
        number = min(max_items, self.count - self._reserved)
        if number <= 0:
            return []
        if self._fifo is not None:
            items = [self._pop(self._fifo) for _ in range(number)]
        else:
            assert self._plain is not None
            items = [self._plain.popleft() for _ in range(number)]
            self.count -= number
        if self.watch is not None:
            self.watch.changed(self.count)
        self._admit_putters()
        return items

    async def get(self) -> T:
        """Take the next item; wait while the channel is empty.

        Raises:
            ChannelClosed: the channel is closed and empty.
        """
        if self.count > self._reserved:
            return self._take()
        if self._getters is None:
            self._getters = OrderedDict()
        began = perf_counter()
        woken_before = False
        try:
            while not self.closed or self.count:
                await self._wait_turn(self._getters, first=woken_before)
                if self.count:
                    item = self._take()
                    if self.closed:
                        self._wake_getters()
                    return item
                # The item was discarded meanwhile, or the channel was closed. This get stays the first in the line.
                woken_before = True
        finally:
            self._get_wait += perf_counter() - began
        raise ChannelClosed("get from a closed and drained channel")

    async def _wait_turn(self, getters: "OrderedDict[asyncio.Future[None], None]", *, first: bool) -> None:
        getter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        getters[getter] = None
        if first:
            getters.move_to_end(getter, last=False)
        try:
            await getter
        except asyncio.CancelledError:
            if getter.done() and not getter.cancelled():  # woken and cancelled at once: pass the wake-up on
                self._reserved -= 1
                self._wake_getters()
            else:
                getters.pop(getter, None)
            raise
        self._reserved -= 1

    def discard(self, item: T, priority: int = 0) -> bool:
        """Take out one particular item, which was put with this priority; return whether the item was queued.

        If the item still waits to enter, it does not enter, and its `put` returns.
        """
        queued = self._discard_queued(item, priority)
        if not queued and self._putters is not None:
            putter = next((putter for putter in self._putters.lane(priority) if putter.item is item), None)
            if putter is None:
                return False
            self._putters.discard(putter, priority)
            if not putter.entered.done():
                putter.entered.set_result(None)
        self._admit_putters()
        if self.closed:
            self._wake_getters()
        return queued

    def close(self) -> None:
        """Refuse further puts; gets take the items that are queued, and then raise `ChannelClosed`."""
        self.closed = True
        while self._putters:
            putter = self._putters.pop()
            if not putter.entered.done():
                putter.entered.set_exception(ChannelClosed("the channel was closed while this put waited"))
        self._wake_getters()

    def reopen(self) -> None:
        """Allow puts again."""
        self.closed = False

    @property
    def waiting_putters(self) -> int:
        """How many tasks wait for room now."""
        return 0 if self._putters is None else self._putters.count

    @property
    def capacity(self) -> int | None:
        """How many items the channel may hold; None without a bound."""
        return None if self._capacity == sys.maxsize else self._capacity

    @property
    def put_wait_seconds(self) -> float:
        """How long puts have waited in total, in seconds, including the puts that wait now."""
        putting, put_wait = self._put_waits
        return put_wait + putting * perf_counter()

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot of the counters."""
        return changed(
            EMPTY,
            depth=self.count,
            capacity=self.capacity,
            high_water=self.high_water,
            bytes_held=self._bytes,
            puts=self.puts,
            waiting_putters=len(self._putters or ()),
            waiting_getters=len(self._getters or ()),
            put_wait_seconds=self.put_wait_seconds,
            get_wait_seconds=self._get_wait,
        )

    def _size(self, item: T) -> int:
        return 0 if self._size_of is None else self._size_of(item)

    def _fits(self, size_bytes: int) -> bool:
        if self.count >= self._capacity:
            return False
        return self._max_bytes is None or not self.count or self._bytes + size_bytes <= self._max_bytes

    def _put_by_rule(self, item: T, priority: int) -> bool:
        if self.closed:
            raise ChannelClosed("put into a closed channel")
        size_bytes = self._size(item)
        # A large item may wait although a smaller item would fit. Only items of higher priority may overtake it.
        if not self._fits(size_bytes) or (self._putters and self._putters.highest >= priority):
            return False
        self._enter(item, size_bytes, priority)
        return True

    def _enter(self, item: T, size_bytes: int, priority: int) -> None:
        fifo = self._fifo
        if fifo is None:
            if priority:
                fifo = self._fifo = PriorityFifo()
                while self._plain:
                    fifo.push(_Entry(self._plain.popleft(), 0))
        elif not priority and not self.count and self._size_of is None:
            fifo = self._fifo = None  # the channel is empty: use the deque again, until the next item with a priority
        if fifo is not None:
            fifo.push(_Entry(item, size_bytes), priority)
            self._bytes += size_bytes
        else:
            if self._plain is None:
                self._plain = deque()
            self._plain.append(item)
        self.count += 1
        self.puts += 1
        if self.count > self.high_water:
            self.high_water = self.count
        if self.watch is not None:
            self.watch.changed(self.count)
        if self._getters:
            self._wake_getters()

    def _take(self) -> T:
        if self._fifo is None:
            assert self._plain is not None
            item = self._plain.popleft()
            self.count -= 1
        else:
            item = self._pop(self._fifo)
        if self.watch is not None:
            self.watch.changed(self.count)
        if self._putters is not None and self._putters.count:
            self._admit_putters()
        return item

    def _pop(self, fifo: PriorityFifo[_Entry[T]]) -> T:
        entry = fifo.pop()
        self.count -= 1
        self._bytes -= entry.size_bytes
        return entry.item

    def _discard_queued(self, item: T, priority: int) -> bool:
        if self._fifo is not None:
            entry = next((entry for entry in self._fifo.lane(priority) if entry.item is item), None)
            if entry is None:
                return False
            self._fifo.discard(entry, priority)
            self._bytes -= entry.size_bytes
        else:
            # By identity, unlike deque.remove: the class of an item may define equality in its own way, as arrays do.
            place = next((place for place, queued in enumerate(self._plain or ()) if queued is item), None)
            if place is None or self._plain is None:
                return False
            del self._plain[place]
        self.count -= 1
        if self.watch is not None:
            self.watch.changed(self.count)
        return True

    def _admit_putters(self) -> None:
        putters = self._putters
        while putters:
            putter = putters.head()
            if putter.entered.done():  # cancelled: its put is about to remove it
                putters.pop()
                continue
            if not self._fits(putter.size_bytes):
                return
            priority = putters.highest
            putters.pop()
            self._enter(putter.item, putter.size_bytes, priority)
            putter.entered.set_result(None)

    def _wake_getters(self) -> None:
        """Wake as many getters as there are items; wake all if the channel is closed and empty."""
        getters = self._getters
        while getters and (self.count > self._reserved or (self.closed and not self.count)):
            getter, _ = getters.popitem(last=False)
            if not getter.done():
                self._reserved += 1
                getter.set_result(None)
