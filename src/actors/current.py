"""`penstock.current()`: what a handler may know about the item it works on."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol


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


class Source(Protocol):
    """Whoever can say where its handler is now: the worker on the loop, or a snapshot of it in a thread."""

    def frame_info(self) -> FrameInfo:
        """Return the present position."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """A position that no longer moves: handlers in threads and processes keep theirs when the worker goes on."""

    info: FrameInfo

    def frame_info(self) -> FrameInfo:
        """Return the position at which the snapshot was taken."""
        return self.info


source: ContextVar[Source | None] = ContextVar("penstock_current", default=None)


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
