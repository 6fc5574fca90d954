"""Stages of streams: iterators that read streams and give a new stream, and their role in a checkpoint."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterator
from contextvars import copy_context
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast

from .._errors import Noted
from ..actors.policy import Policy
from ..actors.stream_buffer import Reader
from ..actors.tasks import close_stream
from ..actors.threads import ThreadPool
from .node import Node
from .tracing.annotations import unwrapped
from .tracing.tracer import active

T = TypeVar("T")


class StageRole(NamedTuple):
    """The effect of a stage on the values of a stream. A call with `checkpoint=` restarts the stage accordingly.

    Attributes:
        gives: the values that come out. "any": any number of values; "one_to_one": one value for each value that comes
            in; "placed": the same value on a device. For stages that read several streams: "in_turns" gives one value
            of each stream in turn; "mix" counts in `taken` how many values come from each stream; "arrival" has another
            order after a restart, so it is refused. A source gives "records", or an "order", which may begin anywhere
            (`after`).
        calls: the settings of the stage that are functions of the user, whose state is saved as well.
        holds_values: whether the arrays in the state belong to values that the stage has read and does not change. Then
            each array is copied once, no matter in how many snapshots it is.
        may_change: the settings that may differ when a call goes on with `on_mismatch="resize"`: with any values of
            these, no record is lost or comes twice.
        may_be_absent: whether the stage may be left out, or added, when a call goes on in this way.
    """

    gives: Literal["any", "one_to_one", "placed", "in_turns", "mix", "arrival", "records", "order"] = "any"
    calls: tuple[str, ...] = ()
    holds_values: bool = False
    may_change: tuple[str, ...] = ()
    may_be_absent: bool = False

    @property
    def is_source(self) -> bool:
        """Whether the state of the stage alone says where it goes on; other stages also need the states before them."""
        return self.gives in ("records", "order")


class StageIterator(AsyncIterator[T]):
    """A stage at work: an iterator with the state of the stage, made for each stream that is open.

    A subclass has `__anext__`, which returns the next value. `state` is called between two values.

    Args:
        *streams: the streams that the stage reads.

    Attributes:
        role: the effect of the stage on the values; the same for all instances.
        streams: the iterators of the streams that the stage reads.
    """

    role: ClassVar[StageRole] = StageRole()

    def __init__(self, *streams: AsyncIterable[Any]) -> None:
        self.streams: list[AsyncIterator[Any]] = [*map(aiter, streams)]

    def __aiter__(self) -> Self:
        return self

    def state(self) -> Any:
        """Return the state between two values, as values that can be stored: here None."""
        return None

    def restore(self, state: Any) -> None:
        """Set a state that `state` has returned; called before the first value."""

    def place_again(self, place: Callable[[Any], Any]) -> None:
        """Place the restored values with a function: they go to another device now."""

    def held_bytes(self) -> tuple[int, int]:
        """Return how many bytes the stage holds between two values, and how many of these are on devices."""
        from .sizes import sizes_of  # few programs need it

        return (0, 0) if self.role.is_source else sizes_of([self.state()], with_streams=False)

    async def aclose(self) -> None:
        """Stop reading."""
        for stream in self.streams:
            await close_stream(stream)


def stage_node(
    name: str, kind: type[AsyncIterator[Any]], /, *, capacity: int | None = None, **settings: Any
) -> Node[..., Any]:
    """Return the node of a stage, which a graph calls with the streams that the stage reads.

    Args:
        name: the name of the node, also in drawings.
        kind: the class of the iterators, a `StageIterator`.
        capacity: how many values the stream of the stage holds; 16 by default.
        **settings: the arguments of the iterator besides the streams. Numbers and texts among these must be the same
            when a saved call goes on.
    """
    return Node(functools.partial(kind, **settings), Policy(capacity=capacity), name=name)


def role_of(made_by: Any) -> StageRole:
    """Return the role of the class of a stage, or of a function that places values; the default role for others."""
    role: object = getattr(unwrapped(made_by), "role", None)
    return role if isinstance(role, StageRole) else StageIterator.role


def has_state(value: object) -> bool:
    """Whether an object, or the instances of a class, have plain methods `state` and `restore`."""
    methods = [getattr(value, name, None) for name in ("state", "restore")]
    return all(callable(one) and not inspect.iscoroutinefunction(one) for one in methods)


def is_stream(value: object) -> bool:
    """Whether a value is a stream of a graph: a reader; or, while the graph is traced, a symbolic stream."""
    tracer = active()
    return isinstance(value, Reader) or (tracer is not None and tracer.is_stream(value))


def has_value(stream: object) -> bool:
    """Whether the next value of a stream that a step reads is there, so that `anext` does not wait."""
    return isinstance(stream, Reader) and bool(cast("Reader[Any]", stream).buffer.held)  # type: ignore[redundant-cast]


class ThreadIterator(AsyncIterator[T]):
    """The values of a plain iterator, which runs in a thread: the event loop does not wait for its file or socket.

    Args:
        values: the iterator.
        name: the prefix of the thread's name.
    """

    def __init__(self, values: Iterator[T], name: str) -> None:
        self._values: Iterator[T] = values
        self._thread = ThreadPool(1, name=name)
        self._asked: asyncio.Future[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next value."""
        if self._asked is None:
            self._asked = self._thread.submit(copy_context(), None, next, self._values, _END)
        asked = self._asked
        await asyncio.wait([asked])  # a cancelled read leaves the value to the next read
        if asked.exception() is None and asked.result() is _END:
            await self._thread.aclose()
            raise StopAsyncIteration
        self._asked = None
        with Noted("while a plain iterator was asked for its next value"):
            value: T = asked.result()
        return value

    async def aclose(self) -> None:
        """Wait until the thread has ended, and close a generator."""
        await self._thread.aclose()
        if self._asked is not None and not self._asked.cancelled():
            self._asked.exception()  # mark the error as retrieved, so that asyncio does not log it
        values: object = self._values
        if isinstance(values, Generator):
            values.close()

    def __del__(self) -> None:
        self._thread.abandon()


_END = object()
