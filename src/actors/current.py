"""`penstock.current()`: what a handler may know about the item it works on."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .actor import Actor
    from .frame import Frame


class Cancellable(Protocol):
    """Whoever can tell whether an item is still wanted."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more."""
        ...


@dataclass(frozen=True)
class FrameInfo:
    """Where a handler is: graph, node, item and attempt.

    Attributes:
        graph: name of the graph.
        node: name of the node, as drawn.
        item: index of the item in its stream, deployment or `map_each`, from 0.
        attempt: number of the attempt, from 1.
    """

    graph: str
    node: str
    item: int
    attempt: int
    _deadline: float | None = field(repr=False)
    _clock: Callable[[], float] = field(repr=False)
    _work: Cancellable = field(repr=False)

    def remaining_seconds(self) -> float | None:
        """Return the seconds left until the call's deadline or the node's timeout, never below 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def check_cancelled(self) -> None:
        """Stop here if nobody waits for this item any more; for long loops in threads, which nobody can interrupt.

        Raises:
            asyncio.CancelledError: the item was cancelled or its deadline has passed.
        """
        if self._work.cancelled:
            raise asyncio.CancelledError(f"item {self.item} of graph {self.graph!r} is not wanted any more")


class Position:
    """Where a worker is: the frame and the actor whose handler it runs.

    It is an object of its own because contexts refer to it: through the worker they would refer to themselves, and
    every call would leave a cycle for the garbage collector.

    Attributes:
        frame: the frame whose handler runs now; None between two.
        actor: the last actor.
        attempt: number of the attempt, from 1.
        attempt_deadline: when it times out, in the loop's time.
    """

    __slots__ = ("actor", "attempt", "attempt_deadline", "frame")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.actor: Actor | None = None
        self.attempt = 1
        self.attempt_deadline: float | None = None

    def frame_info(self) -> FrameInfo:
        """Return the present position."""
        frame, actor = self.frame, self.actor
        if frame is None or actor is None:
            return OUTSIDE
        deadline = frame.deadline
        if self.attempt_deadline is not None:
            deadline = self.attempt_deadline if deadline is None else min(deadline, self.attempt_deadline)
        return FrameInfo(actor.graph, actor.label(), frame.item, self.attempt, deadline, frame.crew.loop.time, frame)


@dataclass(frozen=True)
class Snapshot:
    """A position that no longer moves: handlers in threads keep theirs when the worker goes on."""

    info: FrameInfo

    def frame_info(self) -> FrameInfo:
        """Return the position at which the snapshot was taken."""
        return self.info


source: ContextVar[Position | Snapshot | None] = ContextVar("penstock_current", default=None)


class _Nobody:
    cancelled = False


# A node that is called directly is just its function, and has to work without an engine, in a unit test for instance.
OUTSIDE = FrameInfo("", "", 0, 1, None, float, _Nobody())


def current() -> FrameInfo:
    """Return what is known about the item that the calling handler works on; works on the loop and in threads.

    Called directly, without an engine, a node has empty names, item 0, attempt 1 and no deadline.
    """
    found = source.get()
    return OUTSIDE if found is None else found.frame_info()
