"""Consumes orders from Kafka: parses in processes, looks up prices with timeouts and retries, inserts in batches."""

import asyncio
import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing

import httpx

import penstock as ps
from penstock import consume, engine

BROKER, PRICES = os.environ.get("BROKER", "localhost:9092"), os.environ.get("PRICES", "http://localhost:8000")
DATABASE = os.environ.get("DATABASE", "orders.db")
Order = dict[str, str]


@ps.resource
async def prices() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=PRICES) as client:
        yield client


@ps.node(runs_on="process")
def parse(identity: str, value: bytes) -> Order:
    return {"id": identity, "item": str(json.loads(value)["item"])}


@ps.node(timeout_seconds=2, retry=ps.Retry(None, backoff_seconds=0.1, retry_on=(httpx.TransportError, TimeoutError)))
async def look_up(client: httpx.AsyncClient, order: Order) -> Order:
    response = await client.get(f"/{order['item']}")
    return order | {"price": response.raise_for_status().text}


LOCKED = ps.Retry(None, backoff_seconds=0.1, retry_on=(sqlite3.OperationalError,))


@ps.node(runs_on="thread", batch=ps.Batch(64, max_wait_seconds=0.005), retry=LOCKED)
def insert(orders: list[Order]) -> list[None]:
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute("create table if not exists orders (id primary key, item, price)")
        database.executemany("insert or ignore into orders values (:id, :item, :price)", orders)
    return [None] * len(orders)


@ps.graph
async def handle(identity: str, value: bytes) -> None:
    return await insert(await look_up(await prices(), parse(identity, value)))


def call_of(message: consume.Message) -> ps.Call[None]:
    return handle(message.identity, message.value)


async def main() -> None:
    source = consume.Kafka("orders", group_id="billing", bootstrap_servers=BROKER)
    async with engine.deploy(handle) as service:
        consumer = consume.Consumer(service, source, call_of, dead_letters=source.letters_to("orders.dead"))
        print(await consume.run(consumer))


if __name__ == "__main__":
    asyncio.run(main())
