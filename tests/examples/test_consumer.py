"""The Kafka consumer, with a fake client: each good message is inserted once, and a signal drains the consumer."""

import asyncio
import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from examples import consumer
from tests.consume.fake_kafka import Broker

PROGRAM = Path(consumer.__file__).read_text()
PAGE = Path(__file__).parents[2] / "docs/how-to/consume-kafka.md"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Tell the price of an item; "item 7" has none."""
    while request := await reader.readline():
        while (await reader.readline()).strip():
            pass
        status = "404 Not Found" if b"item7 " in request else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 4\r\n\r\n9.50".encode())
    writer.close()


async def test_orders_are_inserted_once_and_what_is_poison_is_put_aside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broker = Broker(Random(1), {"orders": 4})
    broker.install(monkeypatch)
    monkeypatch.setattr(consumer, "DATABASE", str(tmp_path / "orders.db"))
    for number in range(200):
        order = json.dumps({"item": f"item{number % 40}"}).encode() if number != 50 else b"{broken"
        broker.append("orders", order, b"key %d" % (number % 9), [])
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        monkeypatch.setattr(consumer, "PRICES", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        running = asyncio.create_task(consumer.main())
        async with asyncio.timeout(30):
            while sum(count for tp, count in broker.committed.items()) < 200:
                await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    with closing(sqlite3.connect(consumer.DATABASE)) as database:
        rows = database.execute("select id, price from orders").fetchall()
    dead = [dict(letter.headers)["error"] for letter in broker.logs[broker.topic("orders.dead")[0]]]
    assert len(rows) == len({identity for identity, _ in rows}) == 200 - 5 - 1
    assert {price for _, price in rows} == {"9.50"}
    assert sorted(b"404" in error for error in dead) == [False, *[True] * 5]


def test_it_is_short_and_the_page_shows_it() -> None:
    assert len([line for line in PROGRAM.splitlines() if line.strip()]) <= 45
    assert PROGRAM.partition("\n\nif __name__")[0] in PAGE.read_text()
