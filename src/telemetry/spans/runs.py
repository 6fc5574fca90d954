"""Spans of calls and of streams, and what a sampled call knows for the spans below its own."""

from collections.abc import Iterable, Mapping
from contextvars import Context
from time import perf_counter

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import INVALID_SPAN, Link, Span

from .. import names
from .tracer import Value, is_set_up, message_of, record_error, start


class FrameSpan:
    """The span that the node executions of one item are children of, and since when their inputs are complete.

    Only items of sampled calls have one.

    Args:
        parent: the span.
        body: name of the body of control flow that the item is in; None if it is in none.

    Attributes:
        parent, body: the same.
        context: what their spans get as their parent.
    """

    __slots__ = ("_begun_at", "_ready_at", "body", "context", "parent")

    def __init__(self, parent: Span, body: str | None = None) -> None:
        self.parent = parent
        self.body = body
        self.context = trace.set_span_in_context(parent)
        self._begun_at = perf_counter()
        self._ready_at: dict[int, float] = {}

    def completed(self, consumers: Iterable[int]) -> None:
        """A value is there that these steps read; the last one that a step waits for makes its inputs complete."""
        now = perf_counter()
        for consumer in consumers:
            self._ready_at[consumer] = now

    def waited_seconds(self, step: int) -> float:
        """Return for how long the inputs of a step have been complete."""
        return perf_counter() - self._ready_at.get(step, self._begun_at)


def start_run(
    graph: str,
    context: Context,
    *,
    is_wanted: bool = True,
    headers: Mapping[str, str] | None = None,
    item: int | None = None,
    stream: Span | None = None,
    begins_trace: bool = False,
) -> tuple[Span | None, bool]:
    """Start the span of one call: a child of what its headers name, of its stream, or else of the caller's span.

    Args:
        graph: name of the graph.
        context: that of the call, and of it alone: the span is made current there.
        is_wanted: whether there is to be a span; without one, the call still carries the ids of its headers.
        headers: those that the call goes on from, if it goes on from any.
        item: the index of the call in a stream.
        stream: the span of that stream.
        begins_trace: whether the item is linked to its stream, and no child of it.

    Returns:
        The span, None if none is wanted or the application has set up no tracing; and whether it is recorded.
    """
    is_wanted = is_wanted and is_set_up()
    if not is_wanted and headers is None:
        return None, False
    outer, links = None, list[Link]()
    if begins_trace:
        outer = trace.set_span_in_context(INVALID_SPAN)
        if stream is not None:
            links.append(Link(stream.get_span_context()))
    elif stream is not None:
        outer = trace.set_span_in_context(stream)
    if headers is not None:
        outer = propagate.extract(headers, otel_context.get_current() if outer is None else outer)
        if not is_wanted:
            context.run(otel_context.attach, outer)
            return None, False
    attributes: dict[str, Value] = {names.GRAPH: graph}
    if item is not None:
        attributes[names.ITEM] = item
    span = start(f"{names.RUN} {graph}", outer, attributes, links=links)
    context.run(otel_context.attach, trace.set_span_in_context(span, outer))
    return span, span.is_recording()


def admitted(span: Span | None, waited_seconds: float) -> None:
    """Note that a call has waited for its place."""
    if span is not None:
        span.set_attribute(names.ADMISSION_WAIT, waited_seconds)


def end_run(span: Span | None, outcome: str, error: BaseException | None = None) -> None:
    """End the span of a call, if there is one.

    Args:
        span: the span.
        outcome: done, failed, cancelled, expired or refused.
        error: what the call ended with.
    """
    if span is None:
        return
    if span.is_recording():
        span.set_attribute(names.OUTCOME, outcome)
        if error is not None and outcome != "cancelled":
            record_error(span, error)
    span.end()


def start_stream(context: Context | None) -> Span | None:
    """Start the span of a stream, and make it current in `context`, if there is one."""
    if not is_set_up():
        return None
    span = start(names.STREAM)
    if context is not None:
        context.run(otel_context.attach, trace.set_span_in_context(span))
    return span


def item_skipped(span: Span | None, graph: str, item: int, error: BaseException | None) -> None:
    """Note on the span of a stream that its reader does not get an item."""
    if span is not None and span.is_recording():
        attributes: dict[str, str | int] = {names.GRAPH: graph, names.ITEM: item}
        if error is not None:
            attributes[names.ERROR_TYPE] = type(error).__qualname__
            attributes[names.ERROR_MESSAGE] = message_of(error)
        span.add_event(names.ITEM_SKIPPED, attributes)


def end_stream(
    span: Span | None, outcome: str, error: BaseException | None, *, items: int, failed: int, skipped: int
) -> None:
    """End the span of a stream, if there is one.

    Args:
        span: the span.
        outcome: as of a call; cancelled if its reader has left before its end.
        error: what ended the whole stream.
        items: that were started.
        failed: of these.
        skipped: of those.
    """
    if span is not None and span.is_recording():
        span.set_attributes({names.STREAM_ITEMS: items, names.STREAM_FAILED: failed, names.STREAM_SKIPPED: skipped})
    end_run(span, outcome, error)
