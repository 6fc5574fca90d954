"""The states of a service, the tasks that may wait for it, and how its Engine ends it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, begun, model, numbers, outcomes, slow_to_leave, values_of, virtual


async def test_everybody_who_waits_until_a_service_is_ready_goes_on() -> None:
    gate = asyncio.Event()
    service = engine.deploy(ps.graph(model(enter=gate.wait)))
    *waiting, entering = await begun(*(service.wait_ready() for _ in range(3)), service.__aenter__())
    assert (service.state, [task.done() for task in waiting]) == ("starting", [False] * 3)
    gate.set()
    await asyncio.gather(entering, *waiting)
    await service.wait_ready()
    assert service.state == "ready"
    await asyncio.gather(service.drain(), service.drain())
    assert service.state == "stopped"


@pytest.mark.parametrize("fails", [True, False])
async def test_who_waits_for_a_service_that_is_stopped_before_it_is_ready_is_told(fails: bool) -> None:
    async def enter() -> None:
        await gate.wait(1)
        raise ConnectionError

    gate = Gate()
    service = engine.deploy(ps.graph(model(enter=enter)))
    waiting, entering = await begun(service.wait_ready(), service.__aenter__())
    gate.open() if fails else entering.cancel()
    assert await outcomes(entering) == [ConnectionError if fails else asyncio.CancelledError]
    for wait in (waiting, service.wait_ready()):
        with pytest.raises(ps.EngineClosedError, match="is stopped"):
            await wait
    assert service.state == "stopped"


@pytest.mark.parametrize("end", ["drain", "abort"])
async def test_who_waits_until_a_service_is_stopped_goes_on_when_it_is(end: str) -> None:
    service = engine.deploy(Gate().graph())
    waiting = asyncio.create_task(service.wait_stopped())
    async with service:
        [call] = await begun(service(1))
        assert not waiting.done()
        await (service.drain(timeout_seconds=0) if end == "drain" else service.abort())
        await waiting
    await service.wait_stopped()
    assert await outcomes(call) == [ps.EngineClosedError]


@pytest.mark.parametrize("of", ["run", "stream of one call"])
async def test_every_call_that_was_made_is_counted_once_by_how_it_ended(of: str) -> None:
    release = asyncio.Event()

    @ps.node
    async def step(x: int) -> int:
        await (asyncio.sleep(0) if x == 0 else release.wait())
        if x < 0:
            raise ValueError
        return x

    @ps.node
    async def steps(x: int) -> AsyncIterator[int]:
        yield await step(x)

    graph, streamed = ps.graph(step), ps.graph(steps)

    async def call(x: int, timeout_seconds: float | None = None) -> int:
        if of == "run":
            return await service.run(graph(x), timeout_seconds=timeout_seconds)
        return max(await values_of(service.stream(streamed(x), timeout_seconds=timeout_seconds)))

    async with engine.deploy(graph, streamed, max_in_flight=3, max_queue=3) as service:
        assert await call(0) == 0
        with pytest.raises(ps.DeadlineExceeded):
            await call(1, timeout_seconds=0.01)
        inside = await begun(*map(call, (-1, 1, 1)))
        waiting = await begun(*map(call, (1, 1, 1)))
        with pytest.raises(ps.Overloaded):
            await call(1)
        waiting[0].cancel()
        await testing.wait_quiescent()
        with pytest.raises(ps.DeadlineExceeded, match="no place"):
            await call(1, timeout_seconds=0.01)
        inside[1].cancel()
        await testing.wait_quiescent()
        async with service.stream(streamed(0)):
            pass  # the call is closed before it asks for a place
        release.set()
        assert (await outcomes(*inside, *waiting))[0] is ValueError
        seen = service.statistics()
    assert (seen.completed, seen.failed, seen.cancelled, seen.expired, seen.admission.refused) == (4, 1, 3, 2, 1)
    assert "4 completed, 1 failed, 3 cancelled, 2 expired" in str(seen)


@pytest.mark.parametrize("of", ["run", "stream", "stream of one call"])
@virtual
async def test_what_expires_while_its_handler_unwinds_has_expired_and_not_failed(of: str) -> None:
    @ps.node
    async def values_slow_to_leave(x: int) -> AsyncIterator[int]:
        try:
            yield await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)

    graph = ps.graph(slow_to_leave)
    values = ps.graph(values_slow_to_leave)

    async with engine.deploy(graph, values) as service:
        calls: Any = values(1) if of == "stream of one call" else (graph(x) for x in range(3))
        results: engine.Stream[int] = service.stream(calls, timeout_seconds=5)
        with pytest.raises(ps.DeadlineExceeded):
            await (service.run(graph(1), timeout_seconds=5) if of == "run" else anext(results))
    seen = service.statistics()
    assert (seen.completed, seen.failed, seen.cancelled) == (0, 0, 0)
    assert seen.expired == (3 if of == "stream" else 1)
    if of != "run":
        items = results.statistics()
        assert (items.failed, items.expired) == ((3, 3) if of == "stream" else (1, 1))
        assert f"{items.failed} failed ({items.expired} expired)" in str(items)


@pytest.mark.parametrize("of", ["stream", "stream of one call"])
@virtual
async def test_a_call_in_a_node_that_has_no_time_left_counts_as_expired_in_both_kinds_of_stream(of: str) -> None:
    endless = Gate().graph()

    @ps.node
    async def ask(x: int) -> int:
        return await engine.run(endless(x), timeout_seconds=5)

    values = ask >> numbers
    results = engine.stream([ps.graph(ask)(1)]) if of == "stream" else engine.stream(values(1))
    with pytest.raises(ps.DeadlineExceeded):
        await anext(results)
    seen = results.statistics()
    assert (seen.failed, seen.expired) == (1, 1)


@virtual
async def test_an_item_whose_reader_has_its_error_while_others_of_its_nodes_unwind_is_counted_by_that() -> None:
    @ps.node
    async def ask(x: int) -> int:
        return await engine.run(waiting(x), timeout_seconds=5)

    waiting = ps.graph(slow_to_leave)

    @ps.graph
    async def both(x: int) -> list[int]:
        return [await ask(x), await slow_to_leave(x)]

    async with engine.deploy(both) as service:
        with pytest.raises(ps.DeadlineExceeded):
            await service(1)
    seen = service.statistics()
    assert (seen.completed, seen.failed, seen.cancelled, seen.expired) == (0, 0, 0, 1)
