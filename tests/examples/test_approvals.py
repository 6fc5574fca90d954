"""The agent that asks a person: two servers on one database; tests kill the servers and the database."""

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.postgres import Server, needs_postgres, postgres_server

pytestmark = needs_postgres

PROGRAM = Path(__file__).parents[2] / "examples" / "approvals.py"
PATIENCE_SECONDS = 60


class Front:
    """One server process on its own port, which a test kills and starts again."""

    def __init__(self, dsn: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        self._command = [sys.executable, PROGRAM, dsn, "--port", str(self.port)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)

    async def ready(self) -> None:
        while True:
            assert self.process.poll() is None
            try:
                await self.http.get("/runs")
            except httpx.TransportError:
                await asyncio.sleep(0.05)  # another process starts
            else:
                return

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        self.start()
        await self.ready()

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, PATIENCE_SECONDS)


@asynccontextmanager
async def fronts(dsn: str) -> AsyncGenerator[tuple[Front, Front]]:
    both = Front(dsn), Front(dsn)
    try:
        for one in both:
            await one.ready()
        yield both
        assert [await one.stop() for one in both] == [-signal.SIGTERM] * 2  # as uvicorn ends after a clean stop
    finally:
        for one in both:
            await one.http.aclose()
            one.process.kill()
            one.process.wait()


async def events_of(response: httpx.Response) -> list[tuple[str, Any]]:
    """Returns the events of a response: their names and their JSON values."""
    found: list[tuple[str, Any]] = []
    name = "message"
    async for line in response.aiter_lines():
        field, _, text = line.partition(": ")
        if field == "event":
            name = text
        elif field == "data":
            found.append((name, json.loads(text)))
            name = "message"
    return found


async def ask(front: Front, key: str) -> list[tuple[str, Any]]:
    async with front.http.stream("POST", f"/runs/{key}", json={"text": "3 books"}) as response:
        response.raise_for_status()
        return await events_of(response)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


async def test_a_question_is_an_event_and_its_answer_comes_from_another_server(server: Server) -> None:
    dsn = server.new_database()
    async with fronts(dsn) as (one, other):
        *events, (last, question) = await ask(one, "order")
        assert [value["tool"] for _, value in events] == ["price", "pay"]
        assert (last, question["question"]) == ("question", {"tool": "pay", "arguments": {"amount": 120}})
        reply = {"token": question["token"], "answer": True}
        answered = await other.http.post("/runs/order/answer", json=reply)
        assert answered.json() == ["3 books", "3 books cost 120 euros", "paid 120 euros"]
        again = await one.http.post("/runs/order/answer", json=reply)
        assert again.json() == answered.json()
        assert (await ask(one, "order"))[-1] == ("end", answered.json())  # a repeated order pays nothing
        assert (await other.http.get("/runs/nobody")).status_code == 404
        [run] = (await other.http.get("/runs")).json()
        assert (run["key"], run["state"]) == ("order", "finished")
    assert server.execute("SELECT amount, times FROM payments", dsn.partition("@/")[2].partition("?")[0]) == [(120, 1)]


async def test_kills_of_servers_and_of_the_database_lose_nothing_and_pay_nothing_twice(
    server: Server, effort: int
) -> None:
    dsn = server.new_database()
    database = dsn.partition("@/")[2].partition("?")[0]
    keys = [f"order-{number}" for number in range(12)]
    draw = random.Random(7)

    async with fronts(dsn) as both:

        async def order(key: str) -> None:
            """Sends the order until its question comes, and answers until the order is paid, like a patient client."""
            while True:
                try:
                    [run] = [run for run in await listed(both) if run["key"] == key] or [None]
                    if run is None:
                        await ask(draw.choice(both), key)
                    elif run["state"] == "asking":
                        reply = {"token": run["token"], "answer": True}
                        await draw.choice(both).http.post(f"/runs/{key}/answer", json=reply)
                    elif run["state"] == "finished":
                        return
                except (httpx.HTTPError, json.JSONDecodeError):
                    pass
                await asyncio.sleep(0.05)  # other processes work

        async def kills() -> None:
            for number in range(5 if effort == 1 else 9):
                await asyncio.sleep(draw.random() / 2)  # a random moment for the kill
                await both[number % 2].kill()
                if number == 2:
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.restart)

        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(kills())
            for key in keys:
                tasks.create_task(order(key))
        runs = await listed(both)
        assert {run["key"]: run["state"] for run in runs} == dict.fromkeys(keys, "finished")
    assert server.execute("SELECT count(*), sum(amount) FROM payments", database) == [(12, 12 * 120)]


async def listed(both: tuple[Front, Front]) -> list[dict[str, Any]]:
    for one in both:
        try:
            runs: list[dict[str, Any]] = (await one.http.get("/runs")).raise_for_status().json()
        except httpx.HTTPError:
            continue
        return runs
    return []
