"""xoscar: actors in this process, whose references call them directly, and actors in two sub-processes.

In the chain every actor calls the next and hands its answer back; 16 items are in flight, 64 for `io`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import xoscar as xo
from xoscar.utils import get_next_port

from ..baselines import calls, pools
from ..baselines.calls import call_from_many
from ..baselines.chain import BUFFER, pass_on
from ..harness import Contenders
from .shared import (
    BRANCHES,
    IO_IN_FLIGHT,
    IO_ITEMS,
    STAGES,
    THREAD_ITEMS,
    THREADS,
    in_turn,
    joined,
    per_item,
)

IN_PROCESS = "xoscar, in-process"
SUB_PROCESS = "xoscar, sub-process"
PROCESSES = 2


class Worker(xo.StatelessActor):
    def __init__(self, successor: xo.ActorRefType | None = None) -> None:
        self._successor = successor

    async def __post_create__(self) -> None:
        if self._successor is not None:
            # A reference that is requested in the process of its actor calls the actor directly.
            self._successor = await xo.actor_ref(self._successor.address, self._successor.uid)

    async def forward(self, value: int) -> int:
        value = await pass_on(value)
        return value if self._successor is None else await self._successor.forward(value)

    async def pass_on(self, value: int) -> int:
        return await pass_on(value)

    async def join(self, parts: list[int]) -> int:
        return calls.join(parts)

    async def wait(self, value: int) -> int:
        return await pools.wait_for_io(value)

    async def sleep(self, value: int) -> int:
        return await asyncio.to_thread(pools.release_by_sleeping, value)


@asynccontextmanager
async def actors(number: int, processes: int, *, chained: bool = False) -> AsyncIterator[list[xo.ActorRefType]]:
    """Open `number` actors in some sub-processes, neighbours together; with zero sub-processes, in this process."""
    pool = await xo.create_actor_pool(f"127.0.0.1:{get_next_port()}", n_process=processes)
    async with pool:
        references: list[xo.ActorRefType] = []
        for index in reversed(range(number)):  # the last actor first, since each actor gets its successor
            created = await xo.create_actor(
                Worker,
                references[0] if chained and references else None,
                address=pool.external_address,
                uid=f"worker-{index}",
                # Process 0 is this process.
                allocate_strategy=xo.allocate_strategy.ProcessIndex(
                    1 + index * processes // number if processes else 0
                ),
            )
            references.insert(0, await xo.actor_ref(created.address, created.uid))
        yield references


def fanned_out(workers):
    *branches, last = workers

    async def call(value: int) -> int:
        return await last.join(await asyncio.gather(*[branch.pass_on(value) for branch in branches]))

    return call


@asynccontextmanager
async def open_chain(quick: bool) -> AsyncIterator[Contenders]:
    async with actors(STAGES, 0, chained=True) as near, actors(STAGES, PROCESSES, chained=True) as far:
        yield {
            IN_PROCESS: per_item(500 if quick else 2_000, lambda items: call_from_many(near[0].forward, items, BUFFER)),
            SUB_PROCESS: per_item(200 if quick else 1_000, lambda items: call_from_many(far[0].forward, items, BUFFER)),
        }


@asynccontextmanager
async def open_call(quick: bool) -> AsyncIterator[Contenders]:
    async with actors(BRANCHES + 1, 0) as near, actors(BRANCHES + 1, PROCESSES) as far:
        yield {
            IN_PROCESS: per_item(50 if quick else 200, in_turn(fanned_out(near), joined)),
            SUB_PROCESS: per_item(20 if quick else 100, in_turn(fanned_out(far), joined)),
        }


@asynccontextmanager
async def open_io(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    async with actors(1, 0) as near, actors(1, 1) as far:
        yield {
            IN_PROCESS: lambda: call_from_many(near[0].wait, IO_ITEMS, IO_IN_FLIGHT),
            SUB_PROCESS: lambda: call_from_many(far[0].wait, IO_ITEMS, IO_IN_FLIGHT),
        }


@asynccontextmanager
async def open_threads(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    async with actors(1, 0) as near, actors(1, 1) as far:
        yield {
            IN_PROCESS: lambda: call_from_many(near[0].sleep, THREAD_ITEMS, THREADS),
            SUB_PROCESS: lambda: call_from_many(far[0].sleep, THREAD_ITEMS, THREADS),
        }


WORKLOADS = {"chain": open_chain, "call": open_call, "io": open_io, "threads": open_threads}
