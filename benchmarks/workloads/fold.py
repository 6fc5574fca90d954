"""A stream in chunks of 1 ms, and 5,000,000 points: the cost of folding, and the growth of memory."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import mean, stdev
from typing import Any

import numpy as np

import penstock as ps
from penstock import engine

from ..harness import Contenders, Row, Workload
from ..resident import resident_mib
from ..summary import Limits

POINTS = 5_000_000
CHUNK = 25_000
SETTLED_AFTER = 20
FAILING = 50  # every 50th chunk fails, for the rows in which failures are left out

# A body that only takes this long. The time of arrays depends on caches and on free pages of the allocator, and
# differed by a factor of two in either direction.
CHUNK_SECONDS = 0.001


def chunk_numbers(points: int) -> range:
    return range(points // CHUNK)


def add(total: int, number: int) -> int:
    until = time.perf_counter() + CHUNK_SECONDS
    while time.perf_counter() < until:
        pass
    return total + number


def add_or_fail(total: int, number: int) -> int:
    added = add(total, number)
    if number % FAILING == FAILING - 1:
        raise ValueError("a chunk that is no good")
    return added


@ps.node
async def numbers(points: int) -> AsyncIterator[int]:
    for number in chunk_numbers(points):
        yield number


@ps.node
def adds(total: int, number: int) -> int:
    return add(total, number)


@ps.node
def adds_or_fails(total: int, number: int) -> int:
    return add_or_fail(total, number)


@ps.graph
async def fit(points: int) -> int:
    return await ps.fold(adds, numbers(points), 0)


@ps.graph
async def tolerant_fit(points: int) -> int:
    return await ps.fold(adds_or_fails, numbers(points), 0, on_error="skip")


async def seconds(call: Any) -> float:
    began = time.perf_counter()
    await engine.run(call)
    return time.perf_counter() - began


def by_hand(points: int) -> float:
    began = time.perf_counter()
    total = 0
    for number in chunk_numbers(points):
        total = add(total, number)
    return time.perf_counter() - began


async def by_hand_with_turns(points: int) -> float:
    """Give the event loop a turn after each chunk, as the engine does after a call that held it for a millisecond."""
    began = time.perf_counter()
    total = 0
    for number in chunk_numbers(points):
        total = add(total, number)
        await asyncio.sleep(0)
    return time.perf_counter() - began


def by_hand_with_failures(points: int) -> float:
    began = time.perf_counter()
    total = 0
    for number in chunk_numbers(points):
        try:
            total = add_or_fail(total, number)
        except ValueError:
            continue
    return time.perf_counter() - began


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    points = POINTS // 5 if quick else POINTS

    async def hand() -> float:
        return by_hand(points)

    async def hand_with_failures() -> float:
        return by_hand_with_failures(points)

    yield {
        "fold": lambda: seconds(fit(points)),
        "by hand": hand,
        "by hand, with turns": lambda: by_hand_with_turns(points),
        "fold, some fail": lambda: seconds(tolerant_fit(points)),
        "by hand, some fail": hand_with_failures,
    }


FOLD = Workload(
    name="fold",
    contenders=contenders,
    control="by hand",
    rows=(
        Row(
            title="200 chunks of 1 ms folded: time over a loop by hand",
            subject="fold",
            reference="by hand",
            limits=Limits(must=1.01),
        ),
        Row(
            title="the same by hand with a turn of the event loop after each chunk",
            subject="by hand, with turns",
            reference="by hand",
        ),
        Row(
            title="one chunk of 50 fails and is left out: over a loop that catches it",
            subject="fold, some fail",
            reference="by hand, some fail",
            limits=Limits(must=1.05),
        ),
    ),
)


@ps.node(capacity=2)
async def chunks(points: int) -> AsyncIterator[tuple[Any, Any]]:
    for number in chunk_numbers(points):
        x = np.linspace(number, number + 1, CHUNK)
        yield x, 2 * x - 1


async def resident(points: int) -> list[float]:
    """Fold chunks that are made one by one; return the resident memory after each, in MiB, without the first chunks."""
    seen: list[float] = []

    @ps.node
    def fit_and_look(sums: Any, chunk: tuple[Any, Any]) -> Any:
        x, y = chunk
        design = np.stack([x, np.ones_like(x)])
        seen.append(resident_mib())
        return sums[0] + design @ design.T, sums[1] + design @ y

    @ps.graph
    async def watched(points: int) -> Any:
        return await ps.fold(fit_and_look, chunks(points), (np.zeros((2, 2)), np.zeros(2)))

    gc.collect()
    await engine.run(watched(points))
    return seen[SETTLED_AFTER:]


@asynccontextmanager
async def memory_contenders(quick: bool) -> AsyncIterator[Contenders]:
    points = POINTS // 5 if quick else POINTS

    async def variation() -> float:
        mib = await resident(points)
        return 100 * stdev(mib) / mean(mib)

    async def growth() -> float:
        mib = await resident(points)
        tenth = len(mib) // 10
        return mean(mib[-tenth:]) - mean(mib[:tenth])

    yield {"variation": variation, "growth": growth}


FOLD_MEMORY = Workload(
    name="fold-memory",
    contenders=memory_contenders,
    rounds=(3, 1),
    fresh_process=True,
    rows=(
        Row(
            title="5,000,000 points folded: variation of resident memory",
            subject="variation",
            unit="%",
            limits=Limits(must=5),
        ),
        Row(title="the same: its growth", subject="growth", unit="MiB", limits=Limits(must=2)),
    ),
)
