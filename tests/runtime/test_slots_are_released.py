"""Values live no longer than a step may still read them; idle workers and ended calls hold no item."""

import asyncio
import gc
import weakref

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS


class Value:
    """A value that a weak reference can watch."""

    def __init__(self, label: object = None) -> None:
        self.label = label


def watch(value: Value, into: dict[object, weakref.ref[Value]]) -> Value:
    into[value.label] = weakref.ref(value)
    return value


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_slot_is_empty_once_its_last_reader_is_done(scheduler) -> None:
    alive: dict[str, list[bool]] = {}
    made: dict[object, weakref.ref[Value]] = {}

    @ps.node
    async def make(x: int) -> Value:
        return watch(Value("made"), made)

    @ps.node
    async def first(value: Value) -> int:
        await asyncio.sleep(0)
        return 1

    @ps.node
    async def second(value: Value, before: int) -> int:
        return 2

    @ps.node
    async def later(before: int) -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        alive["later"] = [made["made"]() is not None]
        return before

    @ps.graph
    async def line(x: int) -> int:
        value = await make(x)
        one = await first(value)
        return await later(await second(value, one))

    gc.disable()
    try:
        assert await engine.run(line(1), scheduler=scheduler) == 2
        assert alive["later"] == [False]
        alive.clear()
        async with engine.stream([line(1)], scheduler=scheduler) as results:
            assert await anext(results) == 2
        assert alive["later"] == [False]
    finally:
        gc.enable()


async def test_a_retried_node_keeps_its_inputs_until_the_last_attempt_and_the_fallback() -> None:
    seen: list[object] = []

    @ps.node
    async def make(x: int) -> Value:
        return Value(x)

    def save(error: Exception) -> str:
        seen.append("fallback")
        return "saved"

    @ps.node(retry=ps.Retry(attempts=3), fallback=save)
    async def flaky(value: Value) -> str:
        seen.append(value.label)
        raise LookupError

    line = make >> flaky
    assert await engine.run(line(7)) == "saved"
    assert seen == [7, 7, 7, "fallback"]


async def test_idle_workers_of_a_stream_hold_no_item() -> None:
    made: dict[object, weakref.ref[Value]] = {}
    more = asyncio.Event()

    @ps.node
    async def make(value: Value) -> Value:
        await asyncio.sleep(0)
        return value

    @ps.node(retry=ps.Retry(attempts=2))
    async def pass_on(value: Value) -> Value:
        await asyncio.sleep(0)
        return value

    line = make >> pass_on

    async def source():
        for label in range(5):
            yield line(watch(Value(label), made))
        await more.wait()
        yield line(watch(Value("last"), made))

    gc.disable()
    try:
        async with engine.stream(source()) as results:
            for label in range(5):
                value = await anext(results)
                assert value.label == label
            del value
            await testing.wait_quiescent()  # the workers are idle now
            assert [label for label, ref in made.items() if ref() is not None] == []
            more.set()
            assert (await anext(results)).label == "last"
    finally:
        gc.enable()


async def test_a_deployment_that_idles_holds_nothing_of_its_calls() -> None:
    made: dict[object, weakref.ref[Value]] = {}

    @ps.node(concurrency=2)
    async def pass_on(value: Value) -> Value:
        await asyncio.sleep(0)
        return value

    @ps.node(runs_on="thread")
    def in_thread(value: Value) -> Value:
        return value

    @ps.graph
    async def line(value: Value) -> Value:
        mapped = await ps.map_each(pass_on, [in_thread(await pass_on(value))])
        return mapped[0]

    gc.disable()
    try:
        async with engine.Engine(max_workers=1) as own, own.deploy(line) as service:
            for label in range(5):
                assert (await service(watch(Value(label), made))).label == label
            await testing.wait_quiescent()
            await own.run(ps.graph(in_thread)(Value()))  # the only thread has ended its job before
            assert [label for label, ref in made.items() if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["failed", "cancelled", "expired"])
async def test_a_frame_that_ended_badly_drops_every_value_at_once(way: str) -> None:
    made: dict[object, weakref.ref[Value]] = {}
    go_on = asyncio.Event()
    dropped: list[bool] = []

    @ps.node
    async def make(x: int) -> Value:
        return watch(Value("made"), made)

    @ps.node
    async def hold(x: int) -> int:
        """Keep the frame's worker busy with unwinding, while the worker itself holds no value."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            dropped.append(made["made"]() is None)
            await go_on.wait()
        return x

    @ps.node
    async def fail(x: int) -> int:
        await asyncio.sleep(0)
        if way == "failed":
            raise LookupError
        return x

    @ps.node
    async def read(value: Value, a: int, b: int) -> int:
        return a

    @ps.graph
    async def fork(x: int) -> int:
        return await read(await make(x), await hold(x), await fail(x))

    gc.disable()
    try:
        async with engine.deploy(fork) as service:
            options = {"timeout_seconds": 0.01} if way == "expired" else {}
            call = asyncio.create_task(service.run(fork(1), **options))
            await testing.wait_quiescent()
            if way == "cancelled":
                call.cancel()
            await asyncio.wait([call])
            await testing.wait_quiescent()
            go_on.set()
            assert dropped == [True]
            expected = {"failed": LookupError, "expired": TimeoutError, "cancelled": asyncio.CancelledError}[way]
            with pytest.raises(expected):
                await call
    finally:
        gc.enable()


async def test_an_item_that_was_yielded_is_the_readers_alone() -> None:
    made: dict[object, weakref.ref[Value]] = {}

    @ps.node
    async def make(x: int) -> Value:
        return watch(Value(x), made)

    making = ps.graph(make)

    gc.disable()
    try:
        async with engine.stream((making(x) for x in range(10)), max_in_flight=2) as results:
            async for value in results:
                alive = [label for label, ref in made.items() if ref() is not None]
                assert value.label in alive
                assert len(alive) <= 3  # this value, and two in the window
                del value
    finally:
        gc.enable()


async def test_nothing_is_left_of_finished_runs() -> None:
    """Neither values nor cycles are left: reference counts alone free everything."""
    made: dict[object, weakref.ref[Value]] = {}

    @ps.node
    async def make(value: Value) -> Value:
        return watch(Value(f"from {value.label}"), made)

    @ps.node
    async def fail(value: Value) -> Value:
        raise LookupError(value.label)

    making = ps.graph(make)

    @ps.graph
    async def mapping(value: Value) -> list[Value]:
        return await ps.map_each(make, [value, value])

    failing = make >> fail
    gc.collect()
    gc.disable()
    try:
        for graph in (making, mapping):
            await engine.run(graph(watch(Value("input"), made)))
            assert [label for label, ref in made.items() if ref() is not None] == []
        try:
            await engine.run(failing(watch(Value("input"), made)))
        except LookupError:
            pass
        assert [label for label, ref in made.items() if ref() is not None] == []
    finally:
        gc.enable()
