"""The instruments: made when something is first counted, because they take longer to import than to use.

Those of the API stand in until the application sets a provider, and pass on to its instruments then.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from .. import names
from .definitions import OBSERVED, RECORDED, Observed
from .readings import Series

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

Totals: TypeAlias = Callable[[], Mapping[str, Mapping[Series, float]]]

# Instruments are read one after the other; within this time they tell of one and the same moment.
_SAME_MOMENT_SECONDS: Final = 1.0


class Instruments:
    """All instruments of one meter.

    Args:
        meter: makes them.
        totals: what the observable ones tell.

    Attributes:
        histograms: those that are recorded, by name.
    """

    def __init__(self, meter: "Meter", totals: Totals) -> None:
        self.histograms: dict[str, Histogram] = {
            metric.name: meter.create_histogram(
                metric.name,
                metric.unit,
                metric.description,
                explicit_bucket_boundaries_advisory=metric.boundaries,
            )
            for metric in RECORDED
        }
        self._totals = totals
        self.unlock()
        self._look: Mapping[str, Mapping[Series, float]] = {}
        self._looked_at = 0.0
        self._told: set[str] = set()
        for metric in OBSERVED:
            make = (
                meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_up_down_counter
            )
            make(metric.name, [self._callback(metric)], metric.unit, metric.description)

    def unlock(self) -> None:
        """Have a new lock; also in a process that was forked, where a thread that is not here may hold the old one."""
        self._lock = threading.Lock()

    def _callback(self, metric: Observed) -> "Callable[[CallbackOptions], Iterable[Observation]]":
        from opentelemetry.metrics import Observation

        def observe(options: "CallbackOptions") -> "Iterable[Observation]":
            values = self._now(metric.name).get(metric.name, {})
            return [Observation(value, dict(series.attributes)) for series, value in values.items()]

        return observe

    def _now(self, metric: str) -> Mapping[str, Mapping[Series, float]]:
        """Return all numbers: looked at once for all instruments, and anew when one is read again."""
        with self._lock:
            now = monotonic()
            begins = metric in self._told or not self._told
            if begins:
                self._told.clear()
            # One that takes so long goes on with newer numbers, and is still the same collection.
            if begins or now > self._looked_at + _SAME_MOMENT_SECONDS:
                self._look = self._totals()
                self._looked_at = now
            self._told.add(metric)
            return self._look


_instruments: Instruments | None = None
_api: Any = None
_lock = threading.Lock()


def _unlock() -> None:
    global _lock  # noqa: PLW0603 - one for the process, as meters are
    _lock = threading.Lock()
    if _instruments is not None:
        _instruments.unlock()


os.register_at_fork(after_in_child=_unlock)


def create(totals: Totals) -> None:
    """Make the instruments, once."""
    global _api, _instruments  # noqa: PLW0603 - one for the process, as meters are
    if _instruments is not None:
        return
    with _lock:
        if _instruments is None:
            from opentelemetry import metrics
            from opentelemetry.metrics import _internal as _api

            _instruments = Instruments(metrics.get_meter(names.INSTRUMENTATION), totals)


def histogram(name: str) -> "Histogram | None":
    """Return a histogram; None if nothing was counted yet, or nobody would ever see what is recorded."""
    return None if _instruments is None or not are_recorded() else _instruments.histograms[name]


def are_recorded() -> bool:
    """Whether the application has set up metrics."""
    # Without a provider, `get_meter_provider()` reads the environment at every call, as that of tracers does. Should
    # the attribute go away, durations are merely recorded in vain.
    return getattr(_api, "_METER_PROVIDER", _api) is not None
