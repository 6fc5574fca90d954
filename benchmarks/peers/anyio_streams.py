"""anyio: tasks of a task group, joined by memory object streams."""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from anyio.to_thread import run_sync

from ..baselines import calls, pools
from ..baselines.chain import BUFFER, pass_on
from ..harness import Contenders
from .shared import BRANCHES, IO_IN_FLIGHT, IO_ITEMS, STAGES, THREAD_ITEMS, THREADS, in_turn, joined, per_item

NAME = "anyio streams"

Sender = MemoryObjectSendStream[int]
Receiver = MemoryObjectReceiveStream[int]
Work = Callable[[Receiver, Sender], Coroutine[Any, Any, None]]


async def feed(items: int, sink: Sender) -> None:
    async with sink:
        for value in range(items):
            await sink.send(value)


async def chain_seconds(items: int) -> float:
    async def work(source: Receiver, sink: Sender) -> None:
        async with source, sink:
            async for value in source:
                await sink.send(await pass_on(value))

    streams = [anyio.create_memory_object_stream[int](BUFFER) for _ in range(STAGES + 1)]
    received = 0
    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed, items, streams[0][0])
        for (_, source), (sink, _) in itertools.pairwise(streams):
            tasks.start_soon(work, source, sink)
        async with streams[-1][1] as results:
            async for _ in results:
                received += 1
    assert received == items
    return time.perf_counter() - started


async def fan_out(value: int) -> int:
    parts = [0] * BRANCHES

    async def branch(index: int) -> None:
        parts[index] = await pass_on(value)

    async with anyio.create_task_group() as tasks:
        for index in range(BRANCHES):
            tasks.start_soon(branch, index)
    return calls.join(parts)


async def io_seconds() -> float:
    async def work(source: Receiver, sink: Sender) -> None:
        async with source, sink:
            async for value in source:
                await sink.send(await pools.wait_for_io(value))

    return await pool_seconds(work, IO_ITEMS, IO_IN_FLIGHT)


async def threads_seconds() -> float:
    async def work(source: Receiver, sink: Sender) -> None:
        async with source, sink:
            async for value in source:
                await sink.send(await run_sync(pools.release_by_sleeping, value))

    return await pool_seconds(work, THREAD_ITEMS, THREADS)


async def pool_seconds(work: Work, items: int, workers: int) -> float:
    """Measure `workers` tasks that share a stream of work and a stream of results; each task has clones of both."""
    work_send, work_receive = anyio.create_memory_object_stream[int](workers)
    result_send, result_receive = anyio.create_memory_object_stream[int](workers)
    total = 0
    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed, items, work_send)
        for _ in range(workers):
            tasks.start_soon(work, work_receive.clone(), result_send.clone())
        work_receive.close()
        result_send.close()
        async with result_receive:
            async for value in result_receive:
                total += value
    assert total == sum(range(items))
    return time.perf_counter() - started


@asynccontextmanager
async def open_chain(quick: bool) -> AsyncIterator[Contenders]:
    yield {NAME: per_item(500 if quick else 2_000, chain_seconds)}


@asynccontextmanager
async def open_call(quick: bool) -> AsyncIterator[Contenders]:
    yield {NAME: per_item(50 if quick else 200, in_turn(fan_out, joined))}


@asynccontextmanager
async def open_io(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    yield {NAME: io_seconds}


@asynccontextmanager
async def open_threads(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    yield {NAME: threads_seconds}


WORKLOADS = {"chain": open_chain, "call": open_call, "io": open_io, "threads": open_threads}
