"""Spans of node executions, and what the result of a model call says about it."""

from collections.abc import Callable, Mapping
from contextvars import Token
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from .. import names
from .runs import FrameSpan
from .tracer import Value, message_of, record_error, start

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


class NodeSpan:
    """The span of one node execution, current from its start to its end, which have to be in one task.

    Args:
        parent: of the item.
        name: of the node.
        function: what it runs; None for what is no function of the user.
        item: the index of the item.
        model: the model that it calls, if that is what it does.
        waited_seconds: how long the item has waited since its inputs are complete; None for what never waits.
    """

    __slots__ = ("_calls_model", "_span", "_token")

    def __init__(
        self,
        parent: FrameSpan,
        name: str,
        function: Callable[..., object] | None,
        *,
        item: int,
        model: str | None = None,
        waited_seconds: float | None = None,
    ) -> None:
        attributes: dict[str, Value] = {names.NODE: name, names.ITEM: item}
        if parent.body is not None:
            attributes[names.GRAPH] = parent.body
        qualname = getattr(function, "__qualname__", None)
        if qualname is not None:  # an instance has none
            attributes[names.FUNCTION] = f"{function.__module__}.{qualname}"
        if waited_seconds is not None:
            attributes[names.QUEUE_WAIT] = waited_seconds
        kind = SpanKind.INTERNAL
        if model is not None:
            kind = SpanKind.CLIENT
            attributes[names.OPERATION] = names.CHAT
            attributes[names.REQUEST_MODEL] = model
        self._calls_model = model is not None
        self._span = start(name, parent.context, attributes, kind=kind)
        self._token: Token[Context] = otel_context.attach(trace.set_span_in_context(self._span))

    def returned(self, value: Any) -> None:
        """Read what a model says about its call."""
        if self._calls_model:
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
