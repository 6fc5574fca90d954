"""Types of resources, as mypy and pyright must infer them."""

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, assert_type

import penstock as ps
from penstock import engine, testing


class Http:
    closed = False

    async def get(self, path: str) -> bytes:
        return path.encode()


@ps.resource
async def http(base_url: str, *, retries: int = 0) -> AsyncIterator[Http]:
    yield Http()


@ps.resource
async def weights() -> AsyncGenerator[list[float], None]:
    yield [1.0]


@ps.node
async def fetch(client: Http, path: str, model: list[float]) -> bytes:
    return await client.get(path)


def build(base_url: str) -> ps.Graph[[str], bytes]:
    @ps.graph
    async def search(path: str) -> bytes:
        client = await http(base_url, retries=3)
        assert_type(client, Http)
        return await fetch(client, path, await weights())

    return search


def as_in_the_sketch() -> ps.Node[..., Coroutine[Any, Any, Http]]:
    one = http("a")
    awaited: Coroutine[Any, Any, Http] = one
    awaited.close()
    assert_type(http.open("a", retries=1), AbstractAsyncContextManager[Http])
    assert_type(weights, ps.Resource[[], list[float]])
    return http


async def serve() -> None:
    async def opened(base_url: str, *, retries: int = 0) -> AsyncIterator[Http]:
        yield Http()

    async def given(base_url: str, *, retries: int = 0) -> Http:
        return Http()

    search = build("a")
    async with engine.deploy(search) as service:
        await service.reload(http)
    with testing.replace(http, opened), testing.replace(weights, weights.fn):
        await search("a")
    with testing.replace(http, given):
        await search("a")
