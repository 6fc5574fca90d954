"""Spans and metrics of answers, under OpenTelemetry's names for generative AI; with content only on request."""

import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from time import perf_counter
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.trace import SpanKind

from ..telemetry import names
from ..telemetry.logs import guarded, record_error
from .answers import Answer, as_json
from .protocol import APIError
from .reading import chunk_of

# The boundaries of histograms that the semantic conventions recommend, in seconds.
_DURATIONS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_EACH: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# For each metric: its description, its boundaries, and the attribute of the span with the same number.
_MEASURED: Final[Mapping[str, tuple[str, tuple[float, ...], str | None]]] = {
    "gen_ai.server.request.duration": ("From the request to the end of the answer.", _DURATIONS, None),
    "gen_ai.server.time_to_first_token": ("From the request to the first part.", _FIRST, names.FIRST_CHUNK),
    "gen_ai.server.time_per_output_token": ("The time of each part after the first.", _EACH, names.PART_SECONDS),
}

# The errors of reading a message or a part that does not follow the protocol; an upstream may send such a part.
MALFORMED: Final = (APIError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@cache
def _histograms() -> dict[str, metrics.Histogram]:
    meter = metrics.get_meter(names.INSTRUMENTATION, names.VERSION, schema_url=names.SCHEMA_URL)
    return {
        name: meter.create_histogram(name, "s", said, explicit_bucket_boundaries_advisory=boundaries)
        for name, (said, boundaries, _) in _MEASURED.items()
    }


@contextmanager
def measured(
    answer: Answer, http: Any, messages: list[dict[str, Any]], said: Answer | None, status_of: Callable[[Any], int]
) -> Generator[Answer | None, None, None]:
    """Open a span around an answer, in the trace of the request, and record how long the answer takes.

    Args:
        answer: the answer in the making.
        http: the request; its headers are ignored inside of a span, such as the span of a web framework.
        messages: the messages that are answered.
        said: gathers the parts of the answer, for a span with content; None for a span without content.
        status_of: returns the status of the response to an error.

    Yields:
        `said`; None if the span is not recorded, so that no parts have to be gathered.
    """
    known: dict[str, Any] = {names.OPERATION: answer.OPERATION, names.REQUEST_MODEL: answer.request.model}
    scope = http.scope
    asked = {names.HTTP_METHOD: scope["method"], names.HTTP_ROUTE: scope["path"], names.URL_PATH: scope["path"]}
    parent = otel_context.get_current()
    around = guarded("spans", trace.get_current_span().get_span_context)
    if around is None or not around.is_valid:
        parent = guarded("spans", propagate.extract, http.headers, parent) or parent
    span = guarded("spans", _start, f"{answer.OPERATION} {answer.request.model}", parent, known | asked)
    token = otel_context.attach(parent if span is None else trace.set_span_in_context(span, parent))
    span = span or trace.INVALID_SPAN
    said = said if guarded("spans", span.is_recording) else None
    if said is not None:
        with suppress(*MALFORMED):
            guarded("spans", span.set_attribute, names.INPUT_MESSAGES, _content(messages))
    try:
        yield said
    finally:
        answer.error = answer.error or sys.exception()
        found = _times(answer)
        if answer.error is not None:
            known[names.ERROR_TYPE] = type(answer.error).__qualname__
            if status_of(answer.error) >= _SERVERS_FAULT:
                record_error(span, answer.error)
        guarded("metrics", _record, found, known)
        about = known | {told: found[name] for name, (*_, told) in _MEASURED.items() if told and name in found}
        guarded("spans", span.set_attributes, about | _ended(answer, said, status_of))
        otel_context.detach(token)
        guarded("spans", span.end)


# The conventions for HTTP: a server has not failed if the client has.
_SERVERS_FAULT: Final = 500


def _times(answer: Answer) -> dict[str, float]:
    """Return the times of an answer that ends now, by the names of their metrics."""
    now, (whole, first, each) = perf_counter(), _MEASURED
    found = {whole: now - answer.began_at}
    if answer.first_at is not None:
        found[first] = answer.first_at - answer.began_at
        if answer.parts > 1:
            found[each] = (now - answer.first_at) / (answer.parts - 1)
    return found


def _ended(answer: Answer, said: Answer | None, status_of: Callable[[Any], int]) -> dict[str, Any]:
    """Return attributes of the span of an answer that has ended."""
    usage = answer.usage or {}
    has_left = answer.error is None and not answer.is_complete
    reason = answer.reason if answer.is_complete and answer.error is None else "error"
    found: dict[str, Any] = {
        names.INPUT_TOKENS: usage.get("prompt_tokens"), names.OUTPUT_TOKENS: usage.get("completion_tokens"),
        names.HTTP_STATUS: answer.status or (answer.error and status_of(answer.error)),
        names.OUTCOME: "cancelled" if has_left else None,
        names.FINISH_REASONS: [reason] if answer.reason and not has_left else None,
    }  # fmt: skip
    if said is not None:
        with suppress(*MALFORMED):
            found[names.OUTPUT_MESSAGES] = _content([said.message()], finish_reason=reason)
    return {name: value for name, value in found.items() if value is not None}


class Asked:
    """The span of a request to a server of a model: a child of the span of its node, if that is recorded.

    The span is not made current, since parts of the answer are yielded inside of it.

    Args:
        url: the base URL of the server.
        model: the name of the model.

    Attributes:
        headers: the headers of the request, by which the server continues the trace.
    """

    def __init__(self, url: str, model: str) -> None:
        self.headers: dict[str, str] = {}
        self._span: trace.Span = trace.INVALID_SPAN
        self._says_id, context = False, None
        if guarded("spans", trace.get_current_span().is_recording):
            server = urlsplit(url)
            known = {
                names.OPERATION: names.CHAT, names.REQUEST_MODEL: model, names.SERVER_ADDRESS: server.hostname or url,
                names.SERVER_PORT: server.port or (443 if server.scheme == "https" else 80),
            }  # fmt: skip
            span = guarded("spans", _start, f"{names.CHAT} {model}", otel_context.get_current(), known, SpanKind.CLIENT)
            self._span = span or trace.INVALID_SPAN
            context = None if span is None else trace.set_span_in_context(span)
        guarded("spans", propagate.inject, self.headers, context)

    async def __aenter__(self) -> "Asked":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace_: object) -> None:
        if isinstance(error, Exception):
            record_error(self._span, error)
        guarded("spans", self._span.end)

    def answered(self, status: int) -> None:
        """Note the status of the response."""
        guarded("spans", self._span.set_attribute, names.HTTP_STATUS, status)

    def gave(self, data: bytes, chunk: dict[str, Any] | None) -> None:
        """Note the id, the model and the tokens of an answer, which its first and its last part have."""
        if self._span is trace.INVALID_SPAN or (self._says_id and b'"usage"' not in data):
            return
        with suppress(*MALFORMED):
            part: Any = chunk or chunk_of(data)
            usage: Any = part.get("usage") or {}
            found: dict[str, Any] = {
                names.RESPONSE_ID: part.get("id"), names.RESPONSE_MODEL: part.get("model"),
                names.INPUT_TOKENS: usage.get("prompt_tokens"), names.OUTPUT_TOKENS: usage.get("completion_tokens"),
            }  # fmt: skip
            said = {name: value for name, value in found.items() if isinstance(value, str | int)}
            self._says_id = True
            guarded("spans", self._span.set_attributes, said)


def _start(
    name: str, parent: otel_context.Context, attributes: Mapping[str, Any], kind: SpanKind = SpanKind.SERVER
) -> trace.Span:
    tracer = trace.get_tracer(names.INSTRUMENTATION, names.VERSION, schema_url=names.SCHEMA_URL)
    return tracer.start_span(name, parent, kind, attributes)


def _record(times: Mapping[str, float], known: Mapping[str, Any]) -> None:
    for name, seconds in times.items():
        _histograms()[name].record(seconds, known)


def _content(messages: list[dict[str, Any]], **more: str) -> str:
    """Return messages of a chat in OpenTelemetry's form; as JSON, since attributes of spans have no structure."""
    told = [{"role": one["role"], "parts": [*_parts(one)], **more} for one in messages]
    return as_json(told).decode()


def _parts(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content: str | list[dict[str, Any]] | None = message.get("content")
    if message.get("reasoning"):
        yield {"type": "reasoning", "content": message["reasoning"]}
    if message["role"] == "tool":
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
    elif isinstance(content, str):
        yield {"type": "text", "content": content}
    else:
        for part in content or ():
            text = {"content": part["text"]} if "text" in part else {}  # of an image, only the type
            yield {"type": part["type"], **text}
    for call in message.get("tool_calls") or ():
        function: dict[str, Any] = call.get("function") or {}
        arguments: Any = function.get("arguments")
        with suppress(ValueError, TypeError):
            read = json.loads(arguments)
            json.dumps(read, allow_nan=False)  # raises for NaN, which Python reads but JSON does not have
            arguments = read
        yield {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments}
