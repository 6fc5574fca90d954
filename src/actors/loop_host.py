"""Loop host: runs an actor that owns its loop for one scope, restarts the actor, and gives items to it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Iterable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Self,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
    get_args,
    get_origin,
    overload,
)

from .._errors import (
    ActorRestarted,
    ActorStopped,
    ChannelClosed,
    InboxClosed,
    PenstockError,
    with_cause,
)
from ..telemetry import logs, spans
from ..telemetry.counters import Figure
from . import current
from .accepted import OptionRule, check
from .execution import RESTARTED, cut_short, undo_cut
from .own_loops import AnyRequest, Inbox, Mailbox, Request, StreamRequest, StreamWork, Work, waits_of
from .stream_buffer import DEFAULT_CAPACITY, StreamBuffer
from .supervision import Child, RestartMode, Supervisor, SupervisorFlags
from .tasks import Condition, ContextTask, no_item

if TYPE_CHECKING:
    from .worker import Member


# A slot for `engine/interception.py`: called with the name of a stateful node before it is entered.
fault_at_start: Callable[[str], Awaitable[None]] | None = None


class RestartGate:
    """The gate that attempts pass to an instance: open, held while the instance is restarted, or stopped for good.

    An attempt that finds the gate held waits in line, and its item keeps its place in the node. So later items wait in
    the inbox, as always, and no other part of the engine needs to know about the gate.

    Args:
        name: the name of the node, for errors.
        restart_on: the exceptions of an attempt after which the instance is broken.
        on_crash: called with such an exception, once the attempt has left.
    """

    def __init__(
        self, name: str, restart_on: tuple[type[Exception], ...], on_crash: Callable[[Exception], None]
    ) -> None:
        self._name = name
        self._restart_on = restart_on
        self._on_crash = on_crash
        self._state: Literal["open", "held", "stopped"] = "held"
        self._cause: BaseException | None = None  # the exception that ended the instance
        self._why: str | None = None
        self._inside: dict[Member, None] = {}
        self._line = asyncio.Lock()  # the first attempt in line holds it, and waits for a change
        self._waiting = 0  # how many attempts are in line
        self._threads = 0  # how many threads run on although their attempts have ended
        self._changed = Condition()

    @property
    def is_stopped(self) -> bool:
        """Whether the gate is stopped for good."""
        return self._state == "stopped"

    def open(self) -> None:
        """Let attempts in. The first attempt in line enters, and lets the next attempt in."""
        self._state = "open"
        self._cause = None  # its traceback may refer to the instance before
        self._changed.notify_all()

    def hold(self) -> None:
        """Let attempts wait from now on; attempts inside go on."""
        self._state = "held"

    def stop(self, cause: BaseException | None, why: str | None = None) -> None:
        """Refuse attempts with `ActorStopped` from now on, unless the gate is opened again.

        Args:
            cause: the exception that ended the instance.
            why: the reason, for the error; None if the instance has crashed by itself.
        """
        self._state = "stopped"
        self._cause = cause
        self._why = why
        self._changed.notify_all()

    async def clear(self, cause: BaseException | None) -> None:
        """End the attempts inside with `ActorRestarted` or `ActorStopped`; wait until they and threads have left."""
        if self._state != "stopped":
            self._cause = cause
        for member in self._inside:
            cut_short(member, RESTARTED)
        await self._changed.wait_for(lambda: not self._inside and not self._threads)

    async def enter(self, member: "Member") -> None:
        """Wait until the gate is open, and until earlier attempts have entered.

        Args:
            member: the member whose task runs the attempt.

        Raises:
            ActorStopped: the gate is stopped for good.
        """
        if self._state == "held" or self._waiting:
            self._waiting += 1
            try:
                async with self._line:
                    await self._changed.wait_for(lambda: self._state != "held")
            finally:
                self._waiting -= 1
        if self._state == "stopped":
            raise self._stopped_error()
        self._inside[member] = None

    def leave(self, member: "Member", error: BaseException | None) -> None:
        """Note that an attempt has ended with `error`; its thread may still run."""
        del self._inside[member]
        call = member.outside_call
        if call is not None and call.abandon():
            self._threads += 1
            call.then(self._thread_returned)
        self._changed.notify_all()
        if isinstance(error, self._restart_on):
            self._on_crash(error)

    def error(self) -> PenstockError:
        """Return the error of an attempt that the gate has ended."""
        if self._state == "stopped":
            return self._stopped_error()
        told = f"node {self._name!r} was restarted while it worked on this item, after: {logs.shown(self._cause)}"
        return with_cause(ActorRestarted(told), self._cause)

    def _stopped_error(self) -> ActorStopped:
        why = self._why or f"it is not restarted after: {logs.shown(self._cause)}"
        return with_cause(ActorStopped(f"node {self._name!r} takes no more items: {why}"), self._cause)

    def _thread_returned(self) -> None:
        self._threads -= 1
        self._changed.notify_all()


class GatedAttempt:
    """One attempt inside an instance: an async context manager, entered and left by the task that runs it."""

    __slots__ = ("_gate", "_member", "_undisturbed")

    def __init__(self, gate: RestartGate, member: "Member") -> None:
        self._gate = gate
        self._member = member
        self._undisturbed = 0

    async def __aenter__(self) -> None:
        assert self._member.task is not None
        self._undisturbed = self._member.task.cancelling()
        await self._gate.enter(self._member)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._gate.leave(self._member, error)
        if self._member.cut is not RESTARTED:  # also if the item has ended meanwhile, which takes precedence
            return
        was_cancelled = undo_cut(self._member, self._undisturbed)
        if not was_cancelled and isinstance(error, Exception | asyncio.CancelledError | None):
            raise self._gate.error()  # even if the handler has returned a result


# The default of OTP for workers. A loop that still runs this long after the end of its inbox waits for something else.
SHUTDOWN_SECONDS = 5.0


class LoopHost(Child):
    """Runs an actor that owns its loop, as a child of a supervisor.

    The actor has its own task, which enters the instance, runs the loop, and leaves the instance. If the loop ends
    before its inbox was closed, that is a crash. Its inbox also takes work while no loop runs.

    Args:
        make: makes the instance whose loop runs.
        name: the name of the node, for errors.
        restart: the restart mode.
        supervisor: the supervisor.
        capacity: the most items that wait in the inbox.
        max_bytes: the most bytes of values that wait in the inbox, counted for values that know their size.
        shutdown_seconds: for how many seconds the loop may go on after its inbox was closed, before it is cancelled.

    Attributes:
        gate: None, because the inbox holds work back during a restart.
        inbox: the work that waits for the loop.
        told: the figures that the instance has reported, by name.
    """

    gate: RestartGate | None = None

    def __init__(
        self,
        make: "Callable[[], OwnsLoop]",
        name: str,
        restart: RestartMode,
        supervisor: Supervisor,
        *,
        capacity: int | None = None,
        max_bytes: int | None = None,
        shutdown_seconds: float | None = None,
    ) -> None:
        super().__init__(name, restart, supervisor)
        self.inbox: Mailbox[Any] = Mailbox(capacity or DEFAULT_CAPACITY, max_bytes=max_bytes)
        self.told: dict[str, float] = {}
        # further figures of its function, if the function runs elsewhere
        self.figures: Callable[[], Iterable[Figure]] = tuple
        self._make = make
        self._shutdown_seconds = SHUTDOWN_SECONDS if shutdown_seconds is None else shutdown_seconds
        self._unsettled: dict[AnyRequest[Any], None] = {}  # in the order in which the work came
        self._why = "its scope ends"
        self._cause: BaseException | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the loop has ended and is not restarted, so that further attempts would fail."""
        return self.inbox.channel.closed

    async def start(self) -> None:
        """Make an instance, enter it, and begin its loop. After an end of the loop, the new loop continues the inbox.

        Raises:
            Exception: the error of `__init__` or `__aenter__` of the instance.
        """
        if fault_at_start is not None:
            await fault_at_start(self.name)
        self.inbox.reopen()  # in case the loop was stopped or abandoned before
        try:
            await self._enter(ContextTask(self._entered(), f"penstock-loop-{self.name}", work=self._loop))
        except asyncio.CancelledError as error:
            # Another restart cancels this start. The loop may just have begun, and have taken work already.
            self._fail_taken(error)
            raise

    async def stop(self, cause: BaseException | None) -> None:
        """Cancel the loop, and fail the work that it has taken; the inbox keeps the work that it has not taken."""
        self.inbox.suspend()  # tasks of the loop must take no more work before the cancellation reaches them
        self._fail_taken(cause)
        try:
            await self._leave(cause)
        finally:  # once more, because a task of the loop may have taken work in the meantime
            self._fail_taken(cause)

    async def close(self) -> None:
        """Close the inbox, and wait until the loop has done the queued work and has ended.

        `inbox.get()` raises `InboxClosed` after the last work. A loop that goes on is cancelled after
        `shutdown_seconds`; the exit of the instance has no time limit.

        Raises:
            Exception: the error that the loop, or the exit of the instance, raised meanwhile.
        """
        self._is_up = False
        self.inbox.channel.close()
        context_task = self._context_task
        if context_task is None:
            return
        either: list[asyncio.Future[Any]] = [context_task.task, context_task.closing]
        seconds = self._shutdown_seconds
        try:
            done, _ = await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                logs.warning(
                    "actor.shutdown_timeout", node=self.name, seconds=seconds,
                    remedy="let InboxClosed end the loop, and wait only for the inbox while there is no work; or give "
                    "the loop more time: @node(shutdown_seconds=...)",
                )  # fmt: skip
        finally:
            try:
                await self._leave(None)
            finally:
                self.abandon(context_task.error, self._why if context_task.error is None else None)

    async def run(
        self,
        value: Any,
        priority: int = 0,
        deadline: float | None = None,
        key: Hashable = None,
        on_left: Callable[[AnyRequest[Any]], None] | None = None,
    ) -> Any:
        """Let the actor handle one item; return the result.

        Args:
            value: the argument of the call.
            priority: the priority of the call; higher first.
            deadline: the deadline of the call, in the loop's time; None without one.
            key: the key of the call; None without one.
            on_left: called if the caller leaves while a batch has the item; may be None.

        Raises:
            Exception: the error with which the actor failed the item.
            ActorStopped: the loop has ended.
        """
        work: Request[Any, Any] = Request(value, priority, deadline, key)
        try:
            await self.submit(work)
            return await work.outcome
        finally:
            work.cancel()
            if on_left is not None and work.abandon():
                on_left(work)
            del work  # breaks a cycle: an error refers to this call, and the work to the error

    async def submit(self, work: AnyRequest[Any]) -> None:
        """Put work into the inbox, waiting for room, and keep the work until it is settled.

        If this raises, the caller has to cancel the work.

        Raises:
            ActorStopped: the loop has ended.
        """
        self._unsettled[work] = None
        work.wait = spans.waiting()  # a sampled item comes this way, and never by `submit_nowait`
        work.on_over = self._forget if work.wait is None else self._forget_sampled
        try:
            await self.inbox.channel.put(work, work.priority)
        except ChannelClosed:
            raise self._stopped_error() from self._cause

    def submit_nowait(self, work: AnyRequest[Any]) -> bool:
        """Like `submit`, but only if the inbox has room now; return whether it had room.

        Raises:
            ActorStopped: the loop has ended.
        """
        try:
            if not self.inbox.channel.put_nowait(work, work.priority):
                return False
        except ChannelClosed:
            raise self._stopped_error() from self._cause
        self._unsettled[work] = None
        work.on_over = self._forget
        return True

    def abandon(self, cause: BaseException | None, why: str | None = None) -> None:
        """Fail all work, now and later, with `ActorStopped`."""
        if why is None:
            raised = f"its loop raised {logs.shown(cause)}"
            why = "its loop returned, although its scope goes on" if cause is None else raised
        self._why, self._cause = why, cause
        self.inbox.channel.close()
        for work in list(self._unsettled):
            work.give_up(self._stopped_error())

    def _fail_taken(self, cause: BaseException | None) -> None:
        """Fail all work that the loop has taken and not settled."""
        told = f"actor {self.name!r} was restarted while it worked on this item, after: {logs.shown(cause)}"
        for work in [work for work in self._unsettled if work.taken]:
            work.give_up(with_cause(ActorRestarted(told), cause))

    def _ended(self, error: BaseException | None) -> None:
        """Report that the loop has ended by itself."""
        self._context_task = None  # nothing is left to leave
        if isinstance(error, KeyboardInterrupt | SystemExit):  # the program ends, so a restart makes no sense
            self.abandon(error)
        else:
            self._supervisor.exited(self, "normal" if error is None else "crash", error)

    @asynccontextmanager
    async def _entered(self) -> "AsyncGenerator[OwnsLoop, None]":
        current.source.set(None)  # the loop does not work for one particular item
        no_item.set("in the loop of an actor or in a batch, which are for many items: use a node of one item")
        instance: Any = self._make()
        self.told, self.figures = told_by(instance), getattr(instance, "_penstock_figures", tuple)
        async with instance if hasattr(instance, "__aenter__") else nullcontext():
            yield instance

    async def _loop(self, instance: "OwnsLoop") -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await instance.loop(self.inbox)
        except InboxClosed:
            pass  # the clean end
        except BaseExceptionGroup as group:
            if group.split(InboxClosed)[1] is not None:  # a group of InboxClosed only is a clean end, too
                raise
        except asyncio.CancelledError as error:
            if task.cancelling():
                raise
            # The task was not cancelled, but an awaited object was: an error like any other.
            raise RuntimeError(f"the loop of actor {self.name!r} awaited something that was cancelled") from error

    def _stopped_error(self) -> ActorStopped:
        return with_cause(ActorStopped(f"actor {self.name!r} takes no more items: {self._why}"), self._cause)

    def _forget(self, work: AnyRequest[Any]) -> None:
        self._unsettled.pop(work, None)
        if not work.taken:
            self.inbox.channel.discard(work, work.priority)

    def _forget_sampled(self, work: AnyRequest[Any]) -> None:
        self._forget(work)
        if work.wait is not None:
            work.wait.leave_steps()


class LoopStream:
    """The parts that an actor gives for one item, as an async iterator. The first `anext` submits the item.

    Args:
        host: runs the actor.
        value: the argument of the call.
        priority: the priority of the call; higher first.
        deadline: the deadline of the call, in the loop's time; None without one.
        key: the key of the call; None without one.
        capacity: how many parts are held for the reader.
    """

    def __init__(
        self,
        host: LoopHost,
        value: Any,
        priority: int = 0,
        deadline: float | None = None,
        key: Hashable = None,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        self._host = host
        self._work: StreamRequest[Any, Any] = StreamRequest(value, priority, deadline, key, capacity)
        self._reader = self._work.buffer.reader()
        self._begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next part.

        Raises:
            ActorStopped: the loop has ended.
        """
        if not self._begun:
            self._begun = True
            await self._host.submit(self._work)
        return await anext(self._reader)

    async def pour(self, buffer: StreamBuffer[Any]) -> None:
        """Let the actor put the remaining parts straight into `buffer`, instead of passing them on one by one.

        This returns when the actor has finished the item, or when the reader of `buffer` has left.

        Raises:
            Exception: the error with which the actor failed the item.
        """
        await self._work.pour(buffer)

    async def aclose(self) -> None:
        """Stop reading: the work is cancelled."""
        self._work.cancel()
        self._reader.leave()


In = TypeVar("In")
Out = TypeVar("Out")
First = TypeVar("First")
Second = TypeVar("Second")
More = TypeVarTuple("More")


class Reporter:
    """The common part of `Actor` and `StreamActor`."""

    _penstock_is_shared = False  # whether the loops of all scopes run on the same instance

    def report(self, **figures: float) -> None:
        """Report figures of the actor, which statistics, `penstock top`, metrics and the verdict of a profile show.

        A figure keeps its last value until the actor ends or is restarted. Call this method as often as you like, such
        as in each step of a loop: it only stores the numbers. Numbers that are not finite are not shown.

        Args:
            **figures: numbers by name. A name may end with its unit, `_seconds` or `_bytes`; other figures are counts.

        Raises:
            OptionsError: a figure is not a number, or is a whole number that does not fit into 64 bits.
        """
        for name, value in figures.items():
            check(name, value, _FIGURE, "report(")
        told_by(self).update(figures)

    def step_span(
        self, works: "Iterable[Work[Any, Any] | StreamWork[Any, Any]]", /, *, own_span: bool = False
    ) -> AbstractContextManager[None]:
        """Count a step of the loop in the spans of its items: `with self.step_span(works):`.

        The span of an item says how long the item waited for its first step, and in how many steps it was. Nothing is
        done if no item is sampled.

        Args:
            works: the items that are in the step.
            own_span: whether the step also has a span `penstock.step` of its own, with the device calls of the step
                inside, like the span of a batch: a child of its first sampled item, and linked to all. The span of an
                item is linked to its first and its last step. An item that is in hundreds of steps may then have
                hundreds of spans.

        Raises:
            TypeError: `works` is one item, and not a list of items.
        """
        if isinstance(works, AnyRequest):
            raise TypeError(f"step_span takes the items that are in the step, got {works!r}: write step_span([work])")
        items = [*works]
        waits = [wait for wait in waits_of(items) if wait is not None]
        return spans.of_step(type(self).__name__, waits, len(items), own_span=own_span) if waits else nullcontext()


def told_by(instance: object) -> dict[str, float]:
    """Return the figures that an actor has reported, by name; later reports change the dictionary."""
    found: dict[str, float] = vars(instance).setdefault("_penstock_told", {})
    return found


# Metrics have integers of 64 bits.
_FIGURE = OptionRule(
    "a number: int() or float() converts a scalar, and float() converts a whole number of 2**63 or more",
    lambda value: isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63),
)
_UNITS = {"seconds": "s", "bytes": "By"}


def figure_of(name: str, value: float) -> Figure:
    """Return a figure that an actor has reported; the last word of its name may be the unit."""
    what, _, unit = name.rpartition("_")
    return Figure(what, _UNITS[unit], value) if what and unit in _UNITS else Figure(name, f"{{{name}}}", value)


class Actor(Reporter, Generic[In, Out]):
    """Base class of an actor that owns its loop and gives one result for each item.

    Decorate the class with `@ps.node` and write the method `loop`. Each scope (`run`, `stream`, `deploy`) makes its own
    instance and starts the loop of the instance once; all items go through the inbox of the loop.

        @ps.node
        class Doubler(ps.Actor[int, int]):
            async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
                while True:
                    work = await inbox.get()
                    work.finish(work.value * 2)

    An `Actor[tuple[A, B], Out]` may be called with an A and a B; the value of the work is a tuple of both.
    """

    async def loop(self, inbox: Inbox[Work[In, Out]], /) -> None:
        """Take work out of the inbox and settle the work, in any order, until `inbox.get()` raises `InboxClosed`.

        If `loop` returns, or raises another exception, while the scope goes on, the actor has crashed.
        """
        raise NotImplementedError(f"{type(self).__name__} needs `async def loop(self, inbox)`")

    @overload
    async def __call__(self, value: In, /) -> Out: ...
    @overload
    async def __call__(
        self: "Actor[tuple[First, Second, *More], Out]", first: First, second: Second, /, *more: *More
    ) -> Out: ...
    async def __call__(self, value: Any, /) -> Any:  # type: ignore[misc]  # pyright: ignore[reportInconsistentOverload]
        """Handle one item. Outside of a graph, e.g. in a unit test, a loop is run for this item alone."""
        async with _alone(self) as host:
            return await host.run(value)

    if TYPE_CHECKING:  # `@ps.node` adds it to each class, which checkers do not see

        def __rrshift__(self, stream: AsyncIterator[In]) -> AsyncIterator[Out]: ...


class StreamActor(Reporter, Generic[In, Out]):
    """Base class of an actor that owns its loop and gives many parts for each item.

    Like `Actor`, but a call of an instance gives an async iterator, and `loop` gets `StreamWork`.
    """

    async def loop(self, inbox: Inbox[StreamWork[In, Out]], /) -> None:
        """Take work out of the inbox, put parts into the work, and settle it, until `inbox.get()` raises `InboxClosed`.

        If `loop` returns, or raises another exception, while the scope goes on, the actor has crashed.
        """
        raise NotImplementedError(f"{type(self).__name__} needs `async def loop(self, inbox)`")

    @overload
    def __call__(self, value: In, /) -> AsyncIterator[Out]: ...
    @overload
    def __call__(
        self: "StreamActor[tuple[First, Second, *More], Out]", first: First, second: Second, /, *more: *More
    ) -> AsyncIterator[Out]: ...
    async def __call__(self, value: Any, /) -> AsyncIterator[Any]:  # type: ignore[misc]  # pyright: ignore[reportInconsistentOverload]
        """Handle one item. Outside of a graph, e.g. in a unit test, a loop is run for this item alone."""
        async with _alone(self) as host, aclosing(LoopStream(host, value)) as parts:
            async for part in parts:
                yield part


_BASES: tuple[type[Any], ...] = (Actor, StreamActor)
OwnsLoop: TypeAlias = Actor[Any, Any] | StreamActor[Any, Any]
"""An actor that owns its loop; an actor with `__aenter__` is entered before the loop, and left after it."""


@asynccontextmanager
async def _alone(instance: OwnsLoop) -> AsyncGenerator[LoopHost, None]:
    """Run the loop of an actor outside of a graph."""
    supervisor = Supervisor(SupervisorFlags(), lambda make_error: None)
    host = LoopHost(lambda: instance, type(instance).__name__, "temporary", supervisor)
    await host.start()
    supervisor.add(host)
    host.resume()
    try:
        yield host
    finally:
        await supervisor.close()


def owns_loop(cls: type[Any]) -> bool:
    """Whether instances of a class run a loop, instead of being called for each item."""
    return issubclass(cls, _BASES)


def takes_tuples(cls: type[Any]) -> bool:
    """Whether the items of a class that owns its loop are tuples, or their class is not known."""
    bases = [base for base in getattr(cls, "__orig_bases__", ()) if get_origin(base) in _BASES]
    items = [get_args(base)[0] for base in bases]
    return all((kind := get_origin(item) or item) is tuple or not isinstance(kind, type) for item in items)


def check_loop(cls: type[Any], call: Any) -> None:
    """Check that a class has a method `loop`, and that its items go through this loop.

    Args:
        cls: the class, derived from `Actor` or `StreamActor`.
        call: the `__call__` of the class.

    Raises:
        TypeError: the class does not define `loop`, or defines `__call__`.
    """
    if call not in [base.__call__ for base in _BASES]:
        raise TypeError(
            f"@node on class {cls.__name__!r}, which owns its loop: its items go through `loop`, and a __call__ of its "
            "own would never run; remove __call__"
        )
    if cls.loop in [base.loop for base in _BASES]:
        raise TypeError(f"@node on class {cls.__name__!r} needs a method `async def loop(self, inbox)`")
