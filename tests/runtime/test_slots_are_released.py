"""Values live no longer than a step may still read them; idle workers and ended calls hold no item."""

import asyncio
import weakref
from collections.abc import Iterator

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS, begun, values_of, without_the_collector


class Value:
    """A value that a weak reference can watch."""

    def __init__(self, label: object = None) -> None:
        self.label = label


made: dict[object, weakref.ref[Value]] = {}


@pytest.fixture(autouse=True)
def nothing_made() -> Iterator[None]:
    """Leaves it to reference counts alone to free values."""
    made.clear()
    with without_the_collector():
        yield


def watched(label: object) -> Value:
    value = Value(label)
    made[label] = weakref.ref(value)
    return value


@ps.node
async def make(x: int) -> Value:
    return watched("made")


async def pass_on(value: Value) -> Value:
    await asyncio.sleep(0)
    return value


def alive() -> list[object]:
    return [label for label, ref in made.items() if ref() is not None]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_slot_is_empty_once_its_last_reader_is_done(scheduler) -> None:
    @ps.node
    async def first(value: Value) -> int:
        await asyncio.sleep(0)
        return 1

    @ps.node
    async def second(value: Value, before: int) -> int:
        return 2

    @ps.node
    async def later(before: int) -> list[object]:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return alive()

    @ps.graph
    async def line(x: int) -> list[object]:
        value = await make(x)
        one = await first(value)
        return await later(await second(value, one))

    assert await engine.run(line(1), scheduler=scheduler) == []
    assert await values_of(engine.stream([line(1)], scheduler=scheduler)) == [[]]


async def test_idle_workers_of_a_stream_hold_no_item() -> None:
    more = asyncio.Event()
    line = ps.node(pass_on) >> ps.node(retry=ps.Retry(attempts=2))(pass_on)

    async def source():
        for label in range(5):
            yield line(watched(label))
        await more.wait()
        yield line(watched("last"))

    async with engine.stream(source()) as results:
        for label in range(5):
            assert (await anext(results)).label == label
        await testing.wait_quiescent()  # the workers are idle now
        assert alive() == []
        more.set()
        assert (await anext(results)).label == "last"


async def test_a_deployment_that_idles_holds_nothing_of_its_calls() -> None:
    limited = ps.node(concurrency=2)(pass_on)

    @ps.node(runs_on="thread")
    def in_thread(value: Value) -> Value:
        return value

    @ps.graph
    async def line(value: Value) -> Value:
        mapped = await ps.map_each(limited, [in_thread(await limited(value))])
        return mapped[0]

    async with engine.Engine(max_workers=1) as own, own.deploy(line) as service:
        for label in range(5):
            assert (await service(watched(label))).label == label
        await testing.wait_quiescent()
        await own.run(ps.graph(in_thread)(Value()))  # the only thread has ended its job before
        assert alive() == []


@pytest.mark.parametrize(
    ("way", "error"), [("failed", LookupError), ("cancelled", asyncio.CancelledError), ("expired", TimeoutError)]
)
async def test_a_frame_that_ended_badly_drops_every_value_at_once(way: str, error: type[BaseException]) -> None:
    go_on = asyncio.Event()
    dropped: list[bool] = []

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

    async with engine.deploy(fork) as service:
        [call] = await begun(service.run(fork(1), timeout_seconds=0.01 if way == "expired" else None))
        if way == "cancelled":
            call.cancel()
        await asyncio.wait([call])
        await testing.wait_quiescent()
        go_on.set()
        assert dropped == [True]
        with pytest.raises(error):
            await call


async def test_an_item_that_was_yielded_is_the_readers_alone() -> None:
    making = ps.graph(ps.node(watched))
    async with engine.stream((making(x) for x in range(10)), max_in_flight=2) as results:
        async for value in results:
            assert value.label in alive()
            assert len(alive()) <= 3  # this value, and two in the window
            del value


async def test_nothing_is_left_of_finished_runs() -> None:
    """Neither values nor cycles are left."""

    @ps.node
    async def make_another(value: Value) -> Value:
        return watched(f"from {value.label}")

    @ps.node
    async def fail(value: Value) -> Value:
        raise LookupError(value.label)

    @ps.graph
    async def mapping(value: Value) -> list[Value]:
        return await ps.map_each(make_another, [value, value])

    for graph in (ps.graph(make_another), mapping, make_another >> fail):
        try:
            await engine.run(graph(watched("input")))
        except LookupError:
            assert graph is not mapping
        assert alive() == []
