"""What metrics read of calls, streams and deployments."""

from collections import Counter
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from ..actors.traced import Outcome, outcome_of
from ..telemetry import metrics, names, spans
from ..telemetry.metrics import Reading, series

if TYPE_CHECKING:
    from .admission import AdmissionStatistics
    from .window import Window


class RunMeter:
    """Counts one call, from its beginning.

    Args:
        graph: name of its graph.
        in_flight: the calls in flight, by graph; None if something else counts those.
    """

    __slots__ = ("_began", "_graph", "_in_flight")

    def __init__(self, graph: str, in_flight: "Counter[str] | None" = None) -> None:
        self._graph = graph
        self._in_flight = in_flight
        if in_flight is not None:
            in_flight[graph] += 1
        self._began = perf_counter()

    def ended(self, outcome: Outcome, error: BaseException | None, span: Span | None) -> None:
        """Record how it ended."""
        if self._in_flight is not None:
            self._in_flight[self._graph] -= 1
        metrics.run_ended(self._graph, perf_counter() - self._began, outcome, error, span)


def end_call(state: str, error: BaseException | None, span: Span | None, meter: RunMeter | None) -> None:
    """Say in its span and in metrics how a call has ended.

    Args:
        state: of its frame; "running" if it got no further than to wait for a place.
        error: what it ended with.
        span: its span, if it has one.
        meter: what counts it, if anything does.
    """
    if span is None and meter is None:
        return
    outcome = outcome_of(state, error)
    spans.end_run(span, outcome, error)
    if meter is not None:
        meter.ended(outcome, error, span)


def run_levels(in_flight: "Counter[str]") -> Iterator[Reading]:
    """Yield how many calls are in flight, of each graph."""
    for graph, count in in_flight.copy().items():
        yield series(names.METRIC_RUN_IN_FLIGHT, (names.GRAPH, graph)), count, None


def stream_counters(graph: str, window: "Window") -> Iterator[Reading]:
    """Yield how many items of a stream of calls have ended, by how.

    Args:
        graph: name of the graph of its first call.
        window: its places and items.
    """
    failed, cancelled, expired = window.failed, window.cancelled, window.expired
    counts = {
        "done": window.completed,
        "failed": failed - cancelled - expired,
        "cancelled": cancelled,
        "expired": expired,
    }
    for outcome, count in counts.items():
        yield series(names.METRIC_STREAM_ITEMS, (names.GRAPH, graph), (names.OUTCOME, outcome)), count, None


def stream_levels(graph: str, window: "Window") -> Iterator[Reading]:
    """Yield how many items of a stream of calls count in its limit, and the limit; as above."""
    of = names.GRAPH, graph
    yield series(names.METRIC_STREAM_IN_FLIGHT, of), window.in_flight, None
    yield series(names.METRIC_STREAM_MAX_IN_FLIGHT, of), window.size, None


def deployment_counters(graphs: str, admission: "AdmissionStatistics") -> Iterator[Reading]:
    """Yield how many calls a deployment has refused.

    Args:
        graphs: the names of its graphs.
        admission: its places.
    """
    yield series(names.METRIC_DEPLOYMENT_REFUSED, (names.GRAPH, graphs)), admission.refused, None


def deployment_levels(graphs: str, admission: "AdmissionStatistics") -> Iterator[Reading]:
    """Yield how the places of a deployment are taken; as above."""
    of = names.GRAPH, graphs
    yield series(names.METRIC_DEPLOYMENT_IN_FLIGHT, of), admission.in_flight, None
    yield series(names.METRIC_DEPLOYMENT_MAX_IN_FLIGHT, of), admission.max_in_flight, None
    yield series(names.METRIC_DEPLOYMENT_QUEUED, of), admission.queued, None
