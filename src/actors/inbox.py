"""Inbox: where an actor that owns its loop finds its work.

This is the side of the actor. The side of who gives it work is in `mailbox`: the engine's class is derived from this.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

W_co = TypeVar("W_co", covariant=True)


class Inbox(ABC, Generic[W_co]):
    """Work that waits for an actor: higher priorities first, first in first out within one.

    Work whose caller has gone, and work whose deadline has passed, is not handed out. The engine makes it, and in a
    test `penstock.testing.inbox`.
    """

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return how many items wait."""

    @abstractmethod
    async def get(self) -> W_co:
        """Take the next work; waits while there is none.

        Raises:
            InboxClosed: no more work will come; let it pass, and the actor ends cleanly.
        """

    @abstractmethod
    def get_nowait(self, max_items: int) -> list[W_co]:
        """Take what is there, at most `max_items`; an empty list if there is nothing."""
