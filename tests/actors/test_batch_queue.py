"""Which items form a batch, and when: the queue without a clock, without tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.actors.batching import BatchQueue
from penstock.actors.own_loops import AnyRequest

Item = AnyRequest[int]


def queue_of(max_size: int, *, max_wait_seconds: float = 1.0, max_queue: int | None = None) -> BatchQueue[Item]:
    return BatchQueue(ps.Batch(max_size, max_wait_seconds=max_wait_seconds, max_queue=max_queue))


def values(batch: list[Item]) -> list[int]:
    return [item.value for item in batch]


def test_a_full_batch_goes_at_once_and_a_small_one_when_its_first_item_has_waited() -> None:
    queue = queue_of(3)
    for number in range(4):
        assert queue.add(AnyRequest(number), now=10.0 + number / 10)
    assert values(queue.take(10.3)) == [0, 1, 2]
    assert queue.take(10.3) == []
    assert queue.due_at == 11.3
    assert queue.take(11.29) == []
    assert values(queue.take(11.3)) == [3]
    assert queue.due_at is None


def test_without_a_wait_what_is_there_is_a_batch() -> None:
    queue = queue_of(8, max_wait_seconds=0)
    queue.add(AnyRequest(1), now=5.0)
    assert values(queue.take(5.0)) == [1]


def test_cancelled_and_expired_items_are_not_in_a_batch_and_do_not_fill_one() -> None:
    queue = queue_of(2)
    gone, late, wanted = AnyRequest(1), AnyRequest(2, deadline=3.0), AnyRequest(3)
    for item in (gone, late, wanted):
        queue.add(item, now=0.0)
    gone.cancel()
    assert values(queue.take(0.5)) == [2, 3]
    queue.add(AnyRequest(4, deadline=3.0), now=2.5)
    queue.add(AnyRequest(5), now=2.6)
    assert values(queue.take(3.0, at_once=True)) == [5]


def test_higher_priorities_go_first_and_the_others_in_the_order_in_which_they_came() -> None:
    queue = queue_of(3)
    for number, priority in enumerate([0, 0, 1, 0, 1]):
        queue.add(AnyRequest(number, priority), now=0.0)
    assert values(queue.take(0.0)) == [2, 4, 0]
    assert values(queue.take(0.0, at_once=True)) == [1, 3]


def test_more_than_a_batch_and_its_queue_are_refused() -> None:
    queue = queue_of(2, max_queue=1)
    items: list[Item] = [AnyRequest(number) for number in range(4)]
    assert [queue.add(item, now=0.0) for item in items] == [True, True, True, False]
    items[0].cancel()  # what nobody waits for takes no place
    assert queue.add(items[3], now=0.0)
    assert values(queue.take(0.0)) == [1, 2]
    assert len(queue) == 1


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
    waiting: dict[Item, float] = {}
    now = 0.0
    for operation in operations:
        if isinstance(operation, int):
            item: Item = AnyRequest(0, operation)
            queue.add(item, now)
            waiting[item] = now
        elif operation == "tick":
            now += 1.0
        elif operation == "take":
            while batch := queue.take(now):
                assert len(batch) <= max_size
                for one in batch:
                    del waiting[one]
                # nothing of higher priority is left behind
                assert all(left.priority <= one.priority for left in waiting for one in batch)
            assert len(waiting) < max_size
            assert all(now - came < max_wait_seconds for came in waiting.values())
        elif isinstance(operation, tuple) and waiting:
            unwanted = list(waiting)[operation[1] % len(waiting)]
            unwanted.cancel()
            del waiting[unwanted]
