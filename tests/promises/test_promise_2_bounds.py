"""Promise 2: no channel holds more than its capacity, one oversized item excepted; nothing exceeds `max_in_flight`."""

import asyncio

import pytest

import penstock as ps
from penstock import engine, testing
from tests.promises.scenario import LIMITS, World, as_calls, as_runs, as_stream


def check_limits(world: World) -> None:
    for node, limit in LIMITS.items():
        assert world.peak[node] <= limit, f"{world.peak[node]} items were in {node!r} at a time"


@pytest.mark.parametrize("ordered", [True, False])
def test_promise_2_limits_inboxes_and_the_window_of_a_stream_hold(effort: int, ordered: bool) -> None:
    async def main() -> World:
        world = World.of_running_loop()
        statistics = await as_stream(world, [world.item(index) for index in range(20)], ordered=ordered)
        check_limits(world)
        assert world.inside_peak <= world.max_in_flight
        for actor in statistics.actors:
            assert actor.inbox.capacity is not None
            assert actor.inbox.high_water <= actor.inbox.capacity
        return world

    worlds = testing.interleavings(main, count=60 * effort)
    # The bounds mean nothing where they are never reached.
    assert max(world.inside_peak for world in worlds) == 4
    assert max(world.peak["take"] for world in worlds) == 3


def test_promise_2_limits_and_places_of_a_deployment_hold(effort: int) -> None:
    async def main() -> World:
        world = World.of_running_loop()
        await as_calls(world, [world.item(index) for index in range(20)])
        check_limits(world)
        assert world.running_peak <= world.max_in_flight
        return world

    worlds = testing.interleavings(main, count=60 * effort)
    assert max(world.running_peak for world in worlds) == 4


def test_promise_2_limits_hold_for_callers_that_come_and_go(effort: int) -> None:
    async def main() -> World:
        world = World.of_running_loop()
        await as_runs(world, [world.item(index) for index in range(20)])
        check_limits(world)
        return world

    worlds = testing.interleavings(main, count=60 * effort)
    assert all(max(world.peak[node] for world in worlds) == limit for node, limit in LIMITS.items())


def test_promise_2_an_item_counts_until_it_is_yielded() -> None:
    """A slow reader, not only a slow node, keeps the source from being asked."""
    asked = 0

    async def main() -> None:
        nonlocal asked

        def source():
            nonlocal asked
            for index in range(20):
                asked += 1
                yield one(index)

        async with engine.stream(source(), max_in_flight=5) as results:
            await testing.wait_quiescent()
            assert asked == 5
            for index in range(20):
                assert await anext(results) == index
                await testing.wait_quiescent()
                assert asked == min(20, index + 6)

    testing.run_virtual(main)


def test_promise_2_an_inbox_holds_its_bytes_and_one_oversized_item() -> None:
    sizes = [60, 30, 30, 500, 20, 20]
    seen: list[int] = []

    async def main() -> None:
        gate = asyncio.Event()

        @ps.node
        async def produce(size: int) -> bytes:
            return bytes(size)

        @ps.node(concurrency=1, capacity=10, max_bytes=100)
        async def consume(data: bytes) -> int:
            await gate.wait()
            seen.append(len(data))
            return len(data)

        @ps.graph
        async def weigh(size: int) -> int:
            return await consume(await produce(size))

        async with engine.stream(weigh(size) for size in sizes) as results:
            await testing.wait_quiescent()
            inbox = next(a for a in results.statistics().actors if a.node == "consume").inbox
            assert (inbox.depth, inbox.bytes_held) == (2, 60)  # 60 runs; 30 and 30 wait; 500 waits before the inbox
            gate.set()
            assert [size async for size in results] == sizes

    testing.run_virtual(main)
    assert seen == sizes


@ps.node
async def same(x: int) -> int:
    return x


@ps.graph
async def one(x: int) -> int:
    return await same(x)
