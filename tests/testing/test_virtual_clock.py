"""Sleeps take no time and end in order; real sockets and threads still work."""

import asyncio
import socket
import threading
import time

import pytest

from penstock.testing import VirtualClockLoop, run_virtual

CENTURY = 100 * 365 * 86400.0


def test_sleeps_end_in_the_order_of_their_deadlines() -> None:
    async def main() -> tuple[list[float], float]:
        loop = asyncio.get_running_loop()
        ended: list[float] = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            ended.append(loop.time())

        await asyncio.gather(*map(sleeper, (CENTURY, 0.25, 30.0, 0.0)))
        return ended, loop.time()

    assert run_virtual(main) == (pytest.approx([0.0, 0.25, 30.0, CENTURY]), pytest.approx(CENTURY))


def test_time_stands_still_while_there_is_something_to_run() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(1.0, lambda: None)
        for _ in range(100):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 0.0


def test_a_deadlock_is_a_timeout_at_once() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        run_virtual(main, timeout_seconds=1e6)


def test_bytes_that_are_there_come_before_a_timer() -> None:
    async def main() -> tuple[bytes, float]:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        here.setblocking(False)
        with here, there:
            async with asyncio.timeout(1e-6), asyncio.TaskGroup() as group:
                received = group.create_task(loop.sock_recv(here, 10))
                await asyncio.sleep(0)  # the task waits for its socket now
                there.send(b"ready")
            return received.result(), loop.time()

    assert run_virtual(main) == (b"ready", 0.0)


def test_a_thread_of_the_executor_holds_the_clock() -> None:
    def work(release: threading.Event) -> str:
        release.wait()
        return "done"

    async def main() -> tuple[str, bool]:
        release = threading.Event()
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        loop.call_later(0.02, release.set)  # fires in real time, and releases the thread
        async with asyncio.timeout(3600.0):
            result = await asyncio.to_thread(work, release)
        held = time.monotonic() - started >= 0.02
        before = loop.time()
        await asyncio.sleep(3600.0)
        return result, held and loop.time() == before + 3600.0

    assert run_virtual(main) == ("done", True)


def test_real_time_holds_the_clock_for_threads_that_the_loop_does_not_know() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        future: asyncio.Future[str] = loop.create_future()
        timer_set = threading.Event()

        def work() -> None:
            timer_set.wait()
            loop.call_soon_threadsafe(future.set_result, "before the timeout")

        thread = threading.Thread(target=work)
        thread.start()
        with loop.real_time():
            loop.call_soon(timer_set.set)
            async with asyncio.timeout(3600.0):
                result = await future
        thread.join()
        return result

    assert run_virtual(main) == "before the timeout"


def test_errors_reach_the_caller_and_the_loop_is_closed() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        raise ValueError("from main")

    with pytest.raises(ValueError, match="from main"):
        run_virtual(main)
    assert loops[0].is_closed()
