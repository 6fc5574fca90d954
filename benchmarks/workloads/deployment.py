"""The same ten stages as calls of a deployment: 64 callers, each awaiting its own answer in its own context."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from penstock import engine

from ..baselines.calls import call_from_many
from ..baselines.chain import queue_service
from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .graphs import chain

STAGES = 10
CALLERS = 64
TENANTS = 8


def tenant_of(value: int) -> int:
    return value % TENANTS


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    calls = 4_000 if quick else 20_000
    graph = chain(STAGES)
    async with (
        engine.deploy(graph) as service,
        engine.deploy(graph, key=tenant_of) as fair,
        queue_service(STAGES) as queues,
    ):
        yield {
            "deployment": partial(call_from_many, service, calls, CALLERS),
            "by key": partial(call_from_many, fair, calls, CALLERS),
            "queues": partial(call_from_many, queues, calls, CALLERS),
        }


DEPLOYMENT = Workload(
    name="deployment",
    contenders=contenders,
    control="queues",
    rows=(
        Row(
            title="10 async stages, 64 callers / queue stages with a future each",
            subject="deployment",
            reference="queues",
            limits=Limits(must=1.0, aim=0.8),
        ),
        Row(
            title="the same, with fair shares of 8 tenants / without",
            subject="by key",
            reference="deployment",
            limits=Limits(must=1.2),
        ),
    ),
)
