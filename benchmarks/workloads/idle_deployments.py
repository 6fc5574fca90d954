"""A thousand deployments that wait for a call: the memory of each."""

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from penstock import engine

from ..baselines.chain import Stage, queue_service
from ..harness import Contenders, Row, Workload
from ..resident import resident_mib
from ..summary import Limits
from .graphs import chain

STAGES = 10


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    number = 100 if quick else 1_000
    graph = chain(STAGES)
    yield {
        "deployments": lambda: _kib_each(lambda: engine.deploy(graph), number),
        "queues": lambda: _kib_each(lambda: queue_service(STAGES), number),
    }


async def _kib_each(open_one: Callable[[], AbstractAsyncContextManager[Stage]], number: int) -> float:
    async with AsyncExitStack() as stack:
        for _ in range(10):  # imports, the plan and the pools must not count
            await stack.enter_async_context(open_one())
        before = _settled_mib()
        services = [await stack.enter_async_context(open_one()) for _ in range(number)]
        grown = _settled_mib() - before
        assert await services[-1](7) == 7
    return grown / number * 1024


def _settled_mib() -> float:
    gc.collect()
    return resident_mib()


IDLE_DEPLOYMENTS = Workload(
    name="idle-deployments",
    contenders=contenders,
    rounds=(3, 1),
    fresh_process=True,
    rows=(
        Row(
            title="1,000 idle deployments of 10 nodes, each",
            subject="deployments",
            unit="KB",
            limits=Limits(must=50, aim=20),
        ),
        Row(title="the same, 10 queue stages by hand, each", subject="queues", unit="KB"),
    ),
)
