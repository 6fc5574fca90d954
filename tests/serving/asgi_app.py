"""Sends streams by `penstock.asgi`, and reports the resources that it holds; run by uvicorn and hypercorn."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

import penstock as ps
from penstock import asgi, engine
from tests.serving.streaming_app import answer, generators, holdings


@dataclass(frozen=True)
class Progress:
    done: int


@ps.node(effectful="unordered")
async def work(count: int) -> int:
    """Emit progress, without end for -1."""
    generators["opened"] += 1
    try:
        done = 0
        while done != count:
            await asyncio.sleep(0.001)
            await ps.emit(Progress(done))
            done += 1
        return done
    finally:
        generators["closed"] += 1


@ps.node(effectful="unordered", runs_on="thread")
def work_in_a_thread(count: int) -> int:
    """Emit progress from a thread, which only `emit` can end."""
    done = 0
    while done != count:
        ps.emit(Progress(done))
        done += 1
    return done


@ps.graph
async def told(count: int) -> int:
    """Return one value."""
    return await work(count)


@ps.graph
async def told_by_a_thread(count: int) -> int:
    """Return one value, computed in a thread."""
    return work_in_a_thread(count)


@ps.node
async def some_blocks(count: int) -> AsyncIterator[str]:
    """Give `count` blocks, or blocks without end for -1."""
    generators["opened"] += 1
    try:
        given = 0
        while given != count:
            await asyncio.sleep(0)
            yield "x" * 2**16
            given += 1
    finally:
        generators["closed"] += 1


@ps.graph
async def blocks(count: int) -> AsyncIterator[str]:
    """Give more than the buffers between server and client hold."""
    return some_blocks(count)


own = engine.Engine()
service = own.deploy(told, told_by_a_thread, answer, blocks, max_in_flight=400, max_queue=0)
app = FastAPI(lifespan=asgi.lifespan(own, service))


@app.exception_handler(ps.Overloaded)
async def come_back_later(request: Request, error: ps.Overloaded) -> Response:
    """Refuse a client."""
    return asgi.overloaded(error)


@app.get("/stream/{name}")
async def stream(name: str, count: int = -1, stall_timeout_seconds: float = 30.0) -> Response:
    """Stream the results of one of the graphs, as values or events."""
    streams: dict[str, engine.Stream[Any]] = {
        "values": service.stream(answer(count)),
        "blocks": service.stream(blocks(count)),
        "events": service.stream(told(count), events=Progress),
        "thread": service.stream(told_by_a_thread(count), events=Progress),
        "both": service.stream(answer(count), events=Progress),
    }
    return asgi.event_stream(streams[name], stall_timeout_seconds=stall_timeout_seconds)


@app.get("/lines/{name}")
async def lines(name: str, count: int = -1, stall_timeout_seconds: float = 30.0) -> Response:
    """Stream the same results as lines of JSON."""
    streams: dict[str, engine.Stream[Any]] = {
        "values": service.stream(answer(count)),
        "events": service.stream(told(count), events=Progress),
    }
    return asgi.ndjson(streams[name], stall_timeout_seconds=stall_timeout_seconds)


@app.get("/answer")
async def answered(request: Request, count: int) -> Response:
    """Return the same result from a plain endpoint, whose client receives nothing before the end."""
    return await asgi.answer(request, service(count))


@app.post("/disable-collector")
async def disable_collector() -> None:
    """Switch the collector off, so that only reference counts free memory."""
    gc.disable()


@app.get("/in-flight")
async def in_flight() -> int:
    """Return how many calls hold a place."""
    return service.statistics().admission.in_flight


@app.get("/state")
async def state() -> dict[str, Any]:
    """Return the resources that this process holds; tasks are counted without those of the servers."""
    files = [str(getattr(task.get_coro(), "cr_code").co_filename) for task in asyncio.all_tasks()]  # noqa: B009 - not in its type
    return {**holdings(service), "tasks": sum("uvicorn" not in file and "hypercorn" not in file for file in files)}
