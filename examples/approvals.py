"""An agent that asks a person before it pays. Any number of servers run it, over one PostgreSQL database.

    python examples/approvals.py postgresql://localhost/agents --port 8000
    python examples/approvals.py postgresql://localhost/agents --port 8001

    curl -N localhost:8000/runs/order-1 -H 'content-type: application/json' -d '{"text": "3 books"}'
    curl localhost:8001/runs/order-1/answer -H 'content-type: application/json' -d '{"token": "…", "answer": true}'

A fake model chooses tools, which run as steps of the agent. The first request shows the tools as events, and ends with
the question; the second request, with the answer, may go to another process. A `kill -9` or a restart of the database
loses no step, and nothing is paid twice.
"""

import argparse
import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypedDict

import psycopg
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

import penstock as ps
from penstock import asgi, engine

PRICE = 40


class Choice(TypedDict):
    """A tool that the model has chosen, and its arguments."""

    tool: str
    arguments: dict[str, Any]


class State(TypedDict):
    """The state of the agent between two iterations."""

    messages: list[str]
    chosen: list[Choice]
    ended: bool


@ps.node
async def price(goods: str) -> str:
    """Look up the price of goods."""
    return f"{goods} cost {PRICE * int(re.findall(r'[0-9]+', goods)[0])} euros"


@ps.node(effectful=True, retry=ps.Retry(attempts=100, backoff_seconds=0.1, retry_on=psycopg.OperationalError))
async def pay(amount: int, dsn: str) -> str:
    """Pay once, however often this node runs for one step of an agent."""
    key = ps.current().idempotency_key
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(
            "INSERT INTO payments VALUES (%s, %s, 1) ON CONFLICT (key) DO UPDATE SET times = payments.times + 1",
            (key, amount),
        )
    return f"paid {amount} euros"


@ps.node
async def model(messages: list[str]) -> list[Choice]:
    """Stand in for a language model: ask for the price, pay it, and end."""
    if len(messages) == 1:
        return [{"tool": "price", "arguments": {"goods": messages[0]}}]
    if len(messages) == 2:
        return [{"tool": "pay", "arguments": {"amount": int(re.findall(r"[0-9]+", messages[1])[-1])}}]
    return []


TOOLS: dict[str, Any] = {"price": price, "pay": pay}


@ps.node(effectful=True)
async def turn(state: State, dsn: str) -> State:
    """Let the model choose tools, or use the next chosen tool; ask a person before a payment."""
    if not state["chosen"]:
        chosen = await ps.call(model, state["messages"])
        return {**state, "chosen": chosen, "ended": not chosen}
    choice, *others = state["chosen"]
    await ps.emit(choice)
    if choice["tool"] == "pay" and not await ps.interrupt(choice):
        return {**state, "messages": [*state["messages"], "refused"], "chosen": others}
    more = {"dsn": dsn} if choice["tool"] == "pay" else {}
    said = await ps.call(TOOLS[choice["tool"]], **choice["arguments"], **more)
    return {**state, "messages": [*state["messages"], said], "chosen": others}


@ps.node
def begin(text: str) -> State:
    """Return the first state of the agent."""
    return {"messages": [text], "chosen": [], "ended": False}


@ps.node
def goes_on(state: State) -> bool:
    """Whether the model has not ended."""
    return not state["ended"]


class Order(BaseModel):
    """The request of a client."""

    text: str


class Reply(BaseModel):
    """The answer of a person to a question."""

    token: str
    answer: bool


def create_app(dsn: str) -> FastAPI:
    """Return the application of one server."""
    durable = ps.Durable(ps.PostgresStore(dsn), lease_seconds=5)

    @ps.graph
    async def agent(text: str) -> list[str]:
        """Use tools until the model ends; the state after each iteration is stored."""
        turns = await ps.while_loop(goes_on, lambda state: turn(state, dsn), begin(text), durable=durable)
        return ps.apply(lambda state: state["messages"], turns)

    own = engine.Engine()
    service = own.deploy(agent, max_in_flight=64)
    app = FastAPI(lifespan=asgi.lifespan(own, service, taking_over(service, dsn), drain_timeout_seconds=10))
    statuses = {ps.KeyInUse: 409, ps.StaleAnswer: 409, ps.UnknownKey: 404, ps.OtherArguments: 422, ps.Interrupted: 202}
    for kind, status in statuses.items():
        app.add_exception_handler(kind, lambda request, error, status=status: Response(str(error), status))

    @app.post("/runs/{key}")
    async def run(key: str, order: Order) -> Response:
        call = agent(order.text)
        return asgi.event_stream(
            service.stream(call, events=object, durable_key=key, on_finished="return", detached=True)
        )

    @app.get("/runs/{key}")
    async def watch(request: Request, key: str) -> Response:
        number = int(request.headers.get("last-event-id", 0))
        return asgi.event_stream(service.attach(key, events=object, after=number))

    @app.post("/runs/{key}/answer")
    async def answer(request: Request, key: str, reply: Reply) -> Response:
        return await asgi.answer(
            request, service.resume(key, answer=ps.Answer(reply.answer, reply.token), detached=True)
        )

    @app.get("/runs")
    async def runs(state: Any = None) -> list[dict[str, Any]]:
        return [run._asdict() for run in await durable.runs(state=state)]

    return app


@asynccontextmanager
async def taking_over(service: engine.Service[..., Any], dsn: str) -> AsyncGenerator[None]:
    """Go on with the agents of servers that have died, as long as this server runs."""

    async def take_over() -> None:
        while True:
            with suppress(ps.CheckpointError):  # while the database is away
                await service.resume_all(detached=True)
            await asyncio.sleep(1)

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(
            "SELECT pg_advisory_lock(1); "  # servers that start together would create the table twice
            "CREATE TABLE IF NOT EXISTS payments (key text PRIMARY KEY, amount int, times int)"
        )
    task = asyncio.create_task(take_over())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dsn", help="the database, such as postgresql://localhost/agents")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(create_app(options.dsn), port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
