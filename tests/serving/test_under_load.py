"""A server under more load than it accepts: all clients leave at the same moment, or the server has to end."""

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.packages import needs_package
from tests.serving.servers import IDLE_TASKS, ROOT, client, connect, server, settled

CLIENTS = 300  # the deployment has 64 places, and 200 may wait
STREAMS = 48  # without end: they hold places beside the load, so that other calls wait or are refused
LEAVERS = 100  # clients who leave in the middle of a stream
REQUESTS = 500  # completed requests to wait for, while the load continues
PATHS = ["/double?number=4&timeout_seconds=5", "/double?number=4&timeout_seconds=0.004", "/tokens?count=30"]

# The clients' loop; the servers have their own.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


@asynccontextmanager
async def wrk(url: str) -> AsyncIterator[None]:
    """Run clients in a process of their own, which is killed at the end."""
    command = ["wrk", "-t1", f"-c{CLIENTS}", "-d600s", "-s", "tests/serving/load.lua", url, "--", *PATHS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:  # noqa: ASYNC220 - returns at once
        try:
            yield
        finally:
            process.kill()


@asynccontextmanager
async def tasks(url: str) -> AsyncIterator[None]:
    """Run clients on this loop, which are cancelled at the end."""
    async with client(url) as http:

        async def ask(number: int) -> None:
            with contextlib.suppress(httpx.TransportError):  # the server has ended
                while True:
                    await http.get(PATHS[number % len(PATHS)])
                    number += 1

        clients = [asyncio.create_task(ask(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


LOADS = {"wrk": wrk, "asyncio": tasks}
WRK = shutil.which("wrk")
needs_wrk = needs_package("wrk", WRK)
# Without wrk, the slower clients in Python stand in.
by_load = pytest.mark.parametrize(
    "load",
    [
        pytest.param("wrk", marks=needs_wrk),
        pytest.param("asyncio", marks=[pytest.mark.long] * (WRK is not None)),
    ],
)
# On a busy machine, clients in Python are too slow to have so many requests open that some are refused.
ENDS = {"wrk": ("completed", "expired", "refused"), "asyncio": ("completed", "expired")}


async def after_many_requests(http: httpx.AsyncClient, *ways: str) -> dict[str, Any]:
    """Return the server's state under load, when calls have ended in each of these ways."""
    while True:
        state: dict[str, Any] = (await http.get("/state")).json()
        ended = state["ended"]
        if sum(ended.values()) >= REQUESTS and all(ended[way] for way in ways):
            return state


@by_load
async def test_when_all_clients_are_gone_nothing_is_in_flight(load: str) -> None:
    with server("--loop", "uvloop") as (url, _):
        async with client(url) as http:
            readers = [await connect(url, "/tokens?count=-1") for _ in range(STREAMS)]
            async with LOADS[load](url):
                during = await after_many_requests(http, *ENDS[load])
            for reader in readers:
                reader.close()
            after = await settled(http)
            assert (await http.get(PATHS[0])).json() == 8
    assert during["in_flight"] >= STREAMS
    assert (after["in_flight"], after["queued"], after["open_generators"]) == (0, 0, 0)
    assert after["tasks"] <= IDLE_TASKS
    assert after["ended"]["cancelled"] >= STREAMS


@by_load
async def test_sigterm_ends_a_server_under_load(load: str) -> None:
    with server("--loop", "uvloop", "--timeout-graceful-shutdown", "10") as (url, process):
        async with client(url) as http, LOADS[load](url):
            await after_many_requests(http, "completed", "expired")
            process.terminate()
            await asyncio.to_thread(process.wait, 20)


async def leave_a_stream(url: str) -> bool:
    """Leave a stream in the middle; return False if the stream was refused."""
    try:
        writer = await connect(url, "/tokens?count=-1")
    except AssertionError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


@needs_wrk
async def test_clients_who_leave_under_load_free_their_places() -> None:
    with server("--loop", "uvloop") as (url, _):
        async with client(url) as http:
            async with wrk(url):
                await after_many_requests(http, "completed")
                left = await asyncio.gather(*(leave_a_stream(url) for _ in range(LEAVERS)))
                during: dict[str, Any] = (await http.get("/state")).json()
                # The load continues here: lost places would be missing.
                await after_many_requests(http, "completed", "cancelled")
            after = await settled(http)
    assert during["in_flight"] <= 64
    assert after["ended"]["completed"] > during["ended"]["completed"]
    assert after["ended"]["cancelled"] >= sum(left) > 0
    assert (after["in_flight"], after["queued"], after["open_generators"]) == (0, 0, 0)


@needs_wrk
async def test_a_drain_under_load_ends_what_was_accepted_and_refuses_the_rest() -> None:
    with server("--loop", "uvloop") as (url, _):
        async with client(url) as http, wrk(url):
            await after_many_requests(http, "completed")
            drained: dict[str, Any] = (await http.post("/drain")).json()  # the load continues
            refused = await http.get(PATHS[0])
    assert (drained["in_flight"], drained["queued"], drained["open_generators"]) == (0, 0, 0)
    assert drained["ended"]["completed"] >= 1
    assert refused.status_code == 503
