"""The way of a trace into worker processes: the headers of W3C, in the request, and where its spans go from there."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# Not the one that the application has chosen for what leaves it: a worker is told nothing of that choice.
_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])


_set_up: Callable[[], None] | None = None


def set_up_workers(set_up: Callable[[], None]) -> None:
    """Have every worker process that is started from now on call this, pickled, when it has its first sampled item."""
    global _set_up  # noqa: PLW0603 - one for the process, as the provider of traces is
    _set_up = set_up


def set_up_of_workers() -> Callable[[], None] | None:
    """Return what a new worker process has to call; None if nobody sends traces."""
    return _set_up


def outgoing() -> dict[str, str]:
    """Return the headers of the present context; none if it has no span and no baggage."""
    headers: dict[str, str] = {}
    if otel_context.get_current():
        _W3C.inject(headers)
    return headers


@contextmanager
def incoming(headers: Mapping[str, str], set_up: Callable[[], None]) -> Generator[None, None, None]:
    """Make the context of the process that sent these headers current around one call.

    Args:
        headers: what `outgoing` returned there.
        set_up: called if the call is sampled, and has to have its spans sent.
    """
    token = otel_context.attach(_W3C.extract(headers))
    try:
        if trace.get_current_span().get_span_context().trace_flags.sampled:
            set_up()
        yield
    finally:
        otel_context.detach(token)
