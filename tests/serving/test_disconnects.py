"""Clients that leave in the middle of a stream, over real HTTP: Starlette never calls `aclose` for them."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.serving.servers import client, server

CLIENTS = 200
TOKENS = 20
ROUNDS = 3
IDLE_TASKS = 3  # of uvicorn: the server, the lifespan, and the request that asks
PATIENCE_REQUESTS = 2_000


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
    with server("--loop", loop) as (url, _):
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
    # Of the engine's own objects, since others may load a module late. The noise is some 250; one that stayed for each
    # request would make 600.
    assert after["objects"] < before["objects"] + 2 * CLIENTS
    assert after["resident_bytes"] < before["resident_bytes"] + 20_000 * ROUNDS * CLIENTS
