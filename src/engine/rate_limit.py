"""Rate limits: a node that passes its input on at a limited rate, for all items together or for each key."""

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable, Hashable
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from .._errors import OptionsError, Overloaded
from ..actors.accepted import FINITE, KEY, NOT_NEGATIVE, POSITIVE, check, one_of, optional, refuse_awaitable, whole
from ..actors.channel import PriorityFifo
from ..actors.loop_host import Actor
from ..actors.own_loops import Inbox, Work
from .admission import forget
from .decorator import node
from .nesting import pools_around
from .pools import Pools

OnLimit: TypeAlias = Literal["wait", "refuse"]
"""The values of `on_limit=`: whether an item that may not pass now waits or is refused."""
LimitScope: TypeAlias = Literal["own", "engine"]
"""The values of `scope=`: whether each run, stream and deployment has its own limit, or all of an Engine share it."""


class TokenBucket:
    """A rate with bursts: a state machine without a clock.

    The bucket holds up to `burst` tokens, and gets `per_second` tokens each second. An item takes one token, or as many
    as its cost. The bucket does not store the number of tokens, but the time at which it would be full again. That is
    exact over any time (the "generic cell rate algorithm", ITU-T I.371).

    Args:
        per_second: how many tokens the bucket gets per second.
        burst: how many tokens the bucket holds at most, and at the beginning.

    Attributes:
        full_at: the time from which the bucket is full, if no token is taken before.

    Raises:
        OptionsError: a number is out of its range.
    """

    __slots__ = ("burst", "full_at", "per_second")

    def __init__(self, per_second: float, burst: int) -> None:
        check("per_second", per_second, POSITIVE)
        check("burst", burst, whole(1))
        self.per_second = per_second
        self.burst = burst
        self.full_at = -math.inf

    def ready_at(self, cost: float = 1) -> float:
        """Return the time from which the bucket holds `cost` tokens; or is full, if it can never hold that many."""
        return self.full_at - (self.burst - min(cost, self.burst)) / self.per_second

    def take(self, now: float, cost: float = 1) -> bool:
        """Take tokens at the time `now`; return False, and take none, if `ready_at(cost)` has not come."""
        if now < self.ready_at(cost):
            return False
        self.spend(now, cost)
        return True

    def spend(self, now: float, tokens: float) -> None:
        """Take tokens, also more than the bucket has, which leaves a debt; a negative number gives tokens back."""
        self.full_at = max(now, self.full_at) + tokens / self.per_second


T = TypeVar("T")


@node(stateless=True)
class RateLimit(Actor[Any, Any]):
    """A node that passes its input on, at a limited rate: `limited = ps.RateLimit(per_second=10, burst=5)`.

    With `cost=`, an item takes as many tokens as it costs. `settle` takes tokens that are known only later, such as the
    tokens of an answer. An item that costs more than `burst` passes when the limit allows a whole burst, and leaves a
    debt.

    Items of higher priority pass first. An item that is cancelled or expires while it waits does not count. All calls
    of a deployment or of a stream share one limit. Each `engine.run` has its own limit, unless `scope="engine"`.

    Args:
        per_second: how many items, or tokens of their cost, may pass per second, in the long run. Or a function of the
            key that returns this number; it is called when the limit of a key begins.
        burst: how many items, or tokens, may pass at once after a pause.
        key: a function that returns the key of an item, such as `lambda request: request.tenant`; each key has a limit
            of its own. The limit of a key is forgotten when it allows a whole burst again.
        on_limit: "wait" has an item that may not pass now wait; "refuse" refuses the item with `Overloaded`, whose
            `retry_after_seconds` says when the item may pass.
        scope: "own" for a separate limit in each run, stream and deployment; "engine" for one limit in the whole
            Engine, which also holds for `engine.run`.
        max_keys: how many keys the limit remembers; an item of a further key is refused with `Overloaded`.
        max_waiting_per_key: how many items of one key may wait; further items are refused with `Overloaded`. None
            without a limit.
        cost: a function that returns how many tokens an item takes, 0 or more; None for one token each.

    Raises:
        OptionsError: an option does not accept its value.
    """

    def __init__(
        self,
        *,
        per_second: float | Callable[[Any], float],
        burst: int = 1,
        key: Callable[[Any], Hashable] | None = None,
        on_limit: OnLimit = "wait",
        scope: LimitScope = "own",
        max_keys: int = 100_000,  # some 30 MB
        max_waiting_per_key: int | None = None,
        cost: Callable[[Any], float] | None = None,
    ) -> None:
        if callable(per_second):
            check("per_second", per_second, KEY)
            if key is None:
                raise OptionsError("per_second=, a function of the key, needs key=")
        TokenBucket(1 if callable(per_second) else per_second, burst)  # checks both
        check("cost", cost, optional(KEY))
        check("key", key, optional(KEY))
        check("on_limit", on_limit, one_of(OnLimit))
        check("scope", scope, one_of(LimitScope))
        check("max_keys", max_keys, whole(1))
        check("max_waiting_per_key", max_waiting_per_key, optional(whole(0)))
        self._per_second = per_second
        self._burst = burst
        self._cost = cost
        self._penstock_key = key
        self._max_keys = max_keys
        self._max_waiting = sys.maxsize if max_waiting_per_key is None else max_waiting_per_key
        if on_limit == "refuse":
            self._max_waiting = 0
        self._penstock_is_shared = scope == "engine"
        self._of_engines: WeakKeyDictionary[Pools, _Gate] = WeakKeyDictionary()

    if TYPE_CHECKING:

        async def __call__(self, value: T, /) -> T:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
            """Return the value when the limit lets the item pass."""
            ...

        def __rrshift__(self, stream: AsyncIterator[T]) -> AsyncIterator[T]: ...

    def settle(self, key: Hashable, used: float) -> None:
        """Take tokens that items of a key have used beyond their cost; call it on the event loop.

        `settle` may leave a debt: then the next items of the key wait, or are refused, until the debt is paid.

        Args:
            key: the key; None for a limit without `key=`.
            used: how many tokens; a negative number gives tokens back.

        Raises:
            OptionsError: `used` is not a finite number; the limit does not have `scope="engine"`; or several Engines
                use the limit, and the caller is not a node.
        """
        check("used", used, FINITE, "settle(")
        gates = [*self._of_engines.values()]
        if self._penstock_is_shared and (pools := pools_around()) is not None:
            gates = [gate] if (gate := self._of_engines.get(pools)) is not None else []
        if not self._penstock_is_shared or len(gates) > 1:
            raise OptionsError(
                'settle: the limit has to have scope="engine", and a node calls it, or one Engine has it'
            )
        for gate in gates:
            gate.settle(key, used)

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
                    cost = 1.0
                    if self._cost is not None:
                        cost = self._cost(work.value)
                        check("cost(item)", cost, NOT_NEGATIVE, "RateLimit: the result of ")
                    gate.add(work, key, cost)
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


# How many other keys are checked for each new key, to forget unused keys without a long pause.
_LOOKS: Final = 4


class _Account:
    """The limit of one key.

    Attributes:
        key: the key.
        bucket: the tokens of the key.
        waiting: the work of the key that waits, each with its cost; None if no work waits.
    """

    __slots__ = ("bucket", "key", "waiting")

    def __init__(self, key: Hashable, bucket: TokenBucket) -> None:
        self.key = key
        self.bucket = bucket
        self.waiting: PriorityFifo[tuple[Work[Any, Any], float]] | None = None

    @property
    def next_at(self) -> float:
        """The time from which the next waiting work may pass."""
        assert self.waiting is not None
        return self.bucket.ready_at(self.waiting.head()[1])


class _Gate:
    """Lets work pass at the rate of its key; other work waits for its turn.

    Attributes:
        loops: how many loops give work to the gate.
    """

    def __init__(self, per_second: float | Callable[[Any], float], burst: int, max_keys: int, max_waiting: int) -> None:
        self.loops = 0
        self._clock = asyncio.get_running_loop()
        self._rate = per_second, burst
        self._max_keys = max_keys
        self._max_waiting = max_waiting
        # Keys are looked up when work comes, not again when it passes: the hash of a user's key may change meanwhile.
        self._accounts: dict[Hashable, _Account] = {}
        # One entry for each bucket, with a time before which the bucket is not full. The time was exact when the entry
        # was made, and later takes have only moved it back. An entry that comes up too early gets the present time.
        self._full: list[tuple[float, int, _Account]] = []
        self._entries = 0
        self._timers: dict[_Account, asyncio.TimerHandle] = {}  # for each key with waiting work: when the next may pass

    def settle(self, key: Hashable, used: float) -> None:
        """Take tokens that were used, or give tokens back; waiting work may then pass later, or earlier."""
        now = self._clock.time()
        account = self._account(key, now)
        account.bucket.spend(now, used)
        if account.waiting is not None:
            self._schedule(account)

    def add(self, work: Work[Any, Any], key: Hashable, cost: float) -> None:
        """Let work pass, now or later.

        Raises:
            Overloaded: the work is refused.
        """
        now = self._clock.time()
        account = self._account(key, now)
        if account.waiting is None and account.bucket.take(now, cost):
            work.finish(work.value)
            return
        waiting = PriorityFifo[tuple[Work[Any, Any], float]]() if account.waiting is None else account.waiting
        if waiting.count >= self._max_waiting:
            for other in [other for other in waiting if not _is_wanted(other[0], now)]:
                waiting.discard(other, other[0].priority)
            if waiting.count >= self._max_waiting:
                raise self._refusal(account, cost, waiting.count, now)
        before = account.next_at if waiting else None
        account.waiting = waiting
        waiting.push((work, cost), work.priority)
        if account.next_at != before:  # the new work is the next
            self._schedule(account)

    def close(self) -> None:
        """Forget the work that waits, since its scope has ended; keep the limits."""
        for account, timer in self._timers.items():
            account.waiting = None
            timer.cancel()
        self._timers.clear()

    def _pass(self, account: _Account, due: float) -> None:
        """Let all work of a key pass whose time has come."""
        waiting, bucket = account.waiting, account.bucket
        now = max(self._clock.time(), due)  # a timer may run up to one tick of the clock too early
        while waiting and now >= account.next_at:
            work, cost = waiting.pop()
            if _is_wanted(work, now):
                bucket.take(now, cost)
                work.finish(work.value)
        if waiting:
            self._schedule(account)
        else:
            account.waiting = None
            del self._timers[account]

    def _schedule(self, account: _Account) -> None:
        """Set the timer of a key, or set it anew because the next work may pass at another time than before."""
        if account in self._timers:
            self._timers[account].cancel()
        due = account.next_at
        self._timers[account] = self._clock.call_at(due, self._pass, account, due)

    def _account(self, key: Hashable, now: float) -> _Account:
        """Return the account of a key; for a new key, forget some accounts that are full.

        Raises:
            Overloaded: there are too many keys.
        """
        account = self._accounts.get(key)
        if account is not None:
            return account
        per_second, burst = self._rate
        bucket = TokenBucket(per_second(key) if callable(per_second) else per_second, burst)
        full, looks = self._full, 0
        while full and full[0][0] <= now and (looks < _LOOKS or len(self._accounts) >= self._max_keys):
            _, entry, other = full[0]
            full_at = other.bucket.full_at
            if other.waiting is not None:  # the waiting work will take more tokens
                full_at = max(full_at, now + 1 / other.bucket.per_second)
            if full_at > now:
                heapreplace(full, (full_at, entry, other))
            else:
                heappop(full)
                forget(self._accounts, other.key, other)
            looks += 1
        if len(self._accounts) >= self._max_keys:
            raise Overloaded(
                f"RateLimit: key {key!r:.60} is one too many: {self._max_keys} others have used their limits "
                "lately (max_keys)",
                max(0.0, full[0][0] - now),
            )
        account = self._accounts[key] = _Account(key, bucket)
        self._entries += 1
        heappush(full, (now + 1 / bucket.per_second, self._entries, account))
        return account

    def _refusal(self, account: _Account, cost: float, waiting: int, now: float) -> Overloaded:
        key = account.key
        per_second, burst = account.bucket.per_second, account.bucket.burst
        of_key = "" if key is None else f" of key {key!r:.60}"
        what = f"{waiting} items{of_key} wait (max_waiting_per_key)" if waiting else f"the limit{of_key} is used up"
        return Overloaded(
            f"RateLimit(per_second={per_second:g}, burst={burst}): {what}",
            max(0.0, account.bucket.ready_at(cost) - now) + waiting / per_second,
            key,
        )


def _is_wanted(work: Work[Any, Any], now: float) -> bool:
    return not work.cancelled and (work.deadline is None or now < work.deadline)
