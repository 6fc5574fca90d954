"""The policy of a node: limits, timeout, retries, hedging, fallback, failover, cache and restarts."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, TypeAlias

from .._errors import OptionsError
from .accepted import (
    FUNCTION,
    NAME,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SWITCH,
    OptionRule,
    are_exceptions,
    check_fields,
    instance,
    is_read_at_once,
    one_of,
    optional,
    whole,
)
from .supervision import RestartMode

Effectful = bool | Literal["unordered"]
"""The values of `effectful=`: whether a node is called for its effect, and whether its calls keep their order."""


@dataclass(frozen=True)
class Retry:
    """How often, and after which errors, a node runs again for an item.

    Args:
        attempts: how many attempts there are in all, including the first. None for as many as the deadline of the call
            allows, to wait out an outage; None needs `backoff_seconds` and `retry_on`.
        backoff_seconds: the pause before the second attempt, in seconds; it doubles with each further attempt.
        max_backoff_seconds: the longest pause, in seconds.
        jitter: the share of a pause that is random, from 0 to 1, so that many callers do not come back at once.
        retry_on: the exception class, or a tuple of classes, after which another attempt is made.
        wait: a function of the error and the number of the attempt that failed. It returns the pause in seconds, as
            `wait=ps.retry_after` does, or None for the pause of the other arguments. If the pause is longer than
            `max_backoff_seconds`, there is no further attempt, because it would come too early. There is none either
            if the function raises. With `attempts=None`, a longer pause is cut to `max_backoff_seconds`, and 0 counts
            as None.

    Raises:
        OptionsError: an argument has a value that it does not accept.
    """

    attempts: int | None
    _: KW_ONLY
    backoff_seconds: float = 0.0
    max_backoff_seconds: float = 30.0
    jitter: float = 0.1
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception
    wait: Callable[[Exception, int], float | None] | None = None

    def __post_init__(self) -> None:
        check_fields(self, _RETRY, "Retry(")
        has_pause = min(self.backoff_seconds, self.max_backoff_seconds) > 0
        if self.attempts is None and (not has_pause or issubclass(Exception, self.retry_on)):
            raise OptionsError(
                "Retry(attempts=None) has no last attempt, so it needs a pause, such as backoff_seconds=0.5, and "
                "errors of an outage alone, such as retry_on=(ConnectionError, TimeoutError): with Exception, a bug or "
                "a bad message would be retried for ever"
            )
        if self.wait is not None:
            import inspect  # here, because the import takes a while and most programs have no retries

            try:
                inspect.signature(self.wait).bind(None, 1)
            except ValueError:  # a function written in C may have no signature
                pass
            except TypeError as error:
                raise OptionsError(
                    f"Retry(wait={self.wait!r}): it is called with the error and the number of the attempt, but "
                    f"{error}; write a function of both, such as wait=ps.retry_after"
                ) from None


@dataclass(frozen=True)
class Hedge:
    """When a second attempt begins beside the first, for nodes whose slowest calls are far slower than most.

    Args:
        after_seconds: how long the first attempt may take before the second begins, in seconds. For a stream, how long
            the first attempt may take until its first value.
        max_share: the largest share of the calls that get a second attempt. Each call adds this share to a budget,
            which begins with 1 and holds at most 10; a second attempt takes 1.

    Raises:
        OptionsError: an argument has a value that it does not accept.
    """

    _: KW_ONLY
    after_seconds: float
    max_share: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self, {"after_seconds": POSITIVE, "max_share": SHARE}, "Hedge(")


# One alternative for each number of parameters, so that type checkers can infer the parameters of a lambda.
KeyFunction: TypeAlias = (
    Callable[[Any], Any]
    | Callable[[Any, Any], Any]
    | Callable[[Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any], Any]
)


@dataclass(frozen=True)
class Cache:
    """Keeps the results of a node, for calls with equal arguments in the same Engine.

    Args:
        max_bytes: how many bytes are kept: the results, their arguments or keys, and 300 bytes for each result. The
            least recently used results are dropped first.
        ttl_seconds: for how long a result is kept, in seconds; None for as long as there is room. An older result is
            dropped when the next result is kept, at the latest.
        key: a function with the parameters of the node, whose hashable result stands for the arguments. Needed unless
            all arguments are numbers, strings, bytes, None, or tuples of these.
        size: a function of a result that returns its size in bytes. Needed for results of unknown size. Penstock knows
            the size of arrays, texts, bytes, numbers, None, and of lists, tuples and dicts of these.

    Raises:
        OptionsError: an argument has a value that it does not accept.
    """

    _: KW_ONLY
    max_bytes: int
    ttl_seconds: float | None = None
    key: KeyFunction | None = None
    size: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        accepted = {
            "max_bytes": whole(1),
            "ttl_seconds": optional(POSITIVE),
            "key": optional(
                OptionRule("a function with the parameters of the node, not an async one", is_read_at_once)
            ),
            "size": optional(OptionRule("a function of the result", FUNCTION.fits)),
        }
        check_fields(self, accepted, "Cache(")


def retry_after(error: BaseException, attempt: int = 1, /) -> float | None:
    """Return how many seconds a server asks to wait, in the header Retry-After of its response.

    `Retry(4, wait=ps.retry_after)` waits as long as the server asks.

    Args:
        error: an error of httpx, aiohttp or requests that has a response or its headers. None of these is imported.
        attempt: the number of the attempt that failed; ignored, but `Retry(wait=...)` passes it.

    Returns:
        The seconds, from a number or a date, and 0 for a date that has passed; None if the error has no response, or
        the response has no such header.
    """
    response: Any = getattr(error, "response", None)
    headers: Any = getattr(error if response is None else response, "headers", None)
    try:
        text = str(headers.get("Retry-After") or headers.get("retry-after") or "").strip()
    except AttributeError:
        return None
    try:
        seconds = math.nan if "_" in text else float(text)
    except ValueError:
        return _seconds_until(text)
    return seconds if 0 <= seconds < math.inf else None


def _seconds_until(date: str) -> float | None:
    import time  # these three here, because few programs need them
    from datetime import UTC
    from email.utils import parsedate_to_datetime

    try:
        then = parsedate_to_datetime(date)
        then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
        return max(0.0, then.timestamp() - time.time())
    except (ValueError, OverflowError):  # OverflowError for years and zones that no calendar has
        return None


@dataclass(frozen=True)
class Policy:
    """The policy of a node; `penstock.node` describes each field."""

    concurrency: int | None = None
    capacity: int | None = None
    max_bytes: int | None = None
    timeout_seconds: float | None = None
    retry: Retry | None = None
    fallback: Callable[[Exception], Any] | None = None
    pure: bool = False
    effectful: Effectful = False
    restart: RestartMode = "permanent"
    restart_on: tuple[type[Exception], ...] = ()
    shutdown_seconds: float | None = None
    model: str | None = None
    ordered: bool = False
    failover: Callable[..., Any] | None = None
    hedge: Hedge | None = None
    cache: Cache | None = None
    stateless: bool = False
    discard: Callable[[Any], Any] | None = None
    inbox_capacity: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, _POLICY)
        if self.effectful and (self.hedge is not None or self.cache is not None):
            option, why = ("hedge", "a second attempt") if self.hedge is not None else ("cache", "a kept result")
            told = f"{option}=, effectful={self.effectful!r}"
            raise OptionsError(f"{told}: {why} would change how often the effect comes about")
        if self.pure and self.effectful:
            raise OptionsError(f"pure=True, effectful={self.effectful!r}: a node is either pure or effectful, not both")
        if self.ordered and (self.concurrency, self.capacity, self.max_bytes) != (None, None, None):
            raise OptionsError(
                "ordered=True: items wait at the node for their turn, and it takes one after the other, so "
                "concurrency=, capacity= and max_bytes= do not apply; max_in_flight= bounds how many wait"
            )

    def check_fits(self, name: str, *, gives_stream: bool, is_stateful: bool) -> None:
        """Refuse options that do not fit the function of a node, wherever it runs.

        Raises:
            TypeError: an option does not apply to such a function.
        """
        if gives_stream:
            reasons = {
                "pure=True": self.pure and "equal calls would be merged, and a stream has one reader",
                "cache=": self.cache is not None and "a stream is read once, and not kept",
                "discard=": self.discard is not None and "a generator closes what it has opened itself, in a `finally`",
                "max_bytes=": self.max_bytes is not None and "its stream is bounded by capacity=, in values",
            }
            for option, reason in reasons.items():
                if reason:
                    raise TypeError(f"node {name!r} is an async generator, to which {option} does not apply: {reason}")
        if (self.restart_on or self.restart != "permanent") and not (is_stateful or gives_stream):
            raise TypeError(
                f"node {name!r} is a function, which has nothing to restart; restart= and restart_on= are for "
                "classes, whose instances can be replaced"
            )
        if is_stateful and (self.hedge is not None or self.cache is not None):
            option, why = ("hedge=", "attempts") if self.hedge is not None else ("cache=", "calls that are left out")
            raise TypeError(
                f"stateful node {name!r} cannot have {option}: its state would see other {why}; call a function node "
                "inside"
            )

    @property
    def is_once(self) -> bool:
        """Whether the function runs in a single attempt, without any layer around the attempt."""
        return (
            self.timeout_seconds is None
            and self.retry is None
            and self.fallback is None
            and self.hedge is None
            and self.discard is None
            and not self.has_bodies
        )

    @property
    def has_bodies(self) -> bool:
        """Whether other steps may run in place of the function: its failover, or its computation for a cache."""
        return self.failover is not None or self.cache is not None


_RETRY: Final = {
    "attempts": optional(OptionRule(f"{whole(1).text}, with the first time", whole(1).fits)),
    "backoff_seconds": NOT_NEGATIVE,
    "max_backoff_seconds": NOT_NEGATIVE,
    "jitter": SHARE,
    "retry_on": OptionRule(
        "an exception class, or a tuple of them", lambda value: are_exceptions((value,)) or are_exceptions(value)
    ),
    "wait": optional(OptionRule("a function of the error and the number of the attempt", FUNCTION.fits)),
}
_POLICY: Final = {
    **dict.fromkeys(("concurrency", "capacity", "inbox_capacity", "max_bytes"), optional(whole(1))),
    "timeout_seconds": optional(POSITIVE),
    "retry": optional(instance(Retry, "a Retry, such as penstock.Retry(3)")),
    "fallback": optional(OptionRule("a function of the exception", FUNCTION.fits)),
    "failover": optional(OptionRule("another node, with the same parameters and result", FUNCTION.fits)),
    "hedge": optional(instance(Hedge, "a Hedge, such as penstock.Hedge(after_seconds=0.2)")),
    "discard": optional(OptionRule("a function of the result", FUNCTION.fits)),
    "cache": optional(instance(Cache, "a Cache, such as penstock.Cache(max_bytes=64_000_000)")),
    "pure": SWITCH,
    "effectful": OptionRule(
        "True, False or 'unordered'", lambda value: isinstance(value, bool) or value == "unordered"
    ),
    "ordered": SWITCH,
    "stateless": SWITCH,
    "restart": one_of(RestartMode),
    "restart_on": OptionRule("a tuple of exception classes", are_exceptions),
    "shutdown_seconds": optional(NOT_NEGATIVE),
    "model": optional(OptionRule("the name of the model that it calls, such as 'gpt-5'", NAME.fits)),
}
