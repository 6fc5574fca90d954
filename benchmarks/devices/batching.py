"""64 concurrent callers of a small model, batched and one by one."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import engine

from ..baselines.device_thread import batched as batched_by_hand
from ..baselines.device_thread import one_by_one as one_by_one_by_hand
from ..baselines.device_thread import promising
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits
from .device import DEVICE

CALLERS = 64
# A small recurrent model: many steps with little arithmetic each, as in decoders and policies. A batch pays the fixed
# cost of a step once.
WIDTH = 64
STEPS = 64


def _weights() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / WIDTH, jnp.float32)


@ps.resource
async def weights() -> AsyncIterator[jax.Array]:
    yield _weights()


def model(parameters: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, STEPS, lambda _, state: jnp.tanh(state @ parameters + x), x)


one_by_one = ps.device_node(device=DEVICE, name="one_by_one")(model)
batched = ps.device_node(device=DEVICE, name="batched", batch=ps.Batch(CALLERS))(model)


@ps.graph
async def call_one(x: jax.Array) -> jax.Array:
    return one_by_one(await weights(), x)


@ps.graph
async def call_batched(x: jax.Array) -> jax.Array:
    return batched(await weights(), x)


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    calls = 10 if quick else 40
    rows = [np.full(WIDTH, number, np.float32) for number in range(CALLERS)]
    stacked = np.stack(rows)
    parameters = _weights()
    compiled, vmapped = jax.jit(model), jax.jit(jax.vmap(model, in_axes=(None, 0)))

    async def plain() -> float:
        began = time.perf_counter()
        for row in rows:
            np.asarray(compiled(parameters, row))
        return CALLERS / (time.perf_counter() - began)

    async def plain_batch() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            np.asarray(vmapped(parameters, stacked))
        return CALLERS * calls / (time.perf_counter() - began)

    def throughput(call: Callable[[Any], Awaitable[Any]]) -> Sample:
        async def caller(row: Any) -> None:
            for _ in range(calls):
                await call(row)

        async def sample() -> float:
            began = time.perf_counter()
            await asyncio.gather(*map(caller, rows))
            return CALLERS * calls / (time.perf_counter() - began)

        return sample

    async with engine.deploy(call_one, call_batched, max_in_flight=2 * CALLERS) as service:
        with (
            batched_by_hand(partial(vmapped, parameters), CALLERS) as together,
            one_by_one_by_hand(partial(compiled, parameters)) as alone,
            promising(partial(vmapped, parameters), CALLERS) as promised,
        ):
            yield {
                "batched": throughput(lambda row: service.run(call_batched(row))),
                "one by one": throughput(lambda row: service.run(call_one(row))),
                "batched by hand": throughput(together.submit),
                "batched by hand, with promises": throughput(promised.run),
                "one by one by hand": throughput(alone.submit),
                "plain batch": plain_batch,
                "plain": plain,
            }


BATCHING = Workload(
    name="batching",
    contenders=contenders,
    control="batched",
    rows=(
        Row(
            title="64 callers, batched over one by one",
            subject="batched",
            reference="one by one",
            unit="times",
            limits=Limits(must=5, aim=8, at_least=True),
        ),
        Row(
            title="64 callers of a thread written by hand, batched over one by one",
            subject="batched by hand",
            reference="one by one by hand",
            unit="times",
        ),
        Row(
            title="64 rows by plain JAX, together over one by one",
            subject="plain batch",
            reference="plain",
            unit="times",
        ),
        Row(
            title="64 callers, batched, over a thread written by hand",
            subject="batched",
            reference="batched by hand",
            unit="times",
            limits=Limits(must=0.65, aim=0.85, at_least=True),
        ),
        Row(
            title="64 callers of that thread by hand with promises, over the one without",
            subject="batched by hand, with promises",
            reference="batched by hand",
            unit="times",
        ),
        Row(title="64 callers, batched", subject="batched", unit="calls/s"),
        Row(title="64 callers, one by one", subject="one by one", unit="calls/s"),
        Row(title="64 callers of a thread written by hand, batched", subject="batched by hand", unit="calls/s"),
        Row(title="64 callers of a thread written by hand, one by one", subject="one by one by hand", unit="calls/s"),
    ),
)
