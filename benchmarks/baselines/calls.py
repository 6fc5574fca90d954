"""Callers: a caller that makes one call after the other, many callers at once, and a fan-out with its join."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

from .chain import Stage


def join(parts: Sequence[int]) -> int:
    return sum(parts)


async def suspend_once(value: int) -> int:
    """Give the loop one turn, as the shortest I/O does; a branch of the fan-out."""
    await asyncio.sleep(0)
    return value


def gather_and_join(branch: Stage, branches: int) -> Stage:
    """Return the usual fan-out by hand: `asyncio.gather`, then the join."""

    async def call(value: int) -> int:
        return join(await asyncio.gather(*[branch(value) for _ in range(branches)]))

    return call


async def call_in_turn(call: Stage, calls: int, expected: Callable[[int], int]) -> float:
    """Make one call after the other, as a single request handler does; return seconds."""
    started = time.perf_counter()
    for value in range(calls):
        assert await call(value) == expected(value)
    return time.perf_counter() - started


async def median_call_seconds(call: Callable[[], Awaitable[object]], calls: int) -> float:
    """Make one call after the other; return the median seconds, since the machine may interrupt single calls."""
    seconds: list[float] = []
    for _ in range(calls):
        began = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


async def call_from_many(service: Stage, calls: int, callers: int) -> float:
    """Make `calls` calls from `callers` tasks, each of which awaits an answer before its next call; return seconds."""
    values = iter(range(calls))
    answers = 0

    async def caller() -> None:
        nonlocal answers
        for value in values:
            assert await service(value) == value
            answers += 1

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(caller())
    elapsed = time.perf_counter() - started
    assert answers == calls
    return elapsed
