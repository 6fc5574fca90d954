"""A program that exposes itself and runs graphs for the page: all kinds of steps, and names that look like code.

    python -m tests.studio.alive SOCKET [kinds | moves | many | hostile | scopes | saved]

It reads lines: of "moves", each line is the name of the node that is slow from then on.
"""

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import penstock as ps
from penstock import data, engine, telemetry

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


@ps.node
async def spare(number: int) -> int:
    return number


@ps.node(failover=spare)
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


# --- saved: a training with snapshots, and a stream that knows its length ---


@ps.node
class Trainer:
    def __init__(self) -> None:
        self.steps = 0

    def state(self) -> int:
        return self.steps

    def restore(self, state: int) -> None:
        self.steps = state

    async def __call__(self, record: data.Record[int]) -> int:
        await asyncio.sleep(0.002)
        self.steps += 1
        return record.value


trainer = Trainer()
NUMBERS = range(1_000_000)


@ps.graph
async def train(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
    return ps.map_each(trainer, records >> data.read(NUMBERS))


async def run_saved() -> None:
    checkpoint = ps.Checkpoint(f"{sys.argv[1]}.snapshots", every_seconds=0.3)

    async def one_training() -> None:
        async with engine.stream(train(data.order(NUMBERS)), checkpoint=checkpoint) as losses:
            async for _ in losses:
                pass

    async def one_stream() -> None:
        async with engine.stream([moves(number) for number in range(100_000)]) as results:
            async for _ in results:
                pass

    await asyncio.gather(one_training(), one_stream())


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
    graph = {"kinds": kinds, "moves": moves, "many": many, "scopes": moves}[kind]

    async def calls() -> AsyncIterator[ps.Call[int]]:
        for number in itertools.count(20):
            if kind != "moves":
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
