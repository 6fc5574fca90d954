"""The source of the page "Consume Redis streams", with a server that is killed and restarted."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import consume, engine
from tests.packages import needs_package

redis: Any = pytest.importorskip("redis", reason="needs redis-py: pip install redis")
pytestmark = needs_package("redis-server", PROGRAM := shutil.which("redis-server"))

HOW_TO = Path(__file__).parents[2] / "docs/how-to"
GROUP = "billing"


class Server:
    """A Redis server with a socket in its own folder; it writes each change to the disk before it answers."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "s")
        self.url = f"unix://{self.socket}"
        self.client = redis.Redis(unix_socket_path=self.socket)
        assert PROGRAM is not None
        self.command: list[str | Path] = [
            PROGRAM, "--port", "0", "--unixsocket", self.socket, "--dir", folder, "--save", "",
            "--appendonly", "yes", "--appendfsync", "always",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        ends_at = time.monotonic() + 30
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < ends_at
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def add(self, stream: str, count: int, broken: int = 0) -> None:
        """Add orders with the items 0, 1, ..., with some "broken" values in their midst."""
        values = [json.dumps({"item": number}) for number in range(count)]
        for number in range(broken):
            values.insert(number * 97, "{broken")
        pipe = self.client.pipeline()
        for number, value in enumerate(values):
            pipe.xadd(stream, {"order": value, "key": f"key {number % 300}"})
        pipe.execute()

    def pending(self, stream: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.xpending_range(stream, GROUP, "-", "+", 10_000)
        return found

    def let_time_pass(self, stream: str, seconds: float) -> None:
        """Make all pending entries look as if they were last renewed `seconds` ago."""
        if entries := [one["message_id"] for one in self.pending(stream)]:
            self.client.xclaim(stream, GROUP, "time", 0, entries, idle=int(seconds * 1000), justid=True)

    def is_settled(self, stream: str) -> bool:
        """Whether all entries were read and acknowledged."""
        [group], [last] = self.client.xinfo_groups(stream), self.client.xrevrange(stream, count=1)
        return bool(group["pending"] == 0 and group["last-delivered-id"] == last[0])


@pytest.fixture
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="redis"))  # the path of a socket is limited to some hundred characters
    found = Server(folder)
    try:
        yield found
    finally:
        found.client.close()
        found.kill()
        shutil.rmtree(folder)


class World:
    """A stream, the results of handling its entries, and consumers of it.

    Attributes:
        rows: the inserted item of each identity.
        handled: how often each identity was handled.
        is_down: while this is set, handlers wait.
    """

    def __init__(self, server: Server, stream: str, source: Any) -> None:
        self.server, self.stream, self.source = server, stream, source
        self.rows: dict[str, int] = {}
        self.handled: Counter[str] = Counter()
        self.is_down = False

        @ps.node
        async def write(identity: str, fields: dict[bytes, bytes]) -> None:
            await asyncio.sleep(0.002)
            while self.is_down:
                await asyncio.sleep(0.01)
            self.handled[identity] += 1
            self.rows.setdefault(identity, json.loads(fields[b"order"])["item"])

        self.handle = ps.graph(write)

    @asynccontextmanager
    async def consumer(
        self, name: str = "first", *, lease_seconds: float = 2.0, drain_seconds: float = 20.0
    ) -> AsyncGenerator[consume.Consumer]:
        source = self.source(self.server.url, self.stream, group=GROUP, name=name, lease_seconds=lease_seconds)
        letters = source.letters_to(self.stream + ".dead")
        async with (
            engine.deploy(self.handle, max_in_flight=16) as service,
            consume.Consumer(
                service, source, lambda message: self.handle(message.identity, message.value), dead_letters=letters,
                max_open=32, settle_seconds=0.1, drain_seconds=drain_seconds,
            ) as consumer,
        ):  # fmt: skip
            yield consumer

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(50):
            while not predicate():
                await asyncio.sleep(0.02)

    async def until_rows(self, count: int) -> None:
        await self.until(lambda: len(self.rows) >= count)

    async def until_settled(self) -> None:
        await self.until(lambda: self.server.is_settled(self.stream))

    def dead_letters(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.server.client.xrange(self.stream + ".dead")]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The source in the example of the page."""
    monkeypatch.syspath_prepend(str(HOW_TO))
    import redis_streams  # type: ignore[import-not-found]

    yield redis_streams.RedisStream
    del sys.modules["redis_streams"]


async def test_a_server_that_is_killed_and_one_that_hangs_cost_nothing(server: Server, source: Any) -> None:
    world = World(server, "outages", source)
    server.add("outages", 600)
    async with world.consumer() as consumer:
        await world.until_rows(100)
        server.kill()
        await asyncio.sleep(1)
        await asyncio.to_thread(server.start)
        await world.until_rows(300)
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1)
        server.process.send_signal(signal.SIGCONT)
        await world.until_settled()
        await world.until(lambda: consumer.statistics().lag == 0)
    assert sorted(world.rows.values()) == list(range(600))
    assert world.dead_letters() == []


async def test_what_a_drain_leaves_is_given_back_at_once(server: Server, source: Any) -> None:
    world = World(server, "drained", source)
    server.add("drained", 100)
    world.is_down = True
    async with world.consumer(lease_seconds=3600, drain_seconds=0.1) as first:
        await world.until(lambda: first.statistics().open == 32)
    world.is_down = False
    async with world.consumer("second", lease_seconds=3600):
        await world.until_settled()
    assert sorted(world.rows.values()) == list(range(100))
    assert set(world.handled.values()) == {1}
    assert world.dead_letters() == []


async def test_what_is_open_is_renewed_and_never_handled_twice_by_one_consumer(server: Server, source: Any) -> None:
    world = World(server, "open", source)
    server.add("open", 5)
    world.is_down = True

    def was_renewed() -> bool:
        return all(one["time_since_delivered"] < 6000 for one in server.pending("open"))

    def was_claimed() -> bool:
        server.let_time_pass("open", 3600)
        return all(one["times_delivered"] > 1 for one in server.pending("open"))

    async with world.consumer(lease_seconds=8) as consumer:
        await world.until(lambda: consumer.statistics().open == 5)
        server.let_time_pass("open", 6)
        await world.until(was_renewed)
        assert {one["times_delivered"] for one in server.pending("open")} == {1}
        await world.until(was_claimed)  # claimed by the consumer that holds the entries
        world.is_down = False
        await world.until_settled()
    assert sorted(world.rows.values()) == list(range(5))
    assert set(world.handled.values()) == {1}


def test_the_program_of_the_page_is_killed_and_joined_and_each_order_is_inserted_once(
    server: Server, tmp_path: Path
) -> None:
    count = 5000
    server.add("orders", count, broken=5)
    database = tmp_path / "orders.db"
    environment = {**os.environ, "REDIS": server.url, "DATABASE": str(database)}
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import asyncio, redis_orders; asyncio.run(redis_orders.main())"]
        found = subprocess.Popen(command, cwd=HOW_TO, env=environment, stdout=subprocess.DEVNULL)
        processes.append(found)
        return found

    def until(predicate: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + 50
        while not predicate():
            assert time.monotonic() < ends_at, f"{inserted()} are inserted"
            time.sleep(0.01)

    with closing(sqlite3.connect(database, timeout=30, isolation_level=None)) as connection:
        connection.execute("create table orders (id primary key, item)")

        def inserted() -> int:
            return int(connection.execute("select count(*) from orders").fetchone()[0])

        try:
            first = start()
            until(lambda: inserted() > 0)
            second = start()
            until(lambda: inserted() > count // 8)
            first.kill()
            until(lambda: inserted() > count // 4)
            second.terminate()
            assert second.wait(30) == 0
            server.let_time_pass("orders", 3600)
            third = start()
            until(lambda: server.is_settled("orders"))
            third.terminate()
            assert third.wait(30) == 0
        finally:
            for process in processes:
                process.kill()
                process.wait()
        items = sorted(int(item) for (item,) in connection.execute("select item from orders"))
    assert items == list(range(count))
    letters = [fields for _, fields in server.client.xrange("orders.dead")]
    assert len({fields[b"source"] for fields in letters}) == 5
    assert all(fields[b"order"] == b"{broken" and b"JSONDecodeError" in fields[b"error"] for fields in letters)
    assert {fields[b"attempts"] for fields in letters} == {b"1"}
