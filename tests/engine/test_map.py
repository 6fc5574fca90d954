"""`service.map`: it takes results as they end, and must return what a reader of the stream would get."""

import asyncio
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, telemetry
from penstock.testing import run_seeded
from tests.kit import Gate, outcomes, without_the_collector


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
def test_it_gives_what_a_reader_of_the_stream_gets_and_asks_for_no_more_than_may_be_in_flight(
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

    def calls() -> Iterator[ps.Call[int]]:
        for item in items:
            # Results keep input order: an item holds back the places of the later items that have ended.
            in_turn = sum(1 for _ in itertools.takewhile(ended.__contains__, items)) if ordered else len(ended)
            assert item.number < in_turn + window
            yield of(item)

    async def main() -> Any:
        async with engine.deploy(of) as service:
            try:
                return await service.map(calls(), max_in_flight=window, ordered=ordered, on_error=on_error)
            except Refused as error:
                return error.args[0]

    found = run_seeded(main, seed=seed)
    results = items if ordered else ended
    failed = [item.number for item in results if item.fails]
    if failed and on_error == "raise":
        assert found == failed[0]
    else:
        assert found == [item.number for item in results if not item.fails]


async def test_a_cancelled_map_cancels_its_items() -> None:
    gate = Gate()
    of = gate.graph()
    async with engine.deploy(of) as service:
        mapping = asyncio.ensure_future(service.map(map(of, range(2))))
        await gate.has(2)
        mapping.cancel()
        assert await outcomes(mapping) == [asyncio.CancelledError]
        assert gate.cancelled == [0, 1]


class Value:
    """A value that a weak reference can point to, as to an array."""


@ps.node
async def make(number: int) -> Value:
    await asyncio.sleep(0)
    return Value()


values = ps.graph(make)


async def test_results_are_freed_when_the_caller_drops_them_and_not_when_cycles_are_collected() -> None:
    with without_the_collector():
        async with engine.deploy(values) as service:
            found = await service.map(map(values, range(10)))
            seen = [weakref.ref(value) for value in found]
            del found
            assert [value() for value in seen] == [None] * 10


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
