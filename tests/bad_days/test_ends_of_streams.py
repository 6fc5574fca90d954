"""How a stream ends when something else than its reader ends it, and what may not look like its end."""

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import penstock as ps
from penstock import engine, testing


@ps.node
async def echo(x: int) -> int:
    await asyncio.sleep(0)
    return x


@ps.graph
async def echoed(x: int) -> int:
    return await echo(x)


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

    @ps.graph
    async def holding(x: int) -> int:
        return await held(x)

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


async def test_a_second_reader_is_refused_and_the_first_reads_on() -> None:
    go_on = asyncio.Event()

    @ps.node
    async def waiting(x: int) -> int:
        await go_on.wait()
        return x

    @ps.graph
    async def graph(x: int) -> int:
        return await waiting(x)

    async with engine.stream(graph(x) for x in range(3)) as stream:
        first = asyncio.ensure_future(anext(stream))
        await testing.wait_quiescent()
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(stream)
        go_on.set()
        assert await first == 0
        assert [x async for x in stream] == [1, 2]


async def test_stop_async_iteration_of_a_node_does_not_look_like_the_end_of_the_stream() -> None:
    @ps.node
    async def exhausted(x: int) -> int:
        raise StopAsyncIteration

    @ps.graph
    async def graph(x: int) -> int:
        return await exhausted(x)

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

    @ps.graph
    async def graph(key: str) -> str:
        return await find(key)

    with pytest.raises(NotFoundError):
        await engine.run(graph("a"))


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
