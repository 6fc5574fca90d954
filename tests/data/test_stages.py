"""Stages: their results equal those of plain Python, in a graph and outside of one; and their failures."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import data, engine, testing
from penstock.extension import Packer
from tests.kit import negative, values_of


class Trace(list[str]):
    """The values that were read from a source, and whether it was closed."""


async def source(values: Iterable[Any], trace: Trace | None = None, fails_at: int | None = None) -> AsyncIterator[Any]:
    try:
        for number, value in enumerate(values):
            if number == fails_at:
                raise OSError(f"record {number} cannot be read")
            await asyncio.sleep(0)
            yield value
    finally:
        if trace is not None:
            trace.append("closed")


def through(stage: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Returns the results of a stage, after checking that they are the same in a graph and outside of one."""

    @ps.graph
    async def staged(given: AsyncIterator[Any]) -> AsyncIterator[Any]:
        return given >> stage  # type: ignore[operator, no-any-return]

    async def both() -> tuple[list[Any], list[Any]]:
        return await values_of(engine.stream(staged(source(values)))), [value async for value in stage(source(values))]

    in_graph, outside = asyncio.run(both())
    assert repr(in_graph) == repr(outside)
    return in_graph


half = settings(max_examples=settings().max_examples // 2)  # an example plans a graph
sizes = st.integers(1, 12)
counts = st.integers(0, 40)


@half
@given(counts, sizes, st.booleans())
def test_batched(count: int, size: int, drop: bool) -> None:
    expected = [list(range(count))[at : at + size] for at in range(0, count, size)]
    expected = [batch for batch in expected if not drop or len(batch) == size]
    got = through(data.batched(size, drop_remainder=drop), range(count))
    assert [batch.tolist() for batch in got] == expected
    assert through(data.batched(size, drop_remainder=drop, collate=list), range(count)) == expected


@half
@given(st.lists(st.integers(0, 5)))
def test_unbatched(lengths: list[int]) -> None:
    batches = [{"numbers": np.arange(length), "names": [str(length)] * length} for length in lengths]
    assert through(data.unbatched(), batches) == [
        {"numbers": number, "names": str(length)} for length in lengths for number in range(length)
    ]


@half
@given(st.lists(st.integers(0, 7)), sizes, st.booleans())
def test_rebatched(lengths: list[int], size: int, drop: bool) -> None:
    total = sum(lengths)
    ends = np.cumsum(lengths).tolist()
    batches = [
        (np.arange(end - n, end), [str(i) for i in range(end - n, end)]) for n, end in zip(lengths, ends, strict=True)
    ]
    expected = [list(range(total))[at : at + size] for at in range(0, total, size)]
    got = through(data.rebatched(size, drop_remainder=drop), batches)
    assert [numbers.tolist() for numbers, _ in got] == [one for one in expected if not drop or len(one) == size]
    assert all([str(number) for number in numbers] == names for numbers, names in got)


@half
@given(st.lists(st.integers(0, 30)), st.integers(1, 12), st.integers(1, 5))
def test_packed(lengths: list[int], length: int, look_ahead: int) -> None:
    sequences = [np.arange(100 * number + 1, 100 * number + size + 1) for number, size in enumerate(lengths)]
    pieces = [tuple(one[at : at + length].tolist()) for one in sequences for at in range(0, len(one), length)]
    rows = through(data.packed(length, look_ahead=look_ahead), sequences)
    found: list[tuple[int, ...]] = []
    for row in rows:
        ids, used = row.segment_ids, int((row.segment_ids > 0).sum())
        assert (len(ids), row.tokens.dtype, ids.dtype) == (length, np.int64, np.int32)
        assert ids[:used].tolist() == sorted(ids[:used])
        assert not row.tokens[used:].any()
        for number in range(1, ids.max() + 1):
            members = ids == number
            assert row.positions[members].tolist() == [*range(members.sum())]
            found.append(tuple(row.tokens[members].tolist()))
    assert sorted(found) == sorted(pieces)  # no piece is lost, cut or repeated
    if look_ahead == 1:
        assert found == pieces
    # A piece begins a new row only if it fits into no waiting row, so no two consecutive rows are both half empty.
    assert len(rows) <= 2 * sum(map(len, pieces)) / length + look_ahead


@given(st.lists(st.integers(1, 10)), st.integers(1, 4))
def test_a_packer_gives_the_fullest_row_when_none_has_room(sizes: list[int], look_ahead: int) -> None:
    packer: Packer[int] = Packer(10, look_ahead)
    open_rows: list[list[int]] = []
    for size in sizes:
        expected: list[list[int]] = []
        fitting = [row for row in open_rows if sum(row) + size <= 10]
        chosen: list[int] = max(fitting, key=sum) if fitting else []
        if not fitting:
            if len(open_rows) == look_ahead:
                expected.append(max(open_rows, key=sum))
            open_rows.append(chosen)
        chosen.append(size)
        if sum(chosen) == 10:
            expected.append(chosen)
        open_rows = [row for row in open_rows if not any(row is done for done in expected)]
        assert packer.add(size, size) == expected
    assert [row for _, row in packer.rows] == open_rows


async def test_a_sequence_that_is_none_is_named_by_its_record() -> None:
    for wrong, told in ((np.ones((2, 2), np.int64), "int64[2, 2]"), (np.ones(2), "float64[2], and before it int64")):
        sequences = [np.arange(3), wrong]
        records = data.order(sequences) >> data.read(sequences, runs_on="loop")
        with pytest.raises(ps.DataError) as caught:
            [row async for row in records >> data.packed(8)]
        assert "the record at position 1 of epoch 0 (index 1)" in str(caught.value)
        assert told in str(caught.value)


@half
@given(counts)
def test_filtered_and_prefetched(count: int) -> None:
    assert through(data.filtered(lambda number: number % 3), range(count)) == [n for n in range(count) if n % 3]

    async def is_even(number: int) -> bool:
        await asyncio.sleep(0)
        return number % 2 == 0

    assert through(data.filtered(is_even), range(count)) == [*range(0, count, 2)]
    assert through(data.prefetched(3), range(count)) == [*range(count)]


@given(counts, sizes, st.integers(0, 5))
def test_shuffled(count: int, buffer: int, seed: int) -> None:
    got = through(data.shuffled(buffer, seed), range(count))
    assert sorted(got) == [*range(count)]
    assert all(value < place + buffer for place, value in enumerate(got))  # values move ahead by at most the buffer
    if buffer == 1:
        assert got == [*range(count)]


def test_shuffled_is_the_same_everywhere_and_another_one_for_another_seed() -> None:
    assert through(data.shuffled(5, seed=3), range(8)) == [4, 3, 2, 7, 5, 0, 1, 6]
    assert through(data.shuffled(100, seed=1), range(50)) != through(data.shuffled(100, seed=2), range(50))


async def test_prefetched_bounds_what_is_ready() -> None:
    asked: list[int] = []

    @ps.node
    async def asking() -> AsyncIterator[int]:
        for number in range(100):
            asked.append(number)
            yield number

    @ps.node(capacity=1)
    async def slowly(values: AsyncIterator[int]) -> AsyncIterator[int]:
        async for value in values:
            yield value

    @ps.graph
    async def held() -> AsyncIterator[int]:
        return asking() >> data.prefetched(40) >> slowly

    async with engine.stream(held()) as values:
        assert await anext(values) == 0
        await testing.wait_quiescent()
        # 40 ready, 16 before them, one taken, one at each step, and one in the stream of the last step.
        assert 57 <= len(asked) <= 62


# Collating.


class Pair(NamedTuple):
    image: Any
    label: int


@dataclasses.dataclass
class Sample:
    tokens: list[int]
    name: str


def test_structures_are_collated_leaf_by_leaf() -> None:
    batch = data.collate([Pair(np.full((2, 2), n, np.float32), n) for n in range(3)])
    assert (batch.image.shape, batch.image.dtype, batch.label.tolist()) == ((3, 2, 2), np.float32, [0, 1, 2])
    nested = data.collate([{"a": (1.5, True), "b": Sample([n, n], str(n)), "c": None} for n in range(2)])
    assert nested["a"][0].dtype == np.float64
    assert nested["a"][1].tolist() == [True, True]
    assert isinstance(nested["b"], Sample)
    assert (nested["b"].tokens.tolist(), nested["b"].name) == ([[0, 0], [1, 1]], ["0", "1"])
    assert nested["c"] == [None, None]
    assert data.collate([np.float32(1), np.float32(2)]).dtype == np.float32


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_ragged_leaves_are_padded_and_say_how_long_they_were(shapes: list[tuple[int, int]]) -> None:
    values = [{"words": np.ones(n), "boxes": np.ones((n, m)), "id": n} for n, m in shapes]
    batch = data.collate(values, ragged={"words": -1, "boxes": 0})
    assert batch["words"].lengths.tolist() == [n for n, _ in shapes]
    assert batch["boxes"].lengths.tolist() == [list(shape) for shape in shapes]
    longest = max(n for n, _ in shapes)
    assert batch["words"].values.tolist() == [[1.0] * n + [-1.0] * (longest - n) for n, _ in shapes]
    assert batch["boxes"].values.sum() == sum(n * m for n, m in shapes)
    assert batch["boxes"].values.shape == (len(shapes), longest, max(m for _, m in shapes))


def broken(*values: Any) -> str:
    with pytest.raises(ps.DataError) as caught:
        data.collate(values)
    return str(caught.value)


def test_what_is_not_alike_is_named_by_value_and_leaf() -> None:
    assert "value 1 of the batch: leaf 'a.0' has shape (3,), and in value 0 (2,)" in broken(
        {"a": (np.ones(2),)}, {"a": (np.ones(3),)}
    )
    assert "ragged={'': 0}" in broken(np.ones(2), np.ones(3))
    assert "value 2 of the batch: leaf 'n' is a float, and in value 0 a int" in broken({"n": 1}, {"n": 2}, {"n": 3.0})
    assert "is float32, and in value 0 float64" in broken(np.ones(2), np.ones(2, np.float32))
    assert "has the members 'b', and in value 0 'a'" in broken({"a": 1}, {"b": 1})
    assert "leaf 'x' is a set, which makes no array" in broken({"x": {1}})
    assert "a list, and its elements are no numbers" in broken([["a"]], [["b"]])
    assert "makes no array" in broken([[1], [1, 2]])
    assert f"value 1 of the batch: leaf 'n' is {2**63}, which int64 does not hold" in broken({"n": 1}, {"n": 2**63})


async def test_a_record_that_differs_is_named_by_its_place() -> None:
    images = [np.ones(4)] * 7 + [np.ones(5)] + [np.ones(4)] * 2

    @ps.graph
    async def feed() -> AsyncIterator[Any]:
        return data.order(images, epochs=2) >> data.read(images) >> data.batched(5)

    async with engine.stream(feed()) as batches:
        assert (await anext(batches)).shape == (5, 4)
        with pytest.raises(ps.DataError, match=r"the record at position 7 of epoch 0 \(index 7\): it has shape \(5,\)"):
            await anext(batches)


# Failures.


async def test_a_source_that_raises_at_record_7_ends_the_stream_there_and_is_closed() -> None:
    trace = Trace()

    @ps.graph
    async def feed(values: AsyncIterator[int]) -> AsyncIterator[Any]:
        return data.order(values) >> data.batched(2)

    async with engine.stream(feed(source(range(20), trace, fails_at=7))) as batches:
        assert [(await anext(batches)).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(OSError, match="record 7"):
            await anext(batches)
    assert trace == ["closed"]


async def test_a_reader_that_leaves_closes_a_source_that_never_ends() -> None:
    trace = Trace()

    @ps.graph
    async def feed(values: AsyncIterator[int]) -> AsyncIterator[Any]:
        return data.order(values) >> data.shuffled(10, seed=1) >> data.prefetched(2) >> data.batched(3)

    async with engine.stream(feed(source(itertools.count(), trace))) as batches:
        await anext(batches)
    assert trace == ["closed"]
    alone: Any = data.batched(2)(source(itertools.count(), trace))
    await anext(alone)
    await alone.aclose()
    assert trace == ["closed", "closed"]


@pytest.mark.parametrize("error", [ValueError("no batch"), StopAsyncIteration()])
async def test_a_collate_that_fails_says_which_records_it_was_given(error: Exception) -> None:
    def failing(values: list[int]) -> int:
        if 5 in values:
            raise error
        return sum(values)

    @ps.graph
    async def feed() -> AsyncIterator[int]:
        return data.order(range(9)) >> data.read(range(9), runs_on="loop") >> data.batched(3, collate=failing)

    async with engine.stream(feed()) as sums:
        assert await anext(sums) == 3
        with pytest.raises((ValueError, RuntimeError)) as caught:
            await anext(sums)
    found = caught.value if isinstance(error, ValueError) else caught.value.__cause__
    assert found is error
    assert "position 3 of epoch 0 (index 3) to the record at position 5" in found.__notes__[0]


def test_wrong_arguments_are_refused_where_they_are_written() -> None:
    anything: Any = None
    wrong: list[Callable[[], object]] = [
        partial(data.batched, 0), partial(data.batched, 2, drop_remainder="no"), partial(data.rebatched, True),
        partial(data.shuffled, 0, seed=1), partial(data.shuffled, 2, seed=-1), partial(data.prefetched, 0),
        partial(data.packed, 0), partial(data.packed, 4, look_ahead=0),
        partial(data.filtered, anything), partial(data.read, [], concurrency=0),
        partial(data.read, [], runs_on=anything),
    ]  # fmt: skip
    for make in wrong:
        with pytest.raises(ps.OptionsError, match=r"data\.\w+\("):
            make()


# `stream >> node`.


@ps.node
async def counted(values: AsyncIterator[int]) -> int:
    return len([value async for value in values])


@ps.node
class Adding:
    async def __call__(self, number: int) -> int:
        return number + 100


async def test_a_stream_goes_on_in_nodes_and_graphs_as_a_whole_or_value_by_value() -> None:
    adding = Adding()

    @ps.graph
    async def each(numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        return numbers >> negative >> adding  # type: ignore[operator, no-any-return]

    @ps.graph
    async def whole(numbers: AsyncIterator[int]) -> int:
        return await (numbers >> negative >> counted)

    assert await values_of(engine.stream(each(source(range(3))))) == [100, 99, 98]
    assert await engine.run(whole(source(range(3)))) == 3
    assert await whole(source(range(3))) == 3
    assert [value async for value in await each(source(range(3)))] == [100, 99, 98]

    @ps.graph
    async def shifted(number: int) -> int:
        return number >> negative  # type: ignore[operator, no-any-return]

    @ps.graph
    async def builtin(numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        return numbers >> abs  # type: ignore[operator, no-any-return]

    with pytest.raises(ps.GraphTraceError, match="arithmetic on it"):
        engine.plan(shifted)
    with pytest.raises(ps.GraphTraceError, match=r"a stage of penstock\.data"):
        engine.plan(builtin)


async def test_stages_are_drawn_and_counted_by_name() -> None:
    @ps.graph
    async def feed() -> AsyncIterator[Any]:
        return data.order(range(8)) >> data.read(range(8)) >> data.batched(2)

    assert [line.split()[1] for line in str(feed).splitlines() if line.startswith("●")] == ["order", "batched"]

    batches = engine.stream(feed())
    assert len(await values_of(batches)) == 4
    assert sorted(actor.node for actor in batches.statistics().actors) == ["batched", "map_each", "order", "read"]


class Missing:
    """A source whose records all raise one object."""

    error = OSError("the file is missing")

    def __init__(self, missing: int) -> None:
        self.missing = missing

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index >= self.missing:
            raise self.error
        return index

    def collate(self, values: list[Any]) -> list[Any]:
        if self.missing in values:
            raise self.error
        return values


def feed_of(source: Missing, kind: Any) -> ps.Graph[[], AsyncIterator[Any]]:
    @ps.graph
    async def feed() -> AsyncIterator[Any]:
        if kind == "collate":
            return data.order(range(8)) >> data.read(range(8)) >> data.batched(2, collate=source.collate)
        return data.order(source) >> data.read(source, runs_on=kind)

    return feed


@pytest.mark.parametrize("kind", ["thread", "loop", "collate"])
async def test_an_error_that_records_share_names_the_record_of_this_feed_alone(kind: Any) -> None:
    for missing in (2, 4, 6):
        with pytest.raises(OSError, match="is missing") as raised:
            await values_of(engine.stream(feed_of(Missing(missing), kind)()))
        places = [note for note in raised.value.__notes__ if "while data" in note]
        assert len(places) == 1, places
        assert f"position {missing}" in places[0]
