"""Servers with several workers, forked or spawned: threads, processes and devices work in each worker."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
APPLICATION = "tests.serving.worker_app:app"
WORKERS = 2
PATIENCE_SECONDS = 45

GUNICORN = ["gunicorn", "--preload", "--worker-class=asgi", "--no-control-socket", "--bind=unix:{socket}"]
SERVERS = {
    "gunicorn": GUNICORN,
    "hypercorn": ["hypercorn", "--bind=unix:{socket}"],
    "granian": ["granian", "--interface=asgi", "--uds={socket}"],
    "uvicorn": ["uvicorn", "--uds={socket}"],
}

# The clients' loop; the servers have their own.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


@asynccontextmanager
async def serving(arguments: list[str], folder: Path, **variables: str) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the application; give a client that opens a connection for each request, so that it meets each worker."""
    server, *options = arguments
    if importlib.util.find_spec(server) is None:
        pytest.skip(f"{server} is not installed")
    socket, said = folder / "socket", folder / "said"
    command = [sys.executable, "-m", server, *(option.format(socket=socket) for option in options)]
    command += [f"--workers={WORKERS}", APPLICATION]
    environment = {**os.environ, **variables}
    with said.open("w") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else is on this loop
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    with process:
        try:
            transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_keepalive_connections=0))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://server", timeout=PATIENCE_SECONDS
            ) as client:
                await listening(client, process)
                yield client
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 0
        except BaseException:
            sys.stdout.write(said.read_text())
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in said.read_text(), said.read_text()


async def listening(client: httpx.AsyncClient, process: "subprocess.Popen[bytes]") -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while process.poll() is None:
            try:
                await client.get("/ready")
            except httpx.TransportError:  # the server does not listen yet
                await asyncio.sleep(0.05)
            else:
                return


async def work(client: httpx.AsyncClient, x: int) -> tuple[int, int, int]:
    found: dict[str, Any] = (await client.get("/work", params={"x": x})).raise_for_status().json()
    return found["value"], found["server"], found["parent_of_worker"]


@pytest.mark.timeout(150)
# Hypercorn, uvicorn and granian all spawn their workers.
@pytest.mark.parametrize(
    "server", [pytest.param(s, marks=[pytest.mark.long] * (s in {"hypercorn", "granian"})) for s in SERVERS]
)
async def test_threads_processes_and_devices_work_in_every_worker(server: str, tmp_path: Path) -> None:
    async with serving(SERVERS[server], tmp_path) as client:
        met: set[int] = set()
        for x in range(200):
            if len(met) == WORKERS:
                break
            value, process, parent_of_worker = await work(client, x)
            assert (value, parent_of_worker) == (2 * (x + 1), process)
            met.add(process)
        assert len(met) == WORKERS
        answer = await client.get("/compute", params={"x": 3})
        assert answer.json() == {"value": "6.0"}


@pytest.mark.timeout(150)
async def test_after_a_preload_that_has_started_jax_a_device_node_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    # JAX aborts such a forked worker with SIGABRT when it exits, so no exit status is asserted.
    # The worker may not even exit: gunicorn would wait for it for half a minute by default.
    async with serving([*GUNICORN, "--graceful-timeout=5"], tmp_path, ARRAY_AT_IMPORT="1") as client:
        assert (await work(client, 1))[0] == 4
        answer = await client.get("/compute", params={"x": 3})
        assert "gunicorn without --preload" in answer.json()["error"]
