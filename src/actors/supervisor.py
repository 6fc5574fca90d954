"""Supervisor: does what `supervision` decides, with the children of one scope."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any, Protocol

from .._errors import DeploymentFailed
from ..telemetry import logs
from .started_tasks import start_task
from .supervision import (
    ActorState,
    Decision,
    Escalate,
    ExitKind,
    LetEnd,
    Restart,
    RestartMode,
    SupervisorFlags,
    SupervisorState,
)


class Child(Protocol):
    """What a supervisor can restart.

    It tells the supervisor itself when it has crashed or ended: `Supervisor.exited`.
    """

    @property
    def name(self) -> str:
        """Name of its node."""
        ...

    @property
    def restart(self) -> RestartMode:
        """Which exits it is restarted after."""
        ...

    def hold(self) -> None:
        """Begin nothing new: it is about to be stopped. What comes waits, in order."""
        ...

    def resume(self) -> None:
        """Go on with what has waited: it has been started."""
        ...

    def abandon(self, cause: BaseException | None, why: str | None = None) -> None:
        """It is not restarted: what comes, and what has waited, fails with `ActorStopped`.

        Args:
            cause: what was raised.
            why: what has ended it; None if it has ended by itself.
        """
        ...

    async def stop(self, cause: BaseException | None) -> None:
        """End what is in flight in it, with `ActorRestarted` from `cause`, and release it; nothing if it is down.

        Raises:
            Exception: it could not be released.
        """
        ...

    async def close(self) -> None:
        """Release it at the end of the scope; nothing if it is down.

        Raises:
            Exception: it could not be released.
        """
        ...

    async def start(self) -> None:
        """Acquire it anew; if that fails or is cancelled, nothing is left of it.

        Raises:
            Exception: it did not start.
        """
        ...


Escalation = Callable[[Callable[[str], DeploymentFailed]], None]


class Supervisor:
    """Restarts children that crash.

    Args:
        flags: strategy and restart intensity.
        on_escalation: called, soon after the last crash, with a function that makes an error out of the name of what
            failed; the scope has to be closed then.
    """

    def __init__(self, flags: SupervisorFlags, on_escalation: Escalation) -> None:
        self.flags = flags
        self._state = SupervisorState(flags)
        self._on_escalation = on_escalation
        self._children: dict[int, Child] = {}
        self._restarts: dict[int, _Restarting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: dict[int, asyncio.Task[None]] = {}  # children that stay down, being stopped
        self._starting: set[int] = set()
        self._early_exits: dict[int, tuple[ExitKind, BaseException | None]] = {}
        self._closed = False
        self._context = copy_context()  # what is started later starts in that of the scope, not in that of an item

    def add(self, child: Child) -> None:
        """Look after a child that has just been started, behind all others in start order."""
        self._children[self._state.add(child.restart)] = child

    def state_of(self, child: Child) -> ActorState:
        """Return whether a child runs, or will run again."""
        number = self._number_of(child)
        state = "stopped" if number is None else self._state.state_of(number)
        return "stopped" if self._closed and state == "restarting" else state

    def exited(self, child: Child, kind: ExitKind, cause: BaseException | None) -> None:
        """A child has crashed, or ended by itself.

        Args:
            child: which; what it is now asked to do may come later.
            kind: how it ended.
            cause: what it raised.
        """
        number = self._number_of(child)
        if number is None or self._closed:  # the end of the scope stops it anyway
            return
        if number in self._starting:
            self._early_exits[number] = kind, cause
            return
        self._obey(self._state.exited(number, kind, asyncio.get_running_loop().time()), cause)

    def give_up(self, child: Child, cause: BaseException) -> None:
        """A child has ended by itself that cannot be started again: the scope fails."""
        number = self._number_of(child)
        if number is None or self._closed or self._state.escalated:
            return
        self._state.escalated = True
        self._give_up(number, f"ended by itself, and has no restart_on= by which to restart it: {cause!r}", cause)

    async def close(self) -> None:
        """Stop everything, the last started first; every child is stopped, also when another raises.

        Raises:
            Exception: the first that could not be released.
        """
        self._closed = True
        for restarting in self._restarts.values():
            restarting.give_way()
        while self._tasks:
            await asyncio.wait(self._tasks)
        errors: list[BaseException] = []
        while self._children:
            number, child = next(reversed(self._children.items()))
            try:
                await child.close()
            except BaseException as error:  # noqa: BLE001 - the others have to be stopped first
                errors.append(error)
            del self._children[number]
        self._on_escalation = _nobody  # it may well hold this supervisor
        if errors:
            raise errors[0]

    def _number_of(self, child: Child) -> int | None:
        return next((number for number, other in self._children.items() if other is child), None)

    def _obey(self, decision: Decision | None, cause: BaseException | None) -> None:
        if isinstance(decision, LetEnd):
            child = self._children[decision.child]
            child.abandon(cause)
            logs.warning("actor.stopped", node=child.name, restart=child.restart, error=repr(cause))
            self._ending[decision.child] = self._spawn(self._stop((decision.child,), cause), decision.child)
        elif isinstance(decision, Restart):
            self._begin(decision, cause)
        elif isinstance(decision, Escalate):
            flags = self.flags
            limit = f"max_restarts={flags.max_restarts} restarts within {flags.within_seconds:g} s"
            self._give_up(decision.origin, f"crashed after {limit}: {cause!r}", cause)

    def _begin(self, decision: Restart, cause: BaseException | None) -> None:
        for number in (decision.origin, *decision.stop):
            self._children[number].hold()
        for number in decision.removed:
            removed, origin = self._children[number], self._children[decision.origin]
            removed.abandon(cause, f"it was stopped when {origin.name!r} was restarted, and has restart='temporary'")
            logs.warning(
                "actor.stopped", node=removed.name, restart=removed.restart, after=origin.name, error=repr(cause)
            )  # fmt: skip
        # Children that are restarted alone do not wait for each other. Otherwise there is one restart at a time, and a
        # later one covers all that an earlier one has not started yet.
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
            try:
                await child.stop(cause)
            except Exception as error:  # noqa: BLE001 - user code; it goes on without what could not be released
                logs.warning("actor.not_released", node=child.name, error=repr(error))

    async def _start(self, restarting: "_Restarting") -> None:
        decision = restarting.decision
        for number in decision.start:
            child = self._children[number]
            if number in self._ending:  # a transient one that has ended well comes back with all
                await asyncio.wait([self._ending.pop(number)])
            self._starting.add(number)
            self._early_exits.pop(number, None)  # that of a start that failed, or was cut short
            try:
                await child.start()
            except Exception as error:  # noqa: BLE001 - user code, and what a supervisor is for
                self._obey(self._state.start_failed(number, asyncio.get_running_loop().time()), error)
                return
            finally:
                self._starting.discard(number)
            self._state.started(number)
            child.resume()
            logs.warning(
                "actor.restarted", node=child.name, after=self._children[decision.origin].name,
                pause_seconds=decision.pause_seconds, error=repr(restarting.cause),
            )  # fmt: skip
            if number in self._early_exits:
                self.exited(child, *self._early_exits.pop(number))
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
        """Give up if a task died that should have restarted or stopped children: nobody else would ever do it."""
        self._tasks.discard(task)
        gave_way = restarting is not None and restarting.gives_way
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not (gave_way and task.cancelled()) and not self._closed and not self._state.escalated:
            self._state.escalated = True
            self._give_up(origin, f"could not be restarted: {error!r}", error)

    def _give_up(self, origin: int, what: str, cause: BaseException | None) -> None:
        for child in self._children.values():
            child.hold()
        # Soon, not now: the item whose handler raised gets its own exception first.
        asyncio.get_running_loop().call_soon(self._escalate, _failure(self._children[origin].name, what, cause))

    def _escalate(self, make_error: Callable[[str], DeploymentFailed]) -> None:
        if not self._closed:
            self._on_escalation(make_error)


def _nobody(make_error: Callable[[str], DeploymentFailed]) -> None:
    """Nobody has to be told any more."""


class _Restarting:
    """A restart under way.

    Attributes:
        has_stopped: it waits, or starts children; before that it cannot be cut short.
        gives_way: a later one, or the end of the scope, has taken over.
    """

    __slots__ = ("cause", "decision", "gives_way", "has_stopped", "task")

    def __init__(self, decision: Restart, cause: BaseException | None) -> None:
        self.decision = decision
        self.cause = cause
        self.has_stopped = False
        self.gives_way = False
        self.task: asyncio.Task[None] | None = None

    def give_way(self) -> None:
        """Start nothing any more."""
        self.gives_way = True
        if self.has_stopped and self.task is not None:
            self.task.cancel()


def _failure(name: str, why: str, cause: BaseException | None) -> Callable[[str], DeploymentFailed]:
    def make_error(what: str) -> DeploymentFailed:
        error = DeploymentFailed(f"{what} failed: node {name!r} {why}")
        error.__cause__ = cause
        return error

    return make_error
