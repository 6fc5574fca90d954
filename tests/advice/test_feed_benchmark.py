"""`data.benchmark` counts correctly; the speed of a feed is not tested."""

import asyncio
import json
import threading
from collections import namedtuple
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, engine, testing
from tests.kit import counted

opened: list[int] = []


@ps.graph
@ps.node(capacity=8)
async def feed(count: int, size: int) -> AsyncIterator[dict[str, Any]]:
    opened.append(count)
    for _ in range(count):
        await asyncio.sleep(0)
        yield {"x": np.zeros((size, 3)), "y": np.zeros(size)}


async def test_each_run_starts_the_call_anew_and_counts_what_comes_after_the_warm_up() -> None:
    opened.clear()
    found = await data.benchmark(feed(50, 32), warmup_items=5, items=20, repeats=3)
    assert opened == [50, 50, 50]
    assert [(run.items, run.examples) for run in found.runs] == [(20, 640)] * 3
    for run in found.runs:
        assert 5 <= run.uncounted <= 30
        assert run.first_item_seconds > 0
    assert found.name == "feed"
    examples = found.examples_per_second
    assert 0 < examples.low <= examples.median <= examples.high
    assert examples.median == pytest.approx(32 * found.batches_per_second.median)
    assert "of 20 items or more" in str(found)
    assert "/s" in str(found)


async def test_what_was_prefetched_is_not_counted() -> None:
    async with engine.stream(ps.graph(counted)(60)) as stream:
        await testing.wait_quiescent()  # the buffer is full, and the generator has one more value
        found = await data.benchmark(stream, warmup_items=1, items=20, repeats=1)
        assert found.runs[0].uncounted >= 17
        # The benchmark has left the stream open, so it can be read on.
        assert await anext(stream) == found.runs[0].uncounted + 20


async def test_a_reader_that_never_has_to_wait_counts_in_the_end_and_a_feed_that_ends_early_as_far_as_it_goes() -> None:
    async def inline() -> AsyncIterator[list[int]]:
        for number in range(100):
            yield [number]

    [run] = (await data.benchmark(inline(), warmup_items=2, items=10, repeats=1)).runs
    assert (run.items, run.uncounted) == (10, 12)
    found = await data.benchmark(feed(40, 1), warmup_items=2, items=100, repeats=2)
    assert all(run.items + run.uncounted == 40 for run in found.runs)


async def test_a_plain_iterable_is_read_in_a_thread() -> None:
    threads: set[int] = set()

    class Loader:
        def __iter__(self) -> Iterator[tuple[Any, Any]]:
            for _ in range(10):
                threads.add(threading.get_ident())
                yield np.zeros((4, 2)), np.zeros(4)

    found = await data.benchmark(Loader(), warmup_items=3, items=5, repeats=2)
    assert [(run.items, run.examples, run.uncounted) for run in found.runs] == [(5, 20, 3)] * 2
    assert found.name == "Loader"
    assert threading.get_ident() not in threads


async def test_a_generator_is_read_on_until_it_ends() -> None:
    found = await data.benchmark(([number] for number in range(17)), warmup_items=2, items=5, repeats=10)
    assert [run.items for run in found.runs] == [5, 5, 1]


async def test_a_cancel_while_a_thread_reads_ends_after_the_present_item() -> None:
    began, goes_on = threading.Event(), threading.Event()
    read: list[int] = []

    def numbers() -> Iterator[list[int]]:
        for number in range(1000):
            read.append(number)
            began.set()
            goes_on.wait()
            yield [number]

    task = asyncio.create_task(data.benchmark(numbers()))
    await asyncio.to_thread(began.wait)
    task.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(read) < 1000


async def test_arrays_of_jax_are_waited_for_before_the_next_item_is_asked_for() -> None:
    jax = pytest.importorskip("jax")
    heavy = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))
    x = jax.numpy.eye(256)
    heavy(x).block_until_ready()
    were_ready: list[bool] = []

    async def arrays() -> AsyncIterator[Any]:
        for _ in range(6):
            given = heavy(x)
            yield given
            were_ready.append(given.is_ready())

    found = await data.benchmark(arrays(), warmup_items=1, items=2, repeats=1)
    assert were_ready == [True] * len(were_ready)
    assert len(were_ready) >= 2
    assert found.runs[0].examples == 512
    assert found.environment.devices == ("cpu",)
    assert found.environment.jax == jax.__version__


Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    value: Any


ITEMS: list[tuple[Any, int]] = [
    (np.zeros((5, 2)), 5),
    (np.float32(1), 1),
    ({"x": np.zeros(7), "y": np.zeros(3)}, 7),
    ((np.zeros(4), np.zeros(9)), 4),
    (Pair(np.zeros(6), 1), 6),
    (["a", "b"], 2),
    ({"texts": ["a", "b", "c"]}, 3),
    (Record(np.zeros(8)), 8),
    ("text", 1),
    ({}, 1),
    (None, 1),
]


async def test_how_many_examples_an_item_has_or_a_function_says_it_has() -> None:
    for item, examples in ITEMS:
        found = await data.benchmark([item], warmup_items=0, repeats=1)
        assert found.runs[0].examples == examples, item
    found = await data.benchmark([{"tokens": 12}], warmup_items=0, repeats=1, examples=lambda item: item["tokens"])
    assert found.runs[0].examples == 12


async def test_json_is_read_again() -> None:
    found = await data.benchmark([np.zeros(3)] * 5, warmup_items=1, repeats=2, name="zeros")
    text = found.to_json()
    assert data.Benchmark.from_json(text) == found
    assert json.loads(text)["examples_per_second"]["median"] == found.examples_per_second.median
    for wrong in ("{}", "[]", '{"runs": [{}]}', "no json"):
        with pytest.raises(ValueError):  # noqa: PT011 - of json, too
            data.Benchmark.from_json(wrong)


def of_rates(*rates: float, cores: int = 2, name: str = "a") -> data.Benchmark:
    about = data.Environment(python="3", implementation="CPython", system="L", cores=cores, jax=None, devices=())
    runs = [data.Run(items=1, examples=10, seconds=10 / r, first_item_seconds=1, uncounted=1) for r in rates]
    return data.Benchmark(name=name, runs=tuple(runs), environment=about)


def test_two_are_compared() -> None:
    fast, slow = of_rates(90, 100, 110), of_rates(40, 50, 60, cores=64, name="b")
    found = fast.compared_with(slow)
    assert found.examples_ratio.median == pytest.approx(2)
    assert (found.examples_ratio.low, found.examples_ratio.high) == (pytest.approx(95 / 55), pytest.approx(105 / 45))
    assert found.is_clear
    assert found.differences == ("cores: 2, 64",)
    assert "2.00 (1.73 to 2.33)" in str(found)
    assert ".;" not in str(found)
    assert not fast.compared_with(of_rates(80, 100, 130)).is_clear
    assert fast.compared_with(replace(fast, name="again")).differences == ()


async def test_refusals() -> None:
    with pytest.raises(ps.OptionsError, match="ended before an item counted"):
        await data.benchmark([1, 2, 3], warmup_items=3)
    with pytest.raises(TypeError, match="something to iterate over, got 3"):
        await data.benchmark(3)  # type: ignore[arg-type]
    for options in ({"items": 0}, {"repeats": 0}, {"warmup_items": -1}, {"items": 1.5}):
        with pytest.raises(ps.OptionsError):
            await data.benchmark([1], **options)  # type: ignore[arg-type]

    async def broken() -> AsyncIterator[int]:
        yield 1
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        await data.benchmark(broken(), warmup_items=0)
