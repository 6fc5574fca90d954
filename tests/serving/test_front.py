"""The example of a front over several processes, over real sockets: a worker that is killed costs no answer."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest

from examples import front as example
from examples.front import create_front, worker_process
from examples.rag_server import serving
from penstock import engine

WORKERS, CALLERS = 3, 30

# The clients' loop and that of the front; the workers have their own.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


class Fronted:
    """Workers, the front before them, and its client."""

    def __init__(self, client: httpx.AsyncClient, service: engine.Service[..., httpx.Response]) -> None:
        self.client = client
        self.service = service

    async def ask(self) -> int:
        """Ask, and return which process has answered."""
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
        """Wait until so many requests, and no more, are in flight."""
        while self.service.statistics().admission.in_flight != number:
            await asyncio.sleep(0.001)

    @property
    def retried(self) -> int:
        [actor] = self.service.statistics().actors
        return actor.retried


@asynccontextmanager
async def fronted(urls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fronted]:
    monkeypatch.setenv("WORKERS", " ".join(urls))
    # On a busy machine, a worker may take long to answer a look.
    monkeypatch.setattr(example, "LOOK_TIMEOUT_SECONDS", 30)
    app = create_front()
    async with (
        serving(app) as address,
        httpx.AsyncClient(base_url=address, timeout=40) as client,
    ):
        yield Fronted(client, app.state.service)


async def test_of_three_workers_one_is_killed_under_load_and_every_request_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        urls, processes = zip(*(stack.enter_context(worker_process()) for _ in range(WORKERS)), strict=True)
        async with fronted(urls, monkeypatch) as front:
            # Equals take turns, so that each worker gets a third.
            assert sorted([await front.ask() for _ in range(2 * WORKERS)]) == sorted(
                2 * [process.pid for process in processes]
            )
            # While all are stopped, each gets a third of the requests; those of the one that is killed are lost.
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
            # Another process takes its place, and gets its share.
            url = httpx.URL(urls[0])
            _, restarted = stack.enter_context(worker_process(url.port or 0))
            while await front.ask() != restarted.pid:
                pass
            answered = await front.asked_by_many(30)
            assert set(answered) == {restarted.pid, *(process.pid for process in others)}
            # One that is asked to end finishes what it has.
            load = asyncio.create_task(front.asked_by_many(100))
            await front.ask()
            others[0].terminate()
            assert (await load).total() == 100
