"""`max_workers` of a run bounds how many of its handlers run at a time, in all nodes and bodies, without hanging."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gauge, cancelled_at_every_step, model, numbers, outcomes, paused, summed

gauge = Gauge()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    gauge.__init__()  # type: ignore[misc]


async def work(x: int) -> int:
    with gauge:
        await asyncio.sleep(0)
    return x


@ps.node
async def ask(x: int) -> int:
    with gauge:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return x


@ps.node
def plain(x: int) -> int:
    with gauge:
        pass
    return x


@ps.node(runs_on="thread")
def in_thread(x: int) -> int:
    with lock, gauge:
        return x


lock = threading.Lock()
ask_other = ps.node(name="ask_other")(work)
limited = ps.node(name="limited", concurrency=3)(work)
kept = ps.node(name="kept", cache=ps.Cache(max_bytes=1))(work)
stateful = model(call=work)
in_order = model(call=work, ordered=True)


@ps.node(timeout_seconds=60, retry=ps.Retry(3))
async def flaky(x: int) -> int:
    with gauge:
        await asyncio.sleep(0)
        if ps.current().attempt < 3:
            raise OSError
    return x


@ps.node(failover=ask)
async def replaced(x: int) -> int:
    with gauge:
        await asyncio.sleep(0)
    raise OSError


@ps.node(batch=ps.Batch(8))
async def batched(xs: list[int]) -> list[int]:
    gauge.peak = max(gauge.peak, len(xs))
    await asyncio.sleep(0)
    return xs


@ps.node
async def doubled(values: AsyncIterator[int]) -> AsyncIterator[int]:
    async for value in values:
        yield 2 * value


async def fan_out(x: int) -> list[int]:
    return [await ask(x) for _ in range(10)]


async def two_levels(x: int) -> list[int]:
    return [await ask_other(await ask(plain(x))) for _ in range(6)]


async def mapped(x: int) -> list[int]:
    return await ps.map_each(ask, list(range(20)))


async def maps_side_by_side(x: int) -> tuple[list[int], list[int]]:
    async def both(x: int) -> int:
        return await ask(await ask_other(x))

    return await ps.map_each(both, [1] * 6), await ps.map_each(ask, [x] * 6)


async def maps_in_maps(x: int) -> list[list[int]]:
    async def inner(x: int) -> list[int]:
        return await ps.map_each(ask, [x] * 4)

    return await ps.map_each(inner, [1, 2, 3])


async def branches(x: int) -> list[int]:
    return [await ps.cond(x, ask, ask_other, x) for _ in range(8)]


async def of_every_kind(x: int) -> list[int]:
    nodes: list[Any] = [ask, limited, flaky, replaced, kept, ask_other, stateful]
    return [in_thread(x), plain(x), *[await node(x) for node in nodes for _ in range(2)]]


async def of_cached(x: int) -> list[int]:
    return [await kept(number) for number in range(10)]


async def of_batched(x: int) -> list[int]:
    return await ps.map_each(batched, [1] * 20)


async def of_ordered(x: int) -> list[int]:
    async def body(x: int) -> int:
        return await in_order(await ask(x))

    return await ps.map_each(body, [1] * 20)


GRAPHS = [
    fan_out, two_levels, mapped, maps_side_by_side, maps_in_maps, branches, of_every_kind, of_cached, of_batched,
    of_ordered,
]  # fmt: skip


@pytest.mark.parametrize("scheduler", ["auto", "wave", "actors", "sequential"])
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
async def test_no_more_handlers_run_at_a_time(graph: Callable[..., Any], scheduler: Any) -> None:
    made = ps.graph(graph)
    found: set[str] = set()
    for width in (1, 3):
        gauge.peak = 0
        async with engine.Engine() as own:
            found.add(repr(await own.run(made(1), max_workers=width, scheduler=scheduler)))
        assert 1 <= gauge.peak <= width
    gauge.peak = 0
    async with engine.Engine() as own:
        assert {repr(await own.run(made(1), scheduler=scheduler))} == found
    assert gauge.peak > 3 or scheduler == "sequential" or graph is of_every_kind


@pytest.mark.parametrize("level", ["keyword", "block", "engine"])
async def test_each_call_has_its_own_bound(level: str) -> None:
    graph = ps.graph(fan_out)
    options: Any = {"max_workers": 2}
    async with engine.Engine(**options if level == "engine" else {}) as own:
        with ps.execution_options(**options if level == "block" else {}):
            runs = [own.run(graph(x), **options if level == "keyword" else {}) for x in range(3)]
            await asyncio.gather(*runs)
        assert 4 <= gauge.peak <= 6
        gauge.peak = 0
        await own.run(graph(1), max_workers=None)
        assert gauge.peak > 2


async def test_streams_take_no_place() -> None:
    """Neither a node that gives a stream nor a node that reads it takes a place: a reader waits for other handlers."""

    in_a_line = numbers >> doubled >> summed

    @ps.graph
    async def through_a_map(x: int) -> int:
        return await summed(ps.map_each(ask, numbers(x)))

    @ps.graph
    async def folded(x: int) -> int:
        async def body(state: int, value: int) -> int:
            return await ask(value)

        return await ps.fold(body, doubled(numbers(x)), 0)

    for graph, expected in ((in_a_line, 20), (through_a_map, 10), (folded, 8)):
        assert await engine.run(graph(5), max_workers=1) == expected
    assert gauge.peak == 1


async def test_a_call_inside_of_a_handler_has_a_bound_of_its_own() -> None:
    inner = ps.graph(fan_out)

    @ps.node
    async def outside(x: int) -> int:
        return len(await engine.run(inner(x), max_workers=2))

    @ps.graph
    async def graph(x: int) -> list[int]:
        return [await outside(x) for _ in range(3)]

    assert await engine.run(graph(1), max_workers=1) == [10] * 3
    assert gauge.peak == 2


async def test_who_waits_for_its_call_keeps_no_place_of_a_node_from_a_nested_call() -> None:
    """A waiting call that kept the only place of `limited_one` would wait for a handler that waits for this place."""

    limited_one = ps.node(name="limited_one", concurrency=1)(paused.fn)
    alone = ps.graph(limited_one)

    @ps.node
    async def nests(x: int) -> int:
        await testing.wait_quiescent()
        return await engine.run(alone(x))

    @ps.graph
    async def graph(x: int) -> list[int]:
        return [await nests(x), await limited_one(x), await limited_one(x)]

    async with asyncio.timeout(60):
        assert await engine.run(graph(1), max_workers=1) == [1, 1, 1]
        assert await asyncio.gather(*[engine.run(graph(x), max_workers=2) for x in range(4)]) == [
            [x] * 3 for x in range(4)
        ]


async def test_items_that_fail_or_are_cancelled_give_their_places_back() -> None:
    @ps.node
    async def odd(x: int) -> int:
        with gauge:
            await asyncio.sleep(0)
            if x % 2:
                raise OSError
        return x

    @ps.graph
    async def skipping(x: int) -> list[list[int]]:
        async def inner(x: int) -> list[int]:
            return await ps.map_each(odd, [x, x, x, 1, x])

        return await ps.map_each(inner, [0, 1, 2, 3, 4, 6], on_error="skip")

    @ps.graph
    async def some(x: int) -> list[int]:
        return await ps.map_each(odd, list(range(10)), on_error="skip")

    assert await engine.run(some(1), max_workers=2) == [0, 2, 4, 6, 8]
    assert await engine.run(skipping(1), max_workers=2) == []
    assert gauge.peak <= 2
    hanging = asyncio.create_task(engine.run(ps.graph(mapped)(1), max_workers=1))
    await asyncio.sleep(0)
    hanging.cancel()
    assert await outcomes(hanging) == [asyncio.CancelledError]


async def test_a_second_attempt_takes_a_place_of_the_call() -> None:
    @ps.node(hedge=ps.Hedge(after_seconds=0.0001, max_share=1))
    async def hedged(x: int) -> int:
        with gauge:
            await asyncio.sleep(0.02)
        return x

    @ps.graph
    async def graph(x: int) -> list[int]:
        return [await hedged(x) for _ in range(4)]

    assert await engine.run(graph(1), max_workers=3) == [1] * 4
    assert gauge.peak == 3


def test_a_cancel_at_every_step_leaves_no_place_taken() -> None:
    narrow = ps.node(name="narrow", concurrency=1)(work)

    @ps.graph
    async def graph(x: int) -> list[int]:
        async def body(x: int) -> int:
            return await narrow(await ask(x))

        return await ps.map_each(body, [x] * 3)

    async def main() -> list[int]:
        async with engine.Engine() as own:
            beside = asyncio.create_task(own.run(graph(2)))
            try:
                return await own.run(graph(1), max_workers=2)
            finally:
                await testing.wait_quiescent()
                assert await beside == [2, 2, 2]
                assert [actor.in_flight for actor in own.statistics().actors] == [0] * len(own.statistics().actors)

    for outcome in cancelled_at_every_step(main):
        assert gauge.now == 0
        assert outcome.result in (None, [1, 1, 1])
