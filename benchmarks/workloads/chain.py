"""Ten stages that do nothing, as a stream: the cost of a hop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ..baselines.chain import direct_chain, queue_chain
from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .graphs import chain, plain_chain, stream_seconds

STAGES = 10


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    items = 4_000 if quick else 20_000
    yield {
        "stream": partial(stream_seconds, chain(STAGES), items),
        "queues": partial(queue_chain, items, STAGES),
        "plain": partial(stream_seconds, plain_chain(STAGES), items),
        "direct": partial(direct_chain, items, STAGES),
    }


CHAIN = Workload(
    name="chain",
    contenders=contenders,
    control="queues",
    rows=(
        Row(
            title="10 async stages as a stream / asyncio.Queue stages",
            subject="stream",
            reference="queues",
            limits=Limits(must=0.45, aim=0.38),
        ),
        Row(
            title="10 plain def stages as a stream / asyncio.Queue stages",
            subject="plain",
            reference="queues",
            limits=Limits(must=0.2, aim=0.12),
        ),
        Row(title="floor: awaited directly / asyncio.Queue stages", subject="direct", reference="queues"),
    ),
)
