"""Reader wait: how long the reader of a stream has waited for it."""

from time import perf_counter


class ReaderWait:
    """A watch that runs while the reader waits, in `with`; also where a second one comes, who is refused in there."""

    __slots__ = ("_before", "_readers", "_since")

    def __init__(self) -> None:
        self._before = 0.0
        self._readers = 0
        self._since: float | None = None

    def __enter__(self) -> None:
        if not self._readers:
            self._since = perf_counter()
        self._readers += 1

    def __exit__(self, *exc_info: object) -> None:
        self._readers -= 1
        if not self._readers:
            self._before, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds so far, with those of a wait that goes on: the reader of a `map` waits once, until it is over."""
        since = self._since
        return self._before if since is None else self._before + perf_counter() - since
