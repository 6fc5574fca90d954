"""`penstock.current()`: it tells a handler, and the tasks that the handler starts, which item they work for."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from time import monotonic
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4
from weakref import ref

from .._errors import UnknownItemError
from ..telemetry import logs
from .tasks import no_item

if TYPE_CHECKING:
    from .frame import Frame
    from .node_actor import NodeActor
    from .worker import Worker


# The names of functions in asyncio and anyio that start a task, or a thread in a copy of the context. A handler that
# starts tasks through another function has to call `penstock.current()` first; otherwise its tasks do not know their
# item.
_STARTERS = frozenset(
    {
        "TaskGroup", "as_completed", "create_task", "create_task_group", "ensure_future", "gather", "run_sync",
        "shield", "start_soon", "to_thread", "wait_for",
    }
)  # fmt: skip


def starts_tasks(fn: Callable[..., Any]) -> bool:
    """Whether a function, or a function inside or wrapped by it, uses the name of a function that starts tasks."""
    function: Any = fn
    while function is not None:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and any(not _STARTERS.isdisjoint(one.co_names) for one in codes_of(code)):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code object of a function, and the code objects of the functions defined inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


class Cancellable(Protocol):
    """An object that can tell whether the caller of an item has left."""

    @property
    def cancelled(self) -> bool:
        """Whether the item has ended, so that its result is not needed."""
        ...


@dataclass(frozen=True)
class ItemInfo:
    """The graph, the node, the item and the attempt that a handler works on; returned by `penstock.current()`.

    Attributes:
        graph: the name of the graph.
        node: the name of the node, as drawn.
        item: the index of the item in its stream, deployment or `map_each`, from 0.
        attempt: the number of the attempt, from 1.
    """

    graph: str
    node: str
    item: int
    attempt: int
    _deadline: float | None = field(default=None, repr=False, compare=False)
    _clock: Callable[[], float] = field(default=monotonic, repr=False, compare=False)
    _work: Cancellable | None = field(default=None, repr=False, compare=False)
    _key: str = field(default="", repr=False, compare=False)  # elsewhere: its idempotency key

    @property
    def idempotency_key(self) -> str:
        """A text of 32 digits that names the work of this node for this item. With it, another system acts only once.

        The key is the same in all attempts. In a call with a durable loop, the key is the same in all processes that
        go on with that loop. In other calls the key is unique to the call. Outside of an engine, each reading gives a
        new key.

        Raises:
            UnknownItemError: the item has ended, or the caller runs in a worker process of the Engine.
        """
        work = self._work
        if self._key:
            return self._key
        if isinstance(work, Handling):
            return work.idempotency_key()
        if isinstance(work, _Asked):
            return work._info.idempotency_key
        if no_item.get() is not None:
            raise UnknownItemError(f"idempotency_key was asked for {no_item.get()}; pass it on as an argument")
        return uuid4().hex

    def remaining_seconds(self) -> float | None:
        """Return the time left until the deadline of the call or the timeout of the node, whichever is earlier.

        Returns:
            The time in seconds, at least 0; None if there is neither a deadline nor a timeout.
        """
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def check_cancelled(self) -> None:
        """Raise `CancelledError` if this item was cancelled, its deadline has passed, or this attempt has timed out.

        For long loops in threads, since a thread cannot be cancelled from outside.

        Raises:
            asyncio.CancelledError: the item was cancelled, or it or this attempt has no time left.
        """
        if self._work is not None and self._work.cancelled:
            raise asyncio.CancelledError(
                f"item {self.item} of graph {self.graph!r} has ended, or attempt {self.attempt} of node {self.node!r}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the names and the remaining time; the copy counts that time from the moment in which it is made."""
        key = self._key if self._work is None else self.idempotency_key
        return _item_elsewhere, (self.graph, self.node, self.item, self.attempt, self.remaining_seconds(), key)


def _item_elsewhere(
    graph: str, node: str, item: int, attempt: int, remaining_seconds: float | None, key: str
) -> ItemInfo:
    deadline = None if remaining_seconds is None else monotonic() + remaining_seconds
    return ItemInfo(graph, node, item, attempt, deadline, _key=key)


class _Asked:
    """An item of an engine somewhere else: it is cancelled when its time is over, or when a function says so.

    Args:
        info: the item.
        is_cancelled: returns whether the item was cancelled.
        emit: takes the events that `penstock.emit` is given; None if nothing may be emitted.
    """

    def __init__(
        self, info: ItemInfo, is_cancelled: Callable[[], bool], emit: Callable[[object], Awaitable[None]] | None
    ) -> None:
        self._info = info
        self._is_cancelled = is_cancelled
        self.emit = emit

    @property
    def cancelled(self) -> bool:
        """Whether the item has ended, so that its result is not needed."""
        return self._is_cancelled() or self._info.remaining_seconds() == 0


_elsewhere: ContextVar[ItemInfo | None] = ContextVar("penstock_elsewhere", default=None)


def emit_elsewhere() -> Callable[[object], Awaitable[None]] | None:
    """Return the function that takes the events of an item of `working_on`; None if there is no such function."""
    item = _elsewhere.get()
    return item._work.emit if item is not None and isinstance(item._work, _Asked) else None


@contextmanager
def working_on(
    info: ItemInfo, is_cancelled: Callable[[], bool] = bool, emit: Callable[[object], Awaitable[None]] | None = None
) -> Generator[ItemInfo, None, None]:
    """Have `penstock.current()` return an item on a worker without an engine, such as another machine.

    Args:
        info: the item: the value of `Attempt.info` in the process of the engine.
        is_cancelled: called by `check_cancelled`, from any thread. An item whose time is over is cancelled, too.
        emit: takes an event of `penstock.emit`, and is awaited; without it, events are dropped.
    """
    here = replace(info, _work=_Asked(info, is_cancelled, emit))
    token = _elsewhere.set(here)
    try:
        yield here
    finally:
        _elsewhere.reset(token)


class Position:
    """Where a worker is: the frame and the actor whose handler it runs.

    Contexts refer to the position, so the position must not refer back to a context: each call would leave a cycle for
    the garbage collector.

    Attributes:
        frame: the frame whose handler runs now; None between two handlers.
        actor: the actor of the present handler, or of the last handler.
        attempt: the number of the attempt, from 1.
        attempt_deadline: when the attempt times out, in the loop's time; None without a timeout.
        waited_seconds: for how long the present handler has waited for a thread or a process.
        timeout: ends the present attempt; None without a timeout.
        calls: the calls that the present attempt has begun with `penstock.call`, see `late_steps.py`; None without
            calls.
        task: the task of the worker, while it runs. A task that a handler has started cannot rely on this position:
            the position says where the worker is now, not where it was when that task was started.
        inner: the worker that runs the body of the present handler in the same task; None without such a body.
    """

    __slots__ = (
        "actor", "attempt", "attempt_deadline", "calls", "frame", "inner", "task", "timeout", "waited_seconds",
    )  # fmt: skip

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.actor: NodeActor | None = None
        self.attempt = 1
        self.attempt_deadline: float | None = None
        self.waited_seconds = 0.0
        self.timeout: asyncio.Timeout | None = None
        self.calls: Any = None
        self.task: asyncio.Task[Any] | None = None
        self.inner: Worker | None = None

    @property
    def is_own(self) -> bool:
        """Whether the caller runs in the task of the worker, and not in a task or thread that a handler has started."""
        return self.task is not None and self.task is _running_task()

    def handling(self) -> "Handling | None":
        """Return the handler that runs now; None between two handlers."""
        frame, actor = self.frame, self.actor
        return None if frame is None or actor is None else Handling(self, frame, actor)

    def remember(self) -> "Handling | None":
        """Let the tasks that the present handler starts from now on know for which item they work."""
        handling = self.handling()
        source.set(handling)
        return handling


class Handling:
    """One run of a handler; the tasks and threads that the handler starts find it in their contexts.

    A task copies the context in which it is started, so the `Handling` must be in that context before. To put a
    `Handling` there for each item would cost as much as a hop between two nodes. So only these contexts get one: of
    threads, of handlers whose code uses the name of a function that starts tasks, and of handlers that have called
    `current()`.

    A `Handling` refers to its frame weakly, so that a task that outlives the item does not keep its values alive.

    Attributes:
        position: the position of its worker.
        actor: the actor of the node.
        attempt: the number of the attempt, from 1.
        has_failed: whether the attempt has failed; a thread or a task of the attempt may go on.
    """

    __slots__ = ("_clock", "_deadline", "_frame", "_item", "_label", "actor", "attempt", "has_failed", "position")

    def __init__(self, position: Position, frame: "Frame", actor: "NodeActor") -> None:
        deadline = frame.deadline
        if position.attempt_deadline is not None:
            deadline = position.attempt_deadline if deadline is None else min(deadline, position.attempt_deadline)
        self.position = position
        self.actor = actor
        self._frame = ref(frame)
        self._item = frame.item
        self._label = actor.label()
        self.attempt = position.attempt
        self.has_failed = False
        self._deadline = deadline
        self._clock = frame.group.loop.time

    @property
    def cancelled(self) -> bool:
        """Whether the item has ended, or this attempt, so that its result is not needed."""
        frame = self._frame()
        return frame is None or frame.cancelled or self.has_failed

    @property
    def frame(self) -> "Frame | None":
        """The frame; None once it has ended and its last handler has returned."""
        frame = self._frame()
        return None if frame is None or frame.settled else frame

    @property
    def is_running(self) -> bool:
        """Whether the worker is still in this handler."""
        frame = self._frame()
        return frame is not None and self.position.frame is frame and self.position.actor is self.actor

    @property
    def is_present(self) -> bool:
        """Whether the worker is still in the same attempt of this handler, and the handler is no chain of links."""
        return self.is_running and self.position.attempt == self.attempt and len(self.actor.bound._links) < 2

    def idempotency_key(self) -> str:
        """Return the digest of the path from the call to this handler; see `ItemInfo`."""
        frame = self._frame()
        if frame is None:
            raise UnknownItemError("idempotency_key was asked for when the item had ended: ask before")
        if (place := frame.place) is not None:
            key: str = place.keeper.idempotency_key(place.of(self._label))
            return key
        way: list[object] = [self._label]
        while frame.parent is not None and frame.group.step is not None:
            way += [frame.layout.name, frame.item, frame.group.step]
            frame = frame.parent
        way.append(frame.layout.name)
        durable = durable_id.get()
        # A call that a handler makes inherits `durable_id` from the call of the handler, but is another call.
        if durable is not None and durable[0] == (None if frame.parent is None else frame.parent.identity):
            way.append(durable[1])
        else:
            way += [_PROCESS, frame.identity]
        return blake2b(repr(way).encode(), digest_size=16).hexdigest()

    def info(self) -> ItemInfo:
        """Return the description of this run, for `current()`."""
        return ItemInfo(
            self.actor.graph, self._label, self._item, self.attempt, self._deadline, self._clock, self
        )  # fmt: skip


source: ContextVar[Position | Handling | None] = ContextVar("penstock_current", default=None)

# For a call with a durable loop: the identity of the frame whose handler makes the call, if a handler does, and a name
# of the loop.
durable_id: ContextVar[tuple[int | None, str] | None] = ContextVar("penstock_durable_id", default=None)
_PROCESS: Final = uuid4().hex


# A node that is called directly runs just its function, and has to work without an engine, such as in a unit test.
OUTSIDE = ItemInfo("", "", 0, 1)


def current() -> ItemInfo:
    """Return the item that the calling handler works on, with its graph, node and attempt.

    `current()` works on the event loop and in threads. It also works in a task that a handler has started, even if the
    task outlives the handler: there `check_cancelled` raises once the item has ended. In a stream and in `map_each`,
    workers go from item to item. There, a task knows its item in two cases: the code of the handler uses the name of
    the function that starts the task (`TaskGroup`, `create_task`, `gather`, ...), or the handler has called
    `penstock.current()` before.

    Returns:
        An `ItemInfo`. In a node that is called directly, without an engine, it has empty names, item 0, attempt 1 and
        no deadline.

    Raises:
        UnknownItemError: a task or thread that a handler has started calls this, and its item is not known.
    """
    found = source.get()
    if found is None:
        return _elsewhere.get() or OUTSIDE
    position = found if isinstance(found, Position) else found.position
    if not position.is_own:
        return found.info() if isinstance(found, Handling) else position_outside(position).info()
    if isinstance(found, Handling) and found.is_present:
        return found.info()
    handling = position.handling()
    if handling is None:
        return OUTSIDE
    source.set(handling)
    return handling.info()


def _fields_of_item() -> dict[str, object]:
    """Return the fields for log records of the calling handler: graph, node, item, attempt; empty without a handler."""
    try:
        found = current()
    except UnknownItemError:
        return {}
    if found is OUTSIDE:
        return {}
    return {"graph": found.graph, "node": found.node, "item": found.item, "attempt": found.attempt}


logs.describe_items(_fields_of_item)


def enclosing_frame() -> "Frame | None":
    """Return the frame of the handler that makes a call; None if the caller is not a handler."""
    found = source.get()
    if found is None:
        return None
    if isinstance(found, Position):
        # The caller may be a task of another item of the same group. The mistake does no harm: all items of a group
        # have the same deadline, listener and parent, and a call takes over nothing else.
        return found.frame
    return found.position.frame if found.position.is_own else found.frame


def is_detached() -> bool:
    """Whether the caller is a task or thread that a handler has started, and that may outlive the handler."""
    found = source.get()
    return found is not None and not (found if isinstance(found, Position) else found.position).is_own


def calling_actor() -> "NodeActor | None":
    """Return the actor whose handler makes a call and still runs; None without such a handler, or if it is unknown."""
    found = source.get()
    if found is None:
        return None
    position = found if isinstance(found, Position) else found.position
    if position.is_own:
        return position.actor
    return found.actor if isinstance(found, Handling) and found.is_running else None


def position_outside(position: Position, asked: str = "penstock.current()") -> Handling:
    """Return the handler at a position, for a task or thread that this handler has started.

    Args:
        position: the position.
        asked: the call that needs the handler, for the error.

    Raises:
        UnknownItemError: the handler has ended, or the worker may be with another item by now.
    """
    frame = position.frame
    handling = position.handling()
    if frame is None or handling is None:
        raise UnknownItemError(f"{asked} was called in a task or thread whose handler has ended; {_REMEDY}")
    if not frame.group.is_exclusive:
        raise UnknownItemError(
            f"{asked} was called in a task or thread that a handler has started, and its worker may be with another "
            f"item by now; {_REMEDY}"
        )
    return handling


_REMEDY = "call penstock.current() in the handler itself, before the task is started: then the task knows its item, too"


def _running_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return None
