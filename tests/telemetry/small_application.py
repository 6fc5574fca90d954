"""A graph of one node, that the programs of `test_setup` run."""

import asyncio

from opentelemetry import metrics

import penstock as ps
from penstock import engine


@ps.node
async def double(x: int) -> int:
    metrics.get_meter("test").create_counter("doubled").add(1)
    return 2 * x


def run() -> None:
    assert asyncio.run(engine.run(ps.graph(double)(1))) == 2
