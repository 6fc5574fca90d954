"""Questions to a person: how a call ends with one, which graphs cannot ask, and how answers find their questions."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from penstock.saving import loops as loops_module
from tests.kit import Gate, cancelled_at_every_step, values_of
from tests.saving.agents import MemoryStore, without_threads
from tests.tracing import Tracing

Body = Callable[[list[Any]], Coroutine[Any, Any, list[Any]]]


def looped(store: ps.LoopStore | Path, body: Any, last: int = 1) -> "ps.Graph[[], list[Any]]":
    """Returns a graph whose loop runs `body` until its list has `last` items."""
    durable = ps.Durable(store)
    goes_on = ps.node(lambda state: len(state) < last)

    @ps.graph
    async def asking() -> list[Any]:
        return await ps.while_loop(goes_on, body, [], durable=durable)

    return asking


def asks_about(question: Callable[[list[Any]], Any]) -> Any:
    """Returns a node that asks a question, and adds the answer to its list."""

    @ps.node
    async def asks(state: list[Any]) -> list[Any]:
        return [*state, await ps.interrupt(question(state))]

    return asks


asks = asks_about(lambda state: "?")


async def asked(graph: "ps.Graph[[], list[Any]]", key: str = "k", **answer: Any) -> Any:
    with pytest.raises(ps.Interrupted) as caught:
        await engine.run(graph, durable_key=key, **answer)
    assert caught.value.key == key
    return caught.value.question


async def answered(graph: "ps.Graph[[], list[Any]]", answer: Any, key: str = "k") -> list[Any]:
    return await engine.run(graph, durable_key=key, answer=answer)


@pytest.mark.parametrize("answer", [("yes", None), None], ids=str)
async def test_a_question_ends_the_call_and_its_answer_goes_on(store: MemoryStore, answer: object) -> None:
    graph = looped(store, asks_about(lambda state: {"pay": 120}))
    with pytest.raises(ps.OptionsError, match="'k' waits for no answer; run the key without answer="):
        await answered(graph, "yes")
    with pytest.raises(ps.Interrupted, match=r"'k' waits for the answer to {'pay': 120}: run it again") as caught:
        await engine.run(graph, durable_key="k")
    assert (caught.value.key, caught.value.question) == ("k", {"pay": 120})
    assert await asked(graph) == {"pay": 120}
    assert await answered(graph, answer) == [answer]
    with pytest.raises(ps.OptionsError, match="waits for no answer"):
        await answered(graph, "yes")
    assert await asked(graph) == {"pay": 120}  # a new loop


async def test_a_body_asks_without_a_node(store: MemoryStore) -> None:
    async def body(state: list[Any]) -> list[Any]:
        return await keep(state, await ps.interrupt(ps.apply(lambda state: f"what is {len(state)}?", state)))

    @ps.node
    async def keep(state: list[Any], answer: Any) -> list[Any]:
        return [*state, answer]

    graph = looped(store, body, last=2)
    assert "interrupt" in str(graph)
    assert await asked(graph) == "what is 0?"
    assert await asked(graph, answer="a") == "what is 1?"
    assert await answered(graph, "b") == ["a", "b"]


@pytest.mark.parametrize("how", ["retry", "fallback", "failover", "hedge", "except", "swallowed", "group", "timeout"])
async def test_nothing_in_a_handler_takes_a_question_for_a_failure(store: MemoryStore, how: str) -> None:
    attempts: list[int] = []

    async def ask(state: list[Any]) -> list[Any]:
        attempts.append(ps.current().attempt)
        if how == "group":
            async with asyncio.TaskGroup() as group:
                task = group.create_task(wait_for_answer())
            return [task.result()]
        with suppress(*swallows):
            return [await ps.interrupt("?")]
        return ["swallowed"]

    async def wait_for_answer() -> Any:
        return await ps.interrupt("?")

    swallows = {"except": [Exception], "swallowed": [BaseException]}.get(how, [])
    options: dict[str, dict[str, Any]] = {
        "failover": {"failover": ps.node(lambda state: ["failover"])},
        "hedge": {"hedge": ps.Hedge(after_seconds=30)},
        "retry": {"retry": ps.Retry(attempts=3, retry_on=(Exception,))},
        "fallback": {"fallback": lambda error: ["fallback"]},
        "timeout": {"timeout_seconds": 30.0, "concurrency": 1},
    }
    graph = looped(store, ps.node(**options.get(how, {}))(ask))
    assert await asked(graph) == "?"
    assert await answered(graph, "yes") == ["yes"]
    assert attempts == [1, 1]


async def test_a_failover_and_a_second_attempt_may_ask(store: MemoryStore) -> None:
    attempts = 0

    @ps.node(failover=asks)
    async def fails(state: list[Any]) -> list[Any]:
        raise OSError

    @ps.node(hedge=ps.Hedge(after_seconds=0.001, max_share=1))
    async def hedged(state: list[Any]) -> list[Any]:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(60 if attempts % 2 else 0)
        return [await ps.interrupt("?")]

    for node in (fails, hedged):
        graph = looped(store, node)
        assert await asked(graph) == "?"
        assert await answered(graph, "yes") == ["yes"]


async def test_a_node_that_keeps_its_results_asks_nobody(store: MemoryStore) -> None:
    keeps = asks.with_policy(cache=ps.Cache(max_bytes=1_000, key=len))
    with pytest.raises(ps.PlanError, match=r"ps.interrupt\('\?'\) was called in a node that keeps its results"):
        await engine.run(looped(store, keeps), durable_key="k")


async def test_a_handler_that_fails_of_a_question_fails(store: MemoryStore) -> None:
    @ps.node
    async def body(state: list[Any]) -> list[Any]:
        try:
            return [await ps.interrupt("?")]
        except BaseException:  # noqa: BLE001 - that is what is tested
            raise ValueError("no") from None

    graph = looped(store, body)
    with pytest.raises(ValueError, match="no"):
        await engine.run(graph, durable_key="k")
    with pytest.raises(ps.OptionsError, match="waits for no answer"):
        await answered(graph, "yes")


async def test_answers_are_found_by_question_and_order(store: MemoryStore) -> None:
    ran: list[int] = []

    @ps.node
    async def body(state: list[Any]) -> list[Any]:
        ran.append(len(state))
        first = await ps.interrupt("same?")
        other = await ps.interrupt("other?")
        return [*state, (first, other, await ps.interrupt("same?"))]

    graph = looped(store, body, last=2)
    assert await asked(graph) == "same?"
    assert await asked(graph, answer=1) == "other?"
    assert await asked(graph, answer=2) == "same?"
    assert await asked(graph, answer=3) == "same?"  # the next iteration asks anew: an answer holds for one iteration
    assert ran == [0, 0, 0, 0, 1]
    assert await asked(graph, answer=4) == "other?"
    assert await asked(graph, answer=5) == "same?"
    assert await answered(graph, 6) == [(1, 2, 3), (4, 5, 6)]


async def test_of_two_questions_at_once_the_first_ends_the_call_and_siblings_are_cancelled(store: MemoryStore) -> None:
    gate, asking = Gate(), set[str]()

    def asks_together(name: str) -> Any:
        @ps.node(concurrency=1)
        async def ask(state: list[Any]) -> str:
            asking.add(name)
            while len(asking) < 3:
                await asyncio.sleep(0)
            return f"{name}={await ps.interrupt(name)}"

        return ask

    left, right = asks_together("left"), asks_together("right")

    @ps.node(concurrency=1)
    async def sibling(state: list[Any]) -> str:
        asking.add("sibling")
        return await gate.wait("sibling")

    @ps.node
    async def keep(*parts: str) -> list[Any]:
        return [*parts]

    async def body(state: list[Any]) -> list[Any]:
        return await keep(await left(state), await right(state), await sibling(state))

    graph = looped(store, body)
    first = await asked(graph)
    asking.clear()
    second = await asked(graph, answer="A")
    assert {first, second} == {"left", "right"}
    gate.open()
    answers = {first: "A", second: "B"}
    assert await answered(graph, "B") == [f"left={answers['left']}", f"right={answers['right']}", "sibling"]
    assert gate.cancelled == 2 * ["sibling"]


async def test_a_question_in_cond_and_in_a_loop_inside_is_of_the_iteration(store: MemoryStore) -> None:
    ask = asks_about(lambda state: f"{len(state)}?")
    below_two = ps.node(lambda state: len(state) < 2)

    async def body(state: list[Any]) -> list[Any]:
        asked_twice = await ps.while_loop(below_two, ask, state)
        return await ps.cond(below_two(asked_twice), ask, ask, asked_twice)

    graph = looped(store, body)
    assert await asked(graph) == "0?"
    assert await asked(graph, answer="a") == "1?"
    assert await asked(graph, answer="b") == "2?"
    assert await answered(graph, "c") == ["a", "b", "c"]


async def test_questions_are_refused_where_answers_could_not_find_them(store: MemoryStore) -> None:
    durable = ps.Durable(store)
    asks_outside = ps.graph(asks)

    @ps.node
    async def total(values: AsyncIterator[Any]) -> list[Any]:
        return [value async for value in values]

    @ps.node
    async def ask_in_a_call(state: list[Any]) -> list[Any]:
        return [await engine.run(asks_outside([]))]

    @ps.node
    async def asking_predicate(state: list[Any]) -> bool:
        return bool(await ps.interrupt("?"))

    @ps.node
    async def wait(state: list[Any]) -> list[Any]:
        await asyncio.Event().wait()
        return state

    async def each(state: list[Any]) -> list[Any]:
        return await ps.map_each(asks, [[], []], on_error="raise")

    async def each_of_stream(state: list[Any]) -> list[Any]:
        return await total(ps.map_each(asks, one_by_one([[]])))

    @ps.graph
    async def beside() -> Any:
        return await ps.while_loop(ps.node(lambda state: state == []), wait, [], durable=durable), await asks([])

    @ps.graph
    async def in_predicate() -> Any:
        return await ps.while_loop(asking_predicate, wait, [], durable=durable)

    of_items = "inside of a map_each, whose items could not tell their answers apart"
    outside = "was called outside of the body of a durable loop"
    graphs = (
        (looped(store, each), of_items), (looped(store, each_of_stream), of_items), (beside, outside),
        (looped(store, ask_in_a_call), "inside of a call that a node makes, which could not tell"),
        (in_predicate, outside),
    )  # fmt: skip
    for number, (graph, told) in enumerate(graphs):
        with pytest.raises(ps.PlanError, match=told):
            await engine.run(graph, durable_key=f"k{number}")
    with pytest.raises(ps.PlanError, match=outside):
        await engine.run(asks_outside([]))
    with pytest.raises(ps.PlanError, match=outside):
        await ps.interrupt("?")


def at_once(state: list[Any]) -> list[Any]:
    return [ps.interrupt("?")]


@ps.node
async def in_a_thread_of_its_own(state: list[Any]) -> list[Any]:
    return [await asyncio.to_thread(ps.interrupt, "?")]


@pytest.mark.parametrize(
    "body",
    [
        ps.node(at_once), ps.node(runs_on="thread")(at_once), ps.node(runs_on="process")(at_once),
        in_a_thread_of_its_own,
    ],
    ids=["def", "thread", "process", "thread of its own"],
)  # fmt: skip
async def test_a_question_is_refused_where_nobody_can_wait(store: MemoryStore, body: Any) -> None:
    with pytest.raises(ps.PlanError, match=r"a thread, a process or a plain `def`.*ask in an `async def`"):
        await engine.run(looped(store, body), durable_key="k")


async def test_an_answer_with_a_token_is_to_its_question_alone(store: MemoryStore) -> None:
    asking = looped(store, asks, last=2)
    other_question = pytest.raises(ps.OptionsError, match="answer to '\\?', and this answer is for another")

    async def token(answer: Any = ...) -> str:
        with pytest.raises(ps.Interrupted) as asked:
            await answered(asking, answer)
        return asked.value.token

    for _ in range(2):  # for two loops of one key
        first = await token()
        assert await token() == first
        with other_question:
            await answered(asking, ps.Answer("no", "other"))
        with pytest.raises(ps.NotStorable, match=r"answer is a builtins\.ellipsis"):
            await answered(asking, ps.Answer(..., first))
        second = await token(ps.Answer("one", first))
        with other_question:
            await answered(asking, ps.Answer("one", first))
        assert await token() == second
        assert await answered(asking, ps.Answer("two", second)) == ["one", "two"]
        with pytest.raises(ps.OptionsError, match="waits for no answer"):
            await answered(asking, ps.Answer("two", second))
        assert second != first != await token()
        assert await token("any") == await token()
        assert await answered(asking, "any") == ["any", "any"]


async def test_what_cannot_be_stored_is_no_question_and_no_answer(store: MemoryStore) -> None:
    with pytest.raises(ps.NotStorable, match=r'question\["who"\] is a builtins.object'):
        await engine.run(looped(store, asks_about(lambda state: {"who": object()})), durable_key="k")
    graph = looped(store, asks)
    assert await asked(graph, "k2") == "?"
    with pytest.raises(ps.NotStorable, match=r"answer\[0\] is a "):
        await engine.run(graph, durable_key="k2", answer=[object()])
    assert await engine.run(graph, durable_key="k2", answer=["yes"]) == [["yes"]]


async def test_an_answer_that_is_not_asked_for_is_logged(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = [True]

    @ps.node
    async def body(state: list[Any]) -> list[Any]:
        return [await ps.interrupt("?") if asks else "without"]

    graph = looped(store, body)
    await asked(graph)
    asks.clear()
    assert await answered(graph, "yes") == ["without"]
    assert "durable.answer_not_asked_for" in capsys.readouterr().out


# An interrupt is an outcome of its own.


async def test_an_interrupted_call_is_counted_as_that_and_leaves_its_place(store: MemoryStore) -> None:
    graph = looped(store, asks)

    @ps.graph
    async def tokens() -> AsyncIterator[Any]:
        return one_by_one(await graph())

    async with engine.deploy(graph, tokens, max_in_flight=1) as service:
        with pytest.raises(ps.Interrupted):
            await service.run(graph(), durable_key="k")
        statistics = service.statistics()
        assert (statistics.interrupted, statistics.failed, statistics.completed) == (1, 0, 0)
        assert "0 expired, 1 interrupted" in str(statistics)
        assert statistics.admission.in_flight == 0
        assert sum(actor.failed for actor in statistics.actors) == 0
        assert service.state == "ready"
        assert await service.run(graph(), durable_key="k", answer="yes") == ["yes"]
        stream = service.stream(tokens(), durable_key="s")
        with pytest.raises(ps.Interrupted, match="'s' waits for the answer to '\\?'"):
            await values_of(stream)
        assert (stream.statistics().interrupted, stream.statistics().failed) == (1, 0)
        assert "1 interrupted" in " ".join(str(stream.statistics()).split())
        assert await values_of(service.stream(tokens(), durable_key="s", answer="yes")) == ["yes"]
        statistics = service.statistics()
        assert (statistics.interrupted, statistics.failed, statistics.completed) == (2, 0, 2)
        assert statistics.since(statistics).interrupted == 0
    with pytest.raises(ps.Interrupted, match="'e'"):
        await values_of(engine.stream(tokens(), durable_key="e"))


@ps.node
async def one_by_one(values: list[Any]) -> AsyncIterator[Any]:
    for value in values:
        yield value


async def test_the_spans_of_an_interrupted_call_say_so(store: MemoryStore, tracing: Tracing) -> None:
    graph = looped(store, asks)
    await asked(graph)
    outcomes = {span.name: (span.attributes or {}).get("penstock.outcome") for span in tracing.spans()}
    assert set(outcomes.values()) == {"done", "interrupted"}
    assert [name for name, outcome in outcomes.items() if outcome == "interrupted"]
    assert all(span.status.is_unset for span in tracing.spans())


async def test_a_call_that_a_handler_makes_raises_the_question_of_its_own_loop(store: MemoryStore) -> None:
    inner = looped(store, asks)

    @ps.node
    async def run_inner(state: list[Any]) -> list[Any]:
        try:
            return await engine.run(inner, durable_key="inner")
        except ps.Interrupted as interrupted:
            answer = await ps.interrupt(interrupted.question)
            return await engine.run(inner, durable_key="inner", answer=answer)

    outer = looped(store, run_inner)
    assert await asked(outer, "outer") == "?"
    assert await engine.run(outer, durable_key="outer", answer="yes") == ["yes"]


# Storms.


def test_a_call_that_is_cancelled_at_any_step_still_asks_and_takes_its_answer(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    graph = looped(store, asks, last=2)

    async def main() -> str:
        try:
            await engine.run(graph, durable_key="k")
        except ps.Interrupted as interrupted:
            return str(interrupted.question)
        raise AssertionError

    async def to_its_end() -> list[Any]:
        while True:
            try:
                return await engine.run(graph, durable_key="k", **answers)
            except ps.Interrupted as interrupted:
                answers["answer"] = f"yes to {interrupted.question}"

    for outcome in cancelled_at_every_step(main):
        answers: dict[str, Any] = {}
        kept = [loops_module.Loop.read(record) for record in store.records.get("k", ())]
        if outcome.error is None:
            assert outcome.result == "?"
            assert kept[-1] == replace(kept[-1], status="interrupted", owner=None)
            assert kept[-1].question is not None
        else:
            assert not kept or kept[-1].owner is None
        assert asyncio.run(to_its_end()) == 2 * ["yes to ?"]
        store.records.clear()
