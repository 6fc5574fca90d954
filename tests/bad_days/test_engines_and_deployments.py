"""Engines and deployments that are closed, cancelled, aborted or entered at a bad moment."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import uvloop

import penstock as ps
from penstock import engine
from tests.kit import Gate, begun, model, outcomes, paused, plain, values_of

echoed = ps.graph(paused)
echoed_in_thread = paused >> ps.node(runs_on="thread", name="in_thread")(plain.fn)


class Steps:
    """Says when a stateful node and a handler may continue; logs their steps."""

    log: list[str] = []  # noqa: RUF012 - there is one gate

    def close(self) -> None:
        """Close the gate, and clear the log, for another test."""
        self.log.clear()
        self.enter = asyncio.Event()
        self.handle = asyncio.Event()


gate = Steps()


@pytest.fixture(autouse=True)
def _closed_gate() -> None:
    gate.close()


async def enter() -> None:
    gate.log.append("entering")
    try:
        await gate.enter.wait()
    except BaseException:
        await asyncio.sleep(0)
        gate.log.append("not entered")
        raise


async def handle(x: int) -> int:
    try:
        await gate.handle.wait()
    except asyncio.CancelledError:
        for _ in range(5):
            await asyncio.sleep(0)
        gate.log.append(f"unwound {x}")
        raise
    return x


modelled: ps.Graph[[int], int] = ps.graph(model(gate.log, enter=enter, call=handle, leave=partial(asyncio.sleep, 0)))


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def serve(service: engine.Service[[int], int]) -> int:
    async with service:
        return await service(1)


# Engines


async def test_a_closed_engine_refuses_every_verb() -> None:
    async with engine.Engine() as own:
        assert await own.run(echoed(1)) == 1
        stream = own.stream([echoed(1)])
        service = own.deploy(echoed)
    assert await outcomes(
        own.run(echoed(1)), serve(service), values_of(stream), serve(own.deploy(echoed)),
        values_of(own.stream([echoed(1)])),
    ) == [ps.EngineClosedError] * 5  # fmt: skip


def test_an_engine_and_a_deployment_belong_to_one_event_loop() -> None:
    own = engine.Engine()
    kept: list[engine.Service[[int], int]] = []

    async def first() -> None:
        assert await own.run(echoed(1)) == 1
        async with engine.deploy(echoed) as service:
            kept.append(service)

            await asyncio.to_thread(asyncio.run, second())
            assert await service(2) == 2

    async def second() -> None:
        assert await engine.run(echoed(1)) == 1  # runs on the default Engine of this loop
        assert await outcomes(own.run(echoed(1)), kept[0](1)) == [ps.EngineLoopError] * 2
        with pytest.raises(ps.EngineLoopError, match="another event loop"):
            await values_of(own.stream([echoed(1)]))

    asyncio.run(first())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_default_engine_of_a_loop_goes_with_it(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        assert await engine.run(echoed_in_thread(1)) == 1
        assert await values_of(engine.stream(echoed(x) for x in range(3))) == [0, 1, 2]

    for _ in range(20):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())
    while gc.collect():  # a finalizer may keep objects alive until the next collection
        pass
    # The default Engine of the last loop stays until another loop has one.
    assert [number for number, loop in enumerate(loops) if loop() is not None] == [19]


async def test_leaving_an_engine_ends_runs_streams_and_deployments_and_waits_until_they_have_unwound() -> None:
    gate.enter.set()
    async with engine.Engine() as own:
        service = await own.deploy(modelled).__aenter__()
        run, stream, call = await begun(own.run(modelled(1)), values_of(own.stream([modelled(2)])), service(3))
        assert own.statistics().scopes == 3
    assert own.statistics().scopes == 0
    assert sorted(gate.log) == sorted(["entering", "entered", "left"] * 3 + ["unwound 1", "unwound 2", "unwound 3"])
    for task, message in ((run, "Engine was closed"), (stream, "Engine was closed"), (call, "deployment was stopped")):
        with pytest.raises(ps.EngineClosedError, match=message):
            await task
    assert not others()


async def test_leaving_an_engine_ends_what_is_entering_a_stateful_node() -> None:
    async with engine.Engine() as own:
        tasks = await begun(own.run(modelled(1)), values_of(own.stream([modelled(2)])), serve(own.deploy(modelled)))
        assert gate.log == ["entering"] * 3
        asyncio.get_running_loop().call_soon(gate.enter.set)
    log = list(gate.log)
    assert log.count("entered") == log.count("left")
    assert log.count("entered") + log.count("not entered") == 3
    assert await outcomes(*tasks) == [ps.EngineClosedError] * 3
    assert gate.log == log
    assert not others()


# Deployments


@pytest.mark.parametrize("how", ["abort", "drain"])
async def test_a_deployment_that_is_stopped_while_it_starts_never_serves_and_leaves_its_nodes(how: str) -> None:
    service = engine.deploy(modelled)
    [using] = await begun(serve(service))
    assert (service.state, gate.log) == ("starting", ["entering"])
    await getattr(service, how)()
    gate.enter.set()
    assert await outcomes(using) == [ps.EngineClosedError]
    assert service.state == "stopped"
    assert gate.log.count("entered") == gate.log.count("left")
    assert len(gate.log) > 1
    assert not others()


@pytest.mark.parametrize("how", ["abort", "drain"])
async def test_a_deployment_starts_once_and_not_after_it_was_stopped(how: str) -> None:
    async with engine.deploy(echoed) as service:
        with pytest.raises(ps.EngineClosedError, match=r"engine\.deploy"):
            await service.__aenter__()
        assert await service(2) == 2
    never_entered = engine.deploy(modelled)
    await getattr(never_entered, how)()
    for stopped in (service, never_entered):
        with pytest.raises(ps.EngineClosedError, match="started or stopped already"):
            await serve(stopped)
    assert gate.log == []


async def test_a_drain_that_is_cancelled_aborts() -> None:
    gate.enter.set()

    async def serving() -> None:
        async with engine.deploy(modelled) as service:
            calls.extend(await begun(service(1)))

    calls: list[asyncio.Task[int]] = []
    [task] = await begun(serving())
    assert not task.done()  # the deployment drains
    task.cancel()
    assert await outcomes(task, *calls) == [asyncio.CancelledError, ps.EngineClosedError]
    assert gate.log == ["entering", "entered", "unwound 1", "left"]
    assert not others()


async def test_two_drains_wait_for_the_same_calls() -> None:
    gate.enter.set()
    async with engine.deploy(modelled) as service:
        [call] = await begun(service(1))
        drains = await begun(service.drain(), service.drain())
        assert service.state == "draining"
        with pytest.raises(ps.EngineClosedError, match="draining"):
            await service(2)
        assert not any(drain.done() for drain in drains)
        asyncio.get_running_loop().call_soon(gate.handle.set)
    assert await asyncio.gather(call, *drains) == [1, None, None]
    assert service.state == "stopped"


async def test_drain_serves_callers_that_wait_for_a_place() -> None:
    gate.enter.set()
    async with engine.deploy(modelled, max_in_flight=1) as service:
        calls = await begun(*map(service, range(3)))
        assert service.statistics().admission.queued == 2
        asyncio.get_running_loop().call_soon(gate.handle.set)
        await service.drain()
    assert await asyncio.gather(*calls) == [0, 1, 2]


async def test_an_unread_stream_of_a_deployment_does_not_keep_it() -> None:
    async with asyncio.timeout(60):
        async with engine.deploy(echoed) as service:
            stream = service.stream(echoed(x) for x in range(1000))
            assert await anext(stream) == 0
    assert not others()


async def test_a_call_that_has_no_time_runs_nothing_and_leaves_nothing() -> None:
    held = Gate()
    graph = held.graph()
    async with engine.deploy(graph) as service:
        for run in (engine.run, service.run):
            with pytest.raises(ps.DeadlineExceeded):
                await run(graph(1), timeout_seconds=0)
        assert service.statistics().admission.in_flight == 0
    assert held.came == []


def test_an_expired_item_does_not_begin_another_node_though_nothing_suspended() -> None:
    after = Gate()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]

        @ps.node
        async def first(x: int) -> int:
            nonlocal now
            now += 60
            return x

        with pytest.raises(ps.DeadlineExceeded):
            await engine.run((first >> after.node())(1), timeout_seconds=10)

    asyncio.run(main())
    assert after.came == []


async def test_options_of_a_context_hold_for_a_bare_call_of_a_service() -> None:
    gate.enter.set()
    async with engine.deploy(modelled) as service:
        with ps.execution_options(timeout_seconds=0.001):
            assert await outcomes(service.run(modelled(1)), service(1)) == [ps.DeadlineExceeded] * 2
        gate.handle.set()
        assert await service(1) == 1


# Use of an engine from inside of its nodes


@ps.node
async def call_it(service: engine.Service[[int], int]) -> int:
    return await service(2)


USES: dict[str, Callable[[engine.Service[[int], int]], Any]] = {
    "drain": lambda service: service.drain(),
    "abort": lambda service: service.abort(),
    "call": lambda service: service(2),
    "run": lambda service: service.run(service._graphs[0](2)),
    "stream": lambda service: values_of(service.stream([])),
    "map": lambda service: service.map([]),
    "call in a run": lambda service: engine.run(ps.graph(call_it)(service)),
}


@pytest.mark.parametrize("verb", USES)
async def test_a_deployment_is_not_called_or_stopped_from_inside_itself(verb: str) -> None:
    @ps.node
    async def call_back(x: int) -> int:
        await USES[verb](service)
        return x

    calling = ps.graph(call_back)
    async with engine.deploy(calling) as service:
        for call in (service(1), service.map([calling(1)])):
            with pytest.raises(ps.ReentrantCallError, match="call_back → call_back"):
                await call
        assert service.state == "ready"
