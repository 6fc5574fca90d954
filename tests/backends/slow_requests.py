"""Makes slow requests, one of each kind, in an application with tracing; `test_jaeger.py` asks Jaeger about them.

    python -m tests.backends.slow_requests questions
    python -m tests.backends.slow_requests chats

The standard `OTEL_*` variables say where the spans go. Prints, as JSON, what the traces have to say.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jax

import penstock as ps
from penstock import consume, engine, serving, telemetry
from tests.kit import Gate, begun
from tests.serving.openai_server import Messages, asking, chat

CHATS = 100
HELD_SECONDS = 0.2


@ps.node
def quick(x: int) -> int:
    return x


gate = Gate()


@ps.node
async def slow(x: int) -> int:
    await gate.wait(x)
    return x


@ps.node(runs_on="thread", concurrency=2)
def in_thread(x: int) -> str:
    gate.block(x)
    return threading.current_thread().name


@ps.node(runs_on="process", concurrency=2)
def in_process(x: int) -> int:
    sum(range(3_000_000))
    return os.getpid()


@ps.node(batch=ps.Batch(2, max_wait_seconds=HELD_SECONDS))
async def in_batch(xs: list[int]) -> list[int]:
    return xs


@ps.device_node(device="cpu")
def on_device(x: jax.Array) -> jax.Array:
    return x @ x


@ps.node(retry=ps.Retry(attempts=3, backoff_seconds=0.01))
async def retried(x: int) -> int:
    if ps.current().attempt < 3:
        raise ConnectionError(f"attempt {ps.current().attempt}")
    return x


async def held(*calls: Any) -> list[Any]:
    """Runs calls that begin one after the other, the first of which is held at the gate for a while."""
    gate.close()
    gate.came.clear()
    first = await begun(calls[0])
    await gate.has()
    others = await begun(*calls[1:])
    await asyncio.sleep(HELD_SECONDS)
    gate.open()
    return [await call for call in (*first, *others)]


class Orders(consume.Source):
    """A partition with one message."""

    system = "orders"

    def __init__(self) -> None:
        self.messages = [consume.Message("orders/0/19", 19, "ada", position=19)]
        self.settled = asyncio.Event()

    @asynccontextmanager
    async def partitions(self, held: consume.Partitions, /) -> AsyncGenerator[None]:
        await held.given(["orders/0"])
        yield

    async def take(self, partition: str, n: int, /) -> list[consume.Message]:
        if not self.messages:
            await asyncio.Event().wait()
        return [self.messages.pop()]

    async def settle(self, partition: str, messages: Any, /) -> bool:
        self.settled.set()
        return True


async def buried(letter: consume.DeadLetter) -> None:
    pass


@ps.node
async def poisoned(x: int) -> int:
    raise LookupError(x)


class Teller(ps.StreamActor[Messages, str]):
    """Tells three words in three steps, each for all that listen."""

    async def loop(self, inbox: ps.Inbox[ps.StreamWork[Messages, str]], /) -> None:
        left: dict[ps.StreamWork[Messages, str], int] = {}
        while True:
            for work in [*inbox.take_nowait(8)] or ([] if left else [await inbox.get()]):
                left[work] = 3
            with self.step_span(left, own_span=True):
                await asyncio.sleep(0)
                for work in left:
                    work.put_nowait("word ")
                    left[work] -= 1
            for work in [work for work, words in left.items() if not words or work.settled]:
                with contextlib.suppress(ps.WorkSettledError):
                    work.finish()
                del left[work]


@ps.node
async def spoken(messages: Messages) -> AsyncIterator[str]:
    yield "a "
    await gate.wait(0)
    yield "word"


async def questions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    await held(engine.run((quick >> slow)(1)))
    async with engine.deploy(ps.graph(slow), max_in_flight=1) as service:
        await held(*(service.run(ps.graph(slow)(x)) for x in range(2)))
    async with engine.Engine(max_workers=1) as own:
        found["threads"] = await held(*(own.run(ps.graph(in_thread)(x)) for x in range(2)))
    async with engine.Engine(max_processes=1) as own:
        found["pids"] = await asyncio.gather(*(own.run(ps.graph(in_process)(x)) for x in range(2)))
    await engine.run(ps.graph(in_batch)(1))
    await engine.run(ps.graph(on_device)(jax.numpy.ones((200, 200))))
    await engine.run(ps.graph(retried)(1))
    source = Orders()
    async with (
        engine.deploy(ps.graph(poisoned)) as service,
        consume.Consumer(service, source, lambda one: ps.graph(poisoned)(one.value), dead_letters=buried,
                         settle_seconds=0.01),
    ):  # fmt: skip
        await source.settled.wait()
    down = serving.upstream("http://127.0.0.1:9/v1", model="spoken")
    async with asking({"spoken": ps.graph(spoken)}) as server:
        up = serving.upstream(f"{str(server.base_url).rstrip('/')}/v1", model="spoken")
        found["port"] = server.base_url.port
        async with asking({"gateway": down.chat.with_policy(failover=up.chat)}) as http:
            [answer] = await held(chat(http, "gateway", stream=True))
            assert answer.status_code == 200
    return found


tells = ps.node(Teller)()


@ps.graph
async def teller(messages: Messages) -> AsyncIterator[str]:
    return tells(messages)


async def chats() -> None:
    async with asking({"teller": teller}) as http:
        for _ in range(CHATS // 10):
            answers = await asyncio.gather(*(chat(http, "teller", stream=True) for _ in range(10)))
            assert {answer.status_code for answer in answers} == {200}


if __name__ == "__main__":
    telemetry.setup(service_name="slow")
    print(json.dumps(asyncio.run({"questions": questions, "chats": chats}[sys.argv[1]]())))
