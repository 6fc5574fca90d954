"""One tiny kernel: the extra cost of an await above a blocking call."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median

import jax
import numpy as np

import penstock as ps
from penstock import devices, engine
from penstock.devices import select

from ..baselines.calls import median_call_seconds
from ..baselines.device_thread import bare, one_by_one, promising
from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .device import DEVICE
from .spinning import awake_cores


def tiny(x: jax.Array) -> jax.Array:
    return x * 2 + 1


node = ps.device_node(device=DEVICE)(tiny)


@ps.graph
async def call(x: jax.Array) -> jax.Array:
    return node(x)


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    calls = 200 if quick else 1_000
    device = select(DEVICE)
    array = jax.device_put(np.ones(16, np.float32), device)
    compiled = jax.jit(tiny)
    bound = devices.actor(DEVICE).bind(tiny)

    def blocking_seconds() -> float:
        seconds: list[float] = []
        for _ in range(calls):
            began = time.perf_counter()
            compiled(array).block_until_ready()
            seconds.append(time.perf_counter() - began)
        return median(seconds)

    async def added_us(call: Callable[[], Awaitable[object]]) -> float:
        """Return how many microseconds an awaited call takes more than a blocking call."""
        return 1e6 * (await median_call_seconds(call, calls) - blocking_seconds())

    def by_actor() -> Awaitable[float]:
        return added_us(lambda: bound(array))

    def to_thread() -> Awaitable[float]:
        return added_us(lambda: asyncio.to_thread(lambda: compiled(array).block_until_ready()))

    async def hop() -> float:
        with bare() as thread:
            return 1e6 * await median_call_seconds(lambda: thread.submit(None), calls)

    async def awake() -> float:
        with awake_cores():
            return await by_actor()

    async def awake_hop() -> float:
        with awake_cores():
            return await hop()

    async def blocking() -> float:
        return 1e6 * blocking_seconds()

    async with engine.deploy(call) as service:
        with one_by_one(compiled) as thread, promising(compiled) as promised:
            yield {
                "actor": by_actor,
                "awake": awake,
                "awake hop": awake_hop,
                "service": lambda: added_us(lambda: service(array)),
                "by hand": lambda: added_us(lambda: thread.submit(array)),
                "by hand, with promises": lambda: added_us(lambda: promised.run(array)),
                "blocking": blocking,
                "to_thread": to_thread,
                "hop": hop,
            }


LIMITS = Limits(must=60, aim=35, at_least=False)

LATENCY = Workload(
    name="latency",
    contenders=contenders,
    rows=(
        Row(
            title="one tiny kernel, added to a blocking call",
            subject="actor",
            unit="us",
            limits=LIMITS,
        ),
        Row(title="the same while no core goes to sleep", subject="awake", unit="us", limits=LIMITS),
        Row(
            title="one tiny kernel over a thread written by hand",
            subject="actor",
            reference="by hand",
            limits=Limits(must=1.0, aim=0.8, at_least=False),
        ),
        Row(
            title="a thread by hand with promises over the one without",
            subject="by hand, with promises",
            reference="by hand",
        ),
        Row(title="the same through a deployment", subject="service", unit="us"),
        Row(title="the blocking call by a thread written by hand", subject="by hand", unit="us"),
        Row(title="the blocking call by asyncio.to_thread", subject="to_thread", unit="us"),
        Row(title="a bare hop to a thread and back", subject="hop", unit="us"),
        Row(title="a bare hop while no core goes to sleep", subject="awake hop", unit="us"),
        Row(title="the blocking call itself", subject="blocking", unit="us"),
    ),
)
