"""The servers as a careful person writes them: plain asyncio, no penstock."""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SECONDS = 0.005
MAX_BATCH = 64
TOKENS = 50
WIDTH = 64  # the width of the small JAX model
STEPS = 64

Tuning = Callable[[], AbstractContextManager[None]]
Endpoint = Callable[[Request], Awaitable[Response]]
Answer = Callable[[Any], Awaitable[Any]]


def application(
    endpoint: Endpoint, lifespan: Callable[[], AbstractAsyncContextManager[None]], tuned: Tuning
) -> Starlette:
    """Return an application with one endpoint; `tuned` is entered when the application is ready."""

    @asynccontextmanager
    async def whole(app: Starlette) -> AsyncIterator[None]:
        async with lifespan():
            with tuned():
                yield

    return Starlette(routes=[Route("/predict", endpoint, methods=["POST"])], lifespan=whole)


def json_endpoint(answer: Answer) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        body = await request.json()
        return JSONResponse({"output": await answer(body["input"])})

    return endpoint


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


async def double(x: float) -> float:
    await asyncio.sleep(SECONDS)
    return x * 2


async def double_all(xs: list[float]) -> list[float]:
    await asyncio.sleep(SECONDS)
    return [x * 2 for x in xs]


def double_all_in_thread(xs: list[float]) -> list[float]:
    time.sleep(SECONDS)
    return [x * 2 for x in xs]


def waiting(tuned: Tuning) -> Starlette:
    return application(json_endpoint(double), nothing, tuned)


def batches(model: Callable[[list[float]], Awaitable[list[float]]], tuned: Tuning) -> Starlette:
    """Return an application in which one worker takes all waiting items as a batch."""
    waiting: asyncio.Queue[tuple[float, asyncio.Future[float]]] = asyncio.Queue()

    async def work() -> None:
        while True:
            batch = [await waiting.get()]
            while len(batch) < MAX_BATCH and not waiting.empty():
                batch.append(waiting.get_nowait())
            outputs = await model([x for x, _ in batch])
            for (_, future), output in zip(batch, outputs, strict=True):
                if not future.done():  # its client may have left
                    future.set_result(output)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        worker = asyncio.create_task(work())
        yield
        worker.cancel()

    async def answer(x: float) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        waiting.put_nowait((x, future))
        return await future

    return application(json_endpoint(answer), lifespan, tuned)


def async_batches(tuned: Tuning) -> Starlette:
    return batches(double_all, tuned)


async def in_thread(xs: list[float]) -> list[float]:
    return await asyncio.get_running_loop().run_in_executor(None, double_all_in_thread, xs)


def thread_batches(tuned: Tuning) -> Starlette:
    return batches(in_thread, tuned)


def small_model() -> tuple[Any, Callable[[Any, Any], Any]]:
    """Return parameters, and a function of these and one item: many steps with little arithmetic each."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    parameters = jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / WIDTH, jnp.float32)

    def model(parameters: jax.Array, x: jax.Array) -> jax.Array:
        state = jnp.full((WIDTH,), x)
        return jax.lax.fori_loop(0, STEPS, lambda _, state: jnp.tanh(state @ parameters + x), state)[0]

    return parameters, model


def compiled_model() -> Callable[[list[Any]], list[float]]:
    """Return the small model for up to `MAX_BATCH` items, padded to a power of two; it is compiled for all sizes."""
    import jax
    import numpy as np

    parameters, model = small_model()
    compiled = jax.jit(jax.vmap(model, in_axes=(None, 0)))

    def compute(xs: list[Any]) -> list[float]:
        rows = np.zeros(1 << (len(xs) - 1).bit_length(), np.float32)
        rows[: len(xs)] = xs
        outputs: list[float] = np.asarray(compiled(parameters, rows)).tolist()
        return outputs

    for size in range(MAX_BATCH.bit_length()):
        compute([np.float32(0)] * (1 << size))
    return compute


def device_batches(tuned: Tuning) -> Starlette:
    """Return an application in which a thread takes all waiting items as a batch."""
    import numpy as np

    waiting: queue.SimpleQueue[tuple[Any, asyncio.Future[float]] | None] = queue.SimpleQueue()

    def settle(batch: list[tuple[Any, asyncio.Future[float]]], outputs: list[float]) -> None:
        for (_, future), output in zip(batch, outputs, strict=False):
            if not future.done():
                future.set_result(output)

    def work(compute: Callable[[list[Any]], list[float]], loop: asyncio.AbstractEventLoop) -> None:
        while (first := waiting.get()) is not None:
            batch = [first]
            while len(batch) < MAX_BATCH:
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    waiting.put(None)
                    break
                batch.append(item)
            loop.call_soon_threadsafe(settle, batch, compute([x for x, _ in batch]))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        worker = threading.Thread(target=work, args=(compiled_model(), asyncio.get_running_loop()))
        worker.start()
        yield
        waiting.put(None)
        worker.join()

    async def answer(x: float) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        waiting.put((np.float32(x), future))
        return await future

    return application(json_endpoint(answer), lifespan, tuned)


async def tokens() -> AsyncIterator[str]:
    for number in range(TOKENS):
        await asyncio.sleep(SECONDS)
        yield f"data: {number}\n\n"


def events_endpoint(stream: Callable[[], AsyncIterator[str]]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        await request.json()
        return StreamingResponse(stream(), media_type="text/event-stream")

    return endpoint


def events(tuned: Tuning) -> Starlette:
    return application(events_endpoint(tokens), nothing, tuned)


APPLICATIONS: dict[str, Callable[[Tuning], Starlette]] = {
    "async": waiting,
    "async batch": async_batches,
    "thread batch": thread_batches,
    "device batch": device_batches,
    "run": waiting,
    "events": events,
}
