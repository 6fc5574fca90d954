"""A failed batch is run in parts: few of them, and each item fails or succeeds by itself."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.devices.failed_batches import Bisection


class BadItems(Exception):
    def __init__(self, positions: list[int]) -> None:
        self.positions = positions


def bisect(count: int, bad: set[int]) -> tuple[list[list[int]], dict[int, Exception], set[int]]:
    """Runs everything that it asks for, and returns the batches run, the errors, and what has succeeded."""
    bisection = Bisection(count, BadItems(sorted(bad)))
    runs: list[list[int]] = []
    good: set[int] = set()
    while batch := bisection.next_batch():
        runs.append(batch)
        assert batch == sorted(batch)  # packed items in another order may need more rows
        if failing := [one for one in batch if one in bad]:
            bisection.failed(BadItems(failing))
        else:
            bisection.succeeded()
            good.update(batch)
    return runs, bisection.errors, good


def halvings(count: int) -> int:
    return math.ceil(math.log2(count))


@pytest.mark.parametrize("count", range(2, 65))
def test_one_failing_item_costs_two_runs_more_than_halving_and_fails_with_its_own_error(count: int) -> None:
    for position in range(count):
        runs, errors, good = bisect(count, {position})
        assert len(runs) <= halvings(count) + 2
        assert len(runs) <= 2 * halvings(count)
        assert good == set(range(count)) - {position}
        [(found, error)] = errors.items()
        assert found == position
        assert isinstance(error, BadItems)
        assert error.positions == [position]


@given(st.integers(1, 64).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_any_number_of_failing_items_is_found_within_the_bound(case: tuple[int, set[int]]) -> None:
    count, bad = case
    if not bad:
        bad = {0}
    runs, errors, good = bisect(count, bad)
    assert set(errors) == bad
    assert good == set(range(count)) - bad
    assert all(isinstance(error, BadItems) and error.positions == [one] for one, error in errors.items())
    assert len(runs) <= min(len(bad) * (halvings(count) + 2), 2 * count)


@given(st.integers(1, 40), st.integers())
def test_it_ends_within_the_bound_if_what_fails_changes_from_run_to_run(count: int, seed: int) -> None:
    chance = random.Random(seed)
    bisection = Bisection(count, ValueError("first"))
    settled: list[int] = [*bisection.errors]
    runs = 0
    while batch := bisection.next_batch():
        runs += 1
        if chance.random() < 0.5:
            bisection.failed(ValueError("again"))
            settled += batch if len(batch) == 1 else []
        else:
            bisection.succeeded()
            settled += batch
    assert sorted(settled) == list(range(count))
    assert runs <= 2 * count


def test_a_batch_of_one_is_not_run_again() -> None:
    runs, errors, _ = bisect(1, {0})
    assert runs == []
    assert list(errors) == [0]
