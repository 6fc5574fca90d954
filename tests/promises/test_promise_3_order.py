"""Promise 3: FIFO per channel and priority; outputs in input order unless asked otherwise."""

import asyncio
import random

import penstock as ps
from penstock import engine, testing
from tests.promises.exploring import Explorer
from tests.promises.scenario import World
from tests.promises.ways import as_stream


def test_promise_3_outputs_come_in_input_order(explore: Explorer) -> None:
    async def main() -> World:
        world = World.of_running_loop()
        with world.faults():
            await as_stream(world, world.items(10), ordered=True)
        assert world.yielded == list(range(10))
        return world

    failed, faulty = (lambda world: world.count("failed") > 0), (lambda world: world.injected > 0)
    explore(main, reaches={"a failed item": failed, "a fault": faulty})


def test_promise_3_every_inbox_is_first_in_first_out(explore: Explorer) -> None:
    """Behind a node that takes one item at a time, nothing overtakes."""

    async def main() -> None:
        rng = random.Random(asyncio.get_running_loop().seed)  # type: ignore[attr-defined]
        waits = {(node, item): rng.randrange(3) for node in "abc" for item in range(20)}
        begun: dict[str, list[int]] = {"a": [], "b": [], "c": []}

        async def handle(node: str, item: int) -> int:
            begun[node].append(item)
            for _ in range(waits[node, item]):
                await asyncio.sleep(0)
            return item

        @ps.node(concurrency=1, capacity=2)
        async def a(item: int) -> int:
            return await handle("a", item)

        @ps.node(concurrency=1, capacity=1)
        async def b(item: int) -> int:
            return await handle("b", item)

        @ps.node(concurrency=3)
        async def c(item: int) -> int:
            return await handle("c", item)

        @ps.graph
        async def line(item: int) -> int:
            return await c(await b(await a(item)))

        async with engine.stream((line(item) for item in range(20)), max_in_flight=8, ordered=False) as results:
            out = [item async for item in results]
        assert begun == {"a": list(range(20)), "b": list(range(20)), "c": list(range(20))}
        assert sorted(out) == list(range(20))

    explore(main, count=250)


def test_promise_3_an_inbox_gives_higher_priorities_first_and_is_fair_within_one() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        begun: list[tuple[int, int]] = []

        @ps.node(concurrency=1)
        async def narrow(priority: int, number: int) -> None:
            begun.append((priority, number))
            await gate.wait()

        @ps.graph
        async def call(priority: int, number: int) -> None:
            return await narrow(priority, number)

        async with engine.deploy(call) as service, asyncio.TaskGroup() as group:
            group.create_task(service.run(call(0, 0), priority=0))  # takes the only place
            await testing.wait_quiescent()
            for number, priority in enumerate([1, 0, 2, 1, -1, 2], 1):
                group.create_task(service.run(call(priority, number), priority=priority))
                await testing.wait_quiescent()
            gate.set()
        assert begun == [(0, 0), (2, 3), (2, 6), (1, 1), (1, 4), (0, 2), (-1, 5)]

    testing.run_virtual(main)


def test_promise_3_completion_order_on_request() -> None:
    async def main() -> list[int]:
        @ps.node
        async def wait(seconds: int) -> int:
            await asyncio.sleep(seconds)
            return seconds

        @ps.graph
        async def waiting(seconds: int) -> int:
            return await wait(seconds)

        async with engine.stream((waiting(s) for s in (5, 3, 4, 1, 2)), ordered=False) as results:
            return [seconds async for seconds in results]

    assert testing.run_virtual(main) == [1, 2, 3, 4, 5]


def test_promise_3_a_slow_first_item_with_a_full_window_does_not_stall() -> None:
    """The window is enforced at admission, so no node waits for it: all others finish, and item 0 comes first."""

    async def main() -> None:
        finished: list[int] = []

        @ps.node(concurrency=2, capacity=1)
        async def work(item: int) -> int:
            await asyncio.sleep(60 if item == 0 else 1)
            finished.append(item)
            return item

        @ps.graph
        async def working(item: int) -> int:
            return await work(item)

        async with engine.stream((working(item) for item in range(20)), max_in_flight=8) as results:
            assert [item async for item in results] == list(range(20))
        assert finished[:8] == [1, 2, 3, 4, 5, 6, 7, 0]

    testing.run_virtual(main, timeout_seconds=600)
