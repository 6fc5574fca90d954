"""SPDL: a `PipelineBuilder` chain, which runs on a loop in a thread of its own; once with defaults, once without hooks.

A pipeline has no call that returns one answer, so the fan-out does not apply.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from spdl.pipeline import AsyncQueue, PipelineBuilder

from ..baselines import pools
from ..baselines.chain import BUFFER, pass_on
from ..harness import Contenders
from .shared import IO_IN_FLIGHT, IO_ITEMS, STAGES, THREAD_ITEMS, THREADS, per_item

LEAN = {"queue_class": AsyncQueue, "task_hook_factory": lambda *_: []}


def pipeline_seconds(builder: PipelineBuilder, items: int, *, num_threads: int = 1, **options: object) -> float:
    total = 0
    started = time.perf_counter()
    pipeline = builder.add_sink(BUFFER).build(num_threads=num_threads, **options)
    with pipeline.auto_stop():
        for value in pipeline.get_iterator(timeout=60):
            total += value
    assert total == sum(range(items))
    return time.perf_counter() - started


async def chain_seconds(items: int, **options: object) -> float:
    builder = PipelineBuilder().add_source(range(items))
    for _ in range(STAGES):
        builder.pipe(pass_on)
    return pipeline_seconds(builder, items, **options)


async def io_seconds(**options: object) -> float:
    builder = PipelineBuilder().add_source(range(IO_ITEMS)).pipe(pools.wait_for_io, concurrency=IO_IN_FLIGHT)
    return pipeline_seconds(builder, IO_ITEMS, **options)


async def threads_seconds(**options: object) -> float:
    builder = PipelineBuilder().add_source(range(THREAD_ITEMS)).pipe(pools.release_by_sleeping, concurrency=THREADS)
    return pipeline_seconds(builder, THREAD_ITEMS, num_threads=THREADS, **options)


@asynccontextmanager
async def open_chain(quick: bool) -> AsyncIterator[Contenders]:
    items = 200 if quick else 1_000
    yield {
        "SPDL": per_item(items, chain_seconds),
        "SPDL, lean": per_item(items, lambda items: chain_seconds(items, **LEAN)),
    }


@asynccontextmanager
async def open_io(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    yield {"SPDL": io_seconds, "SPDL, lean": lambda: io_seconds(**LEAN)}


@asynccontextmanager
async def open_threads(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    yield {"SPDL": threads_seconds, "SPDL, lean": lambda: threads_seconds(**LEAN)}


WORKLOADS = {"chain": open_chain, "io": open_io, "threads": open_threads}
