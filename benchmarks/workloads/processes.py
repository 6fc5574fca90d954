"""Two worker processes: bodies of 0.6 ms beside `multiprocessing`, and bodies that do nothing."""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager

import penstock as ps
from penstock import engine

from ..baselines import pools
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits

WORKERS = 2
CHUNK = 32


@ps.node(runs_on="process")
def compute_in_process(value: int) -> int:
    return pools.compute_for_600_us(value)


@ps.node(runs_on="process")
def nothing_in_process(value: int) -> int:
    return pools.do_nothing(value)


@ps.graph
async def computing(value: int) -> int:
    return compute_in_process(value)


@ps.graph
async def nothing(value: int) -> int:
    return nothing_in_process(value)


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    items = 1_000 if quick else 4_000
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(WORKERS) as pool, ProcessPoolExecutor(WORKERS, spawn) as executor:
        async with engine.Engine(max_processes=WORKERS) as own:

            def stream(graph: ps.Graph[[int], int]) -> Sample:
                async def sample() -> float:
                    received = 0
                    began = time.perf_counter()
                    async with own.stream(graph(value) for value in range(items)) as results:
                        async for result in results:
                            assert result == received
                            received += 1
                    assert received == items
                    return (time.perf_counter() - began) / items * 1e6

                return sample

            def in_chunks(body: Callable[[int], int]) -> Sample:
                async def sample() -> float:
                    began = time.perf_counter()
                    assert pool.map(body, range(items), CHUNK) == list(range(items))
                    return (time.perf_counter() - began) / items * 1e6

                return sample

            def by_hand(body: Callable[[int], int]) -> Sample:
                async def sample() -> float:
                    loop = asyncio.get_running_loop()
                    began = time.perf_counter()
                    calls = [loop.run_in_executor(executor, body, value) for value in range(items)]
                    assert await asyncio.gather(*calls) == list(range(items))
                    return (time.perf_counter() - began) / items * 1e6

                return sample

            yield {
                "compute, penstock": stream(computing),
                "compute, chunks": in_chunks(pools.compute_for_600_us),
                "compute, by hand": by_hand(pools.compute_for_600_us),
                "nothing, penstock": stream(nothing),
                "nothing, by hand": by_hand(pools.do_nothing),
            }


PROCESSES = Workload(
    name="processes",
    contenders=contenders,
    control="compute, chunks",
    rounds=(9, 3),
    rows=(
        Row(
            title="0.6 ms in two worker processes, stream",
            subject="compute, chunks",
            reference="compute, penstock",
            unit="of pool.map with chunks",
            limits=Limits(must=0.85, aim=0.95, at_least=True),
        ),
        Row(
            title="the same, run_in_executor",
            subject="compute, chunks",
            reference="compute, by hand",
            unit="of pool.map with chunks",
        ),
        # The limits are 12,000 items a second, and 40,000.
        Row(
            title="nothing in two worker processes, stream",
            subject="nothing, penstock",
            unit="µs",
            limits=Limits(must=83.3, aim=25.0),
        ),
        Row(title="the same, run_in_executor", subject="nothing, by hand", unit="µs"),
    ),
)
