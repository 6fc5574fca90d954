"""A batch that failed runs again in parts: smaller where memory was short, else until the failing items are alone."""

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from ..actors.batching import Batch
from ..actors.channel import PriorityFifo


class Waiting(Protocol):
    """A call that waits."""

    @property
    def priority(self) -> int:
        """Higher first."""
        ...

    @property
    def group(self) -> Hashable:
        """Calls of one group may run together."""
        ...

    @property
    def arrived_at(self) -> float:
        """When it began to wait."""
        ...


W = TypeVar("W", bound=Waiting)


class Gathering(Generic[W]):
    """The calls of one node that wait: higher priorities first, first in first out within one.

    Args:
        batch: how many run together, and how long the first waits for others.
    """

    __slots__ = ("_batch", "_groups", "count")

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._groups: dict[Hashable, PriorityFifo[W]] = {}
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether no more may wait."""
        batch = self._batch
        return batch.max_queue is not None and self.count >= batch.max_size + batch.max_queue

    def add(self, call: W) -> None:
        """Have a call wait."""
        group = self._groups.get(call.group)
        if group is None:
            group = self._groups[call.group] = PriorityFifo()
        group.push(call, call.priority)
        self.count += 1

    def discard(self, call: W) -> None:
        """Have a call wait no longer."""
        group = self._groups.get(call.group)
        if group is not None and group.discard(call, call.priority):
            self._left(group, call.group, 1)

    def all(self) -> list[W]:
        """Return all calls that wait."""
        return [call for group in self._groups.values() for call in group]

    def due_at(self) -> float | None:
        """Return when the next batch has to begin, however small it is; None if there is none."""
        if not self._groups:
            return None
        return min(_oldest(group) for group in self._groups.values()) + self._batch.max_wait_seconds

    def take(self, now: float, largest: Mapping[Hashable, int] = MappingProxyType({})) -> list[W]:
        """Take out a batch that is full, or whose first call has waited long enough; else an empty list.

        Args:
            now: the time.
            largest: for a group, the most calls, if they are fewer than the batch holds: more do not fit the device.
        """
        max_size = self._batch.max_size
        if len(self._groups) == 1:  # nearly always
            ((key, group),) = self._groups.items()
            size = largest.get(key, max_size)
            return self._taken(group, key, size) if self._is_due(group, size, now) else []
        found = [
            (group, key) for key, group in self._groups.items() if self._is_due(group, largest.get(key, max_size), now)
        ]
        if not found:
            return []
        group, key = max(found, key=lambda one: (one[0].highest, -_oldest(one[0])))
        return self._taken(group, key, largest.get(key, max_size))

    def _taken(self, group: PriorityFifo[W], key: Hashable, size: int) -> list[W]:
        taken = group.pop_many(size) if size > 1 else [group.pop()]
        self._left(group, key, len(taken))
        return taken

    def _is_due(self, group: PriorityFifo[W], size: int, now: float) -> bool:
        return group.count >= size or now >= _oldest(group) + self._batch.max_wait_seconds

    def _left(self, group: PriorityFifo[W], key: Hashable, number: int) -> None:
        self.count -= number
        if not group.count:
            del self._groups[key]


def _oldest(group: PriorityFifo[W]) -> float:
    """Return when the first of the calls began to wait: within one priority they are in that order."""
    return min(call.arrived_at for call in group.heads())


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
        size: the largest one to run; what is larger runs as several batches, unless it is a try.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.size = sizes[-1]
        self._fitted = 0  # in a row, of that size
        self._patience: dict[int, int] = {}  # for each size that did not fit, how many that takes before it is tried

    @property
    def most(self) -> int | None:
        """The most calls of the next batch; None for as many as there may ever be."""
        larger = self._larger
        return None if larger is None else larger if self._has_patience_for(larger) else self.size

    @property
    def is_over(self) -> bool:
        """Whether enough batches of the largest size have fitted, too."""
        return self._larger is None and self._has_patience_for(self.size)

    def begins(self, count: int) -> bool:
        """Note that a batch of so many calls begins; returns whether it is a try."""
        if count <= self.size:
            return False
        self._fitted = 0  # it is the only one
        return True

    def fitted(self, size: int, *, is_try: bool) -> None:
        """Note that a batch padded to `size` did fit, and whether it was a try: others are older than the limit."""
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
    """The limits of one node on one device, by group of calls: what is too large for one fits others.

    Args:
        sizes: that batches are padded to, in ascending order.
        largest: of the lane: for each group that is limited, the most calls of the next batch. This keeps it.
    """

    def __init__(self, sizes: Sequence[int], largest: dict[Hashable, int]) -> None:
        self._sizes = sizes
        self._largest = largest
        self._limits: dict[Hashable, SizeLimit] = {}

    def size(self, group: Hashable) -> int | None:
        """Return the largest batch to run of a group; None if it has no limit."""
        limit = self._limits.get(group)
        return None if limit is None else limit.size

    def begins(self, group: Hashable, count: int) -> bool:
        """Note that a batch of so many calls begins; returns whether it is larger than the limit, as a try."""
        limit = self._limits.get(group) if self._limits else None  # nearly always there is none
        if limit is None or not limit.begins(count):
            return False
        self._tell(group, limit)
        return True

    def fitted(self, group: Hashable, size: int, *, is_try: bool) -> None:
        """Note that a batch padded to `size` did fit, and whether it began as a try."""
        limit = self._limits.get(group) if self._limits else None
        if limit is None:
            return
        limit.fitted(size, is_try=is_try)
        if limit.is_over:
            del self._limits[group]
        self._tell(group, limit)

    def exceeded(self, group: Hashable, size: int) -> bool:
        """Note that a batch padded to `size` did not fit; returns whether a smaller one may."""
        limit = self._limits.get(group)
        if limit is None:
            if len(self._limits) >= _MOST_LIMITS:
                forgotten = next(iter(self._limits))
                del self._limits[forgotten]
                self._largest.pop(forgotten, None)
            limit = self._limits[group] = SizeLimit(self._sizes)
        fits = limit.exceeded(size)
        self._tell(group, limit)
        return fits

    def _tell(self, group: Hashable, limit: SizeLimit) -> None:
        most = limit.most
        if most is None:
            self._largest.pop(group, None)
        else:
            self._largest[group] = most


class Bisection:
    """Finds the items of a failed batch that fail, and lets the others succeed.

    It runs nothing: run `next_batch()` until there is none, and tell it after each whether that one has `succeeded` or
    `failed`. A search halves what holds a failing item: if the first half succeeds, the other one holds it, and is not
    run as a whole; if it fails, the other one waits, to be run together with everything else that waits when the
    failing item is found. So one failing item of n costs at most ceil(log2 n) + 2 runs, and k of them at most
    k * (ceil(log2 n) + 2). After n runs items run one by one: there are never more than 2 n.

    An item has failed only if it was run alone. If what fails is not the same each time, the bound holds as well.

    Args:
        count: items of the batch.
        error: of the batch; for one of one item, that item's.

    Attributes:
        errors: of the items that failed, by their position in the batch.
    """

    def __init__(self, count: int, error: Exception) -> None:
        self._count = count
        self._runs = 0
        self._batch: list[int] = []  # what runs now
        self._suspects = list(range(count))  # one of them fails
        self._waiting: list[int] = []  # of these, nothing is known
        self.errors: dict[int, Exception] = {}
        if count == 1:
            self._batch = self._suspects
            self.failed(error)

    def next_batch(self) -> list[int]:
        """Return the positions of the items to run next; an empty list if every item has succeeded or failed."""
        if self._runs >= self._count:
            self._waiting = self._suspects + self._waiting
            self._suspects = []
            self._batch = self._waiting[:1]
        elif self._suspects:
            self._batch = self._suspects[: (len(self._suspects) + 1) // 2]
        else:
            self._batch = self._waiting
        self._runs += bool(self._batch)
        return list(self._batch)

    def succeeded(self) -> None:
        """Note that the batch to run has succeeded."""
        self._drop(self._batch)

    def failed(self, error: Exception) -> None:
        """Note that the batch to run has failed."""
        batch = self._batch
        if len(batch) == 1:
            self.errors[batch[0]] = error
        self._waiting += self._suspects
        self._suspects = []
        self._drop(batch)
        if len(batch) > 1:
            self._suspects = batch

    def _drop(self, batch: list[int]) -> None:
        done = set(batch)
        self._suspects = [one for one in self._suspects if one not in done]
        self._waiting = [one for one in self._waiting if one not in done]
