"""300 requests of random length: how many programs are compiled, at first and afterwards."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import devices, engine

from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .device import DEVICE

LENGTHS = tuple(random.Random(0).choices(range(1, 1_000), k=300))
# One size of batch, so that only the lengths make programs.
BATCH = devices.DeviceBatch(32, buckets=(32,), pad_axes={"tokens": 0})


def total(tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    return jnp.sum(tokens) if mask is None else jnp.sum(tokens * mask)


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    async def both() -> tuple[float, float]:
        node = ps.device_node(device=DEVICE, batch=BATCH)(total)

        @ps.graph
        async def request(tokens: jax.Array) -> jax.Array:
            return node(tokens)

        counts: list[int] = []
        async with engine.deploy(request, max_in_flight=len(LENGTHS)) as service:
            for _ in range(2):
                await asyncio.gather(*(service(np.ones(length, np.float32)) for length in LENGTHS))
                counts.append(node.compile_statistics().programs)
        return float(counts[0]), float(counts[1] - counts[0])

    async def first() -> float:
        return (await both())[0]

    async def second() -> float:
        return (await both())[1]

    yield {"first": first, "second": second}


COMPILATIONS = Workload(
    name="compilations",
    contenders=contenders,
    rounds=(3, 1),
    rows=(
        Row(
            title="300 random lengths, compilations of the first pass",
            subject="first",
            limits=Limits(must=10, aim=10, at_least=False),
        ),
        Row(
            title="the same, of the second pass",
            subject="second",
            limits=Limits(must=0, aim=0, at_least=False),
        ),
    ),
)
