"""How many calls of a batch fit the memory of a device, learnt from batches that ran. This module runs nothing."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Final

# How many batches must fit before a larger batch is tried: at first, and at most after failed tries. A failed try costs
# one more run of work that would have run anyway: a 16th of the work at first, and less than a thousandth in the end. A
# batch that fills a device takes milliseconds and more, so the limit recovers within seconds or minutes when memory is
# free again.
_FIRST_PATIENCE: Final = 16
_LAST_PATIENCE: Final = 1024

# The most kinds of items (groups) whose limit is remembered. A limit that was forgotten is learnt again.
_MOST_LIMITS: Final = 256


class SizeLimit:
    """The largest batch that fits, for items of one shape.

    Another process or another node that held the memory may be gone by now. So when enough batches as large as the
    limit have fitted in a row, a batch of the next larger size is tried. If that batch does not fit, twice as many
    batches must fit before the next try.

    Args:
        sizes: the sizes that batches are padded to, in ascending order.

    Attributes:
        size: the largest batch to run; a larger one runs as several batches, unless it is a try.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.size = sizes[-1]
        self._fitted = 0  # how many batches of that size have fitted in a row
        self._patience: dict[int, int] = {}  # by size that did not fit: how many batches must fit before it is tried

    @property
    def max_calls(self) -> int | None:
        """The most calls of the next batch; None without a limit."""
        larger = self._larger
        return None if larger is None else larger if self._has_patience_for(larger) else self.size

    @property
    def is_lifted(self) -> bool:
        """Whether enough batches of the largest size have fitted, too."""
        return self._larger is None and self._has_patience_for(self.size)

    def begins_trial(self, count: int) -> bool:
        """Note that a batch of `count` calls begins; return whether the batch is a try."""
        if count <= self.size:
            return False
        self._fitted = 0  # one try at a time
        return True

    def fitted(self, size: int, *, is_try: bool) -> None:
        """Note that a batch padded to `size` did fit. A larger batch that was no try began before the limit was set."""
        if size == self.size:
            self._fitted += 1
        elif is_try and size == self._larger:
            self.size, self._fitted = size, 0

    def exceeded(self, size: int) -> bool:
        """Note that a batch padded to `size` did not fit, which halves the limit.

        Returns:
            Whether smaller batches may fit. If not, the items of the batch cannot be computed.
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


class SizeLimits(dict[Hashable, SizeLimit]):
    """The limits of one node on one device, by group: the items of each group have other sizes. Few groups have one.

    Args:
        sizes: the sizes that batches are padded to, in ascending order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __missing__(self, group: Hashable) -> SizeLimit:
        """Return a limit for a group that has had none."""
        if len(self) >= _MOST_LIMITS:
            del self[next(iter(self))]
        self[group] = made = SizeLimit(self._sizes)
        return made

    @property
    def largest(self) -> dict[Hashable, int]:
        """The most calls of the next batch, for each group whose next batch is limited."""
        return {group: most for group, limit in self.items() if (most := limit.max_calls) is not None}

    def fitted(self, group: Hashable, size: int, *, is_try: bool) -> None:
        """Note that a batch padded to `size` did fit. `is_try` says whether it began as a try."""
        limit = self.get(group)
        if limit is None:
            return
        limit.fitted(size, is_try=is_try)
        if limit.is_lifted:
            del self[group]
