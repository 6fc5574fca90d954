"""Durations, depths and device times of many executions, in bounded memory."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from math import log2
from operator import add
from time import perf_counter
from typing import Final, NamedTuple

# How many points of a curve are kept until a profile collects them, and the least time between two points: a curve of a
# second then has 1,000 points, which is more than a screen shows.
_POINTS: Final = 1024
_POINT_SECONDS: Final = 0.001


class DepthTotals(NamedTuple):
    """Sums over time of the depth of a queue.

    Args:
        waited_seconds: for how long items were in the queue, summed over items: the integral of its depth.
        occupied_seconds: for how long the queue was not empty.
        full_seconds: for how long the queue was full.
    """

    waited_seconds: float = 0.0
    occupied_seconds: float = 0.0
    full_seconds: float = 0.0


NO_DEPTH: Final = DepthTotals()


class DepthWatch:
    """Adds up over time how many items are in a queue. During a profile, it gets every change; otherwise, some depths.

    Args:
        depth: items in the queue now.
        capacity: how many items the queue may hold; None for no bound.

    Attributes:
        points: a selection of the newest depths, each with its moment.
    """

    __slots__ = ("_at", "_capacity", "_depth", "_full", "_kept_at", "_occupied", "_waited", "points")

    def __init__(self, depth: int, capacity: int | None) -> None:
        self._depth = depth
        self._capacity = math.inf if capacity is None else capacity
        self._at = perf_counter()
        self._kept_at = 0.0
        self._waited = self._occupied = self._full = 0.0
        self.points: deque[tuple[float, int]] = deque(maxlen=_POINTS)

    def keep_points(self, *, on: bool) -> None:
        """Keep points from now on, or keep none."""
        self.points = deque(maxlen=_POINTS if on else 0)

    def changed(self, depth: int) -> None:
        """Note the number of items that the queue holds from now on."""
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


class OutsideSeconds(NamedTuple):
    """For how long items waited outside of the event loop, summed over items; each item of a batch counts for itself.

    Args:
        compile_seconds: waits for a program to be compiled.
        transfer_seconds: waits for arrays on their way to the device, from another device or back. A transfer beside
            another computation of the device counts only for as long as its own computation waited for it.
        compute_seconds: waits for the device to compute, once it had begun.
        thread_seconds: waits for threads that run the node, or that enqueue its work on a device.
        cpu_seconds: the part of `thread_seconds` for which these threads computed.
        hop_seconds: from the hand-over to a thread until it began, and from its end until the loop took the result.
        hops: how many such ways there were, to a thread or back; a whole number.
    """

    compile_seconds: float = 0.0
    transfer_seconds: float = 0.0
    compute_seconds: float = 0.0
    thread_seconds: float = 0.0
    cpu_seconds: float = 0.0
    hop_seconds: float = 0.0
    hops: float = 0

    @property
    def device_seconds(self) -> float:
        """For how long items waited for devices, all waits together."""
        return self.compile_seconds + self.transfer_seconds + self.compute_seconds

    def plus(self, other: "OutsideSeconds") -> "OutsideSeconds":
        """Return the sum."""
        return OutsideSeconds(*map(add, self, other))

    def for_items(self, count: int) -> "OutsideSeconds":
        """Return the sum for `count` items, each of which has waited for so long."""
        return OutsideSeconds(*[one * count for one in self])


NOTHING_OUTSIDE: Final = OutsideSeconds()


# The number of bins for each doubling. A percentile is the middle of its bin, so it is wrong by 2.2 % at most. From
# 0.1 us to a day there are fewer than 700 bins.
BINS_PER_DOUBLING: Final = 16
_LEAST_SECONDS: Final = 1e-7
_FACTOR: Final = 1 / _LEAST_SECONDS


class Durations:
    """A histogram of durations, with bins whose width grows with the durations in them.

    Attributes:
        count: how many durations there are; not a whole number if some durations stand for several.
    """

    __slots__ = ("_bins", "count")

    def __init__(self) -> None:
        self.count = 0.0
        self._bins: dict[int, float] = {}

    def add(self, seconds: Iterable[float], weight: float = 1.0) -> None:
        """Add some durations, each as often as `weight` says."""
        # `int` rounds towards 0, so take the logarithm of multiples of the least duration, which is never negative.
        numbers = [
            int(log2(duration * _FACTOR) * BINS_PER_DOUBLING) if duration > _LEAST_SECONDS else 0
            for duration in seconds
        ]
        bins = self._bins
        for number, count in Counter(numbers).items():
            bins[number] = bins.get(number, 0.0) + count * weight
        self.count += len(numbers) * weight

    def merge(self, other: "Durations") -> None:
        """Add all durations of another histogram."""
        for number, count in list(other._bins.items()):
            self._bins[number] = self._bins.get(number, 0.0) + count
        self.count += other.count

    def since(self, earlier: "Durations | None") -> "Durations":
        """Return the durations that were added since `earlier`, a copy of this histogram; with None, return a copy."""
        later = Durations()
        before = {} if earlier is None else earlier._bins
        for number, count in list(self._bins.items()):
            added = count - before.get(number, 0.0)
            if added > 0:
                later._bins[number] = added
        later.count = sum(later._bins.values())
        return later

    def quantile(self, share: float) -> float | None:
        """Return the duration that a share of the durations, from 0 to 1, does not exceed; None if there are none."""
        rank = share * self.count
        found: float | None = None
        bins = sorted(self._bins) if share else [min(self._bins)] if self._bins else []
        for number in bins:
            found = _LEAST_SECONDS * 2 ** ((number + 0.5) / BINS_PER_DOUBLING)
            rank -= self._bins[number]
            if rank <= 0:
                break
        return found


NO_DURATIONS: Final = Durations()
