"""A million items through five nodes: the growth of memory."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..baselines.chain import queue_chain
from ..harness import Contenders, Row, Workload
from ..resident import resident_mib
from ..summary import Limits
from .graphs import chain, stream_seconds

STAGES = 5
SETTLED_AFTER = 10_000


class Growth:
    """The growth of resident memory: its highest value after the first items, less its value then."""

    def __init__(self) -> None:
        self._settled = 0.0
        self._highest = 0.0

    def see(self, received: int) -> None:
        if received % SETTLED_AFTER:
            return
        if received == SETTLED_AFTER:
            gc.collect()
            self._settled = resident_mib()
        self._highest = max(self._highest, resident_mib())

    def mib(self) -> float:
        return self._highest - self._settled


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    items = 100_000 if quick else 1_000_000

    async def penstock() -> float:
        growth = Growth()
        await stream_seconds(chain(STAGES), items, growth.see)
        return growth.mib()

    async def queues() -> float:
        growth = Growth()
        await queue_chain(items, STAGES, growth.see)
        return growth.mib()

    yield {"stream": penstock, "queues": queues}


MEMORY = Workload(
    name="memory",
    contenders=contenders,
    rounds=(3, 1),
    fresh_process=True,
    rows=(
        # The limit allows for pages that the allocator keeps after a burst. A leak of one word per item would be 8 MiB.
        Row(
            title="1,000,000 items, 5 nodes: growth after the first 10,000",
            subject="stream",
            unit="MiB",
            limits=Limits(must=2),
        ),
        Row(title="the same through asyncio.Queue stages", subject="queues", unit="MiB"),
    ),
)
