"""A graph behind OpenAI's protocol beside servers by hand: `python -m benchmarks.servers.openai_protocol`.

Streams: 32 clients, a token every 3 ms; the server's CPU time for a token, over a bare ASGI application that sends
prepared chunks. Front: a graph in front of a model server, beside httpx and Starlette by hand, with the same handling
of clients that leave. Health: how long `/health/live` takes meanwhile, on both servers. Each server is a process with
uvicorn and uvloop.
"""

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import contextmanager
from http.client import HTTPConnection
from subprocess import PIPE
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import penstock as ps
from penstock import serving

CLIENTS, TOKENS, STEP_SECONDS, ROUNDS = 32, 300, 0.003, 5
FRONT_CLIENTS, FRONT_REQUESTS = 32, 1500
# uvicorn closes a connection that was idle for 5 seconds, so clients close idle connections earlier.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
UPSTREAM = os.environ.get("BENCH_UPSTREAM", "http://127.0.0.1:1/v1")
CHUNK = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "tokens"}


async def cpu(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    await JSONResponse(used.ru_utime + used.ru_stime)(scope, receive, send)


OTHERS: dict[str | None, Any] = {"/cpu": cpu}


def with_cpu(app: Any) -> Any:
    async def around(scope: Any, receive: Any, send: Any) -> None:
        await OTHERS.get(scope.get("path"), app)(scope, receive, send)

    return around


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Only send prepared chunks."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    choice = {"index": 0, "delta": {"content": "word "}, "logprobs": None, "finish_reason": None}
    prepared = f"data: {json.dumps({**CHUNK, 'choices': [choice]})}\n\n".encode()
    if scope["path"] == "/health/live":
        await JSONResponse({"status": "ok"})(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(TOKENS):
        await asyncio.sleep(STEP_SECONDS)
        await send({"type": "http.response.body", "body": prepared, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@ps.node
async def tokens(messages: list[dict[str, Any]]) -> AsyncIterator[str]:
    for _ in range(TOKENS):
        await asyncio.sleep(STEP_SECONDS)
        yield "word "


async def model(request: Request) -> Response:
    """Answer as a model server does, after 5 ms."""
    await request.json()
    await asyncio.sleep(0.005)
    choice = {"index": 0, "message": {"role": "assistant", "content": "words"}, "finish_reason": "stop"}
    return JSONResponse({**CHUNK, "object": "chat.completion", "choices": [choice]})


async def by_hand(request: Request) -> Response:
    """Ask the model server, and cancel the request when the client leaves."""
    body = await request.json()
    client: httpx.AsyncClient = request.app.state.http

    async def ask() -> Response:
        async with client.stream("POST", f"{UPSTREAM}/chat/completions", json=body) as response:
            return Response(await response.aread(), response.status_code, media_type="application/json")

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    asked, left = asyncio.ensure_future(ask()), asyncio.ensure_future(gone())
    await asyncio.wait([asked, left], return_when=asyncio.FIRST_COMPLETED)
    left.cancel()
    if not asked.done():
        asked.cancel()
        return Response(status_code=499)
    return asked.result()


def hand_made() -> Starlette:
    app = Starlette(routes=[Route("/v1/chat/completions", by_hand, methods=["POST"])])
    app.state.http = httpx.AsyncClient(timeout=60, limits=LIMITS, trust_env=False)
    return app


APPLICATIONS: dict[str, Any] = {
    "bare": lambda: with_cpu(bare),
    "tokens": lambda: with_cpu(serving.openai({"tokens": tokens}, max_in_flight=1000)),
    "model": lambda: with_cpu(Starlette(routes=[Route("/v1/chat/completions", model, methods=["POST"])])),
    "hand": lambda: with_cpu(hand_made()),
    "front": lambda: with_cpu(serving.openai({"tokens": serving.upstream(UPSTREAM)}, max_in_flight=1000)),
}


def __getattr__(name: str) -> Any:
    if name.removeprefix("app_") in APPLICATIONS:
        return APPLICATIONS[name.removeprefix("app_")]()
    raise AttributeError(name)


@contextmanager
def server(name: str, upstream: str = "") -> Any:
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        # uvicorn does not set TCP_NODELAY on a socket that it was given: answers would wait 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options = ["--fd", str(listener.fileno()), "--no-access-log", "--log-level", "warning", "--loop", "uvloop"]
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", f"benchmarks.servers.openai_protocol:app_{name}", *options],
            pass_fds=[listener.fileno()], env={**os.environ, "BENCH_UPSTREAM": f"{upstream}/v1"},
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            process.wait()


BODY = {"model": "tokens", "messages": [{"role": "user", "content": "hi"}]}


async def streams(url: str) -> tuple[float, list[float]]:
    """Return the CPU time of a server for a token, in µs, and the times of its health endpoint, in seconds.

    A second process asks the health endpoint, because this process is busy with the streams.
    """
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=LIMITS) as http:
        await read(url)
        command = [sys.executable, "-m", "benchmarks.servers.openai_protocol", url]
        prober = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert prober.stdout is not None
        await prober.stdout.readline()  # the prober has begun
        before = (await http.get("/cpu")).json()
        await asyncio.gather(*(read(url) for _ in range(CLIENTS)))
        used = (await http.get("/cpu")).json() - before
        told, _ = await prober.communicate(b"\n")
        return used / CLIENTS / TOKENS * 1e6, json.loads(told)


def probe(url: str) -> None:
    """Ask the health endpoint every 50 ms until a line comes; print how many seconds each answer took."""
    took: list[float] = []
    ended = threading.Thread(target=sys.stdin.readline)
    ended.start()
    connection = HTTPConnection(url.removeprefix("http://"))
    print(flush=True)
    while ended.is_alive():
        began = time.perf_counter()
        connection.request("GET", "/health/live")
        connection.getresponse().read()
        took.append(time.perf_counter() - began)
        time.sleep(0.05)
    print(json.dumps(took))


async def read(url: str) -> None:
    """Read a stream to its end, with as little work as possible."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    while await reader.read(1 << 16):
        pass
    writer.close()


async def requests(url: str) -> tuple[float, float]:
    """Return the requests a second, and the 99th percentile of their seconds."""
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=LIMITS) as http:
        took: list[float] = []
        left = iter(range(FRONT_REQUESTS))

        async def client() -> None:
            for _ in left:
                began = time.perf_counter()
                (await http.post("/v1/chat/completions", json=BODY)).raise_for_status()
                took.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(FRONT_CLIENTS)))
        return FRONT_REQUESTS / (time.perf_counter() - began), statistics.quantiles(took, n=100)[98]


def main() -> None:
    with server("bare") as plain, server("tokens") as ours:
        found = [(asyncio.run(streams(plain)), asyncio.run(streams(ours))) for _ in range(ROUNDS)]
    by, of = (statistics.median(one[side][0] for one in found) for side in (0, 1))
    print(f"CPU a token: bare {by:.1f} µs, penstock {of:.1f} µs, {of / by:.2f} times")
    waits = [sorted(one for round_ in found for one in round_[side][1]) for side in (0, 1)]
    slow = [took[int(len(took) * 0.99)] * 1e3 for took in waits]
    print(f"Health under this load: p99 bare {slow[0]:.0f} ms, penstock {slow[1]:.0f} ms")
    with server("model") as upstream, server("hand", upstream) as hand, server("front", upstream) as front:
        for url in (hand, front):
            asyncio.run(requests(url))
        both = [(asyncio.run(requests(hand)), asyncio.run(requests(front))) for _ in range(ROUNDS)]
        ratios = [(of[0] / by[0], of[1] / by[1]) for by, of in both]
    rate, p99 = (statistics.median(one[place] for one in ratios) for place in (0, 1))
    speeds = [statistics.median(one[side][0] for one in both) for side in (0, 1)]
    print(f"Front: by hand {speeds[0]:.0f}/s, penstock {speeds[1]:.0f}/s: {rate:.2f}; p99 {p99:.2f} times")


if __name__ == "__main__":
    probe(sys.argv[1]) if len(sys.argv) > 1 else main()
