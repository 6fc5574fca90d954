"""The servers by hand once more, with what a call of a deployment promises: a task of its own.

The client is released at once when it leaves or gives up, whatever the handler does then; and the place is free only
when the handler has ended. `asyncio` gives that with a task for each call, and for each stream a task and a queue.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .by_hand import Tuning, application, double, json_endpoint, nothing, tokens

PLACES = 256
AHEAD = 16  # how many events may wait for their client


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


def events(tuned: Tuning) -> Starlette:
    async def read() -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue(AHEAD)

        async def produce() -> None:
            try:
                async for token in tokens():
                    await queue.put(token)
            finally:
                await queue.put(None)

        task = asyncio.create_task(produce())
        try:
            while (token := await queue.get()) is not None:
                yield token
            await task
        finally:
            task.cancel()

    async def endpoint(request: Request) -> Response:
        await request.json()
        return StreamingResponse(read(), media_type="text/event-stream")

    return application(endpoint, nothing, tuned)


APPLICATIONS: dict[str, Callable[[Tuning], Starlette]] = {"async": waiting, "run": waiting, "events": events}
