"""The partly migrated service, over real sockets: old endpoints are unchanged, the migrated endpoint is no worse."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples import legacy_service
from examples.legacy_service import create_app, find_price, find_stock, offered, price_of, stock_of
from penstock import engine, testing
from tests.kit import virtual
from tests.serving.openai_server import served

PATIENCE_SECONDS = 30
STOCK = {"gate": 3, "valve": 0, "lost": 7, "slow": 1}
PRICES = {"gate": 40_00, "valve": 5_50, "slow": 1}


class Backend:
    """The backend that the service asks: the price of "lost" fails, and the price of "slow" never comes."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.left = asyncio.Event()
        self.app = Starlette(routes=[Route("/stock/{goods}", self.stock), Route("/price/{goods}", self.price)])

    async def stock(self, request: Request) -> Response:
        return self._found(STOCK, request)

    async def price(self, request: Request) -> Response:
        if request.path_params["goods"] == "lost":
            raise HTTPException(500)
        if request.path_params["goods"] == "slow":
            self.waits.set()
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        return self._found(PRICES, request)

    def _found(self, numbers: dict[str, int], request: Request) -> Response:
        goods = request.path_params["goods"]
        if goods not in numbers:
            raise HTTPException(404)
        return JSONResponse(numbers[goods])


@asynccontextmanager
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[tuple[Backend, httpx.AsyncClient, Starlette]]:
    backend = Backend()
    async with served(backend.app) as behind:
        monkeypatch.setenv("BACKEND", behind)
        app = create_app()
        async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield backend, client, app


async def by_hand(client: httpx.AsyncClient, goods: str) -> tuple[int, dict[str, Any]]:
    """The code of `/offer` before its migration."""
    try:
        pieces, cents = await asyncio.gather(stock_of(client, goods), price_of(client, goods))
    except legacy_service.UnknownGoods:
        return 404, {"error": "UnknownGoods"}
    except httpx.HTTPError as error:
        return 502, {"error": type(error).__name__}
    return 200, {"goods": goods, "pieces": pieces, "cents": cents}


async def test_old_endpoints_are_as_ever_and_the_moved_one_gives_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service(monkeypatch) as (_, client, app):
        for goods in ("gate", "valve", "lost", "unheard-of"):
            answer = await client.get(f"/offer/{goods}")
            assert (answer.status_code, answer.json()) == await by_hand(app.state.client, goods)
        assert (await client.get("/stock/gate")).json() == {"pieces": 3}
        assert (await client.get("/price/gate")).json() == {"cents": 40_00}
        for path, status, error in (
            ("/stock/unheard-of", 404, "UnknownGoods"),
            ("/price/lost", 502, "HTTPStatusError"),
        ):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (status, {"error": error})


async def test_what_takes_too_long_is_a_504_of_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as (backend, client, _):
        with structlog.testing.capture_logs() as logged:
            answer = await client.get("/offer/slow")
        assert (answer.status_code, answer.json()) == (504, {"error": "NodeTimeoutError"})
        assert [event["event"] for event in logged] == ["asgi.failed"]
        async with asyncio.timeout(PATIENCE_SECONDS):
            await backend.left.wait()


async def test_a_client_that_leaves_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy_service, "find_price", find_price.with_policy(timeout_seconds=None))
    async with service(monkeypatch) as (backend, client, app), asyncio.timeout(PATIENCE_SECONDS):
        asking = asyncio.create_task(client.get("/offer/slow"))
        await backend.waits.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await backend.left.wait()
        assert app.state.service.statistics().cancelled == 1  # cancelled by the client, and not by a deadline
        assert (await client.get("/offer/gate")).status_code == 200


@virtual
async def test_the_graph_is_tested_without_a_server_or_waiting() -> None:
    async def soon(client: httpx.AsyncClient, goods: str) -> int:
        await asyncio.sleep(0.9)
        return len(goods)

    began = asyncio.get_running_loop().time()
    with testing.replace(find_stock, soon), testing.replace(find_price, soon):
        async with httpx.AsyncClient() as client, engine.deploy(offered) as deployed:
            assert await deployed(client, "gate") == {"goods": "gate", "pieces": 4, "cents": 4}
    # Both lookups run at the same time.
    assert round(asyncio.get_running_loop().time() - began, 3) == 0.9
