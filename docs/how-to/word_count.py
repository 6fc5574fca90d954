"""Count words on all cores."""

import asyncio

import penstock as ps
from penstock import engine

TEXTS = ["a gate regulates the water", "the water drives a turbine", "a turbine makes power"]


@ps.node(runs_on="process", timeout_seconds=60)
def count(text: str) -> int:
    return len(set(text.split()))


@ps.graph
async def vocabulary(text: str) -> int:
    return count(text)


async def main() -> None:
    async with engine.stream(vocabulary(text) for text in TEXTS) as counts:
        print([found async for found in counts])


if __name__ == "__main__":
    asyncio.run(main())
