"""Admission: a place is reserved before anything expensive runs."""

import asyncio
from dataclasses import dataclass

from .._errors import Overloaded
from ..actors.channel import PriorityFifo

# How many calls the measured rate looks back on: few enough to follow a change in load, many enough not to jump with a
# single call. It is at least two rounds of all places, because calls that began together end together: each round is a
# burst and a pause.
_MIN_CALLS = 10
_ROUNDS = 2
# Two calls count as ending together if less than this share of the mean time between two calls lies between their ends.
_TOGETHER = 0.1


@dataclass(frozen=True)
class AdmissionStatistics:
    """A snapshot of the places of a deployment, and of the calls that wait for one.

    Attributes:
        in_flight: how many calls hold a place.
        max_in_flight: how many places there are.
        queued: how many calls wait for a place.
        max_queue: how many calls may wait; None without a limit.
        admitted: how many calls have got a place so far.
        refused: how many calls were refused with `Overloaded`.
        calls_per_second: the measured service rate while all places are taken: the number of places, divided by the
            time for which a call held its place. None before anything has been measured.
    """

    in_flight: int
    max_in_flight: int
    queued: int
    max_queue: int | None
    admitted: int
    refused: int
    calls_per_second: float | None


class Admission:
    """Bounds the calls in flight and the calls that wait; it also measures the service rate, for `retry_after_seconds`.

    Calls of higher priority get places first; calls of equal priority, in the order in which they came.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_in_flight: int, max_queue: int | None) -> None:
        self._loop = loop
        self._time = loop.time
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._in_flight = 0
        self._waiting: PriorityFifo[asyncio.Future[None]] = PriorityFifo()
        self._admitted = 0
        self._refused = 0
        # The service rate is `_calls / _seconds`: how many calls have ended, and for how long they held their places,
        # divided by the number of places; old calls fade out. A call counts only if it was in flight when all places
        # were taken: other calls say little about a full service. It counts also when it ends together with the others,
        # before the next calls come.
        self._fade = 1 - 1 / max(_MIN_CALLS, _ROUNDS * max_in_flight)
        self._calls = 0.0
        self._seconds = 0.0
        self._together = 0  # how many calls have ended in the present burst, whose fading is still to be applied
        self._full_left = 0  # how many of the calls that were in flight when all places were taken have not ended
        # The time for which places have been held since all were taken, summed over all calls, is the number of calls
        # in flight times now, less the sum of their beginnings. A call that ends is subtracted as if it were one that
        # begins, so one sum is enough.
        self._beginnings = 0.0
        self._held_seconds = 0.0  # that sum of times when the last call ended

    def reserve_nowait(self) -> bool:
        """Take a place if one is free; return whether it was taken."""
        in_flight = self._in_flight + 1
        if in_flight > self._max_in_flight:  # this keeps the order, too: while a call waits, all places are taken
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

    async def reserve(self, priority: int, graph: str, *, patient: bool = False) -> None:
        """Take a place; if none is free, wait for one.

        Args:
            priority: the priority of the call; higher first.
            graph: the name of the graph, for the error.
            patient: whether to wait although the queue is full. The items of a stream do: a stream is one producer with
                a window of its own, not a crowd of callers.

        Raises:
            Overloaded: no place is free, and the queue is full.
        """
        if self.reserve_nowait():
            return
        if not patient and self._max_queue is not None and self._waiting.count >= self._max_queue:
            self._refused += 1
            raise Overloaded(
                f"graph {graph!r}: {self._in_flight} calls are in flight (max_in_flight) and {self._waiting.count} "
                "wait for a place (max_queue)",
                self._retry_after_seconds(),
            )
        waiter = self._loop.create_future()
        self._waiting.push(waiter, priority)
        try:
            await waiter
        except BaseException:  # a cancel, as a rule; raised again
            if waiter.done() and not waiter.cancelled():
                self._pass_on(self._time())  # the call was admitted and cancelled in the same turn of the loop
            else:
                self._waiting.discard(waiter, priority)
            raise

    def release(self) -> None:
        """Give a place back; the next call that waits gets it."""
        if not self._full_left:  # then no call waits
            self._in_flight -= 1
            return
        now = self._time()
        held_seconds = self._in_flight * now - self._beginnings
        seconds = (held_seconds - self._held_seconds) / self._max_in_flight
        self._held_seconds = held_seconds
        if seconds * self._calls > _TOGETHER * self._seconds:
            # Only when a burst is over: its first call carries the time of the whole burst, and if each call of the
            # burst faded the sums, that time would fade before the calls that belong to it.
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
            self._in_flight, self._max_in_flight, self._waiting.count, self._max_queue, self._admitted, self._refused,
            1 / seconds if seconds else None,
        )  # fmt: skip

    def _pass_on(self, now: float) -> None:
        while self._waiting.count:
            waiter = self._waiting.pop()
            if not waiter.done():  # not cancelled a moment ago
                self._admitted += 1  # it takes over the place at once, so all places stay taken
                self._full_left = self._max_in_flight
                waiter.set_result(None)
                return
        if self._full_left:
            self._full_left -= 1  # counts as if calls ended in the order in which they began
            self._beginnings -= now
        self._in_flight -= 1

    def _seconds_per_call(self) -> float | None:
        return self._seconds / self._calls if self._calls else None

    def _retry_after_seconds(self) -> float | None:
        """Return in how many seconds all calls that wait now will have got a place, at the measured rate."""
        seconds = self._seconds_per_call()
        return None if seconds is None else seconds * (self._waiting.count + 1)
