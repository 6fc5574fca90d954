"""Who counts now, what those have counted who do no more, and how long calls took."""

import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from .. import names
from . import instruments
from .instruments import COUNTERS, Reading, Series, Source, histogram

if TYPE_CHECKING:
    from opentelemetry.trace import Span


# Who counts now, and what those have counted who do no more.
#
# A source is known from its opening to its closing, by a weak reference. When it closes, its counters are added to
# those of all that closed before it, by metric and attributes: so totals only grow, and take no more memory for each
# scope. Sources open and close on event loops, or when they are collected as garbage, which must never wait for whoever
# reads; and readers have threads of their own.


class Registry:
    """Adds up what is open and what has closed. Everything may be called from any thread."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[int, Source] = WeakValueDictionary()
        self._departed: deque[tuple[Source | None, dict[Series, float]]] = deque()  # not added to `_totals` yet
        self._totals: dict[Series, float] = {}
        self._highest: dict[Series, float] = {}
        self.unlock()

    def unlock(self) -> None:
        """Have new locks; also in a process that was forked, where a thread that is not here may hold the old ones."""
        self._lock = threading.Lock()  # never waited for by `closed` and `add`
        self._reading = threading.Lock()

    def opened(self, source: Source) -> None:
        """Read a source from now on, until it is closed or gone."""
        self._open[id(source)] = source

    def closed(self, source: Source) -> None:
        """Keep what a source has counted, which counts no more; nothing if it was not open."""
        if self._open.get(id(source)) is source:
            self.vanished(source)

    def vanished(self, source: Source) -> None:
        """Do the same for one that was open and is collected as garbage: it is not found any more."""
        counters: dict[Series, float] = {}
        _add(counters, source.counters(), set())
        self._departed.append((source, counters))  # before it is not open any more: see `totals`
        if self._open.get(id(source)) is source:
            del self._open[id(source)]
        self._fold()

    def add(self, readings: Iterable[Reading]) -> None:
        """Add to the counters of what is no source."""
        counters: dict[Series, float] = {}
        _add(counters, readings, set())
        self._departed.append((None, counters))
        self._fold()

    def totals(self) -> dict[str, dict[Series, float]]:
        """Return all numbers, by metric and series; what is a counter is never less than before."""
        with self._reading:
            # What closes meanwhile is in one of the two, or in both, and then left out of the first.
            with self._lock:
                sources = [source for reference in self._open.valuerefs() if (source := reference()) is not None]
                just_closed = self._take_departed()
                found = dict(self._totals)
            self._fold()
            shared: set[tuple[Series, object]] = set()
            for source in sources:
                if id(source) not in just_closed:
                    _add(found, source.counters(), shared)
                    _add(found, source.levels(), shared)
            return self._sorted(found)

    def _fold(self) -> None:
        """Add what has closed to the totals, unless somebody is at them, who does this afterwards."""
        while self._departed and self._lock.acquire(blocking=False):
            try:
                self._take_departed()
            finally:
                self._lock.release()

    def _take_departed(self) -> set[int]:
        sources: list[Source | None] = []
        while self._departed:
            source, counters = self._departed.popleft()
            sources.append(source)
            for series, value in counters.items():
                self._totals[series] = self._totals.get(series, 0) + value
        return {id(source) for source in sources if source is not None}

    def _sorted(self, found: dict[Series, float]) -> dict[str, dict[Series, float]]:
        by_metric: dict[str, dict[Series, float]] = {}
        for series, value in found.items():
            if series.metric in COUNTERS:
                # Numbers are read while others change them, one after the other: what is between two of them may be
                # missing for a moment.
                value = self._highest[series] = max(value, self._highest.get(series, value))
            by_metric.setdefault(series.metric, {})[series] = value
        return by_metric


def _add(found: dict[Series, float], readings: Iterable[Reading], shared: set[tuple[Series, object]]) -> None:
    for series, value, owner in readings:
        if owner is not None:
            once = series, owner
            if once in shared:
                continue
            shared.add(once)
        found[series] = found.get(series, 0) + value


_registry = Registry()
os.register_at_fork(after_in_child=_registry.unlock)


def opened(source: Source) -> None:
    """Read a source from now on, until it is closed or gone."""
    instruments.create(_registry.totals)
    _registry.opened(source)


def closed(source: Source) -> None:
    """Keep what a source has counted, which counts no more; nothing if it was not open."""
    _registry.closed(source)


def vanished(source: Source) -> None:
    """Do the same for one that was open and is collected as garbage: it is not found any more."""
    _registry.vanished(source)


def add(readings: Iterable[Reading]) -> None:
    """Add to the counters of what is no source."""
    _registry.add(readings)


def run_ended(graph: str, seconds: float, outcome: str, error: BaseException | None, span: "Span | None") -> None:
    """Record one call.

    Args:
        graph: name of the graph.
        seconds: how long it took, from the call to the outcome, waiting for a place included.
        outcome: done, failed, cancelled, expired or refused.
        error: what it ended with.
        span: that of the call: a sampled one becomes an example of its bucket.
    """
    _record(names.METRIC_RUN_DURATION, graph, seconds, outcome, error, span)


def stream_ended(graph: str, seconds: float, outcome: str, error: BaseException | None, span: "Span | None") -> None:
    """Record one stream of calls; as `run_ended`."""
    _record(names.METRIC_STREAM_DURATION, graph, seconds, outcome, error, span)


def _record(
    name: str, graph: str, seconds: float, outcome: str, error: BaseException | None, span: "Span | None"
) -> None:
    found = histogram(name)
    if found is None:
        return
    attributes = {names.GRAPH: graph, names.OUTCOME: outcome}
    if error is not None and outcome in ("failed", "expired", "refused"):
        attributes[names.ERROR_TYPE] = type(error).__qualname__
    if span is None:
        found.record(seconds, attributes)
    else:
        from opentelemetry import trace

        found.record(seconds, attributes, trace.set_span_in_context(span))
