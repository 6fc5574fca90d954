"""Batches that do not fit into memory: later batches are smaller, a larger one is tried at times, and sizes recover."""

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.devices.size_limits import SizeLimit, SizeLimits

SIZES = (1, 2, 4, 8, 16, 32)


def full_batches(limit: SizeLimit, number: int, fits: Callable[[int], bool]) -> list[int]:
    """Runs full batches one at a time, and halves of those that do not fit; returns all sizes."""
    ran: list[int] = []
    for _ in range(number):
        size = limit.max_calls or SIZES[-1]
        is_try = limit.begins_trial(size)
        ran.append(size)
        if fits(size):
            limit.fitted(size, is_try=is_try)
            continue
        while limit.exceeded(ran[-1]):
            ran.append(limit.size)
            if fits(limit.size):
                break
    return ran


def test_what_does_not_fit_is_halved_and_remembered_until_nothing_is_smaller() -> None:
    limit = SizeLimit((1, 2, 4, 8, 12))
    assert limit.max_calls is None
    assert limit.exceeded(12)
    assert limit.max_calls == limit.size == 4
    assert limit.exceeded(8)  # this batch was on its way already, so the limit stays
    assert limit.size == 4
    assert limit.exceeded(2)
    assert limit.size == 1
    assert not limit.exceeded(1)
    assert limit.max_calls == 1


def test_the_smallest_bucket_is_tried_even_if_it_is_more_than_half() -> None:
    limit = SizeLimit((6, 8))
    assert limit.exceeded(8)
    assert limit.size == 6
    assert not limit.exceeded(6)


def test_after_a_shortage_batches_become_as_large_as_before() -> None:
    limit = SizeLimit(SIZES)
    assert full_batches(limit, 1, lambda size: size <= 4) == [32, 16, 8, 4]
    ran = full_batches(limit, 100, lambda size: True)
    assert ran == [4] * 16 + [8] * 17 + [16] * 17 + [32] * 50
    assert limit.max_calls is None
    assert limit.is_lifted


def test_what_never_fits_is_tried_ever_more_seldom() -> None:
    limit = SizeLimit(SIZES)
    ran = full_batches(limit, 1 << 14, lambda size: size <= 4)
    tries = [number for number, size in enumerate(ran) if size > 4][3:]
    pauses = [after - before - 2 for before, after in pairwise(tries)]  # the half of a failed trial is not counted
    assert pauses[:6] == [32, 64, 128, 256, 512, 1024]
    assert set(pauses[6:]) == {1024}
    assert limit.max_calls == limit.size == 4


def test_of_a_size_that_fits_now_and_then_a_failure_is_not_forgotten_at_once() -> None:
    """Here, one batch of 32 fits, and two in flight at once do not."""
    limit, failures = SizeLimit(SIZES), 0
    for _ in range(1 << 12):
        size = limit.max_calls or 32
        is_try = limit.begins_trial(size)
        if size == 32 and not is_try:
            failures += 1
            limit.exceeded(size)
        else:
            limit.fitted(size, is_try=is_try)
    assert failures <= 10


def test_a_larger_batch_that_began_before_the_limit_was_known_tells_nothing() -> None:
    limit = SizeLimit(SIZES)
    limit.exceeded(32)
    limit.fitted(32, is_try=False)
    assert limit.max_calls == 16


def test_a_smaller_batch_tells_nothing_either_and_a_failure_begins_anew() -> None:
    limit = SizeLimit(SIZES)
    limit.exceeded(32)
    for _ in range(100):
        limit.fitted(8, is_try=False)
    assert limit.max_calls == 16
    for _ in range(15):
        limit.fitted(16, is_try=False)
    limit.exceeded(16)
    limit.fitted(8, is_try=False)
    assert limit.max_calls == 8


def test_only_one_larger_batch_is_on_its_way() -> None:
    limit = SizeLimit(SIZES)
    full_batches(limit, 17, lambda size: size <= 16)
    assert limit.max_calls == 32
    assert not limit.begins_trial(16)  # 16 calls are within the limit: no trial
    assert limit.max_calls == 32
    assert limit.begins_trial(17)
    assert limit.max_calls == 16


@given(st.lists(st.sampled_from((0, *SIZES)), max_size=200))
def test_whatever_has_happened_it_comes_to_an_end(room: list[int]) -> None:
    limit = SizeLimit(SIZES)
    for rows in room:
        full_batches(limit, 1, rows.__ge__)
        assert limit.size in SIZES
    full_batches(limit, len(SIZES) * 1025, lambda size: True)
    assert limit.max_calls is None


def test_limits_are_of_their_own_group_and_are_forgotten() -> None:
    limits = SizeLimits(SIZES)
    assert limits["long"].exceeded(32)
    assert limits["longer"].exceeded(16)
    assert limits.largest == {"long": 16, "longer": 8}
    assert {group: limit.size for group, limit in limits.items()} == {"long": 16, "longer": 8}
    for _ in range(16):
        limits.fitted("long", 16, is_try=False)
    assert limits.largest == {"long": 32, "longer": 8}
    assert limits["long"].begins_trial(32)
    assert limits.largest == {"long": 16, "longer": 8}
    limits.fitted("long", 32, is_try=True)
    assert limits.largest == {"longer": 8}
    assert limits["long"].size == 32  # an old limit is kept for some more batches
    for _ in range(16):
        limits.fitted("long", 32, is_try=False)
    assert "long" not in limits
    for number in range(256):
        limits[number].exceeded(32)
    assert "longer" not in limits.largest
    assert len(limits.largest) == 256
