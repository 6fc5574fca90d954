"""References in control flow: a value is fetched before a body takes it, and stays on workers within one body."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import cluster, engine, testing

Array = Any
WORKERS = cluster.ray(workers=2, name="two workers of bodies")
SIZE = 20_000


@pytest.fixture(autouse=True)
def in_threads() -> Iterator[None]:
    with testing.workers_in_threads(WORKERS):
        yield


@ps.node(runs_on=WORKERS)
def make(number: float) -> Array:
    return np.full(SIZE, number)


@ps.node(runs_on=WORKERS)
def more(array: Array) -> Array:
    return array + 1


@ps.node(runs_on=WORKERS)
def mean(array: Array) -> float:
    return float(array.mean())


@ps.node(runs_on=WORKERS)
def is_small(array: Array) -> bool:
    return bool(array[0] < 5)


@ps.graph
async def twice(array: Array) -> Array:
    return more(more(array))


@ps.graph
async def same(array: Array) -> Array:
    return array


@ps.graph
async def chosen(number: float) -> float:
    array = make(number)
    return mean(await ps.cond(is_small(array), twice, same, array))


@ps.graph
async def each_mean(array: Array) -> float:
    return mean(more(array))


@ps.graph
async def mapped(number: float) -> list[float]:
    return await ps.map_each(each_mean, [make(number), more(make(number))])


@ps.graph
async def captured(number: float) -> list[float]:
    outside = make(number)

    async def with_outside(factor: float) -> float:
        return mean(scaled(outside, factor))

    return await ps.map_each(with_outside, [1.0, 2.0])


@ps.node(runs_on=WORKERS)
def scaled(array: Array, factor: float) -> Array:
    return array * factor


@ps.graph
async def looped(number: float) -> float:
    return mean(await ps.while_loop(is_small, more, make(number)))


@pytest.mark.parametrize(
    ("graph", "expected"), [(chosen, 4.0), (mapped, [3.0, 4.0]), (captured, [2.0, 4.0]), (looped, 5.0)]
)
async def test_control_flow_gives_what_it_gives_on_one_machine(graph: Any, expected: Any) -> None:
    async with engine.Engine() as e:
        assert await e.run(graph(2.0)) == expected


async def test_values_inside_of_a_body_stay_on_workers_and_those_that_enter_one_are_fetched() -> None:
    async with engine.Engine() as e, e.deploy(mapped) as service:
        await service(2.0)
        actors = service.statistics().actors
    by_value = {
        (one.graph, one.node): sum(each.value for each in one.figures if each.name == "by value") for one in actors
    }
    [inside] = [value for (graph, node), value in by_value.items() if graph != "mapped" and node == "more"]
    assert inside == 0
    assert {one.node for one in actors if one.graph == "mapped"} >= {"make", "more"}
