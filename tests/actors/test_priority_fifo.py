"""PriorityFifo against a list: first-in first-out within one priority, and any entry may leave from the middle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.channel import PriorityFifo


class Entry:
    def __init__(self, priority: int) -> None:
        self.priority = priority


# A priority to push with; None to pop; ("discard", number) to take one out of the middle.
operations = st.lists(st.one_of(st.integers(-2, 2), st.none(), st.tuples(st.just("discard"), st.integers(0, 20))))


@given(operations)
def test_lanes_are_a_list_sorted_by_priority(operations: list[int | tuple[str, int] | None]) -> None:
    lanes: PriorityFifo[Entry] = PriorityFifo()
    expected: list[Entry] = []
    for operation in operations:
        if isinstance(operation, int):
            entry = Entry(operation)
            lanes.push(entry, operation)
            expected.append(entry)
            expected.sort(key=lambda entry: -entry.priority)  # a stable sort
        elif not expected:
            continue
        elif operation is None:
            assert lanes.pop() is expected.pop(0)
        else:
            entry = expected.pop(operation[1] % len(expected))
            assert not lanes.discard(entry, entry.priority + 1)
            assert lanes.discard(entry, entry.priority)
            assert not lanes.discard(entry, entry.priority)
        assert len(lanes) == lanes.count == len(expected)
        assert bool(lanes) == bool(expected)
        for priority in range(-2, 3):
            assert [*lanes.lane(priority)] == [entry for entry in expected if entry.priority == priority]
        if expected:
            assert lanes.head() is expected[0]
            assert lanes.highest == expected[0].priority


def test_empty_lanes_raise() -> None:
    lanes: PriorityFifo[Entry] = PriorityFifo()
    for look in (lanes.pop, lanes.head, lambda: lanes.highest):
        with pytest.raises(IndexError):
            look()
