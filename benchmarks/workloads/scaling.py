"""The cost of a hop for three sizes of chains, streams, frames at once and deployments: the cost must not grow."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import penstock as ps
from penstock import engine

from ..baselines.calls import call_from_many
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits
from .graphs import chain, pass_on, stream_seconds

STAGES = 10
CALLERS = 64
LENGTHS = (3, 10, 100)
ITEMS = (100, 1_000, 20_000)
AT_ONCE = (100, 1_000, 20_000)
DEPLOYED = (1, 10, 100)

# The largest ratio that counts as "does not grow", on a noisy machine. A cost that grows with the logarithm would give
# 3 and more.
LEVEL = 1.25


@asynccontextmanager
async def lengths(quick: bool) -> AsyncIterator[Contenders]:
    hops = 30_000 if quick else 120_000

    def per_hop(length: int) -> Sample:
        graph = chain(length)

        async def sample() -> float:
            items = hops // length
            return await stream_seconds(graph, items) / (items * length) * 1e6

        return sample

    yield {str(length): per_hop(length) for length in LENGTHS}


@asynccontextmanager
async def items(quick: bool) -> AsyncIterator[Contenders]:
    del quick  # the largest size is the point

    def per_hop(number: int) -> Sample:
        graph = chain(STAGES)
        streams = max(1, 4_000 // number)

        async def sample() -> float:
            seconds = 0.0
            for _ in range(streams):
                seconds += await stream_seconds(graph, number)
            return seconds / (streams * number * STAGES) * 1e6

        return sample

    yield {str(number): per_hop(number) for number in ITEMS}


@asynccontextmanager
async def frames_at_once(quick: bool) -> AsyncIterator[Contenders]:
    """Hold every frame until the last is done: the first item waits for all others, and the output is ordered."""
    del quick
    held = Held()

    @ps.node
    async def wait_for_others(value: int) -> int:
        if value == 0:
            await held.others_done.wait()
        return value

    @ps.node
    def count(value: int) -> int:
        return held.count(value)

    @ps.graph
    async def graph(value: int) -> int:
        value = await wait_for_others(value)
        for _ in range(STAGES - 2):
            value = await pass_on(value)
        return count(value)

    def per_hop(number: int) -> Sample:
        streams = max(1, 4_000 // number)

        async def sample() -> float:
            seconds = 0.0
            for _ in range(streams):
                held.start(number)
                seconds += await stream_seconds(graph, number, max_in_flight=number)
            return seconds / (streams * number * STAGES) * 1e6

        return sample

    yield {str(number): per_hop(number) for number in AT_ONCE}


class Held:
    """Tells the first item when all other items have come to the end of the chain."""

    others_done: asyncio.Event

    def start(self, number: int) -> None:
        self.others_done = asyncio.Event()
        self._missing = number - 1

    def count(self, value: int) -> int:
        if value != 0:
            self._missing -= 1
            if self._missing == 0:
                self.others_done.set()
        return value


@asynccontextmanager
async def deployments(quick: bool) -> AsyncIterator[Contenders]:
    calls = 4_000 if quick else 12_000
    async with AsyncExitStack() as stack:
        graph = chain(STAGES)
        services = [await stack.enter_async_context(engine.deploy(graph)) for _ in range(max(DEPLOYED))]

        def per_hop(number: int) -> Sample:
            turns = itertools.cycle(services[:number])

            async def call(value: int) -> int:
                return await next(turns)(value)

            async def sample() -> float:
                return await call_from_many(call, calls, CALLERS) / (calls * STAGES) * 1e6

            return sample

        yield {str(number): per_hop(number) for number in DEPLOYED}


def _rows(described: str, sizes: tuple[int, int, int]) -> tuple[Row, ...]:
    smallest, _, largest = sizes
    return (
        *(Row(title=f"per hop, {described} {size:,}", subject=str(size), unit="µs") for size in sizes),
        Row(
            title=f"growth, {described} {largest:,} / {smallest:,}",
            subject=str(largest),
            reference=str(smallest),
            limits=Limits(must=LEVEL, aim=1.0),
        ),
    )


CHAIN_LENGTH = Workload(
    name="chain-length", contenders=lengths, control="3", rounds=(9, 5), rows=_rows("chain of", LENGTHS)
)
STREAM_LENGTH = Workload(
    name="stream-length", contenders=items, control="100", rounds=(9, 5), rows=_rows("stream of", ITEMS)
)
FRAMES_AT_ONCE = Workload(
    name="frames-at-once",
    contenders=frames_at_once,
    control="100",
    rounds=(9, 5),
    rows=_rows("frames at once", AT_ONCE),
)
DEPLOYMENTS = Workload(
    name="deployments", contenders=deployments, control="1", rounds=(9, 5), rows=_rows("deployments", DEPLOYED)
)
