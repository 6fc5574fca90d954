"""Serves models in this process over real HTTP; and the graphs that it serves."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

import penstock as ps
from penstock import serving
from tests.kit import Gauge

Messages = list[dict[str, Any]]


@asynccontextmanager
async def served(application: Any) -> AsyncIterator[str]:
    """Serve an application on a port of its own; yield its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=10,
            timeout_keep_alive=60,  # longer than clients keep idle connections, also on a busy machine
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        while not (server.started or task.done()):
            await asyncio.sleep(0.001)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def asking(models: dict[str, Any], **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve models with `serving.openai`; yield a client of the server."""
    async with served(serving.openai(models, **options)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        yield http


def client(url: str | httpx.URL, key: str = "sk-1", **options: Any) -> Any:
    """Return a client of the package `openai`, which takes a second to import; skip the test if it is not there."""
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(base_url=f"{str(url).rstrip('/')}/v1", api_key=key, max_retries=0, **options)


async def chat(http: httpx.AsyncClient, model: str, said: str | Messages = "hi", **more: Any) -> httpx.Response:
    """Ask for a chat by hand: with a text of the user, or with messages."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    return await http.post("/v1/chat/completions", json={"model": model, "messages": messages, **more})


opened = Gauge()


@ps.node
async def words_of(messages: Messages) -> AsyncIterator[str]:
    with opened:
        for word in str(messages[-1]["content"]).split(" "):
            await asyncio.sleep(0)
            yield word + " "


@ps.node
async def endless_words(messages: Messages) -> AsyncIterator[str]:
    with opened:
        while True:
            await asyncio.sleep(0.001)
            yield "word "


echo, endless = ps.graph(words_of), ps.graph(endless_words)


@ps.node
async def thinker(messages: Messages, request: serving.Request) -> AsyncIterator[serving.Delta]:
    """Think. Then call the request's tool, if it was not called yet, or answer. Report the number of tokens."""
    yield serving.Delta(reasoning="Hm, ")
    yield serving.Delta(reasoning="a question.")
    tools = request.body.get("tools")
    if tools and messages[-1]["role"] == "user":
        name = tools[0].get("function", tools[0])["name"]
        yield serving.Delta(tool_calls=[{"index": 0, "id": "call_1", "function": {"name": name, "arguments": ""}}])
        yield serving.Delta(tool_calls=[{"index": 0, "function": {"arguments": '{"city":'}}])
        yield serving.Delta(tool_calls=[{"index": 0, "function": {"arguments": '"Ulm"}'}}])
    elif request.body.get("response_format") or request.body.get("text"):
        yield serving.Delta('{"city":')
        yield serving.Delta('"Ulm"}')
    else:
        yield serving.Delta("It is ")
        yield serving.Delta(f"{messages[-1]['content']}.")
    yield serving.Delta(usage={"prompt_tokens": 5, "completion_tokens": 7})


@ps.node
async def fails(messages: Messages) -> AsyncIterator[str]:
    """Fail before the first value, or after it."""
    said = messages[-1]["content"]
    if said == "late":
        yield "Some"
    if said == "refused":
        raise serving.APIError(422, "No.", "messages", "no")
    raise KeyError("a secret")


@dataclass
class Progress:
    done: int


@ps.node(effectful="unordered")
async def whole(messages: Messages) -> serving.Delta:
    """Give one value with complete tool calls, and two events."""
    await ps.emit({"step": 1})
    await ps.emit(Progress(2))
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("one", "two")]
    return serving.Delta("text", tool_calls=calls, finish_reason=None)


@ps.node
async def slow(messages: Messages) -> AsyncIterator[str]:
    """Take a while to give ten values."""
    for number in range(10):
        await asyncio.sleep(0.02)
        yield str(number)


@ps.node
async def length(text: str) -> list[float]:
    """Embed a text by its length."""
    return [float(len(text)), 0.5]
