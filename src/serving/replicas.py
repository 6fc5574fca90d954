"""The servers of a model: which of them are well, and which has the beginning of a conversation in its cache."""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Self

from .. import retry_after
from .._errors import retry_after_header
from ..actors.accepted import POSITIVE, check, whole
from .answers import as_json
from .protocol import APIError, UpstreamError

_BUSY: Final = (429, 503)
_BUSY_SECONDS: Final = 0.5  # for a server that does not say how long
_PREFIXES: Final = 16_000  # beginnings of conversations that are remembered; some 150 bytes each
# In simulations, 1.25 and 2 more kept nine tenths of the cached tokens, and no server had twice the mean.
_BOUND: Final = 1.25


@dataclass
class Breaker:
    """A circuit breaker: `async with breaker:` raises an error at once if what is inside has failed too often.

    When the time is over, all may try again until one of them has failed. Errors of the request itself, and callers who
    leave, count as neither; nor does a server that is busy, with the status 429 or 503.

    Args:
        failures: after how many failures in a row it refuses.
        seconds: for how long it refuses then.

    Attributes:
        failed: how many failures there were in a row.
    """

    failures: int = 3
    seconds: float = 5.0
    failed: int = field(default=0, init=False)
    _until: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        check("failures", self.failures, whole(1))
        check("seconds", self.seconds, POSITIVE)

    @property
    def is_open(self) -> bool:
        """Whether it refuses now."""
        return self.failed >= self.failures and asyncio.get_running_loop().time() < self._until

    async def __aenter__(self) -> Self:
        """Go in.

        Raises:
            UpstreamError: it refuses.
        """
        if self.is_open:
            headers = retry_after_header(self._until - asyncio.get_running_loop().time())
            raise UpstreamError(503, "It has failed too often, and was not asked.", headers=headers)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Count the outcome."""
        is_failure = is_broken(error) if isinstance(error, APIError) else isinstance(error, Exception)
        if error is None or is_failure:
            self.failed = self.failed + 1 if is_failure else 0
            self._until = asyncio.get_running_loop().time() + self.seconds


def is_broken(error: APIError) -> bool:
    """Whether an error says that a server has failed, and is not only busy."""
    return isinstance(error, UpstreamError) and error.status not in _BUSY


@dataclass(eq=False)
class Replica:
    """One server of an upstream.

    Attributes:
        url: its base URL.
        in_flight: how many requests are on their way to it.
        breaker: refuses what would fail, and says so as `breaker.is_open`.
        is_down: whether its last check has failed, or nobody listens at its URL.
        busy_until: until when it has asked for no requests, in seconds of the clock of the loop.
        prompt_tokens: how many tokens the prompts had that it has answered.
        cached_tokens: how many of these it had in its cache, as it says.
        expected_tokens: how many of these were expected in its cache, because it has answered the same conversation.
    """

    url: str
    breaker: Breaker
    in_flight: int = 0
    is_down: bool = field(default=False, init=False)
    busy_until: float = field(default=0.0, init=False)
    prompt_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    expected_tokens: int = field(default=0, init=False)


def best_of(replicas: Sequence[Replica], asked: Sequence[Replica]) -> list[Replica]:
    """Return the servers to choose from: the best, by what is known against them; if all look down, these.

    Args:
        replicas: all servers.
        asked: the servers that earlier attempts of the call have asked.
    """
    now = asyncio.get_running_loop().time()
    known = [(one.breaker.is_open, one.is_down, one in asked, one.busy_until > now) for one in replicas]
    best = min(known)
    return [one for one, against in zip(replicas, known, strict=True) if against == best]


def note_busy(replica: Replica, error: APIError) -> None:
    """Keep further requests away from a server that has answered with 429 or 503, for as long as it says."""
    if isinstance(error, UpstreamError) and error.status in _BUSY:
        seconds = retry_after(error)
        now = asyncio.get_running_loop().time()
        replica.busy_until = now + (_BUSY_SECONDS if seconds is None else seconds)


def count_tokens(replica: Replica, usage: Any, share: float) -> None:
    """Add the tokens of an answer, if it says how many were cached; this share of its prompt was expected to be."""
    with suppress(LookupError, TypeError, ValueError):
        asked, cached = int(usage["prompt_tokens"]), int(usage["prompt_tokens_details"]["cached_tokens"])
        replica.prompt_tokens += asked
        replica.cached_tokens += cached
        replica.expected_tokens += round(share * asked)


class Prefix(NamedTuple):
    """The beginnings of a request that a server may have in its cache.

    Attributes:
        keys: a hash of each beginning, from the first message of the user to the whole request.
        shares: the share of the request that each beginning is, in characters.
        start: what decides about the server of a new conversation, in all processes alike.
    """

    keys: Sequence[int]
    shares: Sequence[float]
    start: bytes

    @classmethod
    def of_messages(cls, messages: Sequence[Mapping[str, Any]], *about: object) -> Self:
        """Return the beginnings of a chat.

        A beginning that ends before the first message of the user does not count: all conversations have the system
        message in common, so the server that had it first would get all of them.

        Args:
            messages: the messages.
            *about: what separates caches, such as the name of the model.
        """
        key, size, keys, sizes = hash(_frozen(about)), 0, list[int](), list[int]()
        first = next((at for at, one in enumerate(messages) if one.get("role") == "user"), len(messages) - 1)
        for at, message in enumerate(messages):
            try:
                key = hash((key, *message.values()))
            except TypeError:  # parts, or calls of tools
                key = hash((key, _frozen(message)))
            content = message.get("content")
            size += 1 + len(content) if isinstance(content, str) else 1
            if at >= first:
                keys.append(key)
                sizes.append(size)
        return cls(keys, [one / size for one in sizes], as_json([about, messages[: first + 1]]))

    @classmethod
    def of_value(cls, value: Hashable) -> Self:
        """Return the only beginning of a request whose cache a value decides about."""
        return cls([hash(value)], [1.0], repr(value).encode(errors="replace"))


def _frozen(value: Any) -> Hashable:
    kept: Any = value
    if isinstance(value, Mapping | list | tuple):
        kept = tuple(map(_frozen, kept.values() if isinstance(value, Mapping) else kept))
    return kept  # type: ignore[no-any-return]


class Router:
    """Chooses the server of each conversation, and remembers it.

    A new conversation begins at the server that all processes choose for it, since they do not talk with each other. It
    stays there as long as that server has no more requests in flight than the bound allows.

    Args:
        margin: how many more requests in flight than 1.25 times the mean a server may have.
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._had: OrderedDict[int, Replica] = OrderedDict()

    def choose(self, prefix: Prefix, replicas: Sequence[Replica]) -> tuple[Replica, float]:
        """Return one of the servers, and the share of the request that it has in its cache."""
        most = _BOUND * sum(one.in_flight for one in replicas) / len(replicas) + self._margin
        free = [one for one in replicas if one.in_flight <= most]
        known = [(self._had.get(key), share) for key, share in zip(prefix.keys, prefix.shares, strict=True)]
        chosen, share = next((one for one in reversed(known) if one[0] in free), (None, 0.0))
        if chosen is None:
            digest = blake2b(prefix.start, digest_size=16).digest()  # crc32 is linear: its order is no new one
            chosen = max(free, key=lambda one: blake2b(one.url.encode(), digest_size=8, key=digest).digest())
        for key in prefix.keys[-1:]:  # without messages there is none
            self._had[key] = chosen
            self._had.move_to_end(key)
        if len(self._had) > _PREFIXES:
            self._had.popitem(last=False)
        return chosen, share
