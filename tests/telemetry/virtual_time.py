"""Virtual time for profiles: all clocks that they read are the clock of one loop, and blocking advances this clock."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock import engine, testing

T = TypeVar("T")


class VirtualTime:
    """The time of a virtual loop, also for handlers that hold the loop, and for threads of an Engine."""

    def __init__(self) -> None:
        self._loop: testing.VirtualClockLoop | None = None
        self._asleep = 0

    def __call__(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `main()` on a new virtual loop."""

        async def inside() -> T:
            return await main()  # called on the loop: a stream belongs to the running loop

        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            return runner.run(inside())

    def hold(self, seconds: float) -> None:
        """Hold the event loop for a time."""
        assert self._loop is not None
        self._loop._clock.now_seconds += seconds

    def hold_thread(self, seconds: float) -> None:
        """Hold a thread of a pool for a time."""
        assert self._loop is not None
        loop, over = self._loop, threading.Event()

        def begin() -> None:
            self._asleep += 1
            loop.call_later(seconds, end)

        def end() -> None:
            self._asleep -= 1
            over.set()

        loop.call_soon_threadsafe(begin)
        over.wait()

    @contextmanager
    def threads_of(self, own: engine.Engine) -> Iterator[None]:
        """Stop the clock until every thread of an Engine that has work is held."""
        assert self._loop is not None
        select = self._loop._clock.select

        def settled() -> bool:
            threads = own._runtime.pools._threads
            if threads is None:
                return True
            allowed = threads._unsettled - threads._wait_in_slots()
            return not threads._mailbox and self._asleep == min(allowed, threads._max_threads)

        def patiently(timeout: float | None = None) -> Any:
            while timeout and not settled():
                if ready := select(0):
                    return ready
            return select(timeout)

        self._loop._clock.select = patiently  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._loop._clock.select

    def _new_loop(self) -> testing.VirtualClockLoop:
        self._loop = testing.VirtualClockLoop()
        return self._loop
