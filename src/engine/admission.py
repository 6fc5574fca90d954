"""Admission: a place is reserved before anything expensive runs; and fair shares of the places, by key."""

import asyncio
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from .._errors import Noted, OptionsError, Overloaded, PenstockError
from ..actors.accepted import KEY, POSITIVE, OptionRule, check, optional, refuse_awaitable, whole
from ..actors.channel import PriorityFifo
from ..telemetry.counters import less
from .graph import Call, Graph
from .tracing.annotations import signature_of

# How many past calls the measured rate covers: few enough to follow a change in load, many enough not to jump with a
# single call. The number is at least two rounds of all places, because calls that began together end together: each
# round is a burst and a pause.
_MIN_CALLS = 10
_ROUNDS = 2
# Two calls end together if the time between their ends is less than this share of the mean time between two ends.
_TOGETHER = 0.1

# How many keys without calls are remembered for their statistics: the keys that called last.
_MAX_IDLE_KEYS = 1000
# In a full queue, the order of the keys is computed anew after this time, multiplied by the number of keys. Computing
# takes about a microsecond for each key, so two percent of the time at most.
_SECONDS_PER_LOOK = 50e-6

T = TypeVar("T")
KeyOf: TypeAlias = Callable[[Graph[..., Any], tuple[Any, ...]], Hashable]
"""Returns the key of a call of a graph with these arguments."""


@dataclass(frozen=True)
class KeyStatistics:
    """A snapshot of the counters of one key, in a deployment with `key=`.

    Attributes:
        key: the key, such as the name of a tenant.
        weight: the weight of the key, 1 by default.
        in_flight: how many calls of the key hold a place.
        queued: how many calls of the key wait for a place.
        admitted: how many calls of the key have got a place so far.
        refused: how many calls of the key were refused with `Overloaded`.
        held_seconds: for how long calls of the key have held places, in seconds, summed over all calls.
    """

    key: Hashable
    weight: float
    in_flight: int
    queued: int
    admitted: int
    refused: int
    held_seconds: float


def keys_less(later: Sequence[KeyStatistics], earlier: Iterable[KeyStatistics]) -> tuple[KeyStatistics, ...]:
    """Return the counters of each key less its counters in an earlier snapshot; a forgotten key counts anew."""
    before = {one.key: one for one in earlier}
    known = [now.key in before and before[now.key].held_seconds <= now.held_seconds for now in later]
    counted = "admitted", "refused", "held_seconds"
    return tuple(less(now, before[now.key], *counted) if old else now for now, old in zip(later, known, strict=True))


@dataclass(frozen=True)
class AdmissionStatistics:
    """A snapshot of the places of a deployment, and of the calls that wait for a place.

    Attributes:
        in_flight: how many calls hold a place.
        max_in_flight: how many places there are.
        queued: how many calls wait for a place.
        max_queue: how many calls may wait; None without a limit.
        admitted: how many calls have got a place so far.
        refused: how many calls were refused with `Overloaded`.
        calls_per_second: the measured service rate while all places are taken: the number of places, divided by the
            time for which a call held its place. None before the first measurement.
        keys: the counters by key, for a deployment with `key=`: of the keys that have calls now, and of the 1,000 other
            keys that called last.
    """

    in_flight: int
    max_in_flight: int
    queued: int
    max_queue: int | None
    admitted: int
    refused: int
    calls_per_second: float | None
    keys: tuple[KeyStatistics, ...] = ()


class Admission:
    """Bounds the calls in flight and the calls that wait, and measures the service rate for `retry_after_seconds`.

    Calls of higher priority get places first; calls of equal priority, in the order in which they came.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_in_flight: int, max_queue: int | None) -> None:
        self._loop = loop
        self._time = loop.time
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._in_flight = 0
        # The future of each waiting call is resolved with True when the call gets a place, with False at the end.
        self._waiting: PriorityFifo[asyncio.Future[bool]] = PriorityFifo()
        self._aside: set[asyncio.Future[bool]] = set()  # waiting items of streams, which `max_queue` does not count
        self._end_error: Callable[[], PenstockError] | None = None
        self._admitted: int = 0
        self._refused: int = 0
        # The service rate is `_calls / _seconds`: how many calls have ended, and for how long they held their places,
        # divided by the number of places. Old calls fade out. A call counts only if it was in flight when all places
        # were taken: other calls say little about a full service. Such a call also counts when it ends together with
        # other calls, before the next calls come.
        self._fade = 1 - 1 / max(_MIN_CALLS, _ROUNDS * max_in_flight)
        self._calls = 0.0
        self._seconds = 0.0
        self._together = 0  # how many calls have ended in the present burst; their fading is still to be applied
        self._full_left = 0  # how many of the calls that were in flight when all places were taken have not ended
        # The time for which places were held since all places were taken, summed over all calls, is the number of calls
        # in flight times now, less the sum of their beginnings. The end of a call is subtracted like a beginning, so
        # one sum is enough.
        self._beginnings = 0.0
        self._held_seconds = 0.0  # that sum of times when the last call ended

    def taken(self) -> tuple[int, int]:
        """Return how many places are taken, and how many there are."""
        return self._in_flight, self._max_in_flight

    @property
    def queued(self) -> int:
        """How many calls wait for a place."""
        return self._waiting.count

    @property
    def is_idle(self) -> bool:
        """Whether no call waits, and no place is taken, also not by an admitted call that has not begun yet."""
        return not self._in_flight and not self.queued

    def share_of(self, graph: Graph[..., Any], arguments: tuple[Any, ...]) -> "Share | None":
        """Return the account of the key of a call; None without keys. The caller has to reserve a place at once.

        Raises:
            Exception: the error of the function `key=`.
        """
        return None

    def reserve_nowait(self, share: "Share | None" = None) -> bool:
        """Take a place if one is free; return whether it was taken."""
        in_flight = self._in_flight + 1
        if in_flight > self._max_in_flight:  # this also keeps the order: while a call waits, all places are taken
            return False
        if self._full_left:
            self._beginnings += self._time()
        self._in_flight = in_flight
        self._admitted += 1
        if in_flight == self._max_in_flight:
            if not self._full_left:
                self._beginnings = in_flight * self._time()
                self._held_seconds = 0.0
            self._full_left = in_flight
        return True

    async def reserve(self, priority: int, graph: str, share: "Share | None" = None) -> None:
        """Take a place; if none is free, wait for one.

        Args:
            priority: the priority of the call; higher first.
            graph: the name of the graph, for the error.
            share: the account of the key of the call; None without keys.

        Raises:
            Overloaded: no place is free, and the queue is full; with keys, perhaps because a call of a key that has
                used less of its share came later.
            PenstockError: the error that was passed to `end`.
        """
        if self.reserve_nowait(share):
            return
        if self._end_error is not None or not self._has_room(share):
            raise self._refusal(share, graph)
        waiter = self._stand_in_line(share, priority)
        try:
            has_place = await waiter
        except asyncio.CancelledError:
            self.leave_line(share, waiter, priority)
            raise
        if not has_place:
            raise self._refusal(share, graph)

    def stand_aside(self, share: "Share | None", priority: int) -> "asyncio.Future[bool]":
        """Let an item of a stream wait for a place, although the queue may be full.

        A stream is one producer with its own window, not a crowd of callers, so its items are never refused.

        Returns:
            A future, resolved with True when the item has a place, with False when the deployment ends.
        """
        if self.reserve_nowait(share):  # the item before was admitted a moment ago, and another call has ended since
            waiter: asyncio.Future[bool] = self._loop.create_future()
            waiter.set_result(True)
            return waiter
        return self._stand_in_line(share, priority, is_aside=True)

    def leave_line(self, share: "Share | None", waiter: "asyncio.Future[bool]", priority: int) -> None:
        """Take a call out of the queue, or give back the place that it has just got."""
        if not waiter.done() or waiter.cancelled():
            self._withdraw(share, waiter, priority)
        elif waiter.result():  # the call was admitted and cancelled in the same turn of the loop
            self._give_back(share, self._time())

    def _has_room(self, share: "Share | None") -> bool:
        """Whether a further call may wait."""
        return self._max_queue is None or self._waiting.count - len(self._aside) < self._max_queue

    def _refusal(self, share: "Share | None", graph: str) -> PenstockError:
        """Return the error of a call that gets no place, and count the call as refused."""
        if self._end_error is not None:
            return self._end_error()
        self._refused += 1
        return Overloaded(
            f"graph {graph!r}: {self._in_flight} calls are in flight (max_in_flight) and {self._waiting.count} "
            "wait for a place (max_queue)",
            self._retry_after_seconds(),
        )

    def _stand_in_line(self, share: "Share | None", priority: int, *, is_aside: bool = False) -> "asyncio.Future[bool]":
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.push(waiter, priority)
        if is_aside:
            self._aside.add(waiter)
        return waiter

    def _withdraw(self, share: "Share | None", waiter: "asyncio.Future[bool]", priority: int) -> None:
        self._waiting.discard(waiter, priority)
        self._aside.discard(waiter)

    def _give_back(self, share: "Share | None", now: float) -> None:
        self._pass_on(now)

    def end(self, make_error: Callable[[], PenstockError]) -> None:
        """Refuse all waiting calls, and later calls that would have to wait, each with a new error."""
        self._end_error = make_error
        _refuse_all(self._waiting)

    def release(self, share: "Share | None" = None) -> None:
        """Give the place of a call back; the next call that waits gets it."""
        if not self._full_left:  # then no call waits
            self._in_flight -= 1
            return
        now = self._time()
        held_seconds = self._in_flight * now - self._beginnings
        seconds = (held_seconds - self._held_seconds) / self._max_in_flight
        self._held_seconds = held_seconds
        if seconds * self._calls > _TOGETHER * self._seconds:
            # Fade only when a burst is over. The first call of a burst carries the time of the whole burst. If each
            # call faded the sums, this time would fade before the calls that belong to it.
            fade = self._fade**self._together
            self._seconds *= fade
            self._calls *= fade
            self._together = 0
        self._seconds += seconds
        self._calls += 1
        self._together += 1
        self._pass_on(now)

    def statistics(self) -> AdmissionStatistics:
        """Return a snapshot of the counters."""
        seconds = self._seconds_per_call()
        return AdmissionStatistics(
            self._in_flight, self._max_in_flight, self.queued, self._max_queue, self._admitted, self._refused,
            1 / seconds if seconds else None,
        )  # fmt: skip

    def _pass_on(self, now: float) -> None:
        while self._waiting.count:
            waiter = self._waiting.pop()
            self._aside.discard(waiter)
            if not waiter.done():  # not cancelled a moment ago
                self._admitted += 1  # the call takes over the place at once, so all places stay taken
                self._full_left = self._max_in_flight
                waiter.set_result(True)
                return
        if self._full_left:
            self._full_left -= 1  # as if calls ended in the order in which they began
            self._beginnings -= now
        self._in_flight -= 1

    def _seconds_per_call(self) -> float | None:
        return self._seconds / self._calls if self._calls else None

    def _retry_after_seconds(self) -> float | None:
        """Return in how many seconds all waiting calls will have a place, at the measured rate."""
        seconds = self._seconds_per_call()
        return None if seconds is None else seconds * (self._waiting.count + 1)


def _refuse_all(waiting: PriorityFifo[asyncio.Future[bool]]) -> None:
    while waiting.count:
        waiter = waiting.pop()
        if not waiter.done():  # not cancelled a moment ago
            waiter.set_result(False)


def forget(accounts: dict[Hashable, T], key: Hashable, account: T) -> None:
    """Remove an account from the accounts by key; the hash of its key may have changed meanwhile."""
    try:
        if accounts.get(key) is account:
            del accounts[key]
            return
        kept = {other: found for other, found in accounts.items() if found is not account}
    except Exception:  # noqa: BLE001 - `__hash__` and `__eq__` of keys are the user's; an account that stays does no harm
        return
    accounts.clear()
    accounts.update(kept)


# Fair shares: keys share the same places and the same queue.


class FairShares(NamedTuple):
    """How the calls of a deployment get a key, and the limits of each key; see `penstock.engine.deploy`.

    Attributes:
        key_of: returns the key of a call of a graph with these arguments.
        weights: the weights of keys; 1 for all other keys.
        max_in_flight_per_key: how many places one key may hold.
        max_queue_per_key: how many calls of one key may wait.
    """

    key_of: KeyOf
    weights: Mapping[Any, float] = MappingProxyType({})
    max_in_flight_per_key: int = sys.maxsize
    max_queue_per_key: int = sys.maxsize


def fair_shares(
    graphs: tuple[Graph[..., Any], ...],
    key: Callable[..., Hashable] | None,
    weights: Mapping[Any, float] | None,
    max_in_flight_per_key: int | None,
    max_queue_per_key: int | None,
) -> FairShares | None:
    """Check the options of `deploy` about keys, and return them; None without `key=`.

    Raises:
        OptionsError: an option does not accept its value, or needs `key=`.
    """
    check("max_in_flight_per_key", max_in_flight_per_key, optional(whole(1)))
    check("max_queue_per_key", max_queue_per_key, optional(whole(0)))
    check("weights", weights, optional(_WEIGHTS))
    if key is None:
        given = {
            "weights": weights, "max_in_flight_per_key": max_in_flight_per_key, "max_queue_per_key": max_queue_per_key,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise OptionsError(f"{name}={value!r}: this needs key=, a function that returns the key of a call")
        return None
    check("key", key, KEY)
    for one, weight in (weights or {}).items():
        check(f"[{one!r}]", weight, POSITIVE, "weights")
    limits = [sys.maxsize if limit is None else limit for limit in (max_in_flight_per_key, max_queue_per_key)]
    return FairShares(_reader_of(graphs, key), dict(weights or {}), *limits)


_WEIGHTS = OptionRule("a mapping of keys to weights", lambda value: isinstance(value, Mapping))


def _reader_of(graphs: tuple[Graph[..., Any], ...], key: Callable[..., Hashable]) -> KeyOf:
    """Return a function that calls `key` for a graph and its arguments.

    Raises:
        OptionsError: `key` does not take the parameters of the graph, or a `Call` if there are several graphs.
    """
    graph, *more = graphs
    wanted = list(graph._signature.parameters) if not more else ["call"]
    positional = graph._positional if not more else 1
    named = wanted[positional:]
    try:
        signature = signature_of(key)
    except (TypeError, ValueError):  # a function written in C
        signature = None
    if signature is not None:
        takes = f"the parameters of graph {graph.name!r}" if not more else "the Call, because there are several graphs"
        try:
            signature.bind(*wanted[:positional], **dict.fromkeys(named))
        except TypeError as error:
            raise OptionsError(f"key={key!r}: it takes {takes} ({', '.join(wanted)}), but {error}") from None
        known = [name for name in signature.parameters if name in wanted]
        if known != [name for name in wanted if name in known]:
            raise OptionsError(f"key={key!r}: it takes {takes} in their order ({', '.join(wanted)})")
    if more:
        return lambda graph, arguments: key(Call(graph, arguments))
    if not named:
        return lambda graph, arguments: key(*arguments)
    return lambda graph, arguments: key(
        *arguments[:positional], **dict(zip(named, arguments[positional:], strict=True))
    )


class Share:
    """The account of one key.

    Attributes:
        waiting: the waiting calls. The future of a call is resolved with True when the call gets a place, and with
            False when the call has to make room in the queue, or the deployment ends.
        in_flight: how many calls hold a place.
        beginnings: the sum of the times at which calls began, less the times at which they ended.
        expected: for how long the calls in flight are expected to hold their places, summed over the calls.
        start: added to the level: the level from which the key began to compete.
        period: the period of contention that `expected` and `start` belong to.
        turn: the number of the valid entry of the key in the heap; 0 if the key is not in the heap.
    """

    __slots__ = (
        "admitted", "beginnings", "expected", "in_flight", "key", "period", "refused", "start", "turn", "waiting",
        "weight",
    )  # fmt: skip

    def __init__(self, key: Hashable, weight: float) -> None:
        self.key = key
        self.weight = weight
        self.waiting: PriorityFifo[asyncio.Future[bool]] = PriorityFifo()
        self.in_flight = self.admitted = self.refused = self.period = self.turn = 0
        self.beginnings = self.expected = self.start = 0.0

    def held_seconds(self, now: float) -> float:
        """Return for how long calls of the key have held places, summed over the calls."""
        return self.in_flight * now - self.beginnings

    def level(self, now: float) -> float:
        """Return how much the key has used the places, divided by its weight. The key with the lowest level is next."""
        return (self.in_flight * now - self.beginnings + self.expected) / self.weight + self.start

    def statistics(self, now: float) -> KeyStatistics:
        """Return a snapshot of the counters."""
        return KeyStatistics(
            self.key, self.weight, self.in_flight, self.waiting.count, self.admitted, self.refused,
            max(0.0, self.held_seconds(now)),
        )  # fmt: skip


class FairAdmission(Admission):
    """Admission that is fair between keys; within a key, calls of higher priority come first.

    This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with costs that are known only afterwards.
    The cost of a call is the time for which it holds its place. The level of a key is the sum of these costs, divided
    by its weight; each call in flight adds the mean cost. A free place goes to the key with the lowest level. A key
    that begins to compete starts at the level at which the last place was given away, if its own level is lower: a key
    saves nothing up. Places that a key holds while no call waits do not count.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_in_flight: int, max_queue: int | None, shares: FairShares
    ) -> None:
        super().__init__(loop, max_in_flight, max_queue)
        self._key_of = shares.key_of
        self._weights = shares.weights
        self._max_in_flight_per_key = shares.max_in_flight_per_key
        self._max_queue_per_key = shares.max_queue_per_key
        # Keys are looked up when a call comes, and not when it ends: the hash of a user's key may have changed.
        self._shares: dict[Hashable, Share] = {}
        self._idle: OrderedDict[Share, None] = OrderedDict()  # the keys without calls
        self._active_weight = 0.0  # the sum of the weights of the keys with calls
        self._longest_queue = sys.maxsize if max_queue is None else max_queue
        self._queued = 0
        # The keys whose calls wait only for a place, each with a lower bound of its level. Between two changes of a
        # key, its level can only grow, and only with calls in flight. So the lowest level is found by looking at the
        # first entry again. A key that has changed gets a new entry, and its `turn` says which entry is valid. A scan
        # of 1,000 waiting keys would take 0.3 ms for each call.
        self._heap: list[tuple[float, int, Share]] = []
        self._turns = 0
        self._contending = 0  # how many keys are in the heap
        self._period = 0
        self._period_began = 0.0
        self._level = 0.0  # the level at which the last place was given away in this period
        # The keys whose calls wait, each with the turn of its last call, as it was at the last look; keys that are
        # furthest over their shares come first. Between two looks at all keys, only a key with a new waiting call gets
        # a new entry, and the expected time stays the same.
        self._furthest: list[tuple[float, float, int, Share]] = []
        self._look_again_at = -math.inf
        self._look_expected = 0.0

    @property
    def queued(self) -> int:
        """How many calls wait for a place."""
        return self._queued

    def share_of(self, graph: Graph[..., Any], arguments: tuple[Any, ...]) -> Share:
        """Return the account of the key of a call. The caller has to reserve a place at once.

        Raises:
            Exception: the error of the function `key=`, or of the hash of the key.
        """
        with Noted(f"while key= of the deployment was asked for the key of a call of graph {graph.name!r}"):
            key = self._key_of(graph, arguments)
            refuse_awaitable(key)
            share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = Share(key, self._weights.get(key, 1.0))
        elif share in self._idle:
            del self._idle[share]
        else:
            return share
        self._active_weight += share.weight
        return share

    def reserve_nowait(self, share: Share | None = None) -> bool:
        """Take a place if one is free and the key may have it; return whether it was taken."""
        assert share is not None
        if self._in_flight >= self._max_in_flight or share.in_flight >= self._max_in_flight_per_key:
            return False
        Admission.reserve_nowait(self)  # `super()` would take as long as the method itself
        share.in_flight += 1
        share.beginnings += self._time()
        share.admitted += 1
        return True

    def _has_room(self, share: Share | None) -> bool:
        """Whether a further call of a key may wait; a call of another key may have to make room."""
        assert share is not None
        is_full = self._queued - len(self._aside) >= self._longest_queue
        return not (is_full or share.waiting.count >= self._max_queue_per_key) or self._has_made_room(share)

    def _stand_in_line(self, share: Share | None, priority: int, *, is_aside: bool = False) -> "asyncio.Future[bool]":
        assert share is not None
        waiter: asyncio.Future[bool] = self._loop.create_future()
        share.waiting.push(waiter, priority)
        self._queued += 1
        now = self._time()
        if not share.turn:
            self._changed(share, now)
        if now < self._look_again_at:
            heappush(self._furthest, self._last_turn(share, now))
        if is_aside:
            self._aside.add(waiter)
        return waiter

    def _withdraw(self, share: Share | None, waiter: "asyncio.Future[bool]", priority: int) -> None:
        assert share is not None
        if share.waiting.discard(waiter, priority):
            self._left_line(waiter)
            self._changed(share, self._time())

    def _give_back(self, share: Share | None, now: float) -> None:
        assert share is not None
        self._ended(share, now)
        self._pass_on(now)

    def _left_line(self, waiter: "asyncio.Future[bool]") -> None:
        self._queued -= 1
        self._aside.discard(waiter)

    def end(self, make_error: Callable[[], PenstockError]) -> None:
        """Refuse all waiting calls, and later calls that would have to wait, each with a new error."""
        self._end_error = make_error
        for share in [share for share in self._shares.values() if share.waiting.count]:
            _refuse_all(share.waiting)
            self._changed(share, self._time())
        self._queued = 0
        self._aside.clear()

    def release(self, share: Share | None = None) -> None:
        """Give the place of a call back; a call of the key with the lowest level gets it."""
        assert share is not None
        now = self._time()
        self._ended(share, now)
        if self._full_left:
            Admission.release(self)
        else:
            self._pass_on(now)

    def statistics(self) -> AdmissionStatistics:
        """Return a snapshot of the counters."""
        now = self._time()
        active = [share for share in self._shares.values() if share not in self._idle]
        keys = tuple(share.statistics(now) for share in (*active, *reversed(self._idle)))
        return replace(super().statistics(), keys=keys)

    def _pass_on(self, now: float) -> None:
        heap = self._heap
        while self._contending:
            level, turn, share = heap[0]
            if turn != share.turn:
                heappop(heap)
                continue
            if (present := share.level(now)) > level:
                heapreplace(heap, (present, turn, share))
                continue
            waiter = share.waiting.pop()
            self._left_line(waiter)
            if waiter.done():  # cancelled a moment ago
                if not share.waiting.count:
                    self._changed(share, now)
                continue
            if level > self._level:
                self._level = level
            share.in_flight += 1
            share.beginnings += now
            share.admitted += 1
            if self._calls:
                share.expected += self._expected_seconds()
            if share.waiting.count and share.in_flight < self._max_in_flight_per_key:
                heapreplace(heap, (share.level(now), turn, share))
            else:
                self._changed(share, now)
            self._admitted += 1  # the call takes over the place at once
            if self._in_flight == self._max_in_flight:
                self._full_left = self._max_in_flight
            elif self._full_left:
                self._full_left -= 1
            waiter.set_result(True)
            return
        Admission._pass_on(self, now)

    def _ended(self, share: Share, now: float) -> None:
        """Note that a call of a key has ended."""
        if self._contending:
            if share.period != self._period:
                self._take_part(share)
            share.expected -= share.expected / share.in_flight
        share.beginnings -= now
        share.in_flight -= 1
        if share.waiting.count or not share.in_flight:
            self._changed(share, now)

    def _changed(self, share: Share, now: float) -> None:
        """Update the place of a key in the heap after a change of its calls."""
        waiting = share.waiting.count
        if waiting and share.in_flight < self._max_in_flight_per_key:
            if not share.turn:
                if not self._contending:
                    self._begin_period(now)
                self._contending += 1
                self._take_part(share)
                share.start += max(0.0, self._level - share.level(now))
            self._turns += 1
            share.turn = self._turns
            heappush(self._heap, (share.level(now), share.turn, share))
            if len(self._heap) > 2 * self._contending + 64:
                self._heap = [entry for entry in self._heap if entry[1] == entry[2].turn]
                heapify(self._heap)
            return
        if share.turn:
            share.turn = 0
            self._contending -= 1
            if not self._contending:
                self._heap.clear()
        if not waiting and not share.in_flight and share not in self._idle:
            self._idle[share] = None
            self._active_weight -= share.weight
            if len(self._idle) > _MAX_IDLE_KEYS:
                oldest, _ = self._idle.popitem(last=False)
                forget(self._shares, oldest.key, oldest)

    def _begin_period(self, now: float) -> None:
        """Begin a period of contention, in which all keys begin at the same level."""
        self._period += 1
        self._period_began = now
        self._level = 0.0
        self._look_again_at = -math.inf

    def _take_part(self, share: Share) -> None:
        """Let a key take part in the period, if it does not yet; no call of the key began or ended in the period."""
        if share.period != self._period:
            share.period = self._period
            share.expected = share.in_flight * self._expected_seconds()
            share.start = -share.held_seconds(self._period_began) / share.weight

    def _expected_seconds(self) -> float:
        """Return for how long a call is expected to hold its place; 0 before the first measurement."""
        return self._seconds / self._calls * self._max_in_flight if self._calls else 0.0

    def _has_made_room(self, share: Share) -> bool:
        """Refuse a waiting call of a key that is further over its share; return whether there was such a call."""
        if share.waiting.count >= self._max_queue_per_key:
            return False
        now = self._time()
        if now >= self._look_again_at:
            self._look(now)
        own, furthest = self._last_turn(share, now, 1), self._furthest
        while furthest and furthest[0] < own:
            _, _, _, other = entry = furthest[0]
            present = self._last_turn(other, now)
            if present > entry:  # fewer calls of the key wait by now, or calls ended early
                heapreplace(furthest, present)
            elif (newest := self._newest(other)) is None:
                heappop(furthest)
            else:
                priority, waiter = newest
                self._withdraw(other, waiter, priority)
                waiter.set_result(False)
                return True
        return False

    def _look(self, now: float) -> None:
        """Compute again which keys are furthest over their shares."""
        if not self._contending:
            self._begin_period(now)
        self._look_expected = self._expected_seconds()
        self._furthest = [self._last_turn(share, now) for share in self._shares.values() if share.waiting.count]
        heapify(self._furthest)
        self._look_again_at = now + len(self._furthest) * _SECONDS_PER_LOOK

    def _last_turn(self, share: Share, now: float, more: int = 0) -> tuple[float, float, int, Share]:
        """Return a sort key for the level at which the last call of a key will get a place; high levels come first.

        Before the first measurement, the number of calls counts. `more` breaks ties: the key comes behind equal keys.
        """
        self._take_part(share)
        calls = (share.waiting.count + more) / share.weight
        return -share.level(now) - calls * self._look_expected, -calls, id(share) if not more else 0, share

    def _newest(self, share: Share) -> tuple[int, "asyncio.Future[bool]"] | None:
        """Return the newest waiting call of the lowest priority; None if only items of streams wait."""
        for priority, waiter in share.waiting.last_first():
            if not waiter.done() and waiter not in self._aside:
                return priority, waiter
        return None

    def _refusal(self, share: Share | None, graph: str) -> PenstockError:
        """Count a call as refused, and return its error; the error has the key if the key asked for too much."""
        assert share is not None
        if self._end_error is not None:
            self._changed(share, self._time())
            return self._end_error()
        share.refused += 1
        self._refused += 1
        of_key = f"{share.in_flight} and {share.waiting.count} of them of key {share.key!r:.60}"
        if share.waiting.count >= self._max_queue_per_key:
            reason, key = ", which may have no more waiting calls (max_queue_per_key)", share.key
        elif share.in_flight >= self._max_in_flight_per_key:
            reason, key = ", which may hold no more places (max_in_flight_per_key)", share.key
        elif self._is_over_its_share(share):
            reason, key = ", which is over its share", share.key
        else:
            reason, key = "", None
        error = Overloaded(
            f"graph {graph!r}: {self._in_flight} calls are in flight (max_in_flight) and {self._queued} wait for a "
            f"place (max_queue), {of_key}{reason}",
            self._seconds_until_served(share),
            key,
        )
        self._changed(share, self._time())
        return error

    def _is_over_its_share(self, share: Share) -> bool:
        """Whether a key, with one more call, would have more of all calls than its weight allows."""
        calls = share.in_flight + share.waiting.count + 1
        allowed = (self._in_flight + self._queued + 1) * share.weight
        return calls * self._weight_beside(share) > allowed * 1.000_001  # the sum of weights is rounded

    def _seconds_until_served(self, share: Share) -> float | None:
        """Return in how many seconds all waiting calls of a key will have a place, at the measured rate."""
        seconds = self._seconds_per_call()
        if seconds is None:
            return None
        calls = share.waiting.count + 1
        by_share = seconds * min(self._queued + 1, calls * self._weight_beside(share) / share.weight)
        return max(by_share, seconds * self._max_in_flight * calls / self._max_in_flight_per_key)

    def _weight_beside(self, share: Share) -> float:
        """Return the sum of the weights of a key and of all keys with calls."""
        return self._active_weight + (share.weight if share in self._idle else 0.0)
