"""Frame: the activation record of one invocation of a graph."""

import asyncio
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast
from weakref import WeakSet

from .._errors import DeadlineExceeded, NodeCancelledError, add_note, copy_of, plain_error, with_cause
from ..telemetry import logs
from ..telemetry.spans import FrameSpan
from .current import Position, source
from .stream_buffer import StreamBuffer
from .tasks import start_task

if TYPE_CHECKING:
    from .execution import DetachedStep, OutsideCall
    from .node_actor import NodeActor
    from .stream_buffer import Reader
    from .worker import WorkerGroup

State = Literal["running", "done", "failed", "cancelled"]

_MARKS = "__penstock__"  # the attribute of an error that holds its `Marks`
_OURS = str(Path(__file__).parents[1]) + os.sep  # the files of the library
_identities = itertools.count(1)
_NO_ITEM: Final = 0


class Marks(NamedTuple):
    """The marks on an error that a node has raised. A pickle of the error has no marks.

    Attributes:
        item: the identity of the first frame that raised the error; None before.
        first_traceback: the traceback of the error when that frame raised it.
        notes: the notes that the frame has added.
        node: the label of the node that caused the error, if another node raises the error.
        attempts: the attempts of the node that raised the error first for this item.
        traceback: the whole traceback, if entries of the library were cut.
    """

    item: int | None = None
    first_traceback: TracebackType | None = None
    notes: tuple[str, ...] = ()
    node: str = ""
    attempts: int = 0
    traceback: TracebackType | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Marks, ()  # a traceback cannot be pickled


def _marks_of(error: BaseException) -> Marks:
    # Not as an attribute, here and below: the class of a user may answer each name, or raise anything for one.
    return vars(error).get(_MARKS) or Marks()


def attempts_of(error: BaseException) -> int:
    """Return the attempts of the node that raised an error of an item; 0 for an error that no node raised."""
    return _marks_of(error).attempts


def noted(error: Exception, note: str) -> BaseException:
    """Add a note about an item to an error, and return the error; a copy, if an earlier item has raised the error.

    A copy has neither the notes nor the stack frames of earlier items.
    """
    own, marks = cast("BaseException", error), _marks_of(error)
    if marks.item is not None:
        own = copy_of(error)
        BaseException.with_traceback(own, marks.first_traceback)
        vars(own)["__notes__"] = [other for other in getattr(error, "__notes__", ()) if other not in marks.notes]
        marks = Marks()
    with suppress(Exception):  # the class may override attribute access
        vars(own)[_MARKS] = marks._replace(notes=(*marks.notes, note))
    add_note(own, note)
    return own


# The file of compiled lines of nodes, and further functions of the engine that are left out of tracebacks of handlers.
LINE_FILE: Final = "<penstock line>"
LEFT_OUT: Final[set[CodeType]] = set()

# The values of a frame that has ended. One list for all, so that references to such a frame keep no values alive.
NOTHING: list[Any] = []


# A slot, and the way from its value to the part that is read; each access is "attribute" or "item", and a name or key.
Part: TypeAlias = tuple[int, tuple[tuple[str, Any], ...]]


class Layout(Protocol):
    """The layout that all frames of one plan share; the engine's `Program` is one."""

    name: str
    is_line: bool
    blank: tuple[Any, ...]
    countdown: list[int]
    readers: list[int]
    sinks: int
    result_parts: "tuple[Part, ...]"

    def result(self, values: list[Any], /) -> Any:
        """Build the result of the graph from the values in the slots."""
        ...


class Place(NamedTuple):
    """Where a frame is in a run whose steps are kept.

    Attributes:
        keeper: the `Keeper` of the run.
        path: the first part of the paths of its steps; or the path of its only step.
        is_step: whether it is the path of its only step.
    """

    keeper: Any
    path: str = ""
    is_step: bool = False

    def of(self, label: str) -> str:
        """Return the path of a step."""
        return self.path if self.is_step else self.path + label


class AnyDeployment(Protocol):
    """A deployment, as a frame knows it: a node of a deployment must not call the deployment itself."""

    @property
    def names(self) -> str:
        """The names of the graphs of the deployment."""
        ...


class Listener:
    """The object that a frame tells when it has ended."""

    __slots__ = ()

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment that the frame belongs to; None outside of deployments."""
        return None

    def place_of(self, frame: "Frame", around: Place) -> Place | None:
        """Return the place of a frame, from the place of the frame around it; None if its steps are not kept."""
        return None

    def frame_done(self, frame: "Frame") -> None:
        """Take the outcome of the frame; called exactly once. If `frame.settled` is false, handlers still unwind."""
        raise NotImplementedError

    def frame_settled(self, frame: "Frame") -> None:
        """Note that the last handler has unwound; not called if no handler ran when the frame ended."""


class Interruption(BaseException):
    """Ends an iteration of a durable loop in which a handler asks a question; the loop raises `Interrupted` instead.

    This is not an `Exception`, so that no handler, retry or fallback takes it for a failure.
    """


class Frame:
    """One item on its way through a graph: slots for values, countdowns of missing inputs, and the outcome.

    The outcome is claimed once: the first claim wins, and later results and errors are discarded.

    Attributes:
        values: the slots, one for each live value; a slot is emptied when its last reader is done.
        missing: for each step, how many inputs the step still waits for.
        readers: for each slot, how many readers the slot still has.
        queues: the actors at which the frame waits, in the inbox or for room in it.
        sinks_left: how many steps without readers have not finished; 0 means that all steps have finished.
        expired: whether the deadline of the frame, or of its stream, has ended it.
        is_substitute: whether a fallback or a failover has given a value of the frame.
        unwinding: how many handlers still run for the frame after its end.
        on_result_stream: called with the stream that the graph returns, if it returns a stream.
        timer: ends the frame at its deadline.
        bodies: functions that stop the bodies that steps of control flow run now.
        detached: the first step, while it runs outside of the loop and needs no worker.
        span: the parent of the spans of its node executions; None if the frame is not sampled.
        key: the key of the call, in a deployment with `key=`; None without a key.
        owns_state: whether the frame is an iteration of a loop, and no other frame has the state at its beginning.
        waiters: for a computation of a cache, which has no parent: the frames that wait for the computation now.
        waiting_inside: for such a computation: frames in it, and in runs inside of it, that waited for shared places.
        unread: the results of nodes with `discard=` that no step has begun to read, by their ids, each with the actor
            that gave it. Once the frame is done: only the results that are part of its result. None if there were none.
    """

    # Attributes that few frames need have their defaults in the class, because making a frame is a large part of the
    # cost of a short item. Attributes that every item reads are assigned, because reading a default through an instance
    # costs five times as much as assigning it.
    priority: int
    parent: "Frame | None" = None
    missing: list[int]
    readers: list[int]
    queues: "tuple[NodeActor, ...]"
    sinks_left = 1
    result: Any = None
    error: BaseException | None = None
    span: FrameSpan | None = None
    deadline: float | None = None
    expired = False
    is_substitute = False
    key: Hashable = None
    owns_state = False
    waiters: "Collection[Frame]" = ()
    waiting_inside: "WeakSet[Frame] | None" = None
    unread: "dict[int, tuple[Any, NodeActor]] | None"
    _was_told = False
    unwinding: int
    on_result_stream: "Callable[[Reader[Any]], None] | None" = None
    bodies: "tuple[Callable[[], None], ...]" = ()
    detached: "DetachedStep | None" = None
    _identity: int | None = None
    _place: Place | None = None
    timer: asyncio.TimerHandle | None

    def __init__(
        self,
        layout: Layout,
        inputs: tuple[Any, ...],
        group: "WorkerGroup",
        listener: Listener,
        item: int,
        parent: "Frame | None",
    ) -> None:
        self.layout = layout
        self.group = group
        self.listener = listener
        self.item = item
        # A `State`; declared as str because type checkers assume that an await does not change it.
        self.state: str = "running"
        self.priority = 0
        self.queues = ()
        self.timer = self.unread = None
        self.unwinding = 0
        self.parent = parent
        self.values: list[Any] = [*inputs, *layout.blank]
        if not layout.is_line:  # in a line, each step has one reader, which takes over its slot: no counters needed
            self.missing = layout.countdown.copy()
            self.readers = layout.readers.copy()
            self.sinks_left = layout.sinks
        if parent is not None:
            self.deadline = parent.deadline

    def body_begun(self, stop: Callable[[], None]) -> None:
        """Note a body that a step of control flow runs; `stop` is called when this frame ends."""
        self.bodies += (stop,)

    def body_ended(self, stop: Callable[[], None]) -> None:
        """Forget a body that has ended."""
        self.bodies = tuple(other for other in self.bodies if other != stop)

    @property
    def place(self) -> Place | None:
        """Where the frame is in a run whose steps are kept; None in other runs."""
        if self._place is None and self.parent is not None and (around := self.parent.place) is not None:
            self._place = self.listener.place_of(self, around)
        return self._place

    @property
    def cancelled(self) -> bool:
        """Whether the frame has ended, so that no further result is needed."""
        return self.state != "running"

    @property
    def has_expired(self) -> bool:
        """Whether the frame has ended with `DeadlineExceeded`, by its deadline or the deadline of a nested call."""
        return self.expired or isinstance(self.error, DeadlineExceeded)

    @property
    def ends_program(self) -> bool:
        """Whether the frame has ended with an exception that ends a program, and so ends its scope as well."""
        return isinstance(self.error, KeyboardInterrupt | SystemExit)

    @property
    def identity(self) -> int:
        """A number that is unique to this frame; a reference to it does not keep the frame alive."""
        if self._identity is None:
            vars(self).setdefault("_identity", next(_identities))  # a thread may ask at the same time
        number = self._identity
        assert number is not None
        return number

    @property
    def settled(self) -> bool:
        """Whether the frame has ended, and its last handler has unwound."""
        return self.state != "running" and not self.unwinding

    def lineage(self) -> "Iterator[Frame]":
        """Yield this frame and the frames around it, innermost first; all frames that wait for a computation count."""
        frames: list[Frame] = [self]
        found: set[Frame] = {self}
        for frame in frames:
            yield frame
            for outer in (frame.parent, *frame.waiters):
                if outer is not None and outer not in found:
                    found.add(outer)
                    frames.append(outer)

    def leaves_running(self, call: "OutsideCall") -> None:
        """Note work outside of the loop that goes on although its attempt has ended."""
        for frame in self.lineage():
            frame.group.outlived_by(call)

    @property
    def root(self) -> "Frame":
        """The outermost frame around this frame, or this frame itself."""
        frame = self
        while frame.parent is not None:
            frame = frame.parent
        return frame

    def expire_at(self, deadline: float, timeout_seconds: float) -> None:
        """Fail the frame at `deadline` (in the loop's time) with `DeadlineExceeded`, unless it ends before."""
        if self.deadline is None or deadline < self.deadline:
            self.deadline = deadline
        if deadline <= self.group.loop.time():
            self._expire(timeout_seconds)
        else:
            self.timer = self.group.loop.call_at(deadline, self._expire, timeout_seconds)

    def expire_with_parent(self) -> None:
        """Fail the frame also at the deadline of the frame around it.

        This is for a call made in a task or thread beside a handler: the end of the outer frame does not cancel it.
        """
        deadline = None if self.parent is None else self.parent.deadline
        if self.state != "running" or deadline is None:
            return
        if self.timer is not None:
            if self.timer.when() <= deadline:
                return
            self.timer.cancel()
        self.timer = self.group.loop.call_at(deadline, self._expire, None)

    def _expire(self, timeout_seconds: float | None) -> None:
        limit = "before the deadline of the call around it"
        if timeout_seconds is not None:
            limit = f"within {timeout_seconds:g} s"
        self.fail(DeadlineExceeded(f"item {self.item} of graph {self.layout.name!r} did not finish {limit}"))

    def dequeued(self, actor: "NodeActor") -> bool:
        """Note that the frame no longer waits at an actor; return whether it waited there."""
        if actor not in self.queues:
            return False
        self.queues = tuple([other for other in self.queues if other is not actor])
        return True

    def release(self, slot: int) -> None:
        """Count a reader of `slot` as done; after the last reader, empty the slot."""
        self.readers[slot] -= 1
        if not self.readers[slot]:
            self.values[slot] = None

    def input_came(self, actor: "NodeActor") -> bool:
        """Count an input of a step as complete; return whether the step has all its inputs now."""
        self.missing[actor.index] -= 1
        return not self.missing[actor.index]

    def add_pending(self) -> None:
        """Keep the frame from ending before `remove_pending`, because of work beside its steps such as a stream."""
        self.sinks_left += 1

    def remove_pending(self) -> None:
        """Undo an `add_pending`; if no steps are left and nothing else is pending, finish the frame."""
        if self.state == "running":
            self.sinks_left -= 1
            if not self.sinks_left:
                self.finish()

    def step_ended(self, actor: "NodeActor", value: Any) -> None:
        """Take the value of a step without readers; the last such step finishes the frame."""
        if actor.ends_line:
            self.end_with(value)
            return
        self.values[actor.out] = value
        if self.sinks_left > 1:  # otherwise the frame ends, and gives up all its slots at once
            for slot in actor.reads:
                self.release(slot)
        self.remove_pending()

    def finish(self) -> None:
        """Build the result and claim the outcome "done"; for a frame whose steps are all done."""
        try:
            if held := self.unread:
                kept = set(map(id, values_read(self.values, self.layout.result_parts)))
                self.unread = {number: held.pop(number) for number in kept & held.keys()}
                _discard(self, held)
            result = self.layout.result(self.values)
        except BaseException as error:  # noqa: BLE001 - user code, such as a property of a value in the result
            add_note(error, f"while building the result of graph {self.layout.name!r}, item {self.item}")
            self.fail(foreign_cancel(error) if isinstance(error, asyncio.CancelledError) else error)
            return
        self.end_with(result)

    def end_with(self, result: Any) -> None:
        """Claim the outcome "done" with a result."""
        self.result = result
        self.state = "done"
        self.values = NOTHING
        if self.timer is not None:
            self.timer.cancel()
        self.listener.frame_done(self)

    def fail(self, error: BaseException, actor: "NodeActor | None" = None, attempt: int = 1) -> None:
        """Claim the outcome "failed", and cancel the handlers of this frame; a later failure is only logged."""
        if self.state != "running":
            if error is not self.error and not isinstance(error, asyncio.CancelledError):
                logs.warning(
                    "frame.late_failure", graph=self.layout.name, node=actor.label(error) if actor else None,
                    item=self.item, error=error,
                )  # fmt: skip
            return
        self.expired = actor is None and isinstance(error, DeadlineExceeded)
        if actor is None and self.parent is None:
            logs.item_failed(self.layout.name, "", error)
        if actor is None:
            self.error = plain_error(error, f"a function of a call of graph {self.layout.name!r}")
        else:
            self.error = self.annotated(error, actor, attempt)
        self._end("failed")

    def cancel(self, *, expired: bool = False) -> None:
        """Claim the outcome "cancelled": leave all queues at once, and cancel the handlers of this frame.

        Args:
            expired: whether the reason is the deadline of its stream.
        """
        if self.state == "running":
            self.expired = expired
            self._end("cancelled")

    def came(self, value: Any, actor: "NodeActor") -> None:
        """Note a result that is to be discarded unless a step begins to read it, or a caller gets it."""
        if self.state != "running":
            _discard(self, {id(value): (value, actor)})
        else:
            self.unread = self.unread or {}
            self.unread[id(value)] = value, actor

    def drop_unread(self, only: Any = None) -> None:
        """Discard the results that no step has begun to read; or only the result `only`, if it is among these."""
        held = self.unread
        if held and only is None:
            self.unread = None
            _discard(self, held)
        elif held and id(only) in held:
            _discard(self, {id(only): held.pop(id(only))})

    def pass_unread(self) -> None:
        """Pass the results that no step has begun to read from a body that is done to the frame around it."""
        held, self.unread = self.unread, None
        if held and self.parent is not None:
            for value, actor in held.values():
                self.parent.came(value, actor)

    def reads(self, values: "Iterable[Any]") -> None:
        """Note that a step begins to read values; then the values belong to the step."""
        frame: Frame | None = self
        ledgers: list[dict[int, Any]] = []
        while frame is not None:
            if frame.unread:
                ledgers.append(frame.unread)
            frame = frame.parent
        for value in values if ledgers else ():
            for held in ledgers:
                held.pop(id(value), None)

    def outcome(self) -> Any:
        """Return the result, or raise the error of the frame."""
        if self.state == "done":
            return self.result
        error = self.tell_error()
        if error is not None:
            try:
                raise error
            finally:
                del error  # breaks a cycle: its traceback refers to this stack frame
        raise asyncio.CancelledError(f"item {self.item} of graph {self.layout.name!r} was cancelled")

    def tell_error(self) -> BaseException | None:
        """Return the error, for the code that waits for the outcome; None without an error, or if it was told before.

        The traceback of the error refers to stack frames of handlers and of the engine, and so to this frame, which
        must not refer to the error: else the item would live until the garbage collector runs. While handlers unwind,
        the frame keeps the error, because the outcome is counted after them.
        """
        error = self.error
        if error is not None:
            self._was_told = True
            if not self.unwinding:
                self.error = None
        return error

    def leave(self) -> None:
        """Note that a worker that was in this frame when it ended has unwound."""
        self.unwinding -= 1
        if not self.unwinding:
            self.listener.frame_settled(self)
            if self._was_told:
                self.error = None

    def _end(self, state: State) -> None:
        self.state = state
        if self.unread is not None:
            self.drop_unread()
        self.values.clear()  # not a new list: workers that still unwind hold this list
        if self.timer is not None:
            self.timer.cancel()
        for actor in self.queues:
            actor.withdraw(self)
        self.unwinding = self.group.cancel_workers(self)
        for stop in self.bodies:  # at once: until its worker has unwound, a body could begin further runs
            stop()
        self.listener.frame_done(self)

    def annotated(self, error: BaseException, actor: "NodeActor", attempt: int) -> BaseException:
        """Add a note with graph, node, item and attempt to an error, once for each item; return the error.

        A node may raise the same object for many items: the first item gets the object, other items get copies. The
        same holds for the error of a computation that belongs to no item, see `hand_over`.
        """
        if isinstance(error, StopIteration | StopAsyncIteration):
            error = plain_error(error, f"node {actor.label(error)!r}")
        marks = _marks_of(error)
        label = marks.node or actor.label(error)
        where = f"in node {label!r} of graph {self.layout.name!r}, item {self.item}, attempt {attempt}"
        root = self.root
        if marks.item != root.identity:  # otherwise the body that raised the error has logged it
            logs.item_failed(self.layout.name, label, error)
            marks = marks._replace(attempts=attempt)
        is_of_other = marks.item is not None and marks.item != root.identity and isinstance(error, Exception)
        if is_of_other:
            # Each raise has added its stack frames, which hold values of its item, to the traceback of the object.
            BaseException.with_traceback(error, marks.first_traceback)
            if marks.item != _NO_ITEM:
                error = copy_of(error)
        try:
            if is_of_other:
                notes: Iterable[str] = getattr(error, "__notes__", ())
                vars(error)["__notes__"] = [note for note in notes if note not in marks.notes]
                marks = marks._replace(notes=())
            elif error.__traceback__ is not None:
                # The first entry is of the engine: it does not help the user, and would keep a worker alive.
                BaseException.with_traceback(error, error.__traceback__.tb_next)
                if os.environ.get("PENSTOCK_TRACEBACKS") != "full":
                    marks = _cut_library(error, marks)
            marks = marks._replace(item=root.identity, first_traceback=error.__traceback__, notes=(*marks.notes, where))
            vars(error)[_MARKS] = marks
            error.add_note(where)
        except Exception:  # noqa: BLE001 - an exception that refuses attributes gets no note, and perhaps no marks
            pass
        return error


def values_inside(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and the values inside of containers and dataclasses, which a graph may have built."""
    stack, seen = list(values), set[int]()
    while stack:
        value = stack.pop()
        yield value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple | set):
            stack += cast("Iterable[Any]", value)
        elif isinstance(value, dict):
            stack += value.values()
        elif is_dataclass(value):
            stack += [getattr(value, field.name, None) for field in fields(value)]


def values_read(values: Sequence[Any], parts: Iterable[Part], *, inside: bool = True) -> Iterator[Any]:
    """Yield parts of values, each with the values on the way to it; and the values inside of the parts if `inside`."""
    for slot, path in parts:
        value = values[slot]
        for how, what in path:
            yield value
            value = getattr(value, what) if how == "attribute" else value[what]
        yield from values_inside([value]) if inside else [value]


class UnreadBuffer(StreamBuffer[Any]):
    """Holds values with results that no step has begun to read; a reader that takes a value begins to read it.

    Args:
        capacity: the most values that the buffer holds.
        frame: the frame that the stream belongs to.
    """

    __slots__ = ("_frame",)

    def __init__(self, capacity: int, frame: Frame) -> None:
        super().__init__(capacity)
        self._frame = frame

    def take(self) -> Any:
        """Take the next value, and begin to read it. A `map_each` takes it with `pass_on`."""
        value = self.pass_on()
        self._frame.reads(values_inside([value]))
        return value


def _discard(frame: Frame, held: "dict[int, tuple[Any, NodeActor]]") -> None:
    for value, actor in held.values():
        _Discarding(frame.root.group, actor, value)


class MemberTask:
    """A task that works beside the workers, as a member of their group; the node keeps a place until its end.

    Args:
        actor: the actor whose place the task holds.
        group: the group.
        frame: the frame that the task works for, whose end cancels it; None if the task goes on after that.

    Attributes: see `Member`.
    """

    __slots__ = ("_actor", "cut", "group", "outside_call", "position", "task")

    _is_pending = False  # whether the frame does not end before the task

    def __init__(self, actor: "NodeActor", group: "WorkerGroup", frame: Frame | None) -> None:
        self.group = group
        self.task: asyncio.Task[None] | None = None
        self.position = Position()
        if frame is not None:
            self.position.frame, self.position.actor = frame, actor
        self.cut: str | None = None
        self.outside_call: OutsideCall | None = None
        self._actor = actor

    def cancel_if_in(self, frame: Frame) -> None:
        """Cancel the task of a frame that has ended."""

    def lose(self) -> None:
        """End a second attempt, whose result is not needed."""

    def _begin(self, work: Coroutine[Any, Any, None], kind: str, context: Context) -> None:
        frame = self.position.frame
        self._actor.limiter.take_over_limit()
        if frame is not None:
            context.run(source.set, self.position)
            if self._is_pending:
                frame.add_pending()
        self.group.joined(self)
        self.task = start_task(self.group.loop, work, context=context, name=f"penstock-{kind} {self._actor.name}")
        # A callback, because a task that is cancelled before its first step does not run a `finally` of its own.
        self.task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        frame = self.position.frame
        self.position.frame = self.task = None
        self._give_back()
        if frame is not None:
            if frame.state in ("failed", "cancelled"):
                frame.leave()
            elif self._is_pending:
                frame.remove_pending()
        self.group.left(self)

    def _give_back(self) -> None:
        self._actor.limiter.release()


class _Discarding(MemberTask):
    """Awaits `discard=` of a node for one result."""

    __slots__ = ()

    def __init__(self, group: "WorkerGroup", actor: "NodeActor", value: Any) -> None:
        super().__init__(actor, group, None)
        actor.counted().abandoned += 1
        self._begin(_discarded(actor.policy.discard, value), "discard", group.context.copy())

    def _ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logs.warning("node.not_discarded", node=self._actor.name, graph=self._actor.graph, error=error)
        super()._ended(task)

    def _give_back(self) -> None:
        self._actor.thread_returned()


async def _discarded(discard: Any, value: Any) -> None:
    done = discard(value)
    if inspect.isawaitable(done):
        await done


def foreign_cancel(cause: BaseException | None, node: str = "") -> NodeCancelledError:
    """Return the error of an item whose handler was cancelled, but not by the engine.

    Args:
        cause: the cancellation.
        node: the name of the node, if its own task was not cancelled.
    """
    told = f"something that node {node!r} awaited was cancelled, but not the node itself"
    if not node:
        why = "something that it awaited was cancelled, or its own task was"
        told = f"the handler was cancelled, but not by the engine: {why}"
    return with_cause(NodeCancelledError(told), cause)


def hand_over(error: BaseException | None) -> None:
    """Let the first item that raises the error of a computation, which belongs to no item, have the object itself."""
    if error is not None and _MARKS in vars(error):
        vars(error)[_MARKS] = _marks_of(error)._replace(item=_NO_ITEM)


def blame(error: BaseException, label: str) -> None:
    """Mark an error with the node that caused it, because another node will raise it; the first mark counts."""
    marks = _marks_of(error)
    if not marks.node:
        vars(error)[_MARKS] = marks._replace(node=label)


def _cut_library(error: BaseException, marks: Marks) -> Marks:
    """Cut entries of the library that stand before an entry of a user; return marks with the whole traceback.

    Args:
        error: the error.
        marks: the marks of the error; the traceback after an earlier cut is the end of the present one.
    """
    entries, traceback = list[TracebackType](), error.__traceback__
    while traceback is not None and traceback is not marks.first_traceback:
        entries.append(traceback)
        traceback = traceback.tb_next
    cut, whole, has_user = traceback, (marks.traceback or traceback) if traceback else None, traceback is not None
    for entry in reversed(entries):
        whole = TracebackType(whole, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        is_ours = entry.tb_frame.f_code.co_filename.startswith((_OURS, LINE_FILE))
        if not (is_ours and has_user):
            cut = TracebackType(cut, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        has_user = has_user or not is_ours
    BaseException.with_traceback(error, cut)
    return marks._replace(traceback=whole)


def cut_line(error: BaseException) -> None:
    """Leave one entry of the engine in the traceback of an error that has passed a line, or a watched coroutine."""
    traceback = error.__traceback__
    following = None if traceback is None else traceback.tb_next
    while following is not None and (
        following.tb_frame.f_code.co_filename == LINE_FILE or following.tb_frame.f_code in LEFT_OUT
    ):
        BaseException.with_traceback(error, following)
        following = following.tb_next
