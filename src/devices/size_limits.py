"""How many calls of a batch fit the memory of a device, as tries have shown. It runs nothing."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Final

# Batches that fit before a larger one is tried, at first, and at most after tries that have failed. A try that fails
# costs one run more, of what would have run anyway: a 16th of the work, and less than a thousandth in the end. A batch
# that fills a device takes milliseconds and more, so the limit follows within seconds or minutes when memory is free.
_FIRST_PATIENCE: Final = 16
_LAST_PATIENCE: Final = 1024

# Kinds of items of which a batch did not fit. One that is forgotten is learnt again.
_MOST_LIMITS: Final = 256


class SizeLimit:
    """The largest batch that fits, for items of one shape.

    What held the memory may be gone by now: another process, or another node. So when enough batches as large as the
    limit have fitted in a row, one of the next larger size is tried. If it does not fit, that takes twice as many the
    next time.

    Args:
        sizes: that batches are padded to, in ascending order.

    Attributes:
        size: the largest batch to run; a larger one runs as several batches, unless it is a try.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.size = sizes[-1]
        self._fitted = 0  # in a row, of that size
        self._patience: dict[int, int] = {}  # for each size that did not fit, how many that takes before it is tried

    @property
    def max_calls(self) -> int | None:
        """The most calls of the next batch; None for as many as there may ever be."""
        larger = self._larger
        return None if larger is None else larger if self._has_patience_for(larger) else self.size

    @property
    def is_lifted(self) -> bool:
        """Whether enough batches of the largest size have fitted, too."""
        return self._larger is None and self._has_patience_for(self.size)

    def begins_trial(self, count: int) -> bool:
        """Note that a batch of so many calls begins; returns whether it is a try."""
        if count <= self.size:
            return False
        self._fitted = 0  # it is the only one
        return True

    def fitted(self, size: int, *, is_try: bool) -> None:
        """Note that a batch padded to `size` did fit, and whether it was a try; other larger ones are from before."""
        if size == self.size:
            self._fitted += 1
        elif is_try and size == self._larger:
            self.size, self._fitted = size, 0

    def exceeded(self, size: int) -> bool:
        """Note that a batch padded to `size` did not fit, which halves the limit.

        Returns:
            Whether smaller batches may fit; if not, its items cannot be computed.
        """
        self._fitted = 0
        self._patience[size] = min(2 * self._patience.get(size, _FIRST_PATIENCE // 2), _LAST_PATIENCE)
        smaller = [one for one in self._sizes if one < size]
        if not smaller:
            return False
        self.size = min(self.size, max((one for one in smaller if one <= size // 2), default=smaller[0]))
        return True

    @property
    def _larger(self) -> int | None:
        index = bisect_right(self._sizes, self.size)
        return self._sizes[index] if index < len(self._sizes) else None

    def _has_patience_for(self, size: int) -> bool:
        return self._fitted >= self._patience.get(size, _FIRST_PATIENCE)


class SizeLimits:
    """The limits of one node on one device, by group of calls: a batch that is too large for one group fits others.

    Args:
        sizes: that batches are padded to, in ascending order.
        largest: that of the queue: for each group that is limited, the most calls of the next batch. This keeps it.

    Attributes:
        by_group: the limit of each group that has one.
    """

    def __init__(self, sizes: Sequence[int], largest: dict[Hashable, int]) -> None:
        self._sizes = sizes
        self._largest = largest
        self.by_group: dict[Hashable, SizeLimit] = {}

    def size(self, group: Hashable) -> int | None:
        """Return the largest batch to run of a group; None if it has no limit."""
        limit = self.by_group.get(group)
        return None if limit is None else limit.size

    def begins_trial(self, group: Hashable, count: int) -> bool:
        """Note that a batch of so many calls begins; returns whether it is larger than the limit, as a try."""
        limit = self.by_group.get(group)
        if limit is None or not limit.begins_trial(count):
            return False
        self._tell(group, limit)
        return True

    def fitted(self, group: Hashable, size: int, *, is_try: bool) -> None:
        """Note that a batch padded to `size` did fit, and whether it began as a try."""
        limit = self.by_group.get(group)
        if limit is None:
            return
        limit.fitted(size, is_try=is_try)
        if limit.is_lifted:
            del self.by_group[group]
        self._tell(group, limit)

    def exceeded(self, group: Hashable, size: int) -> bool:
        """Note that a batch padded to `size` did not fit; returns whether a smaller one may."""
        limit = self.by_group.get(group)
        if limit is None:
            if len(self.by_group) >= _MOST_LIMITS:
                forgotten = next(iter(self.by_group))
                del self.by_group[forgotten]
                self._largest.pop(forgotten, None)
            limit = self.by_group[group] = SizeLimit(self._sizes)
        fits = limit.exceeded(size)
        self._tell(group, limit)
        return fits

    def _tell(self, group: Hashable, limit: SizeLimit) -> None:
        most = limit.max_calls
        if most is None:
            self._largest.pop(group, None)
        else:
            self._largest[group] = most
