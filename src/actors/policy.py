"""The policy of a node: its limits, timeout, retries, fallback, and where its function runs."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from .._errors import OptionsError
from .accepted import (
    FUNCTION,
    NAME,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SWITCH,
    Accepted,
    are_exceptions,
    check_fields,
    instance,
    one_of,
    optional,
    whole,
)
from .supervision import RestartMode

RunsOn = Literal["loop", "thread", "process"]
"""The values of `runs_on=`: where a plain `def` is called."""


@dataclass(frozen=True)
class Retry:
    """How often, and after which errors, a node runs again for an item.

    Args:
        attempts: how many attempts there are in all, including the first.
        backoff_seconds: the pause before the second attempt, in seconds; it doubles with each further attempt.
        max_backoff_seconds: the longest pause, in seconds.
        jitter: the share of a pause that is random, from 0 to 1, so that many callers do not come back at once.
        retry_on: the exception class, or a tuple of classes, after which another attempt is made.

    Raises:
        OptionsError: an argument has a value that it does not accept.
    """

    attempts: int
    _: KW_ONLY
    backoff_seconds: float = 0.0
    max_backoff_seconds: float = 30.0
    jitter: float = 0.1
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception

    def __post_init__(self) -> None:
        check_fields(self, _RETRY, "Retry(")

    def _pause_seconds(self, failed_attempt: int) -> float:
        """Return how long to wait after attempt number `failed_attempt`, counted from 1."""
        import random  # here, because the import takes a while and most programs have no retries

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
    ordered: bool = False
    stateless: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _POLICY)
        if self.pure and self.effectful:
            raise OptionsError("pure=True, effectful=True: a node is either pure or effectful, not both")
        if self.ordered and (self.concurrency, self.capacity, self.max_bytes) != (None, None, None):
            raise OptionsError(
                "ordered=True: items wait at the node for their turn, and it takes one after the other, so "
                "concurrency=, capacity= and max_bytes= do not apply; max_in_flight= bounds how many wait"
            )

    @property
    def is_plain(self) -> bool:
        """Whether a worker may simply call the function: on the loop, without timeout, retries or fallback."""
        return self.is_once and self.runs_on == "loop"

    @property
    def is_once(self) -> bool:
        """Whether there is a single attempt, without timeout or fallback."""
        return self.timeout_seconds is None and self.retry is None and self.fallback is None


_RETRY: Final = {
    "attempts": Accepted(f"{whole(1).text}, with the first time", whole(1).fits),
    "backoff_seconds": NOT_NEGATIVE,
    "max_backoff_seconds": NOT_NEGATIVE,
    "jitter": SHARE,
    "retry_on": Accepted(
        "an exception class, or a tuple of them", lambda value: are_exceptions((value,)) or are_exceptions(value)
    ),
}
_POLICY: Final = {
    **dict.fromkeys(("concurrency", "capacity", "max_bytes"), optional(whole(1))),
    "runs_on": one_of(RunsOn),
    "timeout_seconds": optional(POSITIVE),
    "retry": optional(instance(Retry, "a Retry, such as penstock.Retry(3)")),
    "fallback": optional(Accepted("a function of the exception", FUNCTION.fits)),
    "pure": SWITCH,
    "effectful": SWITCH,
    "ordered": SWITCH,
    "stateless": SWITCH,
    "restart": one_of(RestartMode),
    "restart_on": Accepted("a tuple of exception classes", are_exceptions),
    "shutdown_seconds": optional(NOT_NEGATIVE),
    "model": optional(Accepted("the name of the model that it calls, such as 'gpt-5'", NAME.fits)),
}
