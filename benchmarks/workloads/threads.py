"""A body of 1 ms that releases the GIL, on two threads: the cost of handing items to threads."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import penstock as ps

from ..baselines import pools
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits
from .graphs import stream_seconds

THREADS_USED = 2


@ps.node(runs_on="thread", concurrency=THREADS_USED)
def sleep_in_thread(value: int) -> int:
    return pools.release_by_sleeping(value)


@ps.node(runs_on="thread", concurrency=THREADS_USED)
def compress_in_thread(value: int) -> int:
    return pools.release_by_compressing(value)


@ps.graph
async def sleeping(value: int) -> int:
    return sleep_in_thread(value)


@ps.graph
async def compressing(value: int) -> int:
    return compress_in_thread(value)


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    items = 200 if quick else 800

    def limit(body: Callable[[int], int]) -> Sample:
        async def sample() -> float:
            return pools.bare_threads(body, items, THREADS_USED)

        return sample

    yield {
        "sleep, penstock": lambda: stream_seconds(sleeping, items),
        "sleep, limit": limit(pools.release_by_sleeping),
        "sleep, by hand": lambda: pools.to_thread_pool(pools.release_by_sleeping, items, THREADS_USED),
        "compress, penstock": lambda: stream_seconds(compressing, items),
        "compress, limit": limit(pools.release_by_compressing),
        "compress, by hand": lambda: pools.to_thread_pool(pools.release_by_compressing, items, THREADS_USED),
    }


# The time of the limit over the time of the contender: a share of the limit.
THREADS = Workload(
    name="threads",
    contenders=contenders,
    control="sleep, limit",
    rows=(
        Row(
            title="1 ms of sleep on two threads, stream",
            subject="sleep, limit",
            reference="sleep, penstock",
            unit="of limit",
            limits=Limits(must=0.94, aim=0.97, at_least=True),
        ),
        Row(
            title="the same, asyncio.to_thread",
            subject="sleep, limit",
            reference="sleep, by hand",
            unit="of limit",
        ),
        # No limits: the number depends on whether the machine has free cores for two busy threads and the loop.
        Row(
            title="1 ms of compression on two threads, stream",
            subject="compress, limit",
            reference="compress, penstock",
            unit="of limit",
        ),
        Row(
            title="the same, asyncio.to_thread",
            subject="compress, limit",
            reference="compress, by hand",
            unit="of limit",
        ),
    ),
)
