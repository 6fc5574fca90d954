"""Execution of steps: attempts of an item, the part of an execution at one call site, and steps without a worker."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

from .._errors import DeadlineExceeded, Interrupted, NodeCancelledError, NotFinished, Overloaded
from ..telemetry import names
from ..telemetry.counters import Figure
from ..telemetry.spans import FrameSpan, NodeSpan, WorkerTraces, note_on_span, of_every_execution
from .chains import WATCHED, Link, watched
from .current import Handling, ItemInfo
from .frame import LEFT_OUT, Frame, Interruption, foreign_cancel
from .own_loops import Mailbox, Request
from .supervision import Child

if TYPE_CHECKING:
    from ..telemetry.counters import CacheStatistics
    from .current import Position
    from .node_actor import NodeActor
    from .stream_buffer import Reader
    from .worker import Member, Worker


Outcome = Literal["done", "failed", "cancelled", "expired", "interrupted", "refused"]
"""How a call, a stream or a node execution has ended; the value of an attribute of its span."""


def outcome_of(state: str, error: BaseException | None) -> Outcome:
    """Return the outcome of a call, from the state of its frame, or from the error of a call without a frame."""
    if isinstance(error, DeadlineExceeded):
        return "expired"
    if isinstance(error, Overloaded):
        return "refused"
    if isinstance(error, Interrupted | Interruption):
        return "interrupted"
    if state == "done" and error is None:
        return "done"
    was_cancelled = state == "cancelled" or isinstance(error, asyncio.CancelledError | NotFinished)
    return "cancelled" if was_cancelled else "failed"


class TracedExecution(NodeSpan):
    """The span of a node execution of a sampled frame, which ends with its outcome.

    Args:
        parent: the span of the frame.
        frame: the frame.
        actor: the actor.

    Attributes:
        was_cancelled: whether the execution was cancelled although it raised no error.
    """

    __slots__ = ("_actor", "_frame", "_parent", "was_cancelled")

    def __init__(self, parent: FrameSpan, frame: Frame, actor: "NodeActor") -> None:
        self._parent = parent
        self._frame = frame
        self._actor = actor
        self.was_cancelled = False
        alike = actor.counts.span_attributes
        if alike is None:
            function = actor.bound._links[0].fn if actor.bound._links else actor.fn
            alike = actor.counted().span_attributes = of_every_execution(actor.name, function, actor.policy.model)
        NodeSpan.__init__(self, parent, actor.name, alike, frame.item, actor.index)

    def __enter__(self) -> "TracedExecution":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None and not self.was_cancelled:
            tell_consumers(self._parent, self._actor)
            self.end("done")
        elif isinstance(error, Interrupted | Interruption):
            self.end("interrupted")
        elif isinstance(error, Exception):
            self.end("failed", error)
        elif self._frame.expired:
            self.end("expired", DeadlineExceeded("its call did not finish in time"))
        elif error is None or isinstance(error, asyncio.CancelledError):
            self.end("cancelled")
        else:  # KeyboardInterrupt and the like
            self.end("failed", error)


def tell_consumers(parent: FrameSpan, actor: "NodeActor") -> None:
    """Note the time at which the readers of a value get it; their spans show how long they waited since then."""
    parent.completed([consumer.index for consumer in actor.consumers])


class Requeued(BaseException):
    """Ends an execution before its handler has begun: the frame is in the inbox of the actor again."""


# How a worker runs the handler. INLINE and ASYNC are the hot path, for plain functions and `async def` without a
# policy: `invoke` runs this many first executions, and watches each; then the worker calls the handler itself. All
# other actors are GENERAL: `invoke` runs every execution.
INLINE: Final = 1
ASYNC: Final = WATCHED
GENERAL: Final = 1 << 62


# Why the engine cuts a handler short; the message of its `CancelledError`.
STOPPED: Final = "penstock: the item or the stream has ended"
RESTARTED: Final = "penstock: the instance is restarted"
LOST: Final = "penstock: the other attempt has a result"  # work that cannot be interrupted may go on
# The task runs a handler of a body inside of another handler. Both are cut short, by the one cancellation that the
# inner handler unwinds from now.
PASSED_ON: Final = "penstock: the handler around the body is cut short as well"


def cut_short(member: "Member", reason: str) -> None:
    """Cancel a handler, unless it was cancelled before, also by its timeout: nothing cuts its cleanup short.

    Args:
        member: the member whose task runs the handler; its `cut` gets the reason.
        reason: STOPPED, which replaces an earlier reason, or a reason to end only the present attempt.
    """
    if member.task is None:
        return
    if member.cut is None and not _has_timed_out(member.position):
        inner = member.position.inner
        while inner is not None and inner.cut is None and not _has_timed_out(inner):
            inner = inner.inner
        if inner is not None:
            inner.cut = PASSED_ON
        else:
            member.task.cancel(reason)
        if (timeout := member.position.timeout) is not None:
            timeout.reschedule(None)
    if member.cut is None or (reason is STOPPED and member.cut is not PASSED_ON):
        member.cut = reason


def _has_timed_out(position: "Position") -> bool:
    return position.timeout is not None and position.timeout.expired()


def undo_cut(member: "Member", undisturbed: int) -> bool:
    """Undo `cut_short` when the handler has ended; return whether its task was cancelled otherwise as well.

    Args:
        member: the member.
        undisturbed: the value of `cancelling()` of the task before the handler began.
    """
    task = member.task
    assert task is not None
    if member.cut is not None and member.cut is not PASSED_ON and task.cancelling() > undisturbed:
        task.uncancel()  # unless the handler has called it itself
    member.cut = None
    return task.cancelling() > undisturbed


async def end_calls(position: "Position") -> None:
    """End the calls that a handler has begun with `penstock.call` and not awaited; the handler has ended."""
    calls, position.calls = position.calls, None
    if calls is not None:
        await calls.end()


async def invoke_plain(worker: "Worker", actor: "NodeActor", frame: Frame) -> Any:
    """Run an `async def` node without a policy like the worker itself, in a span or timed for a profile."""
    args, kwargs = actor.arguments(frame.values)
    parent, task, sampler = frame.span, worker.task, actor.sampler
    assert task is not None
    undisturbed = task.cancelling()
    began = 0.0 if sampler is None else perf_counter()
    try:
        work = actor.fn(*args, **kwargs)
        if actor.completed < WATCHED:
            work = watched(actor.watch, work) if work.__class__ is CoroutineType else work
        if parent is None:
            return await work
        with TracedExecution(parent, frame, actor) as execution:
            try:
                value = await work
            except asyncio.CancelledError as error:
                if task.cancelling() > undisturbed:
                    raise
                raise foreign_cancel(error) from error
            if execution.calls_model:
                execution.returned(value)
            return value
    finally:
        if sampler is not None:
            sampler.add(began, perf_counter(), frame, worker.group.loop)
        if worker.calls is not None:
            await end_calls(worker)


LEFT_OUT.add(invoke_plain.__code__)


class Attempt:
    """An attempt of an item in one step; the execution gets this object for each attempt.

    Attributes:
        args: the positional arguments of the node.
        kwargs: the keyword arguments of the node.
    """

    __slots__ = (
        "_actor", "_began", "_frame", "_given", "_member", "_position", "_readers", "_undisturbed", "args",
        "kwargs",
    )  # fmt: skip

    def __init__(
        self,
        member: "Member",
        actor: "NodeActor",
        frame: Frame,
        readers: "Sequence[Reader[Any]]" = (),
        given: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        task, values = member.task, frame.values
        assert task is not None
        if given is not None:
            self.args, self.kwargs = given
        else:  # as `NodeActor.arguments`
            self.args = (values[actor.slot],) if actor.slot >= 0 else actor.args_of(values)
            self.kwargs = {} if actor.kwargs_of is None else actor.kwargs_of(values)
        self._member = member  # the worker, or the task of a generator or of a second attempt
        self._position = member.position
        self._actor = actor  # the call site
        self._frame = frame
        self._undisturbed = task.cancelling()  # before the first attempt
        # when the first attempt began; when this attempt was given to its execution
        self._began = self._given = perf_counter()
        self._readers = readers  # the readers of the streams that the step reads
        self._position.attempt = 1

    @property
    def info(self) -> ItemInfo:
        """The item, the node and the attempt, as `penstock.current()` returns them; the object pickles."""
        return Handling(self._position, self._frame, self._actor).info()

    @property
    def deadline(self) -> float | None:
        """When the call and the attempt must have ended, on the clock of the event loop; None without a deadline."""
        found = [at for at in (self._frame.deadline, self._position.attempt_deadline) if at is not None]
        return min(found, default=None)

    @property
    def is_cancelled(self) -> bool:
        """Whether the item has ended, so that no caller waits for the result; the task of the attempt is cancelled."""
        return self._frame.cancelled

    @property
    def is_lost(self) -> bool:
        """Whether the task is cancelled because the other attempt of a hedge has a result: the work may go on."""
        return self._member.cut is LOST

    @property
    def priority(self) -> int:
        """The priority of the call: calls of a higher priority begin earlier."""
        return self._frame.priority

    @property
    def log_fields(self) -> dict[str, object]:
        """The fields for log records of the work: graph, node, item and attempt."""
        return {
            "graph": self._actor.graph, "node": self._actor.label(), "item": self._frame.item,
            "attempt": self._member.position.attempt,
        }  # fmt: skip

    @property
    def waited_seconds(self) -> float:
        """How long the item has waited for the beginning of its work, in all attempts: this time is no busy time."""
        return self._member.position.waited_seconds

    @waited_seconds.setter
    def waited_seconds(self, seconds: float) -> None:
        self._member.position.waited_seconds = seconds

    def trace_context(self) -> dict[str, str]:
        """Return the headers that make spans in another process a part of the trace; empty if it is not sampled."""
        return {} if self._frame.span is None else WorkerTraces.headers()

    def begun(self, waited_seconds: float | None = None) -> None:
        """Note that the work has begun now: the timeout and the busy seconds count from this moment.

        Args:
            waited_seconds: how long the item has waited for the beginning, with earlier attempts; None for the time
                since `Bound.run` got the attempt.
        """
        if waited_seconds is None:
            waited_seconds = self._position.waited_seconds + perf_counter() - self._given
        position, seconds = self._position, self._actor.policy.timeout_seconds
        timer = position.timeout
        position.waited_seconds = waited_seconds
        if timer is not None and seconds is not None and self._member.cut is None:
            position.attempt_deadline = self._member.group.loop.time() + seconds
            timer.reschedule(position.attempt_deadline)

    def ran_on(self, machine: str, worker: str) -> None:
        """Note where the work runs, as attributes of its span.

        Args:
            machine: the name of the machine.
            worker: the name of the process on the machine.
        """
        if self._frame.span is not None:
            note_on_span({names.MACHINE: machine, names.WORKER: worker})

    def keeps_place_until(self, done: "OutsideCall | asyncio.Future[Any]") -> None:
        """Let the node keep the place of this item until work outside of the loop has ended.

        Args:
            done: a future that is done when the work has ended, even if the attempt ended before.
        """
        self._member.outside_call = OutsideFuture(done) if isinstance(done, asyncio.Future) else done


# Runs one layer of the policy of a step, and the layers inside of it.
Run = Callable[[Attempt], Awaitable[Any]]
# Puts a further layer around one attempt.
Around = Callable[[Run], Run]


class Bound:
    """The part of an execution that belongs to one call site of a node, in one scope; one class for each execution."""

    __slots__ = ("_emits", "_instance", "_links", "_spans_others")

    begins_later: bool = False
    """Whether `run` calls `Attempt.begun` when the work begins: then a timeout counts from this moment."""

    can_emit: ClassVar[bool] = False
    """Whether handlers may call `penstock.emit`: then `run` and `open` pass the events on."""

    _waits_for: ClassVar[str] = names.WORKER_WAIT  # says in spans how long items have waited for their beginning

    _goes_on: ClassVar = False  # whether the handler goes on after `run`, as a generator does

    _most_begun: int = sys.maxsize  # the most items of a stream to begin at a time: further items would wait here

    def __init__(self, instance: Child | None = None) -> None:
        self._instance = instance  # for a stateful node: the child of the supervisor of the scope
        self._links: tuple[Link, ...] = ()  # the plain functions of a chain
        self._emits = False  # whether the handler may call `penstock.emit`
        # whether the node gives or reads a stream: then its time includes the time of other nodes
        self._spans_others = False

    def run(self, attempt: Attempt) -> Awaitable[Any]:
        """Run one attempt, and return its result. The task is cancelled when the attempt has to end."""
        raise NotImplementedError

    def open(self, attempt: Attempt) -> AsyncIterator[Any]:
        """Open the stream of a node that gives a stream: return its values; `aclose` closes the iterator."""
        raise NotImplementedError

    def _begin(
        self, actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "DetachedStep | None":
        """Begin one execution without a worker. Its end settles the step, in a later turn of the loop.

        Returns:
            The step; None if the step needs a worker, because it has to await something first.
        """
        return None

    def figures(self) -> Sequence[Figure]:
        """Return further figures, which statistics, metrics, `top` and verdicts show, summed over call sites."""
        return ()

    def held_bytes(self) -> int:
        """Return how many bytes of items and results this object holds; `engine.memory` adds them up."""
        return 0

    @property
    def _inbox(self) -> Mailbox[Any] | None:
        """The inbox of the loop that the node owns; None if the node owns no loop."""
        return None

    @property
    def _is_stopped(self) -> bool:
        """Whether the instance, or the loop, has ended and is not restarted, so that further attempts would fail."""
        return self._instance is not None and self._instance.is_stopped

    def _cache_statistics(self) -> "CacheStatistics | None":
        """Return a snapshot of the counters of the cache; None without a cache."""
        return None


class OutsideCall(Protocol):
    """Work outside of the event loop, which may go on after its attempt has ended, since it cannot be cancelled."""

    def abandon(self) -> bool:
        """Note that the attempt has ended; return whether the work still runs."""
        ...

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the work has ended."""
        ...


class OutsideFuture:
    """Work outside of the loop that a future stands for."""

    __slots__ = ("_done",)

    def __init__(self, done: "asyncio.Future[Any]") -> None:
        self._done = done

    def abandon(self) -> bool:
        """Return whether the work still goes on."""
        return not self._done.done()

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the work has ended."""
        self._done.add_done_callback(lambda _: callback())


def count_execution(actor: "NodeActor", began: float, frame: Frame, position: "Position | None" = None) -> None:
    """Count an execution that ends now, also in a profile that is being taken. Time that it waited does not count."""
    ended = perf_counter()
    if position is not None and position.waited_seconds:
        began += position.waited_seconds
        if frame.span is not None:
            note_on_span({actor.bound._waits_for: position.waited_seconds})
        position.waited_seconds = 0.0
    actor.busy_seconds += ended - began
    if actor.sampler is not None:
        actor.sampler.add(began, ended, frame, frame.group.loop)


async def outside_call_ended(worker: "Member") -> None:
    """Wait until the last call of a worker in a thread has ended; the call may go on after its attempt."""
    call = worker.outside_call
    if call is not None and call.abandon():
        waiter = worker.group.loop.create_future()
        call.then(lambda: None if waiter.done() else waiter.set_result(None))
        await waiter


def leave_outside_call(worker: "Member", actor: "NodeActor", frame: Frame) -> None:
    """Abandon a thread, or a process, that still runs; see `abandon`."""
    call, worker.outside_call = worker.outside_call, None
    if call is not None:
        abandon(call, actor, frame)


def abandon(call: OutsideCall, actor: "NodeActor", frame: Frame) -> None:
    """Stop waiting for a call. A call that still runs keeps a place of the node until it has ended."""
    if call.abandon():
        actor.limiter.take_over_limit()
        actor.counted().abandoned += 1
        call.then(actor.thread_returned)
        frame.leaves_running(call)


# DetachedStep: the first step of a frame, if the step runs outside of the loop, such as on a device; it needs no
# worker.
#
# A worker would only hand the step over and wait for the result, and the task of the worker would cost more than all
# other work of such a call on the loop. Instead, the arrival of the result carries the frame on: to its end, or to a
# worker for the steps that follow.


def begin_detached(actor: "NodeActor", frame: Frame) -> bool:
    """Begin the first step of a frame without a worker. Return False if it needs a worker, or no place is free."""
    begin, limiter = actor.begin, actor.limiter
    if begin is None or limiter.free <= 0:
        return False
    limiter.free -= 1
    try:
        step = begin(actor, frame, *actor.arguments(frame.values))
    except BaseException as error:  # noqa: BLE001 - any exception is the outcome of its item
        step = frame.detached or DetachedRequest(actor, frame)  # the step that has begun, if any
        step.fail_soon(error)
    if step is None:
        frame.detached = None
        limiter.release()
        return False
    return True


STEP_SLOTS: Final = ("_actor", "_began", "_frame", "_is_left", "_is_over")
_NO_SLOTS: Final[tuple[str, ...]] = ()  # for a class that may be the second base of another class


class DetachedStep:
    """The first step of a frame, while it runs outside of the loop.

    The class has the methods that set the result of a future. The call that runs the step is a subclass, with
    `STEP_SLOTS`: so step and call are one object.

    Attributes:
        returned: whether the execution has ended.
    """

    __slots__ = _NO_SLOTS

    returned: bool
    _actor: "NodeActor"
    _began: float
    _frame: Frame | None
    _is_left: bool
    _is_over: bool

    def step_begins(self, actor: "NodeActor", frame: Frame) -> None:
        """Set the attributes of the step, and register it with its frame. Call this once, before anything else."""
        self._actor = actor
        self._frame = frame
        self._began = perf_counter()
        self._is_over = self._is_left = False
        frame.detached = self

    def withdraw(self) -> None:
        """Skip the execution if it has not begun: the caller has left."""
        raise NotImplementedError

    def abandon(self) -> bool:
        """Note that the caller has left; return whether the execution still runs. See `OutsideCall`."""
        raise NotImplementedError

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the execution has ended. See `OutsideCall`."""
        raise NotImplementedError

    def leave(self) -> None:
        """Give the step up: its frame has ended."""
        self._is_over = self._is_left = True
        self.withdraw()
        self._over()
        self._actor.limiter.release()

    def cancel(self) -> bool:
        """Fail the frame: the step will not run. Return False if the step has ended already."""
        if self._is_over:
            return False
        self.set_exception(NodeCancelledError(f"the device of node {self._actor.name!r} has given up its call"))
        return True

    def set_result(self, value: Any) -> None:
        """Carry the frame on, unless it has ended: to its end, or to a worker for the steps that follow."""
        if self._is_over:
            return
        actor = self._actor
        frame = self._over()
        actor.completed += 1
        if actor.ends_line:
            actor.limiter.release()
            frame.end_with(value)
            return
        frame.values[actor.out] = value
        for slot in actor.reads:
            frame.release(slot)
        # The worker gives the place back when it has found room for the frame: until then, the node stands still.
        if actor.successor is not None:
            frame.group.start_worker(frame, (actor.successor,), actor)
        elif actor.consumers:
            # The frame began with this step alone, so at least one of the next steps has all of its inputs now.
            complete = tuple([consumer for consumer in actor.consumers if frame.input_came(consumer)])
            frame.group.start_worker(frame, complete, actor)
        else:
            actor.limiter.release()
            frame.remove_pending()

    def fail_soon(self, error: BaseException) -> None:
        """Fail the frame in a later turn of the loop, unless it has ended by then."""
        assert self._frame is not None
        # Later: if calls failed at once, a caller that makes many calls would keep the loop from other tasks.
        self._frame.group.loop.call_soon(self.set_exception, error)

    def set_exception(self, error: BaseException) -> None:
        """Fail the frame, unless it has ended."""
        if not self._is_over:
            actor, frame = self._actor, self._over()
            actor.failed += 1
            frame.fail(foreign_cancel(error) if isinstance(error, asyncio.CancelledError) else error, actor)
            actor.limiter.release()

    def _over(self) -> Frame:
        actor, frame = self._actor, self._frame
        assert frame is not None
        self._is_over = True
        self._frame = None  # the call may still hold the step, and must not keep the frame alive
        frame.detached = None
        if not self.returned:
            abandon(self, actor, frame)
        count_execution(actor, self._began, frame)
        return frame


class DetachedRequest(DetachedStep):
    """A step in an actor that owns its loop; or a step that could not begin."""

    __slots__ = (*STEP_SLOTS, "request")

    returned = True  # the actor runs on the loop

    def __init__(self, actor: "NodeActor", frame: Frame) -> None:
        self.step_begins(actor, frame)
        self.request: Request[Any, Any] | None = None

    def withdraw(self) -> None:
        """Cancel the request."""
        if self.request is not None:
            self.request.cancel()
            if self.request.abandon() and self._frame is not None:
                self._frame.leaves_running(self.request)

    def _over(self) -> Frame:
        self.request = None  # the request refers to this step
        return super()._over()
