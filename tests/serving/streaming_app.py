"""An ASGI application that streams from a deployment, and reports the resources that it holds; run by uvicorn."""

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

import penstock as ps
from penstock import engine
from tests.kit import Gauge

generators = Gauge()


@ps.node
async def tokens(count: int) -> AsyncIterator[str]:
    """Give `count` tokens, or tokens without end for -1."""
    with generators:
        number = 0
        while number != count:
            await asyncio.sleep(0.001)
            yield f"{number}\n"
            number += 1


@ps.node
async def shout(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """A second generator, so that closing has to reach the first."""
    async for line in lines:
        yield line.upper()


answer = tokens >> shout


@ps.node
async def some_blocks(count: int) -> AsyncIterator[str]:
    """Give `count` blocks, or blocks without end for -1."""
    with generators:
        given = 0
        while given != count:
            await asyncio.sleep(0)
            yield "x" * 2**16
            given += 1


blocks = ps.graph(some_blocks)  # gives more than the buffers between server and client hold


@ps.node
async def wait_a_little(number: int) -> int:
    await asyncio.sleep(0.002)
    return number


@ps.node(batch=ps.Batch(16), runs_on="thread")
def double_all(numbers: list[int]) -> list[int]:
    time.sleep(0.002)
    return [2 * number for number in numbers]


doubled = wait_a_little >> double_all
service: engine.Service[[int], AsyncIterator[str]]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """The deployment lives as long as the application."""
    global service
    async with engine.deploy(answer, blocks, doubled, max_in_flight=64, max_queue=200) as service:
        yield


app = FastAPI(lifespan=lifespan)


def descriptors() -> int:
    """Return how many file descriptors are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@app.get("/tokens")
async def endpoint(count: int) -> StreamingResponse:
    """Stream tokens."""
    try:
        stream = service.stream(answer(count), timeout_seconds=60)
        await stream.wait_started()
    except (ps.Overloaded, ps.EngineClosedError) as error:
        raise HTTPException(503) from error
    return StreamingResponse(stream)


@app.get("/double")
async def double(number: int, timeout_seconds: float) -> int:
    """Answer one call."""
    try:
        return await service.run(doubled(number), timeout_seconds=timeout_seconds)
    except (ps.Overloaded, ps.EngineClosedError) as error:
        raise HTTPException(503) from error
    except TimeoutError as error:
        raise HTTPException(504) from error


async def around(stream: engine.Stream[str]) -> AsyncIterator[str]:
    """Wrap the stream in a generator, as for server-sent events."""
    async for token in stream:
        yield f"data: {token}"


async def guarded(stream: engine.Stream[str]) -> AsyncIterator[str]:
    """Wrap the stream in a generator that catches its errors."""
    try:
        async for token in stream:
            yield token
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        raise
    except Exception as error:  # noqa: BLE001 - as a last event
        yield repr(error)


async def with_heartbeats(stream: engine.Stream[str]) -> AsyncIterator[str]:
    """Wrap the stream in a generator that sends heartbeats; it cancels its reads again and again."""
    while True:
        try:
            async with asyncio.timeout(0.0005):
                token = await anext(stream)
        except TimeoutError:
            token = "beat\n"
        yield token


async def entered(stream: engine.Stream[str]) -> AsyncIterator[str]:
    """Wrap the stream in a generator that also waits between two values; a client may leave there, too."""
    async with stream:
        async for token in stream:
            await asyncio.sleep(0.02)
            yield token


BODIES: dict[str, Callable[[engine.Stream[str]], AsyncIterator[str]]] = {
    "itself": lambda stream: stream,
    "around": around,
    "guarded": guarded,
    "with heartbeats": with_heartbeats,
    "entered": entered,
}


@app.get("/body/{name}")
async def body(name: str) -> StreamingResponse:
    """Stream tokens without end, through one of the generators above."""
    stream = service.stream(answer(-1), timeout_seconds=60)
    await stream.wait_started()
    return StreamingResponse(BODIES[name](stream))


@app.get("/flood")
async def flood(timeout_seconds: float) -> StreamingResponse:
    """For a limited time, stream more than a client takes that does not read."""
    stream = service.stream(blocks(-1), timeout_seconds=timeout_seconds)
    await stream.wait_started()
    return StreamingResponse(guarded(stream))


@app.post("/drain")
async def drain() -> dict[str, Any]:
    """Accept no further calls; when the accepted calls have ended, return the resources that are held."""
    await service.drain()
    return holdings(service)


def add_reports(app: FastAPI, deployed: Callable[[], engine.Service[..., Any]]) -> None:
    """Add endpoints that report what this process and its deployment hold."""

    @app.post("/disable-collector")
    async def disable_collector() -> None:
        """Switch the collector off, so that only reference counts free memory."""
        gc.disable()

    @app.get("/in-flight")
    async def in_flight() -> int:
        """Return how many calls hold a place."""
        return deployed().statistics().admission.in_flight

    @app.get("/state")
    async def state() -> dict[str, Any]:
        """Return the resources that this process holds."""
        return holdings(deployed())


add_reports(app, lambda: service)


def holdings(service: engine.Service[..., Any]) -> dict[str, Any]:
    """Return the resources that this process and a deployment hold; tasks are counted without those of the servers."""
    gc.collect()
    files = [str(getattr(task.get_coro(), "cr_code").co_filename) for task in asyncio.all_tasks()]  # noqa: B009 - not in its type
    statistics = service.statistics()
    admission = statistics.admission
    return {
        "ended": {
            "completed": statistics.completed,
            "expired": statistics.expired,
            "cancelled": statistics.cancelled,
            "refused": admission.refused,
        },
        "in_flight": admission.in_flight,
        "queued": admission.queued,
        "open_generators": generators.now,
        "tasks": sum("uvicorn" not in file and "hypercorn" not in file for file in files),
        "descriptors": descriptors(),
        "objects": sum(str(type(thing).__module__).partition(".")[0] == "penstock" for thing in gc.get_objects()),
    }
