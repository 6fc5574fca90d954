"""Durations: how long many executions took, in bounded memory, so that percentiles can be told."""

from collections import Counter
from collections.abc import Iterable
from math import log2
from typing import Final

# Bins for each doubling. A percentile is the middle of its bin, so it is wrong by 2.2 % at most; from 0.1 us to a day
# these are fewer than 700 bins.
BINS_PER_DOUBLING: Final = 16
_LEAST_SECONDS: Final = 1e-7
_FACTOR: Final = 1 / _LEAST_SECONDS


class Durations:
    """A histogram of durations with bins that grow with what they hold.

    Attributes:
        count: how many there are; no whole number, if some stand for several.
    """

    __slots__ = ("_bins", "count")

    def __init__(self) -> None:
        self.count = 0.0
        self._bins: dict[int, float] = {}

    def add(self, seconds: Iterable[float], weight: float = 1.0) -> None:
        """Add some durations, each as often as `weight` says."""
        # `int` rounds towards 0, so the logarithm is that of multiples of the least duration: it is never negative.
        numbers = [
            int(log2(duration * _FACTOR) * BINS_PER_DOUBLING) if duration > _LEAST_SECONDS else 0
            for duration in seconds
        ]
        bins = self._bins
        for number, count in Counter(numbers).items():
            bins[number] = bins.get(number, 0.0) + count * weight
        self.count += len(numbers) * weight

    def merge(self, other: "Durations") -> None:
        """Add all that another one holds."""
        for number, count in list(other._bins.items()):
            self._bins[number] = self._bins.get(number, 0.0) + count
        self.count += other.count

    def since(self, earlier: "Durations | None") -> "Durations":
        """Return what was added since `earlier`, a copy of this one; with None, a copy."""
        later = Durations()
        before = {} if earlier is None else earlier._bins
        for number, count in list(self._bins.items()):
            added = count - before.get(number, 0.0)
            if added > 0:
                later._bins[number] = added
        later.count = sum(later._bins.values())
        return later

    def quantile(self, share: float) -> float | None:
        """Return the seconds that this share of them, from 0 to 1, took at most; None if there are none."""
        rank = share * self.count
        found: float | None = None
        for number in sorted(self._bins):
            found = _LEAST_SECONDS * 2 ** ((number + 0.5) / BINS_PER_DOUBLING)
            rank -= self._bins[number]
            if rank <= 0:
                break
        return found
