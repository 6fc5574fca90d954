"""Runs a function, a coroutine, a generator and a class in workers behind pipes."""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from pipes import BehindPipes

import penstock as ps
from penstock import engine

PIPES = BehindPipes("pipes", count=2)


@ps.node(runs_on=PIPES)
def where(item: int) -> str:
    return f"{multiprocessing.current_process().name[:12]}, item {ps.current().item}"


@ps.node(runs_on=PIPES, retry=ps.Retry(2))
async def later(item: int) -> int:
    await asyncio.sleep(0.01)
    if item == 2 and ps.current().attempt == 1:
        raise OSError("try again")
    return 10 * item


@ps.node(runs_on=PIPES)
async def count(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield number


@ps.node(runs_on=PIPES, restart_on=(ValueError,))
class Total:
    def __init__(self, start: int) -> None:
        self.total = start

    def __call__(self, item: int) -> int:
        if item < 0:
            raise ValueError(item)
        self.total += item
        return self.total


@ps.node(runs_on=PIPES, timeout_seconds=0.2)
def slow(item: int) -> None:
    while True:
        time.sleep(0.01)
        ps.current().check_cancelled()  # the timeout has come through the pipe


total = Total(100)


@ps.graph
async def all_kinds(item: int) -> tuple[str, int, int]:
    return where(item), await later(item), total(item)


async def main() -> None:
    async with engine.Engine() as e:
        async with e.stream(all_kinds(item) for item in range(3)) as stream:
            async for result in stream:
                print(result)
        print([f"{node.node}: {node.figures[0].value}" for node in stream.statistics().actors])
        async with e.stream(ps.graph(count)(1_000_000)) as numbers:
            print(await anext(numbers), await anext(numbers))
        async with e.deploy(ps.graph(total)) as service:
            print(await service(1), [await asyncio.gather(service(-1), return_exceptions=True)], await service(1))
            print(service.statistics().actors[0].restarts, "restart")
        try:
            await e.run(ps.graph(slow)(1))
        except ps.NodeTimeoutError as error:
            print(error)


if __name__ == "__main__":
    asyncio.run(main())
