"""`python -m benchmarks.channel`: the cost of a hop through the project's channel, and through other queues.

Ten stages, each in a task of its own, only pass an item on, with buffers of 16 between the stages. Decision note 1 has
these numbers; no other benchmark and no limit depends on them.
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from penstock.actors.channel import Channel

from . import loops
from .baselines.chain import BUFFER
from .summary import interval, ratio

STAGES = 10
REFERENCE = "asyncio.Queue"

Put = Callable[[int], Awaitable[object]]
Get = Callable[[], Awaitable[int]]


async def queues(items: int) -> float:
    links: list[asyncio.Queue[int]] = [asyncio.Queue(BUFFER) for _ in range(STAGES + 1)]
    return await awaited(items, [(link.put, link.get) for link in links])


async def anyio_streams(items: int) -> float:
    links = [anyio.create_memory_object_stream[int](BUFFER) for _ in range(STAGES + 1)]
    elapsed = await awaited(items, [(send.send, receive.receive) for send, receive in links])
    close_all(links)
    return elapsed


async def channels(items: int) -> float:
    links: list[Channel[int]] = [Channel(BUFFER) for _ in range(STAGES + 1)]
    return await awaited(items, [(link.put, link.get) for link in links])


async def awaited(items: int, links: list[tuple[Put, Get]]) -> float:
    """Measure stages in which every hop is an `await`, whether it has to wait or not."""

    async def feed(put: Put) -> None:
        for value in range(items):
            await put(value)

    async def pass_on(get: Get, put: Put) -> None:
        for _ in range(items):
            await put(await get())

    async def drain(get: Get) -> None:
        for _ in range(items):
            await get()

    stages = [pass_on(source[1], sink[0]) for source, sink in itertools.pairwise(links)]
    return await timed(feed(links[0][0]), *stages, drain(links[-1][1]))


async def anyio_nowait_first(items: int) -> float:
    """Measure the `*_nowait` methods, with an `await` only if these would block: no checkpoint for each hop."""
    links = [anyio.create_memory_object_stream[int](BUFFER) for _ in range(STAGES + 1)]

    async def send(sink: MemoryObjectSendStream[int], value: int) -> None:
        try:
            sink.send_nowait(value)
        except anyio.WouldBlock:
            await sink.send(value)

    async def receive(source: MemoryObjectReceiveStream[int]) -> int:
        try:
            return source.receive_nowait()
        except anyio.WouldBlock:
            return await source.receive()

    async def feed() -> None:
        for value in range(items):
            await send(links[0][0], value)

    async def pass_on(source: MemoryObjectReceiveStream[int], sink: MemoryObjectSendStream[int]) -> None:
        for _ in range(items):
            await send(sink, await receive(source))

    async def drain() -> None:
        for _ in range(items):
            await receive(links[-1][1])

    stages = [pass_on(source[1], sink[0]) for source, sink in itertools.pairwise(links)]
    elapsed = await timed(feed(), *stages, drain())
    close_all(links)
    return elapsed


async def channels_drained(items: int) -> float:
    """Measure stages that take all items in one wake-up, with an `await` only for an empty or a full channel."""
    links: list[Channel[int]] = [Channel(BUFFER) for _ in range(STAGES + 1)]

    async def feed() -> None:
        for value in range(items):
            if not links[0].put_nowait(value):
                await links[0].put(value)

    async def pass_on(source: Channel[int], sink: Channel[int]) -> None:
        left = items
        while left:
            for value in source.get_many_nowait(BUFFER) or [await source.get()]:
                left -= 1
                if not sink.put_nowait(value):
                    await sink.put(value)

    async def drain() -> None:
        left = items
        while left:
            left -= len(links[-1].get_many_nowait(BUFFER) or [await links[-1].get()])

    return await timed(feed(), *itertools.starmap(pass_on, itertools.pairwise(links)), drain())


async def timed(*stages: Coroutine[Any, Any, None]) -> float:
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for stage in stages:
            tasks.create_task(stage)
    return time.perf_counter() - started


def close_all(links: list[tuple[MemoryObjectSendStream[int], MemoryObjectReceiveStream[int]]]) -> None:
    for send, receive in links:
        send.close()
        receive.close()


CONTENDERS: dict[str, Callable[[int], Awaitable[float]]] = {
    REFERENCE: queues,
    "anyio streams, send and receive": anyio_streams,
    "anyio streams, nowait first": anyio_nowait_first,
    "Channel, put and get": channels,
    "Channel, nowait first, drained": channels_drained,
}


async def compare(items: int, rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for contender in CONTENDERS.values():
        await contender(items // 10)
    for turn in range(rounds):
        order = list(CONTENDERS)
        for name in order if turn % 2 == 0 else reversed(order):
            samples[name].append(await CONTENDERS[name](items))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.channel", description=__doc__)
    parser.add_argument("--items", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    for loop in loops.NAMES:
        samples = loops.run(loop, compare(chosen.items, chosen.rounds))
        for name, seconds in samples.items():
            hop = interval([1e6 * value / chosen.items / STAGES for value in seconds])
            times = ratio(seconds, samples[REFERENCE])
            print(
                f"{loop:8} {name:34} {hop.median:6.2f} µs a hop   "
                f"{times.median:5.2f} of the queues ({times.low:.2f}-{times.high:.2f})"
            )


if __name__ == "__main__":
    main()
