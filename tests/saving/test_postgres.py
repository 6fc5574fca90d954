"""Durable loops in PostgreSQL, with a server of this test's own, which is killed and restarted under load."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock import engine
from penstock._cli import main
from penstock.saving import loops as loops_module
from penstock.saving import store as store_module
from tests.postgres import Server, needs_postgres, postgres_server
from tests.saving.agents import WORDS, Job, RunAgent, asks, fails

pytestmark = needs_postgres


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def dsn(server: Server) -> str:
    return server.new_database()


async def test_loops_are_kept_listed_resumed_and_deleted(dsn: str) -> None:
    job = Job(ps.PostgresStore(dsn))
    assert await job.run("done") == WORDS
    assert await job.run("done", on_finished="return") == WORDS
    await job.ends("down", 2, fails)
    await job.ends("asking", 3, asks)
    runs = await job.durable.runs()
    assert [(run.key, run.state) for run in runs] == [("asking", "asking"), ("down", "failed"), ("done", "finished")]
    assert runs[0].question == {"pay": 120}
    assert all(run.bytes > 500 for run in runs)
    assert [run.key for run in await job.durable.runs(before=runs[0], limit=1)] == ["down"]
    assert [run.key for run in await job.durable.runs(state="failed", graph="answered")] == ["down"]
    assert [state.step for state in await job.durable.history("down")] == [0, 1, 2]
    async with engine.deploy(job.graph) as service:
        assert await service.resume_all() == {}
        assert await service.resume("asking", answer=ps.Answer("word3", runs[0].token)) == WORDS
    assert Counter(job.ran) == {0: 3, 1: 3, 2: 4, 3: 4, 4: 3}
    await job.durable.delete("done")
    assert await job.durable.expire(0) == 2
    assert await job.durable.runs() == []


async def test_a_store_expects_versions_and_takes_the_same_write_twice(dsn: str) -> None:
    store = ps.PostgresStore(dsn)
    first = ps.LoopRecord(1, 0, b"first\x00")
    assert await store.load("k") is None
    assert not await store.store("k", first, expected_version=1)
    assert await store.store("k", first, expected_version=0)
    assert await store.store("k", first, expected_version=0)  # repeated, as after a lost connection
    assert not await store.store("k", replace(first, content=b"another"), expected_version=0)
    assert await store.store("k", ps.LoopRecord(2, 1, b"second"), expected_version=1)
    assert [record.content for record in await store.history("k")] == [b"first\x00", b"second"]
    assert (await store.first("k"), await store.load("k")) == (
        ps.LoopRecord(1, 0, b"first\x00"), ps.LoopRecord(2, 1, b"second"),
    )  # fmt: skip
    assert await store.delete({"k": 1, "other": 1}) == 0
    assert await store.delete({"k": 2}) == 1


async def test_a_server_that_refuses_to_connect_is_not_asked_again(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps.PostgresStore, "_pause_seconds", 3600.0)
    for wrong, reason in (("dbname", "database"), ("user", "role")):
        with pytest.raises(ps.CheckpointError, match=f'{reason} "nobody" does not exist'):
            await ps.PostgresStore(f"{dsn}&{wrong}=nobody").load("k")


async def test_a_key_is_given_to_one_of_many_that_ask_at_once(dsn: str) -> None:
    stores = [ps.PostgresStore(dsn) for _ in range(4)]
    for version in range(5):
        writes = [
            store.store("k", ps.LoopRecord(version + 1, version, f"{number}".encode()), expected_version=version)
            for number, store in enumerate(stores)
        ]
        assert sorted(await asyncio.gather(*writes)) == [False, False, False, True]


async def test_leases_end_by_the_clock_of_the_database(
    dsn: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(ps.PostgresStore(dsn))
    await job.ends("k", 2, fails)
    record = await job.durable._store.load("k")
    assert record is not None
    monkeypatch.setattr(store_module, "time", SimpleNamespace(time=lambda: time.time() + 3600))
    elsewhere = loops_module.Owner("another machine", 1, "1", "token")
    (((now,),),) = (server.execute("SELECT extract(epoch FROM clock_timestamp())::float8"),)
    assert abs(await job.durable._store.now() - now) < 30
    for lease_until, version in ((now + 1000, record.version), (now - 1000, record.version + 1)):
        loop = replace(loops_module.Loop.read(record), owner=elsewhere, lease_until=lease_until)
        assert await job.durable._store.store("k", loop.record(version + 1), expected_version=version)
        if lease_until > now:
            with pytest.raises(ps.KeyInUse, match=r"in process 1 of another machine, whose lease lasts (9\d\d|1000) s"):
                await job.run()
    assert await job.run() == WORDS


async def test_a_server_that_is_killed_and_restarted_under_load_loses_no_state_and_repeats_none(
    dsn: str, server: Server
) -> None:
    jobs = [Job(ps.PostgresStore(dsn, max_connections=2), last=12) for _ in range(8)]
    running = [asyncio.ensure_future(job.run(f"k{number}")) for number, job in enumerate(jobs)]
    for turn in (2, 6):
        while not all(turn in job.ran for job in jobs):
            await asyncio.sleep(0)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)
    assert await asyncio.gather(*running) == [" ".join(f"word{turn}" for turn in range(12))] * 8
    assert all(job.ran == list(range(12)) for job in jobs)
    assert {run.state for run in await jobs[0].durable.runs()} == {"finished"}


async def test_a_call_has_its_deadline_while_the_server_is_down(
    dsn: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(ps.PostgresStore(dsn))
    await asyncio.to_thread(server.kill)
    try:
        with pytest.raises(ps.DeadlineExceeded, match="the store did not answer"):
            await job.run(timeout_seconds=0.2)
        monkeypatch.setattr(job.durable._store, "_give_up_after_seconds", 0.05)
        with pytest.raises(ps.CheckpointError, match=r"the loop of key 'k' in PostgreSQL: .*connection"):
            await job.run()
    finally:
        await asyncio.to_thread(server.restart)
    assert await job.run() == WORDS


def test_another_process_lists_and_resumes_what_one_that_was_killed_has_left(
    dsn: str, run_agent: RunAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_agent(dsn, "k", DIE_IN="2")[-1] == "turn 2"
    assert main(["runs", dsn]) == 0
    assert "stopped" in capsys.readouterr().out
    assert run_agent(dsn, function="resume_all") == ["turn 2", "turn 3", "turn 4", "left {}"]


def test_psycopg_is_asked_for_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ps.MissingExtraError, match=r"needs psycopg: pip install .penstock\[postgres\]."):
        ps.PostgresStore("postgresql://")
    with pytest.raises(ps.OptionsError, match="dsn"):
        ps.PostgresStore("")
