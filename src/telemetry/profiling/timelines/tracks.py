"""Tracks: what took a while, put side by side so that nothing on one track overlaps."""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Protocol, TypeVar


class Timed(Protocol):
    """What took a while, in whole nanoseconds."""

    @property
    def began(self) -> int:
        """When it began."""
        ...

    @property
    def ended(self) -> int:
        """When it ended."""
        ...


T = TypeVar("T", bound=Timed)


def tracks(bars: Iterable[T]) -> list[list[T]]:
    """Put bars on as few tracks as they need, each on the first one that is free.

    Returns:
        The bars of each track, in the order in which they began.
    """
    found: list[list[T]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for bar in sorted(bars, key=lambda bar: (bar.began, bar.ended)):
        while busy and busy[0][0] <= bar.began:
            heappush(free, heappop(busy)[1])
        if not free:
            heappush(free, len(found))
            found.append([])
        number = heappop(free)
        found[number].append(bar)
        heappush(busy, (bar.ended, number))
    return found
