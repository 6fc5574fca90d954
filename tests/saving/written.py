"""Pipelines and durable loops for which an earlier version wrote snapshots and files; later versions must resume them.

    python -m tests.saving.written FOLDER    writes the files with the present version

A written folder stays unchanged for as long as snapshots of its version must be readable. Code here that gets a new
name, such as a stage, must still read it: snapshots contain the names of steps, settings and classes.
"""

import asyncio
import datetime
import decimal
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock import data, engine
from penstock.testing import wait_quiescent
from tests.saving.agents import State, agent, next_state
from tests.saving.exact import Counting, Keeping, Lines, Triples
from tests.saving.stored_classes import Access, Colour, Frozen, Level, Model, Outer, Pair, Point, Versioned, Word

NUMBERS = np.random.default_rng(3).standard_normal(60)
SEQUENCES = [np.arange(1, 2 + size * 7 % 11) for size in range(40)]
LINES = [f"line {number}" for number in range(1, 501)]
ROWS = np.random.default_rng(4).standard_normal((64, 8)).astype(np.float32)


def ordered(source: Any = NUMBERS, epochs: int = 9, **options: Any) -> Any:
    return data.order(source, shuffle_seed=4, epochs=epochs, **options)


# Classes with state.


@ps.node
class Trainer:
    """Each result depends on all values before it."""

    def __init__(self) -> None:
        self.weights = np.full(3, 0.1)

    def state(self) -> Any:
        return {"weights": self.weights, "of": ("three", 3)}

    def restore(self, state: Any) -> None:
        self.weights = state["weights"]

    async def __call__(self, value: Any) -> float:
        self.weights *= 0.9
        self.weights[1:] += np.sum(value) / 7
        return float(self.weights.sum())


@ps.node(ordered=True)
class InOrder(Trainer):
    async def __call__(self, value: Any) -> float:
        self.weights += np.sum(value) * 1.1
        return float(self.weights[0])


@ps.node
class Everything(Keeping):
    """A class whose state has each kind of value that can be stored."""

    def __init__(self) -> None:
        self.held: dict[Any, Any] = {"count": 0}

    async def __call__(self, record: data.Record[Any]) -> Any:
        count = self.held["count"]
        self.held = {**self.held, "count": count + 1, count % 7: value_of_each_kind(count)}
        return self.held[count % 7]


def value_of_each_kind(count: int) -> Any:
    kinds: list[Any] = [
        (None, True, -count, 1 << 10_001, 0.1 * count, float("inf"), complex(count, -0.0), "\ud800", b"\0" * count),
        [bytearray(b"x" * 300), {1, 2, count}, frozenset({"a", "b"}), {(1, 2): "tuple", "$key": count}],
        [datetime.datetime(2026, 1, 2, 3, 4, 5, count, datetime.UTC), datetime.date(2026, 1, 2)],
        [decimal.Decimal("1.20"), Colour.RED, Level.LOW, Word.YES, Access.READ | Access.WRITE],
        [Point(count, [1]), Frozen("name", [count]), Pair(1, (2,)), Outer(Point(1)), Outer.Inside(3), Versioned(count)],
        [Model(name="model", parts=[Model(name="part")], at=Point(1.5))],
        [np.arange(count), np.float32(count), np.dtype("<u2"), np.zeros((2, 0)), np.array([(1, 2.0)], "i4,f8"),
         np.arange(6).reshape(2, 3), np.full(3, True), np.array("2026-01-02", "M8[D]"), np.array(["ab", "c"])],
    ]  # fmt: skip
    return kinds[count % 7]


# Functions.


@ps.node
async def number(record: data.Record[Any]) -> float:
    return float(record.value)


@ps.node
def added(left: Any, right: Any) -> Any:
    return left * 2 + right


@ps.node
def halved(value: Any) -> Any:
    return value / 2


@ps.node
def is_large(value: Any) -> bool:
    return bool(abs(np.sum(value)) > 1)


@ps.node
def total(records: data.Records[Any]) -> float:
    return float((records.value * (records.epoch + 1)).sum())


def is_kept(value: Any) -> bool:
    return abs(np.sum(value)) > 0.2


def joined(values: list[Any]) -> Any:
    return np.array(values)[::-1].copy()


# Pipelines. A stateful node has a new instance in each call.

trainer, other_trainer, in_order = Trainer(), Trainer(), InOrder()
triples, counting, everything = Triples(), Counting(300), Everything()
read_numbers = data.read(NUMBERS, runs_on="loop")


@ps.graph
async def stages(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[float]:
    numbers = records >> read_numbers >> number >> data.shuffled(7, seed=5)
    batches = numbers >> data.filtered(is_kept) >> data.batched(5) >> data.rebatched(7) >> data.prefetched(3)
    return batches >> data.unbatched() >> data.batched(2, drop_remainder=True, collate=joined) >> trainer


@ps.graph
async def rows(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[data.Packed]:
    return records >> data.read(SEQUENCES) >> data.packed(12, look_ahead=3) >> data.batched(2)


@ps.graph
async def records_of(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[data.Record[Any]]:
    by_index = records >> data.shuffled(5, seed=2) >> data.read(SEQUENCES, concurrency=2)
    return by_index >> data.shuffled(4, seed=1)


@ps.graph
async def batches() -> AsyncIterator[data.Records[Any]]:
    return data.order(NUMBERS, batch=4, shuffle_seed=7, epochs=40) >> read_numbers


@ps.graph
async def split(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[float]:
    left, right = records >> data.read(NUMBERS) >> number >> data.split(2, ahead=4)
    above, below = right >> halved >> data.split(2)
    turns = ps.map_each(added, left, ps.map_each(added, above, below)) >> data.split(2)
    return turns >> data.merged("round_robin") >> in_order


@ps.graph
async def mix() -> AsyncIterator[float]:
    first = data.order(NUMBERS, shuffle_seed=1, epochs=20) >> data.prefetched(3)
    second = data.order(range(15), shuffle_seed=2, epochs=None) >> data.read(range(15))
    third = data.order(NUMBERS, shard=(0, 5)) >> read_numbers
    mixed = data.mix([(first, 0.6), (second, 0.3), (third, 0.1)], seed=5, until="all", count=500)
    return mixed >> index_of >> trainer


@ps.node
def index_of(record: data.Record[Any]) -> float:
    return record.index + (0.5 if record.value is None else record.value)


@ps.graph
async def mixed_batches() -> AsyncIterator[float]:
    first = data.order(NUMBERS, batch=3, shuffle_seed=1, epochs=40, drop_remainder=True)
    second = data.order(NUMBERS, batch=2, epochs=40)
    return data.mix([(first, 0.5), (second, 0.5)], seed=1) >> read_numbers >> total


@ps.graph
async def values(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
    return ps.map_each(everything, records, concurrency=1) >> data.shuffled(3, seed=1)


@ps.graph
async def lines(records: AsyncIterator[data.Record[Any]]) -> AsyncIterator[Any]:
    return records >> data.batched(4)


@ps.graph
async def counted() -> AsyncIterator[float]:
    return counting() >> triples >> trainer


@ps.node
def which(value: float) -> int:
    return int(value * 10) % 2


async def halves(value: Any) -> Any:
    return await ps.while_loop(is_large, halved, value)


async def chosen(value: Any) -> Any:
    first = await ps.cond(is_large(value), halves, trainer, value)
    return await ps.switch(which(first), [halved, other_trainer], first)


async def both(value: Any) -> Any:
    return await in_order(halved(value))


@ps.graph
async def control(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[float]:
    return ps.map_each(both, ps.map_each(chosen, records >> read_numbers >> number, concurrency=1), concurrency=3)


@ps.node(failover=trainer)
async def down(value: float) -> float:
    if value > 0:
        raise ConnectionError
    return value


@ps.graph
async def failing_over(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[float]:
    return ps.map_each(down, records >> read_numbers >> number, concurrency=1)


PIPELINES: dict[str, Callable[[], Any]] = {
    "stages": lambda: stages(ordered()), "packed": lambda: rows(ordered(SEQUENCES)),
    "records": lambda: records_of(ordered(SEQUENCES, shard=(1, 2))), "record_batches": batches,
    "splits": lambda: split(ordered()), "mix": mix, "mixed_batches": mixed_batches,
    "values": lambda: values(ordered()), "iterator": lambda: lines(data.order(Lines(LINES), shard=(1, 2))),
    "function": lambda: lines(data.order(partial(Lines, LINES), shard=(1, 2))), "class": counted,
    "control_flow": lambda: control(ordered()), "failover": lambda: failing_over(ordered()),
}  # fmt: skip


# On four devices: a state that is split over a mesh, and batches that are placed on the mesh.


def on_mesh() -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from penstock import devices

    mesh = devices.DeviceMesh(shape=(4,), axis_names=("data",))
    split = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))

    @ps.node
    class OnMesh:
        def __init__(self) -> None:
            self.weights = jax.device_put(np.zeros(8, np.float32), split)
            self.key, self.weak = jax.random.key(1), jax.numpy.asarray(1.5)

        def state(self) -> Any:
            return {"weights": self.weights, "key": self.key, "weak": self.weak}

        def restore(self, state: Any) -> None:
            self.weights, self.key, self.weak = state["weights"], state["key"], state["weak"]

        def __call__(self, batch: Any) -> Any:
            assert (self.weights.sharding, self.weak.weak_type, len(batch.devices())) == (split, True, 4)
            self.key, used = jax.random.split(self.key)
            gained = jax.random.normal(used, (8,)) * self.weak + batch.sum(axis=0)
            self.weights = jax.device_put(self.weights * np.float32(0.9) + gained, split)
            return batch, self.weights

    one = OnMesh()

    @ps.graph
    async def feed(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
        batches = records >> data.read(ROWS, runs_on="loop") >> data.batched(4)
        placed = batches >> data.to_device(mesh, PartitionSpec("data")) >> data.shuffled(3, seed=1)
        return ps.map_each(one, placed, concurrency=1)

    return feed(ordered(ROWS))


# State outside of the graph, and a fold.


class Reader(Keeping):
    def __init__(self) -> None:
        self.held = np.zeros(2)

    def learn(self, batch: Any) -> str:
        self.held = 0.9 * self.held + np.array([batch.sum(), 1])
        return float(self.held[0]).hex()


@ps.graph
async def read_batches(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
    return records >> data.read(NUMBERS) >> data.batched(5)


def of_fold(fails_at: int | None, seen: list[int]) -> Any:
    @ps.node
    async def summed(state: dict[str, Any], record: data.Record[Any]) -> dict[str, Any]:
        if state["count"] == fails_at:
            await asyncio.sleep(0.5)  # by then, the snapshot before is on the disk
            raise ConnectionError
        seen.append(record.index)
        return {"count": state["count"] + 1, "total": state["total"] * 0.5 + record.index}

    @ps.graph
    async def folded(records: AsyncIterator[data.Record[None]]) -> Any:
        return await ps.fold(summed, records, {"count": 0, "total": np.zeros(2)})

    return folded(ordered())


# Durable loops.


def agent_of(file: Path, *, fails: bool = False, ask_in: tuple[int, ...] = ()) -> Any:
    async def turn(state: State) -> State:
        word = f"word{state.turn}"
        if state.turn in ask_in:
            word = f"{await ps.interrupt(f'what comes in turn {state.turn}?')}"
        if state.turn == 3 and fails:
            raise ConnectionError
        return next_state(state, word)

    return agent(ps.Durable(file), turn)


def arrays_of(file: Path, *, fails: bool = False) -> Any:
    @ps.node
    def grows(state: dict[str, Any]) -> bool:
        return len(state["seen"]) < 6

    @ps.node
    async def grown(state: dict[str, Any]) -> dict[str, Any]:
        count = len(state["seen"])
        if count == 4 and fails:
            raise ConnectionError
        seen = [*state["seen"], value_of_each_kind(count)]
        return {"seen": seen, "weights": state["weights"] * 0.5 + count}

    @ps.graph
    async def arrays(rows: Any) -> Any:
        return await ps.while_loop(grows, grown, {"seen": [], "weights": np.ones(9)}, durable=ps.Durable(file))

    return arrays


async def write_loops(file: Path) -> None:
    run = engine.run
    await run(agent_of(file)("q"), durable_key="finished")
    for graph, argument, key in (
        (agent_of(file, fails=True), "q", "in the midst"),
        (agent_of(file, ask_in=(2, 4)), "q", "asks"),
        (agent_of(file, ask_in=(2, 4)), "q", "asks again"),
        (arrays_of(file, fails=True), np.arange(3), "arrays"),
    ):
        with suppress(ConnectionError, ps.Interrupted):
            await run(graph(argument), durable_key=key)
    with suppress(ps.Interrupted):
        await run(agent_of(file, ask_in=(2, 4))("q"), durable_key="asks again", answer={"an": "answer"})
    await ps.Durable(file).fork("finished", 2, "forked")


# Writing.


async def snapshot_after(call: Any, folder: Path, limit: int) -> None:
    async with engine.stream(call, checkpoint=ps.Checkpoint(folder, every_records=1000, keep=1)) as values:
        async for _ in values:
            if values.position == limit:
                await wait_quiescent()  # the pipeline has read ahead
                await values.checkpoint()
                return


def write(folder: Path) -> None:
    for limit, (name, make) in enumerate(PIPELINES.items(), 7):
        asyncio.run(snapshot_after(make(), folder / name, limit))
    asyncio.run(snapshot_after(on_mesh(), folder / "mesh", 7))
    asyncio.run(snapshot_after(PIPELINES["stages"](), folder / "ended", 1000))
    reader = Reader()
    with data.iterate(
        read_batches(ordered()), checkpoint=ps.Checkpoint(folder / "reader", keep=1, reader=reader)
    ) as batches:
        for batch in batches:
            reader.learn(batch)
            if batches.position == 7:
                batches.checkpoint()
                break
    with suppress(ConnectionError):
        asyncio.run(engine.run(of_fold(40, []), checkpoint=ps.Checkpoint(folder / "fold", every_records=16, keep=1)))
    asyncio.run(write_loops(folder / "loops.db"))
    for lock in folder.glob("*/lock"):
        lock.unlink()  # the lock contains the name of this machine


if __name__ == "__main__":
    import jax

    from tests.saving import written  # so that snapshots refer to classes by this module name

    jax.config.update("jax_num_cpu_devices", 4)
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    written.write(target)
