"""The registry adds up open and closed sources, and never waits; one reading serves all instruments."""

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

from penstock.telemetry import names
from penstock.telemetry.metrics import OBSERVED, Reading, Registry, Series, instruments, series
from tests.docs.snippets import ROOT

COUNTER, LEVEL = names.METRIC_NODE_EXECUTIONS, names.METRIC_QUEUE_DEPTH


def of(metric: str, node: str) -> Series:
    return series(metric, (names.NODE, node))


class Counts:
    """A source with a counter and a level of one node; `on_read` is called while it is read."""

    def __init__(self, value: int, on_read: Callable[[], object] | None = None) -> None:
        self.value = value
        self.on_read = on_read

    def counters(self) -> Iterable[Reading]:
        if self.on_read is not None:
            on_read, self.on_read = self.on_read, None
            on_read()
        return [(of(COUNTER, "n"), self.value, None)]

    def levels(self) -> Iterable[Reading]:
        return [(of(LEVEL, "n"), self.value, None)]


def totals(registry: Registry) -> dict[tuple[str, Any], float]:
    return {
        (metric, one.attributes[0][1]): value
        for metric, values in registry.totals().items()
        for one, value in values.items()
    }


def test_what_closes_while_others_are_read_counts_once() -> None:
    registry = Registry()
    closing = Counts(3)
    first = Counts(1, on_read=lambda: registry.closed(closing))
    last = Counts(2, on_read=lambda: registry.closed(first))
    for source in (first, closing, last):
        registry.opened(source)
    assert totals(registry)[COUNTER, "n"] == 6
    assert totals(registry)[COUNTER, "n"] == 6
    registry.closed(last)
    assert totals(registry) == {(COUNTER, "n"): 6}


def test_closing_never_waits_for_a_reader_nor_for_another_that_closes() -> None:
    registry = Registry()
    source = Counts(3)
    registry.opened(source)
    closed = threading.Thread(target=registry.closed, args=(source,))
    with registry._lock:  # as a reader holds the lock, or a thread that closes another source
        closed.start()
        closed.join()
    assert totals(registry) == {(COUNTER, "n"): 3}
    assert not registry._departed


def test_a_counter_that_lost_a_source_without_its_end_does_not_go_back() -> None:
    registry = Registry()
    source = Counts(3)
    registry.opened(source)
    left = weakref.ref(source)
    assert totals(registry)[COUNTER, "n"] == 3
    del source
    gc.collect()
    assert left() is None
    registry.add([(of(COUNTER, "n"), 1, None)])
    assert totals(registry) == {(COUNTER, "n"): 3}


class Looks:
    """A source of all metrics, whose numbers are the number of looks."""

    def __init__(self) -> None:
        self.count = 0

    def counters(self) -> Iterable[Reading]:
        self.count += 1
        return [(of(metric.name, "n"), self.count, None) for metric in OBSERVED if metric.kind == "counter"]

    def levels(self) -> Iterable[Reading]:
        return [(of(metric.name, "n"), self.count, None) for metric in OBSERVED if metric.kind == "up_down"]


def test_all_instruments_tell_of_one_look() -> None:
    registry, looks = Registry(), Looks()
    registry.opened(looks)
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    provider = MeterProvider(readers, shutdown_on_exit=False)
    histograms = instruments(provider.get_meter("test"), registry.values)
    for expected in (1, 2, 3):
        data = readers[expected % 2].get_metrics_data()
        assert data is not None
        (scope,) = data.resource_metrics[0].scope_metrics
        assert len(scope.metrics) == len(OBSERVED)
        assert {point.value for metric in scope.metrics for point in metric.data.data_points} == {expected}  # type: ignore[union-attr]
        assert looks.count == expected
    assert set(histograms) == {names.METRIC_RUN_DURATION, names.METRIC_STREAM_DURATION}
    provider.shutdown()


def test_a_reader_beside_another_tells_of_one_moment() -> None:
    registry, looks = Registry(), Looks()
    registry.opened(looks)
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    providers = [MeterProvider([reader], shutdown_on_exit=False) for reader in readers]
    found: dict[InMemoryMetricReader, set[float]] = {}

    def collect(reader: InMemoryMetricReader) -> None:
        data = reader.get_metrics_data()
        assert data is not None
        (scope,) = data.resource_metrics[0].scope_metrics
        found[reader] = {point.value for metric in scope.metrics for point in metric.data.data_points}  # type: ignore[union-attr]

    def values(metric: str) -> Mapping[Series, float]:
        if metric == OBSERVED[len(OBSERVED) // 2].name:  # the other reader comes in between
            other = threading.Thread(target=collect, args=(readers[1],))
            other.start()
            other.join()
        return registry.values(metric)

    instruments(providers[0].get_meter("test"), values)
    instruments(providers[1].get_meter("test"), registry.values)
    collect(readers[0])
    assert found == {readers[0]: {1}, readers[1]: {2}}
    for provider in providers:
        provider.shutdown()


def test_the_queries_in_the_documentation_name_what_prometheus_sees() -> None:
    found = CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(registry=found)], shutdown_on_exit=False)
    for histogram in instruments(provider.get_meter("test"), lambda name: {of(name, "n"): 1}).values():
        histogram.record(1)
    seen = {sample.name for family in found.collect() for sample in family.samples}
    page = (ROOT / "docs/how-to/metrics.md").read_text()
    asked = set(re.findall(r"\bpenstock_\w+(?=[{\[ `])", page)) - {"penstock_graph", "penstock_node"}
    assert len(asked) > 10
    assert asked - seen == set()
    provider.shutdown()


def test_units_are_those_of_the_conventions() -> None:
    for metric in OBSERVED:
        assert re.fullmatch(r"s|By|\{.*\}", metric.unit), metric
        assert (metric.unit == "s") == metric.name.endswith("time"), metric
        assert metric.name.startswith("penstock."), metric
        assert metric.description.endswith("."), metric
