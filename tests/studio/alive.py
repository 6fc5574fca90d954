"""A program that exposes itself and runs graphs for the page: all kinds of steps, and names that look like code.

    python -m tests.studio.alive SOCKET [kinds | moves | many | hostile | scopes | saved | chew]

It reads lines: of "moves", each line is the name of the node that is slow from then on.
"""

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

from opentelemetry import trace

import penstock as ps
from penstock import data, engine, telemetry
from tests.kit import paused, same

# --- kinds: every box that a drawing can have ---


@ps.node
async def is_odd(number: int) -> bool:
    return number % 2 == 1


@ps.node
async def halve(number: int) -> int:
    await asyncio.sleep(0.001)
    return number // 2


@ps.node
async def less(number: int) -> int:
    return number - 1


@ps.node(failover=same)
async def risky(number: int) -> int:
    if number % 3 == 0:
        raise ConnectionError(f"<b>secret {number}</b>")
    return number


@ps.node
def left(number: int) -> int:
    return number + 1


@ps.node
def right(number: int) -> int:
    return number + 2


@ps.node
async def count_up(number: int) -> AsyncIterator[int]:
    for one in range(number % 4 + 1):
        yield one
        await asyncio.sleep(0.001)


@ps.node
async def total(numbers: AsyncIterator[int]) -> int:
    return sum([number async for number in numbers])


@ps.node
async def most(numbers: AsyncIterator[int]) -> int:
    return max([number async for number in numbers])


@ps.node
async def parts(number: int) -> list[int]:
    return [number, number + 1, number + 2]


@ps.node
async def merge(numbers: list[int], sum_of: int, most_of: int, chained: int, safe: int) -> int:
    return sum(numbers) + sum_of + most_of + chained + safe


@ps.node
async def least(numbers: list[int]) -> int:
    return min(numbers)


@ps.node
async def is_large(number: int) -> bool:
    return number > 30


async def one_part(number: int) -> int:
    return await ps.cond(await is_odd(number), less, halve, number)


async def shrink(number: int) -> int:
    return await least(await ps.map_each(one_part, await parts(number), concurrency=2))


@ps.graph
async def kinds(number: int) -> int:
    smaller = await ps.while_loop(is_large, shrink, number, max_iterations=9)
    first, second = count_up(smaller) >> data.split(2)
    chained = right(left(left(smaller)))
    return await merge([smaller], await total(first), await most(second), chained, await risky(smaller))


# --- moves: the limiting node changes ---

slow = {"decode"}


@ps.node(concurrency=2)
async def decode(number: int) -> int:
    await asyncio.sleep(0.02 if "decode" in slow else 0.001)
    return number


@ps.node(concurrency=2)
async def embed(number: int) -> int:
    await asyncio.sleep(0.02 if "embed" in slow else 0.001)
    return number


@ps.graph
async def moves(number: int) -> int:
    return await embed(await decode(number))


def listen() -> None:
    for line in sys.stdin:
        slow.clear()
        slow.add(line.strip())


# --- chew: the node `slow` limits, and half of its items fail ---


@ps.node(name="slow", concurrency=2)
async def slowly(number: int) -> int:
    await asyncio.sleep(0.004)
    if number % 2:
        raise ValueError(number)
    return number


# --- saved: a training with snapshots ---


@ps.node(stateless=True)
async def train(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
    async for record in records:
        await asyncio.sleep(0.002)
        yield record.index


async def run_saved() -> None:
    checkpoint = ps.Checkpoint(f"{sys.argv[1]}.snapshots", every_seconds=0.3)
    training = ps.graph(train)
    async with engine.stream(training(data.order(range(1_000_000))), checkpoint=checkpoint) as losses:
        async for _ in losses:
            pass


# --- many: 300 steps in a graph ---


@ps.graph
async def many(number: int) -> int:
    for _ in range(30):
        rows = [await less(number) for _ in range(8)]
        number = await merge(rows, 0, 0, 0, 0)
        number = await halve(number)
    return number


# --- hostile: names, messages and keys that look like code ---

EVIL = "<img src=x onerror=alert(1)>"


@ps.node(name=f"{EVIL}\"'&</script><script>alert(2)</script>", concurrency=2)
async def evil(number: int) -> int:
    await asyncio.sleep(0.01)
    raise ValueError(f"{EVIL} {number}")


async def _hostile(number: int) -> int:
    return await evil(number)


_hostile.__name__ = f"graph {EVIL}"
hostile = ps.graph(_hostile)


def tenant(number: int) -> str:
    return f"{EVIL} of a tenant"


async def serve_hostile() -> None:
    from opentelemetry.sdk.trace import TracerProvider  # which the other programs do not need

    trace.set_tracer_provider(TracerProvider())
    async with engine.deploy(hostile, key=tenant) as service:

        async def caller() -> None:
            while True:
                with suppress(ValueError):
                    await service(7)

        await asyncio.gather(*[caller() for _ in range(4)])


async def run(kind: str) -> None:
    if kind == "hostile":
        await serve_hostile()
    if kind == "saved":
        await run_saved()
    graph = {"kinds": kinds, "moves": moves, "many": many, "scopes": moves, "chew": paused >> slowly}[kind]

    async def calls() -> AsyncIterator[ps.Call[int]]:
        for number in itertools.count(20):
            if kind not in ("moves", "chew"):
                await asyncio.sleep(0.2)
            yield graph(number)

    async def one_stream() -> None:
        async with engine.stream(calls()) as results:
            async for _ in results.outcomes():
                pass

    await asyncio.gather(*[one_stream() for _ in range(20 if kind == "scopes" else 1)])


if __name__ == "__main__":
    threading.Thread(target=listen, daemon=True).start()
    with telemetry.expose(sys.argv[1]):
        print("exposed", flush=True)
        asyncio.run(run((*sys.argv, "kinds")[2]))
