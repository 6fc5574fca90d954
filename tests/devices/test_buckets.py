"""Few sizes and lengths, and none much larger than what is in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import devices
from penstock.devices.device_batch import SHORTEST_LENGTH, batch_sizes, padded_length
from penstock.devices.engine_device import batch_size


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (devices.DeviceBatch(1), (1,)),
        (devices.DeviceBatch(2), (1, 2)),
        (devices.DeviceBatch(27), (1, 2, 4, 8, 16, 27)),
        (devices.DeviceBatch(32), (1, 2, 4, 8, 16, 32)),
        (devices.DeviceBatch(32, buckets=(4, 8)), (4, 8, 32)),
        (devices.DeviceBatch(8, buckets=(8,)), (8,)),
    ],
)
def test_batches_have_the_sizes_asked_for_and_the_largest(batch: devices.DeviceBatch, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(batch) == sizes


@given(st.integers(1, 300).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most))))
def test_a_batch_is_padded_to_less_than_twice_its_items(case: tuple[int, int]) -> None:
    most, count = case
    assert count <= batch_size(count, batch_sizes(devices.DeviceBatch(most))) < 2 * count or count == 1


@given(st.integers(0, 10**6))
def test_a_length_is_padded_to_less_than_twice_or_to_the_shortest(length: int) -> None:
    padded = padded_length(length, "powers_of_two")
    assert padded is not None
    assert length <= padded
    assert padded == SHORTEST_LENGTH or padded < 2 * length


def test_lengths_have_the_buckets_asked_for() -> None:
    assert [padded_length(length, (3, 10)) for length in (0, 3, 4, 10, 11)] == [3, 3, 10, 10, None]


def test_300_random_lengths_need_few_programs() -> None:
    assert len({padded_length(length, "powers_of_two") for length in range(1, 301)}) == 7
