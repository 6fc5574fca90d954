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
from tests.kit import added

SOURCE = range(60)


class Count:
    """Counts its calls, with any arguments; each result depends on all calls before."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.count * 1000 + int(np.sum(args[0]) if isinstance(args[0], int | list) else 0)

    def is_third(self, value: Any) -> bool:
        self.count += 1
        return self.count % 3 == 0

    @ps.node
    def numbered(self, value: int) -> int:
        self.count += 1
        return self.count * 1000 + value

    def pause(self, error: Exception, attempt: int) -> float:
        """Forbids a further attempt after every third failure, by a pause of 1e9 seconds."""
        self.count += 1
        return 1e9 if self.count % 3 == 0 else 0.0

    def of_key(self, value: int) -> int:
        self.count += 1
        return value

    async def later(self, value: int) -> int:
        self.count += 1
        return self.count * 1000 + value

    async def doubled(self, values: AsyncIterator[int]) -> AsyncIterator[int]:
        async for value in values:
            self.count += 1
            yield self.count * 1000 + value

    async def numbers(self) -> AsyncIterator[int]:
        while self.count < 60:
            self.count += 1
            yield self.count


class Stored(Count):
    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state


@ps.node
class StoredNode:
    def __init__(self) -> None:
        self.one = Stored()

    def state(self) -> Any:
        return self.one.state()

    def restore(self, state: Any) -> None:
        self.one.restore(state)

    def __call__(self, value: Any) -> bool:
        return self.one.is_third(value)


@ps.node
def index(record: data.Record[Any]) -> int:
    return record.index


def fails(value: int) -> int:
    raise ValueError(value)


class Flaky:
    """A function that fails at the first attempts of an item, without state that a restart could lose."""

    def __new__(cls) -> Any:
        def flaky(value: int) -> int:
            if ps.current().attempt < 2:
                raise ValueError
            return value

        return flaky


def one_after_the_other(fn: Any, **policy: Any) -> Callable[[Any], Any]:
    node = ps.node(**policy)(fn)
    return lambda stream: ps.map_each(node, stream, concurrency=1)


def in_body(one: Any) -> Callable[[Any], Any]:
    node = ps.node(one.later)

    async def body(value: Any) -> Any:
        return await node(added(value))

    return lambda stream: ps.map_each(body, stream, concurrency=1)


@ps.node
async def of_index(value: int) -> int:
    return value * 10


# Each place in which a graph calls user code: a function that makes a stage of an object.
SPOTS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "filtered": lambda one: data.filtered(one.is_third),
    "collate": lambda one: data.batched(3, collate=one),
    "collate of a partial": lambda one: data.batched(3, collate=functools.partial(one)),
    "collate in an argument": lambda one: data.batched(3, collate=functools.partial(called_with, one)),
    "node of an object": lambda one: lambda stream: ps.map_each(ps.node(name="counted")(one), stream),
    "node of a partial": lambda one: lambda stream: ps.map_each(ps.node(name="c")(functools.partial(one)), stream),
    "node of a method": lambda one: lambda stream: ps.map_each(ps.node(one.of_key), stream),
    "async node of a method": in_body,
    "method that is a node": lambda one: lambda stream: ps.map_each(one.numbered, stream),
    "node in a thread": lambda one: one_after_the_other(one.is_third, runs_on="thread"),
    "node with one place": lambda one: lambda stream: ps.map_each(ps.node(concurrency=1)(one.later), stream),
    "generator": lambda one: ps.node(one.doubled),
    "fallback": lambda one: one_after_the_other(fails, fallback=one),
    "wait": lambda one: one_after_the_other(Flaky(), retry=ps.Retry(3, wait=one.pause), fallback=minus_one),
    "cache key": lambda one: one_after_the_other(of_index.fn, cache=ps.Cache(max_bytes=10**6, key=one.of_key)),
    "in a node": lambda one: data.filtered(ps.node(one.is_third)),
    "in a branch": lambda one: lambda stream: in_a_cond(one, stream),
}  # fmt: skip


def called_with(one: Any, values: Any) -> Any:
    return one(values)


def minus_one(error: Exception) -> int:
    return -1


def in_a_cond(one: Any, stream: Any) -> Any:
    third = ps.node(one.is_third)

    async def body(value: Any) -> Any:
        return await ps.cond(is_even(value), third, added, value)

    return ps.map_each(body, stream, concurrency=1)


@ps.node
def is_even(value: int) -> bool:
    return value % 2 == 0


def call(stage: Callable[[Any], Any]) -> Any:
    @ps.graph
    async def values(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
        return stage(ps.map_each(index, records))  # type: ignore[no-any-return]

    return values(data.order(SOURCE, shuffle_seed=1))


async def interrupted(make: Callable[[], Any], folder: Path) -> None:
    whole = [value async for value in engine.stream(make())]
    got: dict[int, Any] = {}
    for stop in (7, 11, None):
        async with engine.stream(make(), checkpoint=ps.Checkpoint(folder)) as values:
            assert values.position == len(got)
            async for value in values:
                got[values.position - 1] = value
                if values.position == stop:
                    await values.checkpoint()
                    break
    assert list(got.values()) == whole
    assert len(whole) > 11


@pytest.mark.parametrize("spot", SPOTS)
async def test_what_can_tell_its_state_goes_on(tmp_path: Path, spot: str) -> None:
    made: list[Stored] = []

    def make() -> Any:
        made.append(Stored())
        return call(SPOTS[spot](made[-1]))

    await interrupted(make, tmp_path)
    assert made[-1].count == made[0].count > 0


@pytest.mark.parametrize("spot", SPOTS)
async def test_what_cannot_tell_its_state_is_refused(tmp_path: Path, spot: str) -> None:
    with pytest.raises(ps.PlanError, match="cannot be used with checkpoint=: ") as raised:
        engine.stream(call(SPOTS[spot](Count())), checkpoint=ps.Checkpoint(tmp_path))
    assert "stateless=True" in str(raised.value)
    assert "Count" in str(raised.value) or spot == "generator"
    assert __file__ in str(raised.value)


async def test_a_node_of_a_class_in_a_stage_goes_on(tmp_path: Path) -> None:
    await interrupted(lambda: call(data.filtered(StoredNode())), tmp_path)


async def test_a_method_is_a_source(tmp_path: Path) -> None:
    def make() -> Any:
        one = ps.node(Stored().numbers)

        return ps.graph(one)()

    await interrupted(make, tmp_path)


async def test_a_source_is_not_saved_by_the_state_of_its_fallback(tmp_path: Path) -> None:
    @ps.node(fallback=Stored())
    async def ones() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ps.PlanError, match="would begin at its first record again"):
        engine.stream(ps.graph(ones)(), checkpoint=ps.Checkpoint(tmp_path))


@dataclass(frozen=True)
class Above:
    limit: int

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
        data.filtered(ps.node(stateless=True)(Count().is_third)),
        data.filtered(functools.partial(operator.lt, 4)),
        data.filtered(operator.methodcaller("bit_count")),
        data.batched(3, collate=tuple),
        data.batched(3, collate=np.asarray),
        data.batched(3, collate=len),
        data.batched(3, collate=functools.partial(data.collate, ragged={})),
        lambda stream: ps.map_each(ps.node(abs), stream),
        lambda stream: ps.map_each(ps.node(stateless=True)(Count().of_key), stream),
    ],
)
async def test_what_has_no_state_is_taken(tmp_path: Path, stage: Any) -> None:
    checkpoint = ps.Checkpoint(tmp_path)
    whole = [repr(value) async for value in engine.stream(call(stage))]
    assert [repr(value) async for value in engine.stream(call(stage), checkpoint=checkpoint)] == whole


def with_hedge(one: Any) -> Any:
    return one_after_the_other(one.later, hedge=ps.Hedge(after_seconds=1))


def behind_a_cache(one: Any) -> Any:
    failover = ps.node(one.later)
    cached = ps.node(cache=ps.Cache(max_bytes=1000), failover=failover)(of_index.fn)
    return lambda stream: ps.map_each(cached, stream, concurrency=1)


def twice(one: Any) -> Any:
    return lambda stream: ps.map_each(one.numbered, stream >> data.filtered(one.is_third))


def twice_as_arguments(one: Any) -> Any:
    def stage(stream: Any) -> Any:
        outside = one.numbered(5)
        return ps.map_each(lambda value: and_outside(one.numbered(value), outside), stream, concurrency=1)

    return stage


@ps.node
def and_outside(value: Any, outside: Any) -> Any:
    return value, outside


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        (lambda one: lambda stream: ps.map_each(ps.node(one.later), stream), "overtake .*concurrency=1"),
        (lambda one: lambda stream: ps.map_each(ps.node(runs_on="thread")(one.is_third), stream), "overtake"),
        (lambda one: lambda stream: ps.map_each(ps.node(fallback=one)(fails), stream), "overtake"),
        (lambda one: one_after_the_other(one.is_third, runs_on="process"), "worker processes .*thread"),
        (lambda one: one_after_the_other(one.later, cache=ps.Cache(max_bytes=1000)), "leave out cache="),
        (lambda one: one_after_the_other(of_index.fn, cache=ps.Cache(max_bytes=1000, size=one)), "leave out cache="),
        (behind_a_cache, "leave out cache="),
        (with_hedge, "leave out hedge="),
        (twice, "several places"),
        (twice_as_arguments, "several places"),
        (lambda one: lambda stream: ps.map_each(batch_of(one), stream, concurrency=1), "batches"),
    ],
)
async def test_state_that_depends_on_the_time_is_refused(tmp_path: Path, stage: Any, told: str) -> None:
    with pytest.raises(ps.PlanError, match=told):
        engine.stream(call(stage(Stored())), checkpoint=ps.Checkpoint(tmp_path))


def batch_of(one: Any) -> Any:
    async def batched(values: list[int]) -> list[int]:
        return values

    return ps.node(batch=ps.Batch(4, max_cost=1e9, cost=one.of_key))(batched)


@pytest.mark.parametrize(
    "fn",
    [
        random.Random(1).choice, random.random, np.random.default_rng(1).random, np.random.standard_normal,
        count().__next__, np.vectorize(float),
        *(functools.partial(print, one) for one in (random.Random(1), np.random.default_rng(1), count(), [Count()])),
    ],
    ids=[
        "Random", "random", "Generator", "numpy", "count", "vectorize",
        "Random as argument", "Generator as argument", "count as argument", "functions as argument",
    ],
)  # fmt: skip
async def test_generators_of_numbers_are_refused(tmp_path: Path, fn: Any) -> None:
    with pytest.raises(ps.PlanError, match="stateless=True"):
        engine.stream(call(data.filtered(fn)), checkpoint=ps.Checkpoint(tmp_path))


@dataclass(frozen=True)
class Holding:
    parts: tuple[Any, ...]
    one: Any

    def __call__(self, value: Any) -> Any:
        return self.one.is_third(value) or self.parts[0](value)


class Passed:
    """An object that is passed to a function, which calls one of its methods."""

    def __init__(self) -> None:
        self.one = Stored()
        self.state, self.restore = self.one.state, self.one.restore


@pytest.mark.parametrize("in_parts", [False, True])
async def test_two_objects_of_one_function_have_a_state_each(tmp_path: Path, in_parts: bool) -> None:
    def both(one: Any, other: Passed, value: Any) -> bool:
        is_third = one["one"] if in_parts else one
        return bool(is_third(value)) and other.one(value) % 5 != 0

    def make() -> Any:
        parts = {"one": Stored().is_third} if in_parts else Stored().is_third
        return call(data.filtered(functools.partial(both, parts, Passed())))

    await interrupted(make, tmp_path)
    state = (tmp_path / "snapshot-00000003/snapshot.json").read_text()
    assert '"filtered/fn":{"value":60' in state
    assert '"filtered/fn#2":{"value":20' in state


async def test_what_is_frozen_is_looked_through(tmp_path: Path) -> None:
    checkpoint = ps.Checkpoint(tmp_path)
    with pytest.raises(ps.PlanError, match="Count is called as fn="):
        engine.stream(call(data.filtered(Holding((), Count().is_third))), checkpoint=checkpoint)
    engine.stream(call(data.filtered(Holding((), abs))), checkpoint=checkpoint)


async def test_the_key_of_a_rate_limit_is_looked_at(tmp_path: Path) -> None:
    limit = ps.RateLimit(per_second=1e6, key=Count().of_key)
    with pytest.raises(ps.PlanError, match="Count is called as key="):
        engine.stream(call(lambda stream: stream >> limit), checkpoint=ps.Checkpoint(tmp_path))


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
