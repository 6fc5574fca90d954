"""2,000 waits of 5 ms, 64 in flight: how well the engine keeps all places full."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import penstock as ps
from penstock import engine

from ..baselines import pools
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits

IN_FLIGHT = 64
LIMITS = Limits(must=0.95, aim=0.98, at_least=True)


# The same function as by hand, without a wrapper, whose coroutine would count as a cost of the engine.
wait_for_io = ps.node(concurrency=IN_FLIGHT)(pools.wait_for_io)


@ps.graph
async def request(value: int) -> int:
    return await wait_for_io(value)


async def stream_seconds(items: int, *, ordered: bool) -> float:
    """Return the seconds of a stream, with twice as many items in flight as may wait: so the inbox is never empty."""
    total = 0
    started = time.perf_counter()
    async with engine.stream(
        (request(value) for value in range(items)), max_in_flight=2 * IN_FLIGHT, ordered=ordered
    ) as results:
        async for value in results:
            total += value
    elapsed = time.perf_counter() - started
    assert total == sum(range(items))
    return elapsed


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    # A quick run has as many items: with fewer waves, the first and the last wave would dominate.
    items = 2_000

    def share(seconds: Callable[[], Awaitable[float]]) -> Sample:
        async def sample() -> float:
            return pools.ideal_io_seconds(items, IN_FLIGHT) / await seconds()

        return sample

    yield {
        "ordered": share(lambda: stream_seconds(items, ordered=True)),
        "unordered": share(lambda: stream_seconds(items, ordered=False)),
        "by hand": share(lambda: pools.io_pool(items, IN_FLIGHT)),
        "timers": share(lambda: pools.io_timers(items, IN_FLIGHT)),
    }


IO = Workload(
    name="io",
    contenders=contenders,
    control="timers",
    rows=(
        # Timers of a loop round up to whole milliseconds, and no engine can sleep shorter than the loop. So the limits
        # compare with 64 bare loops of sleep; the last two rows compare with the arithmetic ideal.
        Row(
            title="2,000 × 5 ms, 64 in flight, stream",
            subject="ordered",
            reference="timers",
            unit="of ideal",
            limits=LIMITS,
        ),
        Row(title="the same, ordered=False", subject="unordered", reference="timers", unit="of ideal", limits=LIMITS),
        Row(title="the same, hand-written pool with queues", subject="by hand", reference="timers", unit="of ideal"),
        Row(title="stream, of the arithmetic ideal", subject="ordered", unit="of ideal"),
        Row(title="64 bare loops of sleep, of the arithmetic ideal", subject="timers", unit="of ideal"),
    ),
)
