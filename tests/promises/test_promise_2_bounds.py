"""Promise 2: a channel holds at most its capacity, or one oversized item; nothing exceeds `max_in_flight`."""

import asyncio

import penstock as ps
from penstock import engine, testing
from tests.kit import same, virtual
from tests.promises.exploring import Explorer
from tests.promises.scenario import LIMITS, World
from tests.promises.ways import live


def test_promise_2_limits_inboxes_windows_and_places_hold(explore: Explorer) -> None:
    async def main() -> World:
        world = World.of_running_loop()
        await live(world)
        is_shared = world.statistics is not None
        for node, limit in LIMITS.items():
            if node in ("tally", "ledger") and not is_shared:
                continue  # each run has an instance of its own
            assert world.peak[node] <= limit, f"{world.peak[node]} items were in {node!r} at a time"
        if isinstance(world.statistics, engine.StreamStatistics):
            assert world.inside_peak <= world.max_in_flight
        elif isinstance(world.statistics, engine.ServiceStatistics):
            assert world.running_peak <= world.max_in_flight
        for actor in world.statistics.actors if is_shared else ():
            if actor.inbox.capacity is not None:  # an inbox in a body has no capacity: `concurrency` bounds its frames
                assert actor.inbox.high_water <= actor.inbox.capacity
        return world

    limits = {f"{limit} in {node}": lambda w, n=node, limit=limit: w.peak[n] == limit for node, limit in LIMITS.items()}
    windows = {
        kind.__name__: lambda w, kind=kind: isinstance(w.statistics, kind) and w.running_peak == w.max_in_flight
        for kind in (engine.StreamStatistics, engine.ServiceStatistics)
    }
    explore(main, reaches={**limits, **windows})


@virtual
async def test_promise_2_an_item_counts_until_it_is_yielded() -> None:
    """A slow reader, not only a slow node, keeps the engine from asking the source for more."""
    asked = 0

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

        weigh = produce >> consume
        async with engine.stream(weigh(size) for size in sizes) as results:
            await testing.wait_quiescent()
            inbox = next(a for a in results.statistics().actors if a.node == "consume").inbox
            # 60 runs; 30 and 30 wait in the inbox; 500 waits before it
            assert (inbox.depth, inbox.bytes_held) == (2, 60)
            gate.set()
            assert [size async for size in results] == sizes

    testing.run_virtual(main)
    assert seen == sizes


one = ps.graph(same)
