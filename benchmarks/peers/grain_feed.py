"""Grain: the whole pipeline in two worker processes, and inline for records in memory."""

from collections.abc import AsyncIterator
from functools import partial

import grain
import numpy as np

from .feed_work import FILES_BATCH, RECORDS_BATCH, load

TWO_WORKERS = grain.MultiprocessingOptions(num_workers=2)
# By default, Grain has 16 threads in each worker, which share one interpreter. Its guide recommends 0 threads for data
# in memory.
ONE_THREAD = grain.ReadOptions(num_threads=1)
INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


async def read_files(paths: list[str], options: grain.ReadOptions) -> AsyncIterator[tuple[np.ndarray, np.ndarray]]:
    dataset = grain.MapDataset.source(paths).seed(0).shuffle().repeat().map(load)
    batches = iter(dataset.to_iter_dataset(options).batch(FILES_BATCH).mp_prefetch(TWO_WORKERS))
    try:
        for batch in batches:
            yield batch
    finally:
        batches.close()


async def read_map(source: np.ndarray) -> AsyncIterator[np.ndarray]:
    for batch in grain.MapDataset.source(source).seed(0).shuffle().repeat().batch(RECORDS_BATCH):
        yield batch


async def read_iter(source: np.ndarray) -> AsyncIterator[np.ndarray]:
    for batch in (
        grain.MapDataset.source(source).seed(0).shuffle().repeat().to_iter_dataset(INLINE).batch(RECORDS_BATCH)
    ):
        yield batch


WORKLOADS = {
    "files": {
        "Grain": partial(read_files, options=ONE_THREAD),
        "Grain, 16 threads": partial(read_files, options=grain.ReadOptions()),
    },
    "memory": {"Grain": read_map, "Grain, IterDataset": read_iter},
}
