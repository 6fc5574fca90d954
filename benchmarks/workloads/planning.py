"""Trace and plan a graph of 1,000 nodes that was never seen before."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import penstock as ps
from penstock import engine

from ..harness import Contenders, Row, Workload
from ..summary import Limits

NODES = 1_000
WIDTH = 10


@ps.node
async def larger(left: int, right: int) -> int:
    return max(left, right)


@ps.node
def largest(values: list[int]) -> int:
    return max(values)


async def fresh_graph_milliseconds() -> float:
    """Return the time from the decorator to the plan: reading the source, tracing and every pass."""
    started = time.perf_counter()

    @ps.graph
    async def wide(value: int) -> int:
        values = [value] * WIDTH
        for _ in range((NODES - 1) // WIDTH):
            values = [await larger(left, right) for left, right in zip(values, values[1:] + values[:1], strict=True)]
        for _ in range((NODES - 1) % WIDTH):
            values[0] = await larger(values[0], values[1])
        return largest(values)

    plan = engine.plan(wide)
    elapsed = time.perf_counter() - started
    assert plan is not None
    return elapsed * 1e3


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    yield {"plan": fresh_graph_milliseconds}


PLANNING = Workload(
    name="planning",
    contenders=contenders,
    control="plan",
    rows=(
        Row(title="decorate, trace and plan 1,000 nodes", subject="plan", unit="ms", limits=Limits(must=100, aim=40)),
    ),
)
