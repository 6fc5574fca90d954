"""Answers streamed token by token: a queue for each stream, a task that fills it, and a client that reads it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from .chain import BUFFER

# Opens the stream of one answer.
Open = Callable[[int], AsyncIterator[int]]

_END = -1


async def stepwise(tokens: int) -> AsyncIterator[int]:
    """Yield tokens one after the other; each gives the loop one turn, as a decoding step does."""
    for token in range(tokens):
        await asyncio.sleep(0)
        yield token


async def ready(tokens: int) -> AsyncIterator[int]:
    """Yield tokens that are all ready at once."""
    for token in range(tokens):
        yield token


def queued(source: Open) -> Open:
    """Return the usual stream by hand: a task puts tokens into a bounded queue, and the client takes them out."""

    async def stream(tokens: int) -> AsyncIterator[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(BUFFER)

        async def fill() -> None:
            async for token in source(tokens):
                await queue.put(token)
            await queue.put(_END)

        filling = asyncio.create_task(fill())
        while (token := await queue.get()) != _END:
            yield token
        await filling

    return stream


async def read_at_once(opened: Open, streams: int, tokens: int) -> float:
    """Run `streams` clients, each of which reads an answer of `tokens` tokens to its end; return seconds."""
    received = 0

    async def client() -> None:
        nonlocal received
        expected = 0
        async for token in opened(tokens):
            assert token == expected
            expected += 1
        received += expected

    started = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(streams):
            clients.create_task(client())
    elapsed = time.perf_counter() - started
    assert received == streams * tokens
    return elapsed
