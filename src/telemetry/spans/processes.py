"""The way of a trace into worker processes: the headers of W3C, in the request."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context

if TYPE_CHECKING:
    from opentelemetry.propagators.composite import CompositePropagator


def outgoing() -> dict[str, str]:
    """Return the headers of the present context; none if it has no span and no baggage."""
    headers: dict[str, str] = {}
    if otel_context.get_current():
        _w3c().inject(headers)
    return headers


@contextmanager
def incoming(headers: Mapping[str, str]) -> Generator[None, None, None]:
    """Make the context of the process that sent these headers current around one call."""
    token = otel_context.attach(_w3c().extract(headers))
    try:
        yield
    finally:
        otel_context.detach(token)


@cache
def _w3c() -> "CompositePropagator":
    """Return the propagator for workers; not the one that the application has chosen for what leaves it."""
    from opentelemetry.baggage.propagation import W3CBaggagePropagator
    from opentelemetry.propagators.composite import CompositePropagator
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
