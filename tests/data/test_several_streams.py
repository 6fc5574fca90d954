"""A split of one stream, and a merge of several: also their failures, and readers that wait for each other."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import data, engine, testing
from tests.kit import SCHEDULERS, Scheduler, negative, summed, values_of, virtual
from tests.kit import counted as count


@ps.node
async def failing(limit: int) -> AsyncIterator[int]:
    for number in range(limit):
        yield number
    raise OSError("the source")


@ps.node
async def slowly(number: int) -> int:
    await asyncio.sleep(10)
    return number


@ps.node
async def in_step(left: AsyncIterator[int], right: AsyncIterator[int]) -> AsyncIterator[tuple[int, int]]:
    async for number in left:
        yield number, await anext(right)


@ps.node
async def one_after_the_other(left: AsyncIterator[int], right: AsyncIterator[int]) -> list[int]:
    first = [number async for number in left]
    return first + [number async for number in right]


@ps.node
async def beside(left: AsyncIterator[int], right: AsyncIterator[int]) -> list[int]:
    async def collected(values: AsyncIterator[int]) -> list[int]:
        await asyncio.sleep(30)
        return [number async for number in values]

    task = asyncio.create_task(collected(right))
    return [number async for number in left] + await task


@ps.node
async def first_of(values: AsyncIterator[int]) -> int:
    return await anext(values)


async def collected(call: ps.Call[AsyncIterator[Any]]) -> list[Any]:
    return await values_of(engine.stream(call))


@ps.graph
async def joined(limit: int) -> AsyncIterator[tuple[int, int]]:
    left, right = count(limit) >> data.split(2, ahead=1)
    return in_step(left, right >> negative)


@ps.graph
async def stuck(limit: int) -> list[int]:
    left, right = count(limit) >> data.split(2, ahead=4)
    return await one_after_the_other(left, right >> negative)


@ps.graph
async def sums(limit: int) -> list[int]:
    one, two, three = count(limit) >> data.split(3)
    return [await summed(one), await summed(two >> negative), await first_of(three)]


@given(st.integers(0, 60))
def test_each_branch_has_all_values(limit: int) -> None:
    expected = [(number, -number) for number in range(limit)]
    assert asyncio.run(collected(joined(limit))) == expected

    async def outside() -> list[Any]:
        return [value async for value in await joined(limit)]

    assert asyncio.run(outside()) == expected


async def test_branches_are_read_by_steps_that_know_nothing_of_each_other() -> None:
    assert await engine.run(sums(200)) == [19900, -19900, 0]  # the third reader leaves after one value
    assert await sums(200) == [19900, -19900, 0]


async def test_a_branch_that_nobody_reads_holds_no_other_back() -> None:
    @ps.graph
    async def one_of_three(limit: int) -> AsyncIterator[int]:
        one, _, _ = count(limit) >> data.split(3, ahead=1)
        return one

    assert await collected(one_of_three(50)) == [*range(50)]
    async with engine.stream(one_of_three(None)) as values:  # type: ignore[arg-type]
        assert await anext(values) == 0


@pytest.mark.parametrize("limit", [4, 30, 500])
async def test_branches_that_wait_for_each_other_fail_and_say_so(limit: int) -> None:
    if limit == 4:  # as far ahead as the split allows
        assert await engine.run(stuck(limit)) == [0, 1, 2, 3, 0, -1, -2, -3]
        return
    with pytest.raises(ps.DataError, match=r"branch 1 holds 4 values, and its reader waits for branch 0.*ahead="):
        await engine.run(stuck(limit))


async def test_so_do_branches_of_branches_and_of_a_stream_that_is_returned() -> None:
    @ps.graph
    async def nested() -> list[int]:
        left, right = count(200) >> data.split(2, ahead=4)
        inner, _ = left >> data.prefetched(1) >> data.split(2, ahead=1)
        return await one_after_the_other(inner, right)

    with pytest.raises(ps.DataError, match="wait for each other"):
        await engine.run(nested())


@virtual
async def test_branches_whose_readers_are_slow_are_waited_for() -> None:
    @ps.graph
    async def slow(limit: int) -> AsyncIterator[tuple[int, int]]:
        left, right = count(limit) >> data.split(2, ahead=1)
        return in_step(ps.map_each(slowly, left, concurrency=2), right)

    @ps.graph
    async def with_tasks(limit: int) -> list[int]:
        left, right = count(limit) >> data.split(2, ahead=1)
        return await beside(left, right)

    @ps.graph
    async def one_later(limit: int) -> list[int]:
        left, right = count(limit) >> data.split(2, ahead=1)
        later = await slowly(3)
        return [await summed(left), later, await summed(right)]

    assert await collected(slow(20)) == [(number, number) for number in range(20)]
    assert await engine.run(with_tasks(20)) == [*range(20)] * 2
    assert await engine.run(one_later(60)) == [1770, 3, 1770]


@virtual
async def test_a_reader_outside_of_the_call_may_take_its_time() -> None:
    async with engine.stream(joined(100)) as values:
        assert await anext(values) == (0, 0)
        await asyncio.sleep(60)  # longer than a split waits before it looks for a deadlock
        assert [value async for value in values] == [(number, -number) for number in range(1, 100)]


async def test_an_error_of_the_source_reaches_the_readers_in_its_turn() -> None:
    @ps.graph
    async def broken(limit: int) -> AsyncIterator[tuple[int, int]]:
        left, right = failing(limit) >> data.split(2)
        return in_step(left, right)

    async with engine.stream(broken(7)) as values:
        assert [await anext(values) for _ in range(7)] == [(number, number) for number in range(7)]
        with pytest.raises(OSError, match="the source"):
            await anext(values)


async def test_a_source_that_never_ends_is_closed_when_the_reader_leaves() -> None:
    @ps.graph
    async def endless(limit: int | None) -> AsyncIterator[int]:
        left, right = count(limit) >> data.split(2)
        return (left, right >> negative, count(3)) >> data.merged("arrival")

    async with engine.stream(endless(None)) as values:
        assert {await anext(values) for _ in range(300)} >= {1, -1}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_merged(lengths: list[int]) -> None:
    async def source(name: int, length: int) -> AsyncIterator[tuple[int, int]]:
        for number in range(length):
            await asyncio.sleep(0)
            yield name, number

    async def merged(how: Any) -> list[Any]:
        streams = tuple(source(name, length) for name, length in enumerate(lengths))
        return [value async for value in streams >> data.merged(how)]

    in_turns = [(name, number) for number in range(20) for name, length in enumerate(lengths) if number < length]
    assert asyncio.run(merged("round_robin")) == in_turns
    got = asyncio.run(merged("arrival"))
    assert sorted(got) == sorted(in_turns)
    for name, length in enumerate(lengths):
        assert [number for one, number in got if one == name] == [*range(length)]


@ps.graph
async def merging(limit: int) -> AsyncIterator[int]:
    return (count(limit), count(3) >> negative, count(limit) >> negative) >> data.merged("round_robin")


@ps.graph
async def arriving(limit: int) -> AsyncIterator[int]:
    return (count(limit), failing(3), count(limit) >> negative) >> data.merged("arrival")


async def test_streams_of_a_graph_are_merged() -> None:
    assert await collected(merging(5)) == [0, 0, 0, 1, -1, -1, 2, -2, -2, 3, -3, 4, -4]
    with pytest.raises(OSError, match="the source"):
        await collected(arriving(500))


def test_what_is_there_first_comes_first() -> None:
    @ps.node
    async def every(seconds: int, name: str) -> AsyncIterator[str]:
        for _ in range(3):
            await asyncio.sleep(seconds)
            yield name

    @ps.graph
    async def clocks() -> AsyncIterator[str]:
        return (every(10, "slow"), every(3, "quick")) >> data.merged("arrival")

    assert testing.run_virtual(lambda: collected(clocks())) == ["quick", "quick", "quick", "slow", "slow", "slow"]


@ps.graph
async def mixed(limit: int | None) -> AsyncIterator[int]:
    return data.mix([(count(limit), 3), (count(None) >> negative, 1)], seed=5, count=4000)


@ps.graph
async def mixed_to_the_end(limit: int, seed: int) -> AsyncIterator[int]:
    return data.mix([(count(limit), 0.5), (count(20) >> negative, 0.5)], seed=3, until="all")


async def test_a_mix_draws_shares_and_is_the_same_every_time() -> None:
    values = await collected(mixed(None))
    assert len(values) == 4000
    share = sum(value > 0 for value in values) / len(values)
    assert abs(share - 0.75) < 0.03
    assert await collected(mixed(None)) == values
    assert [value for value in values if value > 0] == [*range(1, max(values) + 1)]
    first_end = await collected(mixed(100))
    assert first_end == values[: len(first_end)]
    assert max(first_end) == 99
    everything = await collected(mixed_to_the_end(7, 3))
    assert sorted(everything) == sorted([*range(7), *(-number for number in range(20))])
    assert [value async for value in await mixed_to_the_end(7, 3)] == everything
    assert everything[:9] == [0, 0, -1, 1, -2, -3, -4, 2, 3]
    for wrong in ({"seed": -1}, {"seed": 1, "until": "last"}, {"seed": 1, "count": -1}):
        arguments: Any = wrong
        with pytest.raises(ps.OptionsError, match=r"data\.mix\("):
            data.mix([], **arguments)
    with pytest.raises(ps.OptionsError, match="weight=0"):
        data.mix([(count(1), 0)], seed=1)


async def test_a_source_of_a_mix_begins_again_if_it_has_no_end() -> None:
    def letters() -> Iterator[str]:
        yield from "ab"

    @ps.graph
    async def restarted() -> AsyncIterator[Any]:
        again = data.order([10, 20, 30], shuffle_seed=1, epochs=None) >> data.read([10, 20, 30], runs_on="loop")
        streams = [(again, 0.5), (data.order(letters, epochs=None), 0.3), (data.order(range(20)), 0.2)]
        return data.mix(streams, seed=1, until="first")

    records = await collected(restarted())
    numbers = [record for record in records if isinstance(record.value, int)]
    assert max(record.epoch for record in numbers) > 2
    for epoch in range(3):
        assert sorted(record.value for record in numbers if record.epoch == epoch) == [10, 20, 30]
    assert "".join(record.value for record in records if isinstance(record.value, str)).startswith("ababab")
    assert [record.index for record in records if record.value is None] == [*range(20)]


def test_wrong_arguments_are_refused_where_they_are_written() -> None:
    how: Any = "random"
    for make in (lambda: data.split(1), lambda: data.split(2, ahead=0), lambda: data.merged(how)):
        with pytest.raises(ps.OptionsError, match=r"data\.\w+\("):
            make()

    @ps.graph
    async def no_stream(number: Any) -> AsyncIterator[int]:
        left, _ = data.split(2)(number)
        return left

    with pytest.raises(ps.GraphTraceError, match="a split takes a stream"):
        engine.plan(no_stream)


def test_a_limited_node_that_a_split_needs_twice_is_refused() -> None:
    @ps.node(concurrency=1)
    async def limited(values: AsyncIterator[int]) -> AsyncIterator[int]:
        async for value in values:
            yield value

    @ps.graph
    async def both(limit: int) -> AsyncIterator[tuple[int, int]]:
        left, right = limited(count(limit)) >> data.split(2)
        return in_step(limited(left), right)

    with pytest.raises(ps.PlanError, match="wait for each other for ever"):
        engine.plan(both)


@ps.node
async def sum_of_both(left: AsyncIterator[int], right: AsyncIterator[int]) -> int:
    return sum([number + await anext(right) async for number in left])


@ps.node
async def total_and(values: AsyncIterator[int], more: int) -> int:
    return more + sum([number async for number in values])


@ps.node(effectful=True)
async def store(values: AsyncIterator[int]) -> None:
    async for _ in values:
        pass


@ps.graph
async def dependent(limit: int) -> int:
    left, right = count(limit) >> data.split(2, ahead=4)
    return await total_and(right, await summed(left))


@ps.graph
async def split_twice(limit: int) -> list[int]:
    left, right = count(limit) >> data.split(2, ahead=4)
    one, two = left >> data.split(2, ahead=4)
    return [await sum_of_both(one, two), await summed(right)]


@ps.graph
async def stored_and_given(limit: int) -> AsyncIterator[int]:
    left, right = count(limit) >> data.split(2, ahead=4)
    await store(left)
    return right


@ps.graph
async def read_together(limit: int) -> int:
    left, right = count(limit) >> data.split(2, ahead=4)
    return await sum_of_both(left >> negative, right)


@pytest.mark.parametrize(
    ("graph", "schedulers"),
    [
        (split_twice, "sequential wave"),
        (dependent, "sequential wave"),
        (stored_and_given, "sequential"),
        (read_together, ""),
    ],
)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_scheduler_that_begins_one_reader_only_behind_another_is_refused(
    graph: ps.Graph[[int], Any], schedulers: str, scheduler: Scheduler
) -> None:
    async def call() -> None:
        async with asyncio.timeout(60):
            if graph is stored_and_given:
                await collected(graph(50))
            else:
                await engine.run(graph(50))

    with ps.execution_options(scheduler=scheduler):
        for _ in range(2):  # the second call uses the plan of the first
            if scheduler in schedulers.split():
                with pytest.raises(ps.PlanError, match=rf"py:\d+: .*{scheduler!r} lets .* one data.split \("):
                    await call()
            elif graph is not dependent:  # works if the split holds as many values as the stream has
                await call()
