"""Uptime: how long something has been running."""

from time import perf_counter


class Uptime:
    """A watch that stands still once what it measures has ended.

    It uses the clock of `busy_seconds` and `put_wait_seconds`, which are compared with it, and not that of the loop.
    """

    __slots__ = ("_began", "_ended")

    def __init__(self) -> None:
        self._began = perf_counter()
        self._ended: float | None = None

    def restart(self) -> None:
        """Count from now on."""
        self._began = perf_counter()

    def stop(self) -> None:
        """Stand still; the first call counts."""
        if self._ended is None:
            self._ended = perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning, until the end."""
        return (perf_counter() if self._ended is None else self._ended) - self._began
