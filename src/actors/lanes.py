"""Lanes: a queue that is first-in first-out within one priority, higher priorities first."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Lanes(Generic[T]):
    """One deque per priority in use. With a single priority, as nearly always, it costs little more than a deque."""

    __slots__ = ("_lanes", "_order", "count")

    def __init__(self) -> None:
        self._lanes: dict[int, deque[T]] = {}
        # Priorities that have items, highest first. Empty lanes leave at once, so ever new priorities cannot pile up.
        self._order: list[int] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[T]:
        for priority in self._order:
            yield from self._lanes[priority]

    def push(self, item: T, priority: int = 0) -> None:
        """Append `item` to the lane of `priority`."""
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = deque()
            self._order.append(priority)
            self._order.sort(reverse=True)
        lane.append(item)
        self.count += 1

    def head(self) -> tuple[T, int]:
        """Return the next item and its priority; raises IndexError when empty."""
        priority = self._order[0]
        return self._lanes[priority][0], priority

    def pop(self) -> T:
        """Remove and return the next item; raises IndexError when empty."""
        priority = self._order[0]
        lane = self._lanes[priority]
        item = lane.popleft()
        self.count -= 1
        if not lane:
            del self._order[0], self._lanes[priority]
        return item

    def discard(self, item: T, priority: int = 0) -> bool:
        """Remove `item` from the lane of `priority`; returns whether it was there."""
        lane = self._lanes.get(priority)
        if lane is None:
            return False
        try:
            lane.remove(item)
        except ValueError:
            return False
        self.count -= 1
        if not lane:
            self._order.remove(priority)
            del self._lanes[priority]
        return True
