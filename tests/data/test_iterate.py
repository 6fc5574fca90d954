"""A plain `for` loop over the values of a graph."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

import penstock as ps
from penstock import data


@ps.node
async def count(limit: int | None) -> AsyncIterator[int]:
    number = 0
    while number != limit:
        await asyncio.sleep(0)
        yield number
        number += 1


@ps.node(runs_on="thread")
def checked(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


@ps.graph
async def counting(limit: int | None) -> AsyncIterator[int]:
    return count(limit)


@ps.graph
async def failing(limit: int | None) -> AsyncIterator[int]:
    return count(limit) >> checked


@ps.graph
async def one() -> int:
    return 1


def test_a_for_loop_reads_the_values() -> None:
    with data.iterate(counting(100)) as numbers:
        assert list(numbers) == list(range(100))
        assert list(numbers) == []


def test_a_loop_that_is_left_ends_everything() -> None:
    threads = threading.active_count()
    with data.iterate(counting(None)) as numbers:
        for number in numbers:
            if number == 10:
                break
        assert next(numbers) == 11
    assert threading.active_count() == threads
    with pytest.raises(ps.EngineClosedError, match=r"with data\.iterate"):
        next(numbers)
    with pytest.raises(ps.EngineClosedError, match="make a new one"), numbers:
        pass
    with pytest.raises(KeyError), data.iterate(counting(None)) as numbers:
        raise KeyError(next(numbers))


def test_errors_are_raised_in_the_loop() -> None:
    got: list[int] = []
    with pytest.raises(ValueError, match="three"), data.iterate(failing(None)) as numbers:
        got.extend(numbers)
    with data.iterate(failing(None)) as numbers:
        assert [next(numbers) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="three"):
            next(numbers)
    with pytest.raises(ps.OptionsError), data.iterate(counting(1), max_in_flight=2):
        pass
    with pytest.raises(ps.PlanError), data.iterate(one()):  # type: ignore[arg-type]
        pass
    with pytest.raises(ps.EngineClosedError, match=r"with data\.iterate"):
        next(data.iterate(counting(1)))


async def test_it_is_refused_where_a_loop_runs_and_allowed_in_a_thread_of_it() -> None:
    with pytest.raises(ps.EngineLoopError, match=r"async with engine\.stream"), data.iterate(counting(3)):
        pass

    def read() -> list[int]:
        with data.iterate(counting(3)) as numbers:
            return list(numbers)

    assert await asyncio.to_thread(read) == [0, 1, 2]
