"""The batch queue, without a clock and without tasks: which items form a batch, and when."""

from dataclasses import dataclass
from random import Random
from statistics import mean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import devices
from penstock.actors.batching import BatchQueue
from penstock.actors.packing import Rows, in_order


@dataclass(eq=False)
class Entry:
    """An entry that waits in the queue."""

    value: int = 0
    priority: int = 0
    arrived_at: float = 0.0
    group: str = ""
    cost: float = 0
    is_cancelled: bool = False

    def is_wanted(self, now: float) -> bool:
        return not self.is_cancelled


def queue_of(max_size: int, *, max_wait_seconds: float = 1.0, **options: Any) -> BatchQueue[Entry]:
    return BatchQueue(ps.Batch(max_size, max_wait_seconds=max_wait_seconds, **options))


def values(batch: list[Entry]) -> list[int]:
    return [entry.value for entry in batch]


def test_higher_priorities_go_first_and_the_others_in_the_order_in_which_they_came() -> None:
    queue = queue_of(3)
    for number, priority in enumerate([0, 0, 1, 0, 1]):
        queue.add(Entry(number, priority))
    assert values(queue.take(0.0)) == [2, 4, 0]
    assert values(queue.take(0.0, at_once=True)) == [1, 3]


def test_a_batch_has_entries_of_one_group_and_as_many_as_that_may() -> None:
    queue = queue_of(3)
    for number, group in enumerate("abaabb"):
        queue.add(Entry(number, group=group))
    assert values(queue.take(0.0, largest={"a": 2})) == [0, 2]
    assert values(queue.take(0.0)) == [1, 4, 5]
    assert queue.take(0.0) == []
    queue.add(Entry(6, priority=1, group="b"))
    assert values(queue.take(0.0, at_once=True)) == [6]
    assert values(queue.take(1.0)) == [3]


@given(
    st.integers(1, 4),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.lists(
        st.one_of(st.integers(-1, 1), st.just("take"), st.just("tick"), st.tuples(st.just("cancel"), st.integers(0, 9)))
    ),
)
def test_every_wanted_item_is_in_one_batch_and_none_waits_too_long(
    max_size: int, max_wait_seconds: float, operations: list[int | str | tuple[str, int]]
) -> None:
    queue = queue_of(max_size, max_wait_seconds=max_wait_seconds)
    waiting: set[Entry] = set()
    now = 0.0
    for operation in operations:
        if isinstance(operation, int):
            entry = Entry(0, operation, now)
            queue.add(entry)
            waiting.add(entry)
        elif operation == "tick":
            now += 1.0
        elif operation == "take":
            while batch := queue.take(now):
                assert len(batch) <= max_size
                waiting -= {*batch}
                # no entry of higher priority is left behind
                assert all(left.priority <= one.priority for left in waiting for one in batch)
            assert len(waiting) < max_size
            assert all(now - one.arrived_at < max_wait_seconds for one in waiting)
        elif isinstance(operation, tuple) and waiting:
            unwanted = sorted(waiting, key=id)[operation[1] % len(waiting)]
            unwanted.is_cancelled = True
            assert queue.drop_unwanted(now) == [unwanted]
            waiting.remove(unwanted)


def test_the_cost_of_what_left_the_queue_fills_no_batch() -> None:
    queue = queue_of(4, max_cost=10, cost=len)
    gone, stays = Entry(0, cost=9), Entry(1, cost=9)
    queue.add(gone)
    assert not queue.is_due(0.0)
    queue.add(stays)
    assert queue.is_due(0.0)
    queue.discard(gone)
    assert not queue.is_due(0.0)
    assert values(queue.take(1.0)) == [1]
    queue.add(Entry(2, cost=5))
    assert not queue.is_due(0.0)


SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 4), st.integers(1, 5), st.integers(0, 12))
def test_a_packed_batch_is_what_a_plain_search_for_the_best_rows_finds(
    sizes: list[tuple[int, int]], count: int, items: int, look_ahead: int
) -> None:
    queue: BatchQueue[Entry] = BatchQueue(devices.PackedBatch(lengths=(5, 12), rows=count, items_per_row=items))
    queue._rows = Rows((5, 12), items, look_ahead)
    entries = [Entry(number, priority, cost=size, group=str(size > 5)) for number, (size, priority) in enumerate(sizes)]
    for entry in entries:
        queue.add(entry)
    while entries:
        groups = [[one for one in entries if one.group == group] for group in ("False", "True")]
        ordered = [sorted(group, key=lambda one: (-one.priority, one.value)) for group in groups if group]
        expected = [searched(group, count, items, look_ahead) for group in ordered]
        batch = queue.take(0.0)
        assert batch in expected
        assert batch[0] in [group[0] for group in ordered]  # so no entry waits for more batches than entries before it
        length = 5 if batch[0].group == "False" else 12
        rows = in_order(batch, lambda one: one.cost, length, items)
        assert len(rows) in {1, count}
        assert all(sum(one.cost for one in row) <= length and len(row) <= items for row in rows)
        # If any entry leaves the batch, the others still fit its rows.
        for gone in range(len(batch)):
            left = batch[:gone] + batch[gone + 1 :]
            assert len(in_order(left, lambda one: one.cost, length, items)) <= len(rows)
        entries = [one for one in entries if one not in batch]
    assert queue.count == 0


def searched(waiting: list[Entry], count: int, items: int, look_ahead: int) -> list[Entry]:
    """Return the next batch, found by trying every row for every entry."""
    length = 5 if waiting[0].group == "False" else 12
    rows: list[list[Entry]] = []
    passed = 0
    for entry in waiting:
        fitting = [row for row in rows if sum(one.cost for one in (*row, entry)) <= length and len(row) < items]
        if fitting:
            max(fitting, key=lambda row: sum(one.cost for one in row)).append(entry)
        elif len(rows) < count:
            rows.append([entry])
        elif passed == look_ahead:
            break
        else:
            passed += 1
    return [entry for row in (rows if len(rows) == count else rows[:1]) for entry in row]


def test_a_long_item_is_overtaken_by_those_of_one_batch_only() -> None:
    queue: BatchQueue[Entry] = BatchQueue(devices.PackedBatch(lengths=(8,), rows=1, items_per_row=4))
    for number in range(4):
        queue.add(Entry(number, cost=2))
    queue.add(Entry(100, cost=8))
    batches: list[list[int]] = []
    for number in range(4, 10):  # one more entry for each batch
        queue.add(Entry(number, cost=2))
        batches.append(values(queue.take(0.0)))
    assert batches[:3] == [[0, 1, 2, 3], [100], [4, 5, 6]]


def test_what_waits_fills_rows_nearly_to_the_end() -> None:
    random = Random(0)
    texts = [min(256, max(3, round(random.lognormvariate(3.1, 0.85)))) for _ in range(600)]
    assert 30 < mean(texts) < 38
    fills: list[float] = []
    for _ in range(100):
        queue: BatchQueue[Entry] = BatchQueue(devices.PackedBatch(lengths=(256,), rows=4, items_per_row=32))
        chosen = random.sample(texts, 64)
        for number, size in enumerate(chosen):
            queue.add(Entry(number, cost=size))
        rows = 0
        while batch := queue.take(0.0):
            rows += len(in_order(batch, lambda one: one.cost, 256, 32))
        fills.append(sum(chosen) / (256 * rows))
    assert median(fills) >= 0.9


@pytest.mark.parametrize(
    ("waiting", "returned", "come", "expected"),
    [
        (1, 7, [], 8),  # no caller comes again
        (1, 7, [0, 0, 3, 4], 4),  # all callers come
        (1, 7, [0, 0, 3, 0, 4], 4),  # later callers are in the next batch
        (1, 3, [1, 1, 1], 3),
        (1, 6, [7], 1),  # the batch is full
        (7, 1, [], 0),  # most callers wait already
        (0, 7, [], 0),  # no entry waits
        (8, 8, [], 0),  # the batch is full already
        (1, 0, [], 0),
    ],
)
def test_for_how_long_a_batch_waits(waiting: int, returned: int, come: list[int], expected: int) -> None:
    queue = queue_of(8)
    for _ in range(waiting):
        queue.add(Entry())
    queue.returned(returned)
    turns = 0
    while queue.waits_for_callers():
        for _ in range(come[turns] if turns < len(come) else 0):
            queue.add(Entry())
        queue.turn()
        turns += 1
        assert turns < 100
    assert turns == expected
    assert queue.is_due(float("inf")) == bool(queue.count)


def test_the_only_caller_who_comes_again_waits_for_nobody() -> None:
    queue = queue_of(8)
    queue.returned(1)
    queue.add(Entry())
    assert not queue.waits_for_callers()
