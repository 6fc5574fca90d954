"""`penstock.current()`: what a handler, and the tasks that it starts, may know about the item."""

import asyncio
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from .._errors import UnknownItemError
from ..telemetry import logs

if TYPE_CHECKING:
    from .frame import Frame
    from .node_actor import NodeActor


# What starts a task, or a thread in a copy of the context, under its usual name in asyncio and anyio. A handler that
# hides it in another function loses nothing but what `penstock.current()` says about not having been asked before.
_STARTERS = frozenset(
    {
        "TaskGroup", "as_completed", "create_task", "create_task_group", "ensure_future", "gather", "run_sync",
        "shield", "start_soon", "to_thread", "wait_for",
    }
)  # fmt: skip


def starts_tasks(fn: Callable[..., Any]) -> bool:
    """Whether the code of a function, of its inner functions or of what it wraps names what starts tasks."""
    return any(not _STARTERS.isdisjoint(code.co_names) for code in _codes(fn))


def _codes(fn: Callable[..., Any]) -> Iterator[CodeType]:
    queue: list[CodeType] = []
    function: Any = fn
    while function is not None:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            queue.append(code)
        function = getattr(function, "__wrapped__", None)
    while queue:
        code = queue.pop()
        yield code
        queue.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))


class Cancellable(Protocol):
    """Whoever can tell whether an item is still wanted."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more."""
        ...


@dataclass(frozen=True)
class ItemInfo:
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
        task: the worker's task, while it runs. In any other, which a handler has started, the position says where the
            worker is now, and not where it was then.
    """

    __slots__ = ("actor", "attempt", "attempt_deadline", "frame", "task")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.actor: NodeActor | None = None
        self.attempt = 1
        self.attempt_deadline: float | None = None
        self.task: asyncio.Task[Any] | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is asked in the worker's own task, and not in a task or thread that a handler has started."""
        return self.task is not None and self.task is _running_task()

    def handling(self) -> "Handling | None":
        """Return what runs now; None between two handlers."""
        frame, actor = self.frame, self.actor
        return None if frame is None or actor is None else Handling(self, frame, actor)

    def remember(self) -> None:
        """Have the tasks that the present handler starts from now on know what they belong to."""
        source.set(self.handling())


class Handling:
    """One run of a handler, as the tasks and threads know it that the handler starts.

    A task copies the context in which it is started, so what it knows for good has to be in there. To put it there for
    every item would cost more than a hop between two nodes. So it is done for those who need it: threads, handlers in
    whose code one sees that they start tasks, and those that have asked for their own position.

    It refers to its frame weakly: a task that outlives the item does not keep its values.
    """

    __slots__ = ("_attempt", "_clock", "_deadline", "_frame", "_item", "_label", "actor", "position")

    def __init__(self, position: Position, frame: "Frame", actor: "NodeActor") -> None:
        deadline = frame.deadline
        if position.attempt_deadline is not None:
            deadline = position.attempt_deadline if deadline is None else min(deadline, position.attempt_deadline)
        self.position = position
        self.actor = actor
        self._frame = ref(frame)
        self._item = frame.item
        self._label = actor.label()
        self._attempt = position.attempt
        self._deadline = deadline
        self._clock = frame.group.loop.time

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result of the item any more."""
        frame = self._frame()
        return frame is None or frame.cancelled

    @property
    def frame(self) -> "Frame | None":
        """The frame, unless it has ended and nothing runs for it any more."""
        frame = self._frame()
        return None if frame is None or frame.settled else frame

    @property
    def is_running(self) -> bool:
        """Whether the worker is still in this handler."""
        frame = self._frame()
        return frame is not None and self.position.frame is frame and self.position.actor is self.actor

    @property
    def is_present(self) -> bool:
        """Whether it still says exactly where the worker is: not of another attempt, nor of another link of a chain."""
        return self.is_running and self.position.attempt == self._attempt and len(self.actor.links) < 2

    def info(self) -> ItemInfo:
        """Return where it is, or was."""
        return ItemInfo(
            self.actor.graph, self._label, self._item, self._attempt, self._deadline, self._clock, self
        )  # fmt: skip


source: ContextVar[Position | Handling | None] = ContextVar("penstock_current", default=None)


class _Nobody:
    cancelled = False


# A node that is called directly is just its function, and has to work without an engine, in a unit test for instance.
OUTSIDE = ItemInfo("", "", 0, 1, None, float, _Nobody())


def current() -> ItemInfo:
    """Return what is known about the item that the calling handler works on; works on the loop and in threads.

    A task that a handler starts knows the item of its handler, also when it outlives it; `check_cancelled` raises there
    once the item has ended. In a stream and in `map_each`, where workers go from item to item, this takes a handler
    whose own code names what starts the task (`TaskGroup`, `create_task`, `gather`, ...), or which has called
    `penstock.current()` before.

    Called directly, without an engine, a node has empty names, item 0, attempt 1 and no deadline.

    Raises:
        UnknownItemError: called in a task or thread that a handler has started, and which item it belongs to cannot be
            told any more.
    """
    found = source.get()
    if found is None:
        return OUTSIDE
    position = found if isinstance(found, Position) else found.position
    if not position.is_own:
        return found.info() if isinstance(found, Handling) else _from_outside(position).info()
    if isinstance(found, Handling) and found.is_present:
        return found.info()
    handling = position.handling()
    if handling is None:
        return OUTSIDE
    source.set(handling)
    return handling.info()


def _fields_of_item() -> dict[str, object]:
    """Return what a log says of the item that the calling handler works on; nothing outside of one."""
    try:
        found = current()
    except UnknownItemError:
        return {}
    if found is OUTSIDE:
        return {}
    return {"graph": found.graph, "node": found.node, "item": found.item, "attempt": found.attempt}


logs.describe_items(_fields_of_item)


def enclosing_frame() -> "Frame | None":
    """Return the frame of the handler that makes a call; None outside of one."""
    found = source.get()
    if found is None:
        return None
    if isinstance(found, Position):
        # A task of another item of this group may ask. What a call takes over is the same for all of them: the
        # deadline, who listens, and what is around.
        return found.frame
    return found.position.frame if found.position.is_own else found.frame


def is_detached() -> bool:
    """Whether a call is made beside a handler, in a task or thread that it has started: its end does not end them."""
    found = source.get()
    return found is not None and not (found if isinstance(found, Position) else found.position).is_own


def calling_actor() -> "NodeActor | None":
    """Return the actor whose handler makes a call and is still running; None outside, or if it cannot be told."""
    found = source.get()
    if found is None:
        return None
    position = found if isinstance(found, Position) else found.position
    if position.is_own:
        return position.actor
    return found.actor if isinstance(found, Handling) and found.is_running else None


def _from_outside(position: Position) -> Handling:
    frame = position.frame
    handling = position.handling()
    if frame is None or handling is None:
        raise UnknownItemError(f"penstock.current() was called in a task or thread whose handler has ended; {_REMEDY}")
    if not frame.group.is_exclusive:
        raise UnknownItemError(
            "penstock.current() was called in a task or thread that a handler has started, and its worker may be with "
            f"another item by now; {_REMEDY}"
        )
    return handling


_REMEDY = "call it in the handler itself, before the task is started: then the task knows its item, too"


def _running_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return None
