"""Rate limits: a node that passes its input on, so many times per second; for all items, or for each key."""

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable, Hashable
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from .._errors import Overloaded
from ..actors.accepted import KEY, POSITIVE, check, one_of, optional, refuse_awaitable, whole
from ..actors.channel import PriorityFifo
from ..actors.loop_host import Actor
from ..actors.own_loops import Inbox, Work
from .admission import forget
from .decorator import node
from .nesting import pools_around
from .pools import Pools

OnLimit: TypeAlias = Literal["wait", "refuse"]
"""The values of `on_limit=`: what becomes of an item that may not pass now."""
LimitScope: TypeAlias = Literal["own", "engine"]
"""The values of `scope=`: who shares a limit."""


class TokenBucket:
    """A rate with bursts: a state machine without a clock.

    The bucket holds up to `burst` tokens, gets `per_second` of them each second, and an item takes one. It does not
    store the number of tokens but the time at which it would be full again, which is exact over any time (the "generic
    cell rate algorithm", ITU-T I.371).

    Args:
        per_second: how many tokens it gets per second.
        burst: how many tokens it holds at most, and at the beginning.

    Attributes:
        full_at: the time from which it is full, if no token is taken before.

    Raises:
        OptionsError: a number is out of its range.
    """

    __slots__ = ("_seconds_per_token", "_slack", "full_at")

    def __init__(self, per_second: float, burst: int) -> None:
        check("per_second", per_second, POSITIVE)
        check("burst", burst, whole(1))
        self._seconds_per_token = 1 / per_second
        self._slack = (burst - 1) / per_second
        self.full_at = -math.inf

    @property
    def ready_at(self) -> float:
        """The time from which there is a token."""
        return self.full_at - self._slack

    def take(self, now: float) -> bool:
        """Take a token at the time `now`; return whether there was one."""
        if now < self.ready_at:
            return False
        self.full_at = max(now, self.full_at) + self._seconds_per_token
        return True


T = TypeVar("T")


@node(stateless=True)
class RateLimit(Actor[Any, Any]):
    """A node that passes its input on, at a limited rate: `limited = ps.RateLimit(per_second=10, burst=5)`.

    Items of higher priority pass first. An item that is cancelled or expires while it waits does not count. All calls
    of a deployment or of a stream share one limit; each `engine.run` has its own, unless `scope="engine"`.

    Args:
        per_second: how many items may pass per second, in the long run.
        burst: how many items may pass at once after a pause.
        key: returns the key of an item, such as `lambda request: request.tenant`; each key has a limit of its own. The
            limit of a key that was not used for so long that it allows a whole burst again is forgotten.
        on_limit: whether an item that may not pass now waits, or is refused with `Overloaded`, whose
            `retry_after_seconds` says when it may.
        scope: "own" for a limit of its own in each run, stream and deployment; "engine" for one that all of an Engine
            share, so that it holds for `engine.run` as well.
        max_keys: how many keys it remembers; an item of a further key is refused with `Overloaded`.
        max_waiting_per_key: how many items of one key may wait; further ones are refused with `Overloaded`. None
            without a limit.

    Raises:
        OptionsError: an option does not accept its value.
    """

    def __init__(
        self,
        *,
        per_second: float,
        burst: int = 1,
        key: Callable[[Any], Hashable] | None = None,
        on_limit: OnLimit = "wait",
        scope: LimitScope = "own",
        max_keys: int = 100_000,  # some 30 MB
        max_waiting_per_key: int | None = None,
    ) -> None:
        TokenBucket(per_second, burst)  # checks both
        check("key", key, optional(KEY))
        check("on_limit", on_limit, one_of(OnLimit))
        check("scope", scope, one_of(LimitScope))
        check("max_keys", max_keys, whole(1))
        check("max_waiting_per_key", max_waiting_per_key, optional(whole(0)))
        self._per_second = per_second
        self._burst = burst
        self._penstock_key = key
        self._max_keys = max_keys
        self._max_waiting = sys.maxsize if max_waiting_per_key is None else max_waiting_per_key
        if on_limit == "refuse":
            self._max_waiting = 0
        self._penstock_is_shared = scope == "engine"
        self._of_engines: WeakKeyDictionary[Pools, _Gate] = WeakKeyDictionary()

    if TYPE_CHECKING:

        async def __call__(self, value: T, /) -> T:
            """Return the value when the limit lets it pass."""
            ...

        def __rrshift__(self, stream: AsyncIterator[T]) -> AsyncIterator[T]: ...

    async def loop(self, inbox: Inbox[Work[Any, Any]], /) -> None:
        """Take all work out of the inbox at once, and have it pass the gate."""
        gate, key_of = self._gate(), self._penstock_key
        gate.loops += 1
        try:
            while True:
                work = await inbox.get()
                try:
                    key = None
                    if key_of is not None:
                        key = key_of(work.value)
                        refuse_awaitable(key)
                    gate.add(work, key)
                except Exception as error:  # noqa: BLE001 - the function `key=`, or a key that cannot be hashed
                    work.fail(error)
        finally:
            gate.loops -= 1
            if not gate.loops:
                gate.close()

    def _gate(self) -> "_Gate":
        pools = pools_around() if self._penstock_is_shared else None
        gate = None if pools is None else self._of_engines.get(pools)
        if gate is None:
            gate = _Gate(self._per_second, self._burst, self._max_keys, self._max_waiting)
            if pools is not None:
                self._of_engines[pools] = gate
        return gate


# For each new key, forgetting looks at so many others, so that there is no pause.
_LOOKS: Final = 4


class _Account:
    """The limit of one key.

    Attributes:
        key: the key.
        bucket: its tokens.
        waiting: its work that waits; None if none does.
    """

    __slots__ = ("bucket", "key", "waiting")

    def __init__(self, key: Hashable, bucket: TokenBucket) -> None:
        self.key = key
        self.bucket = bucket
        self.waiting: PriorityFifo[Work[Any, Any]] | None = None


class _Gate:
    """Lets work pass at the rate of its key, and has the rest wait for its turn.

    Attributes:
        loops: how many loops give it work.
    """

    def __init__(self, per_second: float, burst: int, max_keys: int, max_waiting: int) -> None:
        self.loops = 0
        self._clock = asyncio.get_running_loop()
        self._rate = per_second, burst
        self._max_keys = max_keys
        self._max_waiting = max_waiting
        # Keys are looked up when work comes, and not when it passes: the hash of a key of the user's may have changed.
        self._accounts: dict[Hashable, _Account] = {}
        # One entry for each bucket, with a time before which it is not full. The time was exact when the entry was
        # made, and later takes have only moved it; an entry that comes up too early is put back with the present time.
        self._full: list[tuple[float, int, _Account]] = []
        self._next: list[tuple[float, int, _Account]] = []  # of keys with work that waits: when the next may pass
        self._entries = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None

    def add(self, work: Work[Any, Any], key: Hashable) -> None:
        """Let work pass, now or later; or refuse it."""
        now = self._clock.time()
        account = self._accounts.get(key)
        if account is None:
            account = self._new_account(key, now)
            if account is None:
                work.fail(Overloaded(
                    f"RateLimit: key {key!r:.60} is one too many: {self._max_keys} others have used their limits "
                    "lately (max_keys)",
                    max(0.0, self._full[0][0] - now),
                ))  # fmt: skip
                return
        waiting = account.waiting
        if waiting is None:
            if account.bucket.take(now):
                work.finish(work.value)
                return
            if not self._max_waiting:
                work.fail(self._refusal(account, 0, now))
                return
            waiting = account.waiting = PriorityFifo()
            self._entries += 1
            heappush(self._next, (account.bucket.ready_at, self._entries, account))
            self._set_timer()
        elif waiting.count >= self._max_waiting:
            for other in [other for other in waiting if not _is_wanted(other, now)]:
                waiting.discard(other, other.priority)
            if waiting.count >= self._max_waiting:
                work.fail(self._refusal(account, waiting.count, now))
                return
        waiting.push(work, work.priority)

    def close(self) -> None:
        """Forget the work that waits, since its scope has ended; keep the limits."""
        for _, _, account in self._next:
            account.waiting = None
        self._next.clear()
        self._set_timer()

    def _pass(self, due: float) -> None:
        """Let all work pass whose time has come."""
        self._timer_at = None
        now = max(self._clock.time(), due)  # a timer may run up to one tick of the clock too early
        while self._next and self._next[0][0] <= now:
            _, _, account = heappop(self._next)
            waiting, bucket = account.waiting, account.bucket
            while waiting and now >= bucket.ready_at:
                work = waiting.pop()
                if _is_wanted(work, now):
                    bucket.take(now)
                    work.finish(work.value)
            if waiting:
                self._entries += 1
                heappush(self._next, (bucket.ready_at, self._entries, account))
            else:
                account.waiting = None
        self._set_timer()

    def _set_timer(self) -> None:
        due = self._next[0][0] if self._next else None
        if due != self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if due is None else self._clock.call_at(due, self._pass, due)
            self._timer_at = due

    def _new_account(self, key: Hashable, now: float) -> _Account | None:
        """Make the account of a new key, and forget some that are full; return None if there are too many keys."""
        full, looks, seconds_per_token = self._full, 0, 1 / self._rate[0]
        while full and full[0][0] <= now and (looks < _LOOKS or len(self._accounts) >= self._max_keys):
            _, entry, other = full[0]
            full_at = other.bucket.full_at
            if other.waiting is not None:  # it will take more tokens
                full_at = max(full_at, now + seconds_per_token)
            if full_at > now:
                heapreplace(full, (full_at, entry, other))
            else:
                heappop(full)
                forget(self._accounts, other.key, other)
            looks += 1
        if len(self._accounts) >= self._max_keys:
            return None
        account = self._accounts[key] = _Account(key, TokenBucket(*self._rate))
        self._entries += 1
        heappush(full, (now + seconds_per_token, self._entries, account))
        return account

    def _refusal(self, account: _Account, waiting: int, now: float) -> Overloaded:
        key = account.key
        per_second, burst = self._rate
        of_key = "" if key is None else f" of key {key!r:.60}"
        what = f"{waiting} items{of_key} wait (max_waiting_per_key)" if waiting else f"the limit{of_key} is used up"
        return Overloaded(
            f"RateLimit(per_second={per_second:g}, burst={burst}): {what}",
            max(0.0, account.bucket.ready_at - now) + waiting / per_second,
            key,
        )


def _is_wanted(work: Work[Any, Any], now: float) -> bool:
    return not work.cancelled and (work.deadline is None or now < work.deadline)
