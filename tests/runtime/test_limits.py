"""Limits of nodes hold exactly, per Engine, however many scopes use the node."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, Gauge, begun, model, numbers, paused, plain, values_of
from tests.kit import virtual as in_virtual_time
from tests.telemetry.virtual_time import VirtualTime


def limited(concurrency: int) -> tuple[Any, Gauge]:
    """Returns a node that lets a number of items in at a time, and the gauge that counts them."""
    gauge = Gauge()

    @ps.node(concurrency=concurrency)
    async def limited(x: int) -> int:
        with gauge:
            await asyncio.sleep(0)
        return x

    return limited, gauge


async def test_a_limit_is_exact_over_a_thousand_concurrent_runs() -> None:
    node, gauge = limited(8)
    one, other = ps.graph(node), node >> node
    assert await asyncio.gather(*[engine.run((one if x % 2 else other)(x)) for x in range(1000)]) == list(range(1000))
    assert (gauge.peak, gauge.total) == (8, 1500)


async def test_a_limit_covers_runs_streams_deployments_and_bodies_of_one_engine() -> None:
    node, gauge = limited(3)
    single = ps.graph(node)

    @ps.graph
    async def mapped(x: int) -> list[int]:
        return await ps.map_each(node, [x, x, x])

    async with engine.deploy(single) as service:
        found = await asyncio.gather(
            values_of(engine.stream(map(single, range(30)))),
            asyncio.gather(*(service(x) for x in range(30))),
            asyncio.gather(*(engine.run(mapped(x)) for x in range(10))),
        )
    assert found == [list(range(30)), list(range(30)), [[x] * 3 for x in range(10)]]
    assert (gauge.peak, gauge.total) == (3, 90)


async def test_two_engines_have_limits_of_their_own() -> None:
    gate = Gate()
    single = gate.graph(concurrency=2)
    async with engine.Engine() as a, engine.Engine() as b:
        runs = await begun(*(e.run(single(x)) for e in (a, b) for x in range(5)))
        assert gate.gauge.now == 4
        gate.open()
        await asyncio.gather(*runs)
    assert gate.gauge.peak == 4


plain_in_thread = ps.node(runs_on="thread", name="plain_in_thread")(plain.fn)


def taken(own: engine.Engine) -> int:
    """Returns how many jobs run or are queued in the threads of the engine."""
    pool = own.statistics().threads
    return pool.busy + pool.queued


@pytest.mark.parametrize("level", ["keyword", "context", "process"])
@pytest.mark.parametrize("verb", ["run", "stream", "stream of values", "deploy", "service.stream"])
async def test_max_workers_bounds_the_threads_that_each_has_busy_over_all_call_sites(verb: str, level: str) -> None:
    gate = Gate()
    first, second, mapped = (
        ps.node(runs_on="thread", concurrency=concurrency)(partial(gate.block)) for concurrency in (None, 5, None)
    )

    @ps.node(runs_on="thread", batch=ps.Batch(1), concurrency=5)
    def in_batches(items: list[int]) -> list[int]:
        return [gate.block(x) for x in items]

    @ps.graph
    async def all_four(x: int) -> list[Any]:
        return [first(x), second(x), await in_batches(x), await ps.map_each(mapped, [x] * 3)]

    @ps.graph
    async def values(x: int) -> AsyncIterator[list[Any]]:
        return ps.map_each(all_four, numbers(x))

    async def busy_when_held(own: engine.Engine, work: Awaitable[object], *, users: int = 1) -> None:
        task = asyncio.ensure_future(work)
        try:
            await testing.wait_quiescent()
            assert taken(own) == 2 * users
        finally:
            gate.open()
        await task

    with contextlib.ExitStack() as stack:
        async with engine.Engine() as own:
            options: Any = {"max_workers": 2} if level == "keyword" else {}
            if level == "context":
                stack.enter_context(ps.execution_options(max_workers=2))
            elif level == "process":
                ps.set_execution_options(max_workers=2)
                stack.callback(ps.set_execution_options)
            if verb == "run":
                work = asyncio.gather(*(own.run(all_four(x), **options) for x in range(3)))
                await busy_when_held(own, work, users=3)
            elif verb.startswith("stream"):
                calls = values(5) if verb == "stream of values" else (all_four(x) for x in range(5))
                await busy_when_held(own, values_of(own.stream(calls, **options)))  # type: ignore[call-overload]
            else:
                async with own.deploy(all_four, **options) as service:
                    if verb == "deploy":
                        await busy_when_held(own, asyncio.gather(*(service(x) for x in range(5))))
                    else:
                        await busy_when_held(own, service.map(all_four(x) for x in range(5)))
    assert gate.gauge.peak <= (6 if verb == "run" else 2)


async def test_what_waits_for_the_threads_of_one_run_leaves_the_node_to_others() -> None:
    gate = Gate()
    held = ps.node(runs_on="thread")(gate.block)

    @ps.graph
    async def many(x: int) -> list[int]:
        return await ps.map_each(held, [x] * 50, concurrency=50)  # more items than an Engine has threads

    async with engine.Engine() as own:
        runs = await begun(*(own.run(many(x), max_workers=2) for x in range(3)))
        assert taken(own) == 6
        gate.open()
        await asyncio.gather(*runs)


async def test_a_thread_that_nobody_waits_for_counts_until_it_has_returned() -> None:
    gate, quick = Gate(), Gate()
    quick.open()
    stuck = ps.graph(ps.node(runs_on="thread", name="stuck")(gate.block))
    fast = ps.graph(ps.node(runs_on="thread", name="fast")(quick.block))
    async with engine.Engine() as own, own.deploy(stuck, fast, max_workers=1) as service:
        left = asyncio.create_task(service(0))
        await gate.has()
        left.cancel()
        calls = await begun(*(service.run(fast(x)) for x in (1, 2)))
        assert (left.cancelled(), taken(own), quick.came) == (True, 1, [])
        gate.open()
        assert await asyncio.gather(*calls) == [1, 2]


@pytest.mark.parametrize("of_engine", [True, False], ids=["engine", "deployment"])
async def test_what_waits_for_a_thread_is_cancelled_and_never_begins(*, of_engine: bool) -> None:
    gate = Gate()
    held = ps.graph(ps.node(runs_on="thread", concurrency=4)(gate.block))
    async with (
        engine.Engine(max_workers=1 if of_engine else 8) as own,
        own.deploy(held, max_workers=8 if of_engine else 1) as service,
    ):
        calls = await begun(*map(service, range(4)))
        for call in calls[1:3]:
            call.cancel()
        await asyncio.gather(*calls[1:3], return_exceptions=True)
        gate.open()
        assert [await calls[0], await calls[3], await service(5)] == gate.came == [0, 3, 5]
        assert own.statistics().threads.discarded == 0


@pytest.mark.parametrize("of_engine", [True, False], ids=["engine", "deployment"])
def test_what_waits_for_a_thread_spends_no_time_of_its_node(virtual: VirtualTime, *, of_engine: bool) -> None:
    attempts: list[int] = []

    # What waits for a thread of the engine has begun, so it may time out.
    @ps.node(runs_on="thread", timeout_seconds=None if of_engine else 4, retry=ps.Retry(attempts=2))
    def hurried(x: int) -> int:
        attempts.append(x)
        if len(attempts) == 1:
            raise ValueError("once")
        return x

    @ps.node(runs_on="thread")
    def held(x: int) -> int:
        virtual.hold_thread(5)  # longer than the timeout of the node that waits
        return x

    @ps.graph
    async def both(x: int) -> list[int]:
        return [plain_in_thread(x), hurried(x)]

    async def main() -> dict[str, float | None]:
        async with (
            engine.Engine(max_workers=1 if of_engine else 8) as own,
            own.deploy(ps.graph(held), both, max_workers=8 if of_engine else 1) as service,
        ):
            with virtual.threads_of(own):
                assert await asyncio.gather(service(0), service.run(both(1))) == [0, [1, 1]]
            return {actor.node: actor.busy_seconds for actor in service.statistics().actors}

    assert virtual.run(main) == {"held": 5, "plain_in_thread": 0, "hurried": 0}
    assert attempts == [1, 1]


async def test_a_node_that_takes_too_long_keeps_its_thread_from_its_next_attempt_and_from_others() -> None:
    gate = Gate()
    policy: dict[str, Any] = {"timeout_seconds": 0.05, "retry": ps.Retry(attempts=2), "fallback": lambda error: -1}
    slow, fast = ps.graph(ps.node(runs_on="thread", **policy)(gate.block)), ps.graph(plain_in_thread)
    async with engine.Engine() as own, own.deploy(slow, fast, max_workers=1) as service:
        first = asyncio.create_task(service.run(slow(0)))
        await gate.has()
        second = asyncio.create_task(service.run(fast(1)))
        await asyncio.sleep(0.1)
        await testing.wait_quiescent()
        assert (gate.came, taken(own), second.done()) == ([0], 1, False)
        gate.open()
        assert [await second, await first] == [1, 0]


@pytest.mark.parametrize("kind", ["plain", "with a policy", "in batches"])
async def test_a_thread_that_cannot_be_started_is_not_missing_later(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @ps.node(runs_on="thread", batch=ps.Batch(1))
    def in_batches(items: list[int]) -> list[int]:
        return items

    retried = plain_in_thread.with_policy(retry=ps.Retry(attempts=2))
    working = ps.graph({"plain": plain_in_thread, "with a policy": retried, "in batches": in_batches}[kind])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with engine.Engine() as own, own.deploy(working, max_workers=1) as service, asyncio.timeout(60):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                await service(0)
        assert await service(1) == 1


async def test_an_engine_made_under_process_wide_options_has_as_many_threads() -> None:
    async def threads_of(own: engine.Engine) -> int:
        gate = Gate()
        waiting = ps.graph(ps.node(runs_on="thread")(gate.block))
        calls = [asyncio.create_task(own.run(waiting(x))) for x in range(45)]
        try:
            await testing.wait_quiescent()
            threads = own.statistics().threads
            return threads.threads
        finally:
            gate.open()
            await asyncio.gather(*calls)

    ps.set_execution_options(max_workers=40)
    try:
        async with engine.Engine() as own, engine.Engine(max_workers=3) as narrow:
            assert [await threads_of(own), await threads_of(narrow)] == [40, 3]
    finally:
        ps.set_execution_options()


@ps.node(runs_on="process")
def process_id(x: int) -> int:
    return os.getpid()


@pytest.mark.asyncio(loop_factories=["asyncio"])  # waits for processes, whatever the loop
async def test_max_processes_bounds_the_worker_processes_of_an_engine() -> None:
    identify = ps.graph(process_id)
    async with engine.Engine(max_processes=1) as own:
        assert len({*await asyncio.gather(*[own.run(identify(x)) for x in range(8)])}) == 1
    for wrong in (0, 1.5, True):
        with pytest.raises(ps.OptionsError, match=f"max_processes={wrong}: a whole number of at least 1"):
            engine.Engine(max_processes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 5])
@in_virtual_time
async def test_an_async_node_without_a_limit_grows_to_max_workers_in_a_pipeline(width: int) -> None:
    gauge = Gauge()

    @ps.node
    async def wait(x: int) -> int:
        with gauge:
            await asyncio.sleep(1)
        return x

    waiting = ps.graph(wait)
    assert [x async for x in engine.stream((waiting(x) for x in range(20)), max_workers=width)] == list(range(20))
    assert asyncio.get_running_loop().time() == 20 / width
    assert gauge.peak == width


@in_virtual_time
async def test_a_node_that_never_suspends_needs_one_worker() -> None:
    tasks = set()

    @ps.node
    async def step(x: int) -> int:
        tasks.add(asyncio.current_task())
        return x

    line = step >> step
    assert [x async for x in engine.stream(line(x) for x in range(200))] == list(range(200))
    assert len(tasks) <= 2


@pytest.mark.parametrize(("policy", "peak"), [({}, 1), ({"concurrency": 4}, 4)])
async def test_a_stateful_node_handles_one_item_at_a_time_unless_told_otherwise(policy: Any, peak: int) -> None:
    gauge = Gauge()

    async def work(x: int) -> int:
        with gauge:
            await asyncio.sleep(0)
        return x

    node = model(call=work, **policy)

    @ps.graph
    async def both(x: int) -> list[int]:
        return [await node(x), await node(x)]

    assert [r async for r in engine.stream(both(x) for x in range(20))] == [[x] * 2 for x in range(20)]
    assert gauge.peak == peak


@ps.node(concurrency=1, capacity=1)
async def shared(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


in_a_line = shared >> shared >> shared


behind_another = shared >> ps.node(capacity=1)(paused.fn) >> shared


@ps.graph
async def in_a_body(x: int) -> int:
    first = await shared(x)
    mapped = await ps.map_each(shared, [first, first])
    return mapped[0]


@pytest.mark.parametrize(("graph", "steps"), [(in_a_line, 3), (behind_another, 2), (in_a_body, 2)])
@in_virtual_time
async def test_a_limited_node_that_is_used_again_downstream_does_not_wait_for_itself(graph, steps: int) -> None:
    """A bounded graph cannot deadlock, also if one limit covers two steps of the graph."""

    async with engine.stream((graph(x) for x in range(50)), max_in_flight=40) as results:
        assert [x async for x in results] == [x + steps for x in range(50)]
