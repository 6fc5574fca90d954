"""Durable loops in one process: keys, states, outcomes, leases, history, and stores that fail."""

import asyncio
import errno
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock import _machine, engine
from penstock.saving import loops as loops_module
from penstock.saving import store as store_module
from tests.kit import Gate, added, cancelled_at_every_step, outcomes, same, values_of, virtual
from tests.saving.agents import TURNS, WORDS, Job, MemoryStore, State, fails, stop, without_threads


@pytest.fixture
def job(store: MemoryStore) -> Job:
    return Job(store)


# Keys.


async def test_a_loop_has_its_result_and_is_kept(job: Job) -> None:
    assert await job.run() == WORDS
    assert job.ran == list(range(TURNS))
    history = await job.durable.history("k")
    assert [(state.step, state.value.turn) for state in history] == [(step, step) for step in range(TURNS + 1)]
    assert history[2].value == State(2, ("word0", "word1"), {0: "word0", 1: "word1"})
    assert [state.kept_at for state in history] == sorted(state.kept_at for state in history)
    assert abs(history[0].kept_at - time.time()) < 60


async def test_a_call_that_has_failed_goes_on_and_one_with_a_result_begins_anew(job: Job) -> None:
    await job.ends("k", 3, fails)
    assert await job.run() == WORDS
    assert job.ran == [0, 1, 2, 3, 3, 4]
    job.ran.clear()
    assert await job.run(question="another question") == WORDS
    assert job.ran == list(range(TURNS))
    assert len(await job.durable.history("k")) == TURNS + 1


async def test_steps_around_the_loop_run_again_and_the_kept_state_takes_the_place_of_the_first(
    store: MemoryStore,
) -> None:
    ran: list[object] = []
    durable = ps.Durable(store)

    @ps.node
    async def first(question: str) -> int:
        ran.append("before")
        return 100 * ran.count("before")

    @ps.node
    async def up(value: int) -> int:
        ran.append(value)
        return value + 1

    @ps.node
    async def last(value: int) -> int:
        ran.append("after")
        if ran.count("after") == 1:
            raise ValueError("crash")
        return value

    @ps.graph
    async def counted(question: str) -> int:
        below = ps.node(lambda value: value < 102)
        return await last(await ps.while_loop(below, up, await first(question), durable=durable))

    with pytest.raises(ValueError, match="crash"):
        await engine.run(counted("q"), durable_key="k")
    assert await engine.run(counted("q"), durable_key="k") == 102
    assert ran == ["before", 100, 101, "after", "before", "after"]


async def test_iterations_of_earlier_calls_count_in_the_limit(store: MemoryStore) -> None:
    durable = ps.Durable(store)
    ran: list[int] = []

    @ps.node
    async def up(value: int) -> int:
        ran.append(value)
        if ran == [0, 1]:
            raise ValueError("crash")
        return value + 1

    @ps.graph
    async def endless() -> int:
        return await ps.while_loop(ps.node(lambda value: True), up, 0, max_iterations=3, durable=durable)

    with pytest.raises(ValueError, match="crash"):
        await engine.run(endless, durable_key="k")
    for _ in range(2):
        with pytest.raises(ps.IterationLimitError, match="3 times"):
            await engine.run(endless, durable_key="k")
    assert ran == [0, 1, 1, 2]


async def test_a_durable_graph_needs_a_key_wherever_it_is_called(store: MemoryStore, job: Job) -> None:
    graph, tokens = job.graph, job.graph >> one_by_one
    needs = pytest.raises(ps.OptionsError, match=r"has a durable loop, which is kept under a key: .*key=")
    async with engine.deploy(graph, tokens) as service:
        for call in (
            lambda: engine.run(graph("q")), lambda: engine.memory(graph("q")), lambda: service("q"),
            lambda: service.run(graph("q")), lambda: service.map([graph("q")]),
        ):  # fmt: skip
            with needs:
                await call()
        for stream in (
            lambda: engine.stream([graph("q")]), lambda: engine.stream(tokens("q")),
            lambda: service.stream(tokens("q")),
        ):  # fmt: skip
            with needs:
                await values_of(stream())
        assert service.statistics().admission.in_flight == 0
    with pytest.raises(ps.OptionsError, match=r"engine.run\(graph\(...\), durable_key=...\)"):
        await graph("q")
    assert (job.ran, store.calls) == ([], [])


@ps.node
async def one_by_one(text: str) -> AsyncIterator[str]:
    for word in text.split():
        yield word


plain: ps.Graph[[Any], Any] = ps.graph(same)
plain_tokens = ps.graph(one_by_one)


@pytest.mark.parametrize("options", [{"durable_key": "k"}, {"answer": None}, {"on_finished": "return"}], ids=str)
async def test_a_graph_that_is_not_durable_takes_no_options_of_keys(options: dict[str, Any]) -> None:
    refused = pytest.raises(ps.OptionsError, match=r"for a graph with a durable loop, and graph '(same|one_by_one)' ")
    many = r"for one call, not for many: use {}\.run; .* to engine\.deploy"
    async with engine.deploy(plain, plain_tokens) as service:
        for run in (engine.run, service.run):
            with refused:
                await run(plain("q"), **options)
        for name, stream in (("engine", engine.stream), ("service", service.stream)):
            with refused:
                await values_of(stream(plain_tokens("q"), **options))
            with pytest.raises(ps.OptionsError, match=many.format(name)):
                stream([plain("q")], **options)


async def test_a_key_is_a_text(job: Job) -> None:
    durable = job.durable
    with pytest.raises(ps.OptionsError, match="key="):
        await engine.run(job.graph("q"), answer="yes")
    with pytest.raises(ps.OptionsError, match="a text that is not empty"):
        await job.run("")
    for refused in (
        job.run("a\ud800"), job.run("\udc80", answer="yes"), durable.history("\ud800"), durable.fork("\ud800", 0, "b"),
        durable.fork("a", 0, "\ud800"),
    ):  # fmt: skip
        with pytest.raises(ps.OptionsError, match="can be written as UTF-8"):
            await refused


async def test_an_unfinished_key_is_for_the_same_graph(store: MemoryStore, job: Job) -> None:
    await job.ends("k", 3, fails)
    with pytest.raises(ps.OptionsError, match=r"unfinished call of graph 'answered', not of 'other'"):
        await Job(store, name="other").run()


async def test_arguments_and_questions_are_equal_whatever_the_order_of_their_sets_and_dicts() -> None:
    asked: list[dict[str, object]] = [{"one": 1, "two": {3, 4}}, {"two": {4, 3}, "one": 1}]
    store, questions = MemoryStore(), iter(asked)

    @ps.node
    async def ask(state: int) -> int:
        assert await ps.interrupt(next(questions)) == "yes"
        return state + 1

    @ps.graph
    async def asks(options: dict[str, object]) -> int:
        return await ps.while_loop(ps.node(lambda state: state < 1), ask, 0, durable=ps.Durable(store))

    with pytest.raises(ps.Interrupted):
        await engine.run(asks({"a": {1, 2}, "b": 2}), durable_key="k")
    assert await engine.run(asks({"b": 2, "a": {2, 1}}), durable_key="k", answer="yes") == 1


async def test_a_key_is_run_by_one_call_at_a_time(job: Job) -> None:
    first = await job.begun("k", 1)
    for question in ("q", "other"):
        with pytest.raises(ps.KeyInUse, match=r"'k' is under way in process \d+, whose lease lasts \d+ s"):
            await job.run(question=question)
    await stop(first)
    assert await job.run() == WORDS
    assert job.ran == [0, 1, 1, 2, 3, 4]


async def test_many_calls_of_one_key_at_once_run_it_once(job: Job) -> None:
    found = await outcomes(*(job.run() for _ in range(10)))
    assert (found.count(WORDS), found.count(ps.KeyInUse)) == (1, 9)
    assert job.ran == list(range(TURNS))


# Services and streams.


async def test_services_and_streams_take_keys(job: Job) -> None:
    graph = job.graph

    @ps.graph
    async def tokens(question: str) -> AsyncIterator[str]:
        return one_by_one(await graph(question))

    async with engine.deploy(graph, tokens) as service:
        streams = [(service.stream, "b"), (engine.stream, "c")]
        job.in_turn = {2: fails}
        with pytest.raises(ValueError, match="down"):
            await service.run(graph("q"), durable_key="a")
        for stream, key in streams:
            with pytest.raises(ValueError, match="down"):
                await values_of(stream(tokens("q"), durable_key=key))
        job.in_turn = {}
        job.ran.clear()
        assert await service.run(graph("q"), durable_key="a") == WORDS
        for stream, key in streams:
            assert await values_of(stream(tokens("q"), durable_key=key)) == WORDS.split()
        assert job.ran == 3 * [2, 3, 4]
        async with service.stream(tokens("q"), durable_key="b") as values:
            await anext(values)
        assert job.ran == [*3 * [2, 3, 4], 0, 1, 2, 3, 4]  # the call began anew, and its reader left before its end
        assert await values_of(service.stream(tokens("q"), durable_key="b")) == WORDS.split()
        assert job.ran == [*3 * [2, 3, 4], 0, 1, 2, 3, 4]
        assert service.statistics().completed == 3


@virtual
async def test_the_deadline_of_a_call_covers_what_its_store_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)  # for whose work virtual time would not wait

    class Slow(MemoryStore):
        seconds = 3600.0

        async def load(self, key: str, /) -> ps.LoopRecord | None:
            await asyncio.sleep(self.seconds)
            return await super().load(key)

    job = Job(Slow())
    with pytest.raises(ps.DeadlineExceeded, match=r"'k' was not taken within 0\.01 s"):
        await job.run(timeout_seconds=0.01)
    # If the call gets its key, its error still shows the timeout that it was given.
    monkeypatch.setattr(Slow, "seconds", 0.01)
    job.in_turn = {1: asyncio.Event().wait}
    async with engine.deploy(job.graph) as service:
        for run in (engine.run, service.run):
            with pytest.raises(ps.DeadlineExceeded, match=r"did not finish within 0\.25 s"):
                await run(job.graph("q"), durable_key="k", timeout_seconds=0.25)


# Leases.


def owned(store: MemoryStore, key: str, lease_until: float, machine: str = "elsewhere") -> None:
    """Makes the newest record of a key belong to a call on another machine."""
    record = store.records[key][-1]
    loop = loops_module.Loop.read(record)
    owner = loops_module.Owner(machine, 1, "1", "token")
    store.records[key][-1] = replace(loop, owner=owner, lease_until=lease_until).record(record.version + 1)


async def test_a_lease_holds_until_it_ends_or_until_its_process_on_this_machine_has_ended(
    store: MemoryStore, job: Job
) -> None:
    await job.ends("k", 2, fails)
    owned(store, "k", time.time() + 100)
    with pytest.raises(ps.KeyInUse, match="process 1 of another machine"):
        await job.run()
    owned(store, "k", time.time() - 1)
    assert await job.run() == WORDS
    await job.ends("here", 2, fails)
    # The machine and process id of the owner exist, but process 1 started at another time than the owner.
    owned(store, "here", time.time() + 100, loops_module.machine())
    assert await job.run("here") == WORDS


async def test_a_lease_is_renewed_while_an_iteration_takes_long(store: MemoryStore) -> None:
    gate = Gate()
    running = await Job(store, lease_seconds=0.06).begun("k", 2, lambda: gate.wait("word2"))
    versions: set[int] = set()
    while len(versions) < 4:
        versions.add(store.records["k"][-1].version)
        await asyncio.sleep(0.001)
    assert len(store.records["k"]) == 3
    gate.open()
    assert await running == WORDS


async def test_a_call_that_runs_here_keeps_its_key_when_the_clock_leaps(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    running = await job.begun("k", 2, lambda: gate.wait("word2"))
    monkeypatch.setattr(store_module, "time", SimpleNamespace(time=lambda: time.time() + 3600))
    with pytest.raises(ps.KeyInUse, match="under way in process"):
        await job.run()
    gate.open()
    assert await running == WORDS


async def test_a_lease_is_renewed_when_the_clock_was_put_back(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await Job(store, lease_seconds=0.06).begun("k", 2)
    behind = SimpleNamespace(time=lambda: time.time() - 3600)
    monkeypatch.setattr(store_module, "time", behind)
    before = store.records["k"][-1].version
    while store.records["k"][-1].version == before:
        await asyncio.sleep(0.001)
    assert loops_module.Loop.read(store.records["k"][-1]).lease_until < behind.time() + 100
    await stop(running)


async def test_a_call_whose_key_was_taken_over_ends(store: MemoryStore) -> None:
    running = await Job(store, lease_seconds=0.03).begun("k", 2)
    owned(store, "k", time.time() + 100)
    with pytest.raises(ps.KeyInUse, match="was taken over in process 1 of another machine"):
        await running
    assert loops_module.Loop.read(store.records["k"][-1]).owner is not None  # the other call is the owner


async def test_a_state_is_not_kept_over_that_of_a_call_that_has_taken_over(store: MemoryStore, job: Job) -> None:
    async def taken_over(key: str = "k") -> None:
        owned(store, key, time.time() + 100)

    job.in_turn = {2: taken_over}
    with pytest.raises(ps.KeyInUse, match="was taken over"):
        await job.run()
    assert (job.ran, store.records["k"][-1].step) == ([0, 1, 2], 2)

    @ps.node
    async def take_over(result: str) -> str:
        await taken_over("k2")
        return result

    job.in_turn = {}
    with pytest.raises(ps.KeyInUse, match="was taken over"):  # after its loop
        await engine.run((job.graph >> take_over)("q"), durable_key="k2")


# Storms, and stores that fail.


def test_a_call_that_is_cancelled_at_any_step_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, effort: int
) -> None:
    without_threads(monkeypatch)
    for seed in range(effort):
        store = MemoryStore()
        job, results = Job(store, last=3), 0
        for outcome in cancelled_at_every_step(job.run, seed=seed):
            assert not loops_module.active_calls
            kept = [loops_module.Loop.read(record) for record in store.records.get("k", ())]
            assert not kept or kept[-1].owner is None
            status = kept[-1].status if kept else "running"
            assert status == ("done" if outcome.error is None else "running")
            results += status == "done"
            step = kept[-1].step if kept and status == "running" else 0
            job.ran.clear()
            assert asyncio.run(job.run()) == "word0 word1 word2"
            assert job.ran == list(range(step, 3))
            store.records.clear()
        assert results >= 1


@pytest.mark.parametrize("fails_to_record", [False, True])
async def test_a_call_that_is_cancelled_while_its_outcome_is_recorded_has_a_result_if_it_was(
    fails_to_record: bool,
) -> None:
    class Recording(MemoryStore):
        async def store(self, key: str, record: ps.LoopRecord, /, *, expected_version: int) -> bool:
            if loops_module.Loop.read(record).status == "done":
                await gate.wait(key)
                if fails_to_record:
                    raise OSError("the disk is gone")
            return await super().store(key, record, expected_version=expected_version)

    async def call() -> None:
        results.append(await Job(store).run())
        await asyncio.Event().wait()

    store, gate, results = Recording(), Gate(), list[str]()
    task = asyncio.create_task(call())
    await gate.has()
    task.cancel()
    await asyncio.sleep(0)
    gate.open()
    assert await outcomes(task) == [asyncio.CancelledError]
    is_done = loops_module.Loop.read(store.records["k"][-1]).status == "done"
    assert (results, is_done) == (([], False) if fails_to_record else ([WORDS], True))


class Broken(MemoryStore):
    """Raises in one of its calls, and, if it `stays` broken, in all later calls."""

    def __init__(self, at: int, *, stays: bool) -> None:
        super().__init__()
        self.at = at
        self.stays = stays

    async def called(self, method: str) -> None:
        await super().called(method)
        number = len(self.calls) - 1
        if number == self.at or (self.stays and number > self.at):
            raise OSError("the disk is gone")


@pytest.mark.parametrize("stays", [False, True])
async def test_a_store_that_fails_ends_the_call_and_the_key_goes_on_when_it_works(stays: bool) -> None:
    whole = Broken(-1, stays=False)
    assert await Job(whole).run() == WORDS
    assert whole.calls[:3] == ["load", "store", "store"]
    for at in range(len(whole.calls)):
        store = Broken(at, stays=stays)
        job = Job(store)
        with pytest.raises(OSError, match="the disk is gone"):
            await job.run()
        store.at, store.stays = -1, False
        was_at = store.records["k"][-1].step if "k" in store.records else 0
        job.ran.clear()
        assert await job.run() == WORDS
        assert job.ran == list(range(was_at, TURNS))
        assert not loops_module.active_calls
    durable = ps.Durable(Broken(0, stays=True))
    for call in (durable.history("k"), durable.fork("k", 0, "new")):
        with pytest.raises(OSError, match="the disk is gone"):
            await call


# States.


async def test_a_state_that_cannot_be_stored_is_refused_with_its_path(store: MemoryStore) -> None:
    durable = ps.Durable(store)

    @ps.node
    async def body(state: dict[str, Any]) -> dict[str, Any]:
        return {"clients": [object()]}

    @ps.graph
    async def looped(first: Any) -> Any:
        return await ps.while_loop(ps.node(lambda state: len(state) < 3), body, first, durable=durable)

    with pytest.raises(ps.NotStorable, match=re.escape('state["clients"][0] is a ')):
        await engine.run(looped({}), durable_key="k")
    with pytest.raises(ps.NotStorable, match=re.escape("first[0] is a ")):
        await engine.run(looped([object()]), durable_key="k2")
    assert "k2" not in store.records


# History and forks.


async def test_a_fork_goes_on_from_a_state_and_leaves_the_other_key_alone(job: Job) -> None:
    durable = job.durable
    await job.run()
    await durable.fork("k", 2, "new")
    job.ran.clear()
    assert [state.step for state in await durable.history("new")] == [2]
    assert await job.run("new") == WORDS
    assert job.ran == [2, 3, 4]
    assert [state.step for state in await durable.history("k")] == [0, 1, 2, 3, 4, 5]
    assert [state.step for state in await durable.history("new")] == [2, 3, 4, 5]
    assert await durable.history("unknown") == []
    for key, step, new_key, told in (
        ("k", 4, "new", "a loop is kept under that key"), ("k", 6, "newer", "the history has 0, 1, 2, 3, 4, 5"),
        ("unknown", 0, "newer", "the history has none"), ("", 0, "a", "fork"), ("k", -1, "a", "fork"),
        ("k", 0, "", "fork"),
    ):  # fmt: skip
        with pytest.raises(ps.OptionsError, match=told):
            await durable.fork(key, step, new_key)


# Where a graph may contain durable loops.


async def test_a_call_has_one_durable_loop_that_runs_once(store: MemoryStore) -> None:
    durable = ps.Durable(store)

    @ps.node
    def is_low(value: int) -> bool:
        return value < 3

    async def loop(value: int) -> int:
        return await ps.while_loop(is_low, added, value, durable=durable)

    @ps.graph
    async def two(value: int) -> int:
        return await loop(await loop(value))

    @ps.graph
    async def each(values: list[int]) -> list[int]:
        return await ps.map_each(loop, values)

    @ps.graph
    async def inner(value: int) -> int:
        return await ps.while_loop(is_low, loop, value)

    @ps.graph
    async def perhaps(value: int) -> int:
        return await ps.cond(is_low(value), loop, added, value)

    with pytest.raises(ps.PlanError, match="graph 'two' has a durable loop already, at "):
        engine.plan(two)
    with pytest.raises(ps.PlanError, match="in the body of a map_each, where it would run several times under one key"):
        engine.plan(each)
    with pytest.raises(ps.PlanError, match="in the body of a while_loop"):
        engine.plan(inner)
    assert await engine.run(perhaps(1), durable_key="k") == 3
    assert await engine.run(perhaps(7), durable_key="k") == 8  # takes the branch without the durable loop


async def test_what_durable_takes() -> None:
    with pytest.raises(ps.OptionsError, match="a LoopStore, or the path"):
        ps.Durable(7)  # type: ignore[arg-type]
    with pytest.raises(ps.OptionsError, match="lease_seconds"):
        ps.Durable(MemoryStore(), lease_seconds=0)
    with pytest.raises(ps.OptionsError, match=r"durable='loops\.db'"):
        ps.while_loop(lambda value: True, one_by_one, 0, durable="loops.db")  # type: ignore[arg-type]


# SQLite.


async def test_the_file_of_sqlite_is_in_a_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ps.OptionsError, match="there is no folder"):
        ps.Durable(tmp_path / "nowhere" / "loops.db")
    mounts = tmp_path / "mountinfo"
    spaced = str(tmp_path).replace(" ", "\\040")
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {spaced}/on\\040nfs rw shared:1 - nfs4 host:/x rw\n")
    monkeypatch.setattr(_machine, "_MOUNTS", mounts)
    (tmp_path / "on nfs" / "deep").mkdir(parents=True)
    ps.Durable(tmp_path / "loops.db")
    with pytest.raises(ps.OptionsError, match=r"network file system \(nfs4\).*use a folder on a disk of this machine"):
        ps.Durable(tmp_path / "on nfs" / "deep" / "loops.db")


async def test_sqlite_keeps_nothing_open_after_the_loop_and_several_loops_share_a_file(tmp_path: Path) -> None:
    job = Job(tmp_path / "loops.db")
    await job.ends("k", 2, fails)
    assert await asyncio.to_thread(lambda: asyncio.run(job.run())) == WORDS
    assert job.ran == [0, 1, 2, 2, 3, 4]


@contextmanager
def locked(path: Path, how: str = "IMMEDIATE") -> Iterator[None]:
    """Holds the lock for writing, as a shell with an open transaction does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"BEGIN {how}")
        yield
        other.execute("ROLLBACK")


@pytest.mark.parametrize("at", ["begin", "state", "result"])
async def test_a_deadline_holds_while_another_program_has_locked_the_file(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.SQLStore, "_give_up_after_seconds", 3600)
    path = tmp_path / "loops.db"
    job = Job(path)
    assert await job.run("other") == WORDS
    with ExitStack() as stack:

        async def lock() -> None:
            stack.enter_context(locked(path))

        job.in_turn = {{"state": 2, "result": TURNS - 1}.get(at, TURNS): lock}
        if at == "begin":
            await lock()
        with pytest.raises(ps.DeadlineExceeded, match=r"within 0\.25 s"):
            await job.run(timeout_seconds=0.25)
    job.in_turn = {}
    assert await job.run() == WORDS  # within this process, the key is free at once


async def test_calls_wait_for_a_lock_and_do_not_hinder_others(tmp_path: Path) -> None:
    path = tmp_path / "loops.db"
    job = Job(ps.SQLiteStore(path))
    assert await job.run("other") == WORDS
    with locked(path):
        waiting = asyncio.create_task(job.run())
        for _ in range(20):
            assert len(await job.durable.history("other")) == TURNS + 1
        assert not waiting.done()
    assert await waiting == WORDS


async def test_an_error_of_sqlite_names_key_file_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loops.db"
    job = Job(path)
    assert await job.run() == WORDS
    monkeypatch.setattr(store_module.SQLStore, "_give_up_after_seconds", 0.05)
    locks = pytest.raises(ps.CheckpointError, match=r"key 'k' in .*loops\.db.* locked .*end its transaction")
    with locked(path), locks:
        await job.run()

    async def long() -> str:
        return "x" * 100_000

    job.in_turn = {0: long}
    store = store_module._store
    for pragma, message, number in (
        ("max_page_count=1", "the disk is full; make room", errno.ENOSPC),
        ("query_only=1", "cannot be written; give this process the right", errno.EROFS),
    ):

        def fails(connection: sqlite3.Connection, *args: Any, pragma: str = pragma) -> bool:
            connection.execute(f"PRAGMA {pragma}")
            return store(connection, *args)

        monkeypatch.setattr(store_module, "_store", fails)
        with pytest.raises(ps.CheckpointError, match=message) as failed:
            await job.run()
        assert failed.value.errno == number
        assert isinstance(failed.value.__cause__, sqlite3.Error)

    monkeypatch.setattr(store_module, "_store", store)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = path.read_bytes()
    (tmp_path / "damaged.db").write_bytes(content[:4096] + b"!" * len(content[4096:]))
    (tmp_path / "text.db").write_text("no database" * 1000)
    (tmp_path / "folder.db").mkdir()
    for name, message in (
        ("damaged", r"key 'k' in .*damaged\.db: the file is damaged; restore a copy"),
        ("text", r"key 'k' in .*text\.db: the file is not an SQLite database; choose"),
        ("folder", r"folder\.db: the file cannot be opened; check the permissions"),
    ):
        with pytest.raises(ps.CheckpointError, match=message):
            await ps.Durable(tmp_path / f"{name}.db").history("k")


async def test_a_sqlite_store_expects_versions(tmp_path: Path) -> None:
    store = ps.SQLiteStore(tmp_path / "loops.db")
    assert await store.load("k") is None
    assert await store.store("k", ps.LoopRecord(1, 0, b"a"), expected_version=0)
    assert not await store.store("k", ps.LoopRecord(1, 0, b"b"), expected_version=0)
    assert await store.store("k", ps.LoopRecord(2, 1, b"b"), expected_version=1)
    assert await store.store("other", ps.LoopRecord(1, 0, b"o"), expected_version=0)
    assert await store.store("k", ps.LoopRecord(3, 1, b"c"), expected_version=2)
    assert await store.load("k") == ps.LoopRecord(3, 1, b"c")
    assert await store.history("k") == [ps.LoopRecord(1, 0, b"a"), ps.LoopRecord(3, 1, b"c")]
    assert await store.store("k", ps.LoopRecord(4, 0, b"d"), expected_version=3)
    assert await store.history("k") == [ps.LoopRecord(4, 0, b"d")]
