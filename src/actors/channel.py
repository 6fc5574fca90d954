"""Channel: a bounded queue between actors, ordered by priority; with what it says of itself."""

import asyncio
import sys
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from .._errors import ChannelClosed
from ..telemetry.counters import ChannelStatistics

if TYPE_CHECKING:
    from ..telemetry.profiling.durations import DepthWatch


T = TypeVar("T")


class PriorityFifo(Generic[T]):
    """One ordered dict per priority in use, so that an entry leaves from the middle as quickly as from the front.

    A thousand callers that wait and are cancelled at once would be quadratic in a deque. The entries are what waits
    (a future, a put) and are told apart by identity: their class must not define equality.
    """

    __slots__ = ("_fifo", "_priorities", "count")

    def __init__(self) -> None:
        self._fifo: dict[int, OrderedDict[T, None]] = {}
        # Those that have entries, ascending. Empty ones leave at once, so ever new priorities cannot pile up.
        self._priorities: list[int] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def highest(self) -> int:
        """The priority of the next entry; raises IndexError when empty."""
        return self._priorities[-1]

    def lane(self, priority: int) -> Iterable[T]:
        """Return the entries of one priority, in order."""
        return self._fifo.get(priority, ())

    def head(self) -> T:
        """Return the next entry; raises IndexError when empty."""
        return next(iter(self._fifo[self._priorities[-1]]))

    def heads(self) -> Iterator[T]:
        """Yield the first entry of each priority."""
        for lane in self._fifo.values():
            yield next(iter(lane))

    def __iter__(self) -> Iterator[T]:
        for lane in self._fifo.values():
            yield from lane

    def push(self, entry: T, priority: int = 0) -> None:
        """Append an entry to the lane of `priority`."""
        lane = self._fifo.get(priority)
        if lane is None:
            lane = self._fifo[priority] = OrderedDict()
            insort(self._priorities, priority)
        lane[entry] = None
        self.count += 1

    def pop(self) -> T:
        """Remove and return the next entry; raises IndexError when empty."""
        priority = self._priorities[-1]
        lane = self._fifo[priority]
        entry, _ = lane.popitem(last=False)
        self.count -= 1
        if not lane:
            del self._fifo[priority], self._priorities[-1]
        return entry

    def pop_many(self, number: int) -> list[T]:
        """Remove and return the next entries, or all if there are fewer."""
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
        """Remove an entry from the lane of `priority`; returns whether it was there."""
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
# It touches the event loop only when it has to wait: `put_nowait` and `get_nowait` are plain method calls on a deque.
# Waiting is fair. A putter that waits carries its item, and whoever makes room moves the item in, so later puts cannot
# overtake it. A getter that is woken holds a reservation on one item, so others cannot overtake it either.


class _Entry(Generic[T]):
    """An item and its size, as it was when the item came: an item may change while it is queued."""

    __slots__ = ("item", "size_bytes")

    def __init__(self, item: T, size_bytes: int) -> None:
        self.item = item
        self.size_bytes = size_bytes


class _Putter(_Entry[T]):
    """An item that waits to enter, and the future that its putter awaits."""

    __slots__ = ("entered",)

    def __init__(self, item: T, size_bytes: int, entered: "asyncio.Future[None]") -> None:
        super().__init__(item, size_bytes)
        self.entered = entered


class Channel(Generic[T]):
    """A bounded queue of items for one event loop; any number of producers and consumers.

    An idle channel is small: what waiting, priorities and sizes need is made when it is first needed.

    Args:
        capacity: the most items it holds; None for no bound.
        max_bytes: the most bytes it holds, for items whose size `size_of` knows. An item larger than that enters
            only an empty channel.
        size_of: the size of an item in bytes, 0 where unknown; needed with `max_bytes`.

    Attributes:
        count: items that it holds; `len` gives the same, and costs a call.
    """

    __slots__ = (
        "_bytes",
        "_capacity",
        "_closed",
        "_fifo",
        "_get_wait",
        "_getters",
        "_line",
        "_max_bytes",
        "_put_waits",
        "_putters",
        "_reserved",
        "_size_of",
        "_watch",
        "count",
        "high_water",
        "puts",
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
        self.high_water = 0
        self.puts = 0
        self._capacity = sys.maxsize if capacity is None else capacity
        self._max_bytes = max_bytes
        self._size_of = size_of if max_bytes is not None else None
        self.count = 0
        self._bytes = 0
        # Items are in `_line` as long as all have priority 0 and no size counts, as nearly always; else in `_fifo`.
        self._line: deque[T] | None = None
        self._fifo: PriorityFifo[_Entry[T]] | None = None if max_bytes is None else PriorityFifo()
        self._putters: PriorityFifo[_Putter[T]] | None = None
        self._getters: OrderedDict[asyncio.Future[None], None] | None = None
        self._reserved = 0  # getters that are woken and have not run yet: each will take an item
        self._closed = False
        self._watch: DepthWatch | None = None  # while a profile is taken
        # Putters that wait, and the ends of all waits less their beginnings: those that go on are counted by adding one
        # end for each. They are one value, because other threads read them, and one without the other says nothing.
        self._put_waits = 0, 0.0
        self._get_wait = 0.0

    def __len__(self) -> int:
        return self.count

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
        count = self.count
        if priority or count >= self._capacity or self._fifo is not None or self._closed:
            return self._put_by_rule(item, priority)
        # The short way. Without sizes only a full channel has putters that wait, so nobody is overtaken here.
        if self._line is None:
            self._line = deque()
        self._line.append(item)
        self.count = count + 1
        self.puts += 1
        if count >= self.high_water:
            self.high_water = count + 1
        if self._watch is not None:
            self._watch.changed(count + 1)
        if self._getters:
            self._wake_getters()
        return True

    def put_many_nowait(self, items: list[T]) -> None:
        """Put items of priority 0, all in one go; no more than there is `room` for.

        Raises:
            ChannelClosed: the channel is closed.
        """
        if self._closed:
            raise ChannelClosed("put into a closed channel")
        if self._line is None:
            self._line = deque()
        self._line.extend(items)
        self.count += len(items)
        self.puts += len(items)
        self.high_water = max(self.high_water, self.count)
        if self._watch is not None:
            self._watch.changed(self.count)
        if self._getters:
            self._wake_getters()

    async def put(self, item: T, priority: int = 0) -> None:
        """Put an item; waits while the channel is full.

        If it is cancelled after the item was moved in and before it could return, the item stays in the channel;
        `discard` takes it back.

        Raises:
            ChannelClosed: the channel is closed, or was closed while waiting; the item did not enter.
        """
        if not self.put_nowait(item, priority):
            await self.put_in_line(item, priority)

    async def put_in_line(self, item: T, priority: int = 0) -> None:
        """Put an item which `put_nowait` has just refused; else as `put`."""
        if self._putters is None:
            self._putters = PriorityFifo()
        putter = _Putter(item, self._size(item), asyncio.get_running_loop().create_future())
        self._putters.push(putter, priority)
        putting, put_wait = self._put_waits
        self._put_waits = putting + 1, put_wait - perf_counter()
        try:
            await putter.entered
        except BaseException:  # a cancel, as a rule; raised again
            if self._putters.discard(putter, priority):
                self._admit_putters()  # a smaller item behind this one may fit
            raise
        finally:
            putting, put_wait = self._put_waits
            self._put_waits = putting - 1, put_wait + perf_counter()

    def get_nowait(self) -> T:
        """Take the next item.

        Raises:
            anyio.WouldBlock: there is none, or those that are there are promised to getters that waited before.
            ChannelClosed: the channel is closed and drained.
        """
        if self.count > self._reserved:
            line = self._line
            if line and self._putters is None and self._watch is None:  # the short way
                self.count -= 1
                return line.popleft()
            return self._take()
        if self._closed and not self.count:
            raise ChannelClosed("get from a closed and drained channel")
        raise anyio.WouldBlock

    def get_many_nowait(self, max_items: int) -> list[T]:
        """Take what is there, at most `max_items`, in one go; an empty list if there is nothing."""
        number = min(max_items, self.count - self._reserved)
        if number <= 0:
            return []
        if self._fifo is not None:
            items = [self._pop(self._fifo) for _ in range(number)]
        else:
            assert self._line is not None
            items = [self._line.popleft() for _ in range(number)]
            self.count -= number
        if self._watch is not None:
            self._watch.changed(self.count)
        self._admit_putters()
        return items

    async def get(self) -> T:
        """Take the next item; waits while there is none.

        Raises:
            ChannelClosed: the channel is closed and drained.
        """
        if self.count > self._reserved:
            return self._take()
        if self._getters is None:
            self._getters = OrderedDict()
        began = perf_counter()
        woken_before = False
        try:
            while not self._closed or self.count:
                await self._wait_in_line(self._getters, first=woken_before)
                if self.count:
                    item = self._take()
                    if self._closed:
                        self._wake_getters()
                    return item
                # The item was discarded meanwhile, or the channel was closed.
                woken_before = True
        finally:
            self._get_wait += perf_counter() - began
        raise ChannelClosed("get from a closed and drained channel")

    async def _wait_in_line(self, getters: "OrderedDict[asyncio.Future[None], None]", *, first: bool) -> None:
        getter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        getters[getter] = None
        if first:
            getters.move_to_end(getter, last=False)
        try:
            await getter
        except BaseException:  # a cancel, as a rule; raised again
            if getter.done() and not getter.cancelled():  # woken and cancelled at once: pass the wake-up on
                self._reserved -= 1
                self._wake_getters()
            else:
                getters.pop(getter, None)
            raise
        self._reserved -= 1

    def discard(self, item: T, priority: int = 0) -> bool:
        """Take out one particular item that was put with this priority, making room; returns whether it was queued.

        If it still waits with its putter to enter, it does not enter any more, and the putter goes on.
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
        if self._closed:
            self._wake_getters()
        return queued

    def close(self) -> None:
        """Refuse further puts; what is queued can still be taken, then getters see `ChannelClosed`."""
        self._closed = True
        while self._putters:
            putter = self._putters.pop()
            if not putter.entered.done():
                putter.entered.set_exception(ChannelClosed("the channel was closed while this put waited"))
        self._wake_getters()

    def reopen(self) -> None:
        """Allow puts again."""
        self._closed = False

    def watch(self, watch: "DepthWatch | None") -> None:
        """Tell a watch of every change of the depth from now on; None: nobody any more."""
        self._watch = watch

    @property
    def capacity(self) -> int | None:
        """Items that it may hold; None if unbounded."""
        return None if self._capacity == sys.maxsize else self._capacity

    @property
    def room(self) -> int:
        """Items of priority 0 that surely enter now, with `put_many_nowait`; 0 where sizes or priorities count."""
        return 0 if self._fifo is not None or self._closed else self._capacity - self.count

    @property
    def put_wait_seconds(self) -> float:
        """Time that putters spent waiting, in total; of those that wait now, until now."""
        putting, put_wait = self._put_waits
        return put_wait + putting * perf_counter()

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot of the counters."""
        return ChannelStatistics(
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
        if self._closed:
            raise ChannelClosed("put into a closed channel")
        size_bytes = self._size(item)
        # A putter may wait for bytes while there is room for less; only one of lower priority may be overtaken.
        if not self._fits(size_bytes) or (self._putters and self._putters.highest >= priority):
            return False
        self._enter(item, size_bytes, priority)
        return True

    def _enter(self, item: T, size_bytes: int, priority: int) -> None:
        fifo = self._fifo
        if fifo is None:
            if priority:
                fifo = self._fifo = PriorityFifo()
                while self._line:
                    fifo.push(_Entry(self._line.popleft(), 0))
        elif not priority and not self.count and self._size_of is None:
            fifo = self._fifo = None  # back to the short way, until the next item with a priority
        if fifo is not None:
            fifo.push(_Entry(item, size_bytes), priority)
            self._bytes += size_bytes
        else:
            if self._line is None:
                self._line = deque()
            self._line.append(item)
        self.count += 1
        self.puts += 1
        if self.count > self.high_water:
            self.high_water = self.count
        if self._watch is not None:
            self._watch.changed(self.count)
        if self._getters:
            self._wake_getters()

    def _take(self) -> T:
        if self._fifo is None:
            assert self._line is not None
            item = self._line.popleft()
            self.count -= 1
        else:
            item = self._pop(self._fifo)
        if self._watch is not None:
            self._watch.changed(self.count)
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
            # By identity, unlike deque.remove: an item's class may define equality as it likes, and arrays do.
            place = next((place for place, queued in enumerate(self._line or ()) if queued is item), None)
            if place is None or self._line is None:
                return False
            del self._line[place]
        self.count -= 1
        if self._watch is not None:
            self._watch.changed(self.count)
        return True

    def _admit_putters(self) -> None:
        putters = self._putters
        while putters:
            putter = putters.head()
            if putter.entered.done():  # cancelled, and about to leave the line by itself
                putters.pop()
                continue
            if not self._fits(putter.size_bytes):
                return
            priority = putters.highest
            putters.pop()
            self._enter(putter.item, putter.size_bytes, priority)
            putter.entered.set_result(None)

    def _wake_getters(self) -> None:
        """Wake as many as there are items for; all of them when none will come any more."""
        getters = self._getters
        while getters and (self.count > self._reserved or (self._closed and not self.count)):
            getter, _ = getters.popitem(last=False)
            if not getter.done():
                self._reserved += 1
                getter.set_result(None)
