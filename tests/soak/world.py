"""The graphs of a soak: nodes on the loop, in threads and in processes, a stateful node, batches, and streams."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Generator
from contextlib import ExitStack, contextmanager

import penstock as ps
from penstock.testing import faults


class Injected(Exception):
    """The error of an injected fault."""


# The places and waits of these nodes, and not the processor, limit the deployment to about 500 calls a second.
@ps.node(concurrency=8, retry=ps.Retry(attempts=2, backoff_seconds=0.005), timeout_seconds=1)
async def fetch(page: int) -> bytes:
    await asyncio.sleep(0.012 + 0.008 * (page % 3) / 2)
    return page.to_bytes(8, "big") * 512


@ps.node(runs_on="thread", concurrency=4)
def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@ps.node
def length(data: bytes) -> int:
    return len(data)


@ps.node(runs_on="process", concurrency=2)
def heavy_digest(page: int) -> str:
    return hashlib.pbkdf2_hmac("sha256", page.to_bytes(8, "big"), b"soak", 1000).hex()


class Lost(Injected):
    """The error of a store that must be opened again."""


@ps.node(concurrency=4, restart_on=(Lost,))
class Store:
    """A stateful node that keeps its state until it raises `Lost`; then its supervisor restarts it."""

    async def __aenter__(self) -> "Store":
        self.names: dict[str, int] = {}
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.names.clear()

    async def __call__(self, name: str, size: int) -> int:
        self.names[name] = size
        await asyncio.sleep(0.001)
        return self.names[name]


store = Store()


limit = ps.RateLimit(per_second=1000, burst=50)


@ps.node(batch=ps.Batch(max_size=8, max_wait_seconds=0.004))
async def scores(pages: list[bytes]) -> list[int | Exception]:
    await asyncio.sleep(0.004)
    return [LookupError("no score") if page[7] % 64 == 13 else len(page) for page in pages]


@ps.node(batch=ps.Batch(max_size=4, max_wait_seconds=0.004), runs_on="thread")
def ranks(values: list[int]) -> list[int]:
    return sorted(values)


@ps.node
def chapters(page: int) -> list[int]:
    return [page, page + 1, page + 2]


@ps.node
async def token(page: int) -> int:
    await asyncio.sleep(0.001)
    return page


@ps.node
async def tokens(data: bytes) -> AsyncIterator[int]:
    for number in range(24):
        if number % 6 == 0:
            await asyncio.sleep(0.002)
        yield number


@ps.graph
async def answer(page: int) -> int:
    data = await fetch(page)
    return await store(digest(data), length(data))


@ps.graph
async def heavy(page: int) -> str:
    return heavy_digest(page)


@ps.graph
async def rank(page: int) -> int:
    return await ranks(await scores(await fetch(await limit(page))))


@ps.graph
async def book(page: int) -> list[int]:
    await fetch(page)
    return await ps.map_each(token, chapters(page), concurrency=2)


@ps.graph
async def chat(page: int) -> AsyncIterator[int]:
    return ps.map_each(token, tokens(await fetch(page)), concurrency=4)


GRAPHS = (answer, heavy, rank, book, chat)


@contextmanager
def random_faults(rng: random.Random) -> Generator[list[faults.Injections]]:
    """Inject faults at every point, in some of a hundred passes; gives the injections."""
    error = faults.Raise(Injected("injected"))
    plans: list[tuple[faults.Point, faults.Fault, str | None, float]] = [
        ("node.call", error, "fetch", 0.02),
        ("node.call", faults.Delay(0.1), "fetch", 0.01),
        ("node.call", faults.Cancel(), "fetch", 0.005),
        ("node.call", error, "digest", 0.01),
        ("node.call", error, "tokens", 0.02),
        ("node.call", error, "token", 0.001),
        ("node.call", faults.Cancel(), "Store", 0.005),
        ("node.call", faults.Raise(Lost("lost")), "Store", 0.002),
        ("node.call", error, "scores", 0.01),
        ("node.call", faults.Delay(0.02), "RateLimit", 0.01),
        ("worker.process", faults.Kill(), None, 0.02),
        ("worker.process", error, None, 0.02),
    ]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                faults.inject(point, fault, node=node, probability=chance, seed=rng.randrange(1 << 30), optional=True)
            )
            for point, fault, node, chance in plans
        ]
