"""Durable loops in one process: keys, states, outcomes, leases, history, and stores that fail."""

import asyncio
import errno
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import engine
from penstock.saving import loops as loops_module
from penstock.saving import store as store_module
from penstock.testing import cancel_at_every_step
from tests.saving.agents import TURNS, State, agent, next_state

WORDS = " ".join(f"word{turn}" for turn in range(TURNS))


class MemoryStore(ps.LoopStore):
    """Keeps loops in memory; each method waits one turn of the loop before and after it has done its work."""

    def __init__(self) -> None:
        self.records: dict[str, list[ps.LoopRecord]] = {}
        self.calls: list[str] = []

    async def called(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(0)

    async def load(self, key: str, /) -> ps.LoopRecord | None:
        await self.called("load")
        return self.records[key][-1] if key in self.records else None

    async def store(self, key: str, record: ps.LoopRecord, /, *, expected_version: int) -> bool:
        await self.called("store")
        kept = self.records.get(key, [])
        if (kept[-1].version if kept else 0) != expected_version:
            return False
        self.records[key] = [*(one for one in kept if one.step < record.step), record]
        await asyncio.sleep(0)
        return True

    async def history(self, key: str, /) -> Sequence[ps.LoopRecord]:
        await self.called("history")
        return list(self.records.get(key, ()))


class Turns:
    """The body of an agent. It notes the turns that ran, and fails or waits in some turns."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.in_turn: dict[int, Callable[[], Awaitable[object]]] = {}

    async def __call__(self, state: State) -> State:
        self.ran.append(state.turn)
        word: object = f"word{state.turn}"
        if state.turn in self.in_turn:
            word = await self.in_turn[state.turn]() or word
        return next_state(state, str(word))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def turns() -> Turns:
    return Turns()


def make(store: ps.LoopStore | Path, turns: Turns, **options: Any) -> "ps.Graph[[str], str]":
    async def turn(state: State) -> State:
        return await turns(state)

    return agent(ps.Durable(store, **options), turn)


async def fails() -> None:
    raise ValueError("the model is down")


async def waits() -> None:
    await asyncio.Event().wait()


# Keys.


async def test_a_loop_has_its_result_and_is_kept(store: MemoryStore, turns: Turns) -> None:
    graph = make(store, turns)
    assert await engine.run(graph("q"), durable_key="k") == WORDS
    assert turns.ran == list(range(TURNS))
    history = await ps.Durable(store).history("k")
    assert [state.step for state in history] == list(range(TURNS + 1))
    assert [state.value.turn for state in history] == list(range(TURNS + 1))
    assert history[2].value == State(2, ("word0", "word1"), {0: "word0", 1: "word1"})
    assert [state.kept_at for state in history] == sorted(state.kept_at for state in history)
    assert abs(history[0].kept_at - time.time()) < 60


async def test_a_call_that_has_failed_goes_on_and_one_with_a_result_begins_anew(
    store: MemoryStore, turns: Turns
) -> None:
    graph = make(store, turns)
    turns.in_turn[3] = fails
    with pytest.raises(ValueError, match="down"):
        await engine.run(graph("q"), durable_key="k")
    turns.in_turn.clear()
    assert await engine.run(graph("q"), durable_key="k") == WORDS
    assert turns.ran == [0, 1, 2, 3, 3, 4]
    turns.ran.clear()
    assert await engine.run(graph("another question"), durable_key="k") == WORDS
    assert turns.ran == list(range(TURNS))
    assert len(await ps.Durable(store).history("k")) == TURNS + 1


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


async def test_a_durable_graph_needs_a_key_wherever_it_is_called(store: MemoryStore, turns: Turns) -> None:
    graph = make(store, turns)

    tokens = graph >> one_by_one
    needs = pytest.raises(ps.OptionsError, match=r"has a durable loop, which is kept under a key: .*key=")
    with needs:
        await engine.run(graph("q"))
    with needs:
        await engine.memory(graph("q"))
    with needs:
        async with engine.stream([graph("q")]) as results:
            await anext(results)
    with needs:
        async with engine.stream(tokens("q")) as values:
            await anext(values)
    async with engine.deploy(graph, tokens) as service:
        with needs:
            await service("q")
        with needs:
            await service.run(graph("q"))
        with needs:
            await service.map([graph("q")])
        with needs:
            async with service.stream(tokens("q")) as values:
                await anext(values)
        assert service.statistics().admission.in_flight == 0
    with pytest.raises(ps.OptionsError, match=r"engine.run\(graph\(...\), durable_key=...\)"):
        await graph("q")
    assert (turns.ran, store.calls) == ([], [])


@ps.node
async def one_by_one(text: str) -> AsyncIterator[str]:
    for word in text.split():
        yield word


@ps.graph
async def plain(question: str) -> str:
    return question


@ps.graph
async def plain_tokens(question: str) -> AsyncIterator[str]:
    return one_by_one(question)


async def test_a_graph_that_is_not_durable_takes_neither_key_nor_answer(store: MemoryStore, turns: Turns) -> None:
    given: list[dict[str, Any]] = [{"durable_key": "k"}, {"answer": None}]
    for options in given:
        refused = pytest.raises(ps.OptionsError, match="for a graph with a durable loop, and graph 'plain")
        with refused:
            await engine.run(plain("q"), **options)
        with refused:
            async with engine.stream(plain_tokens("q"), **options) as values:
                await anext(values)
        with pytest.raises(ps.OptionsError, match=r"for one call, not for many: use engine\.run; .* to engine\.deploy"):
            engine.stream([plain("q")], **options)
        async with engine.deploy(plain, plain_tokens) as service:
            with refused:
                await service.run(plain("q"), **options)
            with refused:
                async with service.stream(plain_tokens("q"), **options) as values:
                    await anext(values)
            with pytest.raises(ps.OptionsError, match=r"for one call, not for many: use service\.run"):
                service.stream([plain("q")], **options)
    with pytest.raises(ps.OptionsError, match="key="):
        await engine.run(make(store, turns)("q"), answer="yes")
    with pytest.raises(ps.OptionsError, match="a text that is not empty"):
        await engine.run(make(store, turns)("q"), durable_key="")
    for options in ({"durable_key": "a\ud800"}, {"durable_key": "\udc80", "answer": "yes"}):
        with pytest.raises(ps.OptionsError, match=r"key='.*can be written as UTF-8"):
            await engine.run(make(store, turns)("q"), **options)
    durable = ps.Durable(store)
    for refused in (durable.history("\ud800"), durable.fork("\ud800", 0, "b"), durable.fork("a", 0, "\ud800")):
        with pytest.raises(ps.OptionsError, match="can be written as UTF-8"):
            await refused


async def test_an_unfinished_key_is_for_the_same_graph_and_the_same_arguments(store: MemoryStore, turns: Turns) -> None:
    graph, durable = make(store, turns), ps.Durable(store)

    @ps.graph
    async def other(question: str) -> State:
        return await ps.while_loop(ps.node(lambda state: state.turn < 2), turn, State(0, (), {}), durable=durable)

    async def turn(state: State) -> State:
        return await ps.node(turns)(state)

    turns.in_turn[3] = fails
    with pytest.raises(ValueError, match="down"):
        await engine.run(graph("q"), durable_key="k")
    with pytest.raises(ps.OptionsError, match=r"unfinished call with other arguments: question differs"):
        await engine.run(graph("r"), durable_key="k")
    with pytest.raises(ps.OptionsError, match=r"unfinished call of graph 'answered', not of 'other'"):
        await engine.run(other("q"), durable_key="k")
    with pytest.raises(ps.OptionsError, match=r"waits for no answer"):
        await engine.run(graph("q"), durable_key="k", answer="yes")
    with pytest.raises(ps.OptionsError, match=r"waits for no answer"):
        await engine.run(graph("q"), durable_key="never used", answer="yes")


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


async def test_a_key_is_run_by_one_call_at_a_time(store: MemoryStore, turns: Turns) -> None:
    graph = make(store, turns)
    turns.in_turn[1] = waits
    first = asyncio.create_task(engine.run(graph("q"), durable_key="k"))
    while 1 not in turns.ran:
        await asyncio.sleep(0)
    for call in (engine.run(graph("q"), durable_key="k"), engine.run(graph("other"), durable_key="k")):
        with pytest.raises(ps.KeyInUse, match=r"'k' is under way in process \d+, whose lease lasts \d+ s"):
            await call
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    turns.in_turn.clear()
    assert await engine.run(graph("q"), durable_key="k") == WORDS
    assert turns.ran == [0, 1, 1, 2, 3, 4]


async def test_many_calls_of_one_key_at_once_run_it_once(store: MemoryStore, turns: Turns) -> None:
    graph = make(store, turns)
    outcomes = await asyncio.gather(
        *(engine.run(graph("q"), durable_key="k") for _ in range(10)), return_exceptions=True
    )
    assert outcomes.count(WORDS) == 1
    assert sum(isinstance(outcome, ps.KeyInUse) for outcome in outcomes) == 9
    assert turns.ran == list(range(TURNS))


# Services and streams.


async def test_services_and_streams_take_keys(store: MemoryStore, turns: Turns) -> None:
    graph = make(store, turns)

    @ps.graph
    async def tokens(question: str) -> AsyncIterator[str]:
        return one_by_one(await graph(question))

    turns.in_turn[2] = fails
    async with engine.deploy(graph, tokens) as service:
        with pytest.raises(ValueError, match="down"):
            await service.run(graph("q"), durable_key="a")
        with pytest.raises(ValueError, match="down"):
            async with service.stream(tokens("q"), durable_key="b") as values:
                await anext(values)
        with pytest.raises(ValueError, match="down"):
            async with engine.stream(tokens("q"), durable_key="c") as values:
                await anext(values)
        turns.in_turn.clear()
        turns.ran.clear()
        assert await service.run(graph("q"), durable_key="a") == WORDS
        async with service.stream(tokens("q"), durable_key="b") as values:
            assert [word async for word in values] == WORDS.split()
        async with engine.stream(tokens("q"), durable_key="c") as values:
            assert [word async for word in values] == WORDS.split()
        assert turns.ran == 3 * [2, 3, 4]
        async with service.stream(tokens("q"), durable_key="b") as values:
            await anext(values)
        assert turns.ran == [*3 * [2, 3, 4], 0, 1, 2, 3, 4]  # the call began anew, and its reader left before its end
        async with service.stream(tokens("q"), durable_key="b") as values:
            assert [word async for word in values] == WORDS.split()
        assert turns.ran == [*3 * [2, 3, 4], 0, 1, 2, 3, 4]
        assert service.statistics().completed == 3


async def test_the_deadline_of_a_call_covers_what_its_store_takes(turns: Turns) -> None:
    class Slow(MemoryStore):
        async def load(self, key: str, /) -> ps.LoopRecord | None:
            await asyncio.sleep(3600)
            return None

    with pytest.raises(ps.DeadlineExceeded, match=r"'k' was not taken within 0\.01 s"):
        await engine.run(make(Slow(), turns)("q"), durable_key="k", timeout_seconds=0.01)


# Leases.


def owned(store: MemoryStore, key: str, lease_until: float, machine: str = "elsewhere") -> None:
    """Makes the newest record of a key belong to a call on another machine."""
    record = store.records[key][-1]
    loop = loops_module.Loop.read(record)
    owner = loops_module.Owner(machine, 1, "1", "token")
    store.records[key][-1] = replace(loop, owner=owner, lease_until=lease_until).record(record.version + 1)


async def unfinished(store: MemoryStore, turns: Turns, **options: Any) -> "ps.Graph[[str], str]":
    graph = make(store, turns, **options)
    turns.in_turn[2] = fails
    with pytest.raises(ValueError, match="down"):
        await engine.run(graph("q"), durable_key="k")
    turns.in_turn.clear()
    return graph


async def test_a_lease_of_another_machine_holds_until_it_ends(store: MemoryStore, turns: Turns) -> None:
    graph = await unfinished(store, turns)
    owned(store, "k", time.time() + 100)
    with pytest.raises(ps.KeyInUse, match="process 1 of another machine"):
        await engine.run(graph("q"), durable_key="k")
    owned(store, "k", time.time() - 1)
    assert await engine.run(graph("q"), durable_key="k") == WORDS


async def test_the_end_of_a_process_of_this_machine_ends_its_lease(store: MemoryStore, turns: Turns) -> None:
    graph = await unfinished(store, turns)
    # The machine and process id of the owner exist, but process 1 started at another time than the owner.
    owned(store, "k", time.time() + 100, loops_module.machine())
    assert await engine.run(graph("q"), durable_key="k") == WORDS


async def running_in_turn_2(graph: Any, turns: Turns) -> tuple["asyncio.Task[Any]", asyncio.Event]:
    """Begin a call whose second iteration waits for the event."""
    going = asyncio.Event()

    async def wait() -> None:
        await going.wait()

    turns.in_turn[2] = wait
    running = asyncio.create_task(engine.run(graph("q"), durable_key="k"))
    while 2 not in turns.ran:
        await asyncio.sleep(0)
    return running, going


async def test_a_lease_is_renewed_while_an_iteration_takes_long(store: MemoryStore, turns: Turns) -> None:
    graph = make(store, turns, lease_seconds=0.06)
    running, going = await running_in_turn_2(graph, turns)
    versions: set[int] = set()
    while len(versions) < 4:  # A dictionary that notes removals: no result may go while another thread may ask for it.
        versions.add(store.records["k"][-1].version)
        await asyncio.sleep(0.001)
    assert len(store.records["k"]) == 3
    going.set()
    assert await running == WORDS


async def test_a_call_that_runs_here_keeps_its_key_when_the_clock_leaps(
    store: MemoryStore, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make(store, turns)
    running, going = await running_in_turn_2(graph, turns)
    monkeypatch.setattr(store_module, "time", SimpleNamespace(time=lambda: time.time() + 3600))
    with pytest.raises(ps.KeyInUse, match="under way in process"):
        await engine.run(graph("q"), durable_key="k")
    going.set()
    assert await running == WORDS


async def test_a_lease_is_renewed_when_the_clock_was_put_back(
    store: MemoryStore, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make(store, turns, lease_seconds=0.06)
    turns.in_turn[2] = waits
    running = asyncio.create_task(engine.run(graph("q"), durable_key="k"))
    while 2 not in turns.ran:
        await asyncio.sleep(0)
    behind = SimpleNamespace(time=lambda: time.time() - 3600)
    monkeypatch.setattr(store_module, "time", behind)
    before = store.records["k"][-1].version
    while store.records["k"][-1].version == before:
        await asyncio.sleep(0.001)
    assert loops_module.Loop.read(store.records["k"][-1]).lease_until < behind.time() + 100
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_call_whose_key_was_taken_over_ends(store: MemoryStore, turns: Turns) -> None:
    graph = make(store, turns, lease_seconds=0.03)
    turns.in_turn[2] = waits
    running = asyncio.create_task(engine.run(graph("q"), durable_key="k"))
    while 2 not in turns.ran:
        await asyncio.sleep(0)
    owned(store, "k", time.time() + 100)
    with pytest.raises(ps.KeyInUse, match="was taken over in process 1 of another machine"):
        await running
    assert loops_module.Loop.read(store.records["k"][-1]).owner is not None  # the other call is the owner


async def test_a_state_is_not_kept_over_that_of_a_call_that_has_taken_over(store: MemoryStore, turns: Turns) -> None:
    graph = make(store, turns)

    async def taken_over(key: str = "k") -> None:
        owned(store, key, time.time() + 100)

    turns.in_turn[2] = taken_over
    with pytest.raises(ps.KeyInUse, match="was taken over"):
        await engine.run(graph("q"), durable_key="k")
    assert (turns.ran, store.records["k"][-1].step) == ([0, 1, 2], 2)

    turns.in_turn = {}

    @ps.node
    async def take_over(state: State) -> State:
        await taken_over("k2")
        return state

    durable = ps.Durable(store)

    @ps.graph
    async def taken_after_its_loop() -> State:
        body = ps.node(turns.__call__)
        return await take_over(
            await ps.while_loop(ps.node(lambda state: state.turn < 1), body, State(0, (), {}), durable=durable)
        )

    with pytest.raises(ps.KeyInUse, match="was taken over"):
        await engine.run(taken_after_its_loop, durable_key="k2")


# Storms, and stores that fail.


def test_a_call_that_is_cancelled_at_any_step_goes_on_where_it_was(effort: int) -> None:
    for seed in range(2 * effort):
        store, turns = MemoryStore(), Turns()
        graph = make(store, turns)
        results = 0
        for outcome in cancel_at_every_step(partial(_finished, graph), seed=seed, timeout_seconds=None):
            assert not outcome.tasks_left
            assert not outcome.loop_errors
            assert not loops_module.active_calls
            kept = [loops_module.Loop.read(record) for record in store.records.get("k", ())]
            step, status = (kept[-1].step, kept[-1].status) if kept else (0, "running")
            assert not kept or kept[-1].owner is None
            if outcome.error is None:
                results += 1
                assert status == "done"
                step = 0
            else:
                assert isinstance(outcome.error, asyncio.CancelledError)
                assert status == "running"  # a call whose record says "done" has returned its result
            turns.ran.clear()
            assert asyncio.run(_finished(graph)) == WORDS
            assert turns.ran == list(range(step, TURNS))
            store.records.clear()
            turns.ran.clear()
        assert results >= 1


@pytest.mark.parametrize("fails_to_record", [False, True])
async def test_a_call_that_is_cancelled_while_its_outcome_is_recorded_has_a_result_if_it_was(
    fails_to_record: bool,
) -> None:
    class Recording(MemoryStore):
        async def store(self, key: str, record: ps.LoopRecord, /, *, expected_version: int) -> bool:
            if loops_module.Loop.read(record).status == "done":
                recording.set()
                await go_on.wait()
                if fails_to_record:
                    raise OSError("the disk is gone")
            return await super().store(key, record, expected_version=expected_version)

    async def call() -> None:
        results.append(await engine.run(make(store, Turns())("q"), durable_key="k"))
        await asyncio.Event().wait()

    store, recording, go_on, results = Recording(), asyncio.Event(), asyncio.Event(), list[str]()
    task = asyncio.create_task(call())
    await recording.wait()
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    is_done = loops_module.Loop.read(store.records["k"][-1]).status == "done"
    assert (results, is_done) == (([], False) if fails_to_record else ([WORDS], True))


async def _finished(graph: "ps.Graph[[str], str]") -> str:
    return await engine.run(graph("q"), durable_key="k")


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
    assert await engine.run(make(whole, Turns())("q"), durable_key="k") == WORDS
    assert whole.calls[:3] == ["load", "store", "store"]
    for at in range(len(whole.calls)):
        store, turns = Broken(at, stays=stays), Turns()
        graph = make(store, turns)
        with pytest.raises(OSError, match="the disk is gone"):
            await engine.run(graph("q"), durable_key="k")
        store.at, store.stays = -1, False
        was_at = store.records["k"][-1].step if "k" in store.records else 0
        turns.ran.clear()
        assert await engine.run(graph("q"), durable_key="k") == WORDS
        assert turns.ran == list(range(was_at, TURNS))
        assert not loops_module.active_calls
    broken = Broken(0, stays=True)
    durable = ps.Durable(broken)
    for call in (durable.history("k"), durable.fork("k", 0, "new")):
        with pytest.raises(OSError, match="the disk is gone"):
            await call


# States.


class Client:
    pass


async def test_a_state_that_cannot_be_stored_is_refused_with_its_path(store: MemoryStore) -> None:
    durable = ps.Durable(store)

    @ps.node
    async def body(state: dict[str, Any]) -> dict[str, Any]:
        return {"clients": [Client()]}

    @ps.graph
    async def looped(first: Any) -> Any:
        return await ps.while_loop(ps.node(lambda state: len(state) < 3), body, first, durable=durable)

    with pytest.raises(ps.NotStorable, match=re.escape('state["clients"][0] is a ')):
        await engine.run(looped({}), durable_key="k")
    with pytest.raises(ps.NotStorable, match=re.escape("first[0] is a ")):
        await engine.run(looped([Client()]), durable_key="k2")
    assert "k2" not in store.records


async def test_arrays_come_back(tmp_path: Path) -> None:
    durable, ran = ps.Durable(tmp_path / "loops.db"), list[int]()

    @ps.node
    async def body(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        ran.append(int(state["sum"][0]))
        if ran == [0, 1]:
            raise ValueError("crash")
        return {"sum": state["sum"] + 1, "transposed": np.arange(6.0).reshape(2, 3).T}

    @ps.graph
    async def looped() -> dict[str, np.ndarray]:
        first = {"sum": np.zeros(2, np.int32)}
        return await ps.while_loop(ps.node(lambda state: state["sum"][0] < 3), body, first, durable=durable)

    with pytest.raises(ValueError, match="crash"):
        await engine.run(looped, durable_key="k")
    result = await engine.run(looped, durable_key="k")
    assert ran == [0, 1, 1, 2]
    assert result["sum"].dtype == np.int32
    assert result["sum"].tolist() == [3, 3]
    assert (await durable.history("k"))[1].value["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]


# History and forks.


async def test_a_fork_goes_on_from_a_state_and_leaves_the_other_key_alone(store: MemoryStore, turns: Turns) -> None:
    graph, durable = make(store, turns), ps.Durable(store)
    await engine.run(graph("q"), durable_key="k")
    await durable.fork("k", 2, "new")
    turns.ran.clear()
    assert [state.step for state in await durable.history("new")] == [2]
    assert await engine.run(graph("q"), durable_key="new") == WORDS
    assert turns.ran == [2, 3, 4]
    assert [state.step for state in await durable.history("k")] == [0, 1, 2, 3, 4, 5]
    assert [state.step for state in await durable.history("new")] == [2, 3, 4, 5]
    with pytest.raises(ps.OptionsError, match="a loop is kept under that key"):
        await durable.fork("k", 4, "new")
    with pytest.raises(ps.OptionsError, match="the history has 0, 1, 2, 3, 4, 5"):
        await durable.fork("k", 6, "newer")
    with pytest.raises(ps.OptionsError, match="the history has none"):
        await durable.fork("unknown", 0, "newer")
    assert await durable.history("unknown") == []
    for key, step, new_key in (("", 0, "a"), ("k", -1, "a"), ("k", 0, "")):
        with pytest.raises(ps.OptionsError, match="fork"):
            await durable.fork(key, step, new_key)


# Where a graph may contain durable loops.


async def test_a_call_has_one_durable_loop_that_runs_once(store: MemoryStore) -> None:
    durable = ps.Durable(store)

    @ps.node
    async def up(value: int) -> int:
        return value + 1

    @ps.node
    def is_low(value: int) -> bool:
        return value < 3

    async def loop(value: int) -> int:
        return await ps.while_loop(is_low, up, value, durable=durable)

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
        return await ps.cond(is_low(value), loop, up, value)

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
    monkeypatch.setattr(store_module, "_MOUNTS", mounts)
    (tmp_path / "on nfs" / "deep").mkdir(parents=True)
    ps.Durable(tmp_path / "loops.db")
    with pytest.raises(ps.OptionsError, match=r"network file system \(nfs4\).*use a folder on a disk of this machine"):
        ps.Durable(tmp_path / "on nfs" / "deep" / "loops.db")


async def test_sqlite_keeps_nothing_open_after_the_loop_and_several_loops_share_a_file(tmp_path: Path) -> None:
    turns = Turns()
    graph = make(tmp_path / "loops.db", turns)
    turns.in_turn[2] = fails

    def in_another_loop() -> str:
        return asyncio.run(_finished(graph))

    with pytest.raises(ValueError, match="down"):
        await _finished(graph)
    turns.in_turn.clear()
    assert await asyncio.to_thread(in_another_loop) == WORDS
    assert turns.ran == [0, 1, 2, 2, 3, 4]


@contextmanager
def locked(path: Path, how: str = "IMMEDIATE") -> Iterator[None]:
    """Holds the lock for writing, as a shell with an open transaction does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"BEGIN {how}")
        yield
        other.execute("ROLLBACK")


@pytest.mark.parametrize("at", ["begin", "state", "result"])
async def test_a_deadline_holds_while_another_program_has_locked_the_file(
    tmp_path: Path, turns: Turns, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.SQLStore, "_give_up_after_seconds", 30)
    path = tmp_path / "loops.db"
    graph = make(path, turns)
    assert await engine.run(graph("q"), durable_key="other") == WORDS
    began = time.monotonic()
    with ExitStack() as stack:

        async def lock() -> None:
            stack.enter_context(locked(path))

        turns.in_turn = {{"state": 2, "result": TURNS - 1}.get(at, TURNS): lock}
        if at == "begin":
            await lock()
        with pytest.raises(ps.DeadlineExceeded, match=r"within 0\.25 s"):
            await engine.run(graph("q"), durable_key="k", timeout_seconds=0.25)
        assert time.monotonic() - began < 20
    turns.in_turn = {}
    assert await engine.run(graph("q"), durable_key="k") == WORDS  # within this process, the key is free at once


async def test_calls_wait_for_a_lock_and_do_not_hinder_others(tmp_path: Path, turns: Turns) -> None:
    path = tmp_path / "loops.db"
    store = ps.SQLiteStore(path)
    durable, graph = ps.Durable(store), make(store, turns)
    assert await engine.run(graph("q"), durable_key="other") == WORDS
    with locked(path):
        waiting = asyncio.create_task(engine.run(graph("q"), durable_key="k"))
        for _ in range(20):
            assert len(await durable.history("other")) == TURNS + 1
        assert not waiting.done()
    assert await waiting == WORDS


async def test_an_error_of_sqlite_names_key_file_and_remedy(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "loops.db"
    graph = make(path, turns)
    assert await engine.run(graph("q"), durable_key="k") == WORDS
    monkeypatch.setattr(store_module.SQLStore, "_give_up_after_seconds", 0.05)
    with (
        locked(path),
        pytest.raises(ps.CheckpointError, match=r"key 'k' in .*loops\.db.* locked .*end its transaction"),
    ):
        await engine.run(graph("q"), durable_key="k")

    kept = store_module._store

    def store_in_little_room(connection: sqlite3.Connection, *args: Any) -> bool:
        connection.execute("PRAGMA max_page_count=1")
        return kept(connection, *args)

    def store_nowhere(connection: sqlite3.Connection, *args: Any) -> bool:
        connection.execute("PRAGMA query_only=1")
        return kept(connection, *args)

    async def long() -> str:
        return "x" * 100_000

    turns.in_turn[0] = long
    for store, message, number in (
        (store_in_little_room, "the disk is full; make room", errno.ENOSPC),
        (store_nowhere, "cannot be written; give this process the right", errno.EROFS),
    ):
        monkeypatch.setattr(store_module, "_store", store)
        with pytest.raises(ps.CheckpointError, match=message) as failed:
            await engine.run(make(path, turns)("q"), durable_key="k")
        assert failed.value.errno == number
        assert isinstance(failed.value.__cause__, sqlite3.Error)
        monkeypatch.setattr(store_module, "_store", kept)

    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    content[4096:] = b"!" * len(content[4096:])
    (tmp_path / "damaged.db").write_bytes(content)
    with pytest.raises(ps.CheckpointError, match=r"key 'k' in .*damaged\.db: the file is damaged; restore a copy"):
        await ps.Durable(tmp_path / "damaged.db").history("k")
    (tmp_path / "text.db").write_text("no database" * 1000)
    with pytest.raises(ps.CheckpointError, match=r"key 'k' in .*text\.db: the file is not an SQLite database; choose"):
        await engine.run(make(tmp_path / "text.db", turns)("q"), durable_key="k")
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(ps.CheckpointError, match=r"folder\.db: the file cannot be opened; check the permissions"):
        await engine.run(make(tmp_path / "folder.db", turns)("q"), durable_key="k")


async def test_a_call_that_has_waited_for_its_key_shows_the_timeout_that_it_was_given(turns: Turns) -> None:
    class Slow(MemoryStore):
        async def load(self, key: str, /) -> ps.LoopRecord | None:
            await asyncio.sleep(0.05)
            return await super().load(key)

    turns.in_turn[1] = waits
    with pytest.raises(ps.DeadlineExceeded, match=r"did not finish within 0\.25 s"):
        await engine.run(make(Slow(), turns)("q"), durable_key="k", timeout_seconds=0.25)
    graph = make(Slow(), turns)
    async with engine.deploy(graph) as service:
        with pytest.raises(ps.DeadlineExceeded, match=r"did not finish within 0\.25 s"):
            await service.run(graph("q"), durable_key="k", timeout_seconds=0.25)


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
