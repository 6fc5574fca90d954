"""A front over several processes: a request goes to the least busy worker, and to another worker if that one fails.

    python examples/front.py          start three workers, kill one of them under load, and count the answers
    WORKERS="http://10.0.0.1:8000 http://10.0.0.2:8000" uvicorn --app-dir examples --factory front:create_front

A worker is any server that answers `/health` with 200 while it is well, and requests with 503 while it is overloaded.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import penstock as ps
from penstock import asgi, engine

PLACES = 64  # max_in_flight of each worker
LOOK_SECONDS = 1.0  # the pause between two health checks of a worker
LOOK_TIMEOUT_SECONDS = 2.0  # a worker that does not answer a health check in this time counts as down
ANSWER_TIMEOUT_SECONDS = 10.0  # the limit for a request: more than the slowest answer takes
MAX_BODY_BYTES = 1 << 20  # a body is kept until the answer has come, since it may be sent again

# Methods that may be repeated (RFC 9110, 9.2.2). A POST may be repeated if it has a key by which the worker knows it.
IDEMPOTENT = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE")
# Headers that are not passed on: those of one connection (RFC 9110, 7.6.1), and those that httpx and the server write.
OWN = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade host date server content-length accept-encoding "
    b"content-encoding".split()
)

Headers = tuple[tuple[bytes, bytes], ...]

# --- the front


@dataclass(frozen=True)
class Asked:
    """A request on its way through the front."""

    tenant: str
    method: str
    target: bytes  # path and query, as they came: "%2F" is not "/"
    headers: Headers = ()
    body: bytes = b""

    @property
    def may_be_done_twice(self) -> bool:
        """Whether another worker may get the request, although a lost worker may have done it."""
        return self.method in IDEMPOTENT or any(name == b"idempotency-key" for name, _ in self.headers)


class Lost(Exception):
    """The worker is gone, and may have done a request that must not be done twice."""


class Worker:
    """A process that answers requests."""

    def __init__(self, url: str) -> None:
        self.in_flight = 0
        self.is_up = True
        self.url = httpx.URL(url)
        # uvicorn closes a connection after 5 idle seconds. A request in that moment would fail, and the worker would
        # seem to be down. So close idle connections before.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        self.client = httpx.AsyncClient(timeout=ANSWER_TIMEOUT_SECONDS, limits=limits, trust_env=False)

    async def watch(self) -> None:
        """Check every second whether the worker is up."""
        while True:
            try:
                look = await self.client.get(self.url.join("/health"), timeout=LOOK_TIMEOUT_SECONDS)
                self.is_up = look.is_success
            except httpx.RequestError:
                self.is_up = False
            await asyncio.sleep(LOOK_SECONDS)

    async def answer(self, asked: Asked) -> httpx.Response:
        """Have the worker answer; raise if the answer is 503, because then the worker has done nothing."""
        url = self.url.copy_with(raw_path=asked.target)
        answer = await self.client.request(asked.method, url, content=asked.body, headers=asked.headers)
        if answer.status_code == 503:
            answer.raise_for_status()
        return answer


class Workers:
    """All workers; a chosen worker goes to the end of the list, so that equally busy workers take turns."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self.all = [Worker(url) for url in urls]

    @contextlib.contextmanager
    def chosen(self) -> Generator[Worker]:
        """Choose the worker with the fewest requests. If all seem to be down, choose among all: one may be up again."""
        worker = min([worker for worker in self.all if worker.is_up] or self.all, key=lambda worker: worker.in_flight)
        self.all.remove(worker)
        self.all.append(worker)
        worker.in_flight += 1
        try:
            yield worker
        except httpx.HTTPError:  # otherwise a worker that refuses at once would have the fewest requests, and get all
            worker.is_up = False  # until the next health check
            raise
        finally:
            worker.in_flight -= 1


@ps.resource
async def workers(urls: tuple[str, ...]) -> AsyncIterator[Workers]:
    """The workers that all requests share, and a task that watches each of them."""
    opened = Workers(urls)
    async with contextlib.AsyncExitStack() as clients, asyncio.TaskGroup() as tasks:
        for worker in opened.all:
            await clients.enter_async_context(worker.client)
        watching = [tasks.create_task(worker.watch()) for worker in opened.all]
        yield opened
        for task in watching:
            task.cancel()


# The pauses are 0.05, 0.1, 0.2, 0.4, 0.8, 1 and 1 seconds: enough for a worker to be started again.
again = ps.Retry(
    attempts=8, backoff_seconds=0.05, max_backoff_seconds=1, retry_on=(httpx.TransportError, httpx.HTTPStatusError)
)


@ps.node(retry=again)
async def forward(workers: Workers, asked: Asked) -> httpx.Response:
    """Have one worker answer; a further attempt finds another worker, since this worker has failed or is full."""
    try:
        with workers.chosen() as worker:
            return await worker.answer(asked)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise  # the request was not sent
    except httpx.TransportError as error:
        if asked.may_be_done_twice:
            raise
        raise Lost from error


def deployed(owner: engine.Engine, urls: tuple[str, ...]) -> engine.Service[[Asked], httpx.Response]:
    """Deploy the front, with limits that hold for all workers together."""

    @ps.graph
    async def front(asked: Asked) -> httpx.Response:
        return await forward(await workers(urls), asked)

    places = PLACES * len(urls)
    return owner.deploy(
        front, key=lambda asked: asked.tenant, max_in_flight=places, max_queue=10 * places, timeout_seconds=30
    )


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers to pass on, without the headers that are only for this connection."""
    headers = [(name.lower(), value) for name, value in headers]
    named = b",".join(value for name, value in headers if name == b"connection")
    own = OWN | {name.strip().lower() for name in named.split(b",")}
    return tuple((name, value) for name, value in headers if name not in own)


async def asked_by(request: Request) -> Asked:
    """Read a request, body included."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413)
    query: bytes = request.scope["query_string"]
    target: bytes = request.scope["raw_path"] + (b"?" + query if query else b"")
    headers = passed_on(request.headers.raw)
    return Asked(request.headers.get("x-tenant", ""), request.method, target, headers, body)


def create_front() -> Starlette:
    """Make the application that stands before the workers."""
    owner = engine.Engine()
    service = deployed(owner, tuple(os.environ["WORKERS"].split()))

    async def endpoint(request: Request) -> Response:
        try:
            answer = await service(await asked_by(request))
        except TimeoutError:
            return Response("no worker has answered in time", 504)
        except httpx.HTTPStatusError as error:
            answer = error.response  # all workers are full; pass on the answer of one of them
        except httpx.TransportError:
            return Response("no worker is there", 502)
        except Lost:
            return Response("the worker was lost, and may have done it", 502)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads this response
        response = Response(answer.content, answer.status_code)
        response.raw_headers += passed_on(answer.headers.raw)
        return response

    app = Starlette(
        routes=[Route("/{path:path}", endpoint, methods=[*IDEMPOTENT, "POST", "PATCH"])],
        lifespan=asgi.lifespan(owner, service, tuned=True),
        exception_handlers={ps.Overloaded: lambda request, error: asgi.overloaded(error)},
    )
    app.state.service = service
    return app


# --- a worker to try it with


@ps.node
async def count(word: str) -> int:
    """Stand for a model."""
    await asyncio.sleep(0.01)
    return len(word)


@ps.graph
async def counted(word: str) -> int:
    """Answer with the number of letters."""
    return await count(word)


def create_worker() -> Starlette:
    """Make the application of a worker."""
    owner = engine.Engine()
    service = owner.deploy(counted, max_in_flight=PLACES, max_queue=PLACES)

    async def endpoint(request: Request) -> Response:
        return JSONResponse({"letters": await service(request.query_params["word"]), "process": os.getpid()})

    async def health(request: Request) -> Response:
        return Response(status_code=200 if service.state == "ready" else 503)

    return Starlette(
        routes=[Route("/count", endpoint), Route("/health", health)],
        lifespan=asgi.lifespan(owner, service),
        exception_handlers={ps.Overloaded: lambda request, error: asgi.overloaded(error)},
    )


@contextlib.contextmanager
def worker_process(port: int = 0) -> Generator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start a worker and give its address; connections wait until it is ready."""
    with socket.create_server(("127.0.0.1", port), backlog=512) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent), "--log-level=warning"]
        # uvicorn does not set TCP_NODELAY on a socket that it was given: answers would wait 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        command += ["--factory", "front:create_worker", "--fd", str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait()


async def main() -> None:
    """Ask 300 questions, 30 at a time, and kill a worker when 100 were answered."""
    with contextlib.ExitStack() as stack:
        urls, processes = zip(*(stack.enter_context(worker_process()) for _ in range(3)), strict=True)
        async with engine.Engine() as owner, deployed(owner, urls) as service:
            words = iter(["water", "gate", "turbine"] * 100)
            letters: list[int] = []

            async def caller() -> None:
                for word in words:
                    answer = await service(Asked("me", "GET", f"/count?word={word}".encode()))
                    letters.append(answer.raise_for_status().json()["letters"])
                    if len(letters) == 100:
                        processes[0].kill()

            await asyncio.gather(*(caller() for _ in range(30)))
            print(f"{len(letters)} of 300 questions answered, with {sum(letters)} letters")


if __name__ == "__main__":
    asyncio.run(main())
