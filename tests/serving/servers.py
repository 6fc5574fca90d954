"""The application of these tests in a process of its own, and its clients."""

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
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
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", process
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
