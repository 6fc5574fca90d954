"""Grain: a `MapDataset` of plain functions, read inline or by threads.

Grain takes no async functions and answers no calls, so `io` and `call` do not apply.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grain

from ..baselines import pools
from ..harness import Contenders
from .shared import STAGES, THREAD_ITEMS, THREADS, per_item, same

INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
TWO_THREADS = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=4 * THREADS)


def read_seconds(dataset, items: int, options) -> float:
    started = time.perf_counter()
    total = sum(dataset.to_iter_dataset(options))
    assert total == sum(range(items))
    return time.perf_counter() - started


async def chain_seconds(items: int, options) -> float:
    dataset = grain.MapDataset.range(items)
    for _ in range(STAGES):
        dataset = dataset.map(same)
    return read_seconds(dataset, items, options)


async def threads_seconds() -> float:
    dataset = grain.MapDataset.range(THREAD_ITEMS).map(pools.release_by_sleeping)
    return read_seconds(dataset, THREAD_ITEMS, TWO_THREADS)


@asynccontextmanager
async def open_chain(quick: bool) -> AsyncIterator[Contenders]:
    items = 500 if quick else 2_000
    yield {
        "Grain, inline": per_item(items, lambda items: chain_seconds(items, INLINE)),
        "Grain, 16 threads": per_item(items, lambda items: chain_seconds(items, grain.ReadOptions())),
    }


@asynccontextmanager
async def open_threads(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    yield {"Grain": threads_seconds}


WORKLOADS = {"chain": open_chain, "threads": open_threads}
