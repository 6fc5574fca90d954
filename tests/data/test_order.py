"""The order of records: the records of each epoch and shard, which are the same everywhere."""

import asyncio
import itertools
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from operator import length_hint
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import data, engine
from tests.kit import listed, values_of


class Numbers:
    """A source of any length that takes no memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


def indexes(length: int, **settings: Any) -> list[int]:
    return [record.index for record in asyncio.run(listed(data.order(Numbers(length), **settings)))]


async def orders(length: int, tries: int) -> list[list[int]]:
    """Returns the orders of `tries` seeds."""
    return [[one.index async for one in data.order(Numbers(length), shuffle_seed=seed)] for seed in range(tries)]


@given(st.integers(1, 3000), st.integers(0, 1 << 70))
def test_every_length_gets_a_true_permutation(length: int, seed: int) -> None:
    assert sorted(indexes(length, shuffle_seed=seed)) == list(range(length))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert indexes(10, shuffle_seed=0) == GOLDEN_TEN
    assert indexes(10, shuffle_seed=7, epochs=2) == GOLDEN_EPOCHS
    many = [indexes(length, shuffle_seed=length**9) for length in (*range(1, 140), 1000, 1024, 1025)]
    assert zlib.crc32(str(many).encode()) == GOLDEN_MANY

    async def begin() -> list[Any]:
        order = data.order(Numbers(10**9), shuffle_seed=1)
        return [await anext(order) for _ in range(3)]

    records = asyncio.run(begin())
    assert [record.index for record in records] == GOLDEN_BILLION
    assert [record.seed for record in records] == GOLDEN_SEEDS
    assert records[0].key.tolist() == [GOLDEN_SEEDS[0] >> 32, GOLDEN_SEEDS[0] & 0xFFFFFFFF]
    assert records[0].key.dtype == np.uint32
    assert records[0].rng().random() == records[0].rng().random() == GOLDEN_RANDOM


GOLDEN_TEN = [5, 7, 9, 2, 1, 4, 0, 8, 6, 3]
GOLDEN_EPOCHS = [8, 1, 7, 2, 9, 3, 0, 6, 4, 5, 9, 2, 0, 5, 3, 8, 1, 4, 6, 7]
GOLDEN_MANY = 3456909614  # of orders that were computed in plain Python, one number after the other
GOLDEN_BILLION = [338934343, 318328137, 112733504]
GOLDEN_SEEDS = [17179438957365488533, 8122470698467820610, 6207496798862650005]
GOLDEN_RANDOM = 0.6624108395726954


def test_positions_and_indexes_know_nothing_of_each_other() -> None:
    length, tries = 37, 300
    found = np.array(asyncio.run(orders(length, tries)), np.float64)
    fixed_points = (found == np.arange(length)).sum() / tries  # both mean and variance are 1
    successors = (np.diff(found) == 1).sum() / tries
    assert abs(fixed_points - 1) < 4 / tries**0.5
    assert abs(successors - 1) < 4 / tries**0.5
    means = found.mean(axis=0)  # the mean of each position
    spread = length / 12**0.5 / tries**0.5
    assert np.abs(means - (length - 1) / 2).max() < 5 * spread


def test_each_epoch_has_another_order_and_all_records() -> None:
    records = asyncio.run(listed(data.order(Numbers(1500), shuffle_seed=3, epochs=3)))
    epochs = [[record.index for record in records if record.epoch == epoch] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(1500))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [record.position for record in records] == [*range(1500)] * 3
    assert indexes(5, epochs=2) == [0, 1, 2, 3, 4] * 2
    assert indexes(0) == indexes(0, epochs=None, shuffle_seed=1, pad=True) == []


@given(st.integers(0, 50), st.integers(1, 9), st.none() | st.integers(0, 5))
def test_shards_are_disjoint_cover_all_and_differ_by_one(length: int, count: int, seed: int | None) -> None:
    shards = [indexes(length, shard=(number, count), shuffle_seed=seed) for number in range(count)]
    assert sorted(index for shard in shards for index in shard) == list(range(length))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    whole = indexes(length, shuffle_seed=seed)
    assert [shards[position % count][position // count] for position in range(length)] == whole
    dropped = [
        indexes(length, shard=(number, count), shuffle_seed=seed, drop_remainder=True) for number in range(count)
    ]
    assert dropped == [shard[: length // count] for shard in shards]
    padded = [indexes(length, shard=(number, count), shuffle_seed=seed, pad=True) for number in range(count)]
    steps = -(-length // count)
    everyone = [padded[position % count][position // count] for position in range(steps * count)]
    assert everyone == [whole[position % length] for position in range(steps * count)]


@given(st.integers(0, 1200), st.integers(1, 700), st.none() | st.integers(0, 5), st.booleans(), st.integers(1, 3))
def test_batches_have_the_same_records_in_the_same_order(
    length: int, size: int, seed: int | None, drop: bool, shards: int
) -> None:
    settings: dict[str, Any] = {
        "shuffle_seed": seed, "epochs": 2, "drop_remainder": drop, "shard": (shards - 1, shards)
    }  # fmt: skip
    records = asyncio.run(listed(data.order(Numbers(length), **settings)))
    expected = [records[at : at + size] for at in range(0, len(records), size)]
    expected = [batch for batch in expected if not drop or len(batch) == size]
    batches = asyncio.run(listed(data.order(Numbers(length), batch=size, **settings)))
    assert list(map(len, batches)) == list(map(len, expected))
    assert length_hint(data.order(Numbers(length), **settings)) == len(records)
    assert length_hint(data.order(Numbers(length), batch=size, **settings)) == len(expected)
    for batch, ones in zip(batches, expected, strict=True):
        for name in ("epoch", "position", "index", "seed"):
            assert getattr(batch, name).tolist() == [getattr(one, name) for one in ones]
        assert batch.key.dtype == np.uint32
        assert batch.key.tolist() == [one.key.tolist() for one in ones]


async def test_the_values_of_a_batch_are_read_at_once() -> None:
    squares = np.arange(10) ** 2

    @ps.graph
    async def batches(source: Any, size: int) -> AsyncIterator[data.Records[Any]]:
        return data.order(source, shuffle_seed=1, batch=size) >> data.read(source, runs_on="loop")

    read = await values_of(engine.stream(batches(squares, 4)))
    assert [batch.value.tolist() for batch in read] == [(batch.index**2).tolist() for batch in read]
    assert [len(batch) for batch in read] == [4, 4, 2]
    with pytest.raises(TypeError) as caught:  # a list takes one index, not an array of them
        await values_of(engine.stream(batches(squares.tolist(), 4)))
    assert any("the 4 records at positions [0, 1, 2, 3]" in note for note in caught.value.__notes__)
    with pytest.raises(ps.OptionsError, match=r"data.batched\(size\)"):
        data.order(iter("ab"), batch=2)  # type: ignore[call-overload]
    with pytest.raises(ps.OptionsError, match="batch=0"):
        await values_of(engine.stream(batches(squares, 0)))


def test_keys_depend_on_the_record_and_the_epoch_alone() -> None:
    whole = asyncio.run(listed(data.order(Numbers(40), shuffle_seed=5, epochs=2)))
    keys = {(record.epoch, record.index): record.seed for record in whole}
    assert len(set(keys.values())) == 80
    shard = asyncio.run(listed(data.order(Numbers(40), shuffle_seed=5, epochs=2, shard=(2, 3))))
    assert all(keys[record.epoch, record.index] == record.seed for record in shard)


@ps.node(runs_on="thread")
def augmented(record: data.Record[int]) -> float:
    return record.value + float(record.rng().random())


NUMBERS = list(range(100))


@pytest.mark.parametrize("in_flight", [1, 7, 64])
def test_augmentation_does_not_depend_on_what_runs_beside_it(in_flight: int) -> None:
    @ps.graph
    async def augmenting(epochs: int) -> AsyncIterator[float]:
        records = data.order(NUMBERS, shuffle_seed=2, epochs=epochs) >> data.read(NUMBERS, runs_on="loop")
        return ps.map_each(augmented, records, concurrency=in_flight)

    with data.iterate(augmenting(2)) as values:
        assert list(values) == [
            record.index + record.rng().random()
            for record in asyncio.run(listed(data.order(NUMBERS, shuffle_seed=2, epochs=2)))
        ]


async def test_arguments_may_be_values_of_the_graph_and_a_list_is_not_copied() -> None:
    @ps.graph
    async def ordered(source: list[int], seed: int | None, epochs: int) -> AsyncIterator[int]:
        records = data.order(source, shuffle_seed=seed, epochs=epochs, shard=(0, 1)) >> data.read(source, concurrency=2)
        return records >> value_of

    @ps.node
    def value_of(record: data.Record[int]) -> int:
        return record.value

    assert await values_of(engine.stream(ordered([5, 6, 7], None, 2))) == [5, 6, 7] * 2
    with pytest.raises(ps.OptionsError, match="epochs=0"):
        await values_of(engine.stream(ordered([5, 6, 7], None, 0)))


async def test_what_has_no_index_takes_part_without_shuffling() -> None:
    async def lines() -> AsyncIterator[str]:
        for line in "abcde":
            yield line

    records = await listed(data.order(lines(), shard=(1, 2)))
    assert [(record.position, record.value) for record in records] == [(1, "b"), (3, "d")]
    assert records[0].rng().random() != records[1].rng().random()
    with pytest.raises(ps.OptionsError, match=r"data\.shuffled"):
        data.order(lines(), shuffle_seed=1)  # type: ignore[call-overload]

    @ps.graph
    async def numbered(values: AsyncIterator[str]) -> AsyncIterator[Any]:
        return data.order(values) >> data.batched(2)

    assert await values_of(engine.stream(numbered(lines()))) == [["a", "b"], ["c", "d"], ["e"]]


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


@ps.graph
async def of_argument(values: Any, epochs: int | None) -> AsyncIterator[Any]:
    return data.order(values, epochs=epochs) >> data.batched(3)


async def test_a_plain_iterator_is_numbered_and_runs_in_a_thread() -> None:
    seen: list[str] = []

    def values() -> Iterator[int]:
        for number in range(4):
            seen.append(threading.current_thread().name)
            yield number

    records = await listed(data.order(values(), shard=(1, 2)))
    assert [(record.position, record.value) for record in records] == [(1, 1), (3, 3)]
    assert set(seen) == {"penstock-order-1"}
    for _ in range(2):
        batches = await values_of(engine.stream(of_argument(numbers(4), 1)))
        assert list(map(list, batches)) == [[0, 1, 2], [3]]
    for wrong, told in (({"shuffle_seed": 1}, r"data\.shuffled"), ({"epochs": 2}, "a function that returns a new one")):
        with pytest.raises(ps.OptionsError, match=told):
            data.order(numbers(4), **wrong)  # type: ignore[call-overload]
    with pytest.raises(ps.OptionsError, match="a function that returns a new one"):
        await values_of(engine.stream(of_argument(numbers(4), 2)))
    with pytest.raises(ps.OptionsError, match="shard"):
        await listed(data.order(numbers(4), shard=(2, 2)))


async def test_a_function_gives_an_iterator_for_each_epoch() -> None:
    records = await listed(data.order(lambda: numbers(3), epochs=2))
    assert [(record.epoch, record.position, record.value) for record in records] == [
        (0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 0), (1, 1, 1), (1, 2, 2),
    ]  # fmt: skip
    assert len({record.seed for record in records}) == 6
    async with engine.stream(of_argument(partial(numbers, 2), None)) as batches:
        assert [list(await anext(batches)) for _ in range(2)] == [[0, 1, 0], [1, 0, 1]]
    assert await listed(data.order(partial(numbers, 0), epochs=None)) == []


async def test_what_a_plain_iterator_raises_ends_the_stream() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise ValueError("at record 1")

    async with engine.stream(of_argument(broken(), 1)) as batches:
        with pytest.raises(ValueError, match="at record 1"):
            await listed(batches)


async def test_a_generator_is_closed_with_its_stream_and_a_cancelled_read_loses_nothing() -> None:
    may_go_on, closed = threading.Event(), threading.Event()

    def values() -> Iterator[int]:
        try:
            may_go_on.wait()
            yield from itertools.count()
        finally:
            closed.set()

    records = data.order(values())
    reading = asyncio.ensure_future(anext(records))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    may_go_on.set()
    assert [(await anext(records)).value for _ in range(2)] == [0, 1]
    await records.aclose()  # type: ignore[attr-defined]
    assert closed.is_set()


async def test_an_iterator_that_is_written_in_a_graph_is_not_read_twice() -> None:
    held = numbers(3)

    @ps.graph
    async def once() -> AsyncIterator[data.Record[int]]:
        return data.order(held)

    assert len(await values_of(engine.stream(once()))) == 3
    with pytest.raises(ps.DataError, match="make it an argument of the graph"):
        await values_of(engine.stream(once()))


def test_wrong_arguments_are_refused_where_they_are_written() -> None:
    wrong: list[dict[str, Any]] = [
        {"shuffle_seed": -1}, {"shuffle_seed": True}, {"epochs": 0}, {"shard": (2, 2)}, {"shard": (0, 0)},
        {"shard": "host"}, {"shard": (0, 1, 2)}, {"drop_remainder": True, "pad": True}, {"pad": 1}, {"batch": 0},
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(ps.OptionsError, match=next(iter(arguments))):
            data.order([1], **arguments)
    with pytest.raises(TypeError, match=r"pass iter\(...\)"):
        data.order({1})  # type: ignore[call-overload]


async def test_a_source_that_shrinks_is_an_error_that_says_so() -> None:
    source = list(range(10))

    @ps.graph
    async def twice() -> AsyncIterator[data.Record[int]]:
        return data.order(source, epochs=2) >> data.read(source)

    async with engine.stream(twice()) as records:
        await anext(records)
        del source[9:]
        with pytest.raises(IndexError) as caught:
            await listed(records)
    assert any("position 9 of epoch 0, index 9 of 9" in note for note in caught.value.__notes__)
    order = data.order(source, epochs=2)
    for _ in range(9):
        await anext(order)
    source.append(0)
    with pytest.raises(ps.DataError, match="had 9 records when it began, and has 10 at the beginning of epoch 1"):
        await anext(order)


SHARD_OF_TASK = """
import asyncio, os, sys
from penstock import data
async def main():
    for tasks in ("2", "1"):
        os.environ |= {"SLURM_JOB_ID": "17", "SLURM_NTASKS": tasks, "SLURM_PROCID": "1"}
        try:
            print([record.index async for record in data.order(range(10))])
        except Exception as error:
            print(type(error).__name__, error)
asyncio.run(main())
print("jax" in sys.modules)
"""


def test_a_slurm_task_without_distributed_jax_does_not_guess_its_shard() -> None:
    of_two, alone, has_jax = subprocess.run(
        [sys.executable, "-c", SHARD_OF_TASK], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert of_two.startswith("DataError data.order")
    assert "jax.distributed.initialize()" in of_two
    assert "SLURM_PROCID" in of_two
    assert (alone, has_jax) == ("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]", "False")


DISTRIBUTED = """
import asyncio, dataclasses, sys
from collections.abc import AsyncIterator
import jax, numpy as np
import penstock as ps
from penstock import data
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    values: object
    def __post_init__(self):
        assert self.values.dtype == np.float32  # refuses what is unlike an array
def collate(values):
    return Rows(np.stack(values))
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
async def main():
    print([record.index async for record in data.order(range(7), shuffle_seed=1)])
    print([record.index async for record in data.order(range(7), shuffle_seed=1, shard=(0, 2))])
asyncio.run(main())
print(jax._src.xla_bridge.backends_are_initialized())
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = np.arange(16, dtype=np.float32)
@ps.graph
async def feed() -> AsyncIterator[Rows]:
    batches = data.order(rows) >> data.read(rows) >> data.batched(4, collate=collate)
    return batches >> data.to_device(mesh, jax.P("data"))
with data.iterate(feed()) as batches:
    for batch in batches:
        print(batch.values.shape, *[shard.data.tolist() for shard in batch.values.addressable_shards])
jax.distributed.shutdown()
"""


def test_processes_of_distributed_jax_have_a_shard_each_and_make_one_global_array() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    started = [
        subprocess.Popen([sys.executable, "-c", DISTRIBUTED, address, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    first, second = [process.communicate(timeout=50)[0].splitlines() for process in started]
    whole = indexes(7, shuffle_seed=1)
    told = second.pop(1)  # this process reads the shard of the other
    assert "data.shard_of_another_process" in told
    assert 'shard="process"' in told
    of_first = str(whole[0::2])
    # No order starts a backend.
    assert first[:3] == [of_first, of_first, "False"]
    assert second[:3] == [str(whole[1::2]), of_first, "False"]
    assert [line for line in first if line.startswith("(")] == [
        "(8,) [0.0, 2.0] [4.0, 6.0]", "(8,) [8.0, 10.0] [12.0, 14.0]",
    ]  # fmt: skip
    assert [line for line in second if line.startswith("(")] == [
        "(8,) [1.0, 3.0] [5.0, 7.0]", "(8,) [9.0, 11.0] [13.0, 15.0]",
    ]  # fmt: skip
