"""The tracer of Penstock, and how a trace comes in from callers and goes on into worker processes."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from .. import names

if TYPE_CHECKING:
    from opentelemetry.propagators.composite import CompositePropagator


# The tracer of Penstock, and what all of its spans have in common.
#
# Spans are held explicitly and passed as `context=`. A context is attached only around one call of user code, never
# across a `yield`: a stream that is left early could not detach it.

_tracer = trace.get_tracer(names.INSTRUMENTATION, schema_url=names.SCHEMA_URL)

Value = str | int | float | Sequence[str]


def is_set_up() -> bool:
    """Whether the application has set up tracing at all."""
    # `get_tracer_provider()` reads the environment at every call as long as there is no provider, which costs as much
    # as running ten nodes. Should the attribute go away, spans are merely started in vain.
    return getattr(trace, "_TRACER_PROVIDER", trace) is not None


def start(
    name: str,
    parent: Context | None = None,
    attributes: Mapping[str, Value] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[Link] = (),
) -> Span:
    """Start a span.

    Args:
        name: its name.
        parent: the context with the span that it is a child of; that of the caller by default.
        attributes: what the sampler may see, too.
        kind: CLIENT for calls of other systems.
        links: to the spans that it does something for.
    """
    return _tracer.start_span(name, context=parent, kind=kind, attributes=attributes, links=links)


def record_error(span: Span, error: BaseException) -> None:
    """Say on a span that what it stands for has failed, and how."""
    span.set_attribute(names.ERROR_TYPE, type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, message_of(error)))
    if isinstance(error, Exception):
        with suppress(Exception):  # the SDK asks for its text as well
            span.record_exception(error)


def message_of(error: BaseException) -> str:
    """Return the text of an error of the user, which must not become another error for its trace."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - the user's `__str__`
        return f"<its str() raises {type(broken).__qualname__}>"


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
        _w3c().inject(headers)
    return headers


@contextmanager
def incoming(headers: Mapping[str, str], set_up: Callable[[], None]) -> Generator[None, None, None]:
    """Make the context of the process that sent these headers current around one call.

    Args:
        headers: what `outgoing` returned there.
        set_up: called if the call is sampled, and has to have its spans sent.
    """
    token = otel_context.attach(_w3c().extract(headers))
    try:
        if trace.get_current_span().get_span_context().trace_flags.sampled:
            set_up()
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
