"""Feeds that workers read: order, snapshots and values are the same as on one machine."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import cluster, data, engine, testing

WORKERS = cluster.ray(workers=3, name="three readers")


class Pictures:
    """A source that opens no file before it is read, so it can be sent to a worker."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).random(20_000 if index % 2 else 5)


@pytest.fixture(autouse=True)
def in_threads() -> Iterator[None]:
    with testing.workers_in_threads(WORKERS):
        yield


def feed(runs_on: Any) -> Any:
    @ps.graph
    async def batches(epochs: int) -> AsyncIterator[Any]:
        records = data.order(Pictures(), shuffle_seed=7, epochs=epochs)
        read = records >> data.read(Pictures(), runs_on=runs_on, concurrency=6)
        return read >> data.shuffled(8, seed=1) >> seeded

    return batches


@data.filtered
def seeded(record: Any) -> bool:
    return bool(record.seed % 5)


def found(records: list[Any]) -> list[tuple[int, int, int, int, bytes]]:
    return [(one.epoch, one.position, one.index, one.seed, one.value.tobytes()) for one in records]


async def test_workers_give_the_same_records_in_the_same_order() -> None:
    async with engine.Engine() as e:
        there, here = [[record async for record in e.stream(feed(runs_on)(2))] for runs_on in (WORKERS, "thread")]
    assert found(there) == found(here)
    assert len(there) > 40


@pytest.mark.parametrize(("before", "after"), [(WORKERS, WORKERS), (WORKERS, "thread"), ("thread", WORKERS)])
async def test_a_feed_goes_on_behind_a_cut_wherever_it_is_read(before: Any, after: Any, tmp_path: Path) -> None:
    whole = [record async for record in engine.stream(feed("thread")(1))]
    checkpoint = ps.Checkpoint(tmp_path, every_records=5)
    async with engine.Engine() as e:
        records: list[Any] = []
        async with e.stream(feed(before)(1), checkpoint=checkpoint) as first:
            async for record in first:
                records.append(record)
                if len(records) == 12:
                    await first.checkpoint()
                    break
        async with e.stream(feed(after)(1), checkpoint=checkpoint) as rest:
            records += [record async for record in rest]
    assert found(records) == found(whole)


async def test_a_record_that_cannot_be_read_says_which() -> None:
    class Broken(Pictures):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise OSError("no such picture")
            return super().__getitem__(index)

    @ps.graph
    async def read() -> AsyncIterator[Any]:
        return data.order(Broken()) >> data.read(Broken(), runs_on=WORKERS)

    with pytest.raises(OSError, match="no such picture") as raised:
        async with engine.Engine() as e:
            _ = [record async for record in e.stream(read())]
    assert any("position 3 of epoch 0, index 3 of 40" in note for note in raised.value.__notes__)


async def test_a_source_above_1_mb_is_refused_and_travels_as_a_value_of_the_graph() -> None:
    large = np.ones((4, 100_000))

    @ps.graph
    async def taken_along() -> AsyncIterator[Any]:
        return data.order(large) >> data.read(large, runs_on=WORKERS)

    @ps.graph
    async def given(source: Any) -> AsyncIterator[Any]:
        return data.order(source) >> data.read(source, runs_on=WORKERS)

    async with engine.Engine() as e:
        with pytest.raises(TypeError, match=r"node 'read' takes 3,200,\d{3} bytes along"):
            _ = [record async for record in e.stream(taken_along())]
        assert [record.value.sum() async for record in e.stream(given(large))] == [100_000.0] * 4


def test_another_place_is_refused() -> None:
    place: Any = "process"
    with pytest.raises(ps.OptionsError, match="'thread', 'loop', or workers"):
        data.read(Pictures(), runs_on=place)
