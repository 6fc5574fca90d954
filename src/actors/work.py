"""Work: what an actor that owns its loop takes out of its inbox, and settles.

This is the side of the actor. The side of its caller is in `requests`: the engine's classes are derived from these.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


class Work(ABC, Generic[In, Out]):
    """One item of an actor that owns its loop. It is settled once, with `finish` or `fail`, in any order.

    The engine makes it, and in a test `penstock.testing.inbox`.

    Attributes:
        value: what the actor was called with.
        priority: that of the call, higher first.
        deadline: when nobody will wait for it any more, in the loop's time (`loop.time()`); None without one.
    """

    __slots__ = ()

    value: In
    priority: int
    deadline: float | None

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more; settling it then does nothing."""

    @abstractmethod
    def on_cancelled(self, callback: Callable[[], object], /) -> None:
        """Have `callback` called soon after nobody waits for it any more; never after it was settled."""

    @abstractmethod
    def finish(self, result: Out, /) -> None:
        """Give the result to the caller.

        Raises:
            WorkSettledError: it was finished or failed before.
        """

    @abstractmethod
    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the caller.

        Raises:
            WorkSettledError: it was finished or failed before.
        """


class StreamWork(ABC, Generic[In, Out]):
    """One item of an actor that owns its loop and gives many parts for it.

    The engine makes it, and in a test `penstock.testing.stream_inbox`.

    Attributes:
        value: what the actor was called with.
        priority: that of the call, higher first.
        deadline: when nobody will wait for it any more, in the loop's time (`loop.time()`); None without one.
    """

    __slots__ = ()

    value: In
    priority: int
    deadline: float | None

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """Whether nobody reads it any more; parts go nowhere then, and settling it does nothing."""

    @abstractmethod
    def on_cancelled(self, callback: Callable[[], object], /) -> None:
        """Have `callback` called soon after nobody reads it any more; never after it was settled."""

    @abstractmethod
    def put_nowait(self, part: Out, /) -> bool:
        """Give the reader one more part.

        Returns:
            False if the reader does not keep up and holds as many parts as it may: the part is not taken. A part of
            cancelled work goes nowhere, which is no reason to wait: True.

        Raises:
            WorkSettledError: it was finished or failed before.
        """

    @abstractmethod
    def finish(self) -> None:
        """End the stream; the reader gets what is there.

        Raises:
            WorkSettledError: it was finished or failed before.
        """

    @abstractmethod
    def fail(self, error: BaseException, /) -> None:
        """Raise an error in the reader, after the parts that are there.

        Raises:
            WorkSettledError: it was finished or failed before.
        """
