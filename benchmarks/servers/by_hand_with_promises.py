"""The servers by hand once more, with the promises of a call of a deployment.

- A caller is released at once when it leaves or gives up, even if the handler goes on. For an `async def`, this needs a
  task; for a stream, a task and a queue. A caller that waits for a batch needs nothing more.
- A call takes one of a number of places; the place is free again when the handler has ended.
- An item whose caller has left is not computed, and an error reaches every caller of its batch.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

from starlette.applications import Starlette

from .by_hand import (
    MAX_BATCH,
    Answer,
    Tuning,
    application,
    compiled_model,
    double,
    double_all,
    events_endpoint,
    in_thread,
    json_endpoint,
    nothing,
    tokens,
)

PLACES = 256
AHEAD = 16  # how many events may wait for their client

Item: TypeAlias = tuple[Any, "asyncio.Future[float]"]


def waiting(tuned: Tuning) -> Starlette:
    running: set[asyncio.Task[float]] = set()

    def ended(task: "asyncio.Task[float]") -> None:
        running.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have left

    async def answer(x: float) -> float:
        if len(running) == PLACES:
            raise RuntimeError("too many requests")
        task = asyncio.get_running_loop().create_task(double(x))
        running.add(task)
        task.add_done_callback(ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise

    return application(json_endpoint(answer), nothing, tuned)


def one_of_a_batch(put: Callable[[Item], None]) -> Answer:
    """Return a function that takes a place, and has an item computed in a batch."""
    places = asyncio.Semaphore(PLACES)

    async def answer(x: float) -> float:
        async with places:
            future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            put((x, future))
            return await future

    return answer


def settle(batch: list[Item], outputs: list[float] | Exception) -> None:
    for number, (_, future) in enumerate(batch):
        if future.done():  # its client has left
            continue
        if isinstance(outputs, Exception):
            future.set_exception(outputs)
        else:
            future.set_result(outputs[number])


def batches(model: Callable[[list[float]], Awaitable[list[float]]], tuned: Tuning) -> Starlette:
    waiting: asyncio.Queue[Item] = asyncio.Queue()

    async def work() -> None:
        while True:
            batch: list[Item] = []
            while len(batch) < MAX_BATCH and not (batch and waiting.empty()):
                item = await waiting.get()
                if not item[1].done():
                    batch.append(item)
            try:
                settle(batch, await model([x for x, _ in batch]))
            except Exception as error:  # noqa: BLE001 - it is for those who wait
                settle(batch, error)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        worker = asyncio.create_task(work())
        yield
        worker.cancel()

    return application(json_endpoint(one_of_a_batch(waiting.put_nowait)), lifespan, tuned)


def async_batches(tuned: Tuning) -> Starlette:
    return batches(double_all, tuned)


def thread_batches(tuned: Tuning) -> Starlette:
    return batches(in_thread, tuned)


def device_batches(tuned: Tuning) -> Starlette:
    waiting: queue.SimpleQueue[Item | None] = queue.SimpleQueue()

    def work(compute: Callable[[list[Any]], list[float]], loop: asyncio.AbstractEventLoop) -> None:
        while (item := waiting.get()) is not None:
            batch: list[Item] = []
            while item is not None:
                if not item[1].done():
                    batch.append(item)
                if len(batch) == MAX_BATCH or waiting.empty():
                    break
                item = waiting.get()
            if item is None:
                waiting.put(None)
            if batch:
                outputs: list[float] | Exception
                try:
                    outputs = compute([x for x, _ in batch])
                except Exception as error:  # noqa: BLE001 - it is for those who wait
                    outputs = error
                loop.call_soon_threadsafe(settle, batch, outputs)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        worker = threading.Thread(target=work, args=(compiled_model(), asyncio.get_running_loop()))
        worker.start()
        yield
        waiting.put(None)
        worker.join()

    return application(json_endpoint(one_of_a_batch(waiting.put)), lifespan, tuned)


def events(tuned: Tuning) -> Starlette:
    places = asyncio.Semaphore(PLACES)

    async def read() -> AsyncIterator[str]:
        told: asyncio.Queue[str | Exception | None] = asyncio.Queue(AHEAD)

        async def produce() -> None:
            outcome: Exception | None = None
            try:
                async with aclosing(tokens()) as given:
                    async for token in given:
                        await told.put(token)
            except Exception as error:  # noqa: BLE001 - it is for those who wait
                outcome = error
            await told.put(outcome)

        async with places:
            task = asyncio.create_task(produce())
            try:
                while isinstance(token := await told.get(), str):
                    yield token
                if token is not None:
                    raise token
            finally:
                task.cancel()
                await asyncio.wait([task])

    return application(events_endpoint(read), nothing, tuned)


APPLICATIONS: dict[str, Callable[[Tuning], Starlette]] = {
    "async": waiting,
    "async batch": async_batches,
    "thread batch": thread_batches,
    "device batch": device_batches,
    "run": waiting,
    "events": events,
}
