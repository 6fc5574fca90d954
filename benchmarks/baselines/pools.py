"""Pools of workers: waiting for I/O on the loop, and bodies that release the GIL in threads."""

import asyncio
import threading
import time
import zlib
from collections.abc import Callable
from functools import cache

SLEEP_SECONDS = 0.005
BODY_SECONDS = 0.001


async def wait_for_io(value: int) -> int:
    """Wait for 5 ms, in place of a request."""
    await asyncio.sleep(SLEEP_SECONDS)
    return value


def ideal_io_seconds(items: int, in_flight: int) -> float:
    """Return the shortest possible seconds: a last wave that is not full takes as long as a full wave."""
    return -(-items // in_flight) * SLEEP_SECONDS


async def io_timers(items: int, in_flight: int) -> float:
    """Measure the loop's own timers: `in_flight` tasks that only sleep."""
    values = iter(range(items))

    async def sleep() -> None:
        for value in values:
            await wait_for_io(value)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(sleep())
    return time.perf_counter() - started


async def io_pool(items: int, in_flight: int) -> float:
    """Measure workers between a queue of work and a queue of results."""
    work_queue: asyncio.Queue[int] = asyncio.Queue(in_flight)
    results: asyncio.Queue[int] = asyncio.Queue(in_flight)

    async def feed() -> None:
        for value in range(items):
            await work_queue.put(value)

    async def work() -> None:
        while True:
            await results.put(await wait_for_io(await work_queue.get()))

    received = 0
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed())
        workers = [tasks.create_task(work()) for _ in range(in_flight)]
        for _ in range(items):
            received += await results.get()
        for worker in workers:
            worker.cancel()
    elapsed = time.perf_counter() - started
    assert received == sum(range(items))
    return elapsed


def release_by_sleeping(value: int) -> int:
    """Sleep for 1 ms without the GIL, which needs no core: only the hand-over is measured."""
    time.sleep(BODY_SECONDS)
    return value


@cache
def _a_millisecond_of_text() -> bytes:
    """Return text that takes 1 ms to compress on this machine; it fits the caches, so that two threads share little."""
    sample = b"".join(b"%d squared is %d; " % (number, number * number) for number in range(4_000))
    seconds = min(_seconds_to_compress(sample) for _ in range(5))
    return (sample * 10)[: int(len(sample) * BODY_SECONDS / seconds)]


def _seconds_to_compress(data: bytes) -> float:
    started = time.perf_counter()
    zlib.compress(data, 1)
    return time.perf_counter() - started


def release_by_compressing(value: int) -> int:
    """Compress for 1 ms without the GIL, which keeps a core busy: two threads need two free cores."""
    zlib.compress(_a_millisecond_of_text(), 1)
    return value


def compute_for_600_us(value: int) -> int:
    """Compute in Python for about 0.6 ms: the same work in every process, however busy the machine is."""
    total = 0
    for number in range(16_000):
        total += number
    return value


def do_nothing(value: int) -> int:
    """Do nothing, as a body that takes no time."""
    return value


def bare_threads(body: Callable[[int], int], items: int, threads: int) -> float:
    """Measure the limit: threads that divide the items beforehand, without any hand-over."""

    def work(first: int) -> None:
        for value in range(first, items, threads):
            body(value)

    body(0)
    workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started


async def to_thread_pool(body: Callable[[int], int], items: int, threads: int) -> float:
    """Measure workers that each await `asyncio.to_thread` for their next item."""
    values = iter(range(items))
    results: asyncio.Queue[int] = asyncio.Queue(threads)

    async def work() -> None:
        for value in values:
            await results.put(await asyncio.to_thread(body, value))

    body(0)
    received = 0
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(threads):
            tasks.create_task(work())
        for _ in range(items):
            received += await results.get()
    elapsed = time.perf_counter() - started
    assert received == sum(range(items))
    return elapsed
