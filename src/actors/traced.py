"""The span of one node execution, around its handler: opened from what its frame and its actor know."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .._errors import DeadlineExceeded, Overloaded
from ..telemetry.spans import FrameSpan, NodeSpan

if TYPE_CHECKING:
    from .frame import Frame
    from .node_actor import NodeActor

Outcome = Literal["done", "failed", "cancelled", "expired", "refused"]
"""How a call, a stream or a node execution has ended, as its span says it."""


def outcome_of(state: str, error: BaseException | None) -> Outcome:
    """Return the outcome of a call whose frame is in this state, or that ended with this error before it had one."""
    if isinstance(error, DeadlineExceeded):
        return "expired"
    if isinstance(error, Overloaded):
        return "refused"
    if state == "done" and error is None:
        return "done"
    return "cancelled" if state == "cancelled" or isinstance(error, asyncio.CancelledError) else "failed"


class TracedExecution:
    """Opens the span of a node execution of a sampled frame, makes it current, and ends it with its outcome.

    Args:
        parent: what the span is a child of.
        frame: the frame.
        actor: the actor.

    Attributes:
        was_cancelled: whether its end is not one of its own, although it raised nothing.
    """

    __slots__ = ("_actor", "_frame", "_parent", "_span", "was_cancelled")

    def __init__(self, parent: FrameSpan, frame: "Frame", actor: "NodeActor") -> None:
        self._parent = parent
        self._frame = frame
        self._actor = actor
        self.was_cancelled = False

    def __enter__(self) -> "TracedExecution":
        parent, frame, actor = self._parent, self._frame, self._actor
        function: Callable[..., object] | None = actor.links[0].fn if actor.links else actor.fn
        self._span = NodeSpan(
            parent, actor.name, function, item=frame.item, model=actor.policy.model,
            waited_seconds=parent.waited_seconds(actor.index),
        )  # fmt: skip
        return self

    def returned(self, value: Any) -> Any:
        """Return the result of the execution, once the span has what it says."""
        self._span.returned(value)
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        frame = self._frame
        if isinstance(error, Exception):
            self._span.end("failed", error)
        elif error is None and not self.was_cancelled:
            tell_consumers(self._parent, self._actor)
            self._span.end("done")
        elif frame.expired:
            self._span.end("expired", DeadlineExceeded("its call did not finish in time"))
        elif error is None or isinstance(error, asyncio.CancelledError):
            self._span.end("cancelled")
        else:  # KeyboardInterrupt and the like
            self._span.end("failed", error)


def tell_consumers(parent: FrameSpan, actor: "NodeActor") -> None:
    """Note that the steps that read a value have it, and may have all of their inputs."""
    parent.completed([consumer.index for consumer in actor.consumers])
