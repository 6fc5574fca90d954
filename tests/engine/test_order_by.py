"""`order_by=`: in a stream, the calls of one key run one after the other; promise 3 explores this with faults."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from penstock.testing import wait_quiescent
from tests.kit import Gate, begun, numbers, outcomes, outcomes_of, virtual


def key_of(call: ps.Call[Any]) -> Any:
    return call.arguments[0]


@ps.graph
@ps.node
async def waiting(key: Any, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@ps.graph
async def nothing(key: Any, seconds: float) -> float:
    return seconds


@pytest.mark.parametrize("kind", ["thread", "batch", "inside"])
async def test_a_thread_that_goes_on_after_its_timeout_keeps_the_key(kind: str) -> None:
    go_on, begun = threading.Event(), list[str]()

    def block(name: str) -> str:
        begun.append(name)
        if name == "a0":
            go_on.wait()
        return name

    def block_all(names: list[str]) -> list[str]:
        return list(map(block, names))

    policy: Any = {"timeout_seconds": 0.25, "runs_on": "thread", "concurrency": 4}
    batched = ps.node(batch=ps.Batch(1), **policy)
    graph: Any = ps.graph(batched(block_all) if kind == "batch" else ps.node(**policy)(block))

    @ps.node
    async def run(name: str) -> str:
        return await engine.run(graph(name))

    made = ps.graph(run) if kind == "inside" else graph
    calls = [made(name) for name in ("a0", "a1", "b0", "a2")]
    async with engine.stream(calls, ordered=False, order_by=lambda call: call.arguments[0][0]) as results:
        reader = results.outcomes()
        ended = {(await anext(reader)).index for _ in range(2)}
        assert ended == {0, 2}
        await wait_quiescent()
        assert sorted(begun) == ["a0", "b0"]  # a0 has failed, but its thread still runs
        assert results.statistics().waiting_for_keys == 2
        go_on.set()
        assert [(one.index, one.value) async for one in reader] == [(1, "a1"), (3, "a2")]
        await results.aclose()


@pytest.mark.parametrize("is_deployed", [True, False])
async def test_an_item_whose_key_fails_fails_alone(is_deployed: bool) -> None:
    async def asked() -> int:
        return 1

    def key(call: ps.Call[Any]) -> Any:
        match call.arguments[0]:
            case 0:
                raise LookupError("no key")
            case 1:
                return []
            case 2:
                return asked()
            case 3:
                raise asyncio.CancelledError  # as `result()` of a cancelled task does
        return "key"

    calls = [waiting(number, 0) for number in range(5)]
    async with engine.deploy(waiting) as service:
        ended = await outcomes_of((service if is_deployed else engine).stream(calls, order_by=key))
        errors: list[Any] = [outcome.error for outcome in ended]
        assert list(map(type, errors)) == [LookupError, TypeError, TypeError, ps.NodeCancelledError, type(None)]
        assert "order_by= of a stream was asked for the key of a call of graph 'waiting'" in errors[0].__notes__[0]
        assert not service.statistics().admission.in_flight


async def test_it_is_for_one_stream_of_calls() -> None:
    takers: list[Callable[..., Any]] = [
        engine.Engine, ps.set_execution_options, lambda **more: ps.execution_options(**more).__enter__(),
        lambda **more: engine.deploy(waiting, **more), lambda **more: engine.stream(ps.graph(numbers)(1), **more),
    ]  # fmt: skip
    for taker in takers:
        with pytest.raises(ps.OptionsError, match=r"order_by= is for stream$"):
            taker(order_by=key_of)
    with pytest.raises(ps.OptionsError, match="order_by"):
        await engine.run(waiting(1, 0), order_by=key_of)
    with pytest.raises(ps.OptionsError, match="a function that is not async"):
        engine.stream([waiting(1, 0)], order_by="key")  # type: ignore[arg-type]


@virtual
async def test_what_waits_for_its_key_has_no_place() -> None:
    loop = asyncio.get_running_loop()
    async with engine.deploy(waiting, max_in_flight=2, max_queue=0) as service:
        calls = [waiting(key, 10) for key in "aaab"]
        mapped = asyncio.create_task(service.map(calls, order_by=key_of, max_in_flight=10))
        await asyncio.sleep(5)
        assert service.statistics().admission.in_flight == 2
        await asyncio.sleep(10)
        assert service.statistics().admission.in_flight == 1
        assert await service("a", 1) == 1  # a plain call does not wait for the calls of its key in a stream
        assert await mapped == [10] * 4
        assert loop.time() == pytest.approx(30)


@virtual
async def test_a_key_that_is_free_waits_for_one_round_of_the_others() -> None:
    begun: list[float] = []
    loop = asyncio.get_running_loop()

    @ps.node
    async def work(key: int, seconds: float) -> None:
        if key == 0:
            begun.append(loop.time())
        await asyncio.sleep(seconds)

    graph = ps.graph(work)
    calls = [graph(key, 20 if key == turn == 0 else 1) for turn in range(10) for key in range(41)]
    async with engine.deploy(graph, max_in_flight=4) as service:
        await service.map(calls, max_in_flight=500, order_by=key_of)
    assert begun[0] == 0
    assert 20 <= begun[1] <= 32  # first ended; 40 other keys, each 1 s on 4 places


@pytest.mark.parametrize("is_fair", [False, True])
@virtual
async def test_two_streams_of_a_deployment_leave_no_place_free_while_calls_wait(is_fair: bool) -> None:
    loop = asyncio.get_running_loop()
    calls = [waiting(key, 1) for _ in range(6) for key in range(8)]
    async with engine.deploy(
        waiting, max_in_flight=8, key=(lambda key, seconds: "one") if is_fair else None
    ) as service:
        begun = loop.time()
        await asyncio.gather(*(service.map(calls, max_in_flight=100, order_by=key_of) for _ in range(2)))
        assert loop.time() - begun == pytest.approx(len(calls) * 2 / 8)  # all calls of one second end at once


@dataclass
class Colliding:
    """A key with the same hash as all other keys."""

    number: int

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"key {self.number}"


@virtual
async def test_a_slow_key_delays_no_other_key() -> None:
    calls = [waiting(Colliding(number % 50), 60 if number == 7 else 1) for number in range(200)]
    ended: list[int] = []
    async with engine.stream(calls, max_in_flight=200, ordered=False, order_by=key_of, max_workers=100) as results:
        async for outcome in results.outcomes():
            ended.append(outcome.index)
            if len(ended) == 196:
                assert asyncio.get_running_loop().time() == pytest.approx(4)
                statistics = results.statistics()
                assert (statistics.waiting_for_keys, statistics.busiest_key) == (3, Colliding(7))
                assert "3 waiting for their keys, most of them for key 7" in str(statistics)
    assert ended[196:] == [7, 57, 107, 157]


@pytest.mark.parametrize("is_deployed", [True, False])
async def test_a_key_without_calls_leaves_nothing_behind(is_deployed: bool) -> None:
    keys = weakref.WeakSet[Colliding]()

    def calls() -> Iterator[ps.Call[float]]:
        for number in range(300):
            key = Colliding(number // 3)
            keys.add(key)
            yield nothing(key, 0) if number % 2 else waiting(key, 0)

    async def source() -> AsyncIterator[ps.Call[float]]:
        for call in calls():
            yield call
        del call  # the call refers to the last key
        await asyncio.Event().wait()

    async with (
        engine.deploy(waiting, nothing, max_in_flight=4) as service,
        (service if is_deployed else engine).stream(source(), order_by=key_of) as results,
    ):
        for _ in range(300):
            await anext(results)
        await wait_quiescent()
        gc.collect()
        assert not keys


@pytest.mark.parametrize("graph", [waiting, nothing])
async def test_thousands_of_calls_of_a_key_may_end_at_once(graph: ps.Graph[[int, float], float]) -> None:
    def key(key: int, seconds: float) -> int:
        if seconds:
            raise LookupError("no tenant")
        return key

    calls = [graph(1, 0), *(graph(1, 1) for _ in range(3000)), graph(1, 0)]
    async with engine.deploy(graph, key=key) as service:
        ended = await outcomes_of(service.stream(calls, order_by=key_of, max_in_flight=5000))
    assert [outcome.index for outcome in ended if outcome.error is None] == [0, 3001]


@pytest.mark.parametrize("end", ["drain", "abort"])
async def test_a_drain_finishes_what_waits_for_its_key_and_an_abort_ends_it(end: str) -> None:
    gate = Gate()
    graph = gate.graph()
    async with engine.deploy(graph, max_in_flight=3) as service:
        calls = [graph(number) for number in (0, 2, 4, 1)]
        [reading] = await begun(service.map(calls, max_in_flight=9, order_by=lambda call: call.arguments[0] % 2))
        assert gate.came == [0, 1]
        [ending] = await begun(service.drain() if end == "drain" else service.abort())
        gate.open()
        await ending
        assert await outcomes(reading) == [[0, 2, 4, 1] if end == "drain" else ps.EngineClosedError]
        assert end == "drain" or gate.came == [0, 1]
