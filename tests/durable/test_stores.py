"""Every store of durable runs: what it must do, in random sequences beside a model, and where several processes meet.

A store of one's own is tested by one more line in `STORES`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

import penstock as ps
from penstock.durable import sql
from penstock.durable.postgres import PostgresStore
from penstock.durable.sqlite import MemoryStore, SQLiteStore
from penstock.durable.store import Answer, Batch, Cancel, Entry, Event, NewRun, Owner, Question, Store
from tests.devices.processes import run_program
from tests.durable.model import Play
from tests.postgres import Server, needs_postgres, postgres_server

# By the name of a store: how many random sequences are played on it, and how long they are.
STORES = {"memory": (60, 60), "sqlite": (3, 50), "postgres": (3, 50)}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=[pytest.param(name, marks=[needs_postgres] if name == "postgres" else []) for name in STORES])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_store(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], Callable[[], Store]]:
    """Returns a function that makes a place for runs, and returns a function that opens it, as each process does."""
    numbers = iter(range(1000))

    def new() -> Callable[[], Store]:
        if name == "memory":
            store = MemoryStore()
            return lambda: store
        if name == "sqlite":
            path = tmp_path / f"{next(numbers)}.db"
            return lambda: SQLiteStore(path)
        dsn = request.getfixturevalue("server").new_database()
        return lambda: PostgresStore(dsn, max_connections=2)

    return new


@pytest.fixture
def open_store(new_store: Callable[[], Callable[[], Store]]) -> Callable[[], Store]:
    return new_store()


def new_run(key: str = "k", **options: object) -> NewRun:
    return NewRun(**{"key": key, "graph": "g", "plan": "p", "entries": [], **options})  # type: ignore[arg-type]


async def test_a_store_does_what_the_model_does(name: str, new_store: Callable[[], Callable[[], Store]]) -> None:
    sequences, length = STORES[name]
    for seed in range(sequences):
        play = Play(new_store()(), seed)
        try:
            for turn in range(length):
                await play.step()
                if turn % 10 == 9:
                    await play.compare()
        except BaseException as error:
            error.add_note(f"seed {seed}: " + "\n".join(play.told[-12:]))
            raise


async def test_of_many_that_ask_at_once_one_gets_a_run(open_store: Callable[[], Store]) -> None:
    stores, owner = [open_store() for _ in range(4)], Owner()
    begun = await asyncio.gather(
        *(store.begin(new_run(f"k{number}", thread=f"t{number % 3}")) for number in range(12) for store in stores)
    )
    assert len({run.run for run in begun}) == 12
    assert Counter((run.thread, run.turn) for run in begun) == {(f"t{a}", b): 4 for a in range(3) for b in (1, 2, 3, 4)}
    for turn in (1, 2, 3, 4):  # of each thread, the earliest that has not ended
        claimed = await asyncio.gather(*(store.claim(["g"], owner.name, 30, 2) for store in stores))
        runs = [run for found in claimed for run in found]
        assert sorted((run.thread, run.turn) for run in runs) == [("t0", turn), ("t1", turn), ("t2", turn)]
        await stores[0].write([Batch(run=run.run, epoch=run.epoch, state="finished") for run in runs])
    assert await stores[1].claim(["g"], owner.name, 30, 9) == ()


async def test_one_answer_is_taken_of_many(open_store: Callable[[], Store]) -> None:
    stores, owner = [open_store() for _ in range(4)], Owner()
    run = await stores[0].begin(new_run(owner=owner.name))
    asked = [Question("token", "ask", b"?"), Question("other", "ask", b"?")]
    await stores[0].write([Batch(run=run.run, epoch=1, questions=asked, state="asking")])
    answers = [f"answer {number}".encode() for number in range(8)]
    after = await asyncio.gather(
        *(stores[number % 4].change("k", Answer("token", answer)) for number, answer in enumerate(answers))
    )
    assert {one.questions[-1].answer for one in after if one is not None} <= set(answers)
    assert len({one.questions[-1].answer for one in after if one is not None}) == 1
    assert {one.state for one in after if one is not None} == {"queued"}
    (open_question,) = (await stores[1].list())[0].questions
    assert open_question.token == "other"


async def test_a_worker_whose_process_has_died_loses_its_lease_at_once(open_store: Callable[[], Store]) -> None:
    died = run_program("from penstock.durable.store import Owner\nprint(Owner().name)").strip()
    store, owner = open_store(), Owner()
    for key, name in (("died", died), ("elsewhere", f"x{died}"), ("here", owner.name)):
        await store.begin(new_run(key, owner=name, lease_seconds=1000))
    assert [run.key for run in await store.claim(["g"], owner.name, 1000, 9)] == ["died"]
    del owner  # a worker of this process that nobody has any more
    assert [run.key for run in await store.claim(["g"], Owner().name, 1000, 9)] == ["died", "here"]


async def test_changes_by_another_process_are_heard(open_store: Callable[[], Store]) -> None:
    store, other, owner = open_store(), open_store(), Owner()
    changes = store.changes()
    run = await other.begin(new_run(owner=owner.name))

    async def heard() -> None:
        async for runs in changes:
            if runs is None or run.run in runs:
                return

    async with asyncio.timeout(60), aclosing(changes):
        await heard()
        for batch in (
            Batch(run=run.run, epoch=1, events=[Event(1, 1, b"event")]),
            Batch(run=run.run, epoch=1, questions=[Question("token", "ask", b"?")]),
            Batch(run=run.run, epoch=1, state="asking"),
        ):
            hearing = asyncio.ensure_future(heard())
            await asyncio.sleep(0)
            await other.write([batch])
            await hearing
        for change in (Answer("token", b"yes"), Cancel()):
            hearing = asyncio.ensure_future(heard())
            await asyncio.sleep(0)
            await other.change("k", change)
            await hearing


@pytest.mark.parametrize("few", [2, 500])
async def test_runs_are_listed(open_store: Callable[[], Store], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "_FEW", few)
    store, owner = open_store(), Owner()
    keys = [f"{kind}-{number}" for number in range(6) for kind in ("a", "a\U0010ffff", "ä", "b%")]
    for number, key in enumerate(keys):
        await store.begin(new_run(key, graph="gh"[number % 2], thread="t" if number % 3 else None))
    found, before = list[str](), None
    while page := await store.list(before=before, limit=5):
        found += [run.key for run in page]
        before = page[-1].changed_at, page[-1].key
    assert sorted(found) == sorted(keys)
    assert found == [run.key for run in sorted(await store.list(), key=lambda run: (-run.changed_at,))]
    for prefix in ("a", "a-", "a\U0010ffff", "ä", "b%", "b_", "\U0010ffff"):
        listed = [run.key for run in await store.list(prefix=prefix)]
        assert sorted(listed) == sorted(key for key in keys if key.startswith(prefix))
    assert len(await store.list(graph="g", state="queued", thread="t")) == 8
    await store.claim(["h"], owner.name, 30, 3)
    assert [len(await store.list(state=state)) for state in ("running", "queued", "failed")] == [3, 21, 0]


async def test_any_number_of_entries_is_loaded(open_store: Callable[[], Store]) -> None:
    store, owner = open_store(), Owner()
    run = await store.begin(new_run(owner=owner.name))
    entries = [Entry(seq, f"map[{seq}]", "result", 0, 0.0, b"v") for seq in range(1, 2001)]
    await store.write([Batch(run=run.run, epoch=1, entries=entries)])
    assert await store.load(run.run) == entries
    for some in (range(2, 5000, 3), range(100, 110), [], [7000]):
        assert [entry.seq for entry in await store.load(run.run, some)] == [seq for seq in some if seq <= 2000]


async def test_keys_are_text_of_at_most_512_characters_without_nul(open_store: Callable[[], Store]) -> None:
    store = open_store()
    for key in ("", "a\0b", "x" * 513, "\ud800"):
        with pytest.raises(ps.OptionsError, match="text of 1 to 512 characters, without NUL"):
            await store.begin(new_run(key))
        with pytest.raises(ps.OptionsError, match="thread="):
            await store.begin(new_run(thread=key))
    longest = "\U0001f600" * 512
    assert (await store.begin(new_run(longest, thread=longest))).key == longest


async def test_a_store_outlasts_its_event_loop(name: str, open_store: Callable[[], Store]) -> None:
    store = open_store()

    async def begin() -> int:
        return (await store.begin(new_run())).run

    await begin()
    if name != "memory":
        assert await asyncio.to_thread(asyncio.run, begin()) == (await begin())
