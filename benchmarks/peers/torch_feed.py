"""PyTorch's DataLoader: a dataset that loads in two worker processes, or in this process for data in memory."""

from collections.abc import AsyncIterator, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .feed_work import FILES_BATCH, RECORDS_BATCH, load


class Files(Dataset):
    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return load(self._paths[index])


class Endless(Sampler):
    """Sample every epoch in another order, without a gap between two epochs."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        random = torch.Generator().manual_seed(0)
        while True:
            yield from torch.randperm(self._length, generator=random).tolist()


async def read_files(paths: list[str]) -> AsyncIterator[list[torch.Tensor]]:
    for batch in DataLoader(Files(paths), batch_size=FILES_BATCH, sampler=Endless(len(paths)), num_workers=2):
        yield batch


async def read_memory(source: np.ndarray) -> AsyncIterator[torch.Tensor]:
    for batch in DataLoader(source, batch_size=RECORDS_BATCH, sampler=Endless(len(source))):
        yield batch


WORKLOADS = {"files": {"DataLoader": read_files}, "memory": {"DataLoader": read_memory}}
