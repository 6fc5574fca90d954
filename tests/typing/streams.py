"""Types of streams as values, as mypy and pyright must infer them: a streamed answer, and batches made in a graph."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypedDict, assert_type

import penstock as ps
from penstock import data, engine, testing


class Document(TypedDict):
    title: str
    text: str


@ps.node(timeout_seconds=2, retry=ps.Retry(attempts=2), concurrency=32)
async def fetch(source: str, query: str) -> list[Document]:
    await asyncio.sleep(0)
    return [{"title": source, "text": query}]


def nothing(error: Exception) -> list[Document]:
    return []


fetch_optional = fetch.with_policy(name="fetch_optional", fallback=nothing)


@ps.node
async def rerank(query: str, documents: list[list[Document]]) -> list[Document]:
    return sorted((d for found in documents for d in found), key=lambda d: -d["text"].count(query))


@ps.node
async def answer(query: str, documents: list[Document]) -> AsyncIterator[str]:
    for document in documents:
        yield document["title"] + "\n"


@ps.graph
async def rag(query: str) -> AsyncIterator[str]:
    found = [await fetch(source, query) for source in ("wiki", "docs", "mail", "code")]
    return answer(query, await rerank(query, [*found, await fetch_optional("web", query)]))


@ps.node(concurrency=64, runs_on="thread")
def read(path: Path) -> bytes:
    return path.read_bytes()


@ps.node(runs_on="process")
def decode(raw: bytes) -> list[int]:
    return list(raw[:16])


@ps.node(runs_on="thread")
def augment(image: list[int]) -> list[int]:
    return image[::-1]


@ps.node(capacity=2)
async def batches(images: AsyncIterator[list[int]]) -> AsyncIterator[list[list[int]]]:
    held: list[list[int]] = []
    async for image in images:
        held.append(image)
        if len(held) == 4:
            yield held
            held = []


@ps.node
class Train:
    async def __aenter__(self) -> "Train":
        self.steps = 0
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self.steps

    async def __call__(self, batch: list[list[int]]) -> float:
        self.steps += 1
        return self.steps / len(batch)


train = Train()


@ps.graph
async def epoch(paths: AsyncIterator[Path]) -> AsyncIterator[float]:
    images = ps.map_each(augment, ps.map_each(decode, ps.map_each(read, paths)))
    assert_type(images, AsyncIterator[list[int]])
    return ps.map_each(train, batches(images), concurrency=2)


@ps.node
def add_size(total: int, content: bytes) -> int:
    return total + len(content)


@ps.graph
async def size(paths: AsyncIterator[Path]) -> int:
    async def later(total: int, content: bytes) -> int:
        return add_size(total, content)

    assert_type(await ps.fold(later, ps.map_each(read, paths), 0), int)
    return await ps.fold(add_size, ps.map_each(read, paths), 0, on_error="skip", name="add")


async def files(folder: Path) -> AsyncIterator[Path]:
    for path in await asyncio.to_thread(lambda: sorted(folder.glob("*.py"))):
        yield path


async def losses(folder: Path) -> list[float]:
    async with engine.stream(epoch(files(folder)), progress=True) as stream:
        assert_type(stream, engine.Stream[float])
        return [loss async for loss in stream]


async def answers(query: str) -> list[str]:
    async def fake(source: str, query: str) -> list[Document]:
        return [{"title": source, "text": query}]

    with testing.replace(fetch, fake):
        async with engine.deploy(rag, max_in_flight=64) as service, service.stream(rag(query), priority=1) as tokens:
            assert_type(tokens, engine.Stream[str])
            await tokens.wait_started()
            return [token async for token in tokens]


async def without_an_engine(query: str) -> list[str]:
    return [token async for token in await rag(query)]


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


if __name__ == "__main__":
    print(asyncio.run(losses(Path(sys.argv[1]))))
