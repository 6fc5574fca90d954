"""What may be asked of a node beside its function: limits, timeout, retry, fallback, where it runs."""

import math
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast, get_args

from .supervision import RestartMode
from .whole_numbers import is_whole

RunsOn = Literal["loop", "thread", "process"]
"""The values of `runs_on=`: where a plain `def` is called."""


@dataclass(frozen=True)
class Retry:
    """Run a failed attempt again.

    Args:
        attempts: how often it may run in all, the first time included.
        backoff_seconds: pause before the second attempt; it doubles for each further one.
        max_backoff_seconds: the longest pause.
        jitter: share of the pause that is random, 0 to 1, so that many callers do not come back in step.
        retry_on: the exceptions that are worth another attempt.

    Raises:
        ValueError: a number is out of its range.
    """

    attempts: int
    _: KW_ONLY
    backoff_seconds: float = 0.0
    max_backoff_seconds: float = 30.0
    jitter: float = 0.1
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception

    def __post_init__(self) -> None:
        if not is_whole(self.attempts, 1):
            raise ValueError(f"Retry(attempts={self.attempts!r}): a whole number of at least 1, with the first time")
        if not (0 <= self.backoff_seconds < math.inf and 0 <= self.max_backoff_seconds < math.inf):
            raise ValueError("Retry: backoff_seconds and max_backoff_seconds must be finite and not negative")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"Retry(jitter={self.jitter}): a share between 0 and 1")

    def pause_seconds(self, failed_attempt: int) -> float:
        """Return how long to wait after attempt number `failed_attempt`, counted from 1."""
        # The exponent is bounded because a float overflows at 2**1024, long after any sensible pause.
        pause = min(self.max_backoff_seconds, self.backoff_seconds * 2.0 ** min(failed_attempt - 1, 60))
        return pause * (1 - self.jitter * random.random())


@dataclass(frozen=True)
class Policy:
    """The policy of a node; see `penstock.node` for what each field means."""

    concurrency: int | None = None
    capacity: int | None = None
    max_bytes: int | None = None
    runs_on: RunsOn = "loop"
    timeout_seconds: float | None = None
    retry: Retry | None = None
    fallback: Callable[[Exception], Any] | None = None
    pure: bool = False
    effectful: bool = False
    restart: RestartMode = "permanent"
    restart_on: tuple[type[Exception], ...] = ()
    shutdown_seconds: float | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "capacity", "max_bytes"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1):
                raise ValueError(f"{name}={value!r}: a whole number of at least 1")
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds < math.inf:
            raise ValueError(
                f"timeout_seconds={self.timeout_seconds!r}: more than 0 and finite; leave it out for no limit"
            )
        if self.shutdown_seconds is not None and not 0 <= self.shutdown_seconds < math.inf:
            raise ValueError(f"shutdown_seconds={self.shutdown_seconds!r}: 0 or more, and finite")
        if self.model is not None and not _is_name(self.model):
            raise ValueError(f"model={self.model!r}: the name of the model that it calls, such as 'gpt-5'")
        if self.runs_on not in ("loop", "thread", "process"):
            raise ValueError(f"runs_on={self.runs_on!r}: one of 'loop', 'thread', 'process'")
        if self.restart not in get_args(RestartMode):
            raise ValueError(f"restart={self.restart!r}: one of {', '.join(map(repr, get_args(RestartMode)))}")
        if not _are_exceptions(self.restart_on):
            raise ValueError(f"restart_on={self.restart_on!r}: a tuple of exception classes")
        if self.pure and self.effectful:
            raise ValueError("a node is either pure or effectful, not both")

    @property
    def is_plain(self) -> bool:
        """Whether a handler may be awaited directly: nothing to time, repeat, replace or move elsewhere."""
        return self.is_once and self.runs_on == "loop"

    @property
    def is_once(self) -> bool:
        """Whether there is one attempt, whose outcome is the item's, however long it takes."""
        return self.timeout_seconds is None and self.retry is None and self.fallback is None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _are_exceptions(value: object) -> bool:
    classes = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (None,)
    return all(isinstance(one, type) and issubclass(one, Exception) for one in classes)
