"""Details that no other test checks: side effects of a cancel, a thread, an error and a body."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import numbers


async def test_an_item_of_map_each_that_fails_cancels_its_siblings_and_not_the_node_around_them() -> None:
    """The first item runs in the task of `map_each`, which must not keep the cancel of the item."""
    cancelled: list[int] = []

    @ps.node
    async def fail_at_one(x: int) -> int:
        if x == 1:
            raise LookupError(x)
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(x)
            raise

    @ps.graph
    async def graph(x: int) -> list[int]:
        return await ps.map_each(fail_at_one, [x, 1, 2])

    with pytest.raises(LookupError):
        await engine.run(graph(0))
    async with engine.stream((graph(0) for _ in range(3)), max_in_flight=1) as stream:
        outcomes = [outcome async for outcome in stream.outcomes()]
    assert [type(outcome.error) for outcome in outcomes] == [LookupError] * 3
    assert cancelled.count(0) == 4


async def test_an_item_that_waits_for_a_node_does_not_get_the_place_of_a_thread_that_nobody_waits_for() -> None:
    loop = asyncio.get_running_loop()
    began, release = asyncio.Event(), threading.Event()
    log: list[str] = []

    @ps.node(runs_on="thread", concurrency=1)
    def block(x: int) -> int:
        log.append(f"begin {x}")
        loop.call_soon_threadsafe(began.set)
        if x == 1:
            assert release.wait(30)
        log.append(f"end {x}")
        return x

    blocking = ps.graph(block)

    async with engine.Engine(max_workers=2) as own:
        first = asyncio.create_task(own.run(blocking(1)))
        await began.wait()
        second = asyncio.create_task(own.run(blocking(2)))
        await testing.wait_quiescent()  # the second item waits in the inbox
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await testing.wait_quiescent()
        release.set()
        assert await second == 2
    assert log == ["begin 1", "end 1", "begin 2", "end 2"]


@pytest.mark.parametrize("way", ["run", "stream", "deploy"])
async def test_the_traceback_of_an_error_shows_the_handler_and_not_the_worker(way: str) -> None:
    @ps.node
    async def fail(x: int) -> int:
        await asyncio.sleep(0)
        raise LookupError(x)

    failing = ps.graph(fail)

    if way == "run":
        with pytest.raises(LookupError) as raised:
            await engine.run(failing(1))
    elif way == "stream":
        async with engine.stream([failing(1)]) as stream:
            with pytest.raises(LookupError) as raised:
                await anext(stream)
    else:
        async with engine.deploy(failing) as service:
            with pytest.raises(LookupError) as raised:
                await service(1)
    assert raised.traceback[-1].name == "fail"
    assert not [entry.path for entry in raised.traceback if entry.path.name == "worker.py"]


async def test_a_body_of_control_flow_inherits_the_deadline() -> None:
    @ps.node
    async def left(x: int) -> float | None:
        return ps.current().remaining_seconds()

    @ps.graph
    async def mapping(x: int) -> list[float | None]:
        return await ps.map_each(left, [x, x])

    for seconds in await engine.run(mapping(1), timeout_seconds=60):
        assert seconds is not None
        assert 0 < seconds <= 60
    assert await engine.run(mapping(1)) == [None, None]


async def test_the_error_of_leaving_a_stateful_node_keeps_that_of_the_item() -> None:
    @ps.node
    class Broken:
        async def __aenter__(self) -> "Broken":
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            raise RuntimeError("leaving")

        async def __call__(self, x: int) -> int:
            raise ValueError("item")

    broken = Broken()

    graph = ps.graph(broken)

    with pytest.raises(RuntimeError, match="leaving") as raised:
        await engine.run(graph(1))
    assert isinstance(raised.value.__context__, ValueError)
    with pytest.raises(RuntimeError, match="leaving") as raised:
        async for _ in engine.stream([graph(1)]):
            pass
    assert isinstance(raised.value.__context__, ValueError)


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_stateful_node_sees_calls_as_they_are_completed_and_values_in_their_order(ordered: bool) -> None:
    completed = [asyncio.Event() for _ in range(4)]

    @ps.node
    async def prepare(x: int) -> int:
        if x < 3:
            await completed[x + 1].wait()  # the last item is completed first
        completed[x].set()
        return x

    @ps.node
    class Learner:
        async def __call__(self, x: int) -> int:
            learned.append(x)
            return x

    learner, learned = Learner(), list[int]()

    step = prepare >> learner

    @ps.graph
    async def steps(x: int) -> AsyncIterator[int]:
        return ps.map_each(learner, ps.map_each(prepare, numbers(x), concurrency=4), concurrency=4)

    async with engine.stream((step(x) for x in range(4)), ordered=ordered) as results:
        assert [x async for x in results] == ([0, 1, 2, 3] if ordered else [3, 2, 1, 0])
    assert learned == [3, 2, 1, 0]
    learned.clear()
    for event in completed:
        event.clear()
    async with engine.stream(steps(4)) as values:
        assert [x async for x in values] == [0, 1, 2, 3]
    assert learned == [0, 1, 2, 3]
