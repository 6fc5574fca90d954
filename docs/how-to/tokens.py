"""Count tokens in worker processes, each with a tokenizer of its own."""

import asyncio

import penstock as ps
from penstock import engine


@ps.node(runs_on="process")
class Tokenizer:
    def __init__(self, separator: str) -> None:
        self.separator = separator

    def __enter__(self) -> None:
        self.vocabulary = {"valves": 1, "and": 2, "gates": 3}  # as from a large file

    def __exit__(self, *exc_info: object) -> None:
        self.vocabulary.clear()

    def __call__(self, text: str) -> int:
        return len([word for word in text.split(self.separator) if word in self.vocabulary])


tokenizer = Tokenizer(" ")


@ps.graph
async def count_tokens(text: str) -> int:
    return tokenizer(text)


async def main() -> None:
    async with engine.deploy(count_tokens) as service:
        print(await service.map([count_tokens("valves and gates"), count_tokens("gates and")]))


if __name__ == "__main__":
    asyncio.run(main())
