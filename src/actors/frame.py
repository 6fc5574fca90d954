"""Frame: the activation record of one invocation of a graph."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .._errors import DeadlineExceeded, NodeCancelledError, add_note, copy_of
from ..telemetry import logs
from ..telemetry.spans import FrameSpan
from .stream_buffer import plain_error

if TYPE_CHECKING:
    from .node_actor import NodeActor
    from .stream_buffer import Reader
    from .worker import WorkerGroup

State = Literal["running", "done", "failed", "cancelled"]

_MARK = "__penstock_item__"
_BLAMED = "__penstock_node__"
_identities = itertools.count(1)

# What a terminal frame holds, whoever still refers to it.
NOTHING: list[Any] = []


class Layout(Protocol):
    """What all frames of one plan have in common."""

    name: str
    is_line: bool
    blank: tuple[Any, ...]
    countdown: list[int]
    readers: list[int]
    sinks: int

    def result(self, values: list[Any], /) -> Any:
        """Build the result of the graph from the slots."""
        ...


class AnyDeployment(Protocol):
    """What a frame may belong to: it must not be called from inside one of its own nodes."""

    @property
    def names(self) -> str:
        """The names of its graphs."""
        ...


class Listener(Protocol):
    """Who is told how a frame ended."""

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment that the frame belongs to."""
        ...

    def frame_done(self, frame: "Frame") -> None:
        """The outcome is known; called exactly once. `frame.settled` tells whether handlers are still unwinding."""
        ...

    def frame_settled(self, frame: "Frame") -> None:
        """The last handler that was unwinding when the frame ended has ended; not called if there was none."""
        ...


class Frame:
    """One item on its way through a graph: slots for values, countdowns of missing inputs, and the outcome.

    The outcome is claimed once; the first claim wins, and whatever comes later is discarded.

    Attributes:
        values: one slot for each live value; a slot is emptied when its last reader is done.
        missing: inputs that each step still waits for.
        readers: readers that each slot still has.
        queued_at: an actor in whose inbox, or in the line before it, it is; `queued` and `dequeued` keep it.
        further_queues: the others, if it waits at more than one.
        sinks_left: steps without readers that have not finished; 0 means that all steps have.
        expired: whether its deadline has ended it, or that of its stream.
        unwinding: handlers that still run for it, after it has ended.
        on_result_stream: called with the stream that the graph returns, if that is what it does.
        timer: ends it at its deadline.
        bodies: what stops the bodies that its steps of control flow run now.
        span: what the node executions of it open their spans below; None if it is not sampled.
    """

    # What few frames need has its default in the class: making a frame is a large part of a short item's cost. But what
    # every item reads is assigned, for reading a default through an instance costs five times what assigning it does.
    priority: int
    parent: "Frame | None" = None
    missing: list[int]
    readers: list[int]
    # Two fields, because a frame waits at one actor nearly always, and a list for each would cost as much as a hop.
    queued_at: "NodeActor | None"
    further_queues: "tuple[NodeActor, ...]"
    sinks_left = 1
    result: Any = None
    error: BaseException | None = None
    span: FrameSpan | None = None
    deadline: float | None = None
    expired = False
    _was_told = False
    unwinding: int
    on_result_stream: "Callable[[Reader[Any]], None] | None" = None
    bodies: "tuple[Callable[[], None], ...]" = ()
    _identity: int | None = None
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
        # A `State`; declared as str because checkers believe that no await changes what they compared it with.
        self.state: str = "running"
        self.priority = 0
        self.queued_at = None
        self.further_queues = ()
        self.timer = None
        self.unwinding = 0
        self.values: list[Any] = [*inputs, *layout.blank]
        if not layout.is_line:  # in a line each step has one reader, which takes over its slot: nothing to count
            self.missing = layout.countdown.copy()
            self.readers = layout.readers.copy()
            self.sinks_left = layout.sinks
        if parent is not None:
            self.parent = parent
            self.deadline = parent.deadline

    def body_begun(self, stop: Callable[[], None]) -> None:
        """A step of control flow runs its body; `stop` is called when this frame ends."""
        self.bodies += (stop,)

    def body_ended(self, stop: Callable[[], None]) -> None:
        """It runs no more."""
        self.bodies = tuple(other for other in self.bodies if other != stop)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more."""
        return self.state != "running"

    @property
    def has_expired(self) -> bool:
        """Whether it has ended with `DeadlineExceeded`, for want of time or because a call in a node had none left."""
        return self.expired or isinstance(self.error, DeadlineExceeded)

    @property
    def identity(self) -> int:
        """A number that stands for this frame alone and keeps nothing of it alive."""
        if self._identity is None:
            self._identity = next(_identities)
        return self._identity

    @property
    def settled(self) -> bool:
        """Whether it has ended and nothing runs for it any more."""
        return self.state != "running" and not self.unwinding

    def lineage(self) -> "Iterator[Frame]":
        """Yield this frame, and those that it is part of, from the inside out."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    @property
    def root(self) -> "Frame":
        """The outermost frame that this one is part of."""
        *_, outermost = self.lineage()
        return outermost

    def expire_at(self, deadline: float, timeout_seconds: float) -> None:
        """Fail the frame at `deadline` (in the loop's time) with `DeadlineExceeded`, unless it ends before."""
        if self.deadline is None or deadline < self.deadline:
            self.deadline = deadline
        if deadline <= self.group.loop.time():
            self._expire(timeout_seconds)
        else:
            self.timer = self.group.loop.call_at(deadline, self._expire, timeout_seconds)

    def expire_with_parent(self) -> None:
        """Fail the frame at the deadline of the one around it, too: nobody cancels a call that is made beside it."""
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

    def queues(self) -> "list[NodeActor]":
        """Return the actors in whose inbox, or in the line before it, the frame is."""
        return [] if self.queued_at is None else [self.queued_at, *self.further_queues]

    def queued(self, actor: "NodeActor") -> None:
        """The frame waits at an actor now."""
        if self.queued_at is None:
            self.queued_at = actor
        else:
            self.further_queues = (*self.further_queues, actor)

    def dequeued(self, actor: "NodeActor") -> bool:
        """The frame waits there no more; returns whether it did."""
        further = self.further_queues
        if self.queued_at is actor:
            self.queued_at = further[0] if further else None
            if further:
                self.further_queues = further[1:]
            return True
        if actor not in further:
            return False
        self.further_queues = tuple(other for other in further if other is not actor)
        return True

    def release(self, slot: int) -> None:
        """One reader of `slot` is done; the last one empties it."""
        self.readers[slot] -= 1
        if not self.readers[slot]:
            self.values[slot] = None

    def input_came(self, actor: "NodeActor") -> bool:
        """A step has one input more; returns whether it has all of them now."""
        self.missing[actor.index] -= 1
        return not self.missing[actor.index]

    def hold(self) -> None:
        """Do not end before `let_go`: something beside the steps is going on, such as an open stream."""
        self.sinks_left += 1

    def let_go(self) -> None:
        """It has ended; so has the frame, if this was the last thing that went on."""
        if self.state == "running":
            self.sinks_left -= 1
            if not self.sinks_left:
                self.finish()

    def finish(self) -> None:
        """All steps are done: build the result and claim the outcome "done"."""
        try:
            result = self.layout.result(self.values)
        except BaseException as error:  # noqa: BLE001 - of user code: attribute access and item access on a result
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
        """Claim the outcome "failed", and cancel what else runs for this frame; a later failure is only logged."""
        if self.state != "running":
            if not isinstance(error, asyncio.CancelledError):
                logs.warning(
                    "frame.late_failure", graph=self.layout.name, node=actor.label(error) if actor else None,
                    item=self.item, error=repr(error),
                )  # fmt: skip
            return
        self.expired = actor is None and isinstance(error, DeadlineExceeded)
        self.error = error if actor is None else self.annotated(error, actor, attempt)
        self._end("failed")

    def cancel(self, *, expired: bool = False) -> None:
        """Claim the outcome "cancelled": leave every queue at once, and cancel what runs.

        Args:
            expired: whether that is because its stream has no time left.
        """
        if self.state == "running":
            self.expired = expired
            self._end("cancelled")

    def outcome(self) -> Any:
        """Return the result, or raise what ended the frame."""
        if self.state == "done":
            return self.result
        if self.error is not None:
            try:
                raise self.error
            finally:
                # The traceback of the error refers to this very call; without this the frame would keep itself alive.
                # Handlers that unwind keep it anyway, and how it has ended is counted after them.
                self._was_told = True
                if not self.unwinding:
                    self.error = None
        raise asyncio.CancelledError(f"item {self.item} of graph {self.layout.name!r} was cancelled")

    def leave(self) -> None:
        """A worker that was in this frame when it ended has unwound."""
        self.unwinding -= 1
        if not self.unwinding:
            self.listener.frame_settled(self)
            if self._was_told:
                self.error = None

    def _end(self, state: State) -> None:
        self.state = state
        self.values.clear()  # workers that are still unwinding hold the same list
        if self.timer is not None:
            self.timer.cancel()
        for actor in self.queues():
            actor.withdraw(self)
        self.unwinding = self.group.cancel_workers(self)
        for stop in self.bodies:  # at once: before its worker has unwound, others could begin more of a body
            stop()
        self.listener.frame_done(self)

    def annotated(self, error: BaseException, actor: "NodeActor", attempt: int) -> BaseException:
        """Add a note with graph, node, item and attempt, once per item.

        A node may raise one and the same object for many items: the second gets a copy.
        """
        error = plain_error(error, f"node {actor.label(error)!r}")
        label = getattr(error, _BLAMED, None) or actor.label(error)
        where = f"in node {label!r} of graph {self.layout.name!r}, item {self.item}, attempt {attempt}"
        root = self.root
        owner, first_traceback, added = getattr(error, _MARK, (None, None, ()))
        is_copy = owner is not None and owner != root.identity and isinstance(error, Exception)
        if is_copy:
            # Each raise has put its frames, and so its item's values, before those of the items before.
            error.__traceback__ = first_traceback
            error = copy_of(error)
        try:
            if is_copy:
                error.__notes__ = [note for note in getattr(error, "__notes__", ()) if note not in added]
                added = ()
            elif error.__traceback__ is not None:
                # The first entry is the engine's own. It would show the user nothing, and keep a worker alive.
                error.__traceback__ = error.__traceback__.tb_next
            error.add_note(where)
            setattr(error, _MARK, (root.identity, error.__traceback__, (*added, where)))
        except Exception:  # noqa: BLE001 - an exception that refuses attributes goes without
            pass
        return error


def foreign_cancel(cause: BaseException | None) -> NodeCancelledError:
    """Return the error of an item that was cancelled by nobody who may."""
    error = NodeCancelledError(
        "the handler was cancelled, but not by the engine: something that it awaited was cancelled, or its own task was"
    )
    error.__cause__ = cause
    return error


def blame(error: BaseException, label: str) -> None:
    """Say in which node of a frame an error was caused that another one will raise; the first to say it is right."""
    if not hasattr(error, _BLAMED):
        setattr(error, _BLAMED, label)
