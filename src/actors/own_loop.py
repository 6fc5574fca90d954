"""Actors that own their loop: base classes of nodes that decide by themselves when they take which items."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from .inbox import Inbox
from .loop_host import LoopHost
from .loop_stream import LoopStream
from .work import StreamWork, Work

In = TypeVar("In")
Out = TypeVar("Out")


class Actor(Generic[In, Out]):
    """Base class of a node that owns its loop and gives one result for each item.

    Decorate the class with `@ps.node` and write `loop`. Each scope (`run`, `stream`, `deploy`) makes an instance of
    its own, starts its loop once, and every item goes through the inbox.

        @ps.node
        class Doubler(ps.Actor[int, int]):
            async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
                while True:
                    work = await inbox.get()
                    work.finish(work.value * 2)
    """

    async def loop(self, inbox: Inbox[Work[In, Out]], /) -> None:
        """Take work out of the inbox and settle it, in any order, until `inbox.get()` raises `InboxClosed`.

        Returning, or raising anything else, while the scope goes on is a crash of the actor.
        """
        raise NotImplementedError(f"{type(self).__name__} needs `async def loop(self, inbox)`")

    async def __call__(self, value: In, /) -> Out:
        """Handle one item. Outside a graph, a loop runs for it alone, for a unit test for instance."""
        async with LoopHost(lambda: self, type(self).__name__) as host:
            result: Out = await host.run(value)
            return result


class StreamActor(Generic[In, Out]):
    """Base class of a node that owns its loop and gives many parts for each item.

    As `Actor`; calling its instance gives an async iterator.
    """

    async def loop(self, inbox: Inbox[StreamWork[In, Out]], /) -> None:
        """Take work out of the inbox, put parts into it, and settle it, until `inbox.get()` raises `InboxClosed`.

        Returning, or raising anything else, while the scope goes on is a crash of the actor.
        """
        raise NotImplementedError(f"{type(self).__name__} needs `async def loop(self, inbox)`")

    async def __call__(self, value: In, /) -> AsyncIterator[Out]:
        """Handle one item. Outside a graph, a loop runs for it alone, for a unit test for instance."""
        async with LoopHost(lambda: self, type(self).__name__) as host, aclosing(LoopStream(host, value)) as parts:
            async for part in parts:
                yield part


_BASES: tuple[type[Any], ...] = (Actor, StreamActor)


def owns_loop(cls: type[Any]) -> bool:
    """Whether instances of a class run a loop, and are not called for each item."""
    return issubclass(cls, _BASES)


def check_loop(cls: type[Any], call: Any) -> None:
    """Refuse a class whose items could go nowhere.

    Args:
        cls: the class, derived from `Actor` or `StreamActor`.
        call: its `__call__`.

    Raises:
        TypeError: it has no loop of its own, or handles items in another way.
    """
    if call not in [base.__call__ for base in _BASES]:
        raise TypeError(
            f"@node on class {cls.__name__!r}, which owns its loop: its items go through `loop`, and a __call__ of its "
            "own would never run"
        )
    if cls.loop in [base.loop for base in _BASES]:
        raise TypeError(f"@node on class {cls.__name__!r} needs a method `async def loop(self, inbox)`")
