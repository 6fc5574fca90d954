"""Failover: another node takes over, as a branch with its own policy, places and statistics."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS, Gate, outcomes


class Down(Exception):
    pass


@ps.node(concurrency=2)
async def backup(question: str) -> str:
    await asyncio.sleep(0)
    return f"backup: {question}"


@ps.node(failover=backup)
async def primary(question: str) -> str:
    raise Down(question)


ask = ps.graph(primary)


async def test_another_node_takes_over_after_the_last_attempt_and_has_a_policy_of_its_own() -> None:
    attempts: list[tuple[str, int]] = []

    @ps.node(retry=ps.Retry(3))
    async def flaky(question: str) -> str:
        attempts.append(("flaky", ps.current().attempt))
        if ps.current().attempt < 3:
            raise Down
        return "flaky"

    @ps.node(retry=ps.Retry(2), failover=flaky)
    async def twice(question: str) -> str:
        if question == "fine":
            return question
        attempts.append(("twice", ps.current().attempt))
        raise Down

    assert await engine.run(ps.graph(twice)("fine")) == "fine"
    assert attempts == []
    assert await engine.run(ps.graph(twice)("why")) == "flaky"
    assert attempts == [("twice", 1), ("twice", 2), ("flaky", 1), ("flaky", 2), ("flaky", 3)]


async def test_it_has_statistics_of_its_own() -> None:
    async with engine.deploy(ask) as service:
        await asyncio.gather(*map(service, "12345"))
        actors = {actor.node: actor for actor in service.statistics().actors}
    assert actors["primary"].failed_over == actors["primary"].completed == 5
    assert actors["primary"].failed == 0
    assert (actors["backup"].graph, actors["backup"].completed) == ("primary/failover", 5)
    assert (actors["backup"].concurrency, actors["primary"].concurrency) == (2, None)


async def test_with_both_the_fallback_gets_the_error_of_the_failover() -> None:
    @ps.node
    async def broken(question: str) -> str:
        raise LookupError("of the failover")

    last = primary.with_policy(failover=broken, fallback=lambda error: f"{type(error).__name__}: {error}")
    worse = primary.with_policy(failover=broken)
    assert await engine.run(ps.graph(last)("why")) == "LookupError: of the failover"
    with pytest.raises(LookupError, match="of the failover") as caught:
        await engine.run(ps.graph(worse)("why"))
    assert any("primary/failover" in note for note in caught.value.__notes__)
    assert any("node 'primary'" in note for note in caught.value.__notes__)


async def test_an_abandoned_thread_is_not_waited_for_and_keeps_its_place() -> None:
    gate = Gate()

    @ps.node(runs_on="thread", timeout_seconds=0.01, failover=backup, concurrency=1)
    def stuck(question: str) -> str:
        return gate.block(question)

    async with engine.deploy(ps.graph(stuck)) as service:
        while not gate.came:  # on a busy machine, the timeout may end before the thread begins
            assert await service("why") == "backup: why"
        assert service.statistics().actors[0].in_flight == 1
        gate.open()
    assert service.statistics().actors[0].in_flight == 0


async def test_the_place_of_the_node_is_free_while_its_failover_runs() -> None:
    gate = Gate()

    @ps.node(concurrency=1, failover=gate.node())
    async def narrow(question: str) -> str:
        if question == "bad":
            raise Down
        return question

    async with engine.deploy(ps.graph(narrow)) as service:
        bad = asyncio.create_task(service("bad"))
        await gate.has()
        assert await service("good") == "good"
        gate.open()
        assert await bad == "bad"
        [actor, *_] = service.statistics().actors
        assert actor.in_flight == 0


async def test_for_items_of_a_batch_it_is_decided_item_by_item() -> None:
    @ps.node
    async def negative(number: int) -> int:
        return -number

    @ps.node(batch=ps.Batch(4, max_wait_seconds=0.001), failover=negative)
    async def even(numbers: list[int]) -> list[int | Exception]:
        return [Down() if number % 2 else number for number in numbers]

    async with engine.deploy(ps.graph(even)) as service:
        assert await asyncio.gather(*map(service, range(6))) == [0, -1, 2, -3, 4, -5]


@ps.node
async def words_of_backup(text: str, fails_after: int = 0) -> AsyncIterator[str]:
    for word in ("other", text):
        yield word


@ps.node(failover=words_of_backup)
async def words(text: str, fails_after: int) -> AsyncIterator[str]:
    for number, word in enumerate(text.split()):
        if number == fails_after:
            raise Down
        yield word


async def test_a_stream_is_taken_over_only_before_its_first_value() -> None:
    read = ps.graph(words)
    assert [word async for word in engine.stream(read("a b c", 0))] == ["other", "a b c"]
    stream = engine.stream(read("a b c", 1))
    assert await anext(stream) == "a"
    with pytest.raises(Down):
        await anext(stream)


async def test_a_reader_that_leaves_closes_the_stream_of_the_failover() -> None:
    closed = asyncio.Event()

    @ps.node
    async def endless(text: str) -> AsyncIterator[str]:
        try:
            while True:
                yield text
        finally:
            closed.set()

    @ps.node(failover=endless)
    async def never(text: str) -> AsyncIterator[str]:
        if text:
            raise Down
        yield text

    async with engine.stream(ps.graph(never)("a")) as stream:
        assert await anext(stream) == "a"
    assert closed.is_set()


async def test_a_caller_that_leaves_cancels_the_failover() -> None:
    gate = Gate()
    other = primary.with_policy(failover=gate.node())
    call = asyncio.create_task(engine.run(ps.graph(other)("why")))
    await gate.has()
    call.cancel()
    assert await outcomes(call) == [asyncio.CancelledError]
    assert gate.cancelled == ["why"]


async def test_a_stateful_node_a_graph_and_a_node_with_a_failover_may_take_over() -> None:
    @ps.node
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        async def __call__(self, question: str) -> str:
            self.count += 1
            return f"{question} {self.count}"

    to_counter, to_graph = primary.with_policy(failover=Counter()), primary.with_policy(failover=backup >> backup)

    @ps.node(failover=primary)
    async def to_both(question: str) -> str:
        raise Down

    @ps.graph
    async def ask_all(question: str) -> tuple[str, str, str]:
        return await to_counter(question), await to_graph(question), await to_both(question)

    async with engine.deploy(ask_all) as service:
        assert await service("a") == ("a 1", "backup: backup: a", "backup: a")
        assert await service("b") == ("b 2", "backup: backup: b", "backup: b")


async def test_arguments_that_are_known_and_parts_of_values_reach_the_failover() -> None:
    @ps.node
    async def pair() -> tuple[int, dict[str, int]]:
        return 1, {"b": 2}

    @ps.node
    async def add_all(one: int, *, many: list[int], constant: int = 5) -> int:
        return one + sum(many) + constant

    @ps.node(failover=add_all)
    async def fails(one: int, *, many: list[int], constant: int = 5) -> int:
        raise Down

    @ps.graph
    async def adding(number: int) -> int:
        both = await pair()
        return await fails(both[0], many=[both[1]["b"], number, 10], constant=100)

    for scheduler in SCHEDULERS:
        assert await engine.run(adding(1000), scheduler=scheduler) == 1113


def test_it_is_drawn() -> None:
    drawn = str(ask)
    assert "failover to backup" in drawn
    assert drawn.index("primary") < drawn.index("failover:") < drawn.rindex("backup")


async def test_a_fake_takes_over_as_well() -> None:
    async def fake(question: str) -> str:
        return "fake"

    with testing.replace(backup, fake):
        assert await engine.run(ask("why")) == "fake"


# Refused failovers.


@ps.node
async def joined(texts: AsyncIterator[str]) -> str:
    return " ".join([text async for text in texts])


@ps.node
async def needs_more(question: str, more: str) -> str:
    return ""


@ps.node
async def takes_a_number(question: int) -> str:
    return ""


@ps.node
async def gives_a_number(question: str) -> int:
    return 1


@pytest.mark.parametrize(
    ("failover", "error", "message"),
    [
        (primary, ps.PlanError, "comes back to itself by failover=.*retry="),
        (words_of_backup, ps.PlanError, "gives one value, and its failover 'words_of_backup'"),
        (needs_more, ps.GraphTraceError, "'needs_more' is called wrongly"),
        ("backup", ps.OptionsError, r"failover='backup'.*another node"),
        (takes_a_number, ps.PlanError, r"takes 'question' as str, but .* has int"),
        (gives_a_number, ps.PlanError, "returns str, but its failover 'gives_a_number' has int"),
    ],
)
async def test_what_cannot_take_over_is_refused(failover: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await engine.run(ps.graph(primary.with_policy(failover=failover))("why"))


async def test_a_node_that_reads_a_stream_has_none() -> None:
    read = words_of_backup >> ps.node(failover=joined)(joined.fn)
    with pytest.raises(ps.PlanError, match=r"reads a stream.*read the stream in an earlier node"):
        await engine.run(read("a"))


async def test_a_circle_is_refused() -> None:
    @ps.graph
    async def through_a_graph(question: str) -> str:
        return await circle(question)

    @ps.node(failover=through_a_graph)
    async def circle(question: str) -> str:
        raise Down

    with pytest.raises(ps.PlanError, match="'circle' comes back to itself by failover="):
        await engine.run(through_a_graph("why"))
