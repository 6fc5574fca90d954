"""Spans: functions and classes that open and end spans. Calls that are not sampled have no spans.

Samplers, span processors, propagators and the spans of other vendors are foreign code, which may raise. So every call
of OpenTelemetry that may reach them goes through `told`, or starts a span by `_started`.
"""

import contextvars
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Token
from functools import cache, partial
from threading import current_thread
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, NonRecordingSpan, Span, SpanContext, SpanKind

from . import names
from .logs import about_error, guarded, record_error

if TYPE_CHECKING:
    from opentelemetry.propagators.composite import CompositePropagator


# Spans are held explicitly and passed as `context=`. A context is attached only around one call of user code, never
# across a `yield`, because a stream that is left early could not detach it.

_tracer = trace.get_tracer(names.INSTRUMENTATION, names.VERSION, schema_url=names.SCHEMA_URL)

AttributeValue = str | int | float | Sequence[str]
P = ParamSpec("P")
T = TypeVar("T")


# Returns the tracer provider of the application; None if the application has none. Each call of a graph asks for the
# provider, so this is a C function that reads a private attribute. `get_tracer_provider()` reads the environment as
# long as there is no provider, which costs as much as running ten nodes. If a later version of OpenTelemetry lacks the
# attribute, spans are started in vain.
tracer_provider: Callable[[], object] = partial(getattr, trace, "_TRACER_PROVIDER", trace)


if TYPE_CHECKING:

    def told(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a method of a span, or another function of OpenTelemetry; log its error once, and return None then."""
else:
    told = partial(guarded, "spans")  # without a stack frame of its own


def _started(
    name: str,
    parent: Context | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    links: Sequence[Link] = (),
    kind: SpanKind = SpanKind.INTERNAL,
    since: int | None = None,
) -> Span:
    """Start a span. If that raises, return a span that records nothing, and keeps the trace together."""
    span = told(_tracer.start_span, name, parent, kind, attributes, links, since)
    return NonRecordingSpan(id_of(trace.get_current_span(parent))) if span is None else span


def id_of(span: Span) -> SpanContext:
    """Return the ids of a span and its trace."""
    return told(span.get_span_context) or trace.INVALID_SPAN_CONTEXT


def is_recorded(span: Span) -> bool:
    """Whether a span takes attributes and events, because it is sampled and has not ended."""
    return not isinstance(span, NonRecordingSpan) and (told(span.is_recording) or False)


Headers = Mapping[str, str] | Iterable[tuple[str, str] | tuple[bytes, bytes] | tuple[str, bytes]]


class _Call(Protocol):
    """A call of a graph; a Protocol, because telemetry cannot import the engine."""

    def _continued(self, headers: Mapping[str, str], /) -> object: ...


CallT = TypeVar("CallT", bound=_Call)


@contextmanager
def continue_trace(headers: Headers) -> Generator[None]:
    """Make the calls inside of a `with` block part of the trace of a request.

    It is for servers that are not instrumented: an instrumented server continues the trace by itself, with a span of
    its own. The spans of the calls become children of the span of the client. If the client does not sample the
    request, no spans are recorded, but logs still have the trace id of the request. Headers without a trace change
    nothing.

    It reads W3C Trace Context and Baggage (`traceparent`, `tracestate`, `baggage`), or the formats that
    `OTEL_PROPAGATORS` names.

    Args:
        headers: the headers of the request, in upper or lower case: a mapping, or pairs as in ASGI's
            `scope["headers"]`.
    """
    token = otel_context.attach(_extracted(_carrier(headers), otel_context.get_current()))
    try:
        yield
    finally:
        # In another context than the one of `attach`, `detach` would log an error: an async generator with this block
        # around its `yield` may be closed in another context when it is left early.
        with suppress(ValueError):
            token.var.reset(token)


def continued(call: CallT, headers: Headers, *, attributes: Mapping[str, AttributeValue] | None = None) -> CallT:
    """Return a call that is part of the trace of a message: its span is a child of the sender's span.

    It is for consumers of queues: there, a stream takes calls from a source, and `continue_trace` cannot be around each
    call. A stream of calls needs `trace_items=True` for this; `run`, and a stream of one call, need no option. The
    sampler decides whether the span is recorded; by default, it decides as the sender has. Headers without a trace
    change nothing.

    Args:
        call: a call of a graph, not yet started.
        headers: the headers of the message, in any form that `continue_trace` accepts, or pairs of text and bytes, as
            Kafka's clients have them.
        attributes: attributes of the span, such as `messaging.message.id`. With a `messaging.system` among them, the
            span is of the kind CONSUMER.

    Returns:
        The call to pass to the stream, or to `run`.
    """
    given = headers if isinstance(headers, MessageTrace) else MessageTrace(headers, attributes or {})
    return cast(CallT, call._continued(given))


class MessageTrace(dict[str, str]):
    """The headers of a message, for `telemetry.continued`, and the span of its call once the call has begun.

    Args:
        headers: the headers of the message, in any form that `telemetry.continued` accepts.
        attributes: the attributes of the span.
    """

    _run: Span | None = None  # the span of the call

    def __init__(self, headers: Headers, attributes: Mapping[str, AttributeValue]) -> None:
        super().__init__(_carrier(headers))
        self.attributes = attributes

    def __reduce__(self) -> tuple[Any, ...]:
        return MessageTrace, (dict(self), self.attributes)  # a span does not pickle

    def dead_letter(self, name: str) -> AbstractContextManager[None]:
        """Open a span around the writing of a dead letter, below the call, or below the sender if no call was made.

        Args:
            name: what the letter is of, such as the partition.
        """
        if tracer_provider() is None:
            return nullcontext()
        attributes = {**self.attributes, names.MESSAGING_OPERATION: "send"}
        parent = _extracted(self, Context()) if self._run is None else trace.set_span_in_context(self._run)
        return _around(names.DEAD_LETTER, name, attributes, parent, (), kind=SpanKind.PRODUCER)


def _extracted(headers: Mapping[str, str], context: Context) -> Context:
    found = told(propagate.extract, headers, context)
    return context if found is None else found


def _carrier(headers: Headers) -> dict[str, str]:
    """Return headers by their names in lower case; headers of the same name are joined by commas, as in HTTP."""
    carrier: dict[str, str] = {}
    pairs: Iterable[tuple[str | bytes, str | bytes]]
    pairs = cast("Mapping[str, str]", headers).items() if isinstance(headers, Mapping) else headers
    for name, value in ((_text(name).lower(), _text(value)) for name, value in pairs):
        carrier[name] = f"{carrier[name]},{value}" if name in carrier else value
    return carrier


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def note_on_span(attributes: Mapping[str, AttributeValue]) -> None:
    """Add attributes to the current span, unless it has ended: the job of a lost attempt goes on after its span."""
    span = trace.get_current_span()
    if is_recorded(span):
        told(span.set_attributes, attributes)


# A function that each new worker process calls before its first sampled item, and that can be pickled; None if the
# application exports no traces.
set_up_of_workers: Callable[[], None] | None = None
# The spans that have ended in this worker process during its present call. The engine's process gets them with the
# answer and exports them, so a worker that is killed later takes none with it. None between two calls.
ended_in_worker: list[object] | None = None
# In the engine's process: exports such a list, pickled. `setup` sets it, and only then does a worker send one.
export_of_worker: Callable[[memoryview], object] = len


class WorkerTraces:
    """The traces of calls that processes of the Engine make. It is made in the Engine's process, and pickles."""

    def __init__(self) -> None:
        self._set_up = set_up_of_workers

    @staticmethod
    def headers() -> dict[str, str]:
        """Return the headers of the current context; empty if it has neither span nor baggage."""
        headers: dict[str, str] = {}
        if otel_context.get_current():
            told(_w3c().inject, headers)
        return headers

    @staticmethod
    def ran_in(pid: int, start_seconds: float) -> None:
        """Note in the current span where its work has run.

        Args:
            pid: the number of the process.
            start_seconds: how long the call has waited for the start of the process.
        """
        started = {names.WORKER_START: start_seconds} if start_seconds else {}
        note_on_span({names.PROCESS_PID: pid, **started})

    @contextmanager
    def within(self, headers: Mapping[str, str]) -> Generator[None, None, None]:
        """Make the context of the Engine's process current around one call in the other process.

        The first sampled call sets up the sending of spans.

        Args:
            headers: the result of `headers` in the Engine's process.
        """
        global ended_in_worker  # noqa: PLW0603
        token = otel_context.attach(_w3c().extract(headers))
        try:
            if trace.get_current_span().get_span_context().trace_flags.sampled:
                set_up, self._set_up = self._set_up, None
                if set_up is not None:
                    told(set_up)
                ended_in_worker = []
            yield
        finally:
            otel_context.detach(token)

    @staticmethod
    def ended() -> list[object] | None:
        """Take the spans that have ended in the other process during its present call; None without such spans."""
        global ended_in_worker
        ended, ended_in_worker = ended_in_worker, None
        return ended

    @staticmethod
    def export(ended: memoryview) -> None:
        """Export spans in the Engine's process; `ended` is the pickled result of `ended` in the other process."""
        told(export_of_worker, ended)


@cache
def _w3c() -> "CompositePropagator":
    """Return the propagator for worker processes; the propagator of the application is for other systems."""
    from opentelemetry.baggage.propagation import W3CBaggagePropagator
    from opentelemetry.propagators.composite import CompositePropagator
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])


class FrameSpan:
    """The parent of the spans of one item's node executions, and the times at which their inputs were complete.

    Only items of sampled calls have a `FrameSpan`.

    Args:
        parent: the parent span.
        body: the name of the body of control flow that the item is in; None if it is in no body.

    Attributes:
        parent, body: the arguments.
        context: the context with the parent span.
        begun_at: when the item began.
        ready_at: for each step, when the last of the values that it reads was ready.
    """

    __slots__ = ("begun_at", "body", "context", "parent", "ready_at")

    def __init__(self, parent: Span, body: str | None = None) -> None:
        self.parent = parent
        self.body = body
        self.context = trace.set_span_in_context(parent)
        self.begun_at = perf_counter()
        self.ready_at: dict[int, float] = {}

    def completed(self, consumers: Iterable[int]) -> None:
        """Note that a value of these steps is ready; the last value that a step reads makes its inputs complete."""
        now = perf_counter()
        for consumer in consumers:
            self.ready_at[consumer] = now


def start_run(
    graph: str,
    context: contextvars.Context,
    *,
    is_wanted: bool = True,
    headers: Mapping[str, str] | None = None,
    item: int | None = None,
    stream: Span | None = None,
    begins_trace: bool = False,
) -> tuple[Span | None, bool]:
    """Start the span of one call: a child of the span in its headers, or of its stream, or of the caller's span.

    Args:
        graph: the name of the graph.
        context: the context of the call, which no other call shares: the span is made current in it.
        is_wanted: whether to start a span; if not, logs of the call still get the ids in its headers.
        headers: the headers of the trace that the call continues; None if it continues no trace.
        item: the index of the call in a stream.
        stream: the span of that stream.
        begins_trace: whether the item begins a trace of its own, linked to the stream, instead of a child span.

    Returns:
        The span, and whether it is recorded. The span is None if it is not wanted, or if the application has set up no
        tracing.
    """
    is_wanted = is_wanted and tracer_provider() is not None
    if not is_wanted and headers is None:
        return None, False
    outer, links = None, list[Link]()
    if begins_trace:
        outer = trace.set_span_in_context(INVALID_SPAN)
        if stream is not None:
            links.append(Link(id_of(stream)))
    elif stream is not None:
        outer = trace.set_span_in_context(stream)
    if headers is not None:
        outer = _extracted(headers, otel_context.get_current() if outer is None else outer)
        if not is_wanted:
            context.run(otel_context.attach, outer)
            return None, False
    attributes: dict[str, AttributeValue] = {names.GRAPH: graph}
    if item is not None:
        attributes[names.ITEM] = item
    kind = SpanKind.INTERNAL
    if isinstance(headers, MessageTrace):
        attributes |= headers.attributes
        kind = SpanKind.CONSUMER if names.MESSAGING_SYSTEM in attributes else kind
    span = _started(f"{names.RUN} {graph}", outer, attributes, links, kind)
    if isinstance(headers, MessageTrace):
        headers._run = span
    context.run(otel_context.attach, trace.set_span_in_context(span, outer))
    return span, is_recorded(span)


def waited(span: Span | None, attribute: str, since: float) -> None:
    """Add to the span of a call how long the call has waited: for its place, its key, or what it needs to be opened.

    Args:
        span: the span; None if the call has no span.
        attribute: the name of the wait.
        since: when the wait began, in seconds of `perf_counter`.
    """
    if span is not None:
        told(span.set_attribute, attribute, perf_counter() - since)


def end_run(
    span: Span | None, outcome: str, error: BaseException | None = None, counts: Mapping[str, int] | None = None
) -> None:
    """End the span of a call, a stream or a job of a device, if there is one.

    Args:
        span: the span.
        outcome: done, failed, cancelled, expired, interrupted or refused.
        error: the error of the call; None if there was none.
        counts: further attributes, such as how many items a stream had.
    """
    if span is not None and not isinstance(span, NonRecordingSpan):
        told(_end_run, span, outcome, error, counts or {})


def _end_run(span: Span, outcome: str, error: BaseException | None, counts: Mapping[str, int]) -> None:
    try:
        if span.is_recording():
            span.set_attributes({names.OUTCOME: outcome, **counts})
            if error is not None and outcome not in ("cancelled", "interrupted"):
                record_error(span, error)
    finally:
        span.end()


def start_stream(context: contextvars.Context | None) -> Span | None:
    """Start the span of a stream; if a context is given, make the span current in it."""
    if tracer_provider() is None:
        return None
    span = _started(names.STREAM)
    if context is not None:
        context.run(otel_context.attach, trace.set_span_in_context(span))
    return span


def name_stream(span: Span | None, graph: str) -> None:
    """Name the span of a stream after the graph of its first call."""
    if span is not None:
        told(span.update_name, f"{names.STREAM} {graph}")
        told(span.set_attribute, names.GRAPH, graph)


def current_for_logs(span: Span | None) -> AbstractContextManager[object]:
    """Return a context manager that makes the span of an item current, so that a log record has its ids."""
    if span is None:
        return nullcontext()
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def item_skipped(span: Span | None, graph: str, item: int, error: BaseException | None) -> None:
    """Add an event to the span of a stream: an item was skipped."""
    if span is not None and is_recorded(span):
        told(span.add_event, names.ITEM_SKIPPED, {names.GRAPH: graph, names.ITEM: item, **about_error(error)})


# OpenAI's responses and Anthropic's messages have the first name, OpenAI's chat completions and embeddings the second.
_INPUT = ("input_tokens", "prompt_tokens")
_OUTPUT = ("output_tokens", "completion_tokens")
# Anthropic counts these tokens in addition to `input_tokens`, OpenAI as a part of it; the conventions count all input
# tokens.
_BESIDE_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")


def usage_of(result: Any) -> dict[str, str | int]:
    """Return span attributes for a model's result: its tokens, and the model that answered; empty if it has neither.

    Args:
        result: the result of the node: an object with attributes, or a mapping.
    """
    found: dict[str, str | int] = {}
    usage = _read(result, "usage")
    tokens = _first_count(usage, _INPUT)
    if tokens is not None:
        found[names.INPUT_TOKENS] = tokens + sum(_first_count(usage, (name,)) or 0 for name in _BESIDE_INPUT)
    tokens = _first_count(usage, _OUTPUT)
    if tokens is not None:
        found[names.OUTPUT_TOKENS] = tokens
    model = _read(result, "model")
    if isinstance(model, str):
        found[names.RESPONSE_MODEL] = model
    return found


def _first_count(usage: Any, fields: tuple[str, ...]) -> int | None:
    for field in fields:
        count = _read(usage, field)
        if isinstance(count, int) and not isinstance(count, bool):
            return count
    return None


def _read(value: Any, field: str) -> Any:
    with suppress(Exception):  # user code, such as a property; tracing must not fail the node
        if isinstance(value, Mapping):
            return value.get(field)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return getattr(value, field, None)
    return None


def of_every_execution(name: str, function: Callable[..., object], model: str | None) -> dict[str, AttributeValue]:
    """Return the span attributes that all executions of a node share; to make them at each execution takes too long.

    Args:
        name: the name of the node.
        function: the function that the node runs.
        model: the model that the node calls; None if it calls no model.
    """
    attributes: dict[str, AttributeValue] = {names.NODE: name}
    qualname = getattr(function, "__qualname__", None)
    if qualname is not None:  # an instance with `__call__` has no qualified name
        attributes[names.FUNCTION] = f"{function.__module__}.{qualname}"
    if model is not None:
        attributes[names.OPERATION] = names.CHAT
        attributes[names.REQUEST_MODEL] = model
    return attributes


class NodeSpan:
    """The span of one node execution. It is current from its start to its end, which must be in the same task.

    Args:
        parent: the `FrameSpan` of the item.
        name: the name of the node.
        alike: the attributes that `of_every_execution` returned for the node.
        item: the index of the item.
        step: the index of the step in the graph, to find how long the item has waited since its inputs were complete;
            None for a step that never waits.

    Attributes:
        calls_model: whether the caller has to pass the model's result to `returned`.
    """

    __slots__ = ("_span", "_token", "calls_model")

    def __init__(
        self,
        parent: FrameSpan,
        name: str,
        alike: Mapping[str, AttributeValue],
        item: int,
        step: int | None = None,
    ) -> None:
        # Set the outcome at the start, as adding an attribute later takes longer (1.2 us); it is "done" as a rule.
        attributes = {**alike, names.ITEM: item, names.OUTCOME: "done"}
        if parent.body is not None:
            attributes[names.GRAPH] = parent.body
        if step is not None:
            attributes[names.QUEUE_WAIT] = perf_counter() - parent.ready_at.get(step, parent.begun_at)
        self.calls_model = names.REQUEST_MODEL in alike
        kind = SpanKind.CLIENT if self.calls_model else SpanKind.INTERNAL
        self._span = _started(name, parent.context, attributes, kind=kind)
        self._token: Token[Context] = otel_context.attach(trace.set_span_in_context(self._span))

    def returned(self, value: Any) -> None:
        """Add the attributes of a model's result, if the node calls a model."""
        if self.calls_model:
            told(self._span.set_attributes, told(usage_of, value) or {})

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        """End the span.

        Args:
            outcome: done, failed, cancelled or expired.
            error: the error to record; None if there is none.
        """
        otel_context.detach(self._token)
        if outcome != "done":
            told(self._span.set_attribute, names.OUTCOME, outcome)
        if error is not None:
            record_error(self._span, error)
        told(self._span.end)


def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function of a sampled execution in a thread, and name the thread in the span of the execution."""
    note_on_span({names.THREAD_NAME: current_thread().name})
    return function(*args, **kwargs)


present = trace.get_current_span  # inside of a node execution, the span of the node


def happened(event: str, node: str, error: BaseException | None = None, **more: AttributeValue) -> None:
    """Add an event to the span of the current node execution.

    Args:
        event: the name of the event, such as `names.RETRY`.
        node: the name of the node.
        error: the error that led to the event; None if there is none.
        more: further attributes.
    """
    told(present().add_event, event, {names.NODE: node, **more, **about_error(error)})


def attempt_failed(node: str, attempt: int, began: float, error: BaseException, pause_seconds: float) -> None:
    """Say in the span of the current node execution that an attempt has failed and another one follows.

    An event says it, and a span from the begin of the attempt to its end, so that a failed attempt is red on a page.

    Args:
        node: the name of the node.
        attempt: the number of the attempt, counted from 1.
        began: when the attempt began, in seconds of `perf_counter`.
        error: the error of the attempt.
        pause_seconds: how long the pause before the next attempt is.
    """
    about: dict[str, AttributeValue] = {names.ATTEMPT: attempt, names.PAUSE: pause_seconds}
    since = time_ns() - round((perf_counter() - began) * 1e9)
    span = _started(f"{names.ATTEMPT} {node}", attributes={names.NODE: node, **about}, since=since)
    record_error(span, error)
    told(span.end)
    happened(names.RETRY, node, error, **about)


# Spans of work on a device: batches and single calls, and the compilations and transfers that they wait for.
#
# A device works for many calls at a time, so the span of a batch and the spans of its items are linked to each other.
# The span of the batch is a child of its first sampled item: so any sampler samples the span as well, and it is found
# in the trace of that item.

# The default limit of links in the SDK, which drops further links silently.
MAX_LINKS = 128


class DeviceWait:
    """A sampled execution that waits for a device, for its batch, or for a step of its actor.

    Args:
        span: the span of the execution.

    Attributes:
        span: the argument.
        context: the context with the span, for the spans of the work that is done for the execution.
        since: when the execution began to wait.
        steps: in how many steps of an actor it was.
        last_step: the span of the last of these steps; None if steps have no spans.
    """

    __slots__ = ("context", "last_step", "since", "span", "steps")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context = trace.set_span_in_context(span)
        self.since = perf_counter()
        self.steps = 0
        self.last_step: Span | None = None

    def in_step(self, step: Span) -> None:
        """Note that the execution is in a step that has a span; link the execution to the first of these spans."""
        if self.last_step is None and is_recorded(self.span):
            told(self.span.add_link, id_of(step))
        self.last_step = step

    def leave_steps(self) -> None:
        """Say in how many steps the execution was, and link it to the span of the last one."""
        if self.steps and is_recorded(self.span):
            told(self.span.set_attribute, names.STEPS, self.steps)
            if self.last_step is not None and self.steps > 1:
                told(self.span.add_link, id_of(self.last_step))


def waiting() -> DeviceWait | None:
    """Return the wait of the execution whose span is current; None if that span is not sampled."""
    if tracer_provider() is None:
        return None
    span = trace.get_current_span()
    return DeviceWait(span) if is_recorded(span) else None


def of_step(actor: str, waits: Sequence[DeviceWait], items: int, *, own_span: bool) -> AbstractContextManager[None]:
    """Count a step of an actor that owns its loop, in the spans of its items.

    Args:
        actor: the name of the actor.
        waits: the sampled items in the step, at least one.
        items: how many items are in the step, sampled or not.
        own_span: whether the context manager also opens a span. A stream may take part in thousands of steps, so there
            is none by default.
    """
    now = perf_counter()
    for wait in waits:
        wait.steps += 1
        if wait.steps == 1 and is_recorded(wait.span):  # the span of an item whose caller has left has ended
            told(wait.span.set_attribute, names.STEP_WAIT, now - wait.since)
    if not own_span:
        return nullcontext()
    attributes: dict[str, AttributeValue] = {names.NODE: actor, names.BATCH_ITEMS: items}

    def begun(step: Span) -> None:
        for wait in waits:
            wait.in_step(step)

    return _around(names.STEP, actor, attributes, waits[0].context, _links_to(waits), begun)


def of_batch(node: str, waits: Sequence[DeviceWait | None], thread: str | None = None) -> AbstractContextManager[None]:
    """Return a context manager that puts a span around a batch on the host.

    Args:
        node: the name of the node.
        waits: the items of the batch; None for an item that is not sampled.
        thread: the name of the thread in which the batch runs; None on the event loop.
    """
    sampled = [wait for wait in waits if wait is not None]
    if not sampled:
        return nullcontext()
    attributes: dict[str, AttributeValue] = {names.NODE: node, names.BATCH_ITEMS: len(waits)}
    if thread is not None:
        attributes[names.THREAD_NAME] = thread
    begun = partial(_end_of_wait, sampled, names.BATCH_WAIT)
    return _around(names.BATCH, node, attributes, sampled[0].context, _links_to(sampled), begun)


def _links_to(waits: Sequence[DeviceWait]) -> list[Link]:
    return [Link(id_of(wait.span)) for wait in waits[:MAX_LINKS]]


def _end_of_wait(waits: Sequence[DeviceWait], attribute: str, batch: Span | None) -> None:
    """Say on the spans of items how long they have waited until now; link them to the span of their batch."""
    now = perf_counter()
    for wait in waits:
        if is_recorded(wait.span):  # the span of an item that was cancelled meanwhile has ended
            told(wait.span.set_attribute, attribute, now - wait.since)
            if batch is not None:
                told(wait.span.add_link, id_of(batch))


class JobSpan:
    """The span of one job of a device, from the moment at which the thread of the device takes it until it is ready.

    Args:
        node: the name of the node.
        device: the name of the device.
        waits: the sampled executions that the job is for, at least one.
        items: how many calls run together, sampled or not; None for a call that runs alone.
    """

    __slots__ = ("_device", "_dispatched_at", "_dispatching_since", "_node", "_span", "context")

    def __init__(self, node: str, device: str, waits: Sequence[DeviceWait], items: int | None) -> None:
        self._node = node
        self._device = device
        attributes: dict[str, AttributeValue] = {names.NODE: node, names.DEVICE: device}
        name, links = names.DEVICE_CALL, list[Link]()
        if items is not None:
            name = names.BATCH
            attributes[names.BATCH_ITEMS] = items
            links = _links_to(waits)
        self._span = _started(f"{name} {node}", waits[0].context, attributes, links)
        self.context = trace.set_span_in_context(self._span, waits[0].context)
        self._dispatching_since = self._dispatched_at = perf_counter()
        _end_of_wait(waits, names.DEVICE_WAIT, None if items is None else self._span)

    def dispatching(self) -> None:
        """Note that the thread of the device takes the job again, after its program was compiled."""
        self._dispatching_since = perf_counter()

    def dispatched(self, rows: int | None, tokens: tuple[int, int] | None) -> None:
        """Note that the job is enqueued on the device.

        Args:
            rows: how many rows the batch has, including padding; None for a call that runs alone.
            tokens: for packed rows, how many tokens of items they have, and how many with padding; None for other jobs.
        """
        self._dispatched_at = perf_counter()
        told(self._span.set_attribute, names.DISPATCH_SECONDS, self._dispatched_at - self._dispatching_since)
        if rows is not None:
            told(self._span.set_attribute, names.BATCH_ROWS, rows)
        if tokens is not None:
            counts = {names.BATCH_ITEM_TOKENS: tokens[0], names.BATCH_TOKENS: tokens[1]}
            told(self._span.set_attributes, counts)

    def end(self, error: BaseException | None, *, has_run: bool) -> None:
        """End the span: the result of the job is ready, or the job has failed.

        Args:
            error: the error of the job; None if there was none.
            has_run: whether the job was given to the device; False if all of its callers had left.
        """
        if has_run:
            told(self._span.set_attribute, names.DEVICE_SECONDS, perf_counter() - self._dispatched_at)
        end_run(self._span, "failed" if error is not None else "done" if has_run else "cancelled", error)

    def transfer(self, size_bytes: int) -> AbstractContextManager[None]:
        """Return a context manager that puts a span around the start of a transfer to the device."""
        attributes: dict[str, AttributeValue] = {
            names.NODE: self._node, names.DEVICE: self._device, names.TRANSFER_BYTES: size_bytes
        }  # fmt: skip
        return _around(names.TRANSFER, self._node, attributes, self.context, ())


def compiling(
    node: str, device: str, describe: Callable[[], str], waiting: Sequence[Context]
) -> AbstractContextManager[None]:
    """Return a context manager that opens the span of a compilation and makes it current.

    Args:
        node: the name of the node.
        device: the name of the device.
        describe: returns a text that describes the arguments of the program.
        waiting: the contexts of the sampled spans that wait for the compilation. The compilation's span is a child of
            the first of them, and linked to the others. If there are none, no span is opened.
    """
    if not waiting:
        return nullcontext()
    attributes: dict[str, AttributeValue] = {names.NODE: node, names.DEVICE: device, names.ARGUMENTS: describe()}
    first, *others = waiting
    links = [Link(id_of(trace.get_current_span(other))) for other in others[:MAX_LINKS]]
    return _around(names.COMPILE, node, attributes, first, links)


@contextmanager
def _around(
    name: str, about: str, attributes: dict[str, AttributeValue], parent: Context, links: Sequence[Link],
    begun: Callable[[Span], None] | None = None, kind: SpanKind = SpanKind.INTERNAL,
) -> Generator[None, None, None]:  # fmt: skip
    span = _started(f"{name} {about}", parent, attributes, links, kind)
    if begun is not None:
        begun(span)
    token = otel_context.attach(trace.set_span_in_context(span, parent))
    try:
        yield
    except BaseException as error:
        record_error(span, error)
        raise
    finally:
        otel_context.detach(token)
        told(span.end)
