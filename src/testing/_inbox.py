"""Inboxes without an engine, to test the loop of an actor."""

import asyncio
from collections.abc import Iterable
from typing import Any, Generic, Self, TypeVar

from ..actors.own_loops import AnyRequest, Inbox, Mailbox, Request, StreamRequest, StreamWork, Work
from ..actors.stream_buffer import DEFAULT_CAPACITY, Reader

In = TypeVar("In")
Out = TypeVar("Out")
W = TypeVar("W", bound=AnyRequest[Any])


def inbox(values: Iterable[In], /) -> tuple[Inbox[Work[In, Any]], list[asyncio.Future[Any]]]:
    """Make an inbox with work for the loop of an `Actor`. After the last work, `get` raises `InboxClosed`.

    Args:
        values: the arguments of the calls, one for each work.

    Returns:
        The inbox; and for each value a future, which gets the result or error. To cancel a work, cancel its future.
    """
    requests: list[Request[In, Any]] = [Request(value) for value in values]
    for request in requests:
        request.outcome.add_done_callback(_cancelling(request))
    return _filled(requests), [request.outcome for request in requests]


def stream_inbox(
    values: Iterable[In], /, *, capacity: int = DEFAULT_CAPACITY
) -> "tuple[Inbox[StreamWork[In, Any]], list[StreamReader[Any]]]":
    """Make an inbox with work for the loop of a `StreamActor`. After the last work, `get` raises `InboxClosed`.

    Args:
        values: the arguments of the calls, one for each work.
        capacity: how many parts each work holds for its reader.

    Returns:
        The inbox; and for each value a reader, an async iterator over its parts. To cancel a work, close its reader or
        drop it.
    """
    requests: list[StreamRequest[In, Any]] = [StreamRequest(value, capacity=capacity) for value in values]
    return _filled(requests), [StreamReader(request.buffer.reader()) for request in requests]


class StreamReader(Generic[Out]):
    """An async iterator over the parts that an actor gives for one item; it raises the error of the item."""

    __slots__ = ("_reader",)

    def __init__(self, reader: Reader[Out]) -> None:
        self._reader = reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Out:
        """Return the next part; wait while there is none.

        Raises:
            StopAsyncIteration: the item is finished.
            BaseException: the error with which the actor failed the item.
        """
        return await anext(self._reader)

    async def aclose(self) -> None:
        """Stop reading, which cancels the work."""
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
