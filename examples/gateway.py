"""A gateway in OpenAI's protocol before two model servers, of which the second takes over where the first fails.

    export UPSTREAMS="http://10.0.0.1:8000/v1 http://10.0.0.2:8000/v1"
    export KEYS='{"sk-one": 60000, "sk-two": 600}'          # tokens a minute
    uvicorn --app-dir examples --factory gateway:create_app --timeout-graceful-shutdown 60

Clients ask as they ask OpenAI, streamed and whole. Until an answer has begun, a slow server is asked a second time, a
busy one when it says, and the other one after that; then an error is told to the client. A client that leaves ends all
that runs for it, and pays for what it got.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple

import httpx
from fastapi import FastAPI, Header, Request, Response

import penstock as ps
from penstock import asgi, engine


class Rejected(Exception):
    """A model server says, in OpenAI's JSON, that the request is wrong."""


# Refusals and timeouts have statuses of their own, and any other error is a mistake: 500.
STATUSES = {Rejected: 400, httpx.HTTPError: 502, httpx.TimeoutException: 504}


def as_error(error: Exception) -> str:
    """Return what a client is told of an error, as JSON. The text of most errors is for the log alone."""
    told = {"message": type(error).__name__, "type": "gateway_error", "param": None, "code": None}
    return str(error) if isinstance(error, Rejected) else json.dumps({"error": told})


class Asked(NamedTuple):
    """The request of a client."""

    key: str
    body: dict[str, Any]
    guess: float  # tokens of the question; the server says later how many it had


PLACES = 256  # calls in flight; the nodes have twice as many, since a second attempt needs a place of its own
again = ps.Retry(2, wait=ps.retry_after, max_backoff_seconds=2, retry_on=httpx.HTTPError)


class Upstream:
    """A model server."""

    def __init__(self, base_url: str) -> None:
        self.http = httpx.AsyncClient(base_url=base_url, timeout=60, limits=httpx.Limits(max_connections=None))

    async def send(self, body: dict[str, Any]) -> httpx.Response:
        """Return the response, whose body is not read yet."""
        response = await self.http.send(self.http.build_request("POST", "chat/completions", json=body), stream=True)
        if response.is_error:
            text = await response.aread()
            if response.status_code in (400, 404, 413, 422):
                raise Rejected(text.decode())
        return response.raise_for_status()

    @ps.node(concurrency=2 * PLACES, retry=again, hedge=ps.Hedge(after_seconds=20), discard=httpx.Response.aclose)
    async def whole(self, asked: Asked) -> httpx.Response:
        """Give the response with a whole answer."""
        return await self.send(asked.body)

    @ps.node(concurrency=2 * PLACES, timeout_seconds=10, retry=again, hedge=ps.Hedge(after_seconds=2))
    async def chunks(self, asked: Asked) -> AsyncIterator[str]:
        """Give an answer in chunks; the last one has the number of tokens."""
        async with aclosing(await self.send({**asked.body, "stream_options": {"include_usage": True}})) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")
        raise httpx.RemoteProtocolError("the stream has ended before [DONE]")


def create_app() -> FastAPI:
    """Make the application."""
    quotas: dict[str, int] = json.loads(os.environ["KEYS"])
    first, second = map(Upstream, os.environ["UPSTREAMS"].split())
    whole, chunks = first.whole.with_policy(failover=second.whole), first.chunks.with_policy(failover=second.chunks)
    limit = ps.RateLimit(
        per_second=lambda key: quotas[key] / 60, burst=1000, on_limit="refuse", scope="engine",
        key=lambda asked: asked.key, cost=lambda asked: asked.guess,
    )  # fmt: skip

    @ps.node
    async def read(asked: Asked, response: httpx.Response) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await response.aread())
        limit.settle(asked.key, answer["usage"]["total_tokens"] - asked.guess)
        return answer

    @ps.node
    async def counted(asked: Asked, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        used = 0.0
        try:
            async for text in chunks:
                chunk: dict[str, Any] = json.loads(text)
                used = usage["total_tokens"] if (usage := chunk.get("usage")) else (used or asked.guess) + 1
                if chunk["choices"] or asked.body.get("stream_options"):
                    yield text
        finally:
            limit.settle(asked.key, used - asked.guess)

    @ps.graph
    async def complete(asked: Asked) -> dict[str, Any]:
        allowed = await limit(asked)
        return await read(allowed, await whole(allowed))

    @ps.graph
    async def stream(asked: Asked) -> AsyncIterator[str]:
        allowed = await limit(asked)
        return counted(allowed, chunks(allowed))

    own = engine.Engine()
    service = own.deploy(
        complete, stream, key=lambda call: call.arguments[0].key, max_in_flight=PLACES, max_in_flight_per_key=64,
        max_queue=256, max_queue_per_key=64, timeout_seconds=300,
    )  # fmt: skip
    app = FastAPI(lifespan=asgi.lifespan(first.http, second.http, own, service, tuned=True))

    @app.post("/v1/chat/completions")
    async def endpoint(request: Request, body: dict[str, Any], authorization: str = Header("")) -> Response:
        key = authorization.removeprefix("Bearer ")
        if key not in quotas:
            return Response(as_error(PermissionError()), 401, media_type="application/json")
        asked = Asked(key, body, len(json.dumps(body)) / 4)
        if not body.get("stream"):
            return await asgi.answer(request, service(asked), statuses=STATUSES, encode_error=as_error)
        return asgi.event_stream(service.stream(stream(asked)), end="[DONE]", statuses=STATUSES, encode_error=as_error)

    return app
