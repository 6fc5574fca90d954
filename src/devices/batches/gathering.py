"""Gathering: which calls of one device node run together, and when. It has no clock and runs nothing."""

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from ...actors.batch import Batch
from ...actors.lanes import Lanes


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
        self._groups: dict[Hashable, Lanes[W]] = {}
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
            group = self._groups[call.group] = Lanes()
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

    def _taken(self, group: Lanes[W], key: Hashable, size: int) -> list[W]:
        taken = group.pop_many(size) if size > 1 else [group.pop()]
        self._left(group, key, len(taken))
        return taken

    def _is_due(self, group: Lanes[W], size: int, now: float) -> bool:
        return group.count >= size or now >= _oldest(group) + self._batch.max_wait_seconds

    def _left(self, group: Lanes[W], key: Hashable, number: int) -> None:
        self.count -= number
        if not group.count:
            del self._groups[key]


def _oldest(group: Lanes[W]) -> float:
    """Return when the first of the calls began to wait: within one priority they are in that order."""
    return min(call.arrived_at for call in group.heads())
