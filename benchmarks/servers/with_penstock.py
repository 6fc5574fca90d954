"""The servers of `by_hand.py`, with Penstock."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import penstock as ps
from penstock import engine

from .by_hand import MAX_BATCH, SECONDS, TOKENS, Answer, Tuning, application, json_endpoint, nothing, small_model

PLACES = 256


def deployed(
    graph: ps.Graph[[Any], Any], tuned: Tuning, convert: Callable[[float], Any] = float, **options: Any
) -> Starlette:
    """Return an application that makes one call of a deployment for each request."""
    service: engine.Service[[Any], Any]

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        nonlocal service
        async with engine.deploy(graph, max_in_flight=PLACES, **options) as service:
            yield

    async def answer(x: float) -> float:
        return float(await service(convert(x)))

    return application(json_endpoint(answer), lifespan, tuned)


@ps.node(concurrency=PLACES)
async def double(x: float) -> float:
    await asyncio.sleep(SECONDS)
    return x * 2


@ps.graph
async def doubled(x: float) -> float:
    return await double(x)


@ps.node(batch=ps.Batch(MAX_BATCH))
async def double_all(xs: list[float]) -> list[float]:
    await asyncio.sleep(SECONDS)
    return [x * 2 for x in xs]


@ps.graph
async def doubled_in_batches(x: float) -> float:
    return await double_all(x)


@ps.node(batch=ps.Batch(MAX_BATCH), runs_on="thread")
def double_all_in_thread(xs: list[float]) -> list[float]:
    time.sleep(SECONDS)
    return [x * 2 for x in xs]


@ps.graph
async def doubled_in_thread(x: float) -> float:
    return await double_all_in_thread(x)


def waiting(tuned: Tuning) -> Starlette:
    return deployed(doubled, tuned)


def async_batches(tuned: Tuning) -> Starlette:
    return deployed(doubled_in_batches, tuned)


def thread_batches(tuned: Tuning) -> Starlette:
    return deployed(doubled_in_thread, tuned)


def device_batches(tuned: Tuning) -> Starlette:
    import numpy as np

    parameters, model = small_model()

    @ps.resource
    async def weights() -> AsyncIterator[Any]:
        yield parameters

    compute = ps.device_node(device="cpu", batch=ps.Batch(MAX_BATCH), sample_input=(np.float32(0),))(model)

    @ps.graph
    async def computed(x: Any) -> Any:
        return compute(await weights(), x)

    return deployed(computed, tuned, convert=np.float32, warmup=True)


def each_by_itself(tuned: Tuning) -> Starlette:
    """Return an application that makes one `engine.run` for each request."""
    answer: Answer = lambda x: engine.run(doubled(x))  # noqa: E731
    return application(json_endpoint(answer), nothing, tuned)


@ps.node
async def tokens(x: float) -> AsyncIterator[str]:
    for number in range(TOKENS):
        await asyncio.sleep(SECONDS)
        yield f"data: {number}\n\n"


@ps.graph
async def told(x: float) -> AsyncIterator[str]:
    return tokens(x)


def events(tuned: Tuning) -> Starlette:
    service: engine.Service[[float], AsyncIterator[str]]

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        nonlocal service
        async with engine.deploy(told, max_in_flight=PLACES) as service:
            yield

    async def endpoint(request: Request) -> Response:
        body = await request.json()
        stream = service.stream(told(body["input"]))
        await stream.wait_started()
        return StreamingResponse(stream, media_type="text/event-stream")

    return application(endpoint, lifespan, tuned)


APPLICATIONS: dict[str, Callable[[Tuning], Starlette]] = {
    "async": waiting,
    "async batch": async_batches,
    "thread batch": thread_batches,
    "device batch": device_batches,
    "run": each_by_itself,
    "events": events,
}
