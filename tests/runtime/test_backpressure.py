"""A bounded graph cannot deadlock: a producer that waits for room always goes on when there is room."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import outcomes_of


@ps.node(concurrency=3)
async def take(x: int) -> int:
    for _ in range(x * 7 % 3):
        await asyncio.sleep(0)
    return x


@ps.node
async def left(x: int) -> int:
    for _ in range(x * 5 % 3):
        await asyncio.sleep(0)
    return x


@ps.node(concurrency=1, capacity=1)
async def right(x: int) -> int:
    for _ in range(x * 11 % 3):
        await asyncio.sleep(0)
    return x


@ps.node(concurrency=2)
async def join(a: int, b: int) -> int:
    return a + b


@ps.graph
async def fork(x: int) -> int:
    taken = await take(x)
    return await join(await left(taken), await right(taken))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_producer_that_finds_its_frame_done_when_it_wakes(effort: int, ordered: bool) -> None:
    """A producer waits at a full inbox while other workers end its frame; the window gets one place back."""

    async def main() -> None:
        async with engine.stream((fork(x) for x in range(30)), max_in_flight=6, ordered=ordered) as stream:
            assert sorted([x async for x in stream]) == [2 * x for x in range(30)]
            assert stream.statistics().in_flight == 0

    testing.interleavings(main, count=50 * effort, timeout_seconds=60)


@ps.node(concurrency=1, capacity=1)
async def slow(x: int) -> int:
    await asyncio.sleep(20)
    return x


@ps.node(concurrency=1, capacity=1)
async def quick(x: int) -> int:
    await asyncio.sleep(1)
    return x


@ps.graph
async def uneven(x: int) -> int:
    taken = await left(x)
    return await join(await slow(taken), await quick(taken))


@ps.graph
async def uneven_from_the_start(x: int) -> int:
    return await join(await slow(x), await quick(x))


@pytest.mark.parametrize("graph", [uneven, uneven_from_the_start])
def test_two_full_inboxes_behind_a_fork_of_which_one_drains_first(graph, effort: int) -> None:
    async def main() -> None:
        assert [x async for x in engine.stream(graph(x) for x in range(20))] == [2 * x for x in range(20)]
        async with engine.deploy(graph) as service:
            calls = [asyncio.create_task(service(x)) for x in range(20)]
            assert [await call for call in calls] == [2 * x for x in range(20)]

    testing.interleavings(main, count=20 * effort)


@ps.node
async def page(x: int) -> SimpleNamespace:
    return SimpleNamespace() if x == 5 else SimpleNamespace(body=b"x")


@ps.node
async def view(x: int) -> memoryview:
    view = memoryview(b"x")
    if x == 5:
        view.release()  # from now on, `view.nbytes` raises ValueError
    return view


@ps.node(concurrency=1, max_bytes=100)
async def use(body: Any) -> int:
    await asyncio.sleep(0)
    return len(body)


@ps.graph
async def of_a_part_that_is_missing(x: int) -> int:
    return await use((await page(x)).body)


of_a_value_without_size = view >> use


@pytest.mark.parametrize(
    ("graph", "error"), [(of_a_part_that_is_missing, AttributeError), (of_a_value_without_size, ValueError)]
)
async def test_an_argument_whose_size_cannot_be_told_fails_its_item_only(graph: Any, error: type[Exception]) -> None:
    outcomes = await outcomes_of(engine.stream(map(graph, range(20))))
    assert [outcome.value for outcome in outcomes] == [1] * 5 + [None] + [1] * 14
    assert isinstance(outcomes[5].error, error)
    assert outcomes[5].error.__notes__ == [f"in node 'use' of graph {graph.name!r}, item 5, attempt 1"]
    async with engine.deploy(graph) as service:
        with pytest.raises(error):
            await service(5)
        assert await service(6) == 1
    with pytest.raises(error):
        await engine.run(graph(5))
    assert await engine.run(graph(6)) == 1
