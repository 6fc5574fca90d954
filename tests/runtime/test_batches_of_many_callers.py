"""Callers of a batch stay together: no batch of one between two of all others. A lone caller never waits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.kit import numbers, paused, plain

WIDTH, ROUNDS = 32, 12
sizes: list[int] = []


@ps.node(batch=ps.Batch(WIDTH))
async def on_the_loop(numbers: list[int]) -> list[int]:
    sizes.append(len(numbers))
    await asyncio.sleep(0.003)
    return numbers


@ps.node(batch=ps.Batch(WIDTH), runs_on="thread")
def in_a_thread(numbers: list[int]) -> list[int]:
    sizes.append(len(numbers))
    time.sleep(0.003)
    return numbers


async def through_a_map(call: Any) -> None:
    @ps.graph
    async def graph(values: AsyncIterator[int]) -> AsyncIterator[int]:
        return ps.map_each(call, values)

    results = engine.stream(graph(numbers.fn(WIDTH * ROUNDS)))
    assert [result async for result in results] == list(range(WIDTH * ROUNDS))


async def through_a_map_behind_others(call: Any) -> None:
    async def body(number: int) -> int:
        return await call(await paused(plain(number)))

    await through_a_map(body)


async def through_a_map_of_a_list(call: Any) -> None:
    @ps.graph
    async def graph(values: list[int]) -> list[int]:
        return await ps.map_each(call, values, concurrency=WIDTH)

    assert await engine.run(graph(list(range(WIDTH * ROUNDS)))) == list(range(WIDTH * ROUNDS))


async def through_a_stream_of_calls(call: Any) -> None:
    graph = plain >> paused >> call
    async with engine.stream((graph(n) for n in range(WIDTH * ROUNDS)), max_in_flight=WIDTH) as results:
        assert [result async for result in results] == list(range(WIDTH * ROUNDS))


async def through_a_deployment(call: Any) -> None:
    async def client(service: Any) -> None:
        for number in range(ROUNDS):
            assert await service(number) == number

    async with engine.deploy(ps.graph(call)) as service:
        await asyncio.gather(*[client(service) for _ in range(WIDTH)])


WAYS = [
    through_a_map, through_a_map_behind_others, through_a_map_of_a_list, through_a_stream_of_calls,
    through_a_deployment,
]  # fmt: skip


@pytest.mark.parametrize("call", [on_the_loop, in_a_thread], ids=["loop", "thread"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_batches_hold_all_callers(way: Callable[[Any], Any], call: Any) -> None:
    """Up to three first batches and the last may be smaller. With batches of one in between, there would be 24."""
    sizes.clear()
    await way(call)
    assert sum(sizes) == WIDTH * ROUNDS
    assert len(sizes) <= ROUNDS * 1.5, sizes


async def test_nothing_waits_for_a_caller_alone() -> None:
    """A call takes only the turns of the loop that its batch and its own path need."""
    handled_in: list[int] = []
    turns = 0

    @ps.node(batch=ps.Batch(WIDTH))
    async def call(numbers: list[int]) -> list[int]:
        handled_in.append(turns)
        return numbers

    def turn() -> None:
        nonlocal turns, handle
        turns += 1
        handle = asyncio.get_running_loop().call_soon(turn)

    async with engine.deploy(ps.graph(call)) as service:
        await service(0)
        handle = asyncio.get_running_loop().call_soon(turn)
        for number in range(20):
            before = turns
            await service(number)
            assert handled_in[-1] - before <= 3
        handle.cancel()
