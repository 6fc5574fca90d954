"""`service.map`: it takes results as they end, and must return what a reader of the stream would get."""

import asyncio
import gc
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, telemetry
from penstock.testing import run_seeded
from tests.kit import Gate


class Refused(Exception):
    """The error of some items."""


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
    items(), st.sampled_from([1, 2, 5, 64]), st.booleans(), st.sampled_from(["raise", "skip"]), st.integers(0, 2**32)
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

    of = ps.graph(work)

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

    of = ps.graph(wait)

    def numbers() -> Any:
        for number in range(8):
            asked.append(number)
            yield of(number)

    async with engine.deploy(of) as service:
        mapping = asyncio.ensure_future(service.map(numbers(), max_in_flight=3))
        assert [await started.get() for _ in range(3)] == [0, 1, 2]
        gates[1].set()
        gates[2].set()
        # Results keep input order: the first item holds back the places of the items that have ended.
        gates[0].set()
        assert [await started.get() for _ in range(3)] == [3, 4, 5]
        assert asked == [0, 1, 2, 3, 4, 5]
        for gate in gates:
            gate.set()
        assert await mapping == [*range(8)]


async def test_a_cancelled_map_cancels_its_items() -> None:
    gate = Gate()
    of = gate.graph()
    async with engine.deploy(of) as service:
        mapping = asyncio.ensure_future(service.map(map(of, range(2))))
        await gate.has(2)
        mapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mapping
        assert gate.cancelled == [0, 1]


class Value:
    """A value that a weak reference can point to, as to an array."""


@ps.node
async def make(number: int) -> Value:
    await asyncio.sleep(0)
    return Value()


values = ps.graph(make)


async def test_results_are_freed_when_the_caller_drops_them_and_not_when_cycles_are_collected() -> None:
    gc.disable()
    try:
        async with engine.deploy(values) as service:
            found = await service.map(map(values, range(10)))
            seen = [weakref.ref(value) for value in found]
            del found
            assert [value() for value in seen] == [None] * 10
    finally:
        gc.enable()


async def test_a_profile_that_ends_during_a_map_does_not_blame_its_reader() -> None:
    ended: list[int] = []
    some = asyncio.Event()

    @ps.node(concurrency=1)
    async def load(number: int) -> int:
        await asyncio.sleep(0.002)
        ended.append(number)
        if len(ended) == 20:
            some.set()
        return number

    loads = ps.graph(load)

    async with engine.deploy(loads) as service:
        with telemetry.profile() as profile:
            mapping = asyncio.ensure_future(service.map(map(loads, range(40)), max_in_flight=8))
            await some.wait()
        await mapping
    assert profile.verdict.node == "load", str(profile.verdict)
