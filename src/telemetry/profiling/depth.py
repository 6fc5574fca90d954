"""Depth: how full a queue was over time."""

import math
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Final

# Points of the curve that are kept until somebody collects them, and the least time between two: a curve of a second
# then has 1,000 points, which is more than a screen.
_POINTS: Final = 1024
_POINT_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True)
class DepthTotals:
    """What the depth of a queue adds up to.

    Attributes:
        waited_seconds: time that items were in it, over all items: the integral of its depth.
        occupied_seconds: time that it was not empty.
        full_seconds: time that it was full.
    """

    waited_seconds: float
    occupied_seconds: float
    full_seconds: float

    def __add__(self, other: "DepthTotals") -> "DepthTotals":
        return DepthTotals(
            self.waited_seconds + other.waited_seconds,
            self.occupied_seconds + other.occupied_seconds,
            self.full_seconds + other.full_seconds,
        )

    def __sub__(self, earlier: "DepthTotals") -> "DepthTotals":
        return DepthTotals(
            self.waited_seconds - earlier.waited_seconds,
            self.occupied_seconds - earlier.occupied_seconds,
            self.full_seconds - earlier.full_seconds,
        )


NO_DEPTH: Final = DepthTotals(0.0, 0.0, 0.0)


class DepthWatch:
    """Adds up over time how many items are in a queue; told of every change while a profile is taken.

    Args:
        depth: items in it now.
        capacity: how many it may hold; None for no bound.

    Attributes:
        points: the newest moments and depths, a selection.
    """

    __slots__ = ("_at", "_capacity", "_depth", "_full", "_kept_at", "_occupied", "_waited", "points")

    def __init__(self, depth: int, capacity: int | None) -> None:
        self._depth = depth
        self._capacity = math.inf if capacity is None else capacity
        self._at = perf_counter()
        self._kept_at = 0.0
        self._waited = self._occupied = self._full = 0.0
        self.points: deque[tuple[float, int]] = deque(maxlen=_POINTS)

    def changed(self, depth: int) -> None:
        """It holds another number of items from now on."""
        now = perf_counter()
        before = self._depth
        if before:
            seconds = now - self._at
            self._waited += seconds * before
            self._occupied += seconds
            if before >= self._capacity:
                self._full += seconds
        self._at = now
        self._depth = depth
        if now - self._kept_at < _POINT_SECONDS and self.points:
            self.points[-1] = self._kept_at, depth
        else:
            self._kept_at = now
            self.points.append((now, depth))

    def totals(self) -> DepthTotals:
        """Return the sums up to now."""
        depth = self._depth
        seconds = perf_counter() - self._at if depth else 0.0
        return DepthTotals(
            self._waited + seconds * depth,
            self._occupied + seconds,
            self._full + (seconds if depth >= self._capacity else 0.0),
        )
