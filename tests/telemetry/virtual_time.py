"""Virtual time for profiles: all clocks that they read are one clock, and blocking advances this clock."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

import penstock as ps
from penstock import engine, telemetry, testing
from penstock.actors import chains

T = TypeVar("T")
CLOCKED = (
    "actors.channel", "actors.attempts", "actors.chains", "actors.execution",
    "actors.executions", "actors.threads", "actors.worker", "engine.call_stream", "engine.executions",
    "engine.pipeline", "engine.statistics", "telemetry.profiling.durations", "insight.watching",
    "insight.recording", "insight.monitor", "engine.wiring",
)  # fmt: skip


@contextmanager
def telling(now: Callable[[], float]) -> Iterator[None]:
    """Has all clocks of profiles tell the time of `now` for the length of a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        for module in CLOCKED:
            patch.setattr(f"penstock.{module}.perf_counter", now)
        patch.setattr("penstock.insight.watching.thread_seconds", lambda thread: 0.0)
        # In virtual time, real waits for a core have no meaning.
        patch.setattr("penstock.insight.watching._core_waits", dict)
        chains._compiled.cache_clear()
        yield
        chains._compiled.cache_clear()


async def profile_of(stream: engine.Stream[Any], reader_seconds: float = 0.0) -> telemetry.Profile:
    with telemetry.profile() as profile:
        async with stream as results:
            async for _ in results:
                if reader_seconds:
                    await asyncio.sleep(reader_seconds)
    return profile


async def profile_of_runs(calls: Iterable[ps.Call[Any]], *, pause_seconds: float = 0.0) -> telemetry.Profile:
    """Profiles runs, one after the other, each with a pause behind it."""
    with telemetry.profile() as profile:
        for call in calls:
            await engine.run(call)
            await asyncio.sleep(pause_seconds)
    return profile


def node_of(of: Any, name: str) -> Any:
    """Returns what a profile or a look tells of a node."""
    [found] = [node for node in of.nodes if node.node == name]
    return found


def waits(name: str, seconds: float, **policy: Any) -> Any:
    """Returns a node that waits for a time, and returns its argument."""

    async def wait(number: int) -> int:
        await asyncio.sleep(seconds)
        return number

    wait.__name__ = wait.__qualname__ = name
    return ps.node(**policy)(wait)


class VirtualTime:
    """The time of a virtual loop, also for handlers that hold the loop, and for threads of an Engine.

    On a loop that `run` has not made, `hold` changes the time that profiles are told, and no other.
    """

    def __init__(self) -> None:
        self._loop: testing.VirtualClockLoop | None = None
        self._asleep = 0
        self._held_seconds = 0.0

    def __call__(self) -> float:
        loop = self._loop or asyncio._get_running_loop()
        return self._held_seconds + (loop.time() if isinstance(loop, testing.VirtualClockLoop) else 0.0)

    def runner(self) -> asyncio.Runner:
        """Returns a runner of a new virtual loop."""
        return asyncio.Runner(loop_factory=self._new_loop)

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `main()` on a new virtual loop."""

        async def inside() -> T:
            return await main()  # called on the loop: a stream belongs to the running loop

        with self.runner() as runner:
            return runner.run(inside())

    def profile(self, graph: Any, items: int, **options: Any) -> telemetry.Profile:
        """Profiles a stream of calls of a graph with one argument, on a new virtual loop."""
        return self.run(lambda: profile_of(engine.stream((graph(number) for number in range(items)), **options)))

    def profile_in_threads(self, graph: Any, items: int, threads: int | None = None) -> telemetry.Profile:
        """Profiles a stream of calls whose nodes hold the threads of an Engine."""

        async def run() -> telemetry.Profile:
            async with engine.Engine(max_workers=threads) as own:
                with self.threads_of(own):
                    return await profile_of(own.stream(graph(number) for number in range(items)))

        return self.run(run)

    def hold(self, seconds: float) -> None:
        """Hold the event loop for a time."""
        if self._loop is None:
            self._held_seconds += seconds
        else:
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
            allowed = threads._unsettled
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
