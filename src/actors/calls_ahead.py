"""CallsAhead: how many calls a worker outside of the event loop may have besides the call that it runs."""

from typing import ClassVar, Final

# For how many seconds of work a worker gets calls ahead. The time has to be longer than the way of an answer and of the
# next call, which is 0.1 to 1 ms with a busy event loop, and longer than the pauses in which answers gather. As much
# work may be lost or done late when a worker dies, or when a call takes longer than others. Measured: decision 0002.
_AHEAD_SECONDS: Final = 0.015


class CallsAhead:
    """The calls that one worker has: whether it may get another call, and whether its first call takes too long.

    The worker runs one call after the other. This is a state machine without a clock and threads: callers pass the
    time, in seconds of any clock.

    Args:
        mean_seconds: the mean time of the calls of each function, by name. The workers of a pool share it.

    Attributes:
        count: how many calls the worker has.
        seconds: how long all of them will take, from the beginning of the first call.
        since: when the first call began, as far as that is known: when it was sent, or the call before it ended.
    """

    MOST: ClassVar[int] = 23
    """How many calls may wait for each worker, in the worker and before it, besides the call that runs there."""

    OVERDUE_SECONDS: ClassVar[float] = 2 * _AHEAD_SECONDS
    """If the first call takes longer than this, the calls behind it have to be taken back."""

    __slots__ = ("_mean_seconds", "count", "seconds", "since")

    def __init__(self, mean_seconds: dict[str, float]) -> None:
        self._mean_seconds = mean_seconds
        self.count = 0
        self.seconds = self.since = 0.0

    def has_room(self, name: str, now: float) -> bool:
        """Return whether the worker may get a call of a function now; a function without a mean waits for its end."""
        seconds = self.seconds + self._mean_seconds.get(name, _AHEAD_SECONDS)
        return not self.count or (seconds <= _AHEAD_SECONDS and now - self.since <= _AHEAD_SECONDS)

    def sent(self, name: str, now: float) -> float:
        """Note that the worker got a call. Return how long it will take: pass this number when the call leaves."""
        if not self.count:
            self.since, self.seconds = now, 0.0
        expected = self._mean_seconds.get(name, _AHEAD_SECONDS)
        self.count += 1
        self.seconds += expected
        return expected

    def ended(self, expected_seconds: float, now: float) -> None:
        """Note that the first call has ended, so that the next call begins."""
        self.since = now
        self.count -= 1
        self.seconds -= expected_seconds

    def taken_back(self, expected_seconds: float) -> None:
        """Note that the worker will not run a call that it has not begun."""
        self.count -= 1
        self.seconds -= expected_seconds

    def took(self, name: str, seconds: float) -> None:
        """Count the time of a call of a function in its mean, as an eighth."""
        mean_seconds = self._mean_seconds.get(name, seconds)
        self._mean_seconds[name] = mean_seconds + (seconds - mean_seconds) / 8

    def overdue_at(self) -> float | None:
        """Return when the calls behind the first call have to be taken back; None if there are none."""
        return self.since + self.OVERDUE_SECONDS if self.count > 1 else None
