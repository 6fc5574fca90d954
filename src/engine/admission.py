"""Admission: a place is reserved before anything expensive runs."""

import asyncio
from dataclasses import dataclass

from .._errors import Overloaded
from ..actors.channel import PriorityFifo

# How many calls the measured rate looks back on: it follows a change in load and does not jump with a single call. At
# least two rounds of all places, because calls that began together end together, and a round is a burst and a pause.
_MIN_CALLS = 10
_ROUNDS = 2
# A call ends together with the one before if that was no longer ago than this share of what there is between two calls.
_TOGETHER = 0.1


@dataclass(frozen=True)
class AdmissionStatistics:
    """A snapshot of admission.

    Attributes:
        in_flight: calls that hold a place.
        max_in_flight: how many may.
        queued: calls that wait for a place.
        max_queue: how many may; None if callers wait without limit.
        admitted: calls that got a place so far.
        refused: calls that were refused with `Overloaded`.
        calls_per_second: the measured service rate while all places are taken: how many there are, by the time for
            which a call held one. None before anything has been measured.
    """

    in_flight: int
    max_in_flight: int
    queued: int
    max_queue: int | None
    admitted: int
    refused: int
    calls_per_second: float | None


class Admission:
    """Bounds the calls in flight, and those that wait; higher priority first, first come first served within one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_in_flight: int, max_queue: int | None) -> None:
        self._loop = loop
        self._time = loop.time
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._in_flight = 0
        self._waiting: PriorityFifo[asyncio.Future[None]] = PriorityFifo()
        self._admitted = 0
        self._refused = 0
        # The service rate: calls that ended, and how long they held their places, by the number of places; old ones
        # fade out. Only calls count that were in flight when all places were taken: others say little about a full
        # service. But they count also when they end together, and the next ones come later.
        self._fade = 1 - 1 / max(_MIN_CALLS, _ROUNDS * max_in_flight)
        self._calls = 0.0
        self._seconds = 0.0
        self._together = 0  # how many of these calls have ended at about the same time, the last ones
        self._left = 0  # how many of the calls that were in flight when all places were taken have not ended
        # For how long places have been held since all were taken, the times of all calls added up, is calls in flight
        # times now, less their beginnings; the end of a call is taken off as if it were a beginning.
        self._beginnings = 0.0
        self._held_seconds = 0.0  # that sum when the last call ended

    def reserve_nowait(self) -> bool:
        """Take a place if one is free and nobody waits; returns whether it was taken."""
        in_flight = self._in_flight + 1
        if in_flight > self._max_in_flight:  # while anybody waits, all places are taken
            return False
        if self._left:
            self._beginnings += self._time()
        self._in_flight = in_flight
        self._admitted += 1
        if in_flight == self._max_in_flight:
            if not self._left:
                self._beginnings = in_flight * self._time()
                self._held_seconds = 0.0
            self._left = in_flight
        return True

    async def reserve(self, priority: int, graph: str, *, patient: bool = False) -> None:
        """Take a place, waiting for one if need be.

        Args:
            priority: higher first.
            graph: name of the graph, for the error.
            patient: wait in any case: a stream is one producer with a window of its own, not a crowd of callers.

        Raises:
            Overloaded: as many calls wait as may.
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
                self._pass_on(self._time())  # admitted and cancelled at once
            else:
                self._waiting.discard(waiter, priority)
            raise

    def release(self) -> None:
        """Give a place back; the next one that waits gets it."""
        if not self._left:  # then nobody waits
            self._in_flight -= 1
            return
        now = self._time()
        held_seconds = self._in_flight * now - self._beginnings
        seconds = (held_seconds - self._held_seconds) / self._max_in_flight
        self._held_seconds = held_seconds
        if seconds * self._calls > _TOGETHER * self._seconds:
            # Not before: of calls that end together, the first alone has the time of all, and would be the oldest.
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
                self._admitted += 1  # in the place of the one before, so that all are taken as they were
                self._left = self._max_in_flight
                waiter.set_result(None)
                return
        if self._left:
            self._left -= 1  # as if they ended in the order in which they began
            self._beginnings -= now
        self._in_flight -= 1

    def _seconds_per_call(self) -> float | None:
        return self._seconds / self._calls if self._calls else None

    def _retry_after_seconds(self) -> float | None:
        """Return when those that wait now will have got their places, at the measured rate."""
        seconds = self._seconds_per_call()
        return None if seconds is None else seconds * (self._waiting.count + 1)
