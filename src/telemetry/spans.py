"""Spans: one for each call, and one for each node execution of a sampled call.

Spans are held explicitly and passed as `context=`. A context is attached only around one call of user code, never
across a `yield`: a stream that is left early could not detach it.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from . import names

_tracer = trace.get_tracer(names.INSTRUMENTATION)


def start_run(
    graph: str, context: Context, *, item: int | None = None, parent: Span | None = None
) -> tuple[Span | None, bool]:
    """Start the span of one call, as a child of `parent` or else of the caller's span.

    Args:
        graph: name of the graph.
        context: that of the call, and of it alone: the span is made current there.
        item: the index of the call in a stream.
        parent: the span of that stream.

    Returns:
        The span, None if the application has set up no tracing at all; and whether it is recorded.
    """
    if not _is_set_up():
        return None, False
    outer = trace.set_span_in_context(parent) if parent is not None else None
    attributes: dict[str, str | int] = {names.GRAPH: graph}
    if item is not None:
        attributes[names.ITEM] = item
    span = _tracer.start_span(f"{names.RUN} {graph}", context=outer, attributes=attributes)
    _enter(span, context)
    return span, span.is_recording()


def start_stream(context: Context) -> Span | None:
    """Start the span of a stream, the parent of those of its items, and make it current in `context`."""
    if not _is_set_up():
        return None
    span = _tracer.start_span(names.STREAM)
    _enter(span, context)
    return span


def _is_set_up() -> bool:
    # `get_tracer_provider()` reads the environment at every call as long as there is no provider, which costs as much
    # as running ten nodes. Should the attribute go away, spans are merely started in vain.
    return getattr(trace, "_TRACER_PROVIDER", trace) is not None


def _enter(span: Span, context: Context) -> None:
    context.run(otel_context.attach, trace.set_span_in_context(span))


def end_run(span: Span | None, outcome: str, error: BaseException | None = None) -> None:
    """End the span of a call, if there is one, with its outcome: done, failed or cancelled."""
    if span is None:
        return
    if span.is_recording():
        span.set_attribute(names.OUTCOME, outcome)
        if error is not None:
            _record(span, error)
    span.end()


def node(run: Span | None, name: str, function: Callable[..., object], *, item: int) -> AbstractContextManager[None]:
    """Open the span of one node execution around its handler, and make it current there; nothing without a run."""
    return nullcontext() if run is None else _node(run, name, function, item)


@contextmanager
def _node(run: Span, name: str, function: Callable[..., object], item: int) -> Generator[None, None, None]:
    attributes: dict[str, str | int] = {names.NODE: name, names.ITEM: item}
    qualname = getattr(function, "__qualname__", None)
    if qualname is not None:  # an instance has none
        attributes[names.FUNCTION] = f"{function.__module__}.{qualname}"
    span = _tracer.start_span(name, context=trace.set_span_in_context(run), attributes=attributes)
    token = otel_context.attach(trace.set_span_in_context(span))
    _open_span.set(span)
    try:
        yield
    except BaseException as error:
        _record(span, error)
        raise
    finally:
        otel_context.detach(token)
        span.end()


def retried(run: Span | None, node_name: str, attempt: int) -> None:
    """Note another attempt on the span of the node that is open here."""
    span = _open_span.get()
    if run is not None and span is not None:
        span.add_event(names.RETRY, {names.NODE: node_name, names.ATTEMPT: attempt})


def _record(span: Span, error: BaseException) -> None:
    span.set_attribute(names.ERROR_TYPE, type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    if isinstance(error, Exception):
        span.record_exception(error)


_open_span: ContextVar[Span | None] = ContextVar("penstock_node_span", default=None)
