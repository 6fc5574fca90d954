"""Intervals of snapshots: the values that a kill loses, however far ahead the steps are, and the number of copies."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import penstock as ps
from penstock import data, engine
from penstock.engine import checkpoint, checkpoint_schedule
from tests.saving.exact import goes_on, ordered, over, taken, up_to

SOURCE = np.arange(4000)


@ps.node
async def slow_at_times(record: data.Record[Any]) -> int:
    for _ in range(40 * (record.index % 30 == 0)):
        await asyncio.sleep(0)
    return int(record.index)


@ps.graph
async def feed(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
    """Values wait in a shuffle, in a `map_each` of 32 items, and in batches that were read ahead."""
    values = ps.map_each(slow_at_times, records >> data.shuffled(64, seed=1), concurrency=32)
    return values >> data.batched(4) >> data.prefetched(200)


@pytest.mark.parametrize("read_ahead_at", [None, 5])
async def test_each_life_goes_on_from_the_last_multiple(tmp_path: Path, read_ahead_at: int | None) -> None:
    """This also holds for a life that begins with values that the life before had read ahead."""

    def make() -> Any:
        return feed(ordered(range(1600)))

    if read_ahead_at is not None:
        # No barrier is on its way here, so all values that the steps hold become unread values.
        async with engine.stream(make(), checkpoint=ps.Checkpoint(tmp_path, every_seconds=None)) as stream:
            assert len([value async for value in up_to(stream, read_ahead_at)]) == read_ahead_at
            while stream.statistics().submitted < 200:  # values that were read ahead count as well
                await asyncio.sleep(0)
            await stream.checkpoint()
    begins = await goes_on(make, tmp_path, *[30] * 8, every_values=23)
    assert begins == [read_ahead_at or 0, *(23 * life for life in range(1, 9))]


PIPELINES: dict[str, Callable[[Any], Any]] = {
    "one for one": lambda records: ps.map_each(slow_at_times, records),
    "batches": lambda records: records >> data.batched(8, collate=len),
    "packed": lambda records: ps.map_each(tokens, records) >> data.packed(16) >> data.batched(2),
    "some": lambda records: records >> data.filtered(lambda record: record.index % 3 > 0),
    "two of one": lambda records: records >> data.split(2) >> data.merged("round_robin"),
    "few, then all": lambda records: (
        records >> data.filtered(lambda record: record.position % 100 == 0 or record.position >= 2000)
    ),
}


@ps.node
def tokens(record: data.Record[Any]) -> Any:
    return np.arange(5 + record.index % 90)


@pytest.mark.parametrize(
    ("pipeline", "every", "most"),
    [
        ("one for one", 20, 20),
        ("batches", 20, 20),
        ("packed", 20, 25),
        ("some", 20, 25),
        ("two of one", 3, 3),
        ("few, then all", 20, 25 + 2 * 16),  # and as many as two streams hold
    ],
)
async def test_a_reader_meets_a_barrier_in_time(tmp_path: Path, pipeline: str, every: int, most: int) -> None:
    """At 20, 40 and 60 if a fixed number of records makes one value; otherwise at most a quarter later."""

    call = over(PIPELINES[pipeline], ordered(SOURCE))
    async with engine.stream(call, checkpoint=ps.Checkpoint(tmp_path, every_values=every)) as stream:
        async for _ in up_to(stream, 15 * every):
            await written(stream)
        shown = stream.statistics()
    assert shown.snapshots_skipped == 0
    assert shown.snapshots_saved >= (15 * every - 1) // most
    assert 0 < shown.snapshot_interval <= most


async def written(stream: Any) -> None:
    """Waits for the snapshot that is being written; a reader does not wait for it."""
    while (writing := stream._start().saving._writing) is not None:
        await asyncio.wait([writing])


async def test_a_fold_counts_what_it_has_folded(tmp_path: Path) -> None:
    checkpoint, killed_at = ps.Checkpoint(tmp_path, every_values=20, keep=10), [75]

    @ps.node
    async def added(total: int, record: data.Record[Any]) -> int:
        while record.position == 30 and not checkpoint.stored():
            await asyncio.sleep(0)
        if record.position in killed_at:
            raise ValueError("killed")
        return total + int(record.index)

    @ps.graph
    async def folded(records: AsyncIterator[data.Record[None]]) -> int:
        return await ps.fold(added, records, 0)

    with pytest.raises(ValueError, match="killed"):
        await engine.run(folded(ordered(SOURCE)), checkpoint=checkpoint)
    first, *later = [one.record for one in checkpoint.stored()]
    assert first == 20
    # At a barrier behind the multiple, if a snapshot was being written at the multiple.
    assert {*later} <= {*range(40, 76, 5)}
    killed_at.clear()
    assert await engine.run(folded(ordered(SOURCE)), checkpoint=checkpoint) == SOURCE.sum()


async def test_time_is_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot every 8 seconds, while the reader takes a value a second; the default is a minute, None is never."""
    now = 0.0
    for module in (checkpoint_schedule, checkpoint):
        monkeypatch.setattr(module, "monotonic", lambda: now)
    for every_seconds, expected in ((8, 8), (60.0, 60), (None, 0)):
        folder = tmp_path / str(expected)
        saved = ps.Checkpoint(folder) if expected == 60 else ps.Checkpoint(folder, every_seconds=every_seconds)
        call = over(lambda records: ps.map_each(slow_at_times, records, concurrency=4), ordered(SOURCE))
        async with engine.stream(call, checkpoint=saved) as stream:
            async for _ in up_to(stream, 200):
                now += 1
                await written(stream)
            shown = stream.statistics()
        assert shown.snapshots_skipped == 0
        if expected:
            assert 200 // (2 * expected) <= shown.snapshots_saved <= 200 // expected
        else:
            assert shown.snapshots_saved == 0


@pytest.mark.parametrize(
    "intervals",
    [
        {"every_values": 20, "every_records": 20},
        {"every_values": 20, "every_seconds": 60},
        {"every_records": 20, "every_seconds": 1.5},
    ],
)
def test_snapshots_have_one_interval(tmp_path: Path, intervals: dict[str, Any]) -> None:
    with pytest.raises(ps.OptionsError, match="snapshots have one interval; give one of the two"):
        ps.Checkpoint(tmp_path, **intervals)


async def test_items_behind_a_barrier_begin_before_those_before_it_have_ended(tmp_path: Path) -> None:
    behind = asyncio.Event()

    @ps.node
    async def waits_for_the_next(record: data.Record[Any]) -> int:
        if record.position == 10:
            await behind.wait()
        elif record.position == 20:
            behind.set()
        return int(record.position)

    call = over(lambda records: ps.map_each(waits_for_the_next, records, concurrency=16), ordered(range(400)))
    read = await taken(call, ps.Checkpoint(tmp_path, every_records=1))
    assert [value for _, value in read] == [*range(400)]


class Pictures:
    """A source of records of a quarter of a megabyte each."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return np.full(2**15, index, np.float64)


def shuffled(records: Any) -> Any:
    pictures = records >> data.read(Pictures(), runs_on="loop") >> data.shuffled(32, seed=1)
    return pictures >> data.filtered(lambda record: record.index % 2) >> data.prefetched(40)


@pytest.mark.parametrize(("mega_bytes", "is_logged"), [(64, False), (10, True)])
async def test_barriers_share_copies_and_their_bytes_are_bounded(
    tmp_path: Path, mega_bytes: int, is_logged: bool
) -> None:
    """80 barriers are on their way, each with a shuffle of 8 MB: together they hold less than 25 MB."""
    checkpoint = ps.Checkpoint(tmp_path, every_values=4, keep=1, max_bytes=mega_bytes * 2**20)
    with capture_logs() as logged:
        async with engine.stream(over(shuffled, ordered(Pictures())), checkpoint=checkpoint) as stream:
            async for _ in up_to(stream, 160):
                await written(stream)
            shown = stream.statistics()
    assert (shown.snapshot_interval > 5) == is_logged
    told = [one for one in logged if one["event"] == "checkpoint.max_bytes"]
    assert len(told) == is_logged
    if is_logged:
        assert told[0]["interval_values"] > 5


# Other sizes.


def sized(batch: int = 8, order: int | None = 4, ahead: int | None = None, seed: int = 1, buffer: int = 16) -> Any:
    def sized(records: Any) -> Any:
        values = records >> data.read(SOURCE, runs_on="loop")
        if order is None:
            values = values >> data.shuffled(buffer, seed=seed)
            batches: Any = values >> data.batched(batch)
        else:
            batches = ps.map_each(value_of, values) >> data.rebatched(batch)
        return batches if ahead is None else batches >> data.prefetched(ahead)

    return over(sized, ordered(SOURCE, batch=order))


@ps.node
def value_of(records: Any) -> Any:
    return records.value


async def read(call: Any, checkpoint: ps.Checkpoint | None = None, count: int | None = None) -> list[int]:
    """Returns the values in the batches of a call; after `count` batches, the reader saves and leaves."""
    batches = await taken(call, checkpoint, count, saves=True)
    return [value for _, batch in batches for value in np.asarray(batch).tolist()]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"order": None}, {"order": None, "batch": 3}),
        ({"order": None, "batch": 3}, {"order": None, "batch": 8, "ahead": 2}),
        ({"ahead": 5}, {}),
        ({}, {"batch": 5}),
        ({}, {"order": 7, "batch": 30, "ahead": 1}),
    ],
)
async def test_other_sizes_lose_and_double_no_record(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    whole = await read(sized(**before))
    got = await read(sized(**before), ps.Checkpoint(tmp_path), 17)
    with pytest.raises(ps.CheckpointError, match=r'or say on_mismatch="resize", which loses no record'):
        await read(sized(**after), ps.Checkpoint(tmp_path))
    got += await read(sized(**after), ps.Checkpoint(tmp_path, on_mismatch="resize"))
    assert got == whole


@pytest.mark.parametrize(
    "after", [{"order": None, "seed": 2}, {"order": None, "buffer": 8}, {"order": 4}], ids=["seed", "buffer", "batches"]
)
async def test_what_decides_on_records_is_no_size(tmp_path: Path, after: dict[str, Any]) -> None:
    await read(sized(order=None), ps.Checkpoint(tmp_path), 3)
    with pytest.raises(ps.CheckpointError, match=r'or say on_mismatch="continue" to go on all the same'):
        await read(sized(**after), ps.Checkpoint(tmp_path, on_mismatch="resize"))
