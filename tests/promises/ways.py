"""The ways to run the world's items: as streams, as calls of a deployment, as single runs, and mixed."""

import asyncio
from typing import Any

import penstock as ps
from penstock import engine
from tests.promises.scenario import Boom, Injected, Item, World


async def live(world: World, *, count: int = 12) -> list[Item]:
    """Run items in a way that the seed chooses, and note their outcomes."""
    items = world.items(count)
    way = world.rng.choice([as_stream, as_calls, as_runs, as_both])
    with world.faults():
        await way(world, items)
    return items


async def as_stream(world: World, items: list[Item], *, ordered: bool | None = None) -> None:
    """Run the items as a stream whose window is smaller than their number, perhaps with a slow reader."""
    in_order = world.rng.random() < 0.5 if ordered is None else ordered
    calls = (world.shape.graph(item) for item in items)
    async with engine.stream(calls, max_in_flight=world.max_in_flight, ordered=in_order) as stream:
        await _read(world, stream, items)
    world.statistics = stream.statistics()


async def as_calls(world: World, items: list[Item]) -> None:
    """Run the items as calls of a deployment; some callers leave, some have deadlines, and some are refused."""
    queue: dict[str, Any] = {"max_queue": 5} if world.rng.random() < 0.4 else {}
    async with engine.deploy(world.shape.graph, max_in_flight=world.max_in_flight, **queue) as service:
        await call_all(world, items, service)
    world.statistics = service.statistics()


async def as_runs(world: World, items: list[Item]) -> None:
    """Run the items with `engine.run`, all at once; some callers leave, and some have deadlines."""
    await call_all(world, items, engine)


async def as_both(world: World, items: list[Item]) -> None:
    """Run some items as calls and some as a stream of one deployment, so that they share its places."""
    half = len(items) // 2
    ordered = world.rng.random() < 0.5
    async with (
        engine.deploy(world.shape.graph, max_in_flight=world.max_in_flight) as service,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(call_all(world, items[half:], service))
        calls = (world.shape.graph(item) for item in items[:half])
        async with service.stream(calls, max_in_flight=2, ordered=ordered) as stream:
            await _read(world, stream, items[:half])
    world.statistics = service.statistics()


async def _read(world: World, stream: engine.Stream[Any], items: list[Item]) -> None:
    patience = world.rng.choice([0, 0, 1, 2])  # half of the worlds have a slow reader
    async for outcome in stream.outcomes():
        index = items[outcome.index].index
        if outcome.error is None:
            world.end(index, "done", outcome.value)
        else:
            world.end(index, "failed", outcome.error)
        for _ in range(world.rng.randrange(patience + 1)):
            await asyncio.sleep(0.4)


async def call_all(world: World, items: list[Item], runner: Any) -> None:
    submitted: set[int] = set()
    is_service = runner is not engine

    async def call(item: Item) -> None:
        options: dict[str, Any] = {}
        if world.rng.random() < 0.2:
            options["timeout_seconds"] = world.rng.choice([0.25, 0.75, 1.5])
        if is_service and world.rng.random() < 0.3:
            options["priority"] = world.rng.choice([-1, 1])
        submitted.add(item.index)
        try:
            value = await runner.run(world.shape.graph(item), **options)
        except ps.DeadlineExceeded as error:
            world.end(item.index, "expired", error)
        except ps.Overloaded as error:
            world.end(item.index, "refused", error)
        except (Boom, Injected, ps.NodeCancelledError) as error:
            world.end(item.index, "failed", error)
        except asyncio.CancelledError:
            world.end(item.index, "cancelled")
        else:
            world.end(item.index, "done", value)

    async def canceller(task: asyncio.Task[None], item: int, after: int) -> None:
        while item not in submitted:  # a task that is cancelled before its first step makes no call
            await asyncio.sleep(0)
        for _ in range(after):
            await asyncio.sleep(0 if after % 2 else 0.25)
        task.cancel()

    async with asyncio.TaskGroup() as group:
        for item in items:
            task = group.create_task(call(item))
            if world.rng.random() < 0.3:
                group.create_task(canceller(task, item.index, world.rng.randrange(12)))
