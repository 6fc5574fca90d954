"""Reader wait: how long the reader of a stream has waited for it."""

from time import perf_counter


class ReaderWait:
    """A watch that runs while the reader waits: in `with`, by one reader at a time."""

    __slots__ = ("_before", "_since")

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        assert self._since is not None
        self._before += perf_counter() - self._since
        self._since = None

    @property
    def seconds(self) -> float:
        """Seconds so far, with those of a wait that goes on: the reader of a `map` waits once, until it is over."""
        since = self._since
        return self._before if since is None else self._before + perf_counter() - since
