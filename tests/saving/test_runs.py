"""Keys of durable loops that are listed, resumed, returned, deleted and expired."""

import asyncio
import json
import math
import re
import shutil
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import penstock as ps
from penstock import engine
from penstock._cli import main
from penstock.saving import store as store_module
from tests.saving.agents import FIRST, TURNS, WORDS, Job, MemoryStore, RunAgent, State, asks, fails, next_state, stop
from tests.saving.test_durable_processes import started


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "loops.db"


@pytest.fixture
def job(file: Path) -> Job:
    return Job(file)


def states(runs: Sequence[ps.Run]) -> dict[str, str]:
    return {run.key: run.state for run in runs}


# Lists.


async def test_keys_are_listed_with_their_states_questions_times_and_sizes(job: Job) -> None:
    before = time.time()
    await job.run("done")
    await job.ends("down", 2, fails)
    await job.ends("asking", 3, asks)
    running = await job.begun("running", 1)
    await stop(await job.begun("stopped", 1))
    runs = {run.key: run for run in await job.durable.runs()}
    assert {key: run.state for key, run in runs.items()} == {
        "done": "finished", "down": "failed", "asking": "asking", "running": "running", "stopped": "stopped",
    }  # fmt: skip
    assert list(runs) == sorted(runs, key=lambda key: runs[key].changed_at, reverse=True)
    # A running call keeps changing.
    assert [key for key in runs if key != "running"] == ["stopped", "asking", "down", "done"]
    assert {run.graph for run in runs.values()} == {"answered"}
    assert [runs[key].step for key in ("done", "down", "asking", "running", "stopped")] == [TURNS, 2, 3, 1, 1]
    assert runs["asking"].question == {"pay": 120}
    assert runs["down"].error == "ValueError: the model is down"
    assert [run.owner for run in runs.values()] == ["", "here", "", "", ""]
    for run in runs.values():
        assert before <= run.began_at <= run.changed_at <= time.time()
        assert run.bytes > 500
        assert (run.question is None) == (run.token == "") == (run.key != "asking")
    for state in ("running", "asking", "finished", "failed", "stopped"):
        assert [run.state for run in await job.durable.runs(state=state)] == [state]
    assert await job.durable.runs(graph="another") == []
    assert len(await job.durable.runs(graph="answered", state="failed")) == 1
    answer = ps.Answer("word3", runs["asking"].token)
    assert await job.run("asking", answer=answer) == WORDS
    await stop(running)


async def test_a_stream_that_has_failed_is_listed_as_such_and_one_that_was_left_as_stopped(job: Job) -> None:
    async with engine.deploy(job.graph) as service:
        for make in (engine.stream, service.stream):
            stream: Any = make
            job.in_turn = {1: fails}
            with pytest.raises(ValueError, match="down"):
                async with stream(job.graph("q"), durable_key="down", events=str) as events:
                    await events.result()
            job.in_turn = {1: asyncio.Event().wait}
            job.ran.clear()
            async with stream(job.graph("q"), durable_key="left", events=str) as events:
                reading = asyncio.ensure_future(events.result())
                while 1 not in job.ran:
                    await asyncio.sleep(0)
                await stop(reading)
            found = {run.key: (run.state, run.error) for run in await job.durable.runs()}
            assert found == {"down": ("failed", "ValueError: the model is down"), "left": ("stopped", "")}


async def test_the_command_lists_the_keys_of_a_file(job: Job, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await job.ends("down", 2, fails)
    await job.ends("asking", 3, asks)

    def said(*arguments: str) -> str:
        assert main(["runs", str(file), *arguments]) == 0
        return capsys.readouterr().out

    both = await asyncio.to_thread(said)
    assert re.search(r"\nasking .*{'pay': 120}.*\ndown .*ValueError: ", both, re.DOTALL)
    (one,) = (await asyncio.to_thread(said, "--json", "--state", "asking", "--graph", "answered")).splitlines()
    assert json.loads(one)["question"] == {"pay": 120}
    assert "no such keys" in await asyncio.to_thread(said, "--graph", "another")
    with pytest.raises(SystemExit, match="2"):
        main(["runs", str(file.with_name("another.db"))])
    assert "there is no file" in capsys.readouterr().err


async def test_a_long_list_is_read_in_pages(job: Job) -> None:
    keys = [f"k{number}" for number in range(7)]
    for key in keys:
        await job.ends(key, 0, fails)
    read: list[str] = []
    last = None
    while page := await job.durable.runs(limit=3, before=last):
        read += [run.key for run in page]
        last = page[-1]
    assert read == keys[::-1]


async def test_what_is_listed_of_a_key_is_that_of_its_present_loop(job: Job) -> None:
    await job.run("k")
    (first,) = await job.durable.runs()
    await job.ends("k", 1, fails)
    (second,) = await job.durable.runs()
    assert (second.state, second.step) == ("failed", 1)
    assert second.began_at > first.changed_at
    assert second.bytes < first.bytes


async def test_the_size_counts_states_arguments_and_result(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    async def now(store: ps.LoopStore) -> float:
        return 1_000_000.5  # other times are written with another length

    monkeypatch.setattr(ps.LoopStore, "now", now)
    await job.run("small")
    await job.run("small")
    await job.run("large", "q" * 10_000)
    sizes = {run.key: run.bytes for run in await job.durable.runs()}
    assert 9_990 <= sizes["large"] - sizes["small"] < 10_500


@pytest.mark.parametrize(("state", "graph"), [(None, None), ("failed", None), ("failed", "answered")])
async def test_a_page_of_a_list_is_found_by_an_index(
    job: Job, file: Path, state: str | None, graph: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await job.ends("k", 0, fails)
    plans: list[str] = []

    class Explained:
        def execute(self, statement: str, values: Sequence[Any]) -> sqlite3.Cursor:
            plans.extend(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values))
            return connection.execute(statement, values)

    with closing(sqlite3.connect(file)) as connection:
        rows = store_module._runs(cast("Any", Explained()), "", state, graph, (math.inf, ""), 50)
    assert [key for key, _, _ in rows] == ["k"]
    assert re.match("(SCAN|SEARCH) penstock_runs USING INDEX penstock_runs_by_", plans[0])
    assert not any("SORT" in plan or "TEMP B-TREE" in plan for plan in plans)


async def test_a_store_with_three_methods_runs_loops_and_says_that_it_cannot_be_listed() -> None:
    job = Job(MemoryStore())
    await job.ends("k", 2, fails)
    with pytest.raises(ps.OptionsError, match="MemoryStore cannot be listed: it has no method `runs`"):
        await job.durable.runs()
    with pytest.raises(ps.OptionsError, match="MemoryStore cannot delete: it has no method `delete`"):
        await job.durable.delete("k")
    async with engine.deploy(job.graph) as service:
        with pytest.raises(ps.OptionsError, match="cannot be listed"):
            await service.resume_all()
        assert await service.resume("k") == WORDS


# Deleted and expired keys.


async def test_a_key_is_deleted_with_all_that_is_kept_under_it(job: Job, file: Path) -> None:
    await job.run("k")
    await job.run("other")
    assert await job.durable.delete("k")
    assert not await job.durable.delete("k")
    assert [run.key for run in await job.durable.runs()] == ["other"]
    assert await job.durable.history("k") == []
    with sqlite3.connect(file) as connection:
        for table in ("penstock_loops", "penstock_runs"):
            assert connection.execute(f"SELECT DISTINCT key FROM {table}").fetchall() == [("other",)]
    connection.close()


async def test_a_key_that_a_call_has_is_neither_deleted_nor_expired(job: Job) -> None:
    running = await job.begun("k", 1)
    with pytest.raises(ps.KeyInUse, match="'k' is under way in process"):
        await job.durable.delete("k")
    for state in ("finished", "failed", "stopped", "asking"):
        assert await job.durable.expire(0, state=state) == 0
    assert [run.state for run in await job.durable.runs()] == ["running"]
    await stop(running)


async def test_only_keys_that_were_long_unchanged_expire(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(store_module, "time", SimpleNamespace(time=lambda: clock[0]))
    for key in ("a", "b"):
        await job.run(key)
    await job.ends("down", 1, fails)
    clock[0] = 1010.0
    await job.run("c")
    clock[0] = 1020.0
    assert await job.durable.expire(20) == 0
    assert await job.durable.expire(15) == 2
    assert states(await job.durable.runs()) == {"c": "finished", "down": "failed"}
    assert await job.durable.expire(15, state="failed", graph="another") == 0
    assert await job.durable.expire(15, state="failed", graph="answered") == 1
    with pytest.raises(ps.OptionsError, match="state"):
        await job.durable.expire(15, state="running")


# Resumed keys.


async def test_a_key_goes_on_without_its_call(job: Job) -> None:
    await job.ends("down", 2, fails)
    await job.ends("asking", 3, asks)
    job.ran.clear()
    async with engine.deploy(job.graph) as service:
        assert await service.resume("down") == WORDS
        assert job.ran == [2, 3, 4]
        job.in_turn = {3: asks}
        with pytest.raises(ps.Interrupted) as asked:
            await service.resume("asking")
        assert await service.resume("asking", answer=ps.Answer("word3", asked.value.token)) == WORDS
        job.ran.clear()
        assert await service.resume("asking") == WORDS  # the key has its result, so the call does not begin anew
        assert job.ran == []
        with pytest.raises(ps.OptionsError, match="no graph of this deployment keeps anything under this key"):
            await service.resume("another")


async def test_a_graph_gets_the_arguments_that_it_was_called_with(file: Path) -> None:
    durable, got = ps.Durable(file), list[Any]()
    is_down = True

    @ps.node
    async def works(state: State, limits: dict[int, tuple[str, ...]], more: bytes) -> State:
        got.append((limits, more))
        if is_down:
            raise ValueError("down")
        return next_state(state, "word")

    @ps.graph
    async def worker(limits: dict[int, tuple[str, ...]], *, more: bytes = b"\x00") -> State:
        async def turn(state: State) -> State:
            return await works(state, limits, more)

        return await ps.while_loop(ps.node(lambda state: state.turn < 1), turn, FIRST, durable=durable)

    with pytest.raises(ValueError, match="down"):
        await engine.run(worker({1: ("a",)}, more=b"\xff"), durable_key="k")
    await durable.fork("k", 0, "forked")
    is_down = False
    async with engine.deploy(worker) as service:
        assert (await service.resume("k")).turn == 1
        assert (await service.resume("forked")).turn == 1
    assert got == [({1: ("a",)}, b"\xff")] * 3


async def test_all_keys_that_are_unfinished_and_ask_nothing_go_on(job: Job) -> None:
    for number in range(TURNS):
        await job.ends(f"down{number}", number, fails)
    await job.run("done")
    await job.ends("asking", 3, asks)
    running = await job.begun("running", 1)
    job.ran.clear()
    async with engine.deploy(job.graph, max_in_flight=2, max_queue=0) as service:
        assert await service.resume_all(concurrency=4) == {}
    assert sorted(job.ran) == sorted(turn for number in range(TURNS) for turn in range(number, TURNS))
    found = states(await job.durable.runs())
    assert found.pop("asking") == "asking"
    assert found.pop("running") == "running"
    assert set(found.values()) == {"finished"}
    await stop(running)


async def test_keys_that_cannot_go_on_come_back_with_the_reason(job: Job, file: Path) -> None:
    for key, one in (("other", Job(file, name="elsewhere")), ("down", job), ("asks", job)):
        await one.ends(key, 2, fails)
    calls = 0

    async def fails_or_asks() -> Any:
        nonlocal calls
        calls += 1
        return await (asks() if calls == 1 else fails())

    job.in_turn = {2: fails_or_asks}
    async with engine.deploy(job.graph) as service:
        left = await service.resume_all(concurrency=1)
    assert sorted(left) == sorted(["other", *(["down"] if "down" in left else ["asks"])])
    assert re.search("belongs to graph 'elsewhere', which is not part of this deployment", str(left.pop("other")))
    assert [str(error) for error in left.values()] == ["the model is down"]
    assert sorted(run.state for run in await job.durable.runs()) == ["asking", "failed", "failed"]


async def test_a_key_of_two_stores_goes_on_in_the_one_where_it_is_unfinished(job: Job, tmp_path: Path) -> None:
    other = Job(tmp_path / "other.db", name="second")
    await job.run("k")
    await other.ends("k", 2, fails)
    job.ran.clear()
    async with engine.deploy(job.graph, other.graph) as service:
        with pytest.raises(ps.OptionsError, match=r"'second'\] have this key, each in a store of its own"):
            await service.resume("k")
        assert await service.resume_all() == {}
    assert other.ran == [0, 1, 2, 2, 3, 4]
    assert job.ran == []
    assert states(await other.durable.runs()) == {"k": "finished"}


async def test_a_graph_with_other_parameters_is_refused(job: Job, file: Path) -> None:
    await job.ends("k", 1, fails)

    @ps.graph
    async def answered(question: str, language: str) -> str:
        return await job.graph(question)

    async with engine.deploy(answered) as service:
        with pytest.raises(ps.OptionsError, match=r"has the parameters \['question', 'language'\], and was called"):
            await service.resume("k")


def test_another_process_lists_and_resumes_what_one_that_was_killed_has_left(
    file: Path, run_agent: RunAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_agent(file, "killed", DIE_IN="3")[-1] == "turn 3"
    run_agent(file, "asking", ASK_IN="2")
    with started(file, "lives", STOP_IN="2") as other:
        assert [other.stdout.readline() for _ in range(3)][-1] == "turn 2\n"
        assert main(["runs", str(file)]) == 0
        rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
        assert "stopped" in rows["killed"]
        assert re.search("asking .*what comes in turn 2[?]", rows["asking"])
        assert f"running (process {other.pid})" in rows["lives"]
        assert run_agent(file, function="resume_all") == ["turn 3", "turn 4", "left {}"]


# Keys that have their results.


async def test_a_call_that_is_made_twice_runs_once_and_has_its_result_twice(job: Job) -> None:
    async with engine.deploy(job.graph) as service:
        for again in (engine.run, service.run):
            assert await job.run(on_finished="return") == WORDS
            assert await again(job.graph("q"), durable_key="k", on_finished="return") == WORDS
        assert job.ran == list(range(TURNS))
        with pytest.raises(ps.KeyFinished, match="'k' has its result already; on_finished='return' returns that"):
            await service.run(job.graph("q"), durable_key="k", on_finished="raise")
        assert await job.run() == WORDS
        assert len(job.ran) == 2 * TURNS
    with pytest.raises(ps.OptionsError, match="on_finished"):
        await job.run(on_finished="never")


async def test_a_stream_of_events_that_is_asked_for_twice_has_the_result_twice(job: Job) -> None:
    async def emits() -> None:
        await ps.emit("works")

    job.in_turn = {1: emits}
    async with engine.deploy(job.graph) as service:
        for make in (engine.stream, service.stream):
            job.ran.clear()
            read = list[list[str]]()
            for _ in range(2):
                key = make.__qualname__
                async with make(job.graph("q"), durable_key=key, events=str, on_finished="return") as events:
                    read.append([event.value async for event in events])
                    assert await events.result() == WORDS
            assert read == [["works"], []]
            assert job.ran == list(range(TURNS))
            with pytest.raises(ps.KeyFinished):
                async with make(job.graph("q"), durable_key=key, events=str, on_finished="raise") as events:
                    await events.result()
        counted = service.statistics()
    assert (counted.completed, counted.failed, counted.cancelled, counted.admission.in_flight) == (1, 0, 0, 0)


async def test_other_arguments_are_no_second_request(job: Job) -> None:
    await job.run("k")
    for option in ("return", "raise"):
        with pytest.raises(ps.OtherArguments, match="a finished call with other arguments: question differs"):
            await job.run("k", "another", on_finished=option)
    await job.ends("down", 1, fails)
    with pytest.raises(ps.OtherArguments, match="an unfinished call with other arguments: question differs"):
        await job.run("down", "another")


async def test_a_result_that_cannot_be_stored_is_said_where_it_is_asked_for(file: Path) -> None:
    durable = ps.Durable(file)

    @ps.node
    async def opened(state: int) -> object:
        return object()

    @ps.node
    async def one_more(state: int) -> int:
        return state + 1

    @ps.graph
    async def lost() -> object:
        return await opened(await ps.while_loop(ps.node(lambda state: state < 1), one_more, 0, durable=durable))

    await engine.run(lost, durable_key="k", on_finished="return")
    with pytest.raises(ps.KeyFinished, match="has ended, but its result is not kept: result is a "):
        await engine.run(lost, durable_key="k", on_finished="return")


async def test_an_answer_that_is_sent_twice_is_stale_or_has_the_result(job: Job) -> None:
    await job.ends("k", 3, asks)
    job.in_turn = {3: asks}
    (asking,) = await job.durable.runs()
    answer = ps.Answer("word3", asking.token)
    assert await job.run(answer=answer, on_finished="return") == WORDS
    assert await job.run(answer=answer, on_finished="return") == WORDS
    with pytest.raises(ps.StaleAnswer, match="waits for no answer"):
        await job.run(answer=answer)
    await job.ends("other", 3, asks)
    with pytest.raises(ps.StaleAnswer, match="is for another question"):
        await job.run("other", answer=answer)
    with pytest.raises(ps.UnknownStep, match="there is no such state"):
        await job.durable.fork("k", 99, "new")


async def test_a_file_of_an_earlier_version_is_listed_and_its_keys_cannot_be_resumed(tmp_path: Path) -> None:
    folder = next(iter(sorted(Path(__file__).parent.glob("written_by_*"))))
    for source in folder.glob("loops.db*"):
        shutil.copy(source, tmp_path)
    durable = ps.Durable(tmp_path / "loops.db")
    runs = await durable.runs()
    assert runs
    assert all(run.graph and run.bytes > 0 and run.changed_at > 1.7e9 for run in runs)
    for run in runs:
        with pytest.raises(ps.OptionsError, match=r"without the arguments.*durable_key="):
            await durable._stored_call(run.key)
        assert await durable.delete(run.key)
    assert await durable.runs() == []
