"""Consumes orders from a stream of Redis, and inserts them in batches."""

import json
import os
import sqlite3
from contextlib import closing

from redis_streams import RedisStream

import penstock as ps
from penstock import consume, engine

REDIS, DATABASE = os.environ.get("REDIS", "redis://localhost:6379"), os.environ.get("DATABASE", "orders.db")
LOCKED = ps.Retry(None, backoff_seconds=0.1, retry_on=(sqlite3.OperationalError,))
Order = dict[str, str]


@ps.node
async def parse(identity: str, fields: dict[bytes, bytes]) -> Order:
    return {"id": identity, "item": str(json.loads(fields[b"order"])["item"])}


@ps.node(runs_on="thread", batch=ps.Batch(64, max_wait_seconds=0.005), retry=LOCKED)
def insert(orders: list[Order]) -> list[None]:
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute("create table if not exists orders (id primary key, item)")
        database.executemany("insert or ignore into orders values (:id, :item)", orders)
    return [None] * len(orders)


@ps.graph
async def handle(identity: str, fields: dict[bytes, bytes]) -> None:
    return await insert(await parse(identity, fields))


def call_of(message: consume.Message) -> ps.Call[None]:
    return handle(message.identity, message.value)


async def main() -> None:
    source = RedisStream(REDIS, "orders", group="billing")
    async with engine.deploy(handle) as service:
        consumer = consume.Consumer(service, source, call_of, dead_letters=source.letters_to("orders.dead"))
        print(await consume.run(consumer))
