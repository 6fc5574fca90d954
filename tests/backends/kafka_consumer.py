"""A Kafka consumer as a program: `python -m tests.backends.kafka_consumer SERVERS TOPIC DATABASE`.

It parses in processes, looks up with timeouts and retries, and inserts in batches. Each row has the identity of its
message, so a message that is written twice has two rows. Every 500th message is broken, and every 1000th fails.
"""

import asyncio
import json
import os
import random
import sqlite3
import sys
from typing import Any

import penstock as ps
from penstock import consume, engine

SERVERS, TOPIC, DATABASE = sys.argv[1:4] if len(sys.argv) == 4 else ("", "", "")
Row = dict[str, Any]
_connections: list[sqlite3.Connection] = []


class Permanent(Exception):
    """The item has no price."""


def connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    connection.execute("pragma journal_mode=wal")
    connection.execute("pragma synchronous=normal")
    connection.execute("create table if not exists written (n integer primary key, identity, id, key, seq, pid)")
    return connection


@ps.node(runs_on="process")
def parse(identity: str, value: bytes) -> Row:
    return {**json.loads(value), "identity": identity}


@ps.node(timeout_seconds=0.15, retry=ps.Retry(4, backoff_seconds=0.02, retry_on=(ConnectionError, TimeoutError)))
async def look_up(row: Row) -> Row:
    await asyncio.sleep(random.uniform(0.002, 0.020))
    if row["id"] % 1000 == 999:
        raise Permanent(row["id"])
    if ps.current().attempt == 1 and row["id"] % 33 == 5:
        raise ConnectionError("reset by peer")
    if ps.current().attempt == 1 and row["id"] % 100 == 7:
        await asyncio.sleep(1)
    return row


@ps.node(runs_on="thread", batch=ps.Batch(64, max_wait_seconds=0.005))
def write(rows: list[Row]) -> list[None]:
    if not _connections:
        _connections.append(connect(DATABASE))
    values = [(row["identity"], row["id"], row["key"], row["seq"], os.getpid()) for row in rows]
    _connections[0].executemany("insert into written(identity, id, key, seq, pid) values (?, ?, ?, ?, ?)", values)
    return [None] * len(rows)


@ps.graph
async def handle(identity: str, value: bytes) -> None:
    return await write(await look_up(parse(identity, value)))


async def main() -> None:
    settings: dict[str, Any] = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 500}
    source = consume.Kafka(TOPIC, group_id=TOPIC, bootstrap_servers=SERVERS, **settings)
    async with engine.deploy(handle, max_in_flight=64) as service:
        consumer = consume.Consumer(
            service,
            source,
            lambda message: handle(message.identity, message.value),
            dead_letters=source.letters_to(TOPIC + ".dead"),
            settle_seconds=0.5,
        )
        statistics = await consume.run(consumer)
        print(statistics.late_commits, "late commits", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
