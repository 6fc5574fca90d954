"""Spans of node executions."""

from collections.abc import Callable, Mapping
from contextvars import Token
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from .. import names
from .model_calls import usage_of
from .runs import FrameSpan
from .tracer import Value, message_of, record_error, start


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
