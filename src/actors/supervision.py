"""Supervision: which stateful nodes of a scope are restarted when one node exits, decided as in Erlang/OTP."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .._errors import DeploymentFailed, NodeCancelledError, add_note, with_cause
from ..telemetry import logs
from ..telemetry.counters import ActorState
from .accepted import POSITIVE, check_fields, one_of, whole
from .tasks import ContextTask, start_task

# `SupervisorState` is a pure state machine: exits and the time go in, a decision comes out. It has no clock and starts
# nothing; `Supervisor` carries out its decisions. The rules are those of OTP's `supervisor` (stdlib): the strategies,
# which exits restart which children, and the restart intensity. The pause before a restart is an addition.

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
"""The values of `strategy=`: which other stateful nodes are restarted together with a crashed one."""

RestartMode = Literal["permanent", "transient", "temporary"]
"""The values of `restart=`: the exits after which a stateful node is restarted."""

ExitKind = Literal["normal", "shutdown", "crash"]

# The first pause is short for a waiting person, and long for a peer that has just reset a connection.
FIRST_PAUSE_SECONDS = 0.05
# The sum of all pauses within the window stays below this: callers wait meanwhile, with deadlines of some seconds.
MAX_PAUSES_SECONDS = 1.0


_FLAGS: Final = {"strategy": one_of(Strategy), "max_restarts": whole(0), "within_seconds": POSITIVE}


@dataclass(frozen=True)
class SupervisorFlags:
    """How a supervisor restarts its children; the names are those of OTP.

    Args:
        strategy: which other children are restarted with a child that exited: none ("one_for_one"), all
            ("one_for_all"), or the children that were started after it ("rest_for_one").
        max_restarts: how many restarts may happen within `within_seconds`; a further restart escalates.
        within_seconds: the window, in seconds.

    Raises:
        OptionsError: a value is out of its range.
    """

    strategy: Strategy = "one_for_one"
    max_restarts: int = 3
    within_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_fields(self, _FLAGS)

    def pause_seconds(self, restart: int) -> float:
        """Return how long to wait before restart number `restart` of the window, counted from 1.

        The pause doubles up to a bound, which keeps the sum of `max_restarts` pauses below the window and below one
        second. Otherwise the pauses alone would keep a child that always crashes below the restart intensity for ever.
        """
        longest = min(MAX_PAUSES_SECONDS, self.within_seconds) / (self.max_restarts + 1)
        return min(longest, FIRST_PAUSE_SECONDS * 2.0 ** min(restart - 1, 60))


@dataclass(frozen=True)
class LetEnd:
    """The child stays down; no other child is stopped or restarted."""

    child: int


@dataclass(frozen=True)
class Restart:
    """Children have to be started again.

    Attributes:
        origin: the child that exited, or that did not start.
        stop: the running children to stop first, in this order: the last started first.
        start: the children to start after the pause, in this order, including the origin.
        pause_seconds: the pause between stopping and starting, in seconds.
    """

    origin: int
    stop: tuple[int, ...]
    start: tuple[int, ...]
    pause_seconds: float

    @property
    def removed(self) -> tuple[int, ...]:
        """The temporary children among those to stop: they never start again."""
        return tuple(child for child in self.stop if child not in self.start)


@dataclass(frozen=True)
class Escalate:
    """There were more restarts than allowed: the supervisor gives up.

    Attributes:
        origin: the child that exited, or that did not start.
        stop: the running children to stop, in this order.
    """

    origin: int
    stop: tuple[int, ...]


Decision = LetEnd | Restart | Escalate


@dataclass
class SupervisorState:
    """Decides which children of one supervisor are restarted. Children are numbers, in the order of their start.

    Args:
        flags: strategy and restart intensity.

    Attributes:
        running: the children that run.
        awaited: the children that will be started again.
        escalated: whether the supervisor has given up, and makes no more decisions.
    """

    flags: SupervisorFlags
    running: set[int] = field(default_factory=set[int])
    awaited: set[int] = field(default_factory=set[int])
    escalated: bool = False
    _modes: dict[int, RestartMode] = field(default_factory=dict[int, RestartMode])
    _next: int = 0
    _restarts: deque[float] = field(default_factory=deque[float])

    def add(self, mode: RestartMode) -> int:
        """Add a child that has just been started, as the last child in start order; return its number."""
        child = self._next
        self._next += 1
        self._modes[child] = mode
        self.running.add(child)
        return child

    def started(self, child: int) -> None:
        """Note that a child runs again."""
        self.awaited.discard(child)
        self.running.add(child)

    def state_of(self, child: int) -> ActorState:
        """Return the state of a child: "running", "restarting" or "stopped"."""
        if self.escalated:
            return "stopped"
        if child in self.running:
            return "running"
        return "restarting" if child in self.awaited else "stopped"

    def exited(self, child: int, kind: ExitKind, now_seconds: float) -> Decision | None:
        """Decide what to do about a child that has ended by itself.

        Args:
            child: the child.
            kind: how the child ended: "normal" and "shutdown" are regular ends, "crash" is not.
            now_seconds: the time, of any monotonic clock.

        Returns:
            The decision; None if the child is not running, for instance because it is being stopped.
        """
        if child not in self.running or self.escalated:
            return None
        self.running.discard(child)
        mode = self._modes[child]
        if mode == "temporary":
            del self._modes[child]
            return LetEnd(child)
        if mode == "transient" and kind != "crash":
            return LetEnd(child)  # the child stays known: a restart of all children starts it again
        return self._restart(child, now_seconds)

    def start_failed(self, child: int, now_seconds: float) -> Decision | None:
        """Decide what to do about a child that did not start again. This counts as a further restart, in any mode."""
        return None if self.escalated else self._restart(child, now_seconds)

    def _restart(self, origin: int, now_seconds: float) -> Decision:
        # A restart counts once, for any number of children.
        while self._restarts and self._restarts[0] < now_seconds - self.flags.within_seconds:
            self._restarts.popleft()
        self._restarts.append(now_seconds)
        if len(self._restarts) > self.flags.max_restarts:
            self.escalated = True
            stop = tuple(sorted(self.running, reverse=True))
            self.running.clear()
            return Escalate(origin, stop)
        group = self._group(origin)
        stop = tuple(sorted(self.running.intersection(group), reverse=True))
        self.running.difference_update(stop)
        for child in group:
            if self._modes[child] == "temporary":
                del self._modes[child]
        start = tuple(child for child in group if child in self._modes)
        self.awaited.update(start)
        return Restart(origin, stop, start, self.flags.pause_seconds(len(self._restarts)))

    def _group(self, origin: int) -> tuple[int, ...]:
        """Return the children that are restarted together with `origin`, in start order."""
        if self.flags.strategy == "one_for_one":
            return (origin,)
        if self.flags.strategy == "one_for_all":
            return tuple(self._modes)
        return tuple(child for child in self._modes if child >= origin)


class Child:
    """A child that a supervisor can restart: an `Instance` of the engine, or a `LoopHost`.

    A task of its own enters and leaves each instance, since `__aenter__` may open a task group or a cancel scope, which
    must be left by the task that entered it. A child calls `Supervisor.exited` itself when it has crashed or ended, but
    not before `resume`.

    Args:
        name: the name of the node.
        restart: the restart mode.
        supervisor: the supervisor.

    Attributes:
        name: the name of the node.
        restart: the restart mode.
        restarts: how often the child was restarted.
    """

    def __init__(self, name: str, restart: RestartMode, supervisor: "Supervisor") -> None:
        self.name = name
        self.restart: RestartMode = restart
        self.restarts = 0
        self._supervisor = supervisor
        self._context_task: ContextTask[Any] | None = None
        self._has_run = False
        self._is_up = False  # whether the instance was started, and its stop has not begun

    @property
    def state(self) -> ActorState:
        """Whether the child runs, or will run again, as its supervisor knows it."""
        return self._supervisor.state_of(self)

    @property
    def is_stopped(self) -> bool:
        """Whether the child has ended and is not restarted, so that further attempts would fail."""
        raise NotImplementedError

    def hold(self) -> None:
        """Let new items wait, in order: the child is about to be stopped."""
        self._is_up = False

    def resume(self) -> None:
        """Let waiting items in: the child has been started. Report it if it has ended since."""
        self._is_up = True
        if self._context_task is not None and self._context_task.task.done():
            self._task_ended(self._context_task)

    def abandon(self, cause: BaseException | None, why: str | None = None) -> None:
        """Fail all items, waiting and new, with `ActorStopped`: the child is not restarted.

        Args:
            cause: the exception that ended the child.
            why: the reason, for the error; None if the child has ended by itself.
        """
        raise NotImplementedError

    async def stop(self, cause: BaseException | None) -> None:
        """End the items in flight with `ActorRestarted` from `cause`, and leave the instance. No effect if it is down.

        Raises:
            Exception: the instance could not be left.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Leave the instance at the end of the scope. No effect if it is down.

        Raises:
            Exception: the instance could not be left.
        """
        await self.stop(None)

    async def start(self) -> None:
        """Make and enter a new instance. If this raises, no instance is left behind.

        Raises:
            Exception: the instance did not start.
        """
        raise NotImplementedError

    def _ended(self, error: BaseException | None) -> None:
        """Report that the instance has ended by itself."""
        raise NotImplementedError

    async def _enter(self, context_task: ContextTask[Any]) -> None:
        """Wait until the task of a new instance has entered it."""
        self._context_task = context_task
        try:
            await context_task.settled()
        except asyncio.CancelledError:
            try:
                await context_task.ended()
            finally:
                self._context_task = None
                if context_task.error is not None:
                    logs.warning("actor.not_released", node=self.name, error=context_task.error)
            raise
        if context_task.was_opened:
            context_task.task.add_done_callback(lambda _: self._task_ended(context_task))
            self.restarts += self._has_run
            self._has_run = True
            return
        self._context_task = None
        if context_task.error is None:
            raise NodeCancelledError(f"the start of stateful node {self.name!r} was cancelled, but not by the engine")
        add_note(context_task.error, f"while stateful node {self.name!r} was started")
        raise context_task.error

    async def _leave(self, cause: BaseException | None) -> None:
        """Leave the instance, if there is one. Raise the error of that, unless it is `cause`."""
        self._is_up = False
        context_task = self._context_task
        if context_task is None:
            return
        error = await context_task.ended()
        self._context_task = None
        if error is not None and error is not cause:
            raise error

    def _task_ended(self, context_task: ContextTask[Any]) -> None:
        if context_task is not self._context_task or not self._is_up:
            return
        self._is_up = False
        if context_task.task.cancelled():  # the loop is being shut down, so a restart makes no sense
            self.abandon(NodeCancelledError(f"the task that keeps stateful node {self.name!r} was cancelled"))
        else:
            self._ended(context_task.error)


Escalation = Callable[[Callable[[str], DeploymentFailed]], None]


class Supervisor:
    """Restarts children that crash.

    Args:
        flags: strategy and restart intensity.
        on_escalation: called soon after the last crash, when the supervisor gives up; then the scope has to be closed.
            The argument is a function that makes the error from the name of the run, stream or deployment that failed.
    """

    def __init__(self, flags: SupervisorFlags, on_escalation: Escalation) -> None:
        self.flags = flags
        self._state = SupervisorState(flags)
        self._on_escalation = on_escalation
        self._children: dict[int, Child] = {}
        self._restarts: dict[int, _Restarting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: dict[int, asyncio.Task[None]] = {}  # for each child that stays down, the task that stops it
        self._closed = False
        self._context = copy_context()  # restarts run in the context of the scope, not in the context of an item

    def add(self, child: Child) -> None:
        """Supervise a child that has just been started, as the last child in start order."""
        self._children[self._state.add(child.restart)] = child

    def state_of(self, child: Child) -> ActorState:
        """Return the state of a child: "running", "restarting" or "stopped"."""
        number = self._number_of(child)
        state = "stopped" if number is None else self._state.state_of(number)
        return "stopped" if self._closed and state == "restarting" else state

    def exited(self, child: Child, kind: ExitKind, cause: BaseException | None) -> None:
        """Take the report of a child that has crashed or ended. The child may have to stop or restart, now or later.

        Args:
            child: the child.
            kind: how the child ended.
            cause: the exception that the child raised.
        """
        number = self._number_of(child)
        if number is None or self._closed:  # at the end of the scope, the child is stopped anyway
            return
        self._obey(self._state.exited(number, kind, asyncio.get_running_loop().time()), cause)

    def give_up(self, child: Child, cause: BaseException) -> None:
        """Fail the scope: a child has ended that cannot be started again."""
        number = self._number_of(child)
        if number is not None and not self._closed and not self._state.escalated:
            why = f"ended by itself, and has no restart_on=, which would restart it: {logs.shown(cause)}"
            self._give_up(number, why, cause)

    async def close(self) -> None:
        """Stop all children, the last started first, even if stopping a child raises.

        Raises:
            Exception: the error of the last child that could not be stopped.
        """
        self._closed = True
        self._on_escalation = _ignore  # breaks a cycle: the function may hold this supervisor
        for restarting in self._restarts.values():
            restarting.give_way()
        while self._tasks:
            await asyncio.wait(self._tasks)
        async with AsyncExitStack() as stack:
            for number, child in self._children.items():
                stack.callback(self._children.pop, number)
                stack.push_async_callback(child.close)

    def _number_of(self, child: Child) -> int | None:
        return next((number for number, other in self._children.items() if other is child), None)

    def _obey(self, decision: Decision | None, cause: BaseException | None) -> None:
        if isinstance(decision, LetEnd):
            child = self._children[decision.child]
            child.abandon(cause)
            logs.warning("actor.stopped", node=child.name, restart=child.restart, error=cause)
            self._ending[decision.child] = self._spawn(self._stop((decision.child,), cause), decision.child)
        elif isinstance(decision, Restart):
            self._begin(decision, cause)
        elif isinstance(decision, Escalate):
            flags = self.flags
            limit = f"max_restarts={flags.max_restarts} restarts within {flags.within_seconds:g} s"
            self._give_up(decision.origin, f"crashed after {limit}: {logs.shown(cause)}", cause)

    def _begin(self, decision: Restart, cause: BaseException | None) -> None:
        for number in (decision.origin, *decision.stop):
            self._children[number].hold()
        for number in decision.removed:
            removed, origin = self._children[number], self._children[decision.origin]
            removed.abandon(cause, f"it was stopped when {origin.name!r} was restarted, and has restart='temporary'")
            logs.warning(
                "actor.stopped", node=removed.name, restart=removed.restart, after=origin.name, error=cause
            )  # fmt: skip
        # Children that are restarted alone do not wait for each other. Otherwise there is one restart at a time, and a
        # later restart covers all children that an earlier restart has not started yet.
        lane = decision.origin if self.flags.strategy == "one_for_one" else -1
        earlier = self._restarts.get(lane)
        if earlier is not None:
            earlier.give_way()
        restarting = self._restarts[lane] = _Restarting(decision, cause)
        restarting.task = self._spawn(self._restart(restarting, earlier, lane), decision.origin, restarting)

    async def _restart(self, restarting: "_Restarting", earlier: "_Restarting | None", lane: int) -> None:
        decision = restarting.decision
        try:
            if earlier is not None and earlier.task is not None:
                await asyncio.wait([earlier.task])
            await self._stop(sorted({decision.origin, *decision.stop}, reverse=True), restarting.cause)
            restarting.has_stopped = True
            if not restarting.gives_way:
                await asyncio.sleep(decision.pause_seconds)
                await self._start(restarting)
        finally:
            if self._restarts.get(lane) is restarting:
                del self._restarts[lane]

    async def _stop(self, numbers: Sequence[int], cause: BaseException | None) -> None:
        for number in numbers:
            child = self._children[number]
            with logs.logged("actor.not_released", node=child.name):
                await child.stop(cause)

    async def _start(self, restarting: "_Restarting") -> None:
        decision = restarting.decision
        for number in decision.start:
            child = self._children[number]
            if number in self._ending:  # a transient child that has ended is started again together with all
                await asyncio.wait([self._ending.pop(number)])
            try:
                await child.start()
            except Exception as error:  # noqa: BLE001 - user code; handling its failures is the task of a supervisor
                self._obey(self._state.start_failed(number, asyncio.get_running_loop().time()), error)
                return
            self._state.started(number)
            logs.warning(
                "actor.restarted", node=child.name, after=self._children[decision.origin].name,
                pause_seconds=decision.pause_seconds, error=restarting.cause,
            )  # fmt: skip
            child.resume()
            if restarting.gives_way:
                return

    def _spawn(
        self, work: Coroutine[Any, Any, None], origin: int, restarting: "_Restarting | None" = None
    ) -> "asyncio.Task[None]":
        task = start_task(asyncio.get_running_loop(), work, name="penstock-restart", context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, origin, restarting))
        return task

    def _ended(self, task: "asyncio.Task[None]", origin: int, restarting: "_Restarting | None") -> None:
        """Give up if a task that restarts or stops children has died: the children would stay down for ever."""
        self._tasks.discard(task)
        gave_way = restarting is not None and restarting.gives_way
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not (gave_way and task.cancelled()) and not self._closed and not self._state.escalated:
            self._give_up(origin, f"could not be restarted: {logs.shown(error)}", error)

    def _give_up(self, origin: int, why: str, cause: BaseException | None) -> None:
        self._state.escalated = True
        for child in self._children.values():
            child.hold()
        name = self._children[origin].name

        def make_error(what: str) -> DeploymentFailed:
            return with_cause(DeploymentFailed(f"{what} failed: node {name!r} {why}"), cause)

        # Soon, not now: the item whose handler raised gets its own exception first.
        asyncio.get_running_loop().call_soon(self._escalate, make_error)

    def _escalate(self, make_error: Callable[[str], DeploymentFailed]) -> None:
        if not self._closed:
            self._on_escalation(make_error)


def _ignore(make_error: Callable[[str], DeploymentFailed]) -> None:
    """Do nothing: the scope is closed already."""


class _Restarting:
    """A restart under way.

    Attributes:
        has_stopped: whether the children are stopped, and the restart waits or starts them; only then may the task be
            cancelled.
        gives_way: whether a later restart, or the end of the scope, has taken over.
    """

    __slots__ = ("cause", "decision", "gives_way", "has_stopped", "task")

    def __init__(self, decision: Restart, cause: BaseException | None) -> None:
        self.decision = decision
        self.cause = cause
        self.has_stopped = False
        self.gives_way = False
        self.task: asyncio.Task[None] | None = None

    def give_way(self) -> None:
        """Start no more children in this restart."""
        self.gives_way = True
        if self.has_stopped and self.task is not None:
            self.task.cancel()
