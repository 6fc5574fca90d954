"""The same calls on workers of Dask or Monarch: `python benchmarks/cluster_peers.py dask`, in the peer's environment.

This file imports nothing of Penstock; `make bench-cluster-peers` runs it with each of the two peers.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

Call = Callable[[int, int], Awaitable[int]]  # a call with a number, on the worker with this number


def nothing(number: int) -> int:
    return number


def five_ms(number: int) -> int:
    time.sleep(0.005)
    return number


async def a_second(call: Call, count: int, ahead: int) -> float:
    numbers = iter(range(count))

    async def lane(worker: int) -> None:
        for number in numbers:
            assert await call(number, worker) == number

    began = time.perf_counter()
    await asyncio.gather(*map(lane, range(ahead)))
    return count / (time.perf_counter() - began)


async def rows(name: str, two: Call, four: Call) -> None:
    await a_second(two, 200, 64)
    await a_second(four, 200, 32)
    print(f"| {name}: no-op calls, 64 in flight | {await a_second(two, 2000, 64):,.0f} a second |")
    print(f"| {name}: calls of 5 ms on 4 workers | {await a_second(four, 1000, 32):,.0f} a second |", flush=True)


async def dask() -> None:
    distributed: Any = import_module("distributed")
    options = {"threads_per_worker": 1, "dashboard_address": None, "asynchronous": True, "host": "127.0.0.1"}
    async with (
        distributed.LocalCluster(n_workers=4, **options) as local,
        distributed.Client(local, asynchronous=True) as client,
    ):
        await client.wait_for_workers(4)
        workers = [one.worker_address for one in local.workers.values()]

        async def two(number: int, worker: int) -> Any:
            return await client.submit(nothing, number, pure=False, workers=workers[worker % 2])

        async def four(number: int, _: int) -> Any:
            return await client.submit(five_ms, number, pure=False)

        await rows("Dask", two, four)


async def monarch() -> None:
    actor: Any = import_module("monarch.actor")

    class Remote(actor.Actor):  # type: ignore[misc]
        @actor.endpoint  # type: ignore[untyped-decorator]
        async def nothing(self, number: int) -> int:
            return nothing(number)

        @actor.endpoint  # type: ignore[untyped-decorator]
        async def five_ms(self, number: int) -> int:
            return five_ms(number)

    processes = actor.this_host().spawn_procs(per_host={"workers": 4})
    actors = processes.spawn("bench", Remote)
    each = [actors.slice(workers=number) for number in range(4)]

    async def two(number: int, worker: int) -> Any:
        return await each[worker % 2].nothing.call_one(number)

    async def four(number: int, worker: int) -> Any:
        return await each[worker % 4].five_ms.call_one(number)

    await rows("Monarch", two, four)
    sys.stdout.flush()
    os._exit(0)  # Monarch's processes end with this process


if __name__ == "__main__":
    asyncio.run({"dask": dask, "monarch": monarch}[sys.argv[1]]())
