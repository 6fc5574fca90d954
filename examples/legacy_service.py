"""A service in plain asyncio with three endpoints; one endpoint has been moved to Penstock.

    BACKEND="http://10.0.0.1:8000" uvicorn --app-dir examples --factory legacy_service:create_app
    curl localhost:8000/stock/gate; curl localhost:8000/price/gate; curl localhost:8000/offer/gate

`/stock` and `/price` are unchanged. `/offer`, which asks for both, is a graph of the same two functions. It shares the
client and the lifespan, and its errors have the same form. The moved endpoint has limits, retries and a deadline, and
its work ends when its client leaves.
"""

import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypedDict

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock as ps
from penstock import asgi, engine

# --- unchanged


class UnknownGoods(Exception):
    """The backend does not know the goods."""


STATUSES: dict[type[Exception], int] = {UnknownGoods: 404, httpx.HTTPError: 502}


def as_json(error: Exception) -> str:
    """Return the form that all errors of this service have."""
    return json.dumps({"error": type(error).__name__})


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer an error of an endpoint."""
    status = next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return Response(as_json(error), status, media_type="application/json")


async def number_of(client: httpx.AsyncClient, path: str) -> int:
    """Ask the backend for a number."""
    response = await client.get(path)
    if response.status_code == 404:
        raise UnknownGoods(path)
    number: int = response.raise_for_status().json()
    return number


async def stock_of(client: httpx.AsyncClient, goods: str) -> int:
    """Return how many pieces are in stock."""
    return await number_of(client, f"/stock/{goods}")


async def price_of(client: httpx.AsyncClient, goods: str) -> int:
    """Return the price of a piece, in cents."""
    return await number_of(client, f"/price/{goods}")


async def stock(request: Request) -> Response:
    """Answer how many pieces are in stock."""
    pieces = await stock_of(request.app.state.client, request.path_params["goods"])
    return Response(json.dumps({"pieces": pieces}), media_type="application/json")


async def price(request: Request) -> Response:
    """Answer the price of a piece."""
    cents = await price_of(request.app.state.client, request.path_params["goods"])
    return Response(json.dumps({"cents": cents}), media_type="application/json")


# --- moved


class Offer(TypedDict):
    """The answer of `/offer`."""

    goods: str
    pieces: int
    cents: int


again = ps.Retry(2, backoff_seconds=0.05, retry_on=httpx.TransportError)
# The endpoints above still call the plain functions; the graph calls these nodes.
find_stock = ps.node(concurrency=32, timeout_seconds=1, retry=again)(stock_of)
find_price = ps.node(concurrency=32, timeout_seconds=1, retry=again)(price_of)


@ps.node
def as_offer(goods: str, pieces: int, cents: int) -> Offer:
    """Return an offer."""
    return {"goods": goods, "pieces": pieces, "cents": cents}


@ps.graph
async def offered(client: httpx.AsyncClient, goods: str) -> Offer:
    """Ask for stock and price at the same time."""
    return as_offer(goods, await find_stock(client, goods), await find_price(client, goods))


async def offer(request: Request) -> Response:
    """Answer an offer; errors with a status go on to `answer_error`, as in the other endpoints."""
    state = request.app.state
    call = state.service(state.client, request.path_params["goods"])
    return await asgi.answer(request, call, encode_error=as_json)


# --- both


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    """Open the client, as before, and the deployment, which gets the same client with each call."""
    async with (
        httpx.AsyncClient(base_url=os.environ["BACKEND"], timeout=30) as app.state.client,
        engine.deploy(offered, max_in_flight=64, max_queue=128, timeout_seconds=5) as app.state.service,
    ):
        yield


def create_app() -> Starlette:
    """Make the application."""
    routes = [Route(f"/{endpoint.__name__}/{{goods}}", endpoint) for endpoint in (stock, price, offer)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=dict.fromkeys(STATUSES, answer_error))
