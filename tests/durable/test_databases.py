"""Stores in databases: versions of their tables, and what happens if the disk is full or the server is killed."""

import asyncio
import errno
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.durable import sql
from penstock.durable.parts import Values
from penstock.durable.postgres import PostgresStore
from penstock.durable.sqlite import SQLiteStore, _as_sqlite
from penstock.durable.store import Answer, Batch, Entry, Event, NewRun, Owner, Question, Store
from tests.postgres import Server, needs_postgres, postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


def new_run(key: str = "k", owner: str | None = None) -> NewRun:
    return NewRun(key=key, graph="g", plan="p", entries=[Entry(0, "", "arguments", 0, 0.0, b"x" * 1000)], owner=owner)


async def migrates(first: Store, second: Store, third: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens one place with this version, with a newer one, and again with this one."""
    run = await first.begin(new_run())
    with monkeypatch.context() as newer:
        further = ("ALTER TABLE penstock_runs ADD COLUMN colour BLOB", "UPDATE penstock_runs SET colour = NULL")
        newer.setattr(sql, "MIGRATIONS", [*sql.MIGRATIONS, further])
        found = await second.read("k")
        assert found is not None
        assert found.run == run.run
        assert [entry.value for entry in await second.load(run.run)] == [b"x" * 1000]
    with pytest.raises(ps.CheckpointError, match=r"has tables of version 2, and this version of Penstock knows 1: use"):
        await third.read("k")


async def test_tables_of_sqlite_are_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.db"
    await migrates(SQLiteStore(path), SQLiteStore(path), SQLiteStore(path), monkeypatch)


@needs_postgres
async def test_tables_of_postgres_are_migrated(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = server.new_database()
    await migrates(PostgresStore(dsn), PostgresStore(dsn), PostgresStore(dsn), monkeypatch)


async def test_many_processes_make_the_tables_at_once(tmp_path: Path) -> None:
    stores = [SQLiteStore(tmp_path / "runs.db") for _ in range(8)]
    assert len({run.run for run in await asyncio.gather(*(store.begin(new_run()) for store in stores))}) == 1


@needs_postgres
async def test_many_servers_make_the_tables_at_once(server: Server) -> None:
    dsn = server.new_database()
    stores = [PostgresStore(dsn) for _ in range(8)]
    assert len({run.run for run in await asyncio.gather(*(store.begin(new_run()) for store in stores))}) == 1


async def test_loops_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "loops.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE penstock_loops (key TEXT)")
    connection.close()
    with pytest.raises(ps.CheckpointError, match=r"holds loops that an earlier version .* or drop the tables"):
        await SQLiteStore(path).begin(new_run())


async def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database, " * 1000)
    with pytest.raises(ps.CheckpointError, match=r"text\.db: the file is not an SQLite database; choose another path"):
        await SQLiteStore(tmp_path / "text.db").read("k")
    with pytest.raises(ps.OptionsError, match="there is no folder"):
        SQLiteStore(tmp_path / "nowhere/runs.db")


async def test_a_full_disk_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[sqlite3.Connection] = []
    connect = SQLiteStore._connected

    def keep(store: SQLiteStore) -> sqlite3.Connection:
        connected.append(connect(store))
        return connected[-1]

    monkeypatch.setattr(SQLiteStore, "_connected", keep)
    store, owner = SQLiteStore(tmp_path / "runs.db"), Owner()
    run = await store.begin(new_run(owner=owner.name))
    (pages,) = connected[0].execute("PRAGMA page_count").fetchone()
    connected[0].execute(f"PRAGMA max_page_count = {pages + 20}")  # SQLite then answers as on a disk that is full
    batches = [
        Batch(run=run.run, epoch=1, entries=[Entry(seq, "step", "result", 0, 0.0, b"x" * 9000)]) for seq in range(1, 30)
    ]
    failures: list[ps.CheckpointError] = []
    for batch in batches:
        try:
            await store.write([batch])
        except ps.CheckpointError as error:
            failures.append(error)
    assert len(failures) > 15
    assert {error.errno for error in failures} == {errno.ENOSPC}
    assert "runs.db: the disk is full; make room" in str(failures[0])
    kept = [entry.seq for entry in await store.load(run.run)]
    assert kept == list(range(len(batches) - len(failures) + 1))
    connected[0].execute("PRAGMA max_page_count = 1000000")
    for batch in batches:
        assert (await store.write([batch]))[0].state == "running"
    assert [entry.seq for entry in await store.load(run.run)] == list(range(30))


@needs_postgres
async def test_a_server_that_is_killed_under_load_loses_and_repeats_nothing(server: Server) -> None:
    dsn = server.new_database()
    store, owner = PostgresStore(dsn, max_connections=3), Owner()
    written: dict[int, int] = {}

    async def chain(key: str) -> None:
        run = await store.begin(new_run(key, owner=owner.name))
        for seq in range(1, 100):
            (one,) = await store.write([Batch(run=run.run, epoch=1, entries=[Entry(seq, "s", "result", 0, 0.0, b"v")])])
            assert one.state == "running"
            written[run.run] = seq
        (one,) = await store.write([Batch(run=run.run, epoch=1, state="finished", result=99)])
        assert one.state == "finished"

    chains = [asyncio.ensure_future(chain(f"k{number}")) for number in range(6)]
    for turn in (15, 60):
        while len(written) < 6 or min(written.values()) < turn:
            await asyncio.sleep(0)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)
    await asyncio.gather(*chains)
    for run in await store.list(state="finished"):
        assert [entry.seq for entry in await store.load(run.run)] == list(range(100))
        assert run.stored_bytes == 1000 + 99 * 2
    assert len(await store.list(state="finished")) == 6


@needs_postgres
async def test_changes_are_heard_after_the_server_was_killed(server: Server) -> None:
    store, other = (PostgresStore(dsn) for dsn in [server.new_database()] * 2)
    changes = store.changes()
    assert await anext(changes) is None
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.restart)
    run = await other.begin(new_run())
    async for runs in changes:
        if runs is None or run.run in runs:
            break
    await changes.aclose()


@needs_postgres
async def test_a_server_that_refuses_is_not_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostgresStore, "_pause_seconds", 3600.0)
    with pytest.raises(ps.CheckpointError, match='role "nobody" does not exist'):
        await PostgresStore(f"{server.new_database()}&user=nobody").read("k")


@needs_postgres
async def test_leases_end_by_the_clock_of_the_database(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    (((now,),),) = (server.execute("SELECT extract(epoch FROM clock_timestamp())::float8"),)
    run = await PostgresStore(server.new_database()).begin(new_run(owner="of another machine"))
    assert abs(run.now - now) < 30
    assert run.lease_until == pytest.approx(now + 30, abs=30)


def test_each_column_of_runs_is_documented_and_the_queries_run() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/durable-tables.md").read_text()
    connection = sqlite3.connect(":memory:")
    for statement in sql.MIGRATIONS[0]:
        connection.execute(_as_sqlite(statement))
    columns = [row[1] for row in connection.execute("PRAGMA table_info(penstock_runs)")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(columns)
    queries = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    assert len(queries) == 3
    for query in queries:
        assert connection.execute(query).fetchall() == []
    connection.close()


class Reversed:
    """A codec."""

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    def decode(self, data: bytes) -> bytes:
        return data[::-1]


async def test_with_a_codec_no_text_of_a_value_lies_in_the_file(tmp_path: Path) -> None:
    path, owner, values = tmp_path / "runs.db", Owner(), Values(Reversed())
    secrets = [f"secret number {number}" for number in range(100)]

    def entry(seq: int, value: object) -> Entry:
        return Entry(seq, "step", "result", 0, 0.0, *values.encode(value, "value", seq))

    async def life() -> None:
        store = SQLiteStore(path)
        new = NewRun(key="k", graph="g", plan="p", entries=[entry(0, {"text": secrets[0]})], owner=owner.name)
        run = await store.begin(new)
        coded = values.coded(b"secret")
        question, events = Question("token", "ask", coded, coded), Event(1, 1, coded)
        grown = [entry(seq, [*secrets[: 20 * seq], {"text": "secret " * 3000}]) for seq in range(1, 6)]
        await store.write([Batch(run=run.run, epoch=1, entries=grown, questions=[question], events=[events])])
        await store.change("k", Answer("token", coded))
        await store.write([Batch(run=run.run, epoch=1, state="failed", error=coded)])
        read = Values(Reversed())
        assert await read.read(store, run.run, 5) == [*secrets, {"text": "secret " * 3000}]
        for file in (path, path.with_name("runs.db-wal")):
            content = file.read_bytes()
            assert b"step" in content or file is path
            assert b"secret" not in content

    await asyncio.to_thread(asyncio.run, life())
    assert b"secret" not in path.read_bytes()  # the log was moved into the file
    assert b"terces" in path.read_bytes()
