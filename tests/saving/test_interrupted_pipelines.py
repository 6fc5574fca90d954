"""Random pipelines, interrupted anywhere and started again, give in all what an uninterrupted one gives."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import data, engine

SOURCE = np.arange(60)


@ps.node
class Trainer:
    """Each result depends on all values before it, and rounds."""

    def __init__(self) -> None:
        self.weights = np.full(3, 0.1)

    def state(self) -> Any:
        return {"weights": self.weights}

    def restore(self, state: Any) -> None:
        self.weights = state["weights"]

    async def __call__(self, value: Any) -> float:
        self.weights *= 0.9  # in place: what was stored must be a copy
        if int(np.sum(value)) % 3 == 0:
            await asyncio.sleep(0)
        self.weights += np.sum(value) / 7
        return float(self.weights[0])


@ps.node(ordered=True)
class InOrder(Trainer):
    async def __call__(self, value: Any) -> float:
        self.weights = self.weights * 0.8 + np.sum(value)
        return float(self.weights[1])


@ps.node
class Running:
    """A class that reads a stream and gives another, with fewer values."""

    def __init__(self) -> None:
        self.held: list[float] = []

    def state(self) -> Any:
        return self.held

    def restore(self, state: Any) -> None:
        self.held = state

    async def __call__(self, values: AsyncIterator[Any]) -> AsyncIterator[float]:
        async for value in values:
            self.held.append(float(np.sum(value)))
            if len(self.held) == 3:
                yield sum(self.held)
                self.held = []


@ps.node
async def slow(value: Any) -> Any:
    for _ in range(int(np.sum(value)) % 4):
        await asyncio.sleep(0)
    return value


@ps.node
def number(record: data.Record[Any]) -> float:
    return float(record.value)


@ps.node
def added(left: Any, right: Any) -> Any:
    return left * 2 + right


def is_kept(value: Any) -> bool:
    return int(np.sum(value)) % 5 != 0


# Each stage: what makes it of a number that the test draws and of one that may change after a restart, which of numbers
# and batches it takes, and what it gives.
STAGES: dict[str, tuple[Callable[[int, int], Any], str, str]] = {
    "slow": (lambda size, width: lambda stream: ps.map_each(slow, stream, concurrency=width), "any", "same"),
    "shuffled": (lambda size, width: data.shuffled(size, seed=size), "any", "same"),
    "filtered": (lambda size, width: data.filtered(is_kept), "any", "same"),
    "prefetched": (lambda size, width: data.prefetched(width), "any", "same"),
    "batched": (lambda size, width: data.batched(size), "number", "batch"),
    "dropping": (lambda size, width: data.batched(size, drop_remainder=True), "number", "batch"),
    "rebatched": (lambda size, width: data.rebatched(size), "batch", "batch"),
    "unbatched": (lambda size, width: data.unbatched(), "batch", "number"),
    "packed": (lambda size, width: lambda stream: stream >> data.packed(size * 2, look_ahead=2), "batch", "tuple"),
    "trainer": (lambda size, width: trained(Trainer(), width), "any", "number"),
    "in order": (lambda size, width: slowly_in_order(InOrder(), width), "any", "number"),
    "running": (lambda size, width: read_by(Running()), "any", "number"),
    "split": (lambda size, width: lambda stream: joined(stream, width), "number", "number"),
    "nested": (lambda size, width: lambda stream: nested(stream, size, width), "number", "number"),
    "turns": (lambda size, width: lambda stream: (stream >> data.split(2, ahead=width)) >> data.merged("turns"),
              "any", "same"),
}  # fmt: skip


def trained(trainer: Trainer, width: int) -> Callable[[Any], Any]:
    return lambda stream: ps.map_each(trainer, stream, concurrency=width)


def slowly_in_order(one: InOrder, width: int) -> Callable[[Any], Any]:
    async def body(value: Any) -> Any:
        return await one(await slow(value))

    return lambda stream: ps.map_each(body, stream, concurrency=width)


def read_by(running: Running) -> Callable[[Any], Any]:
    return lambda stream: stream >> running


def joined(stream: Any, width: int) -> Any:
    left, right = stream >> data.split(2, ahead=width)
    return ps.map_each(added, ps.map_each(slow, left, concurrency=width), right)


def nested(stream: Any, size: int, width: int) -> Any:
    """A split in a branch of another, whose branches meet before or behind the other one's."""
    left, right = stream >> data.split(2, ahead=width)
    above, below = ps.map_each(slow, right, concurrency=width) >> data.split(2, ahead=width)
    if size % 2:
        return ps.map_each(added, left, ps.map_each(added, above, below))
    return ps.map_each(added, ps.map_each(added, left, above), below, concurrency=width)


def fitting(names: list[str]) -> list[str]:
    """Returns the stages that take what the one before gives."""
    kind, chosen = "number", list[str]()
    for name in names:
        _, takes, gives = STAGES[name]
        if takes in ("any", kind) and kind != "tuple":
            chosen.append(name)
            kind = kind if gives == "same" else gives
    return chosen


def graph_of(names: list[str], sizes: list[int], width: int, shuffles_first: bool) -> ps.Graph[[Any], Any]:
    made = [STAGES[name][0](size, width) for name, size in zip(names, sizes, strict=False)]

    @ps.graph
    async def pipeline(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
        stream: Any = records
        if shuffles_first:
            stream = stream >> data.shuffled(9, seed=2)
        stream = ps.map_each(number, stream >> data.read(SOURCE, runs_on="loop", concurrency=width), concurrency=width)
        for stage in made:
            stream = stage(stream)
        return stream  # type: ignore[no-any-return]

    return pipeline


async def run_from(
    graph: Any, folder: Path, every: int, limit: int | None, results: dict[int, str], asks: bool
) -> bool:
    """Goes on from the newest cut, for at most so many values; returns whether the end has come."""
    records = data.order(SOURCE, shuffle_seed=4, epochs=2)
    async with engine.stream(graph(records), checkpoint=ps.Checkpoint(folder, every=every)) as stream:
        taken = 0
        async for value in stream:
            place, shown = stream.position - 1, repr(value)
            assert results.setdefault(place, shown) == shown, f"value {place} came again, and is another one"
            taken += 1
            if taken == limit:
                if asks:
                    await stream.checkpoint()
                return False
    return True


@given(
    st.lists(st.sampled_from(sorted(STAGES)), max_size=5),
    st.lists(st.integers(1, 7), min_size=5, max_size=5),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9), st.booleans()), max_size=5),
    st.integers(1, 40),
)
@settings(max_examples=60)
@example(["batched", "trainer"], [4] * 5, True, [(5, 1, False), (5, 3, True)], 7)
@example(["batched", "packed"], [3] * 5, False, [(3, 1, False)] * 4, 5)
@example(["nested", "trainer", "nested"], [3, 1, 4, 1, 1], False, [(20, 3, False), (5, 7, True)] * 2, 5)
@example(["split", "turns", "trainer"], [3] * 5, False, [(20, 3, False)] * 4, 5)
def test_results_are_those_of_an_uninterrupted_run(
    names: list[str], sizes: list[int], shuffles_first: bool, stops: list[tuple[int, int, bool]], every: int
) -> None:
    names = fitting(names)

    async def uninterrupted() -> list[str]:
        async with engine.stream(
            graph_of(names, sizes, 4, shuffles_first)(data.order(SOURCE, shuffle_seed=4, epochs=2))
        ) as stream:
            return [repr(value) async for value in stream]

    async def interrupted(folder: Path) -> dict[int, str]:
        results: dict[int, str] = {}
        for limit, width, asks in stops:
            if await run_from(graph_of(names, sizes, width, shuffles_first), folder, every, limit, results, asks):
                break
        assert await run_from(graph_of(names, sizes, 5, shuffles_first), folder, every, None, results, False)
        before = dict(results)
        assert await run_from(graph_of(names, sizes, 2, shuffles_first), folder, every, None, results, False)
        assert results == before
        return results

    with TemporaryDirectory() as folder:
        expected = asyncio.run(uninterrupted())
        got = asyncio.run(interrupted(Path(folder)))
    assert [got[place] for place in range(len(got))] == expected
