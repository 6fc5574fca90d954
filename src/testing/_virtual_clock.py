"""An event loop whose clock jumps to the next timer as soon as all tasks are blocked."""

import asyncio
import math
import selectors
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RESOLUTION_SECONDS = time.get_clock_info("monotonic").resolution


class _ClockSelector(selectors.DefaultSelector):
    """A selector that moves the clock forward instead of sleeping until the next timer of its loop.

    An asyncio loop sleeps only in `selector.select(timeout)`, and takes its selector as an argument. So the clock can
    be in the selector, without access to private parts of the loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0
        self.held = 0  # how many callers need the clock to run at real speed

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:  # no timer to jump to, or the loop does not sleep
            return super().select(timeout)
        if self.held:
            started = time.monotonic()
            ready = super().select(timeout)
            self.now_seconds += time.monotonic() - started
            return ready
        ready = super().select(0)
        if not ready:
            self.now_seconds += timeout
            # A loop runs the timers before "now plus the resolution of the clock". After about 97 days of virtual time,
            # that sum is the same float as now, so a due timer would never run.
            if self.now_seconds + _RESOLUTION_SECONDS == self.now_seconds:
                self.now_seconds = math.nextafter(self.now_seconds, math.inf)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop on virtual time: sleeps take no real time, and end in the order of their deadlines.

    `time()` starts at 0.0 seconds and stands still while callbacks run. When no callback is due, the loop polls its
    file descriptors once without waiting; if none is ready, the clock jumps to the next timer. Sockets, pipes and
    `call_soon_threadsafe` work as always.

    The loop only knows work outside itself that runs through `run_in_executor` and `asyncio.to_thread`. While such a
    function runs, the clock moves at real speed, so that timeouts around it work. For other work that takes real time
    (`anyio.to_thread`, another process, a remote peer), either have no timer pending, or use `real_time()`.
    """

    def __init__(self) -> None:
        self._clock = _ClockSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time in seconds since the loop was made."""
        return self._clock.now_seconds

    @contextmanager
    def real_time(self) -> Generator[None]:
        """Let the clock run at real speed inside the `with`, for work outside of the loop."""
        self._clock.held += 1
        try:
            yield
        finally:
            self._clock.held -= 1

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run a function as asyncio does; until it returns or its caller leaves, the clock runs at real speed."""
        future = super().run_in_executor(executor, func, *args)
        self._clock.held += 1
        future.add_done_callback(self._release_clock)
        return future

    def _release_clock(self, _: asyncio.Future[T]) -> None:
        self._clock.held -= 1

    if sys.version_info >= (3, 12):  # earlier versions have no timeout, so no timer to jump to

        async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's
            """Shut down as asyncio does; the threads of the executor get `timeout` real seconds to end."""
            with self.real_time():
                await super().shutdown_default_executor(timeout)
