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


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    calls = 4_000 if quick else 20_000
    async with engine.deploy(chain(STAGES)) as service, queue_service(STAGES) as queues:
        yield {
            "deployment": partial(call_from_many, service, calls, CALLERS),
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
    ),
)
