"""How long calls and streams took, and how they ended."""

from typing import TYPE_CHECKING

from .. import names
from .instruments import histogram

if TYPE_CHECKING:
    from opentelemetry.trace import Span


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
