"""Pipelines that a seed draws, interrupted anywhere and started again, with other concurrency and other buffers.

Together, the runs give the values of one uninterrupted run, bit by bit.
"""

import asyncio
import functools
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import penstock as ps
from penstock import data, engine
from tests.promises.exploring import SEED, seed_to_replay
from tests.saving.exact import Counting, Keeping, Lines, Triples, exact

SOURCE = np.random.default_rng(1).standard_normal(40)
Stage = Callable[[Any], Any]


def level(value: Any) -> int:
    """Returns a number for any value; stages decide by it."""
    if isinstance(value, tuple | list):
        return sum(map(level, value))
    return int(abs(float(np.sum(np.asarray(value)))) * 10)


async def wait(value: Any) -> None:
    for _ in range(level(value) % 4):
        await asyncio.sleep(0)


# Nodes of classes.


@ps.node
class Trainer(Keeping):
    """Each result depends on all values before it, and on rounding. Its arrays are shared, and in Fortran order."""

    def __init__(self) -> None:
        weights = np.linspace(0.1, 0.9, 60).reshape(4, 15).T
        self.held = {"in": weights, "out": [weights], "seen": {"none"}}

    @property
    def weights(self) -> Any:
        return self.held["in"]

    async def __call__(self, value: Any) -> float:
        self.held["in"] *= 0.9  # in place, so the snapshot must have a copy
        await wait(value)
        self.held["out"][0] += float(np.sum(value)) / 7
        self.held["seen"].add(level(value))
        return float(self.weights.sum()) + len(self.held["seen"])


@ps.node(ordered=True)
class InOrder(Trainer):
    async def __call__(self, value: Any) -> float:
        self.weights[:] = self.weights * 0.8 + float(np.sum(value))
        return float(self.weights[1, 1])


# Stateful objects that a stage calls: one class can tell its state, the other cannot.


class Untold:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        value = args[0]
        return np.array([self.count, float(np.sum(value))]) if isinstance(value, list) else self.count * 1.5

    def keeps(self, value: Any) -> bool:
        self.count += 1
        return (self.count + level(value)) % 4 != 0

    def pause(self, error: Exception, attempt: int) -> float:
        self.count += 1
        return 1e9 if self.count % 3 == 0 else 0.0

    def key(self, value: Any) -> Any:
        self.count += 1
        return value

    async def later(self, value: Any) -> float:
        self.count += 1
        count = self.count
        await wait(value)
        return count + float(np.sum(value))

    async def numbered(self, values: AsyncIterator[Any]) -> AsyncIterator[float]:
        async for value in values:
            self.count += 1
            yield self.count + float(np.sum(value))

    @ps.node
    def counted(self, value: Any) -> float:
        self.count += 1
        return self.count * float(np.sum(value))


class Told(Untold):
    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state


def fails(value: Any) -> float:
    raise ValueError(value)


def fails_first(value: Any) -> float:
    if ps.current().attempt < 2:
        raise ValueError(value)
    return float(np.sum(value))


def called_with(one: Any, value: Any) -> Any:
    return one(value)


def mapped(node: Any, width: int, **options: Any) -> Stage:
    return lambda stream: ps.map_each(node, stream, concurrency=width, **options)


def each(fn: Any, width: int = 1, **policy: Any) -> Stage:
    return mapped(ps.node(**policy)(fn), width)


async def twice(value: Any) -> float:
    await wait(value)
    return float(np.sum(value)) * 2


def in_control(one: Untold) -> Stage:
    counted = ps.node(one)

    async def body(value: Any) -> Any:
        return await ps.cond(is_even(value), counted, twice_node, value)

    return mapped(body, 1)


# Stages that call an object, by name: a function of the object, what the stage takes, and what it gives.
SPOTS: dict[str, tuple[Callable[[Any], Stage], str, str]] = {
    "fn": (lambda one: data.filtered(one.keeps), "any", "same"),
    "fn of a node": (lambda one: data.filtered(ps.node(one.keeps)), "any", "same"),
    "collate": (lambda one: data.batched(3, collate=one), "number", "batch"),
    "collate of a partial": (
        lambda one: data.batched(2, collate=functools.partial(called_with, one)), "number", "batch",
    ),
    "node of an object": (lambda one: each(one, name="counted"), "any", "number"),
    "node of a partial": (lambda one: each(functools.partial(one), name="counted"), "any", "number"),
    "node of a method": (lambda one: each(one.later), "any", "number"),
    "node in a thread": (lambda one: each(one, name="counted", runs_on="thread"), "any", "number"),
    "node with one place": (lambda one: each(one.later, 9, concurrency=1), "any", "number"),
    "method that is a node": (lambda one: mapped(one.counted, 1), "any", "number"),
    "generator": (lambda one: ps.node(one.numbered), "any", "number"),
    "fallback": (lambda one: each(fails, fallback=one), "any", "number"),
    "wait": (
        lambda one: each(fails_first, retry=ps.Retry(3, wait=one.pause), fallback=lambda error: -1.0), "any", "number",
    ),
    "key": (lambda one: each(twice, cache=ps.Cache(max_bytes=9999, key=one.key)), "number", "number"),
    "branch": (in_control, "number", "number"),
}  # fmt: skip


# Stages: a function that makes the stage, its input (numbers, batches or any), and its output.


@ps.node
async def slow(value: Any) -> Any:
    await wait(value)
    return value


@ps.node
def added(left: Any, right: Any) -> Any:
    return left * 2 + right


@ps.node
def halved(value: Any) -> Any:
    return value / 2 + ps.current().item / 1000


is_even = ps.node(name="is_even")(lambda value: level(value) % 2 == 0)
is_large = ps.node(name="is_large")(lambda value: level(value) > 5)
which = ps.node(name="which")(lambda value: level(value) % 2)


async def mostly_numbers(value: Any) -> Any:
    await wait(value)
    if level(value) % 5 == 0:
        raise ValueError(value)
    return float(np.sum(value))


@ps.node
async def mostly(value: Any) -> Any:
    await mostly_numbers(value)
    return value


async def doubled(values: AsyncIterator[Any]) -> AsyncIterator[float]:
    async for value in values:
        yield float(np.sum(value)) * 2


async def as_they_are(values: list[Any]) -> list[Any]:
    return values


@ps.node
async def numbered(value: Any) -> float:
    item = ps.current().item
    await wait(value)
    return float(np.sum(value)) + item


@ps.node
def of_outcome(outcome: Any) -> float:
    return outcome.index - 0.5 if outcome.error else float(np.sum(outcome.value)) + outcome.index


twice_node = ps.node(twice)


# By name. The function takes a number that the pipeline draws, and a width that may differ after a restart.
STAGES: dict[str, tuple[Callable[[int, int], Stage], str, str]] = {
    "slow": (lambda _, width: mapped(slow, width), "any", "same"),
    "skipping": (lambda _, width: mapped(mostly, width, on_error="skip"), "any", "same"),
    "outcomes": (lambda _, width: lambda stream: with_outcomes(stream, width), "any", "number"),
    "items": (lambda _, width: mapped(numbered, width), "any", "number"),
    "shuffled": (lambda size, _: data.shuffled(size, seed=size), "any", "same"),
    "filtered": (lambda _, __: data.filtered(lambda value: level(value) % 5 != 0), "any", "same"),
    "prefetched": (lambda _, width: data.prefetched(width), "any", "same"),
    "batched": (lambda size, _: data.batched(size, drop_remainder=size % 2 == 0), "number", "batch"),
    "rebatched": (lambda size, _: data.rebatched(size), "batch", "batch"),
    "unbatched": (lambda _, __: data.unbatched(), "batch", "number"),
    "packed": (lambda size, _: data.packed(size * 2, look_ahead=2), "batch", "tuple"),
    "trainer": (lambda _, width: mapped(Trainer(), width), "any", "number"),
    "in order": (lambda _, width: slowly_in_order(InOrder(), width), "any", "number"),
    "triples": (lambda _, __: Triples(), "any", "number"),
    "split": (lambda _, width: lambda stream: joined(stream, width), "any", "same"),
    "nested": (lambda size, width: lambda stream: nested(stream, size, width), "any", "same"),
    "turns": (
        lambda _, width: lambda stream: stream >> data.split(2, ahead=width) >> data.merged("round_robin"),
        "any", "same",
    ),
    "control": (lambda size, width: controlled(Trainer(), width, size), "number", "number"),
    "failover": (lambda _, __: each(mostly_numbers, failover=Trainer()), "any", "number"),
    "stateless": (lambda _, __: ps.node(stateless=True)(doubled), "any", "number"),
    "stateless batches": (lambda _, __: each(as_they_are, 4, stateless=True, batch=ps.Batch(4)), "number", "number"),
    "rate limit": (lambda _, __: lambda stream: stream >> ps.RateLimit(per_second=1e6), "any", "same"),
    **{name: (lambda _, __, at=at: at(Told()), takes, gives) for name, (at, takes, gives) in SPOTS.items()},
}  # fmt: skip


def slowly_in_order(one: InOrder, width: int) -> Stage:
    async def body(value: Any) -> Any:
        return await one(await slow(value))

    return mapped(body, width)


def with_outcomes(stream: Any, width: int) -> Any:
    outcomes = ps.map_each(mostly, stream, concurrency=width, on_error="return")
    return ps.map_each(of_outcome, outcomes >> data.prefetched(width), concurrency=width)


def joined(stream: Any, width: int) -> Any:
    left, right = stream >> data.split(2, ahead=width)
    return ps.map_each(added, ps.map_each(slow, left, concurrency=width), right)


def nested(stream: Any, size: int, width: int) -> Any:
    """A split in a branch of another split; the inner branches join before or behind the outer ones."""
    left, right = stream >> data.split(2, ahead=width)
    above, below = ps.map_each(slow, right, concurrency=width) >> data.split(2, ahead=width)
    if size % 2:
        return ps.map_each(added, left, ps.map_each(added, above, below))
    return ps.map_each(added, ps.map_each(added, left, above), below, concurrency=width)


def controlled(trainer: Trainer, width: int, size: int) -> Stage:
    """A loop in a branch, and a switch that contains a class; the class handles one item at a time."""
    alone = size % 2

    async def halves(value: Any) -> Any:
        return await ps.while_loop(is_large, halved, value)

    async def body(value: Any) -> Any:
        first = await ps.cond(is_even(value), halves, numbered, value)
        return await ps.switch(which(first), (trainer if alone else slow, halved), first)

    return mapped(body, 1 if alone else width)


# Sources.


@ps.node
def number(record: data.Record[Any]) -> float:
    return float(record.value) + record.epoch


@ps.node
def values_of(records: data.Records[Any]) -> Any:
    return records.value + records.epoch


def source_of(name: str, draw: Random, free: Random) -> tuple[Callable[[], Any], str]:
    """Returns a function that makes the stream of a source in the graph, and the kind of its values."""
    seed, width, size = draw.randint(1, 9), free.randint(1, 9), draw.randint(1, 5)
    reads = data.read(SOURCE, runs_on=draw.choice(["loop", "thread"]), concurrency=width)
    mixed = {"seed": seed, "until": draw.choice(["first", "all"]), "count": draw.choice([None, 50])}
    counting, lines = Counting(), functools.partial(Lines, SOURCE)

    def ordered(**options: Any) -> Any:
        return data.order(SOURCE, shuffle_seed=seed, epochs=2, **options)

    def mix() -> Any:
        first = ordered() >> data.prefetched(width)
        second = data.order(SOURCE, epochs=3, shard=(0, 2)) >> reads
        return data.mix([(first >> reads, 0.7), (second, 0.3)], **mixed)

    def mix_of_batches() -> Any:
        first = ordered(batch=size, drop_remainder=True)
        return data.mix([(first, 0.5), (data.order(SOURCE, batch=2), 0.5)], **mixed) >> reads

    def mix_of_iterators() -> Any:
        first = data.order(lines()) >> data.prefetched(width)
        second = ps.map_each(number, data.order(lines, shard=(1, 2), epochs=size), concurrency=width)
        third = ordered() >> reads >> number
        return data.mix([(ps.map_each(number, first), 0.5), (second, 0.3), (third, 0.2)], **mixed)

    made: dict[str, tuple[Callable[[], Any], str]] = {
        "order": (lambda: ordered() >> reads >> number, "number"),
        "shuffled before reading": (lambda: ordered() >> data.shuffled(9, seed=2) >> reads >> number, "number"),
        "batches": (lambda: ordered(batch=size, drop_remainder=True) >> reads >> values_of, "batch"),
        "iterator": (lambda: data.order(lines()) >> number, "number"),
        "function": (lambda: data.order(lines, shard=(1, 2), epochs=3) >> number, "number"),
        "class": (counting, "number"),
        "mix": (lambda: mix() >> number, "number"),
        "mix of iterators": (mix_of_iterators, "number"),
        "mix of batches": (lambda: mix_of_batches() >> values_of, "batch"),
    }
    return made[name]


SOURCES = [
    "order", "order", "shuffled before reading", "batches", "iterator", "function", "class", "mix", "mix of batches",
    "mix of iterators",
]  # fmt: skip


# One pipeline: drawn, run as a whole, and interrupted.

First = Callable[[Random, Random], Stage]


def call(seed: int, run: int, first: First | None = None, only: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """Returns a new call of the pipeline of a seed, and the names of its source and stages.

    Args:
        seed: the seed.
        run: the number of the start, which chooses concurrency and buffers.
        first: makes the first stage, which takes numbers and gives batches.
        only: the source and the stages, instead of those that the seed chooses.
    """
    draw, free = Random(f"pipeline {seed}"), Random(f"start {run} of {seed}")
    source, *names = only or (draw.choice(SOURCES), *draw.choices([*STAGES], k=draw.randint(0, 5)))
    make, kind = source_of(source, draw, free)
    chosen, stages = [source], list[Stage]()
    if first is not None:
        stages += [data.unbatched()] if kind == "batch" else []
        stages.append(first(draw, free))
        kind = "device"  # stages of batches do not take batches on devices
    for name in names:
        made, takes, gives = STAGES[name]
        stage = made(draw.randint(1, 7), free.randint(1, 9))
        if takes in ("any", kind) and kind != "tuple":
            chosen.append(name)
            stages.append(stage)
            kind = kind if gives == "same" else gives

    @ps.graph
    async def pipeline() -> AsyncIterator[Any]:
        stream: Any = make()
        for stage in stages:
            stream = stage(stream)
        return stream  # type: ignore[no-any-return]

    return pipeline(), chosen


class Reader(Keeping):
    """The model that the reader trains in the `async for`."""

    def __init__(self) -> None:
        self.held = np.zeros((2, 2))

    def learned(self, value: Any) -> str:
        self.held = (0.9 * self.held + level(value)).T
        return float(self.held.sum()).hex()


class Interrupted:
    """The pipeline of a seed, which is interrupted and started again.

    Attributes:
        names: the names of its source and stages.
        whole: the values of a whole run, and what a reader learned of them.
    """

    def __init__(self, seed: int, first: First | None = None, only: Sequence[str] = ()) -> None:
        self._seed = seed
        self._drawn = first, only
        self._draw = Random(f"interrupts of {seed}")
        self._every = {"every_records" if seed % 2 else "every_values": self._draw.randint(1, 40)}
        self._starts = self._saved = 0
        self._got: dict[int, Any] = {}
        self.whole: list[Any] = []
        _, self.names = call(seed, 0, *self._drawn)

    async def check(self) -> None:
        """Compares the values of several interrupted runs with those of one whole run."""
        reader = Reader()
        async with engine.stream(call(self._seed, 0, *self._drawn)[0]) as stream:
            self.whole = [(exact(value), reader.learned(value)) async for value in stream]
        stops = [self._draw.randint(1, 25) for _ in range(self._draw.randint(1, 4))]
        with TemporaryDirectory() as folder:
            for limit in stops:
                if await self._run(folder, limit):
                    break
            assert await self._run(folder, None)
            assert await self._run(folder, None), "a start after the end"
        assert [self._got.get(place) for place in range(len(self._got))] == self.whole

    async def _run(self, folder: str, limit: int | None) -> bool:
        """Continues from the newest snapshot, for at most `limit` values; returns whether the stream has ended."""
        self._starts += 1
        reader = Reader()
        checkpoint = ps.Checkpoint(folder, **self._every, reader=reader)
        made, _ = call(self._seed, self._starts, *self._drawn)
        async with engine.stream(made, checkpoint=checkpoint) as stream:
            assert stream.position >= self._saved, "the snapshot that was asked for is not the newest"
            taken = 0
            async for value in stream:
                place, found = stream.position - 1, (exact(value), reader.learned(value))
                assert self._got.setdefault(place, found) == found, f"value {place} came again, and is another one"
                taken += 1
                if taken == limit:
                    if self._draw.random() < 0.6:
                        await stream.checkpoint()
                        self._saved = stream.position
                    return False
        return True


def check_seeds(
    seeds: range, loop: Callable[[], asyncio.AbstractEventLoop], test: str, first: First | None = None
) -> set[str]:
    """Checks the pipelines of some seeds; returns the names of the stages that have run."""
    only, ran = seed_to_replay(), set[str]()
    for seed in seeds if only is None else [only]:
        one = Interrupted(seed, first)
        try:
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(one.check())
        except BaseException as error:
            error.add_note(f"{', '.join(one.names)}\nreplay: {SEED}={seed} python -m pytest {shlex.quote(test)}")
            raise
        ran.update(one.names)
    return ran
