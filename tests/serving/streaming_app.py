"""An ASGI application that streams what a deployment gives, and says what it holds; run by uvicorn."""

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

import penstock as ps
from penstock import engine

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

generators = {"opened": 0, "closed": 0}


@ps.node
async def tokens(count: int) -> AsyncIterator[str]:
    """Give `count` tokens, or tokens without end for -1."""
    generators["opened"] += 1
    try:
        number = 0
        while number != count:
            await asyncio.sleep(0.001)
            yield f"{number}\n"
            number += 1
    finally:
        generators["closed"] += 1


@ps.node
async def shout(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """A second generator, so that closing has to travel."""
    async for line in lines:
        yield line.upper()


@ps.graph
async def answer(count: int) -> AsyncIterator[str]:
    """Two generators, one after the other."""
    return shout(tokens(count))


service: engine.Service[[int], AsyncIterator[str]]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """The deployment lives as long as the application."""
    global service
    async with engine.deploy(answer, max_in_flight=64, max_queue=200) as service:
        yield


app = FastAPI(lifespan=lifespan)


def descriptors() -> int:
    """How many file descriptors are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    """How much memory is resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@app.get("/tokens")
async def endpoint(count: int) -> StreamingResponse:
    """Stream tokens."""
    stream = service.stream(answer(count), timeout_seconds=60)
    try:
        await stream.started()
    except ps.Overloaded as error:
        raise HTTPException(503) from error
    return StreamingResponse(stream)


@app.get("/state")
async def state() -> dict[str, Any]:
    """What this process holds."""
    gc.collect()
    admission = service.statistics().admission
    return {
        "in_flight": admission.in_flight,
        "queued": admission.queued,
        "open_generators": generators["opened"] - generators["closed"],
        "tasks": len(asyncio.all_tasks()),
        "descriptors": descriptors(),
        "objects": sum(str(type(thing).__module__).startswith("penstock.") for thing in gc.get_objects()),
        "resident_bytes": resident_bytes(),
    }
