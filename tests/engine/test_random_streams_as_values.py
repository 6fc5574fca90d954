"""Random pipelines of generators, maps and batches give the same under every scheduler as in plain Python."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS, Scheduler, listed

Stage = tuple[str, int]


class Failed(Exception):
    """The error of a stage; its arguments are the stage and the value at which it failed."""


@ps.node(capacity=3)
async def count(limit: int, fails_at: int) -> AsyncIterator[int]:
    for number in range(limit):
        if number == fails_at:
            raise Failed("count", number)
        if number % 3 == 0:
            await asyncio.sleep(0)
        yield number


@ps.node(capacity=1)
async def batched(size: int, values: AsyncIterator[int]) -> AsyncIterator[int]:
    held: list[int] = []
    async for value in values:
        held.append(value)
        if len(held) == size:
            yield sum(held)
            held = []
    if held:
        yield sum(held)


@ps.node
async def repeated(times: int, values: AsyncIterator[int]) -> AsyncIterator[int]:
    async for value in values:
        for _ in range(times):
            yield value


@ps.node
async def taken(limit: int, values: AsyncIterator[int]) -> AsyncIterator[int]:
    if not limit:
        return
    async for value in values:
        yield value
        limit -= 1
        if not limit:
            return


@ps.node(capacity=2)
async def generated(values: list[int]) -> AsyncIterator[int]:
    for value in values:
        yield value


@ps.node
async def checked(value: int, fails_at: int) -> int:
    for _ in range(value % 4):
        await asyncio.sleep(0)
    if value == fails_at:
        raise Failed("checked", value)
    return value + 1


@ps.node
def tripled(value: int) -> int:
    return 3 * value


@ps.node
async def merged(left: AsyncIterator[int], right: AsyncIterator[int]) -> AsyncIterator[int]:
    async for value in left:
        yield value
        yield await anext(right, -1)


@ps.node(concurrency=1)
async def limited(values: AsyncIterator[int]) -> AsyncIterator[int]:
    async for value in values:
        yield value + 1


limited_list = ps.node(concurrency=2, name="limited_list")(listed.fn)


@ps.node
class Reader:
    """A stateful reader: one at a time, on the instance of its scope."""

    async def __call__(self, values: AsyncIterator[int]) -> list[int]:
        return [value async for value in values]


stateful_list = Reader()


@ps.node
def few(value: int) -> int:
    return abs(value) % 4


@ps.node
def total(values: list[int]) -> int:
    return sum(values) % 41


booked: list[int] = []


@ps.node(effectful=True)
async def book(number: int) -> None:
    booked.append(number)


# Nodes that read a whole stream, indexed by the number of the stage; all but the first have few places.
READERS: list[Any] = [listed, limited_list, stateful_list]


def build(stages: list[Stage], other: list[Stage]) -> ps.Graph[[int, int], AsyncIterator[int]]:
    """Makes the graph of one pipeline, or of two merged pipelines."""

    async def pipeline(values: AsyncIterator[int], stages: list[Stage]) -> AsyncIterator[int]:
        for kind, number in stages:
            if kind == "booked":
                await book(number)
            elif kind == "listed":
                values = generated(await ps.map_each(tripled, await READERS[number % 3](values)))
            else:
                values = _stage(kind, number, values)
        return values

    # If both pipelines failed, a scheduler could meet either error first: so only one pipeline fails.
    other = [(kind, -1 if kind == "checked" else number) for kind, number in other]

    @ps.graph
    async def graph(limit: int, fails_at: int) -> AsyncIterator[int]:
        values = await pipeline(count(limit, fails_at), stages)
        return merged(values, await pipeline(count(limit, -1), other)) if other else values

    return graph


def _stage(kind: str, number: int, values: AsyncIterator[int]) -> AsyncIterator[int]:
    if kind == "checked":

        async def check(value: int) -> int:
            return await checked(value, number)

        return ps.map_each(check, values, concurrency=number % 5 + 1)
    if kind == "nested":

        async def nest(value: int) -> int:
            return total(await READERS[number % 3](limited(repeated(number, count(few(value), -1)))))

        async def plainly(value: int) -> int:
            return total(await READERS[number % 3](ps.map_each(tripled, count(few(value), -1))))

        return ps.map_each(nest if number == 4 else plainly, values, concurrency=number)
    if kind == "limited":
        return limited(values)
    if kind == "tripled":
        return ps.map_each(tripled, values, concurrency=number)
    sized = {"batched": batched, "repeated": repeated, "taken": taken}[kind]
    return sized(number, values)


def needed_twice(stages: list[Stage], other: list[Stage]) -> bool:
    """Whether a stream holds a place of a limited node and needs another place of it; such graphs are refused."""

    def needs(stages: list[Stage]) -> tuple[set[Any], set[Any], set[Any], bool]:
        """Nodes that hold a place for the stream, nodes that it needs at times, all nodes before it."""
        held: set[Any] = set()
        passing: set[Any] = set()
        before: set[Any] = set()
        for kind, number in stages:
            reader = READERS[number % 3]
            if kind == "limited":
                if limited in held | passing:
                    return held, passing, before, True
                held.add(limited)
            elif kind == "nested":
                passing |= {reader} - {listed} | ({limited} if number == 4 else set())
                if held & passing:
                    return held, passing, before, True
            elif kind == "listed":
                if reader in passing:
                    return held, passing, before, True
                before |= held | passing | {reader}
                held, passing = set(), set()
        return held, passing, before, False

    held, passing, before, is_refused = needs(stages)
    if not other or is_refused:
        return is_refused
    others_held, others_passing, others_before, is_refused = needs(other)
    return (
        is_refused
        or bool(held & (others_held | others_passing | others_before))
        or bool(others_held & (held | passing | before))
    )


async def outcome(values: Any) -> tuple[list[int], object]:
    """Reads a stream to its end; returns its values, and the arguments of the error that ended it."""
    got: list[int] = []
    try:
        async for value in values:
            got.append(value)  # noqa: PERF401 - keeps the values before an error
    except Failed as error:
        return got, error.args
    return got, None


async def eager(call: ps.Call[AsyncIterator[int]]) -> tuple[list[int], object]:
    try:
        values = await call
    except Failed as error:
        return [], error.args
    return await outcome(values)


stages = st.lists(
    st.one_of(
        st.tuples(st.just("checked"), st.integers(0, 40)),
        st.tuples(
            st.sampled_from(["tripled", "batched", "repeated", "taken", "listed", "nested", "limited", "booked"]),
            st.integers(1, 4),
        ),
    ),
    max_size=4,
)


@given(
    stages, stages, st.integers(0, 30), st.integers(-1, 40), st.sampled_from(SCHEDULERS[1:]), st.integers(0, 1 << 16)
)
@example([("nested", 1), ("listed", 1)], [], 3, -1, "wave", 0)  # a limited reader, then the same reader in a body
@example([("nested", 2), ("listed", 1)], [("nested", 1)], 9, -1, "wave", 0)
@example([("limited", 1)], [("limited", 1), ("listed", 1)], 30, -1, "wave", 0)  # stays open while its reader reads
def test_random_pipelines(
    first: list[Stage], other: list[Stage], limit: int, fails_at: int, scheduler: Scheduler, seed: int
) -> None:
    graph = build(first, other)
    if needed_twice(first, other):
        event("refused")
        with pytest.raises(ps.PlanError, match="would wait for each other for ever"):
            engine.plan(graph)
        return

    async def main() -> None:
        booked.clear()
        expected, in_order = await eager(graph(limit, fails_at)), booked.copy()
        for one in ("actors", scheduler):
            booked.clear()
            async with engine.stream(graph(limit, fails_at), scheduler=one) as values:
                assert await outcome(values) == expected, one
            assert booked == in_order, one
        async with engine.deploy(graph, max_in_flight=2) as service:

            async def client() -> tuple[list[int], object]:
                async with service.stream(graph(limit, fails_at)) as values:
                    return await outcome(values)

            assert await asyncio.gather(*(client() for _ in range(3))) == [expected] * 3
        await testing.wait_quiescent()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    testing.run_seeded(main, seed=seed, timeout_seconds=3600)
