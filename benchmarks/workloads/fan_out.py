"""One call that fans out to 32 nodes and joins, again and again: the cost in a request handler."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import penstock as ps
from penstock import engine

from ..baselines import calls as by_hand
from ..baselines.chain import Stage
from ..baselines.chain import pass_on as pass_on_by_hand
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits

BRANCHES = 32


@ps.node
async def pass_on(value: int) -> int:
    return value


@ps.node
async def suspend_once(value: int) -> int:
    return await by_hand.suspend_once(value)


@ps.node
def join(parts: list[int]) -> int:
    return by_hand.join(parts)


@ps.graph
async def fan_out(value: int) -> int:
    return join([await pass_on(value) for _ in range(BRANCHES)])


@ps.graph
async def suspending_fan_out(value: int) -> int:
    return join([await suspend_once(value) for _ in range(BRANCHES)])


def _run(graph: ps.Graph[[int], int]) -> Stage:
    async def call(value: int) -> int:
        return await engine.run(graph(value))

    return call


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    number = 200 if quick else 1_000

    def timed(call: Stage) -> Sample:
        return partial(by_hand.call_in_turn, call, number, lambda value: BRANCHES * value)

    async with engine.deploy(fan_out) as service, engine.deploy(suspending_fan_out) as suspending:
        yield {
            "run": timed(_run(fan_out)),
            "gather": timed(by_hand.gather_and_join(pass_on_by_hand, BRANCHES)),
            "deployed": timed(service),
            "run, suspending": timed(_run(suspending_fan_out)),
            "gather, suspending": timed(by_hand.gather_and_join(by_hand.suspend_once, BRANCHES)),
            "deployed, suspending": timed(suspending),
        }


LIMITS = Limits(must=1.5, aim=1.0)
# The limit is for uvloop, whose turns cost a third of asyncio's. On asyncio, the ratio is a quarter less.
SUSPENDING = Limits(must=1.35, aim=1.0)

FAN_OUT = Workload(
    name="fan-out",
    contenders=contenders,
    control="gather",
    rows=(
        Row(title="fan-out of 32 and join, engine.run / gather", subject="run", reference="gather", limits=LIMITS),
        Row(title="fan-out of 32 and join, deployed / gather", subject="deployed", reference="gather", limits=LIMITS),
        Row(
            title="the same where every branch suspends once, engine.run / gather",
            subject="run, suspending",
            reference="gather, suspending",
            limits=SUSPENDING,
        ),
        Row(
            title="the same where every branch suspends once, deployed / gather",
            subject="deployed, suspending",
            reference="gather, suspending",
            limits=SUSPENDING,
        ),
    ),
)
