"""Policies refuse numbers that mean nothing, and pauses between attempts grow to their bound."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Cache, Hedge, Retry
from penstock.actors.attempts import pause_after
from penstock.actors.policy import Policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attempts": 0}, "at least 1"),
        ({"attempts": 2, "backoff_seconds": -1}, "negative"),
        ({"attempts": 2, "max_backoff_seconds": -1}, "negative"),
        ({"attempts": 2, "backoff_seconds": float("nan")}, "finite"),
        ({"attempts": 2, "jitter": 1.5}, "between 0 and 1"),
        ({"attempts": 2, "jitter": -0.1}, "between 0 and 1"),
    ],
)
def test_a_retry_out_of_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retry(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"concurrency": 0},
        {"concurrency": 1.5},
        {"concurrency": True},
        {"capacity": 0},
        {"max_bytes": -1},
        {"timeout_seconds": 0},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": float("inf")},
        {"pure": True, "effectful": True},
        {"restart": "always"},
        {"shutdown_seconds": -1},
        {"shutdown_seconds": float("inf")},
        {"shutdown_seconds": float("nan")},
        {"restart_on": ValueError},
        {"restart_on": (ValueError, "OSError")},
        {"restart_on": (KeyboardInterrupt,)},
    ],
)
def test_a_policy_out_of_range_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Policy(**arguments)


def test_pauses_double_up_to_the_longest() -> None:
    retry = Retry(attempts=9, backoff_seconds=0.5, max_backoff_seconds=3, jitter=0)
    assert [pause_after(retry, OSError(), attempt) for attempt in range(1, 6)] == [0.5, 1, 2, 3, 3]


@given(
    attempt=st.integers(1, 10**6),
    backoff=st.floats(0, 1e6),
    longest=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
)
def test_a_pause_is_never_longer_than_said_nor_shorter_than_its_jitter(
    attempt: int, backoff: float, longest: float, jitter: float
) -> None:
    retry = Retry(attempts=2, backoff_seconds=backoff, max_backoff_seconds=longest, jitter=jitter)
    whole = Retry(attempts=2, backoff_seconds=backoff, max_backoff_seconds=longest, jitter=0)
    full, pause = pause_after(whole, OSError(), attempt), pause_after(retry, OSError(), attempt)
    assert full is not None
    assert pause is not None
    assert full <= longest
    assert full * (1 - jitter) <= pause <= full


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout_seconds": 1.0},
        {"retry": Retry(2)},
        {"fallback": str},
        {"failover": str},
        {"hedge": Hedge(after_seconds=1)},
        {"cache": Cache(max_bytes=1)},
    ],
)
def test_only_what_needs_care_is_not_once(arguments: dict[str, Any]) -> None:
    assert Policy(concurrency=3, capacity=2).is_once
    assert not Policy(**arguments).is_once
