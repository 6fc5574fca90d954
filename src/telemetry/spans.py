"""Spans: what opens and ends them. Nothing is opened for what is not sampled."""

import contextvars
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Token
from functools import cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode

from . import names

if TYPE_CHECKING:
    from opentelemetry.propagators.composite import CompositePropagator


# The tracer of Penstock, and what all of its spans have in common.
#
# Spans are held explicitly and passed as `context=`. A context is attached only around one call of user code, never
# across a `yield`: a stream that is left early could not detach it.

_tracer = trace.get_tracer(names.INSTRUMENTATION, schema_url=names.SCHEMA_URL)

Value = str | int | float | Sequence[str]


# Returns the tracer provider of the application; None if it has set up no tracing. Each call asks this, so it is plain
# C: `get_tracer_provider()` reads the environment as long as there is no provider, which costs as much as running ten
# nodes. Should the attribute go away, spans are merely started in vain.
tracer_provider: Callable[[], object] = partial(getattr, trace, "_TRACER_PROVIDER", trace)


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
    """Return what a new worker process has to call; None if the application exports no traces."""
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


class FrameSpan:
    """The span that the node executions of one item are children of, and since when their inputs are complete.

    Only items of sampled calls have one.

    Args:
        parent: the span.
        body: name of the body of control flow that the item is in; None if it is in none.

    Attributes:
        parent, body: the same.
        context: what their spans get as their parent.
        begun_at: when the item has begun.
        ready_at: for each step, when the newest of the values that it reads was there.
    """

    __slots__ = ("begun_at", "body", "context", "parent", "ready_at")

    def __init__(self, parent: Span, body: str | None = None) -> None:
        self.parent = parent
        self.body = body
        self.context = trace.set_span_in_context(parent)
        self.begun_at = perf_counter()
        self.ready_at: dict[int, float] = {}

    def completed(self, consumers: Iterable[int]) -> None:
        """A value is there that these steps read; the last one that a step waits for makes its inputs complete."""
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
    is_wanted = is_wanted and tracer_provider() is not None
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


def start_stream(context: contextvars.Context | None) -> Span | None:
    """Start the span of a stream, and make it current in `context`, if there is one."""
    if tracer_provider() is None:
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


# In the words of OpenAI's responses and Anthropic's messages, then of OpenAI's chat completions and embeddings.
_INPUT = ("input_tokens", "prompt_tokens")
_OUTPUT = ("output_tokens", "completion_tokens")
# Anthropic counts these beside `input_tokens`, OpenAI as a part of it; the conventions count all of them.
_BESIDE_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")


def usage_of(result: Any) -> dict[str, str | int]:
    """Return the attributes of a result: tokens and the model that answered; none for one that says nothing.

    Args:
        result: what the node returned: an object with attributes, or a mapping.
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
    try:
        if isinstance(value, Mapping):
            return value.get(field)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return getattr(value, field, None)
    except Exception:  # noqa: BLE001 - code of the user's result, which must not fail the node for its trace
        return None


def of_every_execution(name: str, function: Callable[..., object], model: str | None) -> dict[str, Value]:
    """Return what the spans of all executions of a node say alike, which takes too long to be put together each time.

    Args:
        name: of the node.
        function: what it runs.
        model: the model that it calls, if that is what it does.
    """
    attributes: dict[str, Value] = {names.NODE: name}
    qualname = getattr(function, "__qualname__", None)
    if qualname is not None:  # an instance has none
        attributes[names.FUNCTION] = f"{function.__module__}.{qualname}"
    if model is not None:
        attributes[names.OPERATION] = names.CHAT
        attributes[names.REQUEST_MODEL] = model
    return attributes


class NodeSpan:
    """The span of one node execution, current from its start to its end, which have to be in one task.

    Args:
        parent: of the item.
        name: of the node.
        alike: what `of_every_execution` returned for the node.
        item: the index of the item.
        step: its index in the graph, for how long the item has waited since its inputs are complete; None for what
            never waits.

    Attributes:
        calls_model: whether it has to hear what the model has returned.
    """

    __slots__ = ("_span", "_token", "calls_model")

    def __init__(
        self,
        parent: FrameSpan,
        name: str,
        alike: Mapping[str, Value],
        item: int,
        step: int | None = None,
    ) -> None:
        attributes = {**alike, names.ITEM: item}
        if parent.body is not None:
            attributes[names.GRAPH] = parent.body
        if step is not None:
            attributes[names.QUEUE_WAIT] = perf_counter() - parent.ready_at.get(step, parent.begun_at)
        self.calls_model = names.REQUEST_MODEL in alike
        kind = SpanKind.CLIENT if self.calls_model else SpanKind.INTERNAL
        self._span = _tracer.start_span(name, parent.context, kind, attributes)
        self._token: Token[Context] = otel_context.attach(trace.set_span_in_context(self._span))

    def returned(self, value: Any) -> None:
        """Read what a model says about its call."""
        if self.calls_model:
            self._span.set_attributes(usage_of(value))

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        """End it.

        Args:
            outcome: done, failed, cancelled or expired.
            error: what the execution ended with, if that is to be shown.
        """
        otel_context.detach(self._token)
        self._span.set_attribute(names.OUTCOME, outcome)
        if error is not None:
            record_error(self._span, error)
        self._span.end()


def present() -> Span:
    """Return the span that is current here: for the engine, inside of a node execution, that of the node."""
    return trace.get_current_span()


def retried(node: str, error: BaseException, attempt: int) -> None:
    """Note on the span of the present node execution that it failed, and that another attempt follows."""
    present().add_event(names.RETRY, {names.ATTEMPT: attempt, **_failed(node, error)})


def fell_back(node: str, error: BaseException) -> None:
    """Note on the span of the present node execution that it failed, and that its fallback follows."""
    present().add_event(names.FALLBACK, _failed(node, error))


def consists_of(nodes: tuple[str, ...]) -> None:
    """Note on the span of the present node execution that it does what these nodes do."""
    present().set_attribute(names.NODES, nodes)


def _failed(node: str, error: BaseException) -> Mapping[str, str]:
    return {names.NODE: node, names.ERROR_TYPE: type(error).__qualname__, names.ERROR_MESSAGE: message_of(error)}


# Spans of what runs on a device: batches and single calls, and the compilations and transfers that they wait for.
#
# A device works for many calls at a time, so the span of a batch is linked to those of its items, and they to it. It is
# a child of the first one that is sampled: so it is sampled as well, whatever the sampler, and is found in that trace.

# The SDK keeps so many unless told otherwise, and drops the rest without a word.
MAX_LINKS = 128


class DeviceWait:
    """A sampled execution that waits for a device.

    Args:
        span: its span.

    Attributes:
        span: the same.
        context: what is done for it gets this as its parent.
        since: when it began to wait.
    """

    __slots__ = ("context", "since", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context = trace.set_span_in_context(span)
        self.since = perf_counter()


def waiting() -> DeviceWait | None:
    """Return the execution whose span is current here, as one that waits for a device; None if it is not sampled."""
    if tracer_provider() is None:
        return None
    span = trace.get_current_span()
    return DeviceWait(span) if span.is_recording() else None


class JobSpan:
    """The span of one job of a device, from the moment at which the thread of the device takes it until it is ready.

    Args:
        node: name of the node.
        device: name of the device.
        waits: the sampled executions that it is for, at least one.
        items: how many calls run together, sampled or not; None for one that runs alone.
    """

    __slots__ = ("_device", "_dispatched_at", "_dispatching_since", "_node", "_span", "context")

    def __init__(self, node: str, device: str, waits: Sequence[DeviceWait], items: int | None) -> None:
        self._node = node
        self._device = device
        attributes: dict[str, Value] = {names.NODE: node, names.DEVICE: device}
        name, links = names.DEVICE_CALL, list[Link]()
        if items is not None:
            name = names.BATCH
            attributes[names.BATCH_ITEMS] = items
            links = [Link(wait.span.get_span_context()) for wait in waits[:MAX_LINKS]]
        self._span = start(f"{name} {node}", waits[0].context, attributes, links=links)
        self.context = trace.set_span_in_context(self._span, waits[0].context)
        self._dispatching_since = self._dispatched_at = perf_counter()
        for wait in waits:
            if wait.span.is_recording():  # else its item has been cancelled meanwhile
                wait.span.set_attribute(names.DEVICE_WAIT, self._dispatching_since - wait.since)
                if items is not None:
                    wait.span.add_link(self._span.get_span_context())

    def dispatching(self) -> None:
        """The thread of the device takes it again, now that its program is compiled."""
        self._dispatching_since = perf_counter()

    def dispatched(self, rows: int | None) -> None:
        """It is enqueued, and the device does the rest.

        Args:
            rows: of the batch, padding included.
        """
        self._dispatched_at = perf_counter()
        self._span.set_attribute(names.DISPATCH_SECONDS, self._dispatched_at - self._dispatching_since)
        if rows is not None:
            self._span.set_attribute(names.BATCH_ROWS, rows)

    def end(self, error: BaseException | None, *, has_run: bool) -> None:
        """It is ready, or has failed.

        Args:
            error: why it failed.
            has_run: whether the device has seen it; if not, all who waited for it had left.
        """
        if has_run:
            self._span.set_attribute(names.DEVICE_SECONDS, perf_counter() - self._dispatched_at)
        outcome = "done" if has_run else "cancelled"
        if error is not None:
            outcome = "failed"
            record_error(self._span, error)
        self._span.set_attribute(names.OUTCOME, outcome)
        self._span.end()

    def transfer(self, size_bytes: int) -> AbstractContextManager[None]:
        """Open the span of a transfer to the device around what starts it."""
        attributes: dict[str, Value] = {
            names.NODE: self._node, names.DEVICE: self._device, names.TRANSFER_BYTES: size_bytes
        }  # fmt: skip
        return _around(names.TRANSFER, self._node, attributes, self.context, ())


def compiling(
    node: str, device: str, describe: Callable[[], str], waiting: Sequence[Context]
) -> AbstractContextManager[None]:
    """Open the span of a compilation around it, and make it current there.

    Args:
        node: name of the node.
        device: name of the device.
        describe: tells for which arguments it is compiled.
        waiting: the contexts of the sampled spans that wait for it; it is a child of the first, and linked to the rest.
            Without any there is no span.
    """
    if not waiting:
        return nullcontext()
    attributes: dict[str, Value] = {names.NODE: node, names.DEVICE: device, names.ARGUMENTS: describe()}
    first, *others = waiting
    links = [Link(trace.get_current_span(other).get_span_context()) for other in others[:MAX_LINKS]]
    return _around(names.COMPILE, node, attributes, first, links)


@contextmanager
def _around(
    kind: str, node: str, attributes: dict[str, Value], parent: Context, links: Sequence[Link]
) -> Generator[None, None, None]:
    span = start(f"{kind} {node}", parent, attributes, links=links)
    token = otel_context.attach(trace.set_span_in_context(span, parent))
    try:
        yield
    except BaseException as error:
        record_error(span, error)
        raise
    finally:
        otel_context.detach(token)
        span.end()
