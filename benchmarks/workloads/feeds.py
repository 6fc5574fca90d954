"""The cost of a feed for each record or token, without reading: a shuffled order, and rows of packed sequences."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

import penstock as ps
from penstock import data, engine

from ..harness import Contenders, Row, Workload
from ..summary import Limits

BILLION = range(10**9)
LENGTH = 1024


def sequences(count: int) -> list[np.ndarray]:
    """Return sequences with the lengths of texts: many short and few long sequences, 330 tokens on average."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(5.4, 0.9, count).astype(int).clip(1, 4 * LENGTH)
    return [random.integers(50_000, size=length, dtype=np.int32) for length in lengths]


@ps.graph
async def rows(texts: list[np.ndarray]) -> AsyncIterator[data.Packed]:
    records = data.order(texts, shuffle_seed=0) >> data.read(texts, runs_on="loop")
    return records >> data.packed(LENGTH)


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    records = 20_000 if quick else 100_000
    texts = sequences(1_000 if quick else 5_000)
    tokens = sum(map(len, texts))

    async def index() -> float:
        began = time.perf_counter()
        count = 0
        async for _ in data.order(BILLION, shuffle_seed=0):
            count += 1
            if count == records:
                break
        return 1e6 * (time.perf_counter() - began) / records

    async def packed() -> float:
        began = time.perf_counter()
        async with engine.stream(rows(texts)) as stream:
            packed = sum([int((row.segment_ids > 0).sum()) async for row in stream])
        assert packed == tokens
        return tokens / (time.perf_counter() - began) / 1e6

    yield {"index": index, "packed": packed}


FEEDS = Workload(
    name="feeds",
    contenders=contenders,
    rows=(
        Row(
            title="the next record of a billion in a shuffled order",
            subject="index",
            unit="us",
            limits=Limits(must=2.0),
        ),
        Row(
            title="sequences of 330 tokens ordered, read and packed into rows of 1,024",
            subject="packed",
            unit="M tokens/s",
            limits=Limits(must=2.0, at_least=True),
        ),
    ),
)
