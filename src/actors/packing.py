"""Packing: items of different sizes are put into rows of one length, so that little of a row is padding."""

import math
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Packer(Generic[T]):
    """Decides which items share a row; a packer knows only their sizes, and has no clock.

    Each item goes into the row that it fills best (best fit).

    Args:
        length: the size of a row.
        look_ahead: how many rows wait for items that still fit; 1 fills one row after the other.
        most_items: the most items of a row; None for as many as fit.

    Attributes:
        rows: the rows that wait, the oldest first: the room that is left in each row, and its items.
    """

    def __init__(self, length: float, look_ahead: int, most_items: int | None = None) -> None:
        self.length = length
        self.look_ahead = look_ahead
        self.most_items = most_items
        self.rows: list[tuple[float, list[T]]] = []

    def put(self, item: T, size: float) -> int | None:
        """Put an item into a row, and return the number of the row; None if the item fits into no row.

        Args:
            item: any object.
            size: the size of the item, at most the length of a row.
        """
        rows, most_items = self.rows, self.most_items
        best, best_left = -1, self.length + 1
        for number, (left, items) in enumerate(rows):
            if size <= left < best_left and (most_items is None or len(items) < most_items):
                best, best_left = number, left
        if best < 0:
            if len(rows) == self.look_ahead:
                return None
            best, best_left = len(rows), self.length
            rows.append((best_left, []))
        items = rows[best][1]
        items.append(item)
        rows[best] = best_left - size, items
        return best

    def add(self, item: T, size: float) -> list[list[T]]:
        """Put an item into a row. If it fits into no row, the fullest row is returned, and a new row begins.

        Args:
            item: any object.
            size: the size of the item, at most the length of a row.

        Returns:
            The rows that are complete now (at most two), each with its items in the order in which they came.
        """
        done: list[list[T]] = []
        number = self.put(item, size)
        if number is None:
            done += self.take()
            number = self.put(item, size)
            assert number is not None
        if not self.rows[number][0]:
            done.append(self.rows.pop(number)[1])
        return done

    def take(self) -> list[list[T]]:
        """Remove the fullest row, or the oldest of equally full rows. Return a list of it; empty if there is no row."""
        if not self.rows:
            return []
        fullest = min(range(len(self.rows)), key=lambda number: self.rows[number][0])
        return [self.rows.pop(fullest)[1]]


class Rows(NamedTuple):
    """The limit of a batch whose items have sizes: the rows that the items have to fit into.

    Attributes:
        lengths: the lengths that a row may have, ascending; all rows of a batch have the first length that is enough
            for its items.
        items: the most items of a row.
        look_ahead: how many items that do not fit into a batch are passed over for later items that fit; with 0, a
            batch has the next items in order.
    """

    lengths: tuple[float, ...]
    items: int
    look_ahead: int = 0

    def length_for(self, size: float) -> float:
        """Return the length of the row for an item of this size."""
        return next(length for length in self.lengths if size <= length)

    def are_full(self, items: int, size: float, length: float, most_items: int) -> bool:
        """Return whether `items` items, with the summed size `size`, fill a batch of at most `most_items`."""
        return items >= most_items or size >= length * self._count(most_items)

    def choose(
        self, waiting: Iterable[T], size_of: Callable[[T], float], length: float, most_items: int, fewest_rows: int
    ) -> list[T]:
        """Choose the items of the next batch: the first item, and other items that fill the rows.

        A batch has all its rows, or the fewest rows: the last items that wait are computed row by row.

        Args:
            waiting: the items that wait, in order.
            size_of: returns the size of an item.
            length: the length of the rows.
            most_items: the most items of the batch.
            fewest_rows: the number of rows of a batch that is not full: one, or on a mesh one for each device.

        Returns:
            The items, row by row: `in_order` finds the rows again.
        """
        count = self._count(most_items)
        packer: Packer[T] = Packer(length, count, min(self.items, most_items))
        left, look_ahead = length * count, self.look_ahead
        refused = math.inf  # the smallest size that did not fit; rows only become fuller
        for item in waiting:
            size = size_of(item)
            if size < refused and packer.put(item, size) is not None:
                left -= size
                if left <= 0:
                    break
            elif look_ahead:
                look_ahead -= 1
                refused = min(refused, size)
            else:
                break
        chosen = packer.rows if len(packer.rows) == count else packer.rows[:fewest_rows]
        return [item for _, items in chosen for item in items]

    def _count(self, most_items: int) -> int:
        return max(1, most_items // self.items)


def in_order(items: Iterable[T], size_of: Callable[[T], float], length: float, most_items: int) -> list[list[T]]:
    """Fill one row after the other with items, in their order.

    This takes the fewest rows that keep the order. So items that were in some rows, taken row by row, or a part of
    these items, need no more rows than before.
    """
    packer: Packer[T] = Packer(length, 1, most_items)
    rows = [row for item in items for row in packer.add(item, size_of(item))]
    return rows + packer.take()
