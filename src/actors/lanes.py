"""Lanes: a line that is first-in first-out within one priority, higher priorities first."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Lanes(Generic[T]):
    """One ordered dict per priority in use, so that an entry leaves from the middle as quickly as from the front.

    A thousand callers that wait and are cancelled at once would be quadratic in a deque. The entries are what waits
    (a future, a put) and are told apart by identity: their class must not define equality.
    """

    __slots__ = ("_lanes", "_priorities", "count")

    def __init__(self) -> None:
        self._lanes: dict[int, OrderedDict[T, None]] = {}
        # Those that have entries, ascending. Empty lanes leave at once, so ever new priorities cannot pile up.
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
        return self._lanes.get(priority, ())

    def head(self) -> T:
        """Return the next entry; raises IndexError when empty."""
        return next(iter(self._lanes[self._priorities[-1]]))

    def heads(self) -> Iterator[T]:
        """Yield the first entry of each priority."""
        for lane in self._lanes.values():
            yield next(iter(lane))

    def __iter__(self) -> Iterator[T]:
        for lane in self._lanes.values():
            yield from lane

    def push(self, entry: T, priority: int = 0) -> None:
        """Append an entry to the lane of `priority`."""
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = OrderedDict()
            insort(self._priorities, priority)
        lane[entry] = None
        self.count += 1

    def pop(self) -> T:
        """Remove and return the next entry; raises IndexError when empty."""
        priority = self._priorities[-1]
        lane = self._lanes[priority]
        entry, _ = lane.popitem(last=False)
        self.count -= 1
        if not lane:
            del self._lanes[priority], self._priorities[-1]
        return entry

    def pop_many(self, number: int) -> list[T]:
        """Remove and return the next entries, or all if there are fewer."""
        found: list[T] = []
        while self._priorities and len(found) < number:
            priority = self._priorities[-1]
            lane = self._lanes[priority]
            room = number - len(found)
            if len(lane) <= room:
                found += lane
                del self._lanes[priority], self._priorities[-1]
            else:
                found += [lane.popitem(last=False)[0] for _ in range(room)]
        self.count -= len(found)
        return found

    def discard(self, entry: T, priority: int = 0) -> bool:
        """Remove an entry from the lane of `priority`; returns whether it was there."""
        lane = self._lanes.get(priority)
        if lane is None or entry not in lane:
            return False
        del lane[entry]
        self.count -= 1
        if not lane:
            del self._lanes[priority], self._priorities[bisect_left(self._priorities, priority)]
        return True
