"""How a stream ends when its reader does not end it, and failures that must not look like its end."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import numbers, paused

echoed = ps.graph(paused)


async def test_a_stream_of_a_drained_deployment_hands_out_what_was_accepted_and_says_that_it_was_cut_short() -> None:
    def endless() -> Iterator[ps.Call[int]]:
        number = 0
        while True:
            yield echoed(number)
            number += 1

    seen: list[int] = []
    async with engine.deploy(echoed) as service:
        stream = service.stream(endless())
        seen.append(await anext(stream))
        await service.drain()

        async def read_on() -> None:
            async for value in stream:
                seen.append(value)  # noqa: PERF401 - what was read before the error counts

        with pytest.raises(ps.EngineClosedError):
            await read_on()
    assert len(seen) > 1
    assert seen == list(range(len(seen)))


@pytest.mark.parametrize("collect", [False, True], ids=["by reference count", "while idle, by the collector"])
async def test_a_stream_that_is_dropped_ends_all_that_it_began(collect: bool) -> None:
    left: list[str] = []

    @ps.node
    class Held:
        async def __aenter__(self) -> "Held":
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            await asyncio.sleep(0)
            left.append("left")

        async def __call__(self, x: int) -> int:
            return x

    held = Held()

    holding = ps.graph(held)

    async def read_one() -> None:
        async for _ in engine.stream(holding(x) for x in range(1000)):
            break

    gc.disable()
    try:
        await read_one()
        if collect:
            gc.collect()
        await testing.wait_quiescent()
    finally:
        gc.enable()
    assert left == ["left"]


@ps.node
async def counted(stops_at: int, fails: bool) -> AsyncIterator[int]:
    """Give a few numbers, and then wait for ever or fail."""
    for number in range(stops_at):
        yield number
    if fails:
        raise OSError("the disk is gone")
    await asyncio.Event().wait()


@ps.node
async def number_of(index: int, stops_at: int, fails: bool) -> int:
    if index < stops_at:
        return index
    if fails:
        raise OSError("the disk is gone")
    await asyncio.Event().wait()
    return -1


counting = ps.graph(counted)


one_number = ps.graph(number_of)


async def read_all(stream: engine.Stream[int]) -> None:
    async for _ in stream:
        pass


async def cancelled_by_its_task(stream: engine.Stream[int]) -> None:
    reader = asyncio.create_task(read_all(stream))
    await testing.wait_quiescent()
    reader.cancel()
    await asyncio.wait([reader])


async def cancelled_by_a_task_group_of_anyio(stream: engine.Stream[int]) -> None:
    """Cancels a reader as Starlette does when the client of a request has left."""
    async with anyio.create_task_group() as group:
        group.start_soon(read_all, stream)
        await testing.wait_quiescent()
        group.cancel_scope.cancel()


async def cancelled_in_a_generator_by_a_task_group_of_anyio(stream: engine.Stream[int]) -> None:
    async def around() -> AsyncIterator[str]:
        async for number in stream:
            yield f"data: {number}"

    async def respond() -> None:
        async for _ in around():
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(respond)
        await testing.wait_quiescent()
        group.cancel_scope.cancel()


async def cancelled_before_the_first_value(stream: engine.Stream[int]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(stream.wait_started)
        await asyncio.sleep(0)
        group.cancel_scope.cancel()


async def cancelled_while_it_reads_outcomes(stream: engine.Stream[int]) -> None:
    async def respond() -> None:
        async for _ in stream.outcomes():
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(respond)
        await testing.wait_quiescent()
        group.cancel_scope.cancel()


async def timed_out(stream: engine.Stream[int]) -> None:
    with anyio.move_on_after(0.01):
        await read_all(stream)


async def left_between_two_values(stream: engine.Stream[int]) -> None:
    async for _ in stream:
        break


async def failed(stream: engine.Stream[int]) -> None:
    with pytest.raises(OSError, match="gone"):
        await read_all(stream)


LEAVING: list[Callable[[engine.Stream[int]], Awaitable[None]]] = [
    cancelled_by_its_task,
    cancelled_by_a_task_group_of_anyio,
    cancelled_in_a_generator_by_a_task_group_of_anyio,
    cancelled_before_the_first_value,
    cancelled_while_it_reads_outcomes,
    timed_out,
    left_between_two_values,
    failed,
]


@pytest.mark.parametrize("where", ["engine", "deployment"])
@pytest.mark.parametrize("kind", ["calls", "values"])
@pytest.mark.parametrize("leave", LEAVING)
async def test_a_stream_that_is_dropped_is_closed_without_the_collector_however_its_last_read_ended(
    leave: Callable[[engine.Stream[int]], Awaitable[None]], kind: str, where: str
) -> None:
    async with engine.Engine() as own, own.deploy(counting, one_number, max_in_flight=4) as service:
        place: Any = own if where == "engine" else service
        fails = leave is failed
        gc.collect()
        gc.disable()
        try:
            calls = (one_number(index, 3, fails) for index in range(1000))
            stream = place.stream(counting(3, fails) if kind == "values" else calls)
            dropped = weakref.ref(stream)
            await leave(stream)
            del stream
            await testing.wait_quiescent()
            in_flight = service.statistics().admission.in_flight
            assert (dropped() is None, in_flight, own.statistics().scopes) == (True, 0, 1)
            assert not asyncio.all_tasks() - {asyncio.current_task()}
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", ["calls", "values"])
async def test_a_read_that_is_cancelled_leaves_the_stream_to_the_next(kind: str) -> None:
    ticks = 0

    @ps.node
    async def slow(x: int) -> int:
        await asyncio.sleep(0.02)
        return x

    slowly = ps.graph(slow)

    @ps.graph
    async def each() -> AsyncIterator[int]:
        return ps.map_each(slow, numbers(5), concurrency=1)

    values: list[int] = []
    calls = (slowly(number) for number in range(5))
    async with engine.stream(each()) if kind == "values" else engine.stream(calls, max_in_flight=1) as stream:
        while len(values) < 5:
            try:
                async with asyncio.timeout(0.003):
                    values.append(await anext(stream))
            except TimeoutError:
                ticks += 1
    assert values == list(range(5))
    assert ticks >= 5


@pytest.mark.parametrize("kind", ["values", "calls"])
async def test_a_cancelled_wait_for_the_first_item_leaves_the_stream_open(kind: str) -> None:
    go_on = asyncio.Event()

    @ps.node
    async def waiting(x: int) -> int:
        await go_on.wait()
        return x

    one = ps.graph(waiting)

    @ps.graph
    async def each() -> AsyncIterator[int]:
        return ps.map_each(waiting, numbers(3))

    async with engine.stream(each()) if kind == "values" else engine.stream(one(x) for x in range(3)) as stream:
        starting = asyncio.ensure_future(stream.wait_started())
        await testing.wait_quiescent()
        starting.cancel()
        await asyncio.wait([starting])
        go_on.set()
        assert [x async for x in stream] == [0, 1, 2]


@pytest.mark.parametrize("second", ["anext", "wait_started"])
@pytest.mark.parametrize("first", ["anext", "wait_started"])
async def test_a_second_reader_is_refused_and_the_first_reads_on(first: str, second: str) -> None:
    go_on = asyncio.Event()

    @ps.node
    async def waiting(x: int) -> int:
        await go_on.wait()
        return x

    graph = ps.graph(waiting)

    async with engine.stream(graph(x) for x in range(3)) as stream:
        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "anext": stream.__anext__,
            "wait_started": stream.wait_started,
        }
        reader = asyncio.ensure_future(ways[first]())
        await testing.wait_quiescent()
        with pytest.raises(RuntimeError, match="one reader"):
            async with asyncio.timeout(5):
                await ways[second]()
        go_on.set()
        assert await reader == (0 if first == "anext" else None)
        assert [x async for x in stream] == ([1, 2] if first == "anext" else [0, 1, 2])


async def test_stop_async_iteration_of_a_node_does_not_look_like_the_end_of_the_stream() -> None:
    @ps.node
    async def exhausted(x: int) -> int:
        raise StopAsyncIteration

    graph = ps.graph(exhausted)

    with pytest.raises(RuntimeError, match=r"exhausted.*StopAsyncIteration"):
        async with engine.stream(graph(x) for x in range(3)) as stream:
            [x async for x in stream]


async def test_an_exception_that_refuses_attributes_reaches_the_caller() -> None:
    @dataclass(frozen=True)
    class NotFoundError(Exception):
        key: str

    @ps.node
    async def find(key: str) -> str:
        raise NotFoundError(key)

    with pytest.raises(NotFoundError):
        await engine.run(ps.graph(find)("a"))


def test_a_timeout_that_could_never_fire_is_refused() -> None:
    with pytest.raises(TypeError, match='runs_on="thread"'):

        @ps.node(timeout_seconds=1)
        def blocking(x: int) -> int:
            return x


async def test_a_generator_keeps_one_context_whoever_steps_it() -> None:
    def source() -> Iterator[ps.Call[int]]:
        with ps.execution_options(max_in_flight=3):
            for number in range(20):
                yield echoed(number)

    async with engine.stream(source()) as stream:
        assert [x async for x in stream] == list(range(20))
