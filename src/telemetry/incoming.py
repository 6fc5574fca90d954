"""Takes up the trace of a caller in another process, from the headers of its request."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar, cast

from opentelemetry import context as otel_context
from opentelemetry import propagate

Headers = Mapping[str, str] | Iterable[tuple[str, str] | tuple[bytes, bytes] | tuple[str, bytes]]


class _Call(Protocol):
    """A call of a graph, which this floor does not know."""

    def _continued(self, headers: Mapping[str, str], /) -> object: ...


CallT = TypeVar("CallT", bound=_Call)


@contextmanager
def continue_trace(headers: Headers) -> Generator[None]:
    """Let the calls inside of a `with` block belong to the trace of a request.

    For servers that are not instrumented: an instrumented one does this by itself, and has a span of its own. Calls
    become children of the caller's span, and its decision counts: of a request that it does not sample, no spans are
    recorded, and logs still carry its trace id. Headers without a trace change nothing.

    It reads W3C Trace Context and Baggage (`traceparent`, `tracestate`, `baggage`), or what `OTEL_PROPAGATORS` says.

    Args:
        headers: those of the request, in any case: a mapping, or pairs as ASGI has them in `scope["headers"]`.
    """
    token = otel_context.attach(propagate.extract(_carrier(headers), otel_context.get_current()))
    try:
        yield
    finally:
        # Not `detach`, which logs an error where nothing was attached: an async generator that is left early, with this
        # block around its `yield`, may be closed in another context.
        with suppress(ValueError):
            token.var.reset(token)


def continued(call: CallT, headers: Headers) -> CallT:
    """Return the call, as one that belongs to the trace of a message: its span is a child of the sender's.

    For consumers, whose calls come from a source, where `continue_trace` cannot be around each of them. A stream of
    calls takes it with `trace_items=True`; `run`, and a stream of one call, as it is. Whether it is recorded is decided
    as the sampler does for a request: as the sender has decided, by default. Headers without a trace change nothing.

    Args:
        call: a call of a graph, not yet started.
        headers: those of the message, in any form that `continue_trace` takes, and as Kafka's clients have them: pairs
            of text and bytes.
    """
    return cast(CallT, call._continued(_carrier(headers)))


def _carrier(headers: Headers) -> dict[str, str]:
    """Return headers by their names in lower case, those of the same name as one list, as HTTP has it."""
    carrier: dict[str, str] = {}
    pairs: Iterable[tuple[str | bytes, str | bytes]]
    pairs = cast("Mapping[str, str]", headers).items() if isinstance(headers, Mapping) else headers
    for name, value in ((_text(name).lower(), _text(value)) for name, value in pairs):
        carrier[name] = f"{carrier[name]},{value}" if name in carrier else value
    return carrier


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
