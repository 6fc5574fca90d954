"""Sends streams by `penstock.asgi`, and reports the resources that it holds; run by uvicorn and hypercorn."""

import asyncio
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

import penstock as ps
from penstock import asgi, engine
from tests.serving.streaming_app import add_reports, answer, blocks, generators


@dataclass(frozen=True)
class Progress:
    done: int


@ps.node(effectful="unordered")
async def work(count: int) -> int:
    """Emit progress, without end for -1."""
    with generators:
        done = 0
        while done != count:
            await asyncio.sleep(0.001)
            await ps.emit(Progress(done))
            done += 1
        return done


@ps.node(effectful="unordered", runs_on="thread")
def work_in_a_thread(count: int) -> int:
    """Emit progress from a thread, which only `emit` can end."""
    done = 0
    while done != count:
        ps.emit(Progress(done))
        done += 1
    return done


told, told_by_a_thread = ps.graph(work), ps.graph(work_in_a_thread)
own = engine.Engine()
service = own.deploy(told, told_by_a_thread, answer, blocks, max_in_flight=400, max_queue=0)
app = FastAPI(lifespan=asgi.lifespan(own, service))
add_reports(app, lambda: service)


@app.exception_handler(ps.Overloaded)
async def come_back_later(request: Request, error: ps.Overloaded) -> Response:
    """Refuse a client."""
    return asgi.overloaded(error)


@app.get("/{form}/{name}")
async def stream(form: str, name: str, count: int = -1, stall_timeout_seconds: float = 30.0) -> Response:
    """Stream the results of one of the graphs, as values or events, in server-sent events or in lines of JSON."""
    streams: dict[str, engine.Stream[Any]] = {
        "values": service.stream(answer(count)),
        "blocks": service.stream(blocks(count)),
        "events": service.stream(told(count), events=Progress),
        "thread": service.stream(told_by_a_thread(count), events=Progress),
        "both": service.stream(answer(count), events=Progress),
    }
    forms: dict[str, Any] = {"stream": asgi.event_stream, "lines": asgi.ndjson}
    response: Response = forms[form](streams[name], stall_timeout_seconds=stall_timeout_seconds)
    return response


@app.get("/answer")
async def answered(request: Request, count: int) -> Response:
    """Return the same result from a plain endpoint, whose client receives nothing before the end."""
    return await asgi.answer(request, service(count))
