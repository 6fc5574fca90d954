"""Metrics that are set up for one test only, and what a reader of the SDK collects of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric

from penstock.telemetry import names
from penstock.telemetry.metrics import Instruments, Registry


@dataclass
class Collected:
    """A provider with a reader, and a registry that knows of nothing that was opened before.

    Attributes:
        registry: adds up what is open and what has closed.
    """

    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)
    registry: Registry = field(default_factory=Registry)

    def __post_init__(self) -> None:
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.instruments = Instruments(self.provider.get_meter(names.INSTRUMENTATION), self.registry.totals)

    def metrics(self) -> dict[str, Metric]:
        """Returns what is collected now, by name."""
        data = self.reader.get_metrics_data()
        found = [] if data is None else data.resource_metrics
        return {metric.name: metric for one in found for scope in one.scope_metrics for metric in scope.metrics}

    def points(self, name: str, **attributes: Any) -> list[Any]:
        """Returns the points of a metric that have these attributes (`graph=` is `penstock.graph`)."""
        metric = self.metrics().get(name)
        wanted = {"error.type" if key == "error" else f"penstock.{key}": value for key, value in attributes.items()}
        points = [] if metric is None else metric.data.data_points
        return [point for point in points if wanted.items() <= dict(point.attributes or {}).items()]

    def total(self, name: str, **attributes: Any) -> float:
        """Returns the sum of these points; of a histogram, how many were recorded."""
        points = self.points(name, **attributes)
        return sum(point.count if hasattr(point, "count") else point.value for point in points)


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """Sets metrics up: a process has one provider only, and the instruments of the package found it before."""
    found = Collected()
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", found.provider)
    monkeypatch.setattr("penstock.telemetry.metrics._instruments", found.instruments)
    monkeypatch.setattr("penstock.telemetry.metrics._registry", found.registry)
    yield found
    found.provider.shutdown()
