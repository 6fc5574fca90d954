"""Penstock: paths in a shuffled order, in batches; one call of a process node reads a batch."""

from collections.abc import AsyncIterator

import numpy as np

import penstock as ps
from penstock import data, engine

from .feed_work import FILES_BATCH, RECORDS_BATCH, load

Batch = tuple[np.ndarray, np.ndarray]


@ps.node(runs_on="process")
def load_all(paths: list[str]) -> Batch:
    loaded: Batch = data.collate([load(path) for path in paths])
    return loaded


@ps.graph
async def files(paths: list[str]) -> AsyncIterator[Batch]:
    records = data.order(paths, shuffle_seed=0, epochs=None) >> data.read(paths, runs_on="loop")
    return records >> data.batched(FILES_BATCH) >> load_all


@ps.graph
async def memory(source: np.ndarray) -> AsyncIterator[np.ndarray]:
    records = data.order(source, shuffle_seed=0, epochs=None) >> data.read(source, runs_on="loop")
    return records >> data.batched(RECORDS_BATCH)


@ps.node
def value_of(records: data.Records[np.ndarray]) -> np.ndarray:
    return records.value


@ps.graph
async def memory_in_batches(source: np.ndarray) -> AsyncIterator[np.ndarray]:
    batches = data.order(source, batch=RECORDS_BATCH, shuffle_seed=0, epochs=None)
    return batches >> data.read(source, runs_on="loop") >> value_of


async def read_files(paths: list[str]) -> AsyncIterator[Batch]:
    async with engine.stream(files(paths)) as batches:
        async for batch in batches:
            yield batch


async def read_memory(source: np.ndarray) -> AsyncIterator[np.ndarray]:
    async with engine.stream(memory(source)) as batches:
        async for batch in batches:
            yield batch


async def read_memory_in_batches(source: np.ndarray) -> AsyncIterator[np.ndarray]:
    async with engine.stream(memory_in_batches(source)) as batches:
        async for batch in batches:
            yield batch


WORKLOADS = {
    "files": {"Penstock": read_files},
    "memory": {"Penstock": read_memory, "Penstock, order(batch=)": read_memory_in_batches},
}
