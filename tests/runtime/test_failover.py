"""Failover: another node takes over, as a branch with its own policy, places and statistics."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

import penstock as ps
from penstock import engine, testing


class Down(Exception):
    pass


@ps.node(concurrency=2)
async def backup(question: str) -> str:
    await asyncio.sleep(0)
    return f"backup: {question}"


@ps.node(failover=backup)
async def primary(question: str) -> str:
    raise Down(question)


@ps.graph
async def ask(question: str) -> str:
    return await primary(question)


async def test_another_node_takes_over_after_the_last_attempt() -> None:
    attempts: list[int] = []

    @ps.node(retry=ps.Retry(3), failover=backup)
    async def twice(question: str) -> str:
        attempts.append(ps.current().attempt)
        raise Down

    assert await engine.run(ps.graph(twice)("why")) == "backup: why"
    assert attempts == [1, 2, 3]


async def test_what_does_not_fail_is_not_taken_over() -> None:
    @ps.node(failover=backup)
    async def fine(question: str) -> str:
        return question

    assert await engine.run(ps.graph(fine)("why")) == "why"


async def test_it_has_statistics_of_its_own() -> None:
    async with engine.deploy(ask) as service:
        await asyncio.gather(*[service.run(ask(str(number))) for number in range(5)])
        actors = {actor.node: actor for actor in service.statistics().actors}
    assert actors["primary"].failed_over == actors["primary"].completed == 5
    assert actors["primary"].failed == 0
    assert (actors["backup"].graph, actors["backup"].completed) == ("ask/failover", 5)
    assert (actors["backup"].concurrency, actors["primary"].concurrency) == (2, None)


async def test_it_has_a_policy_of_its_own() -> None:
    attempts = 0

    @ps.node(retry=ps.Retry(3))
    async def flaky(question: str) -> str:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise Down
        return question

    other = primary.with_policy(failover=flaky)

    assert await engine.run(ps.graph(other)("why")) == "why"
    assert attempts == 3


async def test_with_both_the_fallback_gets_the_error_of_the_failover() -> None:
    @ps.node
    async def broken(question: str) -> str:
        raise LookupError("of the failover")

    last = primary.with_policy(failover=broken, fallback=lambda error: f"{type(error).__name__}: {error}")
    worse = primary.with_policy(failover=broken)

    @ps.graph
    async def ask_worse(question: str) -> str:
        return await worse(question)

    assert await engine.run(ps.graph(last)("why")) == "LookupError: of the failover"
    with pytest.raises(LookupError, match="of the failover") as caught:
        await engine.run(ask_worse("why"))
    assert any("ask_worse/failover" in note for note in caught.value.__notes__)
    assert any("'primary'" in note for note in caught.value.__notes__)


async def test_a_failover_may_have_one_as_well() -> None:
    second = primary.named("second")

    @ps.node(failover=second)
    async def first(question: str) -> str:
        raise Down

    assert await engine.run(ps.graph(first)("why")) == "backup: why"


async def test_an_abandoned_thread_is_not_waited_for_and_keeps_its_place() -> None:
    entered, go_on = threading.Event(), threading.Event()

    @ps.node(runs_on="thread", timeout_seconds=0.01, failover=backup, concurrency=1)
    def stuck(question: str) -> str:
        entered.set()
        go_on.wait(30)
        return "too late"

    ask_stuck = ps.graph(stuck)

    async with engine.deploy(ask_stuck) as service:
        while not entered.is_set():  # on a busy machine, the timeout may end before the thread begins
            assert await service.run(ask_stuck("why")) == "backup: why"
        assert service.statistics().actors[0].in_flight == 1
        go_on.set()
    assert service.statistics().actors[0].in_flight == 0


async def test_the_place_of_the_node_is_free_while_its_failover_runs() -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    @ps.node
    async def long(question: str) -> str:
        entered.set()
        await go_on.wait()
        return "long"

    @ps.node(concurrency=1, failover=long)
    async def narrow(question: str) -> str:
        if question == "bad":
            raise Down
        return question

    ask_narrow = ps.graph(narrow)

    async with engine.deploy(ask_narrow) as service:
        bad = asyncio.create_task(service.run(ask_narrow("bad")))
        await entered.wait()
        assert await service.run(ask_narrow("good")) == "good"
        go_on.set()
        assert await bad == "long"
        [narrow_, *_] = service.statistics().actors
        assert narrow_.in_flight == 0


async def test_for_items_of_a_batch_it_is_decided_item_by_item() -> None:
    @ps.node
    async def negative(number: int) -> int:
        return -number

    @ps.node(batch=ps.Batch(4, max_wait_seconds=0.001), failover=negative)
    async def even(numbers: list[int]) -> list[int | Exception]:
        return [Down() if number % 2 else number for number in numbers]

    halves = ps.graph(even)

    async with engine.deploy(halves) as service:
        results = await asyncio.gather(*[service.run(halves(number)) for number in range(6)])
    assert results == [0, -1, 2, -3, 4, -5]


@ps.node
async def words_of_backup(text: str) -> AsyncIterator[str]:
    for word in ("other", text):
        yield word


@ps.node(failover=words_of_backup)
async def words(text: str, fails_after: int) -> AsyncIterator[str]:
    for number, word in enumerate(text.split()):
        if number == fails_after:
            raise Down
        yield word


async def test_a_stream_is_taken_over_only_before_its_first_value() -> None:
    @ps.node
    async def words_of_other(text: str, fails_after: int) -> AsyncIterator[str]:
        async for word in words_of_backup(text):
            yield word

    taken_over = words.with_policy(failover=words_of_other)

    read = ps.graph(taken_over)

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
    entered, cancelled = asyncio.Event(), asyncio.Event()

    @ps.node
    async def waits(question: str) -> str:
        entered.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return question

    other = primary.with_policy(failover=waits)

    call = asyncio.create_task(engine.run(ps.graph(other)("why")))
    await entered.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert cancelled.is_set()


async def test_no_failover_begins_for_a_call_that_has_ended() -> None:
    begun = False
    entered = asyncio.Event()

    @ps.node
    async def too_late() -> str:
        nonlocal begun
        begun = True
        return "too late"

    @ps.node(failover=too_late)
    async def turns_the_cancel_into_an_error() -> str:
        entered.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise Down from None
        return "never"

    ask_late = ps.graph(turns_the_cancel_into_an_error)

    async with engine.deploy(ask_late) as service:
        call = asyncio.create_task(service.run(ask_late()))
        await entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert not begun


async def test_a_stateful_node_and_a_graph_may_take_over() -> None:
    @ps.node
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        async def __call__(self, question: str) -> str:
            self.count += 1
            return f"{question} {self.count}"

    counter = Counter()

    twice = backup >> backup
    to_counter, to_graph = primary.with_policy(failover=counter), primary.with_policy(failover=twice)

    @ps.graph
    async def ask_both(question: str) -> tuple[str, str]:
        return await to_counter(question), await to_graph(question)

    async with engine.deploy(ask_both) as service:
        assert await service.run(ask_both("a")) == ("a 1", "backup: backup: a")
        assert await service.run(ask_both("b")) == ("b 2", "backup: backup: b")


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

    assert await engine.run(adding(1000)) == 1113
    for scheduler in ("sequential", "wave", "actors"):
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


async def refused(node: ps.Node[[str], object], message: str) -> None:
    @ps.graph
    async def wrong(question: str) -> object:
        return await node(question)  # type: ignore[misc]

    with pytest.raises(ps.PlanError, match=message):
        await engine.run(wrong("why"))


async def test_a_node_that_reads_a_stream_has_none() -> None:
    @ps.node
    async def other(texts: AsyncIterator[str]) -> str:
        return ""

    @ps.node(failover=other)
    async def join(texts: AsyncIterator[str]) -> str:
        return " ".join([text async for text in texts])

    read = words_of_backup >> join
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


async def test_a_node_cannot_take_over_from_itself() -> None:
    await refused(primary.with_policy(failover=primary), "comes back to itself by failover=.*retry=")


async def test_a_stream_and_a_value_do_not_take_over_from_each_other() -> None:
    await refused(primary.with_policy(failover=words_of_backup), "gives one value, and its failover 'words_of_backup'")  # type: ignore[call-overload]


async def test_too_many_parameters_are_refused_when_the_graph_is_traced() -> None:
    @ps.node
    async def needs_more(question: str, more: str) -> str:
        return ""

    other = primary.with_policy(failover=needs_more)  # type: ignore[call-overload]

    with pytest.raises(ps.GraphTraceError, match="'needs_more' is called wrongly"):
        await engine.run(ps.graph(other)("why"))


async def test_what_is_no_node_is_refused() -> None:
    with pytest.raises(ps.OptionsError, match=r"failover='backup'.*another node"):
        primary.with_policy(failover="backup")  # type: ignore[call-overload]


async def test_another_type_of_argument_is_refused() -> None:
    @ps.node
    async def takes_a_number(question: int) -> str:
        return ""

    await refused(primary.with_policy(failover=takes_a_number), r"takes 'question' as str, but .* has int")  # type: ignore[call-overload]


async def test_another_type_of_result_is_refused() -> None:
    @ps.node
    async def number(question: str) -> int:
        return 1

    await refused(primary.with_policy(failover=number), "returns str, but its failover 'number' has int")  # type: ignore[call-overload]
