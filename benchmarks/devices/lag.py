"""How long the event loop stands still while kernels run, and while a function is compiled."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import jax
import jax.numpy as jnp
import numpy as np

from penstock import devices

from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .device import DEVICE

SIZE = 512
PERIOD_SECONDS = 0.001


def kernel(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x) @ x


async def worst_lag_milliseconds(work: Callable[[], Awaitable[object]]) -> float:
    """Return the worst delay of a timer of 1 ms while some work runs, in milliseconds."""
    worst = 0.0
    task = asyncio.ensure_future(work())
    while not task.done():
        began = time.perf_counter()
        await asyncio.sleep(PERIOD_SECONDS)
        worst = max(worst, time.perf_counter() - began - PERIOD_SECONDS)
    await task
    return 1e3 * worst


@asynccontextmanager
async def kernels(quick: bool) -> AsyncIterator[Contenders]:
    actor = devices.actor(DEVICE)
    x = np.ones((SIZE, SIZE), np.float32) / SIZE

    async def run_kernels() -> None:
        await asyncio.gather(*(actor.run(kernel, x) for _ in range(64)))

    yield {"kernels": lambda: worst_lag_milliseconds(run_kernels)}


@asynccontextmanager
async def compiling(quick: bool) -> AsyncIterator[Contenders]:
    actor = devices.actor(DEVICE)
    number = 0

    async def compile_one() -> None:
        nonlocal number
        number += 1
        rows = number

        def deep(x: jax.Array) -> jax.Array:
            for _ in range(30):
                x = jnp.tanh(x) @ jnp.cos(x).T @ x
            return x

        await actor.run(deep, np.ones((rows, rows), np.float32))

    yield {"compiling": lambda: worst_lag_milliseconds(compile_one)}


KERNEL_LAG = Workload(
    name="kernel-lag",
    contenders=kernels,
    rows=(
        Row(
            title="worst lag of the loop while 64 kernels run",
            subject="kernels",
            unit="ms",
            limits=Limits(must=10, aim=5, at_least=False),
        ),
    ),
)
COMPILE_LAG = Workload(
    name="compile-lag",
    contenders=compiling,
    rows=(
        Row(
            title="worst lag of the loop while a function is compiled",
            subject="compiling",
            unit="ms",
            limits=Limits(must=40, aim=20, at_least=False),
        ),
    ),
)
