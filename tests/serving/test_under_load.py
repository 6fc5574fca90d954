"""A server under more load than it accepts: all clients leave at the same moment, or the server has to end."""

import asyncio
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
REQUESTS = 500  # completed requests to wait for, while the load continues
PATHS = ["/double?number=4&timeout_seconds=5", "/double?number=4&timeout_seconds=0.004", "/tokens?count=30"]

# The clients' loop; the servers have their own.
pytestmark = [needs_package("wrk", shutil.which("wrk")), pytest.mark.asyncio(loop_factories=["asyncio"])]


@asynccontextmanager
async def wrk(url: str) -> AsyncIterator[None]:
    """Run clients in a process of their own, which is killed at the end."""
    command = ["wrk", "-t1", f"-c{CLIENTS}", "-d600s", "-s", "tests/serving/load.lua", url, "--", *PATHS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:  # noqa: ASYNC220 - returns at once
        try:
            yield
        finally:
            process.kill()


async def after_many_requests(http: httpx.AsyncClient, *ways: str) -> dict[str, Any]:
    """Return the server's state under load, when calls have ended in each of these ways."""
    while True:
        state: dict[str, Any] = (await http.get("/state")).json()
        ended = state["ended"]
        if sum(ended.values()) >= REQUESTS and all(ended[way] for way in ways):
            return state


async def test_sigterm_ends_a_server_under_load() -> None:
    with server("--loop", "uvloop", "--timeout-graceful-shutdown", "10") as (url, process):
        async with client(url) as http, wrk(url):
            await after_many_requests(http, "completed", "expired")
            process.terminate()
            await asyncio.to_thread(process.wait, 20)


async def test_clients_who_leave_under_load_or_all_at_once_free_their_places() -> None:
    with server("--loop", "uvloop") as (url, _):
        async with client(url) as http:
            for path in PATHS:
                await http.get(path)  # the first requests import modules
            before = await settled(http)
            readers = [await connect(url, "/tokens?count=-1") for _ in range(STREAMS)]
            async with wrk(url):
                during = await after_many_requests(http, "completed", "expired", "refused")
                for reader in readers:
                    reader.close()
                # The load continues here: lost places would be missing.
                again = await after_many_requests(http, "cancelled")
                while again["ended"]["completed"] < during["ended"]["completed"] + 50:
                    again = await after_many_requests(http)
            after = await settled(http)
            assert (await http.get(PATHS[0])).json() == 8
    assert STREAMS <= during["in_flight"] <= 64
    assert again["ended"]["cancelled"] >= STREAMS
    assert (after["in_flight"], after["queued"], after["open_generators"]) == (0, 0, 0)
    assert after["tasks"] <= IDLE_TASKS
    assert after["descriptors"] <= before["descriptors"]
    # Only objects of the engine are counted, because other packages may import a module late. The count varies by
    # some 250; an object that stayed for each request would add 500 or more.
    assert after["objects"] < before["objects"] + 400


async def test_a_drain_under_load_ends_what_was_accepted_and_refuses_the_rest() -> None:
    with server("--loop", "uvloop") as (url, _):
        async with client(url) as http, wrk(url):
            await after_many_requests(http, "completed")
            drained: dict[str, Any] = (await http.post("/drain")).json()  # the load continues
            refused = await http.get(PATHS[0])
    assert (drained["in_flight"], drained["queued"], drained["open_generators"]) == (0, 0, 0)
    assert drained["ended"]["completed"] >= 1
    assert refused.status_code == 503
