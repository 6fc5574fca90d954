"""Reader wait: how long the reader of a stream has waited for it, and how a wait is cancelled."""

import asyncio
from time import perf_counter


class ReaderWait:
    """A watch that runs while the reader waits, in `with`; also where a second one comes, who is refused in there.

    A reader that is cancelled meanwhile gets a `CancelledError` of its own, whose context is the one that arrived. The
    traceback of an error refers to every frame that it passes, and so to the stream. Who runs the reader may keep the
    error in a cycle: the task groups of anyio, which servers cancel when a client leaves, keep the innermost
    `CancelledError` beside their own frame. That one has passed no frame outside of the engine, so the stream is closed
    as soon as its reader drops it, and not when cycles are collected.
    """

    __slots__ = ("_before", "_readers", "_since")

    def __init__(self) -> None:
        self._before = 0.0
        self._readers = 0
        self._since: float | None = None

    def __enter__(self) -> None:
        if not self._readers:
            self._since = perf_counter()
        self._readers += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._readers -= 1
        if not self._readers:
            self._before, self._since = self.seconds, None
        if isinstance(error, asyncio.CancelledError):
            raise asyncio.CancelledError(*error.args)

    @property
    def seconds(self) -> float:
        """Seconds so far, with those of a wait that goes on: the reader of a `map` waits once, until it is over."""
        since = self._since
        return self._before if since is None else self._before + perf_counter() - since
