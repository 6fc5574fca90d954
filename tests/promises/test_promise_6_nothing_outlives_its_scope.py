"""Promise 6: no task, thread, process, file descriptor or span outlives its scope.

The fixtures of conftest check threads, descriptors and processes at the end of every test, and tasks at the end of
the whole run; the tests here check all of them at the end of each scope.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import begun, model, outcomes
from tests.promises.exploring import Explorer
from tests.promises.scenario import Injected, World


@ps.node
async def wait(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@ps.node
async def fail(x: float) -> float:
    raise LookupError(x)


beats: list[asyncio.Task[None]] = []


async def begin_a_beat() -> None:
    beats.append(asyncio.create_task(asyncio.sleep(1000)))


async def end_a_beat() -> None:
    beats.pop().cancel()


stateful = model(enter=begin_a_beat, leave=end_a_beat)


@ps.graph
async def busy(seconds: float) -> list[float]:
    a = await wait(seconds)
    b = await ps.map_each(wait, [seconds, seconds])
    return [a, b, await stateful(a)]


failing = stateful >> fail


def test_promise_6_nothing_is_left_however_a_scope_ends(explore: Explorer) -> None:
    async def main() -> str:
        world = World.of_running_loop()
        end = world.rng.choice([leaves_early, is_cancelled, aborts, drains_impatiently, closes_the_engine])
        with world.faults():
            async with engine.Engine() as own:
                callers = await end(world, own)
                if end is not closes_the_engine:
                    statistics = own.statistics()
                    assert (statistics.scopes, statistics.runs_in_flight) == (0, 0)
                    assert not others() - callers
        # The callers have their outcomes, but their tasks may not have taken their last step.
        await asyncio.gather(*callers, return_exceptions=True)
        assert not others()
        assert not any(world.active.values()), "a handler runs on"
        assert world.too_late == []
        return end.__name__

    ends = (leaves_early, is_cancelled, aborts, drains_impatiently, closes_the_engine)
    explore(main, reaches={end.__name__: lambda name, end=end: name == end.__name__ for end in ends})


async def leaves_early(world: World, own: engine.Engine) -> set[asyncio.Task[Any]]:
    """A reader takes some results and goes."""
    wanted = world.rng.randrange(6)
    ordered = world.rng.random() < 0.5
    calls = (world.shape.graph(item) for item in world.items(12))
    async with own.stream(calls, max_in_flight=4, ordered=ordered) as stream:
        async for _ in stream.outcomes():
            wanted -= 1
            if wanted <= 0:
                break
    return set()


async def is_cancelled(world: World, own: engine.Engine) -> set[asyncio.Task[Any]]:
    """The user of a stream, or of a deployment and its calls, is cancelled at some moment."""

    async def use() -> None:
        if world.rng.random() < 0.5:
            await leaves_early(world, own)
            return
        async with own.deploy(world.shape.graph, max_in_flight=3) as service, asyncio.TaskGroup() as group:
            for item in world.items(8):
                group.create_task(service(item))

    task = asyncio.create_task(use())
    for _ in range(world.rng.randrange(12)):
        await asyncio.sleep(0 if world.rng.random() < 0.7 else 0.25)
    task.cancel()
    await asyncio.wait([task])
    return {task}


async def aborts(world: World, own: engine.Engine) -> set[asyncio.Task[Any]]:
    """A deployment is aborted with calls in flight and in the queue."""
    async with own.deploy(world.shape.graph, max_in_flight=3) as service:
        callers = {asyncio.create_task(service(item)) for item in world.items(8)}
        await asyncio.sleep(world.rng.choice([0, 0.25, 0.75, 1.5]))
        await service.abort()
    return callers


async def drains_impatiently(world: World, own: engine.Engine) -> set[asyncio.Task[Any]]:
    """A deployment is drained for less time than its calls take."""
    async with own.deploy(world.shape.graph, max_in_flight=3) as service:
        callers = {asyncio.create_task(service(item)) for item in world.items(8)}
        await asyncio.sleep(0)
        await service.drain(timeout_seconds=world.rng.choice([0, 0.25, 0.75, 5]))
    return callers


async def closes_the_engine(world: World, own: engine.Engine) -> set[asyncio.Task[Any]]:
    """An Engine is left while a stream, a deployment and calls are open."""
    stream = own.stream(world.shape.graph(item) for item in world.items(6))
    service = own.deploy(world.shape.graph, max_in_flight=2)
    try:
        await service.__aenter__()
        callers = {asyncio.create_task(service(item)) for item in world.items(4, first=6)}
    except Injected:
        callers = set()
    callers |= {asyncio.create_task(own.run(world.shape.graph(item))) for item in world.items(3, first=10)}
    callers.add(asyncio.create_task(anext(stream)))  # type: ignore[arg-type]
    await asyncio.sleep(world.rng.choice([0, 0.25, 0.75]))
    return callers


def others() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize("scheduler", ["auto", "actors", "parallel", "wave", "sequential"])
async def test_promise_6_no_task_outlives_a_run(scheduler) -> None:
    await engine.run(busy(0), scheduler=scheduler)
    assert not others()
    with pytest.raises(LookupError):
        await engine.run(failing(0), scheduler=scheduler)
    assert not others()
    with pytest.raises(TimeoutError):
        await engine.run(busy(60), scheduler=scheduler, timeout_seconds=0.01)
    assert not others()
    [cancelled] = await begun(engine.run(busy(60), scheduler=scheduler))
    cancelled.cancel()
    assert await outcomes(cancelled) == [asyncio.CancelledError]
    assert not others()


async def test_promise_6_no_task_outlives_a_stream() -> None:
    async with engine.stream(busy(0) for _ in range(20)) as results:
        async for _ in results:
            break
    assert not others()
    async with engine.stream(busy(60) for _ in range(20)) as results:
        await testing.wait_quiescent()
    assert not others()
    results = engine.stream(busy(0) for _ in range(3))
    assert len([r async for r in results]) == 3  # a stream that is read to its end needs no closing
    assert not others()
    with pytest.raises(LookupError):
        async for _ in engine.stream(failing(0) for _ in range(3)):
            pass
    assert not others()


async def test_promise_6_no_task_outlives_a_deployment() -> None:
    async with engine.deploy(busy, failing) as service:
        await service(0)
        calls = await begun(*map(service, [60] * 3))
        await service.abort()
        assert not others() - set(calls)
        assert await outcomes(*calls) == [ps.EngineClosedError] * 3
    assert not others()


@ps.graph
@ps.node(runs_on="thread")
def naming(x: int) -> str:
    return threading.current_thread().name


async def test_promise_6_no_thread_outlives_its_engine() -> None:
    before = set(threading.enumerate())
    async with engine.Engine(max_workers=3) as own:
        async with own.stream(naming(x) for x in range(50)) as results:
            assert len({n async for n in results}) <= 3
        assert len(set(threading.enumerate()) - before) <= 3
    assert set(threading.enumerate()) == before


def test_promise_6_the_threads_of_the_default_engine_end_with_the_loop() -> None:
    before = threading.active_count()

    async def main() -> int:
        await engine.run(naming(1))
        return threading.active_count()

    assert asyncio.run(main()) == before + 1
    assert threading.active_count() == before


def test_promise_6_resources_are_closed_once_whatever_is_cancelled_and_reloaded_when(effort: int) -> None:
    async def main() -> None:
        made: list[list[str]] = []

        @ps.resource
        async def line(name: str) -> AsyncIterator[list[str]]:
            await asyncio.sleep(0)
            made.append(state := ["open"])
            try:
                yield state
            finally:
                state.append("closing")
                await asyncio.sleep(0)
                state.append("closed")

        @ps.node
        async def use(state: list[str], number: int) -> int:
            for _ in range(number % 4):
                assert state == ["open"]
                await asyncio.sleep(0)
            return number

        @ps.graph
        async def work(number: int) -> int:
            return await use(await line("a"), await use(await line("b"), number))

        async def cancel_some(calls: list[asyncio.Task[int]]) -> None:
            for call in calls[::3]:
                await asyncio.sleep(0)
                call.cancel()

        async def use_all(own: engine.Engine) -> None:
            async with own.deploy(work, max_in_flight=4) as service:
                runs = (service.run, own.run, engine.run)
                calls = [asyncio.create_task(run(work(number))) for run in runs for number in range(12)]
                reloads = [asyncio.create_task(service.reload(line)) for _ in range(2)]
                await cancel_some(calls)
                results = await outcomes(*calls)
                await asyncio.gather(*reloads)
            for number, result in enumerate(results):
                assert result == number % 12 or (number % 3 == 0 and result is asyncio.CancelledError)

        async with engine.Engine() as own:
            await use_all(own)
        assert all(state == ["open", "closing", "closed"] for state in made)
        assert others() == set()

    for _ in testing.interleavings(main, count=30 * effort):
        pass


async def test_promise_6_an_engine_ends_if_all_tasks_are_cancelled_at_any_turn() -> None:
    # A loop that shuts down cancels all tasks, also tasks before their first step.
    log: list[str] = []
    ask = ps.graph(model(log))

    async def serve() -> None:
        async with engine.Engine() as own, own.deploy(ask) as service:
            await service(1)

    turns, serving = 0, None
    while serving is None or serving.cancelled():
        serving = asyncio.create_task(serve())
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([serving])
        assert log.count("entered") == log.count("left")
        turns += 1
    serving.result()
