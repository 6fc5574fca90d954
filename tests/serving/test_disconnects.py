"""Clients that leave in the middle of a stream, over real HTTP: Starlette never calls `aclose` for them."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
CLIENTS = 200
TOKENS = 20
ROUNDS = 3
IDLE_TASKS = 3  # of uvicorn: the server, the lifespan, and the request that asks
PATIENCE_REQUESTS = 2_000


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Serve the application in a process of its own, on a socket that is ours: no port is guessed."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        command = [sys.executable, "-m", "uvicorn", "tests.serving.streaming_app:app", "--fd", str(listener.fileno())]
        process = subprocess.Popen(
            [*command, "--no-access-log", *arguments],
            cwd=ROOT, pass_fds=[listener.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        said = ""
        while "startup complete" not in said:
            line = process.stdout.readline()
            assert line, said  # it has ended
            said += line
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            said += process.communicate(timeout=20)[0]
    # No traceback, and no "Failed to detach context".
    assert all(line.startswith("INFO:") for line in said.splitlines()), said


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
        yield client


async def read_all(client: httpx.AsyncClient) -> str:
    async with client.stream("GET", "/tokens", params={"count": TOKENS}) as response:
        response.raise_for_status()
        return (await response.aread()).decode()


async def leave_in_the_middle(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/tokens", params={"count": -1}) as response:
        response.raise_for_status()
        async for _ in response.aiter_raw():
            return


async def round_of_clients(client: httpx.AsyncClient) -> None:
    expected = "".join(f"{number}\n" for number in range(TOKENS))
    async with asyncio.TaskGroup() as tasks:
        readers = [
            tasks.create_task(leave_in_the_middle(client) if number % 3 == 0 else read_all(client))
            for number in range(CLIENTS)
        ]
    assert [reader.result() for reader in readers] == [
        None if number % 3 == 0 else expected for number in range(CLIENTS)
    ]


async def settled(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the server's state, asked for until nothing is open or no hope is left."""
    state: dict[str, Any] = {}
    for _ in range(PATIENCE_REQUESTS):
        state = (await client.get("/state")).json()
        if not (state["in_flight"] or state["queued"] or state["open_generators"]) and state["tasks"] <= IDLE_TASKS:
            break
    return state


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_two_hundred_clients_a_third_of_which_leave(loop: str) -> None:
    with server("--loop", loop) as url:
        async with client(url) as http:
            await round_of_clients(http)  # loads what is loaded once
            before = await settled(http)
            for _ in range(ROUNDS):
                await round_of_clients(http)
            after = await settled(http)
    assert {name: after[name] for name in ("in_flight", "queued", "open_generators")} == dict.fromkeys(
        ("in_flight", "queued", "open_generators"), 0
    )
    assert after["tasks"] <= IDLE_TASKS
    assert after["descriptors"] <= before["descriptors"]
    # Less than two objects and 20 KB a request; the noise is 800 objects. A frame or a stream that stayed is more.
    assert after["objects"] < before["objects"] + 2 * ROUNDS * CLIENTS
    assert after["resident_bytes"] < before["resident_bytes"] + 20_000 * ROUNDS * CLIENTS
