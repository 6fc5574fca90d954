"""`fold`: a stream into one value, in constant memory; it skips failed values if asked."""

import asyncio
import functools
import operator
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from penstock.engine import ActorStatistics
from tests.engine.tracing import define, refusal
from tests.kit import SCHEDULERS, cancelled_at_every_step, numbers, values_of, virtual


class Refused(Exception):
    """The error of some values."""


@ps.node
def joined(text: str, number: int) -> str:
    return f"{text}{number}"


@ps.node
async def joined_later(text: str, number: int) -> str:
    await asyncio.sleep(0)
    return f"{text}{number}"


@ps.node
def without_threes(text: str, number: int) -> str:
    if number % 3 == 0:
        raise Refused(number)
    return f"{text}{number}"


@ps.graph
async def in_two_steps(text: str, number: int) -> str:
    return await joined_later(joined(text, number), number)


@ps.graph
async def digits(limit: int) -> str:
    return await ps.fold(joined, numbers(limit), "")


@ps.graph
async def digits_without_threes(limit: int) -> str:
    return await ps.fold(without_threes, numbers(limit), "", on_error="skip")


def folding(fn: Any, source: Callable[[], AsyncIterator[Any]], initial: Any = "", **options: Any) -> ps.Call[Any]:
    """Return a call of a graph that folds a stream."""

    @ps.graph
    async def folded() -> Any:
        return await ps.fold(fn, source(), initial, **options)

    return folded()


def record_of(actors: tuple[ActorStatistics, ...], node: str) -> ActorStatistics:
    [found] = [actor for actor in actors if actor.node == node]
    return found


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (joined, "-0123"),
        (joined_later, "-0123"),
        (in_two_steps, "-00112233"),
        (lambda text, number: joined_later(joined(text, 0), number), "-00010203"),
        (lambda text, number: text, "-"),
        (lambda text, number: number, 3),
        (ps.node(lambda text, number: text + str(number)), "-0123"),
    ],
)
async def test_the_values_are_folded_in_their_order(fn: Any, expected: object, scheduler: Any) -> None:
    @ps.graph
    async def folded(limit: int) -> Any:
        return await ps.fold(fn, numbers(limit), "-")

    assert await engine.run(folded(4), scheduler=scheduler) == expected
    assert await engine.run(folded(0), scheduler=scheduler) == "-"
    assert await values_of(engine.stream([folded(4), folded(0)])) == [expected, "-"]


async def test_outside_of_a_graph_it_is_plain_python() -> None:
    assert await ps.fold(operator.add, numbers(5), 100) == 110
    assert await ps.fold(joined_later, numbers(3), "") == "012"
    assert await ps.fold(without_threes, numbers(5), "", on_error="skip") == "124"
    with pytest.raises(Refused):
        await ps.fold(without_threes, numbers(5), "")


async def test_a_builtin_and_what_the_body_takes_from_outside() -> None:
    @ps.graph
    async def folded(stream: AsyncIterator[int], factor: int, initial: int) -> int:
        def add(total: int, value: int) -> Any:
            return ps.node(operator.add)(total, ps.node(operator.mul)(value, factor))

        return await ps.fold(add, stream, initial)

    assert await engine.run(folded(numbers(4), 10, 5)) == 65


async def test_the_item_of_a_body_is_the_index_of_its_value() -> None:
    @ps.node
    def indices(found: tuple[int | None, ...], number: int) -> tuple[int | None, ...]:
        return (*found, ps.current().item)

    call = folding(indices, lambda: numbers(3), ())
    assert await engine.run(call) == (0, 1, 2)


async def test_a_value_that_fails_ends_it_and_closes_the_stream() -> None:
    closed: list[int] = []

    @ps.node
    async def counted() -> AsyncIterator[int]:
        number = 0
        try:
            while True:
                number += 1
                yield number
        finally:
            closed.append(number)

    call = folding(without_threes, counted)
    async with engine.Engine() as own:
        with pytest.raises(Refused) as caught:
            await own.run(call)
        actors = own.statistics().actors
    assert any("'without_threes'" in note and "item 2" in note for note in caught.value.__notes__)
    assert len(closed) == 1
    record = record_of(actors, "fold")
    assert (record.completed, record.failed) == (2, 1)


async def test_what_failed_is_left_out_counted_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    async with engine.Engine() as own:
        assert await own.run(digits_without_threes(10)) == "124578"
        actors = own.statistics().actors
    for name in ("fold", "without_threes"):
        record = record_of(actors, name)
        assert (record.completed, record.failed, record.success_rate) == (6, 4, 0.6)
    logged = [line for line in capsys.readouterr().out.splitlines() if "fold.value_skipped" in line]
    assert len(logged) == 4
    assert "item=9" in logged[-1]


async def test_success_rates_of_streams_and_services() -> None:
    async with engine.stream([digits_without_threes(4), digits(4)]) as stream:
        assert stream.statistics().success_rate is None
        assert [result async for result in stream] == ["12", "0123"]
        assert stream.statistics().success_rate == 1.0
    async with engine.deploy(digits_without_threes) as service:
        assert service.statistics().success_rate is None
        await service(4)
        before = service.statistics()
        assert record_of(before.actors, "fold").success_rate == 0.5
        await service(2)
        assert record_of(service.statistics().since(before).actors, "fold").success_rate == 0.5
        assert service.statistics().success_rate == 1.0


async def test_an_error_of_the_stream_is_raised() -> None:
    @ps.node
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise Refused("the stream")

    for on_error in ("raise", "skip"):
        with pytest.raises(Refused, match="the stream"):
            await engine.run(folding(joined, broken, on_error=on_error))


@virtual
async def test_a_deadline_ends_it_while_it_waits_for_a_value() -> None:
    @ps.node
    async def stuck() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(3600)

    call = folding(joined, stuck, on_error="skip")
    with pytest.raises(ps.DeadlineExceeded):
        await engine.run(call, timeout_seconds=5)


def test_a_cancel_at_every_step_leaves_nothing_behind() -> None:
    call = folding(joined_later, lambda: numbers(3), on_error="skip")
    results = [outcome.result for outcome in cancelled_at_every_step(lambda: engine.run(call))]
    assert results[-1] == "012"


def test_every_interleaving_folds_alike() -> None:
    @ps.node
    async def uneven(limit: int) -> AsyncIterator[int]:
        for number in range(limit):
            await asyncio.sleep(number % 2)
            yield number

    @ps.node
    async def slow(text: str, number: int) -> str:
        await asyncio.sleep(number % 3)
        if number == 4:
            raise Refused
        return f"{text}{number}"

    @ps.graph
    async def folded(limit: int) -> str:
        return await ps.fold(slow, uneven(limit), "", on_error="skip")

    async def main() -> list[str]:
        return await asyncio.gather(*(engine.run(folded(limit)) for limit in (0, 3, 7)))

    for seed in range(50):
        assert testing.run_seeded(main, seed=seed) == ["", "012", "012356"]


async def test_no_more_values_are_alive_than_the_stream_holds() -> None:
    class Chunk:
        """A value that a weak reference can watch."""

    alive: weakref.WeakSet[Chunk] = weakref.WeakSet()
    most = 0

    @ps.node(capacity=2)
    async def chunks() -> AsyncIterator[Chunk]:
        for _ in range(200):
            chunk = Chunk()
            alive.add(chunk)
            yield chunk

    @ps.node
    async def counted(total: int, chunk: Chunk) -> int:
        nonlocal most
        await asyncio.sleep(0)
        most = max(most, len(alive))
        if total % 7 == 0:
            raise Refused
        return total + 1

    call = folding(counted, chunks, 1, on_error="skip")
    assert await engine.run(call) == 7
    assert most <= 4  # two buffered, one in the generator, one in the fold
    assert not alive


def test_a_source_that_waits_for_the_fold_of_its_own_values_is_refused() -> None:
    @ps.node(concurrency=1)
    async def limited(limit: int) -> AsyncIterator[int]:
        for number in range(limit):
            yield number

    @ps.graph
    async def folded(limit: int) -> str:
        async def body(text: str, number: int) -> Any:
            return await ps.fold(joined, limited(number), text)

        return await ps.fold(body, limited(limit), "")

    with pytest.raises(ps.PlanError, match="wait for each other"):
        engine.plan(folded)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.fold(3, numbers(3), 0), r"ps.fold\(fn, stream, initial\) got fn=3.*a node, a graph or a function"),  # type: ignore[call-overload]
        (lambda: ps.fold(operator.add, [1, 2], 0), r"takes a stream, got \[1, 2\]"),  # type: ignore[call-overload]
        (lambda: ps.fold(operator.add, numbers(3), 0, on_error="return"), "on_error="),  # type: ignore[call-overload]
        (lambda: ps.fold(operator.add, numbers(3), 0, on_error=None), "on_error="),  # type: ignore[call-overload]
        (lambda: ps.fold(operator.add, numbers(3), 0, name=""), "name="),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ps.OptionsError), match=message):
        make()


def test_what_is_no_unread_stream_is_refused() -> None:
    for line, told in (
        ("return await ps.fold(joined, limit, '')", "annotated as AsyncIterator"),
        ("n = numbers(limit)\n    return await ps.fold(joined, n, ''), await ps.fold(joined, n, '')", "one reader"),
    ):
        source = f"@ps.graph\nasync def g(limit: list):\n    {line}"
        assert told in refusal(lambda source=source: define(source, joined=joined, numbers=numbers))  # type: ignore[misc]


def test_it_is_drawn_with_its_body() -> None:
    @ps.graph
    async def folded(limit: int) -> str:
        return await ps.fold(functools.partial(without_threes), numbers(limit), "", on_error="skip")

    for drawn in (str(digits_without_threes), str(folded)):  # a `functools.partial` is named after its function
        assert "fold" in drawn
        assert "skips failures" in drawn
        assert "without_threes" in drawn
