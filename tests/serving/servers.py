"""Runs an application of these tests in a process of its own; and clients of it."""

import asyncio
import re
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

ROOT = Path(__file__).parents[2]
IDLE_TASKS = 1  # the loop of the batched node
PATIENCE_REQUESTS = 2_000
PATIENCE_COLLECTIONS = 300  # each request for the state collects garbage


@contextmanager
def server(
    *arguments: str, application: str = "tests.serving.streaming_app", name: str = "uvicorn", expected: str = "INFO"
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the application in a process of its own. The socket is opened here, so no port is guessed.

    Args:
        *arguments: further arguments of the server.
        application: the module of the application.
        name: the server.
        expected: a regular expression of log lines that are allowed.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        number = listener.fileno()
        options = ["--fd", f"{number}", "--no-access-log"] if name == "uvicorn" else ["--bind", f"fd://{number}"]
        process = subprocess.Popen(
            [sys.executable, "-m", name, f"{application}:app", *options, *arguments],
            cwd=ROOT, pass_fds=[number], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        said = ""
        while "startup complete" not in said and "Running on" not in said:
            line = process.stdout.readline()
            assert line, said  # an empty line means that the server has ended
            said += line
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", process
        finally:
            process.terminate()
            with process.stdout as output:  # `communicate` would not see the lines that `readline` has buffered
                said += output.read()
            process.wait(timeout=60)
    # No traceback, and no "Failed to detach context". On a busy machine, a node may seem to block the loop.
    assert all(re.search(f"{expected}|node.blocks_loop", line) for line in said.splitlines()), said


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
        yield client


async def settled(client: httpx.AsyncClient, idle_tasks: int = IDLE_TASKS) -> dict[str, Any]:
    """Ask for the server's state, until nothing is open or the tries are used up; return the last state."""
    state: dict[str, Any] = {}
    for _ in range(PATIENCE_COLLECTIONS):
        state = (await client.get("/state")).json()
        if not (state["in_flight"] or state["queued"] or state["open_generators"]) and state["tasks"] <= idle_tasks:
            break
    return state


async def in_flight_after_a_while(client: httpx.AsyncClient) -> int:
    """Ask how many calls hold a place, until there are none or the tries are used up; return the last number."""
    in_flight = -1
    for _ in range(PATIENCE_REQUESTS):
        in_flight = (await client.get("/in-flight")).json()
        if not in_flight:
            break
    return in_flight


async def connect(url: str, path: str, requests: int = 1, *, is_stream: bool = True) -> asyncio.StreamWriter:
    """Send `requests` requests at once; of a stream, read the first bytes."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        writer.write(f"GET {quote(path, '/?=')} HTTP/1.1\r\nHost: test\r\n\r\n".encode() * requests)
        if is_stream:
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.read(1)
    except BaseException:
        writer.close()
        await writer.wait_closed()
        raise
    return writer


WAYS_TO_LEAVE = ("close", "reset", "half-close")


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "half-close":
        writer.write_eof()
    elif how == "reset":
        lingering = struct.pack("ii", 1, 0)  # linger for 0 seconds: the connection is reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingering)
        writer.transport.abort()
    else:
        writer.close()


async def places_kept(client: httpx.AsyncClient, path: str, how: str, **options: Any) -> int:
    """Have three clients leave, with these options of `connect`; return how many places they keep."""
    before = (await client.get("/in-flight")).json()
    writers = [await connect(str(client.base_url), path, **options) for _ in range(3)]
    while (await client.get("/in-flight")).json() < before + 3:
        pass
    for writer in writers:
        leave(writer, how)
    kept = await in_flight_after_a_while(client) - before
    for writer in writers:
        writer.close()
    return kept


async def places_of_a_client_who_stalls(client: httpx.AsyncClient, path: str) -> tuple[int, int]:
    """Return how many places a client has that stops reading, at once and after a while."""
    writer = await connect(str(client.base_url), path)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    held = (await client.get("/in-flight")).json()
    left = await in_flight_after_a_while(client)
    writer.close()
    await writer.wait_closed()  # closing would block this loop until the server ends
    return held, left
