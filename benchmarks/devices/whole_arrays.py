"""Work that moves into one device node: whole arrays and loops; and buffers that are reused."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import devices, engine

from ..baselines.calls import median_call_seconds
from ..harness import Contenders, Row, Workload
from ..summary import Limits

ROWS, COLUMNS, CHUNK = 10_000, 1_000, 256
STEPS = 200
LARGE_FLOATS, LARGE_STEPS = 16_000_000, 10


def encoding(row: Any) -> Any:
    return jnp.tanh(row * 2.0).sum() + row[0]


encode = ps.device_node(encoding)
encode_batch = ps.device_node(batch=ps.Batch(CHUNK))(encoding)
at_once, in_chunks = encode.vmap(), encode.vmap(batch_size=CHUNK)


@ps.graph
async def encoded_at_once(rows: Any) -> Any:
    return at_once(rows)


@ps.graph
async def encoded_in_chunks(rows: Any) -> Any:
    return in_chunks(rows)


@ps.graph
async def encoded_each(rows: Any) -> Any:
    return await ps.map_each(encode_batch, rows)


def chunks_by_hand(compiled: Any, rows: Any) -> Any:
    """Compute chunks with the usual loop by hand: the last chunk is filled up, so that one program is enough."""
    parts: list[Any] = []
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        missing = CHUNK - len(chunk)
        parts.append(compiled(np.concatenate([chunk, np.repeat(chunk[-1:], missing, 0)]) if missing else chunk))
    return np.concatenate(parts)[: len(rows)]


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    del quick  # its size is the point
    rows = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    compiled = jax.jit(jax.vmap(encoding))

    async def in_graph(service: Any) -> float:
        began = time.perf_counter()
        jax.block_until_ready(await service(rows))
        return time.perf_counter() - began

    async def by_hand() -> float:
        began = time.perf_counter()
        compiled(rows).block_until_ready()
        return time.perf_counter() - began

    async def by_hand_in_chunks() -> float:
        began = time.perf_counter()
        chunks_by_hand(compiled, rows)
        return time.perf_counter() - began

    async with (
        engine.deploy(encoded_at_once) as once,
        engine.deploy(encoded_in_chunks) as chunked,
        engine.deploy(encoded_each) as each,
    ):
        yield {
            "at once": partial(in_graph, once),
            "at once, by hand": by_hand,
            "in chunks": partial(in_graph, chunked),
            "in chunks, by hand": by_hand_in_chunks,
            "row by row": partial(in_graph, each),
        }


WHOLE_ARRAYS = Workload(
    name="whole-arrays",
    contenders=contenders,
    control="in chunks, by hand",
    rounds=(40, 10),
    rows=(
        Row(
            title="vmap of 10,000 rows of 1,000 floats at once / jax.jit(jax.vmap)",
            subject="at once",
            reference="at once, by hand",
            limits=Limits(must=1.05),
        ),
        Row(
            title="the same in chunks of 256 / the loop by hand",
            subject="in chunks",
            reference="in chunks, by hand",
            limits=Limits(must=1.1),
        ),
        Row(
            title="the same row by row, with map_each and Batch(256) / the loop by hand",
            subject="row by row",
            reference="in chunks, by hand",
        ),
    ),
)


def newton(x: Any) -> Any:
    """Return one step of a solver: a small step, as in decoders and in optimizers of few parameters."""
    return x - (x * x - 2.0) / (2.0 * x)


improved = ps.device_node(newton)


@ps.device_node
def improved_inside(x: Any) -> Any:
    return jax.lax.fori_loop(0, STEPS, lambda _, x: newton(x), x)


@ps.node
def goes_on(state: tuple[int, Any]) -> bool:
    return state[0] < STEPS


@ps.graph
async def improve(state: tuple[int, Any]) -> tuple[int, Any]:
    return count(state[0]), improved(state[1])


@ps.node
def count(step: int) -> int:
    return step + 1


@ps.graph
async def outside(x: Any) -> Any:
    return (await ps.while_loop(goes_on, improve, (0, x)))[1]


@ps.graph
async def inside(x: Any) -> Any:
    return improved_inside(x)


@asynccontextmanager
async def loop_contenders(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    x = jnp.linspace(1.0, 2.0, COLUMNS)

    async def microseconds(service: Any) -> float:
        async def call() -> None:
            jax.block_until_ready(await service(x))

        return await median_call_seconds(call, 5) / STEPS * 1e6

    device = devices.actor("auto")
    steps = {name: device.bind(newton, donate_argnums=donated) for name, donated in (("fresh", ()), ("reused", (0,)))}

    async def of_a_large_step(step: Any) -> float:
        state = jax.device_put(np.ones(LARGE_FLOATS, np.float32))
        began = time.perf_counter()
        for _ in range(LARGE_STEPS):
            state = await step(state)
        return (time.perf_counter() - began) / LARGE_STEPS

    async with engine.deploy(outside) as around, engine.deploy(inside) as within:
        yield {
            "outside": partial(microseconds, around),
            "inside": partial(microseconds, within),
            **{name: partial(of_a_large_step, step) for name, step in steps.items()},
        }


DEVICE_LOOP = Workload(
    name="device-loop",
    contenders=loop_contenders,
    control="inside",
    rows=(
        Row(title="a step of a loop whose body is a device node", subject="outside", unit="µs"),
        Row(title="the same loop inside of the node", subject="inside", unit="µs"),
        Row(title="a step of 64 MB, donated / with a new buffer each time", subject="reused", reference="fresh"),
    ),
)
