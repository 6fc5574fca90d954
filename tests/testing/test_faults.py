"""`penstock.testing.faults`: the effect of each fault at each point, its moment, and that no fault stays installed."""

import asyncio
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from penstock.actors import loop_host
from penstock.engine import node as nodes
from penstock.engine import wiring
from penstock.testing import faults
from tests.bad_days.process_nodes import square
from tests.kit import actor, model, numbers, outcomes_of, same, values_of

POINTS: tuple[faults.Point, ...] = ("actor.start", "node.call", "worker.process")


@ps.node
def double(x: int) -> int:
    return 2 * x


@ps.node
def negate(x: int) -> int:
    return -x


@ps.node(runs_on="thread")
def in_thread(x: int) -> int:
    return x + 1


async def doubler(inbox: Any) -> None:
    while True:
        work = await inbox.get()
        work.finish(2 * work.value)


in_loop = actor(doubler)


@ps.graph
async def line(x: int) -> int:
    return negate(double(await same(x)))


squared, threaded, store = ps.graph(square), ps.graph(in_thread), model()


@pytest.mark.parametrize("node", ["same", "double", "negate", "in_thread", "Model", "doubler"])
async def test_an_injected_error_is_the_outcome_of_that_item(node: str) -> None:
    everything = line >> in_thread >> store >> in_loop
    with faults.inject("node.call", faults.Raise(OSError("down")), node=node, at=3) as injected:
        outcomes = await outcomes_of(engine.stream((everything(x) for x in range(5)), max_in_flight=1))
    assert [outcome.value if outcome.error is None else repr(outcome.error) for outcome in outcomes] == [
        2, -2, "OSError('down')", -10, -14,
    ]  # fmt: skip
    place = f"in node {node!r} of graph 'line_to_in_thread_to_Model_to_doubler', item 2"
    assert place in outcomes[2].error.__notes__[0]  # type: ignore[union-attr]
    assert list(injected) == [faults.Injection("node.call", node, 3)]
    assert injected.passes == 5


async def test_each_injection_raises_an_exception_of_its_own() -> None:
    with faults.inject("node.call", faults.Raise(OSError("down")), node=same):
        errors = [outcome.error for outcome in await outcomes_of(engine.stream(line(x) for x in range(3)))]
    assert [type(error) for error in errors] == [OSError] * 3
    assert len(set(map(id, errors))) == 3


async def test_a_retry_meets_the_next_pass() -> None:
    patient = same.with_policy(name="patient", retry=ps.Retry(attempts=3, backoff_seconds=0))
    with faults.inject("node.call", faults.Raise(OSError), node=patient, at=range(1, 3)) as injected:
        assert await engine.run(ps.graph(patient)(7)) == 7
    assert [one.number for one in injected] == [1, 2]
    assert injected.passes == 3


async def test_a_node_in_a_process_raises_before_it_is_sent() -> None:
    async with engine.Engine() as own:
        with faults.inject("node.call", faults.Raise(OSError("down"))), pytest.raises(OSError, match="down"):
            await own.run(squared(3))
        assert own.statistics().processes is None


async def test_a_generator_raises_before_its_first_value_and_is_tried_again() -> None:
    count = numbers.with_policy(name="count", retry=ps.Retry(attempts=2, backoff_seconds=0))
    counting = ps.graph(count)
    with faults.inject("node.call", faults.Raise(OSError("down")), node=count, at=[1, 3, 4]) as injected:
        assert await values_of(engine.stream(counting(3))) == [0, 1, 2]
        with pytest.raises(OSError, match="down"):
            await anext(engine.stream(counting(3)))
    assert injected.passes == 4


async def test_a_cancel_that_the_engine_did_not_send_fails_the_item_alone() -> None:
    with faults.inject("node.call", faults.Cancel(), node="same", at=2):
        async with engine.deploy(line) as service:
            assert await service(1) == -2
            with pytest.raises(ps.NodeCancelledError):
                await service(1)
            assert await service(1) == -2


def test_a_delay_waits_in_virtual_time() -> None:
    async def main() -> None:
        with faults.inject("node.call", faults.Delay(60), node="same", every=2):
            began = asyncio.get_running_loop().time()
            assert [await engine.run(line(x)) for x in range(4)] == [0, -2, -4, -6]
            assert asyncio.get_running_loop().time() - began == 120

    testing.run_virtual(main)


@pytest.mark.parametrize("node", ["Model", "doubler"])
async def test_a_stateful_node_does_not_start(node: str) -> None:
    graph = ps.graph(store if node == "Model" else in_loop)
    with faults.inject("actor.start", faults.Raise(OSError("no disk")), node=node, at=1) as injected:
        with pytest.raises(OSError, match="no disk") as raised:
            async with engine.deploy(graph):
                pass
        if node == "Model":
            assert "while stateful node 'Model' was started" in raised.value.__notes__[0]
        async with engine.deploy(graph) as service:
            assert await service(4) == (4 if node == "Model" else 8)
    assert [one.node for one in injected] == [node]


async def test_a_stream_of_an_actor_that_owns_its_loop_fails_before_it_gets_there() -> None:
    async def repeat(inbox: Any) -> None:
        while True:
            work = await inbox.get()
            work.put_nowait(work.value)
            work.finish()

    counter = actor(repeat, ps.StreamActor)
    counted_in_loop = ps.graph(counter)
    with faults.inject("node.call", faults.Raise(OSError("down")), node=counter, at=2):
        async with engine.deploy(counted_in_loop) as service:
            assert await values_of(service.stream(counted_in_loop(3))) == [3]
            with pytest.raises(OSError, match="down"):
                await anext(service.stream(counted_in_loop(3)))


async def test_a_killed_process_costs_its_item_alone() -> None:
    async with engine.Engine() as own:
        with faults.inject("worker.process", faults.Kill(), node=square, at=2) as injected:
            assert await own.run(squared(3)) == 9
            with pytest.raises(ps.WorkerDied, match="SIGKILL"):
                await own.run(squared(3))
            assert await own.run(squared(3)) == 9
        assert [(one.node, one.number) for one in injected] == [("square", 2)]
        statistics = own.statistics().processes
        assert statistics is not None
        assert statistics.died == 1


async def test_a_call_for_a_process_that_fails_before_it_gets_there() -> None:
    async with engine.Engine() as own:
        with (
            faults.inject("worker.process", faults.Raise(OSError("no memory"))),
            pytest.raises(OSError, match="no mem"),
        ):
            await own.run(squared(3))


async def test_a_call_site_is_told_by_its_number() -> None:
    @ps.graph
    async def twice(x: int) -> int:
        return await same(await same(x))

    with (
        faults.inject("node.call", faults.Delay(0), node="same#2") as second,
        faults.inject("node.call", faults.Delay(0), node=same) as both,
    ):
        await engine.run(twice(1))
    assert [one.node for one in second] == ["same#2"]
    assert [one.node for one in both] == ["same", "same#2"]


async def test_probability_follows_its_seed() -> None:
    async def failed(seed: int) -> list[int]:
        with faults.inject("node.call", faults.Raise(OSError), probability=0.3, seed=seed, node=same) as injected:
            results = await values_of(engine.stream((line(x) for x in range(40)), on_error="skip"))
            assert len(results) == 40 - len(injected)
        return [one.number for one in injected]

    assert await failed(1) == await failed(1) != await failed(2)


async def test_a_fault_that_never_happened_is_an_error_unless_it_is_optional() -> None:
    with (
        pytest.raises(AssertionError, match=r"'node\.call' of node 'same' was passed 1 times"),
        faults.inject("node.call", faults.Raise(OSError), node=same, at=2),
    ):
        await engine.run(line(1))
    with faults.inject("node.call", faults.Raise(OSError), node=same, at=2, optional=True) as injected:
        await engine.run(line(1))
    assert not injected
    # An error that the block raises is not hidden.
    with pytest.raises(KeyError), faults.inject("node.call", faults.Raise(OSError)):
        raise KeyError


async def test_a_deployment_that_outlives_the_fault_is_healthy() -> None:
    with faults.inject("node.call", faults.Raise(OSError("down")), node=same):
        service = engine.deploy(line)
        await service.__aenter__()
        with pytest.raises(OSError, match="down"):
            await service(1)
    assert await service(1) == -2
    await service.drain()


def slots() -> list[object]:
    """Returns the contents of the engine's slots for faults."""
    return [loop_host.fault_at_start, nodes.fault_at_giving, wiring.fault_at_wiring]


async def test_nothing_of_a_fault_stays_behind_whatever_the_order_of_the_ends() -> None:
    before = slots()
    managers = [faults.inject(point, faults.Delay(0), optional=True) for point in (*POINTS, *POINTS)]
    for manager in managers:
        manager.__enter__()
    assert not any(now is then for now, then in zip(slots(), before, strict=True))
    for manager in managers:  # the fault that was installed first ends first
        manager.__exit__(None, None, None)
    assert slots() == before
    async with engine.deploy(line) as service:
        assert await service(1) == -2


async def test_a_graph_that_has_run_before_meets_faults_and_forgets_them() -> None:
    async with engine.Engine() as own:
        assert await own.run(line(1)) == -2
        with faults.inject("node.call", faults.Raise(OSError("down")), node=same):
            with pytest.raises(OSError, match="down"):
                await own.run(line(1))
            faulty = own.plan(line)
        assert await own.run(line(1)) == -2
        assert own.plan(line) is not faulty


async def test_faults_in_threads_are_counted_exactly() -> None:
    with faults.inject("node.call", faults.Delay(0), node=in_thread, every=2) as injected:
        assert len(await values_of(engine.stream((threaded(x) for x in range(200)), max_in_flight=16))) == 200
    assert (injected.passes, len(injected)) == (200, 100)


@pytest.mark.parametrize(
    ("point", "fault", "arguments", "message"),
    [
        ("node.call", faults.Cancel(), {"at": 1, "every": 2}, "give one of them"),
        ("node.call", faults.Cancel(), {"every": 0}, "at least 1"),
        ("node.call", faults.Cancel(), {"probability": 2}, "between 0 and 1"),
        ("node.call", faults.Cancel(), {"probability": "often"}, "between 0 and 1"),
        ("node.start", faults.Cancel(), {}, r"no point; there are 'actor\.start'"),
        ("node.call", faults.Kill(), {}, r'its point is "worker\.process"'),
        ("node.call", faults.Cancel(), {"node": len}, "takes a node"),
    ],
)
def test_what_cannot_be_injected_is_refused(point: Any, fault: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        faults.inject(point, fault, **arguments)


async def test_a_fault_at_a_restart_is_one_more_restart() -> None:
    class Lost(Exception):
        pass

    with (
        faults.inject("node.call", faults.Raise(Lost("gone")), at=1),
        faults.inject("actor.start", faults.Raise(OSError("not yet")), at=2),
    ):
        async with engine.deploy(ps.graph(model(restart_on=(Lost,)))) as service:
            with pytest.raises(Lost):
                await service(1)
            assert await service(2) == 2
            assert service.statistics().actors[0].restarts == 1
