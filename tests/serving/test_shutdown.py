"""SIGTERM under uvicorn: requests that have begun are finished, and the deployment drains."""

import asyncio

import httpx
import pytest

from tests.serving.servers import client, server

CLIENTS = 20
TOKENS = 200


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
@pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.long), "uvloop"])
async def test_requests_that_have_begun_are_finished_after_sigterm(loop: str) -> None:
    begun = asyncio.Semaphore(0)

    async def read(http: httpx.AsyncClient) -> str:
        text = ""
        async with http.stream("GET", "/tokens", params={"count": TOKENS}) as response:
            async for part in response.aiter_text():
                if not text:
                    begun.release()
                text += part
        return text

    with server("--loop", loop, "--timeout-graceful-shutdown", "20") as (url, process):
        async with client(url) as http, asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(read(http)) for _ in range(CLIENTS)]
            for _ in range(CLIENTS):
                await begun.acquire()
            process.terminate()
    expected = "".join(f"{number}\n" for number in range(TOKENS))
    assert [reader.result() for reader in readers] == [expected] * CLIENTS
