"""Loading and computing that take equally long: whether one hides behind the other."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import data, engine
from penstock.devices import select

from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .device import DEVICE

SIZE = 256


def compute(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 12, lambda _, y: jnp.tanh(y @ x), x)


step = ps.device_node(device=DEVICE, pure=False)(compute)


def loading_seconds(items: int, pause: float) -> float:
    began = time.perf_counter()
    for _ in range(items):
        time.sleep(pause)
    return time.perf_counter() - began


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    items = 30 if quick else 100
    x = np.ones((SIZE, SIZE), np.float32) / SIZE
    compiled = jax.jit(compute)
    placed = jax.device_put(x, select(DEVICE))
    compiled(placed).block_until_ready()
    seconds: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        compiled(placed).block_until_ready()
        seconds.append(time.perf_counter() - began)
    pause = median(seconds)

    @ps.node(runs_on="thread", concurrency=1)
    def load(number: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
        time.sleep(pause)  # what a disk or a network takes; it needs no processor
        return x

    @ps.graph
    async def train(number: int) -> jax.Array:
        return step(load(number))

    async def pipeline() -> float:
        began = time.perf_counter()
        async with engine.stream((train(number) for number in range(items)), max_in_flight=8) as results:
            async for _ in results:
                pass
        return time.perf_counter() - began

    class Slow:
        """Data that takes as long to read."""

        def __len__(self) -> int:
            return items

        def __getitem__(self, index: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
            time.sleep(pause)
            return x

    @ps.node
    def value_of(record: data.Record[jax.Array]) -> jax.Array:
        return record.value

    @ps.graph
    async def training(source: Slow) -> AsyncIterator[jax.Array]:
        placed = data.order(source, shuffle_seed=0) >> data.read(source) >> data.to_device(DEVICE)
        return placed >> value_of >> step

    async def feed() -> float:
        began = time.perf_counter()
        async with engine.stream(training(Slow())) as results:
            async for _ in results:
                pass
        return time.perf_counter() - began

    async def slower() -> float:
        """The slower of the two, by itself."""
        began = time.perf_counter()
        for _ in range(items):
            compiled(x).block_until_ready()
        computing = time.perf_counter() - began
        return max(computing, loading_seconds(items, pause))

    yield {"pipeline": pipeline, "feed": feed, "slower": slower}


OVERLAP = Workload(
    name="overlap",
    contenders=contenders,
    rows=(
        Row(
            title="load and compute of equal length, over the slower one",
            subject="pipeline",
            reference="slower",
            limits=Limits(must=1.1, aim=1.05, at_least=False),
        ),
        Row(
            title="the same as a feed, by data.to_device",
            subject="feed",
            reference="slower",
            limits=Limits(must=1.12, at_least=False),
        ),
    ),
)
