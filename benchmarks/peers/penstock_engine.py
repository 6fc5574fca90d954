"""Penstock itself, in the same rounds as the peers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock import engine

from ..baselines import calls
from ..harness import Contenders
from ..workloads.fan_out import fan_out
from ..workloads.graphs import chain, stream_seconds
from ..workloads.io import stream_seconds as io_stream_seconds
from ..workloads.threads import sleeping
from .shared import IO_ITEMS, STAGES, THREAD_ITEMS, joined, per_item

NAME = "Penstock"


@asynccontextmanager
async def open_chain(quick: bool) -> AsyncIterator[Contenders]:
    graph = chain(STAGES)
    yield {NAME: per_item(2_000 if quick else 10_000, lambda items: stream_seconds(graph, items))}


@asynccontextmanager
async def open_call(quick: bool) -> AsyncIterator[Contenders]:
    async def run(value: int) -> int:
        return await engine.run(fan_out(value))

    items = 200 if quick else 1_000
    async with engine.deploy(fan_out) as service:
        yield {
            f"{NAME}, run": per_item(items, lambda items: calls.call_in_turn(run, items, joined)),
            f"{NAME}, deployed": per_item(items, lambda items: calls.call_in_turn(service, items, joined)),
        }


@asynccontextmanager
async def open_io(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    yield {NAME: lambda: io_stream_seconds(IO_ITEMS, ordered=True)}


@asynccontextmanager
async def open_threads(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    yield {NAME: lambda: stream_seconds(sleeping, THREAD_ITEMS)}


WORKLOADS = {"chain": open_chain, "call": open_call, "io": open_io, "threads": open_threads}
