"""`map_each` over several lists or streams at once, and over items that fail."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import data, engine
from tests.kit import counted as count
from tests.kit import outcomes, values_of

OnError = Literal["raise", "skip", "return"]


@ps.node
async def breaks(limit: int) -> AsyncIterator[int]:
    for number in range(limit):
        yield number
    raise OSError("the stream")


@ps.node
async def total(left: int, right: int, third: int = 0) -> int:
    await asyncio.sleep(0)
    return left + 10 * right + 100 * third


@ps.node
def odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(number)
    return number


@ps.graph
async def lists(left: list[int], right: list[int], third: list[int]) -> list[int]:
    return await ps.map_each(total, left, right, third, concurrency=2)


@ps.graph
async def streams(left: int, right: int) -> AsyncIterator[int]:
    return ps.map_each(total, count(left), count(right), concurrency=3)


async def collected(call: ps.Call[AsyncIterator[Any]]) -> list[Any]:
    return await values_of(engine.stream(call))


async def eagerly(call: Any) -> list[Any]:
    return [value async for value in await call]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))))
def test_several_lists_in_step(rows: list[tuple[int, int, int]]) -> None:
    columns = [[row[number] for row in rows] for number in range(3)]
    expected = [left + 10 * right + 100 * third for left, right, third in rows]

    async def both() -> None:
        assert await engine.run(lists(*columns)) == await lists(*columns) == expected

    asyncio.run(both())


async def test_lists_of_different_length_raise_before_the_first_item() -> None:
    began: list[int] = []

    @ps.node
    def noting(left: int, right: int) -> int:
        began.append(left)
        return right

    @ps.graph
    async def mapped(left: list[int], right: list[int]) -> list[int]:
        return await ps.map_each(noting, left, right)

    for run in (engine.run, lambda call: call):
        with pytest.raises(ValueError, match="lists of one length in step, got 3, 2 items"):
            await run(mapped([1, 2, 3], [1, 2]))
    assert began == []


@given(st.integers(0, 40), st.integers(0, 40))
def test_several_streams_in_step_end_with_the_shortest(left: int, right: int) -> None:
    expected = [11 * number for number in range(min(left, right))]
    assert asyncio.run(collected(streams(left, right))) == asyncio.run(eagerly(streams(left, right))) == expected


async def test_the_longer_stream_is_closed_when_the_shorter_one_ends() -> None:
    closed: list[str] = []

    @ps.node
    async def endless() -> AsyncIterator[int]:
        try:
            async for number in count(None):
                yield number
        finally:
            closed.append("endless")

    @ps.graph
    async def both() -> AsyncIterator[int]:
        return ps.map_each(total, endless(), count(5))

    assert await collected(both()) == [0, 11, 22, 33, 44]
    assert closed == ["endless"]


async def test_an_error_of_one_of_the_streams_comes_in_its_turn_whatever_becomes_of_items() -> None:
    @ps.graph
    async def both() -> AsyncIterator[int]:
        return ps.map_each(total, count(None), breaks(3), on_error="skip")

    async with engine.stream(both()) as values:
        assert [await anext(values) for _ in range(3)] == [0, 11, 22]
        with pytest.raises(OSError, match="the stream"):
            await anext(values)


async def test_what_a_split_has_made_meets_again() -> None:
    @ps.graph
    async def pairs(limit: int) -> AsyncIterator[int]:
        left, right = count(limit) >> data.split(2, ahead=64)
        return ps.map_each(total, left, ps.map_each(odd, right, on_error="skip"))

    assert (await collected(pairs(50)))[:4] == [10, 31, 52, 73]
    assert await collected(pairs(50)) == [number + 10 * (2 * number + 1) for number in range(25)]


def shown(results: list[Any]) -> list[Any]:
    return [
        (one.index, one.value, None if one.error is None else one.error.args)
        if isinstance(one, engine.Outcome)
        else one
        for one in results
    ]


@pytest.mark.parametrize("on_error", ["skip", "return"])
@given(numbers=st.lists(st.integers(0, 9)), concurrency=st.integers(1, 5))
@settings(max_examples=settings().max_examples // 2)  # an example plans two graphs
def test_a_bad_item_does_not_end_the_whole(on_error: OnError, numbers: list[int], concurrency: int) -> None:
    @ps.node
    async def each() -> AsyncIterator[int]:
        for number in numbers:
            yield number

    @ps.graph
    async def of_stream() -> AsyncIterator[Any]:
        return ps.map_each(odd, each(), concurrency=concurrency, on_error=on_error)

    @ps.graph
    async def of_list(numbers: list[int]) -> list[Any]:
        return await ps.map_each(odd, numbers, concurrency=concurrency, on_error=on_error)

    expected: list[Any] = [number for number in numbers if number % 2]
    if on_error == "return":
        expected = [
            (index, number, None) if number % 2 else (index, None, (number,)) for index, number in enumerate(numbers)
        ]

    async def everywhere() -> list[list[Any]]:
        return [
            await collected(of_stream()), await eagerly(of_stream()),
            await engine.run(of_list(numbers)), await of_list(numbers),
        ]  # fmt: skip

    assert list(map(shown, asyncio.run(everywhere()))) == [expected] * 4


@pytest.mark.parametrize("on_error", ["skip", "return", "raise"])
async def test_items_are_counted_good_and_bad_ones_alike(on_error: OnError) -> None:
    @ps.graph
    async def of_stream(limit: int) -> AsyncIterator[Any]:
        return ps.map_each(odd, count(limit), concurrency=1, on_error=on_error)

    @ps.graph
    async def of_list(numbers: list[int]) -> list[Any]:
        return await ps.map_each(odd, numbers, concurrency=1, on_error=on_error)

    async def counted(first: int) -> list[tuple[int, int]]:
        """Return how many items each node has completed and failed, up to the first error."""
        async with engine.Engine() as own:
            values = own.stream(of_stream(9))
            await outcomes(own.run(of_list(list(range(first, 9)))), values_of(values))
            found = *own.statistics().actors, *values.statistics().actors
        return [(one.completed, one.failed) for one in found if one.node in ("map_each", "odd")]

    if on_error == "raise":
        assert await counted(1) == [(1, 1), (1, 1), (0, 1), (0, 1)]
    else:
        assert await counted(0) == [(4, 5)] * 4


async def test_a_stream_that_fails_is_not_counted_as_given_as_well() -> None:
    broken, whole = engine.stream(ps.graph(breaks)(3)), engine.stream(ps.graph(count)(3))
    assert await outcomes(values_of(broken), values_of(whole)) == [OSError, [0, 1, 2]]
    [failed], [done] = broken.statistics().actors, whole.statistics().actors
    assert (failed.completed, failed.failed, failed.success_rate) == (0, 1, 0.0)
    assert (done.completed, done.failed, done.success_rate) == (1, 0, 1.0)


def test_wrong_calls_are_refused() -> None:
    @ps.graph
    async def mixed(numbers: list[int]) -> AsyncIterator[int]:
        return ps.map_each(total, count(3), numbers)  # type: ignore[call-overload, no-any-return]

    with pytest.raises(ps.GraphTraceError, match="several lists or several streams in step, not both"):
        engine.plan(mixed)
    with pytest.raises(ps.OptionsError, match="on_error='ignore'"):
        ps.map_each(odd, [1], on_error="ignore")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cannot take the items of 3"):
        ps.map_each(total, [1], 3)  # type: ignore[call-overload]
