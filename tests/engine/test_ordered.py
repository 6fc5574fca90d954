"""`@node(ordered=True)`: an instance that takes items in input order, after nodes in which items overtake."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, testing
from tests.kit import numbers, values_of, virtual


class Refused(Exception):
    """The error of some items."""


@ps.node
async def waits(item: tuple[int, int]) -> int:
    number, seconds = item
    await asyncio.sleep(abs(seconds))
    if seconds < 0:
        raise Refused(number)
    return number


@ps.node(ordered=True)
class Noting:
    def __init__(self, seen: list[int], fails_at: int = -1, seconds: float = 1) -> None:
        self.seen = seen
        self.fails_at = fails_at
        self.seconds = seconds
        self.is_busy = False

    async def __call__(self, number: int) -> int:
        assert not self.is_busy
        self.is_busy = True
        self.seen.append(number)
        try:
            await asyncio.sleep(self.seconds)
            if number == self.fails_at:
                raise Refused(number)
        finally:
            self.is_busy = False
        return number


items = st.lists(st.integers(-3, 6), max_size=12).map(lambda seconds: [*enumerate(seconds)])


@given(items, st.integers(1, 9), st.booleans(), st.integers(-1, 5), st.integers(0, 2**32))
def test_items_come_in_input_order_and_those_that_failed_give_up_their_turn(
    items: list[tuple[int, int]], window: int, ordered: bool, fails_at: int, seed: int
) -> None:
    seen: list[int] = []
    noting = Noting(seen, fails_at)

    each = waits >> noting

    @ps.node
    async def given_items() -> AsyncIterator[tuple[int, int]]:
        for item in items:
            yield item

    @ps.graph
    async def of_stream() -> AsyncIterator[int]:
        return ps.map_each(each, given_items(), concurrency=window, on_error="skip")

    @ps.graph
    async def of_list(items: list[tuple[int, int]]) -> list[int]:
        return await ps.map_each(each, items, concurrency=window, on_error="skip")

    async def main() -> None:
        right = [number for number, seconds in items if seconds >= 0]
        left = [number for number in right if number != fails_at]
        calls = [each(item) for item in items]
        found = await values_of(engine.stream(calls, on_error="skip", max_in_flight=window, ordered=ordered))
        assert sorted(found) == left
        assert seen == right
        seen.clear()
        assert await values_of(engine.stream(of_stream())) == left
        assert seen == right
        seen.clear()
        assert await engine.run(of_list(items)) == left
        assert seen == right

    testing.run_seeded(main, seed=seed)


@virtual
async def test_the_turn_of_an_item_that_is_cancelled_goes_to_the_next() -> None:
    seen: list[int] = []
    noting = Noting(seen)

    @ps.node
    async def stuck(number: int) -> int:
        await asyncio.sleep(0 if number else 1000)
        return number

    inner, timed = stuck >> noting, stuck.with_policy(timeout_seconds=5) >> noting
    assert await values_of(engine.stream([timed(number) for number in range(5)], on_error="skip")) == [1, 2, 3, 4]
    assert seen == [1, 2, 3, 4]
    seen.clear()
    results = engine.stream([inner(number) for number in range(5)])
    reading = asyncio.create_task(anext(results))
    await asyncio.sleep(10)
    reading.cancel()
    await asyncio.wait([reading])
    await results.aclose()  # all items wait for the first; they leave, and none begins
    assert seen == []


async def test_run_accepts_it_and_streams_that_share_an_instance_take_turns_one_by_one() -> None:
    seen: list[int] = []
    noting = Noting(seen, seconds=0.01)

    @ps.graph
    async def whole(numbers: list[int]) -> list[int]:
        return await ps.map_each(noting, numbers)

    assert await engine.run(whole([3, 2, 1])) == [3, 2, 1]
    calls = [whole([10 * number, 10 * number + 1]) for number in range(3)]
    # The maps of three calls run concurrently.
    assert await values_of(engine.stream(calls)) == [[0, 1], [10, 11], [20, 21]]
    assert seen[:3] == [3, 2, 1]
    assert sorted(seen[3:]) == [0, 1, 10, 11, 20, 21]


async def test_what_could_not_wait_for_its_turn_is_refused() -> None:
    noting = Noting([])

    @ps.graph
    async def twice(number: int) -> int:
        return await noting(await noting(number))

    @ps.graph
    async def branching(number: int) -> int:
        return await ps.cond(True, noting, noting, number)

    limited = ps.node(concurrency=1)(numbers.fn)

    @ps.node(ordered=True)
    class Reading:
        async def __call__(self, values: AsyncIterator[int]) -> int:
            return sum([value async for value in values])

    reading = Reading()

    @ps.node
    async def same(values: AsyncIterator[int]) -> AsyncIterator[int]:
        async for value in values:
            yield value

    for graph, told in (
        (twice, "use another instance"),
        (branching, "cond, switch or while_loop"),
        (limited >> same >> reading, "leave out its"),
    ):
        with pytest.raises(ps.PlanError, match=told):
            engine.plan(graph)
    with pytest.raises(ps.PlanError, match="the calls of a deployment have no order"):
        async with engine.deploy(ps.graph(noting)):
            pass
    for option in ({"concurrency": 2}, {"capacity": 3}, {"max_bytes": 9}):
        arguments: Any = option
        with pytest.raises(ps.OptionsError, match="ordered=True"):
            ps.node(ordered=True, **arguments)(Noting)
    with pytest.raises(TypeError, match="a class whose __call__ returns one result"):
        ps.node(ordered=True)(waits.fn)
