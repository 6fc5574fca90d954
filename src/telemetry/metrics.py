"""Metrics, through the API of OpenTelemetry: a reader that collects reads open scopes, which pay nothing until then."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias
from weakref import WeakValueDictionary

from . import names
from .logs import guarded

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
    from opentelemetry.trace import Span


# The bucket boundaries that the OpenTelemetry conventions recommend for durations of HTTP requests, in seconds.
RUN_BOUNDARIES: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# A stream takes as long as its input is: from below a second to a day.
STREAM_BOUNDARIES: Final = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 43200.0, 86400.0)


@dataclass(frozen=True)
class Metric:
    """A metric: a number that is read when it is collected, or a histogram of the durations of calls or streams.

    Attributes:
        name: its name.
        kind: "counter" for a number that only grows, "up_down" for a level. Both can be summed over attributes.
            "histogram" if a duration is added whenever a call or a stream ends.
        unit: its unit, in UCUM.
        description: what it measures.
        boundaries: the boundaries of the buckets of a histogram, unless the application has a view of its own.
    """

    name: str
    kind: Literal["counter", "up_down", "histogram"]
    unit: str
    description: str
    boundaries: tuple[float, ...] = ()


RECORDED: Final = (
    Metric(names.METRIC_RUN_DURATION, "histogram", "s", "Calls, from the call to the outcome.", RUN_BOUNDARIES),
    Metric(
        names.METRIC_STREAM_DURATION, "histogram", "s", "Streams of calls, from the first step to the end.",
        STREAM_BOUNDARIES,
    ),
)  # fmt: skip

OBSERVED: Final = (
    Metric(names.METRIC_RUN_IN_FLIGHT, "up_down", "{run}", "Calls of run in flight."),
    Metric(names.METRIC_STREAM_ITEMS, "counter", "{item}", "Items of streams that have ended."),
    Metric(names.METRIC_STREAM_IN_FLIGHT, "up_down", "{item}", "Items that count in max_in_flight of open streams."),
    Metric(names.METRIC_STREAM_MAX_IN_FLIGHT, "up_down", "{item}", "How many may."),
    Metric(names.METRIC_DEPLOYMENT_IN_FLIGHT, "up_down", "{run}", "Calls that hold a place in a deployment."),
    Metric(names.METRIC_DEPLOYMENT_MAX_IN_FLIGHT, "up_down", "{run}", "How many may."),
    Metric(names.METRIC_DEPLOYMENT_QUEUED, "up_down", "{run}", "Calls that wait for a place in a deployment."),
    Metric(names.METRIC_DEPLOYMENT_REFUSED, "counter", "{run}", "Calls that were refused with Overloaded."),
    Metric(names.METRIC_NODE_EXECUTIONS, "counter", "{execution}", "Items that left a node."),
    Metric(names.METRIC_NODE_BUSY_TIME, "counter", "s", "Time in the handler of a node, over all items."),
    Metric(names.METRIC_NODE_RETRIES, "counter", "{attempt}", "Attempts beyond the first."),
    Metric(names.METRIC_NODE_FAILOVERS, "counter", "{item}", "Items that the failover of a node took over."),
    Metric(names.METRIC_NODE_HEDGES, "counter", "{attempt}", "Second attempts beside the first."),
    Metric(names.METRIC_NODE_HEDGES_WON, "counter", "{attempt}", "Second attempts whose result counted."),
    Metric(names.METRIC_NODE_CACHE_CALLS, "counter", "{call}", "Calls of nodes that keep results."),
    Metric(names.METRIC_NODE_CACHE_EVICTIONS, "counter", "{result}", "Results that had to go for others."),
    Metric(names.METRIC_NODE_CACHE_SIZE, "up_down", "By", "Bytes of results that are kept."),
    Metric(names.METRIC_NODE_RESTARTS, "counter", "{restart}", "Instances of stateful nodes that were replaced."),
    Metric(names.METRIC_NODE_FIGURE, "up_down", "{figure}", "What an execution tells, in the unit of its series."),
    Metric(names.METRIC_NODE_IN_FLIGHT, "up_down", "{item}", "Items in a node."),
    Metric(names.METRIC_NODE_MAX_IN_FLIGHT, "up_down", "{item}", "How many may be; not for one without a limit."),
    Metric(names.METRIC_QUEUE_DEPTH, "up_down", "{item}", "Items in the inbox of a node."),
    Metric(names.METRIC_QUEUE_CAPACITY, "up_down", "{item}", "How many it holds; not for one without a limit."),
    Metric(names.METRIC_QUEUE_SIZE, "up_down", "By", "Bytes in the inbox of a node with max_bytes."),
    Metric(names.METRIC_QUEUE_PUT_WAIT_TIME, "counter", "s", "Time that items waited for room in an inbox."),
    Metric(names.METRIC_BATCH_RUNS, "counter", "{batch}", "Batches that ran on devices."),
    Metric(names.METRIC_BATCH_ITEMS, "counter", "{item}", "Items in them."),
    Metric(names.METRIC_BATCH_ELEMENTS, "counter", "{element}", "Elements of their arrays, real ones and padding."),
    Metric(names.METRIC_DEVICE_BUSY_TIME, "counter", "s", "Time in which a device had something to compute."),
    Metric(names.METRIC_DEVICE_RESTARTS, "counter", "{restart}", "Calls that a thread of a device gave up."),
    Metric(names.METRIC_COMPILE_PROGRAMS, "counter", "{program}", "Programs that were compiled."),
    Metric(names.METRIC_COMPILE_TIME, "counter", "s", "Time spent tracing, lowering and compiling, also in vain."),
    Metric(names.METRIC_COMPILE_CACHE_HITS, "counter", "{call}", "Calls whose program was there."),
    Metric(names.METRIC_COMPILE_CACHE_MISSES, "counter", "{call}", "Calls that waited for a compilation."),
    Metric(names.METRIC_COMPILE_CACHE_EVICTIONS, "counter", "{program}", "Programs dropped for others."),
)

COUNTERS: Final = frozenset(metric.name for metric in OBSERVED if metric.kind == "counter")


# Sources of metrics. Telemetry does not import the engine: an object with counters implements `CounterSource`, and
# reports when it opens and closes.


class Series:
    """A metric with its attributes; `series` makes one object for each.

    Attributes:
        metric: the name of the metric, one of `OBSERVED`.
        attributes: attributes of bounded cardinality: graphs, nodes, outcomes, never an item or a run.
    """

    # Series are compared by identity: a scope that closes looks up the series of each of its numbers, and comparing
    # names would take longer than all other work.
    __slots__ = ("__weakref__", "attributes", "metric")

    def __init__(self, metric: str, attributes: tuple[tuple[str, str | bool], ...]) -> None:
        self.metric = metric
        self.attributes = attributes


# Weak, so that a series leaves with the last of its sources and totals.
_known: WeakValueDictionary[tuple[str, tuple[tuple[str, str | bool], ...]], Series] = WeakValueDictionary()
_making = threading.RLock()  # the garbage collector may close a source in a thread that holds the lock


def series(metric: str, *attributes: tuple[str, str | bool]) -> Series:
    """Return the series of a metric and its attributes, pairs of name and value in a fixed order."""
    key = metric, attributes
    if (found := _known.get(key)) is None:
        made = Series(metric, attributes)
        with _making:  # one object for all threads
            found = _known.setdefault(key, made)
    return found


# A series, a number, and the object that the number belongs to, or None. The numbers of a series are added up; if
# several sources give the number of the same object, it is added once.
Reading: TypeAlias = tuple[Series, float, object]


class CounterSource(Protocol):
    """An object with counters: the actors of a scope, a stream, a deployment, a device.

    Its methods are called from any thread, while other threads go on counting.
    """

    def counters(self) -> Iterable[Reading]:
        """Return the counters, which only grow."""
        ...

    def levels(self) -> Iterable[Reading]:
        """Return the present levels; by default, there are none."""
        return ()


# The instruments are made at the first count, because importing them takes longer than using them. Until the
# application sets a provider, the instruments are proxies of the API; then they pass on to the provider's instruments.


def instruments(meter: "Meter", values: Callable[[str], Mapping[Series, float]]) -> "dict[str, Histogram]":
    """Make all instruments of a meter, and return the histograms by name.

    Args:
        meter: the meter, which makes the instruments.
        values: returns the numbers of an observable instrument, by its name.
    """
    from opentelemetry.metrics import Observation

    def observe(name: str, options: "CallbackOptions") -> "Iterable[Observation]":
        return [Observation(value, dict(series.attributes)) for series, value in values(name).items()]

    for metric in OBSERVED:
        make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_up_down_counter
        make(metric.name, [partial(observe, metric.name)], metric.unit, metric.description)
    return {
        metric.name: meter.create_histogram(
            metric.name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=metric.boundaries
        )
        for metric in RECORDED
    }


_histograms: "dict[str, Histogram]" = {}
# Returns the meter provider of the application; None if the application has none, or if nothing was counted yet. It
# reads a private attribute, for speed, as `spans.tracer_provider` does. If a later version of OpenTelemetry lacks the
# attribute, durations are recorded in vain.
meter_provider: Callable[[], object] = partial(getattr, None, "_METER_PROVIDER", None)
_lock = threading.Lock()  # not a lock of the registry: a reader holds its own lock of OpenTelemetry meanwhile


def _create() -> None:
    """Make the instruments, once."""
    global meter_provider  # noqa: PLW0603 - one for the process, as meters are
    with _lock:
        if not _histograms:
            from opentelemetry import metrics
            from opentelemetry.metrics import _internal

            meter_provider = partial(getattr, _internal, "_METER_PROVIDER", _internal)
            made = guarded(
                "metrics", lambda: instruments(metrics.get_meter(names.INSTRUMENTATION, names.VERSION), registry.values)
            )
            _histograms.update(made or {one.name: metrics.NoOpHistogram(one.name) for one in RECORDED})


# The registry of sources. It holds a weak reference to each source from its opening to its closing. When a source
# closes, its counters are added to one sum for all closed sources, by metric and attributes: so totals only grow, and
# closed scopes take no memory. The totals of the series that closed last are kept: see `_KEPT_SERIES`. Sources open and
# close on event loops, or in the garbage collector, which must never wait for a reader; readers have threads of their
# own.


# How many series without an open source are kept. A node has two to eight, so these are 125 nodes or more, which is
# more than most programs have, and a page of Prometheus shows them in 200 KB. A graph that is made anew for each call
# under one name goes on counting, while a program that makes up names for ever loses the oldest.
_KEPT_SERIES: Final = 1_000


class Registry:
    """Adds up the counters of open and closed sources. All methods but `totals` may be called from any thread."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[int, CounterSource] = WeakValueDictionary()
        # Sources that have closed, with their counters, which are not in `_totals` yet.
        self._departed: deque[tuple[CounterSource | None, dict[Series, float]]] = deque()
        self._totals: dict[Series, float] = {}
        self._highest: dict[Series, float] = {}
        self._limit = _KEPT_SERIES + _KEPT_SERIES // 4  # with more totals than this, the oldest leave
        self._looks = _Look()
        self.unlock()

    def unlock(self) -> None:
        """Make new locks; also in a forked process, where a thread of the parent may hold the old locks."""
        self._lock = threading.Lock()  # `closed` and `add` never wait for this lock
        self._reading = threading.Lock()

    def opened(self, source: CounterSource) -> None:
        """Read a source from now on, until it is closed or collected as garbage."""
        self._open[id(source)] = source

    def closed(self, source: CounterSource) -> None:
        """Keep the last counters of a source that has closed; nothing if it was not open."""
        if self._open.get(id(source)) is source:
            self.vanished(source)

    def vanished(self, source: CounterSource) -> None:
        """Keep the last counters of an open source that is being collected as garbage; its weak reference is dead."""
        counters: dict[Series, float] = {}
        _add(counters, source.counters(), set())
        self._departed.append((source, counters))  # before it leaves `_open`: see `totals`
        if self._open.get(id(source)) is source:
            del self._open[id(source)]
        self._fold()

    def add(self, readings: Iterable[Reading]) -> None:
        """Add to counters that belong to no source."""
        counters: dict[Series, float] = {}
        _add(counters, readings, set())
        self._departed.append((None, counters))
        self._fold()

    def values(self, metric: str) -> Mapping[Series, float]:
        """Return the numbers of a metric.

        In a thread, all metrics tell of one moment, until one of them is read a second time.
        """
        look = self._looks
        if metric in look.told or not look.told:
            look.told.clear()
            with self._reading:
                look.totals = self.totals()
        look.told.add(metric)
        return look.totals.get(metric, {})

    def totals(self) -> dict[str, dict[Series, float]]:
        """Return all numbers, by metric and series; no counter is smaller than before. For one thread at a time."""
        # A source that closes meanwhile is in `sources`, in `just_closed` or in both; if in both, it is skipped in
        # `sources`.
        with self._lock:
            sources = [source for reference in self._open.valuerefs() if (source := reference()) is not None]
            just_closed = self._take_departed()
            found = dict(self._totals)
            shared: set[tuple[Series, object]] = set()
            for source in sources:
                if id(source) not in just_closed:
                    _add(found, source.counters(), shared)
                    _add(found, source.levels(), shared)
            by_metric = self._sorted(found)
        self._fold()
        return by_metric

    def _fold(self) -> None:
        """Add the closed sources to the totals; if a reader is using the totals, the reader adds them afterwards."""
        while self._departed and self._lock.acquire(blocking=False):
            try:
                self._take_departed()
            finally:
                self._lock.release()

    def _take_departed(self) -> set[int]:
        sources: list[CounterSource | None] = []
        while self._departed:
            source, counters = self._departed.popleft()
            sources.append(source)
            for series, value in counters.items():
                self._totals[series] = self._totals.pop(series, 0) + value  # now the last one
        if len(self._totals) > self._limit:
            self._forget()
        return {id(source) for source in sources if source is not None}

    def _forget(self) -> None:
        """Drop the totals of the series that closed first; never of a series with an open source."""
        sources = [source for reference in self._open.valuerefs() if (source := reference()) is not None]
        is_open = {series for source in sources for series, _, _ in source.counters()}
        closed = [series for series in self._totals if series not in is_open]
        for series in closed[:-_KEPT_SERIES]:
            del self._totals[series]
        self._highest = {one: high for one, high in self._highest.items() if one in is_open or one in self._totals}
        # So the open sources are asked once for many series that close.
        self._limit = len(self._totals) + _KEPT_SERIES // 4

    def _sorted(self, found: dict[Series, float]) -> dict[str, dict[Series, float]]:
        by_metric: dict[str, dict[Series, float]] = {}
        for series, value in found.items():
            if series.metric in COUNTERS:
                # Numbers are read one after the other while other threads count, so an item may be missing from all
                # numbers for a moment. A counter must not go back, so its highest value counts.
                value = self._highest[series] = max(value, self._highest.get(series, value))
            by_metric.setdefault(series.metric, {})[series] = value
        return by_metric


class _Look(threading.local):
    """The totals that a reader is being told. Each reader collects in a thread of its own.

    Attributes:
        totals: all numbers, of one moment.
        told: the metrics that this collection was told.
    """

    def __init__(self) -> None:
        self.totals: dict[str, dict[Series, float]] = {}
        self.told: set[str] = set()


def _add(found: dict[Series, float], readings: Iterable[Reading], shared: set[tuple[Series, object]]) -> None:
    for series, value, owner in readings:
        if owner is not None:
            once = series, owner
            if once in shared:
                continue
            shared.add(once)
        found[series] = found.get(series, 0) + value


registry = Registry()


def _unlock() -> None:
    global _lock, _making
    _lock, _making = threading.Lock(), threading.RLock()
    registry.unlock()


os.register_at_fork(after_in_child=_unlock)


def opened(source: CounterSource) -> None:
    """Read a source from now on, until it is closed or collected as garbage."""
    if not _histograms:
        _create()
    registry.opened(source)


def ended(
    metric: str, graph: str, seconds: float, outcome: str, error: BaseException | None, span: "Span | None"
) -> None:
    """Record the duration of one call, or of one stream of calls.

    Args:
        metric: the name of the histogram.
        graph: the name of the graph.
        seconds: the time from the call to its outcome, including its wait for a place.
        outcome: done, failed, cancelled, expired, interrupted or refused.
        error: the error of the call; None if there was none.
        span: the span of the call; if it is sampled, it becomes an exemplar of its bucket.
    """
    found = _histograms.get(metric)
    if found is None or meter_provider() is None:  # nothing was counted yet, or the application exports no metrics
        return
    attributes = {names.GRAPH: graph, names.OUTCOME: outcome}
    if error is not None and outcome in ("failed", "expired", "refused"):
        attributes[names.ERROR_TYPE] = type(error).__qualname__
    if span is None:
        guarded("metrics", found.record, seconds, attributes)
    else:
        from opentelemetry import trace

        guarded("metrics", found.record, seconds, attributes, trace.set_span_in_context(span))
