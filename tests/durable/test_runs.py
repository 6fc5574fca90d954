"""Runs under a key: they are joined, refused to other calls, and go on only with code that fits."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock._errors import OtherCall, OtherGraph, RunCancelled
from penstock.durable.runs import Durable
from penstock.durable.sqlite import MemoryStore, SQLiteStore
from penstock.durable.store import Store
from penstock.testing import run_virtual

ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@ps.node
async def fetch(name: str) -> str:
    ran.append(f"fetch {name}")
    await asyncio.sleep(1)
    return f"page of {name}"


@ps.node(effectful=True)
async def pay(text: str) -> str:
    ran.append(f"pay {text}")
    await asyncio.sleep(1)
    return f"paid {text}"


@ps.node
async def hang(text: str) -> str:
    ran.append(f"hang {text}")
    if len([one for one in ran if one.startswith("hang")]) < 2:
        await asyncio.get_running_loop().create_future()
    return text


def first_life(store: Store, call: Any, seconds: float = 100) -> None:
    """Runs a call for some time, and leaves it then."""

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await Durable(store).run(call, key="order-1")

    run_virtual(main)
    ran.append("---")


def next_life(store: Store, call: Any) -> Any:
    async def main() -> Any:
        return await Durable(store).run(call, key="order-1")

    return run_virtual(main, timeout_seconds=10_000)


@ps.graph
async def shopping(name: str) -> str:
    return await hang(await pay(await fetch(name)))


def test_a_run_goes_on_in_another_process_behind_what_it_has_kept() -> None:
    store = MemoryStore()
    first_life(store, shopping("x"))
    assert next_life(store, shopping("x")) == "paid page of x"
    assert ran == ["fetch x", "pay page of x", "hang paid page of x", "---", "hang paid page of x"]
    assert next_life(store, shopping("x")) == "paid page of x"  # which is kept
    assert len(ran) == 5


def test_callers_of_a_key_share_its_run_and_other_calls_are_refused() -> None:
    async def main() -> None:
        durable = Durable(MemoryStore())
        call = ps.graph(pay)("x")
        assert await asyncio.gather(*[durable.run(call, key="k") for _ in range(3)]) == ["paid x"] * 3
        with pytest.raises(ps.OtherArguments, match="key 'k' belongs to a call of 'pay' with other arguments"):
            await durable.run(ps.graph(pay)("y"), key="k")
        with pytest.raises(ps.OtherArguments, match="key 'k' belongs to a call of graph 'pay', not of 'shopping'"):
            await durable.run(shopping("x"), key="k")

    run_virtual(main)
    assert ran == ["pay x"]


def test_a_caller_who_comes_while_the_run_of_another_who_left_unwinds_waits_for_its_end() -> None:
    @ps.node(effectful=True)
    async def transfer(text: str) -> str:
        ran.append("begins")
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(1)
            ran.append("ends")
        return text

    async def main() -> None:
        durable, call = Durable(MemoryStore()), ps.graph(transfer)("x")
        for _ in range(2):
            impatient = asyncio.create_task(durable.run(call, key="k"))
            await asyncio.sleep(5)
            impatient.cancel()
            await asyncio.sleep(0)
        assert await durable.run(call, key="k") == "x"

    run_virtual(main)
    assert ran == ["begins", "ends"] * (len(ran) // 2)


class Broken(MemoryStore):
    """Raises an error of its own from some methods."""

    fails = ""

    async def write(self, *given: Any) -> Any:
        if self.fails == "write":
            raise RuntimeError("can't start new thread")
        return await super().write(*given)

    async def changes(self) -> Any:
        if self.fails == "changes":
            self.fails = ""
            raise RuntimeError("the connection is gone")
        async for changed in super().changes():
            yield changed


def test_any_error_of_a_store_ends_the_run_here() -> None:
    async def main() -> None:
        store = Broken()
        store.fails = "write"
        with pytest.raises(ps.CheckpointError, match="the store has failed: RuntimeError"):
            await Durable(store).run(ps.graph(pay)("x"), key="k")
        store.fails = ""
        assert await Durable(store).run(ps.graph(pay)("x"), key="k") == "paid x"

    run_virtual(main)


def test_an_answer_is_heard_though_the_store_could_not_tell_for_a_time() -> None:
    @ps.node
    async def ask(text: str) -> Any:
        return await ps.interrupt(text)

    async def main() -> None:
        store = Broken()
        store.fails = "changes"
        durable = Durable(store)
        running = asyncio.create_task(durable.run(ps.graph(ask)("sure?"), key="k"))
        await asyncio.sleep(1)
        asked = await durable.questions("k")
        await Durable(store).answer("k", "yes", token=next(iter(asked)))
        assert await running == "yes"

    run_virtual(main)


async def test_two_processes_share_a_run_of_a_file(tmp_path: Any) -> None:
    one, other = (Durable(SQLiteStore(tmp_path / "runs.db")) for _ in range(2))
    results = await asyncio.gather(one.run(ps.graph(pay)("x"), key="k"), other.run(ps.graph(pay)("x"), key="k"))
    assert [*results] == ["paid x", "paid x"]
    assert ran == ["pay x"]


def test_a_run_that_has_failed_gives_its_error() -> None:
    @ps.node
    async def fails(text: str) -> str:
        ran.append(text)
        raise ValueError(f"no {text}")

    store = MemoryStore()
    for _ in range(2):
        with pytest.raises(ValueError, match="no card"):
            next_life(store, ps.graph(fails)("card"))
    assert ran == ["card"]


def test_an_error_that_a_handler_has_caught_is_kept_with_its_next_call() -> None:
    @ps.node
    async def card(amount: int) -> str:
        ran.append("card")
        raise ValueError("declined")

    @ps.node
    async def charge(amount: int) -> str:
        try:
            return await ps.call(card, amount)
        except ValueError:
            return await ps.call(hang, await ps.call(pay, f"invoice {amount}"))

    store, call = MemoryStore(), ps.graph(charge)(3)
    first_life(store, call)
    assert next_life(store, call) == "paid invoice 3"
    assert ran == ["card", "pay invoice 3", "hang paid invoice 3", "---", "hang paid invoice 3"]


def test_a_step_that_is_not_kept_is_left_out_if_all_its_readers_are_kept() -> None:
    @ps.node(pure=True)
    async def embed(text: str) -> str:
        ran.append("embed")
        return text.upper()

    @ps.node
    async def choose(text: str) -> str:
        ran.append("choose")
        return text

    @ps.graph
    async def embedded(text: str) -> str:
        return await hang(await choose(await embed(text)))

    store = MemoryStore()
    first_life(store, embedded("x"))
    assert next_life(store, embedded("x")) == "X"
    assert ran == ["embed", "choose", "hang X", "---", "hang X"]


def as_before() -> Any:
    @ps.graph
    async def ordering(first: str, second: str) -> str:
        return await hang(await fetch(first))

    return ordering("x", "y")


def with_a_fetch_before() -> Any:
    @ps.graph
    async def ordering(first: str, second: str) -> str:
        before = await fetch(second)
        return joined(before, await hang(await fetch(first)))

    return ordering("x", "y")


def without_fetch() -> Any:
    @ps.graph
    async def ordering(first: str, second: str) -> str:
        return await hang(first)

    return ordering("x", "y")


@ps.node
def joined(one: str, other: str) -> str:
    return one + other


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (without_fetch, r"has kept step 'fetch\{.*\}', and graph 'ordering' has no step 'fetch' \(it has hang\)"),
        (with_a_fetch_before, r"has kept step 'fetch\{.*\}', and .* has a step 'fetch' that takes other arguments"),
    ],
)
def test_code_that_does_not_fit_is_refused_before_anything_runs(other: Callable[[], Any], told: str) -> None:
    store = MemoryStore()
    first_life(store, as_before())
    with pytest.raises(OtherGraph, match=told):
        next_life(store, other())
    assert ran[-1] == "---"
    assert next_life(store, as_before()) == "page of x"


def test_a_handler_that_makes_another_call_is_refused_before_the_call() -> None:
    chosen = ["a"]

    @ps.node
    async def chooses(text: str) -> str:
        found = await ps.call(fetch, chosen[0])
        return await ps.call(hang, await ps.call(pay, found))

    store, call = MemoryStore(), ps.graph(chooses)("x")
    first_life(store, call)
    chosen[0] = "b"
    with pytest.raises(OtherCall, match=r"the handler calls chooses/fetch\(.*\)~0, but .* called chooses/fetch\("):
        next_life(store, call)
    assert ran[-1] == "---"
    chosen[0] = "a"
    assert next_life(store, call) == "paid page of a"


def test_a_handler_that_returns_without_a_kept_call_is_refused() -> None:
    stays = [True]

    @ps.node
    async def leaves(text: str) -> str:
        if not stays[0]:
            return "left"
        return await ps.call(hang, await ps.call(fetch, text))

    store, call = MemoryStore(), ps.graph(leaves)("x")
    first_life(store, call)
    stays[0] = False
    with pytest.raises(OtherCall, match=r"the handler returns \(leaves\), but .* called leaves/fetch\("):
        next_life(store, call)


def test_a_result_that_cannot_be_stored_fails_its_step_by_name() -> None:
    @ps.node
    async def gives_a_lock(text: str) -> Any:
        return [asyncio.Lock()]

    with pytest.raises(ps.NotStorable, match=r"the result of gives_a_lock\[0\]"):
        next_life(MemoryStore(), ps.graph(gives_a_lock)("x"))


def test_eight_parallel_steps_share_a_commit() -> None:
    class Counting(MemoryStore):
        writes = 0

        async def write(self, batches: Any, /) -> Any:
            self.writes += 1
            return await super().write(batches)

    @ps.graph
    async def eight(names: list[str]) -> list[str]:
        return await ps.map_each(fetch, names)

    store = Counting()
    assert len(next_life(store, eight([*"abcdefgh"]))) == 8
    assert store.writes <= 3


@ps.node
async def approved(text: str) -> list[Any]:
    return [*await asyncio.gather(ps.interrupt({"pay": text}), ps.call(fetch, text))]


@ps.graph
async def two_questions(names: list[str]) -> list[Any]:
    answers = await ps.map_each(approved, names)
    return [answers, await ps.interrupt("sure?")]


def test_questions_are_answered_by_any_process_while_the_run_goes_on_and_after_a_crash() -> None:
    async def main() -> Any:
        store = MemoryStore()
        one, other = Durable(store), Durable(store)
        running = asyncio.ensure_future(one.run(two_questions(["x", "y"]), key="k"))
        await asyncio.sleep(10)
        assert ran == ["fetch x", "fetch y"]  # a question ends nothing
        asked = await other.questions("k")
        assert sorted(question["pay"] for question in asked.values()) == ["x", "y"]
        for token, question in asked.items():
            await other.answer("k", f"{question['pay']}?", token=token)
            await other.answer("k", f"{question['pay']}?", token=token)  # the same once more
            with pytest.raises(ps.StaleAnswer):
                await other.answer("k", "another one", token=token)
        await asyncio.sleep(1)
        [(token, question)] = (await other.questions("k")).items()
        assert question == "sure?"
        running.cancel()
        await asyncio.wait([running])
        await other.answer("k", True, token=token)
        return await other.run(two_questions(["x", "y"]), key="k")

    assert run_virtual(main, timeout_seconds=1000) == [[["x?", "page of x"], ["y?", "page of y"]], True]
    assert ran == ["fetch x", "fetch y"]


def test_another_process_cancels_a_run_and_lets_it_go_on() -> None:
    async def main() -> Any:
        store = MemoryStore()
        one, other = Durable(store), Durable(store)
        running = asyncio.ensure_future(one.run(shopping("x"), key="k"))
        await asyncio.sleep(10)
        assert ran[-1] == "hang paid page of x"
        began = asyncio.get_running_loop().time()
        await other.cancel("k")
        with pytest.raises(RunCancelled):
            await running
        assert asyncio.get_running_loop().time() - began < 1
        with pytest.raises(RunCancelled):
            await one.run(shopping("x"), key="k")
        await other.resume("k")
        return await one.run(shopping("x"), key="k")

    assert run_virtual(main, timeout_seconds=1000) == "paid page of x"
    assert ran == ["fetch x", "pay page of x", "hang paid page of x", "hang paid page of x"]


def test_what_an_other_call_names_can_be_forgotten() -> None:
    chosen = ["a"]

    @ps.node
    async def chooses(text: str) -> str:
        return await ps.call(hang, await ps.call(fetch, chosen[0]))

    async def main() -> Any:
        durable = Durable(store)
        with pytest.raises(OtherCall) as refused:
            await durable.run(call, key="order-1")
        path = str(refused.value).partition("forget='")[2].partition("'")[0]
        await durable.resume("order-1", forget=path)
        return await durable.run(call, key="order-1")

    store, call = MemoryStore(), ps.graph(chooses)("x")
    first_life(store, call)
    chosen[0] = "b"
    assert run_virtual(main, timeout_seconds=10_000) == "page of b"
    assert ran == ["fetch a", "hang page of a", "---", "fetch b", "hang page of b"]
