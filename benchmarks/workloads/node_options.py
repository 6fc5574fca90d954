"""The cost of node options for an item that does not need them, above the same node without options."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import penstock as ps
from penstock import engine

from ..baselines.chain import BUFFER
from ..baselines.chain import pass_on as pass_on_by_hand
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits
from .graphs import chain

STAGES = 10

NODES = {
    "timeout": ps.node(capacity=BUFFER, timeout_seconds=60)(pass_on_by_hand),
    "hedge": ps.node(capacity=BUFFER, hedge=ps.Hedge(after_seconds=60))(pass_on_by_hand),
    "cache": ps.node(capacity=BUFFER, cache=ps.Cache(max_bytes=1_000_000))(pass_on_by_hand),
}


async def seconds(graph: ps.Graph[[int], int], items: int) -> float:
    """Return the time of the loop's thread. The calls are equal, so all but the first find their result in a cache."""
    started = time.thread_time()
    async with engine.stream(graph(1) for _ in range(items)) as results:
        async for _ in results:
            pass
    return time.thread_time() - started


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    items = 1_000 if quick else 4_000
    plain = chain(STAGES)

    def above_plain(graph: ps.Graph[[int], int]) -> Sample:
        async def sample() -> float:
            added = await seconds(graph, items) - await seconds(plain, items)
            added += -await seconds(plain, items) + await seconds(graph, items)
            return added / (2 * items * STAGES) * 1e6

        return sample

    yield {name: above_plain(chain(STAGES, node)) for name, node in NODES.items()}


def _row(title: str, subject: str, must: float) -> Row:
    return Row(title=title, subject=subject, unit="µs", limits=Limits(must=must))


NODE_OPTIONS = Workload(
    name="node-options",
    contenders=contenders,
    rows=(
        _row("timeout_seconds of a node that ends at once, above the node without", "timeout", 4),
        _row("a hedge that does not begin, above the node without", "hedge", 4),
        _row("a hit of a node's cache, above a node that does nothing", "cache", 5),
    ),
)
