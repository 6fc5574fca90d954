"""A token bucket keeps its rate over any time, without a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.rate_limit import TokenBucket


def test_a_burst_then_the_rate() -> None:
    bucket = TokenBucket(per_second=2, burst=3)
    assert [bucket.take(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert bucket.ready_at() == 100.5
    assert not bucket.take(100.49)
    assert bucket.take(100.5)
    assert not bucket.take(100.5)


def test_a_pause_fills_it_and_no_more_than_that() -> None:
    bucket = TokenBucket(per_second=1, burst=2)
    for now in (0.0, 1000.0):
        assert [bucket.take(now) for _ in range(3)] == [True, True, False]


@given(st.integers(1, 5), st.integers(1, 8), st.lists(st.integers(0, 5), max_size=60))
def test_no_window_lets_more_through_than_the_burst_and_the_rate(
    per_second: int, burst: int, pauses: list[int]
) -> None:
    bucket = TokenBucket(per_second, burst)
    now = 0.0
    passed: list[float] = []
    for pause in pauses:
        now += pause / 8
        could = bucket.ready_at() <= now
        assert bucket.take(now) == could
        if could:
            passed.append(now)
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= burst + (end - start) * per_second + 1e-6


@pytest.mark.parametrize(("per_second", "burst"), [(0, 1), (-1, 1), (float("inf"), 1), (1, 0), (1, 1.5)])
def test_numbers_out_of_range_are_refused(per_second: float, burst: int) -> None:
    with pytest.raises(ValueError, match=r"per_second=|burst="):
        TokenBucket(per_second, burst)
