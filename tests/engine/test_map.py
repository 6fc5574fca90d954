"""`service.map`: it is told of results as they end, and has to give what a reader of the stream would get."""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import engine
from penstock.testing import run_seeded


class Refused(Exception):
    """What some of the items fail with."""


@dataclass(frozen=True)
class Item:
    number: int
    seconds: float
    fails: bool


@st.composite
def items(draw: st.DrawFn) -> list[Item]:
    kinds = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=24))
    return [Item(number, float(seconds), fails=kind == 0) for number, (kind, seconds) in enumerate(kinds)]


@given(
    items(),
    st.sampled_from([1, 2, 5, 64]),
    st.booleans(),
    st.sampled_from(["raise", "skip"]),
    st.integers(0, 2**32),
)
@settings(deadline=None)
def test_it_gives_what_a_reader_of_the_stream_gets(
    items: list[Item], window: int, ordered: bool, on_error: Literal["raise", "skip"], seed: int
) -> None:
    ended: list[Item] = []

    @ps.node
    async def work(item: Item) -> int:
        await asyncio.sleep(item.seconds)
        ended.append(item)
        if item.fails:
            raise Refused(item.number)
        return item.number

    @ps.graph
    async def of(item: Item) -> int:
        return await work(item)

    async def main() -> Any:
        async with engine.deploy(of) as service:
            calls = [of(item) for item in items]
            try:
                return await service.map(calls, max_in_flight=window, ordered=ordered, on_error=on_error)
            except Refused as error:
                return error.args[0]

    found = run_seeded(main, seed=seed)
    in_turn = items if ordered else ended
    failed = [item.number for item in in_turn if item.fails]
    if failed and on_error == "raise":
        assert found == failed[0]
    else:
        assert found == [item.number for item in in_turn if not item.fails]


async def test_the_source_is_asked_for_no_more_than_may_be_in_flight() -> None:
    asked: list[int] = []
    gates = [asyncio.Event() for _ in range(8)]
    started: asyncio.Queue[int] = asyncio.Queue()

    @ps.node
    async def wait(number: int) -> int:
        started.put_nowait(number)
        await gates[number].wait()
        return number

    @ps.graph
    async def of(number: int) -> int:
        return await wait(number)

    def numbers() -> Any:
        for number in range(8):
            asked.append(number)
            yield of(number)

    async with engine.deploy(of) as service:
        mapping = asyncio.ensure_future(service.map(numbers(), max_in_flight=3))
        assert [await started.get() for _ in range(3)] == [0, 1, 2]
        gates[1].set()
        gates[2].set()
        # In their turn: the first one holds the places of those that have ended.
        gates[0].set()
        assert [await started.get() for _ in range(3)] == [3, 4, 5]
        assert asked == [0, 1, 2, 3, 4, 5]
        for gate in gates:
            gate.set()
        assert await mapping == [*range(8)]


async def test_a_cancelled_map_cancels_its_items() -> None:
    cancelled: list[int] = []
    started = asyncio.Event()

    @ps.node
    async def stay(number: int) -> int:
        if number == 0:
            return 0
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    @ps.graph
    async def of(number: int) -> int:
        return await stay(number)

    async with engine.deploy(of) as service:
        mapping = asyncio.ensure_future(service.map(map(of, range(2))))
        await started.wait()
        mapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mapping
        assert cancelled == [1]
