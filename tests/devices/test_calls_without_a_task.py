"""Calls whose first step is on a device need no task to wait for it, and end like all other calls."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import engine, telemetry, testing
from penstock.devices import dispatch, engine_device
from penstock.testing import faults
from tests import kit
from tests.kit import SCHEDULERS, outcomes

from .gates import Gate, gated
from .kit import graph_of, numbers_of, row

doubled = ps.device_node(device="cpu", name="doubled")(lambda x: x * 2)
of_doubled = ps.graph(doubled)


async def warm(service: engine.Service, graph: Any) -> None:
    """Makes the first call, which opens the device; opening takes a task."""
    await service.run(graph(row(0)))


@asynccontextmanager
async def standing_still(**options: Any) -> AsyncIterator[tuple[Gate, Any, engine.Service]]:
    """Deploys a node that waits at a closed gate; a first call has opened the device."""
    gate = Gate()
    gate.open()
    of = gated(gate, **options)
    async with engine.deploy(of) as service:
        await warm(service, of)
        await testing.wait_quiescent()
        gate.close()
        yield gate, of, service


@ps.node
async def to_rows(count: int) -> AsyncIterator[Any]:
    for number in range(count):
        yield row(number)


def in_flight(service: Any) -> int:
    """Returns how many places are held on the device."""
    return sum(actor.in_flight for actor in service.statistics().actors if "guarded" in actor.node)


def node_of(service: engine.Service) -> Any:
    (actor,) = service.statistics().actors
    return actor


@pytest.mark.parametrize("options", [{}, {"batch": ps.Batch(4)}, {"replicas": 1, "prefetch": 1}])
async def test_calls_in_flight_have_no_tasks(options: dict[str, Any]) -> None:
    async with standing_still(**options) as (gate, _of, service):
        before = len(asyncio.all_tasks())
        calls = [asyncio.ensure_future(service(row(n))) for n in range(20)]
        await gate.entered(2)
        assert len(asyncio.all_tasks()) == before + len(calls)
        assert node_of(service).in_flight == 20
        gate.open()
        assert numbers_of(await asyncio.gather(*calls)) == list(range(20))
        assert (node_of(service).in_flight, node_of(service).completed) == (0, 21)
        assert node_of(service).busy_seconds > 0


async def test_values_of_a_stream_on_the_device_have_no_tasks_and_hold_their_places_until_it_is_done() -> None:
    gate = Gate()
    gate.open()
    guarded = ps.device_node(device="cpu", pure=False, name="guarded")(gate.pass_through)
    stage = graph_of(lambda count: ps.map_each(guarded, to_rows(count), concurrency=12))

    async def all_values() -> list[float | None]:
        return numbers_of([value async for value in service.stream(stage(30))])

    async with engine.deploy(stage) as service:
        assert await all_values() == list(range(30))
        await testing.wait_quiescent()
        gate.close()
        before = len(gate.values)
        async with service.stream(stage(30)) as values:
            first = asyncio.ensure_future(anext(values))
            await gate.entered(before + 1)
            await testing.wait_quiescent()
            assert in_flight(service) == 12
            assert sum("penstock-worker" in task.get_name() for task in asyncio.all_tasks()) < 6
            first.cancel()
        assert 0 < in_flight(service) <= 12  # values that were handed to the device
        gate.open()  # the device begins the next stream after the values of the last one
        assert await all_values() == list(range(30))
        assert in_flight(service) == 0


@ps.node
async def plus_one(x: Any) -> Any:
    await asyncio.sleep(0)
    return x + 1


plus = ps.node(lambda x, y: x + y)


@ps.graph
async def through_host_nodes(x: Any) -> Any:
    y = doubled(x)
    following = await plus_one(y)
    return {"shape": y.shape, "value": y, "next": following, "both": plus(following, y)}


only_a_part = graph_of(lambda x: doubled(x)[0])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_the_result_carries_the_call_on_to_what_follows(scheduler: Any) -> None:
    async with engine.Engine() as own:
        for _ in range(3):
            assert float((await own.run(of_doubled(row(5)), scheduler=scheduler))[0]) == 10
            assert float(await own.run(only_a_part(row(5)), scheduler=scheduler)) == 10
            found = await own.run(through_host_nodes(row(5)), scheduler=scheduler)
            assert found.pop("shape") == (2,)
            assert numbers_of([*found.values()]) == [10, 11, 21]


@ps.node
async def counted(x: Any) -> AsyncIterator[float]:
    for value in np.asarray(x).tolist():
        yield value


async def test_a_stream_as_the_result_follows_a_step_on_a_device() -> None:
    streamed = doubled >> counted
    async with engine.deploy(streamed) as service:
        for _ in range(3):
            assert [value async for value in service.stream(streamed(row(4)))] == [8, 8]


async def test_a_caller_that_is_cancelled_leaves_at_once_and_the_place_is_held_until_the_device_is_done() -> None:
    async with standing_still() as (gate, _of, service):
        running, waiting = (asyncio.ensure_future(service(row(n))) for n in range(1, 3))
        await gate.entered(2)  # the first computation is the warm-up
        for call in (running, waiting):
            call.cancel()
        assert await outcomes(running, waiting) == [asyncio.CancelledError] * 2
        assert node_of(service).in_flight == 2  # both calls were handed to the device
        gate.open()
        assert float((await service(row(3)))[0]) == 3
        await testing.wait_quiescent()
        assert node_of(service).in_flight == 0
        assert service.statistics().cancelled == 2
    assert [values[0] for values in gate.values] == [0, 1, 3]  # the second of the two calls was skipped


async def test_what_still_waits_for_the_device_leaves_with_its_caller_or_at_its_deadline() -> None:
    async with standing_still(batch=ps.Batch(8), prefetch=1) as (gate, of, service):
        first = asyncio.ensure_future(service(row(1)))
        await gate.entered(2)
        cancelled = asyncio.ensure_future(service(row(2)))
        expired = asyncio.ensure_future(service.run(of(row(3)), timeout_seconds=0.01))
        with pytest.raises(ps.DeadlineExceeded):
            await expired
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert node_of(service).in_flight == 1
        gate.open()
        await first
        assert (service.statistics().cancelled, service.statistics().expired) == (1, 1)
    assert np.ravel(gate.values).tolist() == [0, 0, 1, 1]


async def test_a_call_that_expires_while_the_device_runs_it_ends_on_time() -> None:
    async with standing_still() as (gate, of, service):
        with pytest.raises(ps.DeadlineExceeded):
            await service.run(of(row(1)), timeout_seconds=0.01)
        gate.open()
        assert float((await service(row(2)))[0]) == 2


@pytest.mark.parametrize("how", ["abort", "leave"])
async def test_a_deployment_that_ends_interrupts_them(how: str) -> None:
    async with standing_still() as (gate, _of, service):
        call = asyncio.ensure_future(service(row(1)))
        await gate.entered(2)
        if how == "abort":
            aborting = asyncio.ensure_future(service.abort())
            with pytest.raises(ps.EngineClosedError):
                await call
            gate.open()
            await aborting
        else:
            gate.open()
    if how == "leave":
        assert float((await call)[0]) == 1


async def test_an_argument_that_is_refused_fails_its_call_and_lets_the_loop_run_others() -> None:
    of_summed = ps.graph(ps.device_node(device="cpu", batch=ps.Batch(4), name="summed")(lambda x: x.sum()))
    async with engine.deploy(of_summed) as service:
        await warm(service, of_summed)
        turns: list[None] = []

        async def count() -> None:
            while True:
                turns.append(await asyncio.sleep(0))

        counting = asyncio.create_task(count())
        for _ in range(10):
            with pytest.raises(TypeError, match=r"(?s)node 'summed', argument 'x'") as caught:
                await service.run(of_summed("no array"))
            assert "in node 'summed' of graph 'summed', item" in "".join(caught.value.__notes__)
        counting.cancel()
        assert len(turns) >= 10
        assert (node_of(service).failed, node_of(service).in_flight) == (10, 0)


@pytest.mark.parametrize("ends", ["well", "cancelled while it waits"])
async def test_nothing_is_held_of_a_call_that_is_over(ends: str) -> None:
    async with standing_still(batch=ps.Batch(1), prefetch=1) as (gate, _of, service):
        busy = asyncio.ensure_future(service(row(1)))
        await gate.entered(2)
        argument = row(2)
        held = weakref.ref(argument)
        call = asyncio.ensure_future(service(argument))
        del argument
        await testing.wait_quiescent()
        if ends == "well":
            gate.open()
        else:
            call.cancel()
        await asyncio.wait([call])
        del call
        await testing.wait_quiescent()
        assert held() is None
        gate.open()
        await busy


async def test_what_cancels_itself_fails_and_is_no_cancellation() -> None:
    class Odd:
        @property
        def part(self) -> Any:
            raise asyncio.CancelledError("of the property")

    of_a_part = graph_of(lambda x: doubled(x.part))
    cancels = [False]

    @ps.device_node(device="cpu")
    def traced(x: Any) -> Any:
        if cancels[0]:
            raise asyncio.CancelledError("while it is traced")
        return x

    of_traced = ps.graph(traced)
    async with engine.deploy(of_a_part, of_traced) as service:
        assert float((await service.run(of_a_part(SimpleNamespace(part=row(1)))))[0]) == 2
        await warm(service, of_traced)
        cancels[0] = True
        for call in (of_a_part(Odd()), of_traced(np.ones(7, np.float32))):
            with pytest.raises(ps.NodeCancelledError):
                await service.run(call)


async def test_a_call_that_waits_before_a_full_inbox_keeps_its_place_on_the_device() -> None:
    gate = kit.Gate()
    of_held = doubled >> gate.node(concurrency=1, capacity=1)
    async with engine.deploy(of_held) as service:
        gate.open()
        await warm(service, of_held)
        gate.close()
        with telemetry.profile() as profile:
            calls = [asyncio.ensure_future(service(row(n))) for n in range(20)]
            while service.statistics().actors[1].inbox.waiting_putters < 18:
                await asyncio.sleep(0)
            assert service.statistics().actors[0].in_flight == 18
            calls[-1].cancel()
            await asyncio.wait([calls[-1]])
            await testing.wait_quiescent()
            assert service.statistics().actors[0].in_flight == 17
            gate.open()
            await asyncio.gather(*calls[:-1])
        assert service.statistics().actors[0].in_flight == 0
    (on_device,) = (node for node in profile.nodes if node.node == "doubled")
    assert on_device.blocked_seconds > 0


async def test_the_bytes_of_a_call_that_fails_before_its_batch_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a device holds ahead are bounded: 40 leaked items would block the device for ever."""
    bad: list[Any] = []

    def on_host(item: Any) -> Any:
        if any(array is one for array in item.arrays for one in bad):
            raise ValueError("its computation has failed")
        return real(item)

    real = dispatch.on_host
    monkeypatch.setattr(dispatch, "on_host", on_host)
    monkeypatch.setattr(engine_device.EngineDevice.__init__, "__defaults__", (32, 4000))
    of_batched = ps.graph(ps.device_node(device="cpu", batch=ps.Batch(4))(lambda x: x + 1))
    async with engine.deploy(of_batched) as service:
        await service.run(of_batched(jnp.ones(100)))
        for _ in range(40):
            bad[:] = [jnp.ones(100)]
            failed, fine = await outcomes(*[service.run(of_batched(x)) for x in (bad[0], jnp.ones(100))])
            assert (failed, float(fine[0])) == (ValueError, 2)


async def test_a_fault_meets_a_node_on_a_device() -> None:
    async with engine.deploy(of_doubled) as service:
        await warm(service, of_doubled)
    with faults.inject("node.call", faults.Raise(LookupError("injected")), node=doubled) as injected:
        async with engine.deploy(of_doubled) as service:
            for _ in range(2):
                with pytest.raises(LookupError, match="injected"):
                    await service(row(1))
    assert [one.node for one in injected] == ["doubled", "doubled"]
