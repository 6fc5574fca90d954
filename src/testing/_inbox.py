"""Inboxes without an engine, to test the loop of an actor."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Generic, Self, TypeVar

from .. import Inbox, StreamWork, Work
from ..extension import filled_inbox, filled_stream_inbox

In = TypeVar("In")
Out = TypeVar("Out")


def inbox(values: Iterable[In], /) -> tuple[Inbox[Work[In, Any]], list[asyncio.Future[Any]]]:
    """Make an inbox with work for the loop of an `Actor`. After the last work, `get` raises `InboxClosed`.

    Args:
        values: the arguments of the calls, one for each work.

    Returns:
        The inbox; and for each value a future, which gets the result or error. To cancel a work, cancel its future.
    """
    return filled_inbox(values)


def stream_inbox(
    values: Iterable[In], /, *, capacity: int = 16
) -> "tuple[Inbox[StreamWork[In, Any]], list[StreamReader[Any]]]":
    """Make an inbox with work for the loop of a `StreamActor`. After the last work, `get` raises `InboxClosed`.

    Args:
        values: the arguments of the calls, one for each work.
        capacity: how many parts each work holds for its reader.

    Returns:
        The inbox; and for each value a reader, an async iterator over its parts. To cancel a work, close its reader or
        drop it.
    """
    made, parts = filled_stream_inbox(values, capacity)
    return made, list(map(StreamReader, parts))


class StreamReader(Generic[Out]):
    """An async iterator over the parts that an actor gives for one item; it raises the error of the item."""

    __slots__ = ("_reader",)

    def __init__(self, reader: AsyncGenerator[Out, None]) -> None:
        self._reader = reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Out:
        """Return the next part; wait until the actor has given a part.

        Raises:
            StopAsyncIteration: the item is finished.
            BaseException: the error with which the actor failed the item.
        """
        return await anext(self._reader)

    async def aclose(self) -> None:
        """Stop reading, which cancels the work."""
        await self._reader.aclose()
