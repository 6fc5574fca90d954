"""An inbox by itself, to test a loop without an engine."""

import asyncio
from collections.abc import Iterable
from typing import Any, Generic, Self, TypeVar

from ..actors.own_loops import AnyRequest, Inbox, Mailbox, Request, StreamRequest, StreamWork, Work
from ..actors.stream_buffer import DEFAULT_CAPACITY, Reader

In = TypeVar("In")
Out = TypeVar("Out")
W = TypeVar("W", bound=AnyRequest[Any])


def inbox(values: Iterable[In], /) -> tuple[Inbox[Work[In, Any]], list[asyncio.Future[Any]]]:
    """Make an inbox with work for the loop of an `Actor`. Behind the last it ends: `get` raises `InboxClosed` then.

    Args:
        values: what the actor is called with.

    Returns:
        The inbox, and a future for each value: its result or error. Cancel it, and the work is cancelled.
    """
    requests: list[Request[In, Any]] = [Request(value) for value in values]
    for request in requests:
        request.outcome.add_done_callback(_cancelling(request))
    return _filled(requests), [request.outcome for request in requests]


def stream_inbox(
    values: Iterable[In], /, *, capacity: int = DEFAULT_CAPACITY
) -> "tuple[Inbox[StreamWork[In, Any]], list[StreamReader[Any]]]":
    """Make an inbox with work for the loop of a `StreamActor`. Behind the last it ends, as that of `inbox`.

    Args:
        values: what the actor is called with.
        capacity: parts that each work holds for its reader.

    Returns:
        The inbox, and a reader for each value: an async iterator over its parts. Close it, or drop it, and the work is
        cancelled.
    """
    requests: list[StreamRequest[In, Any]] = [StreamRequest(value, capacity=capacity) for value in values]
    return _filled(requests), [StreamReader(request.buffer.reader()) for request in requests]


class StreamReader(Generic[Out]):
    """Reads the parts that an actor gives for one item, and raises what it fails the item with."""

    __slots__ = ("_reader",)

    def __init__(self, reader: Reader[Out]) -> None:
        self._reader = reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Out:
        """Return the next part; waits while there is none."""
        return await anext(self._reader)

    async def aclose(self) -> None:
        """Stop reading: the work is cancelled."""
        await self._reader.aclose()


def _filled(requests: list[W]) -> Mailbox[W]:
    mailbox: Mailbox[W] = Mailbox()
    for request in requests:
        mailbox.put_nowait(request)
    mailbox.close()
    return mailbox


def _cancelling(request: Request[Any, Any]) -> Any:
    def on_done(outcome: "asyncio.Future[Any]") -> None:
        if outcome.cancelled():
            request.cancel()

    return on_done
