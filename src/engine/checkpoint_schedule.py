"""When the snapshots of a call are due, and before which records its source puts barriers for them."""

import math
from collections import deque
from time import monotonic
from typing import Final

# A snapshot is taken at a barrier, so barriers must reach the reader often enough: four in each interval.
_BARRIERS: Final = 4

# Before the first values come out, the number of records for each value is unknown. Until then, a barrier comes each
# time that the records have grown by a 32nd part. So few barriers are on their way, even if a stage keeps many records
# at first.
_FIRST_SHARE: Final = 32

# The number of records for each value is measured from the places of this many barriers.
_MEASURED: Final = 16

# A tolerance for rounding errors, which must not put a barrier one record too late.
_TINY: Final = 1e-6


class CheckpointSchedule:
    """When snapshots are due: at multiples of a number of values or records, or after a number of seconds.

    Args:
        values: after how many values of the reader; None if values do not count.
        records: after how many records of the source; None if records do not count.
        seconds: after how many seconds; None if the time does not count.

    Attributes:
        most_values: the most values that the reader has taken from one snapshot to the next.
        is_exceeded: whether the last snapshot came later than the arguments ask for.
    """

    def __init__(self, values: int | None, records: int | None, seconds: float | None) -> None:
        self._values, self._records, self._seconds = values, records, seconds
        # For each measured barrier: the record after the barrier, and how many values have come out before the barrier.
        # A barrier is measured if values came out since the last measured barrier.
        self._measured: deque[tuple[int, int]] = deque(maxlen=_MEASURED)
        self._last_barrier = self._first_record = 0
        self._last_arrived = -1, 0  # for the last barrier that has come out: the record after it, the values before it
        self._position = self._unread_end = 0
        self._taken_at = 0.0
        self._values_per_second: float | None = None  # how fast the reader takes values
        self._due_value = self._due_record = self._due_time = math.inf
        self.most_values = 0
        self.is_exceeded = False

    @property
    def asked(self) -> str:
        """How often snapshots are made, in words."""
        if self._values is not None:
            return f"every {self._values:,} values"
        if self._records is not None:
            return f"every {self._records:,} records"
        return "when asked for" if self._seconds is None else f"every {self._seconds:g} s"

    def begin(self, record: int, position: int, unread: int = 0) -> None:
        """Begin at the place of the newest snapshot.

        Args:
            record: how many records the source had given.
            position: how many values the reader had taken.
            unread: how many values of the snapshot the reader had not taken.
        """
        self._first_record = self._last_barrier = record
        self._position, self._unread_end = position, position + unread
        self._set_due(record)

    def _set_due(self, record: int) -> None:
        if self._values is not None:
            self._due_value = self._position - self._position % self._values + self._values
        if self._records is not None:
            self._due_record = record - record % self._records + self._records
        self._taken_at = monotonic()
        if self._seconds is not None:
            self._due_time = self._taken_at + self._seconds

    # For the source.

    def barrier_put(self, record: int) -> tuple[float, float]:
        """Note a barrier before a record; return the record before which the next barrier is due, and the time."""
        self._last_barrier = record
        return self.next_barrier()

    def next_barrier(self) -> tuple[float, float]:
        """Return the record before which the next barrier is due, and the time at which it is due (`monotonic()`)."""
        last = self._last_barrier
        if self._records is not None:
            return last - last % self._records + self._records, math.inf
        # The reader may have slowed down: a barrier comes after a part of the time at the latest.
        due_time = math.inf if self._seconds is None else monotonic() + self._seconds / _BARRIERS
        values: float | None = self._values
        if self._seconds is not None and self._values_per_second is not None:
            values = self._values_per_second * self._seconds
        elif self._seconds is self._values is None:
            return math.inf, math.inf
        if len(self._measured) < 2 or values is None:
            return last + max(1, (last - self._first_record) // _FIRST_SHARE), due_time
        (record_before, value_before), (record, value) = self._measured[0], self._measured[-1]
        records_per_value = (record - record_before) / (value - value_before)
        # The barrier with the smallest distance to the value before it tells best which record ends a value.
        offset = min(record - value * records_per_value for record, value in self._measured)
        distance = max(1, values / _BARRIERS)
        here = (last - offset) / records_per_value
        goal = (math.floor(here / distance + _TINY) + 1) * distance
        return max(last + 1, math.ceil(goal * records_per_value + offset - _TINY)), due_time

    def is_overdue(self, values: int) -> bool:
        """Whether a barrier is overdue after this number of values, because a value needs fewer records than before."""
        record, before = self._last_arrived
        return self._values is not None and record == self._last_barrier and values - before > self._values / _BARRIERS

    def arrived(self, record: int, values: int, position: int) -> None:
        """Note that the barrier before a record has come to the reader's stream.

        Args:
            record: the record.
            values: how many values are before the barrier.
            position: how many of these values the reader has taken.
        """
        self._last_arrived = record, values
        known = self._measured[-1][1] if self._measured else self._unread_end
        if values > known:
            self._measured.append((record, values))
        seconds = monotonic() - self._taken_at
        if position > self._position and seconds > 0:
            self._values_per_second = (position - self._position) / seconds

    # For the reader.

    def is_due(self, record: int, position: int) -> bool:
        """Whether a snapshot is due at a barrier that the reader has come to."""
        return position >= self._due_value or record >= self._due_record or monotonic() >= self._due_time

    def is_late(self, position: int) -> bool:
        """Whether a snapshot is due before the reader comes to a barrier; values in between are stored as unread.

        There are no barriers among the unread values of the newest snapshot.
        """
        share = 0 if position < self._unread_end else 1 / _BARRIERS
        if self._values is not None:
            return position >= math.floor(self._due_value + share * self._values)
        return self._seconds is not None and monotonic() >= self._due_time + share * self._seconds

    def is_among_unread(self, position: int) -> bool:
        """Whether the reader has not yet taken all unread values of the newest snapshot."""
        return position < self._unread_end

    def taken(self, record: int, position: int) -> int:
        """Note a snapshot; return how many due snapshots were left out since the last snapshot."""
        late = -1.0  # in intervals
        if self._values is not None:
            late = (position - self._due_value) / self._values
        elif self._records is not None:
            late = (record - self._due_record) / self._records
        elif self._seconds is not None:
            late = (monotonic() - self._due_time) / self._seconds
        self.is_exceeded = late > 1 / _BARRIERS
        self.most_values = max(self.most_values, position - self._position)
        self._position = position
        self._set_due(record)
        return max(0, math.floor(late))
