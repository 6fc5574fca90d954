"""Hamilton: functions named after their results, run by its async driver, with one `execute` for each item.

The driver has no limit on calls in flight: callers have to limit them, here with a pool of tasks.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hamilton import ad_hoc_utils, async_driver

from ..baselines import calls, pools
from ..baselines.calls import call_from_many
from ..baselines.chain import pass_on
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
    same,
)

NAME = "Hamilton async"


def passing_function(name: str, reads: str):
    """Return a function as if it were written out: `async def name(reads: int) -> int`.

    Hamilton reads names and annotations.
    """
    namespace = {"pass_on": pass_on}
    exec(f"async def {name}({reads}: int) -> int:\n    return await pass_on({reads})\n", namespace)
    return namespace[name]


def joining_function(reads: list[str]):
    namespace = {"join": calls.join}
    parameters = ", ".join(f"{name}: int" for name in reads)
    exec(f"async def total({parameters}) -> int:\n    return join([{', '.join(reads)}])\n", namespace)
    return namespace["total"]


async def waited(value: int) -> int:
    return await pools.wait_for_io(value)


async def slept(value: int) -> int:
    return await asyncio.to_thread(pools.release_by_sleeping, value)


async def driver_of(*functions):
    module = ad_hoc_utils.create_temporary_module(*functions)
    return await async_driver.Builder().with_modules(module).build()


def caller(driver, output: str):
    async def call(value: int) -> int:
        return (await driver.execute([output], inputs={"value": value}))[output]

    return call


@asynccontextmanager
async def open_chain(quick: bool) -> AsyncIterator[Contenders]:
    names = ["value", *(f"stage_{index}" for index in range(STAGES))]
    driver = await driver_of(*map(passing_function, names[1:], names))
    yield {NAME: per_item(100 if quick else 500, in_turn(caller(driver, names[-1]), same))}


@asynccontextmanager
async def open_call(quick: bool) -> AsyncIterator[Contenders]:
    names = [f"branch_{index}" for index in range(BRANCHES)]
    driver = await driver_of(*(passing_function(name, "value") for name in names), joining_function(names))
    yield {NAME: per_item(20 if quick else 100, in_turn(caller(driver, "total"), joined))}


@asynccontextmanager
async def open_io(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    driver = await driver_of(waited)
    yield {NAME: lambda: call_from_many(caller(driver, "waited"), IO_ITEMS, IO_IN_FLIGHT)}


@asynccontextmanager
async def open_threads(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    driver = await driver_of(slept)
    yield {NAME: lambda: call_from_many(caller(driver, "slept"), THREAD_ITEMS, THREADS)}


WORKLOADS = {"chain": open_chain, "call": open_call, "io": open_io, "threads": open_threads}
