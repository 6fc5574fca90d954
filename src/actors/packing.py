"""Packing: items of different sizes are put into rows of one length, so that little of a row is padding."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Packer(Generic[T]):
    """Decides which items share a row; it knows their sizes alone, and has no clock.

    Each item goes into the row that it fills best (best fit). If it fits into none, and `look_ahead` rows wait, the
    fullest is given away for a new one.

    Args:
        length: the size of a row.
        look_ahead: how many rows wait for what still fits into them; 1 fills one after the other.

    Attributes:
        rows: the rows that wait, the oldest first: how much room is left in each, and what is in it.
    """

    def __init__(self, length: int, look_ahead: int) -> None:
        self.length = length
        self.look_ahead = look_ahead
        self.rows: list[tuple[int, list[T]]] = []

    def add(self, item: T, size: int) -> list[list[T]]:
        """Put an item into a row.

        Args:
            item: anything.
            size: its size, from 1 to the length of a row.

        Returns:
            The rows that are complete now, none, one or two, each with its items in the order in which they came.
        """
        rows = self.rows
        done: list[list[T]] = []
        best, best_left = -1, self.length + 1
        for number, (left, _) in enumerate(rows):
            if size <= left < best_left:
                best, best_left = number, left
        if best < 0:
            if len(rows) == self.look_ahead:
                done += self.take()
            best, best_left = len(rows), self.length
            rows.append((self.length, []))
        items = rows[best][1]
        items.append(item)
        rows[best] = best_left - size, items
        if best_left == size:
            done.append(rows.pop(best)[1])
        return done

    def take(self) -> list[list[T]]:
        """Give the fullest row away, of several the oldest; none if there is none."""
        if not self.rows:
            return []
        fullest = min(range(len(self.rows)), key=lambda number: self.rows[number][0])
        return [self.rows.pop(fullest)[1]]
