"""Buffers: a state whose memory the next state takes, and batches that a program takes without a copy."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import data, devices, engine

from ..harness import Contenders, Row, Workload
from ..summary import Limits

FLOATS, STEPS = 16_000_000, 30
ROWS, COLUMNS, BATCHES = 64, 65_536, 12  # 16 MB a batch


def added(total: Any, x: Any) -> Any:
    return total + x


def largest(batch: Any) -> Any:
    return batch.max(1)


@ps.node
async def numbers(count: int) -> AsyncIterator[Any]:
    for number in range(count):
        yield np.float32(number)


def fold_of(donate: bool) -> Callable[[Any], Any]:
    step = ps.device_node(donate=donate)(added)

    @ps.graph
    async def folded(total: Any) -> Any:
        return await ps.fold(step, numbers(STEPS), total)

    return folded


@ps.node
async def rows(count: int) -> AsyncIterator[Any]:
    row = np.arange(COLUMNS, dtype=np.float32)
    for _ in range(count):
        yield row


largest_of = ps.device_node(largest)


@ps.graph
async def of_batches(count: int) -> AsyncIterator[Any]:
    return ps.map_each(largest_of, rows(count) >> data.batched(ROWS), concurrency=1)


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    del quick  # its size is the point
    given = jax.device_put(jnp.zeros(FLOATS, jnp.float32), devices.select("auto"))
    bound = devices.actor("auto").bind(added, donate_argnums=(0,))
    compiled = jax.jit(largest)
    row = np.arange(COLUMNS, dtype=np.float32)

    async def in_fold(service: Any) -> float:
        began = time.perf_counter()
        jax.block_until_ready(await service(given))
        return (time.perf_counter() - began) / STEPS

    async def in_actor() -> float:
        began = time.perf_counter()
        state = jnp.copy(given)  # as in the fold, so that the caller's array stays unchanged
        for number in range(STEPS):
            state = await bound(state, np.float32(number))
        return (time.perf_counter() - began) / STEPS

    async def of_collated() -> float:
        began = time.perf_counter()
        async with engine.stream(of_batches(BATCHES * ROWS)) as stream:
            assert len([result async for result in stream]) == BATCHES
        return (time.perf_counter() - began) / BATCHES

    async def of_stacked() -> float:
        began = time.perf_counter()
        for _ in range(BATCHES):
            compiled(np.stack([row] * ROWS)).block_until_ready()
        return (time.perf_counter() - began) / BATCHES

    async with engine.deploy(fold_of(donate=True)) as over, engine.deploy(fold_of(donate=False)) as beside:
        yield {
            "fold": partial(in_fold, over),
            "fold, new buffers": partial(in_fold, beside),
            "actor": in_actor,
            "collated": of_collated,
            "stacked by hand": of_stacked,
        }


BUFFERS = Workload(
    name="buffers",
    contenders=contenders,
    control="actor",
    rounds=(40, 6),
    rows=(
        Row(
            title="a step of a fold of 64 MB, donated / the actor with donate_argnums",
            subject="fold",
            reference="actor",
            limits=Limits(must=1.25, aim=1.1),
        ),
        Row(title="the same, donated / with a new buffer each time", subject="fold", reference="fold, new buffers"),
        Row(
            title="a batch of 16 MB, collated and reduced on the device / np.stack and jit by hand",
            subject="collated",
            reference="stacked by hand",
        ),
    ),
)
