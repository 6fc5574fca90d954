"""Device stages of a stream, and chunks of whole arrays, against one `jax.jit` by hand."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import data, engine

from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .device import repeats

# Opening a stream takes 2 ms: so many batches of 1 ms that this is 1 % of a sample.
BATCH, BATCHES, LONG_BATCHES, WIDTH = 64, 312, 200, 512
SMALL = np.random.default_rng(0).normal(size=(BATCH * BATCHES, 64)).astype(np.float32)
LARGE = np.random.default_rng(1).normal(size=(BATCH * LONG_BATCHES, WIDTH)).astype(np.float32)
WEIGHTS = np.random.default_rng(2).normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
TALL = np.random.default_rng(3).normal(size=(10_000, 1_000)).astype(np.float32)
CHUNK = 250


def small_step(number: int) -> Callable[[Any], Any]:
    return lambda row: jnp.tanh(row) + number


def large_step(number: int, count: int) -> Callable[[Any], Any]:
    def step(rows: Any) -> Any:
        for _ in range(count):
            rows = jnp.tanh(rows @ WEIGHTS)
        return rows + number

    return step


def large_steps(count: int) -> list[Callable[[Any], Any]]:
    return [large_step(number, count) for number in range(4)]


def together(steps: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return function


value_of = ps.node(name="value")(lambda records: records.value)
SMALL_STEPS = [small_step(number) for number in range(4)]
small_nodes = [ps.device_node(name=f"small_{number}")(one).vmap() for number, one in enumerate(SMALL_STEPS)]


def feed(rows: np.ndarray, *stages: Any) -> Any:
    @ps.graph
    async def batches() -> Any:
        values = data.order(rows, batch=BATCH) >> data.read(rows, runs_on="loop") >> value_of
        for stage in stages:
            values = values >> stage
        return values

    return batches


def composed(nodes: list[Any]) -> Any:
    whole = nodes[0]
    for node in nodes[1:]:
        whole = whole >> node
    return whole


async def seconds_of_feed(graph: Any, batches: int) -> float:
    began = time.perf_counter()
    async with engine.stream(graph()) as values:
        async for _ in values:
            pass
    return (time.perf_counter() - began) / batches


async def seconds_by_hand(function: Callable[[Any], Any], rows: np.ndarray) -> float:
    began = time.perf_counter()
    result: Any = None
    for start in range(0, len(rows), BATCH):
        result = function(rows[start : start + BATCH])
    result.block_until_ready()
    return (time.perf_counter() - began) / (len(rows) // BATCH)


@asynccontextmanager
async def stage_contenders(quick: bool) -> AsyncIterator[Contenders]:
    del quick  # a sample takes 50 ms
    count = repeats(lambda count: together(large_steps(count)), LARGE[:BATCH], 0.0005)
    large = large_steps(count)
    large_nodes = [ps.device_node(name=f"large_{number}")(one) for number, one in enumerate(large)]
    small_by_hand = partial(seconds_by_hand, jax.jit(together(SMALL_STEPS)), SMALL)
    small_composed = partial(seconds_of_feed, feed(SMALL, composed(small_nodes)), BATCHES)

    async def above_by_hand() -> float:
        return 1e6 * (await small_composed() - await small_by_hand())

    yield {
        "stages": partial(seconds_of_feed, feed(SMALL, *small_nodes), BATCHES),
        "composed": small_composed,
        "above": above_by_hand,
        "long stages": partial(seconds_of_feed, feed(LARGE, *large_nodes), LONG_BATCHES),
        "long by hand": partial(seconds_by_hand, jax.jit(together(large)), LARGE),
    }


STAGES = Workload(
    name="stages",
    contenders=stage_contenders,
    control="composed",
    rounds=(40, 10),
    rows=(
        Row(
            title="four device stages of a feed / the same composed beforehand",
            subject="stages",
            reference="composed",
            limits=Limits(must=1.1, aim=1.05),
        ),
        Row(
            title="a batch of the composed stage above one jax.jit of 16 µs",
            subject="above",
            unit="µs",
            limits=Limits(must=70, aim=40),
        ),
        Row(
            title="four stages of 1 ms together / one jax.jit",
            subject="long stages",
            reference="long by hand",
            limits=Limits(must=1.1, aim=1.05),
        ),
    ),
)

CHUNKED: tuple[Callable[[Any], Any], ...] = (jnp.tanh, lambda row: row * 2 + 1, lambda row: row.sum())
chunked = composed([
    ps.device_node(name=f"chunked_{number}")(one).vmap(batch_size=CHUNK) for number, one in enumerate(CHUNKED)
])  # fmt: skip


@asynccontextmanager
async def chunk_contenders(quick: bool) -> AsyncIterator[Contenders]:
    del quick  # the size must stay
    compiled = jax.jit(jax.vmap(together([*CHUNKED])))

    async def in_graph() -> float:
        began = time.perf_counter()
        await engine.run(chunked(TALL))
        return time.perf_counter() - began

    async def by_hand() -> float:
        began = time.perf_counter()
        np.concatenate([np.asarray(compiled(TALL[start : start + CHUNK])) for start in range(0, len(TALL), CHUNK)])
        return time.perf_counter() - began

    yield {"composed": in_graph, "by hand": by_hand}


COMPOSED_CHUNKS = Workload(
    name="composed-chunks",
    contenders=chunk_contenders,
    control="by hand",
    rounds=(40, 10),
    rows=(
        Row(
            title="three nodes of vmap(batch_size=250), composed / chunks of one jax.jit by hand",
            subject="composed",
            reference="by hand",
            limits=Limits(must=1.2, aim=1.1),
        ),
    ),
)
