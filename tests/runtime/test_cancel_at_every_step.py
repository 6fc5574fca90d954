"""A cancel between any two steps of a run ends the run, and leaves nothing of it behind.

`cancel_at_every_step` sends one cancel at each step of a run; the fuzz below sends up to three at random steps.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gauge, cancelled_at_every_step, model, outcomes, paused, plain, values_of, virtual

log: list[str] = []  # of the instances of stateful nodes
gauge = Gauge()


def open_books() -> None:
    """Resets all counts for another run."""
    log.clear()
    gauge.now = 0


def check_books() -> None:
    assert log.count("entered") == log.count("left"), log
    assert gauge.now == 0


@ps.node
async def wait(x: int) -> int:
    with gauge:
        try:
            await asyncio.sleep(x % 3)
        finally:
            await asyncio.sleep(0)
    return x


@ps.node(concurrency=1, capacity=1)
async def narrow(x: int) -> int:
    with gauge:
        await asyncio.sleep(0)
    return x


@ps.node(retry=ps.Retry(attempts=2, backoff_seconds=1), timeout_seconds=60)
async def flaky(x: int) -> int:
    await asyncio.sleep(0)
    if ps.current().attempt == 1:
        raise LookupError(x)
    return x


@ps.node
async def total(values: list[int]) -> int:
    await asyncio.sleep(0)
    return sum(values)


async def enter() -> None:
    await asyncio.sleep(0.5)


async def leave() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0.5)


first, second = (model(log, enter=enter, call=paused.fn, leave=leave) for _ in range(2))


@ps.node
async def true(x: int) -> bool:
    return True


@ps.graph
async def plainly(x: int) -> int:
    taken = plain(await wait(x))
    mapped = await ps.map_each(narrow, [taken, taken])
    chosen = await ps.cond(await true(taken), wait, plain, taken)
    return await total([await narrow(taken), await flaky(taken), mapped[0], mapped[1], chosen])


with_state = first >> second


@ps.graph
async def with_state_in_body(x: int) -> int:
    mapped = await ps.map_each(first, [x, x])
    return mapped[0]


GRAPHS = {"plainly": plainly, "with_state": with_state, "with_state_in_body": with_state_in_body}


async def as_run(graph: ps.Graph[[int], int]) -> int:
    return await engine.run(graph(1))


async def as_run_with_deadline(graph: ps.Graph[[int], int]) -> int:
    with contextlib.suppress(TimeoutError):
        return await engine.run(graph(1), timeout_seconds=0.75)
    return 0


async def as_stream(graph: ps.Graph[[int], int]) -> int:
    return sum(await values_of(engine.stream(map(graph, range(3)), max_in_flight=2)))


async def as_stream_of_async_source(graph: ps.Graph[[int], int]) -> int:
    async def source() -> Any:
        for x in range(3):
            await asyncio.sleep(0)
            yield graph(x)

    return sum(await values_of(engine.stream(source(), max_in_flight=2)))


async def as_service(graph: ps.Graph[[int], int]) -> int:
    async with engine.deploy(graph, max_in_flight=1) as service, asyncio.TaskGroup() as group:
        calls = [group.create_task(service(x)) for x in range(2)]
        calls.append(group.create_task(service.run(graph(1), timeout_seconds=60)))
    return sum(call.result() for call in calls)


async def as_map(graph: ps.Graph[[int], int]) -> int:
    async with engine.deploy(graph) as service:
        return sum(await service.map(graph(x) for x in range(2)))


async def in_own_engine(graph: ps.Graph[[int], int]) -> int:
    async with engine.Engine() as own:
        return await own.run(graph(1))


WAYS: list[Any] = [
    as_run, as_run_with_deadline, as_stream, as_stream_of_async_source, as_service, as_map, in_own_engine,
]  # fmt: skip


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("way", WAYS)
def test_a_cancel_at_any_step_leaves_nothing(way, graph: str) -> None:
    async def main() -> int:
        result = await way(GRAPHS[graph])
        check_books()
        return result

    open_books()
    steps = 0
    for outcome in cancelled_at_every_step(main):
        steps += 1
        check_books()
        open_books()
        assert outcome.cancelled or outcome.error is None, outcome
    assert steps > 5


async def cancelled_at_random(way: Callable[[ps.Graph[[int], int]], Awaitable[int]], graph: str) -> None:
    """Run a graph, and cancel it up to three times after random numbers of turns, drawn from the loop's seed."""
    open_books()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, testing.SeededLoop)
    errors: list[object] = []
    loop.set_exception_handler(lambda _, report: errors.append(report))

    task = asyncio.ensure_future(way(GRAPHS[graph]))
    rng = random.Random(loop.seed)
    for turns in rng.choices((0, 1, 2, 5, 10, 20, 40), k=rng.randint(1, 3)):
        for _ in range(turns):
            # On the virtual clock, timers fire only while no task takes turns.
            await asyncio.sleep(0 if turns % 2 else 0.125)
        task.cancel()
    await asyncio.wait([task])
    check_books()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert task.cancelled() or task.exception() is None, task
    assert errors == []


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_entered_is_left_under_cancels_at_random_steps(way, graph: str, effort: int) -> None:
    testing.interleavings(lambda: cancelled_at_random(way, graph), count=25 * effort)


@pytest.mark.parametrize("way", [as_run, as_stream, as_service, in_own_engine])
@virtual
async def test_a_second_cancel_does_not_leave_what_unwinds_behind(way: Any) -> None:
    """The first cancel makes `__aenter__` unwind slowly; the second cancel comes meanwhile."""
    log: list[str] = []

    async def enter() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(5)
            log.append("unwound")

    task = asyncio.create_task(way(ps.graph(model(log, enter=enter))))
    for _ in range(3):
        await asyncio.sleep(1)
        task.cancel()
    assert await outcomes(task) == [asyncio.CancelledError]
    assert log == ["unwound"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_the_end_of_an_engine_that_is_cancelled_still_ends_everything() -> None:
    open_books()
    began = asyncio.Event()

    async def use() -> None:
        async with engine.Engine() as own:
            for _ in range(2):
                await own.deploy(with_state).__aenter__()
            began.set()

    task = asyncio.create_task(use())
    await began.wait()
    await asyncio.sleep(0.25)  # the first deployment is leaving its nodes
    task.cancel()
    assert await outcomes(task) == [asyncio.CancelledError]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    check_books()


@virtual
async def test_a_cancelled_map_each_starts_no_further_item() -> None:
    started: list[int] = []

    @ps.node
    async def slow(x: int) -> int:
        started.append(x)
        await asyncio.sleep(60)
        return x

    @ps.graph
    async def mapping(items: list[int]) -> list[int]:
        return await ps.map_each(slow, items, concurrency=2)

    task = asyncio.create_task(engine.run(mapping(list(range(50)))))
    await asyncio.sleep(1)
    assert len(started) == 2
    task.cancel()
    await asyncio.wait([task])
    assert len(started) == 2
    with pytest.raises(TimeoutError):
        await engine.run(mapping(list(range(50))), timeout_seconds=1)
    assert len(started) == 4
