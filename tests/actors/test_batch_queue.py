"""Which items form a batch, and when: the queue without a clock, without tasks."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.actors.batching import BatchQueue


@dataclass(eq=False)
class Entry:
    """What waits."""

    value: int = 0
    priority: int = 0
    arrived_at: float = 0.0
    deadline: float = float("inf")
    group: str = ""
    is_cancelled: bool = False

    def is_wanted(self, now: float) -> bool:
        return not self.is_cancelled and now < self.deadline


def queue_of(max_size: int, *, max_wait_seconds: float = 1.0, max_queue: int | None = None) -> BatchQueue[Entry]:
    return BatchQueue(ps.Batch(max_size, max_wait_seconds=max_wait_seconds, max_queue=max_queue))


def values(batch: list[Entry]) -> list[int]:
    return [entry.value for entry in batch]


def test_a_full_batch_goes_at_once_and_a_small_one_when_its_first_item_has_waited() -> None:
    queue = queue_of(3)
    for number in range(4):
        queue.add(Entry(number, arrived_at=10.0 + number / 10))
    assert values(queue.take(10.3)) == [0, 1, 2]
    assert queue.take(10.3) == []
    assert queue.due_at == 11.3
    assert queue.take(11.29) == []
    assert values(queue.take(11.3)) == [3]
    assert queue.due_at is None


def test_without_a_wait_what_is_there_is_a_batch() -> None:
    queue = queue_of(8, max_wait_seconds=0)
    queue.add(Entry(1, arrived_at=5.0))
    assert values(queue.take(5.0)) == [1]


def test_unwanted_entries_are_dropped_and_do_not_fill_a_batch() -> None:
    queue = queue_of(2)
    gone, late, wanted = Entry(1), Entry(2, deadline=3.0), Entry(3)
    for entry in (gone, late, wanted):
        queue.add(entry)
    gone.is_cancelled = True
    assert queue.drop_unwanted(0.5) == [gone]
    assert values(queue.take(0.5)) == [2, 3]
    queue.add(Entry(4, arrived_at=2.5, deadline=3.0))
    queue.add(Entry(5, arrived_at=2.6))
    assert values(queue.drop_unwanted(3.0)) == [4]
    assert queue.due_at == 3.6
    assert values(queue.take(3.0, at_once=True)) == [5]


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


def test_a_batch_and_its_queue_are_full() -> None:
    queue = queue_of(2, max_queue=1)
    entries = [Entry(number) for number in range(4)]
    for entry in entries[:3]:
        assert not queue.is_full
        queue.add(entry)
    assert queue.is_full
    queue.discard(entries[0])
    assert not queue.is_full
    queue.add(entries[3])
    assert values(queue.take(0.0)) == [1, 2]
    assert queue.count == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: ps.Batch(0),
        lambda: ps.Batch(2, max_wait_seconds=-1),
        lambda: ps.Batch(2, max_wait_seconds=float("inf")),
        lambda: ps.Batch(2, max_queue=-1),
        lambda: ps.Batch(True),
    ],
)
def test_numbers_out_of_range_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=r"Batch\("):
        make()


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
                # nothing of higher priority is left behind
                assert all(left.priority <= one.priority for left in waiting for one in batch)
            assert len(waiting) < max_size
            assert all(now - one.arrived_at < max_wait_seconds for one in waiting)
        elif isinstance(operation, tuple) and waiting:
            unwanted = sorted(waiting, key=id)[operation[1] % len(waiting)]
            unwanted.is_cancelled = True
            assert queue.drop_unwanted(now) == [unwanted]
            waiting.remove(unwanted)
