"""A chain of stages: one task for each stage, and a bounded queue between neighbours."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Stage = Callable[[int], Awaitable[int]]

BUFFER = 16

_END = object()


async def pass_on(value: int) -> int:
    """Do nothing, as a stage, so that only the cost of a hop is measured."""
    return value


async def direct_chain(items: int, stages: int) -> float:
    """Await every stage in a loop, one item after the other: the floor."""
    started = time.perf_counter()
    for value in range(items):
        for _ in range(stages):
            value = await pass_on(value)
    return time.perf_counter() - started


async def queue_chain(items: int, stages: int, at_item: Callable[[int], None] | None = None) -> float:
    """Run the usual stages by hand: `asyncio.Queue` between tasks; `at_item` gets the number of results so far."""
    queues: list[asyncio.Queue[object]] = [asyncio.Queue(BUFFER) for _ in range(stages + 1)]

    async def feed() -> None:
        for value in range(items):
            await queues[0].put(value)
        await queues[0].put(_END)

    async def work(source: asyncio.Queue[object], sink: asyncio.Queue[object]) -> None:
        while isinstance(value := await source.get(), int):
            await sink.put(await pass_on(value))
        await sink.put(_END)

    received = 0
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed())
        for source, sink in itertools.pairwise(queues):
            tasks.create_task(work(source, sink))
        while await queues[-1].get() is not _END:
            received += 1
            if at_item is not None:
                at_item(received)
    elapsed = time.perf_counter() - started
    assert received == items
    return elapsed


@asynccontextmanager
async def queue_service(stages: int) -> AsyncIterator[Stage]:
    """Open resident queue stages that many callers share; each request has a future for its answer."""
    queues: list[asyncio.Queue[tuple[int, asyncio.Future[int]]]] = [asyncio.Queue(BUFFER) for _ in range(stages + 1)]
    loop = asyncio.get_running_loop()

    async def work(
        source: asyncio.Queue[tuple[int, asyncio.Future[int]]], sink: asyncio.Queue[tuple[int, asyncio.Future[int]]]
    ) -> None:
        while True:
            value, future = await source.get()
            await sink.put((await pass_on(value), future))

    async def answer() -> None:
        while True:
            value, future = await queues[-1].get()
            if not future.done():
                future.set_result(value)

    async def request(value: int) -> int:
        future: asyncio.Future[int] = loop.create_future()
        await queues[0].put((value, future))
        return await future

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(source, sink)) for source, sink in itertools.pairwise(queues)]
        tasks.append(group.create_task(answer()))
        yield request
        for task in tasks:
            task.cancel()
