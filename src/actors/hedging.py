"""Hedging: a second attempt begins beside one that takes long, and the first result of the two counts."""

import asyncio
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from ..telemetry import spans
from . import current
from .frame import Frame
from .invocation import Invocation, OutsideCall, ProcessCall, leave_outside_call
from .policy import Hedge
from .tasks import start_task

if TYPE_CHECKING:
    from .node_actor import NodeActor
    from .worker import Member, WorkerGroup

_OWN_CANCEL = "penstock: the other attempt has a result"


class HedgeBudget:
    """How many second attempts a node may still make, over all of its call sites in an Engine."""

    __slots__ = ("_share", "_tokens")

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = 1.0

    def called(self) -> None:
        """Count a call, which adds its share."""
        self._tokens = min(10.0, self._tokens + self._share)

    def take(self) -> bool:
        """Take what one second attempt needs; return whether there was enough."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Hedging:
    """How a call site hedges: after which time, and from which budget."""

    __slots__ = ("_after_seconds", "budget")

    def __init__(self, hedge: Hedge, budget: HedgeBudget) -> None:
        self._after_seconds = hedge.after_seconds
        self.budget = budget

    async def attempt(self, first: Invocation, elapsed_seconds: float) -> Any:
        """Run one attempt of an item, and perhaps another beside it; return the first result.

        Args:
            first: runs the attempt, in the present task.
            elapsed_seconds: how long ago it has begun.

        Raises:
            Exception: the error of the attempt, if neither has a result.
        """
        race = _Race(first, self.budget)
        timer = race.group.loop.call_later(max(0.0, self._after_seconds - elapsed_seconds), race.begin_second)
        try:
            value = await first.timed_attempt()
        except asyncio.CancelledError:
            if race.was_cancelled():
                race.stop()
                raise
        except Exception:
            timer.cancel()
            if not race.has_lost:
                if race.second is None:
                    raise
                await race.second.over()
                if not race.second.has_result:
                    raise
                race.won()
            elif race.was_cancelled():
                raise asyncio.CancelledError from None
        else:
            if not race.has_lost:
                race.stop()
                return value
            if race.was_cancelled():
                raise asyncio.CancelledError
        finally:
            timer.cancel()
            race.is_over = True
        assert race.second is not None
        return race.second.value


class _Race:
    """Two attempts of one item.

    Attributes:
        second: the second attempt; None before it has begun.
        has_lost: whether the second had its result while the first was running, which was cancelled then.
        is_over: whether it is decided which result counts.
    """

    __slots__ = ("_budget", "_first", "group", "has_lost", "is_over", "second")

    def __init__(self, first: Invocation, budget: HedgeBudget) -> None:
        self._first = first
        self._budget = budget
        self.group: WorkerGroup = first.worker.group
        self.second: _Second | None = None
        self.has_lost = False
        self.is_over = False

    def begin_second(self) -> None:
        """Begin the second attempt, if there is a place for it, and the budget allows it."""
        first = self._first
        actor, frame = first.actor, first.frame
        if frame.state != "running" or actor.is_stopped or actor.limiter.free <= 0 or not self._budget.take():
            return
        actor.hedged += 1
        if frame.span is not None:
            spans.hedged(actor.name)
        self.second = _Second(self, actor, frame, first.worker.position.attempt)

    def second_ended(self) -> None:
        """Cancel the first attempt, if the second has a result and the first is still running."""
        second, first = self.second, self._first
        assert second is not None
        if second.waiter is not None:
            if not second.waiter.done():
                second.waiter.set_result(None)
        elif second.has_result and not self.is_over and first.frame.state == "running":
            task = first.worker.task
            assert task is not None
            self.has_lost = True
            _leave(first.worker.outside_call)
            self.won()
            task.cancel(_OWN_CANCEL)

    def was_cancelled(self) -> bool:
        """Take back the cancellation of the first attempt; return whether its task was cancelled for another reason."""
        task = self._first.worker.task
        assert task is not None
        return not self.has_lost or task.uncancel() > self._first.cancelling

    def won(self) -> None:
        """Count a result of the second attempt."""
        first = self._first
        first.actor.hedges_won += 1
        if first.frame.span is not None:
            spans.hedge_won(first.actor.name)

    def stop(self) -> None:
        """Cancel the second attempt, whose result is not needed."""
        if self.second is not None:
            self.second.leave()


def _leave(call: OutsideCall | None) -> None:
    if isinstance(call, ProcessCall):
        call.is_left = True


class _Second:
    """The second attempt, in a task of its own that is a member of the group of workers of its frame.

    Attributes:
        value: its result, once `has_result`.
        has_result: whether it has ended with a result.
        waiter: set once it has ended, after the first has failed; None before.
    """

    def __init__(self, race: _Race, actor: "NodeActor", frame: Frame, attempt: int) -> None:
        self.group = race.group
        self.position = current.Position()
        self.position.frame, self.position.actor = frame, actor
        self.cancels = 0
        self.outside_call: OutsideCall | None = None
        self.value: Any = None
        self.has_result = False
        self.waiter: asyncio.Future[None] | None = None
        self._race: _Race | None = race
        self._actor = actor
        self._frame = frame
        self._attempt = attempt
        actor.limiter.free -= 1
        self.group.joined(self)
        context = copy_context()  # that of the first attempt: the timer has it
        context.run(current.source.set, self.position)
        name = f"penstock-hedge {actor.name}"
        self.task: asyncio.Task[None] | None = start_task(self.group.loop, self._run(), name=name, context=context)
        # A callback, because a task that is cancelled before its first step does not run a `finally` of its own.
        self.task.add_done_callback(self._ended)

    def is_in(self, frame: Frame, actor: "NodeActor") -> bool:
        """Whether it runs the handler of `actor` for `frame`."""
        return self.position.frame is frame and self.position.actor is actor

    def cancel_if_in(self, frame: Frame) -> None:
        """Cancel the attempt of a frame that has ended."""
        if self.position.frame is frame and not self.cancels and self.task is not None:
            self.cancels += 1
            self.task.cancel(_OWN_CANCEL)

    def leave(self) -> None:
        """Cancel the attempt, because the first has ended; a process goes on, and keeps its place."""
        _leave(self.outside_call)
        self.cancel_if_in(self._frame)

    async def over(self) -> None:
        """Wait until it has ended, because the first attempt has failed."""
        if self.task is None or self.task.done():
            return
        self.waiter = self.group.loop.create_future()
        try:
            await self.waiter
        except asyncio.CancelledError:
            self.leave()
            raise

    async def _run(self) -> None:
        self.position.task = self.task
        member: Member = self
        try:
            invocation = Invocation(member, self._actor, self._frame)
            self.position.attempt = self._attempt
            self.value = await invocation.timed_attempt()
            self.has_result = True
        except asyncio.CancelledError:
            pass  # by the engine, or with the loop: the first attempt decides what becomes of the item
        except Exception:  # noqa: BLE001 - the first attempt decides
            pass
        except BaseException as error:  # noqa: BLE001 - as in a worker: it ends more than the item
            self._frame.fail(error, self._actor, self._attempt)
        finally:
            self.position.attempt_deadline = None
            leave_outside_call(member, self._actor)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        frame, race = self._frame, self._race
        self.position.frame = self.task = self._race = None
        assert race is not None
        race.second_ended()
        self._actor.limiter.release()
        if frame.state in ("failed", "cancelled"):
            frame.leave()
        self.group.left(self)
