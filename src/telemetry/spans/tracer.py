"""The tracer of Penstock, and what all of its spans have in common.

Spans are held explicitly and passed as `context=`. A context is attached only around one call of user code, never
across a `yield`: a stream that is left early could not detach it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from .. import names

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
