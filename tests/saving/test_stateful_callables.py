"""Stateful objects that a step of a saved call calls: their state is in each snapshot, or the graph is refused."""

import functools
import operator
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, engine
from tests.saving.exact import Keeping, check_interrupted, over
from tests.saving.random_pipelines import SPOTS, Told, Untold, as_they_are, each, fails, twice

SOURCE = range(60)


@ps.node
class StoredNode(Keeping):
    def __init__(self) -> None:
        self.held = 0

    def __call__(self, value: int) -> bool:
        self.held += 1
        return (self.held + value) % 4 != 0


@ps.node
def index(record: data.Record[Any]) -> int:
    return record.index


def call(stage: Callable[[Any], Any]) -> Any:
    return over(lambda records: stage(ps.map_each(index, records)), data.order(SOURCE, shuffle_seed=1))


@pytest.mark.parametrize("spot", SPOTS)
async def test_what_can_tell_its_state_goes_on(tmp_path: Path, spot: str) -> None:
    made: list[Told] = []

    def make() -> Any:
        made.append(Told())
        return call(SPOTS[spot][0](made[-1]))

    await check_interrupted(make, tmp_path, 7, 11)
    assert made[-1].count == made[0].count > 0


@pytest.mark.parametrize("spot", SPOTS)
async def test_what_cannot_tell_its_state_is_refused(tmp_path: Path, spot: str) -> None:
    with pytest.raises(ps.PlanError, match="cannot be used with checkpoint=: ") as raised:
        engine.stream(call(SPOTS[spot][0](Untold())), checkpoint=ps.Checkpoint(tmp_path))
    assert "stateless=True" in str(raised.value)
    assert "Untold" in str(raised.value) or spot == "generator"
    assert "/tests/saving/" in str(raised.value)


async def test_a_node_of_a_class_in_a_stage_goes_on(tmp_path: Path) -> None:
    await check_interrupted(lambda: call(data.filtered(StoredNode())), tmp_path, 7, 11)


async def test_a_method_is_a_source(tmp_path: Path) -> None:
    class Numbers(Told):
        async def numbers(self) -> AsyncIterator[int]:
            while self.count < 60:
                self.count += 1
                yield self.count

    await check_interrupted(lambda: ps.graph(ps.node(Numbers().numbers))(), tmp_path, 7, 11)  # noqa: PLW0108 - a new object for each call


@dataclass(frozen=True)
class Above:
    """An object that cannot change; its limit may be an object that can."""

    limit: Any

    def __call__(self, value: int) -> bool:
        return value > self.limit

    def is_below(self, value: int) -> bool:
        return value < self.limit


@pytest.mark.parametrize(
    "stage",
    [
        data.filtered(lambda value: value > 1),
        data.filtered(Above(20)),
        data.filtered(Above(50).is_below),
        data.filtered({2, 3, *range(20, 60)}.__contains__),
        data.filtered(ps.node(stateless=True)(Untold().keeps)),
        data.filtered(functools.partial(operator.lt, 4)),
        data.filtered(operator.methodcaller("bit_count")),
        data.batched(3, collate=tuple),
        data.batched(3, collate=np.asarray),
        data.batched(3, collate=len),
        data.batched(3, collate=functools.partial(data.collate, ragged={})),
        lambda stream: ps.map_each(ps.node(abs), stream),
        lambda stream: ps.map_each(ps.node(stateless=True)(Untold().key), stream),
    ],
)
async def test_what_has_no_state_is_taken(tmp_path: Path, stage: Any) -> None:
    checkpoint = ps.Checkpoint(tmp_path)
    whole = [repr(value) async for value in engine.stream(call(stage))]
    assert [repr(value) async for value in engine.stream(call(stage), checkpoint=checkpoint)] == whole


def behind_a_cache(one: Any) -> Any:
    return each(twice, 1, cache=ps.Cache(max_bytes=1000), failover=ps.node(one.later))


def twice_as_arguments(one: Any) -> Any:
    def stage(stream: Any) -> Any:
        outside = one.counted(5)
        return ps.map_each(lambda value: and_outside(one.counted(value), outside), stream, concurrency=1)

    return stage


GENERATORS: list[Any] = [
    random.Random(1).choice, random.random, np.random.default_rng(1).random, np.random.standard_normal,
    count().__next__, np.vectorize(float),
    *(functools.partial(print, one) for one in (random.Random(1), np.random.default_rng(1), count(), [Untold()])),
]  # fmt: skip


@ps.node
def and_outside(value: Any, outside: Any) -> Any:
    return value, outside


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        (lambda one: each(one.later, 8), "overtake .*concurrency=1"),
        (lambda one: each(one.keeps, 8, runs_on="thread"), "overtake"),
        (lambda one: each(fails, 8, fallback=one), "overtake"),
        (lambda one: each(one.keeps, 1, runs_on="process"), "worker processes .*thread"),
        (lambda one: each(one.later, 1, cache=ps.Cache(max_bytes=1000)), "leave out cache="),
        (lambda one: each(twice, 1, cache=ps.Cache(max_bytes=1000, size=one)), "leave out cache="),
        (behind_a_cache, "leave out cache="),
        (lambda one: each(one.later, 1, hedge=ps.Hedge(after_seconds=1)), "leave out hedge="),
        (lambda one: lambda stream: ps.map_each(one.counted, stream >> data.filtered(one.keeps)), "several places"),
        (twice_as_arguments, "several places"),
        (lambda one: each(as_they_are, 1, batch=ps.Batch(4, max_cost=1e9, cost=one.key)), "batches"),
        *((lambda _, fn=fn: data.filtered(fn), "stateless=True") for fn in GENERATORS),
        (lambda _: data.filtered(Above(Untold().keeps)), "Untold is called as fn="),
        (lambda _: lambda stream: stream >> ps.RateLimit(per_second=1e6, key=Untold().key), "Untold is called as key="),
    ],
)
async def test_state_that_no_snapshot_could_have_is_refused(tmp_path: Path, stage: Any, told: str) -> None:
    with pytest.raises(ps.PlanError, match=told):
        engine.stream(call(stage(Told())), checkpoint=ps.Checkpoint(tmp_path))


async def test_a_source_is_not_saved_by_the_state_of_its_fallback(tmp_path: Path) -> None:
    @ps.node(fallback=Told())
    async def ones() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ps.PlanError, match="would begin at its first record again"):
        engine.stream(ps.graph(ones)(), checkpoint=ps.Checkpoint(tmp_path))


class Passed:
    """An object that is passed to a function, which calls one of its methods."""

    def __init__(self) -> None:
        self.one = Told()
        self.state, self.restore = self.one.state, self.one.restore


@pytest.mark.parametrize("in_parts", [False, True])
async def test_two_objects_of_one_function_have_a_state_each(tmp_path: Path, in_parts: bool) -> None:
    def both(one: Any, other: Passed, value: Any) -> bool:
        is_third = one["one"] if in_parts else one
        return bool(is_third(value)) and other.one(value) % 5 != 0

    def make() -> Any:
        parts = {"one": Told().keeps} if in_parts else Told().keeps
        return call(data.filtered(functools.partial(both, parts, Passed())))

    await check_interrupted(make, tmp_path, 7, 11)
    state = (tmp_path / "snapshot-00000003/snapshot.json").read_text()
    assert '"filtered/fn":{"value":60' in state
    assert '"filtered/fn#2":{"value":45' in state


async def test_what_is_compiled_has_no_state(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")

    class Model:
        def __init__(self) -> None:
            self.weight = 2.0

        def __call__(self, value: Any) -> Any:
            return self.weight * value

    model = ps.device_node(Model())

    def stages(stream: Any) -> Any:
        stream = ps.map_each(ps.node(jax.jit(jax.numpy.sin)), stream)
        return ps.map_each(model, ps.map_each(ps.node(jax.nn.relu), stream))

    async with engine.stream(call(stages), checkpoint=ps.Checkpoint(tmp_path)) as values:
        assert len([value async for value in values]) == 60


@pytest.mark.parametrize(
    "stage",
    [
        lambda one: each(one, 8, name="counted"), lambda one: each(functools.partial(one), 8, name="counted"),
        lambda one: each(one.key, 8), lambda one: lambda stream: ps.map_each(one.counted, stream),
    ],
    ids=["object", "partial", "method", "method that is a node"],
)  # fmt: skip
async def test_what_runs_on_the_loop_without_a_wait_goes_on_at_any_concurrency(tmp_path: Path, stage: Any) -> None:
    await check_interrupted(lambda: call(stage(Told())), tmp_path, 7, 11)
