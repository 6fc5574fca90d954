"""Tasks that a handler starts know the item of the handler or no item, but never another item."""

import asyncio
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import paused, values_of


@ps.node
async def grouped(x: int) -> list:
    async def child() -> tuple[str, str, int]:
        await asyncio.sleep(0)
        info = ps.current()
        return info.graph, info.node, info.item

    async with asyncio.TaskGroup() as group:
        children = [group.create_task(child()) for _ in range(3)]
    return [task.result() for task in children]


grouping = ps.graph(grouped)


@ps.graph
async def mapping(xs: list[int]) -> list:
    return await ps.map_each(grouped, xs)


async def test_the_children_of_a_handler_know_its_item() -> None:
    assert await engine.run(grouping(0)) == [("grouped", "grouped", 0)] * 3
    expected = [[("grouped", "grouped", x)] * 3 for x in range(100)]
    assert await values_of(engine.stream(grouping(x) for x in range(100))) == expected
    async with engine.deploy(grouping) as service:
        assert await service.map(grouping(x) for x in range(5)) == expected[:5]
        assert await service(0) == expected[0]
    found = await engine.run(mapping(list(range(20))))
    assert [[item for *_, item in children] for children in found] == [[x] * 3 for x in range(20)]


async def test_a_task_that_outlives_its_handler_keeps_its_item() -> None:
    gate = asyncio.Event()
    tasks: list[asyncio.Task] = []

    async def later(x: int) -> tuple[int, int, bool]:
        await gate.wait()
        info = ps.current()
        try:
            info.check_cancelled()
        except asyncio.CancelledError:
            return x, info.item, True
        return x, info.item, False

    @ps.node
    async def leaves(x: int) -> int:
        tasks.append(asyncio.create_task(later(x)))
        if x % 3 == 0:
            await asyncio.sleep(0)
        return x

    @ps.node
    async def goes_on(x: int) -> int:
        if x == 9:
            gate.set()
            await asyncio.gather(*tasks)
        return x

    graph = leaves >> goes_on
    await values_of(engine.stream((graph(x) for x in range(10)), max_in_flight=4))
    found = await asyncio.gather(*tasks)
    assert [item for _, item, _ in found] == [x for x, _, _ in found] == list(range(10))
    assert found[0] == (0, 0, True)  # its item has ended
    assert found[9] == (9, 9, False)  # the item is not done yet


def start_hidden(coroutine) -> asyncio.Task:
    return asyncio.get_running_loop().create_task(coroutine)


@pytest.mark.parametrize("kind", ["async", "asks for its item", "plain", "has ended"])
async def test_a_task_that_a_helper_started_says_when_it_cannot_tell(kind: str) -> None:
    """The handler starts tasks in a helper, so its own code does not show it."""
    asked: list[asyncio.Task] = []
    may_ask = asyncio.Event()

    async def ask() -> int:
        await (may_ask.wait() if kind == "has ended" else asyncio.sleep(0))
        return ps.current().item

    async def asynchronous(x: int) -> int:
        asked.append(start_hidden(ask()))
        await asyncio.sleep(0)
        return x

    async def knows(x: int) -> int:
        assert ps.current().item == x
        asked.append(start_hidden(ask()))
        return x

    def inline(x: int) -> int:
        asked.append(start_hidden(ask()))
        return x

    handler: Any = {"asks for its item": knows, "plain": inline}.get(kind, asynchronous)
    graph = ps.node(handler) >> paused >> paused
    await values_of(engine.stream(graph(x) for x in range(5)))
    may_ask.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    if kind == "asks for its item":
        assert results == list(range(5))
    else:
        assert [type(result) for result in results] == [ps.UnknownItemError] * 5
        assert ("has ended" if kind == "has ended" else "in the handler itself") in str(results[0])


async def test_a_thread_that_a_handler_starts_knows_its_item() -> None:
    @ps.node
    async def threads(x: int) -> int:
        return await asyncio.to_thread(lambda: ps.current().item)

    assert await values_of(engine.stream(map(ps.graph(threads), range(10)))) == list(range(10))


async def test_a_run_in_a_task_of_a_handler_is_nested() -> None:
    @ps.node
    async def left(x: int) -> float | None:
        return ps.current().remaining_seconds()

    inner = ps.graph(left)

    @ps.node
    async def outside(x: int) -> list[float | None]:
        return await asyncio.gather(engine.run(inner(x)), engine.run(inner(x)))

    @ps.node
    async def hidden(x: int) -> list[float | None]:
        return [await start_hidden(engine.run(inner(x)))]

    @ps.graph
    async def outer(x: int) -> list:
        return [await outside(x), await hidden(x)]

    streamed = await values_of(engine.stream([outer(1)], timeout_seconds=60))
    for results in [await engine.run(outer(1), timeout_seconds=60), *streamed]:
        for seconds in [*results[0], *results[1]]:
            assert 0 < seconds <= 60


async def test_a_deployment_is_not_called_from_a_task_of_its_own_node() -> None:
    @ps.node
    async def calls(x: int) -> list:
        return await asyncio.gather(service(x), service(x), return_exceptions=True)

    @ps.node
    async def hides(x: int) -> list:
        task = start_hidden(service(x))
        await asyncio.wait([task])
        return [task.exception()]

    @ps.graph
    async def graph(x: int) -> list:
        return [await calls(x), await hides(x)]

    async with engine.deploy(graph) as service:
        found = await service(1)
        streamed = (await service.map([graph(1)]))[0]
    for refused in (*found, *streamed):
        assert [type(error) for error in refused] == [ps.ReentrantCallError] * len(refused)


async def test_a_task_whose_item_is_done_may_call_the_deployment() -> None:
    gate = asyncio.Event()
    tasks: list[asyncio.Task] = []

    async def later() -> int:
        await gate.wait()
        return await service(0)

    @ps.node
    async def leaves(x: int) -> int:
        if x:
            tasks.append(asyncio.create_task(later()))
        return x

    graph = ps.graph(leaves)

    async with engine.deploy(graph) as service:
        assert await service(1) == 1
        gate.set()
        assert await tasks[0] == 0
        gate.clear()
        async with service.stream([graph(1)]) as results:
            await testing.wait_quiescent()  # the item is done, but its result is not read yet
            gate.set()
            assert await tasks[1] == 0
            assert await anext(results) == 1
