"""Metrics that are set up for one test only, and the numbers that a reader of the SDK collects from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric

from penstock.telemetry import names
from penstock.telemetry.metrics import Registry, instruments


@dataclass
class Collected:
    """A provider with a reader, and a new registry, which has no sources of earlier tests.

    Attributes:
        registry: adds up the counters of open and closed sources.
    """

    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)
    registry: Registry = field(default_factory=Registry)

    def __post_init__(self) -> None:
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.histograms = instruments(self.provider.get_meter(names.INSTRUMENTATION), self.registry.values)

    def metrics(self) -> dict[str, Metric]:
        """Returns the metrics that the reader collects now, by name."""
        data = self.reader.get_metrics_data()
        found = [] if data is None else data.resource_metrics
        return {metric.name: metric for one in found for scope in one.scope_metrics for metric in scope.metrics}

    def points(self, name: str, **attributes: Any) -> list[Any]:
        """Returns the points of a metric that have these attributes (`graph=` is `penstock.graph`)."""
        metric = self.metrics().get(name)
        wanted = {"error.type" if key == "error" else f"penstock.{key}": value for key, value in attributes.items()}
        points = [] if metric is None else metric.data.data_points
        return [point for point in points if wanted.items() <= dict(point.attributes or {}).items()]

    def by(self, name: str, *keys: str, **attributes: Any) -> dict[tuple[Any, ...], float]:
        """Returns the counts above 0 by some attributes of their points; None stands for one that is not set."""
        found: dict[tuple[Any, ...], float] = {}
        for point in self.points(name, **attributes):
            told = dict(point.attributes or {})
            place = tuple(told.get("error.type" if key == "error" else f"penstock.{key}") for key in keys)
            count = point.count if hasattr(point, "count") else point.value
            found |= {place: found.get(place, 0) + count} if count else {}
        return found

    def total(self, name: str, **attributes: Any) -> float:
        """Returns the sum of these points; for a histogram, the number of recorded values."""
        points = self.points(name, **attributes)
        return sum(point.count if hasattr(point, "count") else point.value for point in points)


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """Sets metrics up anew: a process has only one provider, and the package's instruments may have found it before."""
    found = Collected()
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", found.provider)
    monkeypatch.setattr("penstock.telemetry.metrics._histograms", found.histograms)
    monkeypatch.setattr("penstock.telemetry.metrics.registry", found.registry)
    yield found
    found.provider.shutdown()
