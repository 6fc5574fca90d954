"""Types of streams as values, as mypy and pyright must infer them: streamed answers, and stages of data."""

from collections.abc import AsyncIterator
from typing import Any, assert_type

import penstock as ps
from penstock import data, engine


@ps.node
async def words(text: str) -> AsyncIterator[str]:
    for word in text.split():
        yield word


@ps.node(capacity=2)
async def pairs(values: AsyncIterator[str]) -> AsyncIterator[list[str]]:
    async for value in values:
        yield [value, await anext(values)]


@ps.node
def length_of(word: str) -> int:
    return len(word)


@ps.node
def add(total: int, number: int) -> int:
    return total + number


@ps.graph
async def paired(texts: AsyncIterator[str]) -> AsyncIterator[list[str]]:
    return pairs(texts)


@ps.graph
async def size(text: str) -> int:
    async def later(total: int, number: int) -> int:
        return add(total, number)

    lengths = ps.map_each(length_of, words(text))
    assert_type(lengths, AsyncIterator[int])
    assert_type(await ps.fold(later, lengths, 0), int)
    return await ps.fold(add, ps.map_each(length_of, words(text)), 0, on_error="skip", name="add")


async def opened(texts: AsyncIterator[str]) -> None:
    async with engine.stream(paired(texts), progress=True) as stream:
        assert_type(stream, engine.Stream[list[str]])
    async with engine.deploy(paired, max_in_flight=64) as service, service.stream(paired(texts), priority=1) as values:
        assert_type(values, engine.Stream[list[str]])
        await values.wait_started()
        assert_type([value async for value in values], list[list[str]])
    assert_type([value async for value in await paired(texts)], list[list[str]])


@ps.node
def length(record: data.Record[bytes]) -> int:
    return len(record.value)


def feeds(blobs: list[bytes]) -> None:
    """Stages keep the types of records and values."""
    records = data.order(blobs, shuffle_seed=1)
    assert_type(records, AsyncIterator[data.Record[None]])
    read_records = records >> data.read(blobs)
    assert_type(read_records, AsyncIterator[data.Record[bytes]])
    assert_type(read_records >> data.prefetched(4), AsyncIterator[data.Record[bytes]])
    left, right = read_records >> data.split(2)
    assert_type((left, right) >> data.merged(), AsyncIterator[data.Record[bytes]])
    assert_type(ps.map_each(length, left), AsyncIterator[int])
    assert_type(ps.map_each(length, right, on_error="return"), AsyncIterator[engine.Outcome[int]])
    batches = data.order(blobs, batch=4)
    assert_type(batches, AsyncIterator[data.Records[None]])
    assert_type(data.order(iter(blobs)), AsyncIterator[data.Record[bytes]])


def is_long(blob: bytes) -> bool:
    return len(blob) > 3


async def has_text(record: data.Record[bytes]) -> bool:
    return record.value != b""


def total(blobs: list[bytes]) -> int:
    return sum(map(len, blobs))


@ps.node
class Unique:
    def __call__(self, blob: bytes) -> bytes:
        return blob


@ps.node
class Size(ps.Actor[bytes, int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[bytes, int]], /) -> None:
        while True:
            work = await inbox.get()
            work.finish(len(work.value))


unique = Unique()
measured = Size()
limited = ps.RateLimit(per_second=10_000)


def stages_with_functions(blobs: AsyncIterator[bytes], records: AsyncIterator[data.Record[bytes]]) -> None:
    """Stages that call a function keep the types of values, whether it is a lambda, a function or a class."""
    assert_type(blobs >> data.filtered(lambda blob: len(blob) > 3), AsyncIterator[Any])
    assert_type(blobs >> data.filtered(is_long), AsyncIterator[bytes])
    assert_type(data.filtered(is_long)(blobs), AsyncIterator[bytes])
    assert_type(records >> data.filtered(lambda record: record.index > 1), AsyncIterator[Any])
    assert_type(records >> data.filtered(has_text), AsyncIterator[data.Record[bytes]])
    assert_type(blobs >> data.batched(2), AsyncIterator[Any])
    assert_type(blobs >> data.batched(2, collate=total), AsyncIterator[int])
    assert_type(records >> data.batched(2, collate=total), AsyncIterator[int])
    assert_type(blobs >> data.batched(2, collate=list[bytes]), AsyncIterator[list[bytes]])
    assert_type(records >> data.batched(2, drop_remainder=True, collate=list[bytes]), AsyncIterator[list[bytes]])
    assert_type(data.batched(2, collate=set[bytes])(blobs), AsyncIterator[set[bytes]])
    assert_type(blobs >> data.batched(2, collate=lambda values: values[0]), AsyncIterator[Any])


@ps.graph
async def sizes(blobs: AsyncIterator[bytes]) -> AsyncIterator[list[int]]:
    """A graph that type-checks, and that a test also runs."""
    chosen = ps.map_each(unique, blobs) >> data.filtered(lambda blob: len(blob) > 1)
    return chosen >> limited >> measured >> data.batched(2, collate=list[int])


@ps.graph
async def chained(blobs: AsyncIterator[bytes]) -> AsyncIterator[int]:
    return blobs >> limited >> measured
