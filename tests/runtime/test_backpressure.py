"""A bounded graph cannot deadlock: a producer that waits for room always goes on when there is room."""

import asyncio

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import virtual


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


class Page:
    """A page; number 5 has no body."""

    def __init__(self, number: int) -> None:
        if number != 5:
            self.body = b"x"


@ps.node
async def fetch(x: int) -> Page:
    return Page(x)


@ps.node(concurrency=1, max_bytes=100)
async def use(body: bytes) -> int:
    await asyncio.sleep(0)
    return len(body)


@ps.graph
async def sized(x: int) -> int:
    return await use((await fetch(x)).body)


async def test_an_argument_that_cannot_be_built_fails_its_item_only_though_its_size_is_asked_for() -> None:
    outcomes = [outcome async for outcome in engine.stream(sized(x) for x in range(20)).outcomes()]
    assert [outcome.value for outcome in outcomes if outcome.index != 5] == [1] * 19
    assert isinstance(outcomes[5].error, AttributeError)
    assert outcomes[5].error.__notes__ == ["in node 'use' of graph 'sized', item 5, attempt 1"]
    async with engine.deploy(sized) as service:
        with pytest.raises(AttributeError):
            await service(5)
        assert await service(6) == 1
    with pytest.raises(AttributeError):
        await engine.run(sized(5))
    assert await engine.run(sized(6)) == 1


@virtual
async def test_a_value_that_cannot_tell_its_size_fails_its_item_only() -> None:
    @ps.node
    async def make(x: int) -> memoryview:
        view = memoryview(bytes(10))
        if x == 2:
            view.release()  # from now on, `view.nbytes` raises ValueError
        return view

    @ps.node(concurrency=1, max_bytes=100)
    async def measure(view: memoryview) -> int:
        await asyncio.sleep(0)
        return len(view)

    graph = make >> measure
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # logs of this error do not matter
    outcomes = [outcome async for outcome in engine.stream(graph(x) for x in range(5)).outcomes()]
    assert [outcome.value for outcome in outcomes] == [10, 10, None, 10, 10]
    assert isinstance(outcomes[2].error, ValueError)
