"""The example of a front over several processes, over real sockets: a killed worker costs no answer."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from examples import front as example
from examples.front import create_front, worker_process
from penstock import engine
from tests.serving.openai_server import served

WORKERS, CALLERS = 3, 30

# The clients and the front share this loop; the workers have their own.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


class Fronted:
    """Workers, the front before them, and a client of the front."""

    def __init__(self, client: httpx.AsyncClient, service: engine.Service[..., httpx.Response]) -> None:
        self.client = client
        self.service = service

    async def ask(self) -> int:
        """Ask, and return the id of the process that answered."""
        answer = await self.client.get("/count", params={"word": "water"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["letters"] == 5
        process: int = answer.json()["process"]
        return process

    async def asked_by_many(self, calls: int) -> Counter[int]:
        """Ask from many callers; return how often each process has answered."""
        left, answered = iter(range(calls)), Counter[int]()

        async def caller() -> None:
            for _ in left:
                answered[await self.ask()] += 1

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return answered

    async def in_flight(self, number: int) -> None:
        """Wait until exactly `number` requests are in flight."""
        while self.service.statistics().admission.in_flight != number:
            await asyncio.sleep(0.001)

    @property
    def retried(self) -> int:
        [actor] = self.service.statistics().actors
        return actor.retried


@asynccontextmanager
async def fronted(urls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fronted]:
    monkeypatch.setenv("WORKERS", " ".join(urls))
    # On a busy machine, a worker may take long to answer a health check.
    monkeypatch.setattr(example, "LOOK_TIMEOUT_SECONDS", 30)
    app = create_front()
    async with served(app) as address, httpx.AsyncClient(base_url=address, timeout=40) as client:
        yield Fronted(client, app.state.service)


async def test_of_three_workers_one_is_killed_under_load_and_every_request_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        urls, processes = zip(*(stack.enter_context(worker_process()) for _ in range(WORKERS)), strict=True)
        async with fronted(urls, monkeypatch) as front:
            # Equally loaded workers take turns, so each worker gets a third of the requests.
            assert sorted([await front.ask() for _ in range(2 * WORKERS)]) == sorted(
                2 * [process.pid for process in processes]
            )
            # While all workers are stopped, each gets a third of the requests; the killed worker loses its requests.
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            first = [asyncio.create_task(front.ask()) for _ in range(CALLERS)]
            await front.in_flight(CALLERS)
            killed, *others = processes
            for process in others:
                process.send_signal(signal.SIGCONT)
            load = asyncio.create_task(front.asked_by_many(300))
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            killed.kill()
            answered = await load + Counter(await asyncio.gather(*first))
            assert answered.total() == CALLERS + 300
            assert killed.pid not in answered
            assert front.retried >= CALLERS // WORKERS
            # A new process at the same address gets its share.
            url = httpx.URL(urls[0])
            _, restarted = stack.enter_context(worker_process(url.port or 0))
            while await front.ask() != restarted.pid:
                pass
            answered = await front.asked_by_many(30)
            assert set(answered) == {restarted.pid, *(process.pid for process in others)}
            # A worker that gets SIGTERM finishes its requests.
            load = asyncio.create_task(front.asked_by_many(100))
            await front.ask()
            others[0].terminate()
            assert (await load).total() == 100


class Behind:
    """A worker that notes its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes, list[tuple[bytes, bytes]], int]] = []
        self.is_full = False
        self.breaks = False
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])

    async def answer(self, request: Request) -> Response:
        target = request.scope["raw_path"] + b"?" + request.scope["query_string"]
        self.asked.append((request.method, target, request.headers.raw, len(await request.body())))
        if self.breaks:  # a wrong length, so that the connection is cut
            return Response(b"half", headers={"content-length": "8"})
        response = Response("answered", 503 if self.is_full else 200, {"x-mine": "1"})
        response.set_cookie("first", "1")
        response.set_cookie("second", "2")
        return response


@asynccontextmanager
async def behind(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[list[Behind], httpx.AsyncClient]]:
    """Give three workers, and a client of the front before them; the front makes no health checks."""
    monkeypatch.setattr(example.Worker, "watch", lambda worker: asyncio.Event().wait())
    workers = [Behind() for _ in range(WORKERS)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(worker.app)) for worker in workers]
        front = await stack.enter_async_context(fronted(tuple(urls), monkeypatch))
        yield workers, front.client


async def test_a_worker_that_refuses_gets_nothing_until_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async with behind(monkeypatch) as (workers, client):
        workers[0].is_full = True
        for _ in range(4 * WORKERS):
            assert (await client.get("/")).status_code == 200
        assert [len(worker.asked) for worker in workers] == [1, 6, 6]
        for worker in workers:
            worker.is_full = True
        refused = await client.get("/")
        assert (refused.status_code, refused.text) == (503, "answered")


async def test_what_may_have_been_done_is_asked_again_only_if_it_may_be_done_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with behind(monkeypatch) as (workers, client):
        for worker in workers:
            worker.breaks = True
        lost = await client.post("/", content=b"order")
        assert (lost.status_code, lost.text) == (502, "the worker was lost, and may have done it")
        assert sum(len(worker.asked) for worker in workers) == 1
        workers[1].breaks = False
        assert (await client.post("/", headers={"idempotency-key": "7"}, content=b"order")).text == "answered"
        assert (await client.get("/")).text == "answered"
        # A refused request was not executed, so it is sent to another worker.
        for worker in workers:
            worker.breaks = False
        workers[1].is_full = True
        assert (await client.post("/", content=b"order")).text == "answered"


async def test_a_request_goes_on_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async with behind(monkeypatch) as (workers, client):
        for target in (b"//evil.org/a", b"/a%2Fb%3Fc%23?d=e%26f+g", b"/..%2f?"):
            url = client.base_url.copy_with(raw_path=target)
            sent = {"authorization": "Bearer 1", "cookie": "a=b", "connection": "keep-alive, x-hop", "x-hop": "1"}
            answer = await client.post(url, headers=sent, content=b"abc")
            [(method, found, headers, length)] = [worker.asked.pop() for worker in workers if worker.asked]
            assert (method, found.rstrip(b"?"), length) == ("POST", target.rstrip(b"?"), 3)
            assert {(b"authorization", b"Bearer 1"), (b"cookie", b"a=b")} <= set(headers)
            names = Counter(name for name, _ in headers)
            assert not [name for name, times in names.items() if times > 1]
            assert b"x-hop" not in names
            assert answer.headers["x-mine"] == "1"
            assert len(answer.headers.get_list("set-cookie")) == 2
            assert [len(answer.headers.get_list(name)) for name in ("date", "server", "content-length")] == [1, 1, 1]


async def test_a_body_that_is_too_large_reaches_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "MAX_BODY_BYTES", 10)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"12345"

    async with behind(monkeypatch) as (workers, client):
        assert (await client.post("/", content=b"1234567890")).status_code == 200
        assert (await client.post("/", content=b"12345678901")).status_code == 413
        assert (await client.post("/", content=parts())).status_code == 413  # no header tells the length
        assert sum(len(worker.asked) for worker in workers) == 1
