"""A program that exposes itself and runs a stream until the program is ended; its node `slow` limits."""

import asyncio
import itertools
import sys

import penstock as ps
from penstock import engine, telemetry
from tests.kit import paused


@ps.node(concurrency=2)
async def slow(number: int) -> int:
    await asyncio.sleep(0.004)
    if number % 2:
        raise ValueError(number)
    return number


chew = paused >> slow


async def main() -> None:
    async with engine.stream(chew(number) for number in itertools.count()) as results:
        async for _ in results.outcomes():
            pass


if __name__ == "__main__":
    with telemetry.expose(sys.argv[1]):
        print("exposed", flush=True)
        asyncio.run(main())
