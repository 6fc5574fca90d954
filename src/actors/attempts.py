"""Attempts: the policy of a node, as a stack of functions that is composed once when its graph is wired."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from .._errors import Interrupted, NodeTimeoutError, add_note
from ..telemetry import logs, names, spans
from .accepted import check
from .accepted import number as number_of
from .current import Handling, source
from .execution import (
    LOST,
    STOPPED,
    Around,
    Attempt,
    Bound,
    Requeued,
    Run,
    TracedExecution,
    count_execution,
    cut_short,
    end_calls,
    leave_outside_call,
    outside_call_ended,
    undo_cut,
)
from .frame import Frame, MemberTask, Part, foreign_cancel, values_read
from .loop_host import GatedAttempt
from .policy import Policy, Retry
from .threads import Job

if TYPE_CHECKING:
    from .loop_host import RestartGate
    from .node_actor import Invoke, NodeActor
    from .stream_buffer import Reader
    from .worker import Worker

# Runs the failover of a node for an item.
Failover = Callable[[Attempt], Awaitable[Any]]


def compose(
    policy: Policy, around: Sequence[Around] = (), failover: Failover | None = None, bound: Bound | None = None
) -> Run:
    """Return a function that runs a step with its policy.

    The layers, from the inside: timeout, the layers of `around` (the gate of an instance, a hedge), retry, failover,
    fallback. Only the layers that the policy needs are made.

    Args:
        policy: the policy of the node.
        around: layers around each attempt, the innermost first.
        failover: runs the failover of the node; None without a failover.
        bound: runs one attempt; None for `Attempt._actor.bound`.
    """
    if policy.is_once and not around and bound is None:
        return run_once
    run = _one_attempt(policy.timeout_seconds, bound)
    for layer in around:
        run = layer(run)
    if policy.retry is not None:
        run = _retried(run, policy.retry)
    if failover is not None:
        run = _or_instead(run, _failing_over(failover))
    if policy.fallback is not None:
        run = _or_instead(run, _falling_back(policy.fallback))
    return _counted(run)


def _one_attempt(seconds: float | None, other: Bound | None) -> Run:
    """Return a function that runs one attempt; a timeout ends it with `NodeTimeoutError`."""

    async def run(attempt: Attempt) -> Any:
        bound = attempt._actor.bound if other is None else other
        position = attempt._position
        try:
            if seconds is None:
                return await bound.run(attempt)
            if bound.begins_later:
                position.attempt_deadline, attempt._given = None, perf_counter()
            else:
                position.attempt_deadline = attempt._member.group.loop.time() + seconds
            timer = position.timeout = asyncio.timeout_at(position.attempt_deadline)
            try:
                async with timer:
                    return await bound.run(attempt)
            except TimeoutError as error:
                if not timer.expired():
                    raise
                if attempt._member.cut is not None:  # while the handler unwound after its timeout
                    raise asyncio.CancelledError from error
                raise NodeTimeoutError(f"node {attempt._actor.name!r} took longer than {seconds:g} s") from error
            finally:
                position.timeout = None
        except asyncio.CancelledError as error:
            task = attempt._member.task
            assert task is not None
            if attempt._member.cut is not None or task.cancelling() > attempt._undisturbed:
                raise
            _note_failure(attempt)
            raise foreign_cancel(error, attempt._actor.name) from error
        except Interrupted:  # a question is not a failure
            raise
        except Exception:
            _note_failure(attempt)
            if position.calls is not None:
                await end_calls(position)
            raise
        finally:
            if position.calls is not None and not bound._goes_on:
                await end_calls(position)

    return run


def _note_failure(attempt: Attempt) -> None:
    """Mark the attempt as failed for its thread or its tasks, which may go on nevertheless."""
    call, here = attempt._member.outside_call, source.get()
    if isinstance(call, Job) and isinstance(call.handling, Handling):
        call.handling.has_failed = True
    if isinstance(here, Handling) and here.is_present:
        here.has_failed = True


def through_gate(gate: "RestartGate") -> Around:
    """Return a layer that lets attempts pass to the instance of a stateful node.

    The wait for a restart does not count in the timeout of an attempt.
    """

    def around(run: Run) -> Run:
        async def admitted(attempt: Attempt) -> Any:
            async with GatedAttempt(gate, attempt._member):
                return await run(attempt)

        return admitted

    return around


def noting_results(run: Run) -> Run:
    """Note each result of a node with `discard=`: it is discarded unless a step or a caller begins to read it."""

    async def noting(attempt: Attempt) -> Any:
        value = await run(attempt)
        attempt._frame.came(value, attempt._actor)
        return value

    return noting


def reading(invoke: "Invoke", parts: Sequence[Part], *, inside: bool) -> "Invoke":
    """Return an `Invoke` for a step that begins to read results of nodes with `discard=`, and then owns them.

    Args:
        invoke: invokes the step.
        parts: the parts of values that may have such results.
        inside: whether the step also reads the results inside of these parts.
    """

    async def invoke_reading(worker: "Worker", actor: "NodeActor", frame: Frame) -> Any:
        frame.reads(values_read(frame.values, parts, inside=inside))
        return await invoke(worker, actor, frame)

    return invoke_reading


# For each graph, node and way of handling: when an error was logged last, and how many errors were not logged since.
_told: Final[dict[tuple[str, str, str], tuple[float, int]]] = {}
_MOST_TOLD: Final = 1000  # how many graphs and nodes are remembered; a program may make up names without end
_TOLD_AGAIN_SECONDS: Final = 60.0


def handled(attempt: Attempt, how: str, error: BaseException) -> None:
    """Log an error that the policy of a node has handled: one line a minute for each node, with the count since."""
    actor, now = attempt._actor, attempt._member.group.loop.time()
    key = actor.graph, actor.name, how
    told_at, count = _told.get(key, (math.inf, 0))
    if 0 <= now - told_at < _TOLD_AGAIN_SECONDS:
        _told[key] = told_at, count + 1
        return
    if len(_told) >= _MOST_TOLD:
        _told.clear()
    _told[key] = now, 0
    seconds = actor.retrying()[0]
    logs.warning(
        "node.error_handled", graph=actor.graph, node=actor.name, by=how, error=error, count=count + 1,
        **({"retried_for_seconds": round(seconds)} if seconds >= 1 else {}),
    )  # fmt: skip


def _retried(run: Run, retry: Retry) -> Run:
    async def attempts(attempt: Attempt) -> Any:
        actor, member = attempt._actor, attempt._member
        position = member.position
        since: float | None = None
        began = 0.0 if attempt._frame.span is None else perf_counter()
        try:
            while True:
                try:
                    return await run(attempt)
                except Interrupted:
                    raise
                except retry.retry_on as error:
                    pause = _pause_seconds(retry, attempt, error)
                    if pause is None:
                        raise
                    if attempt._frame.span is not None:
                        spans.attempt_failed(actor.name, position.attempt, began, error, pause)
                    if since is None:
                        since = member.group.loop.time()
                    actor.counts.in_retry[attempt] = member.group.loop.time, since, type(error).__qualname__
                    handled(attempt, "retry", error)
                # Also without a pause: attempts that fail at once would keep the loop from other tasks and timers.
                await asyncio.sleep(pause)
                if member.outside_call is not None:  # a thread whose attempt timed out holds the place until it returns
                    await outside_call_ended(member)
                position.attempt += 1
                actor.counts.retried += 1
                if attempt._frame.span is not None:
                    began = perf_counter()
                    spans.happened(names.ATTEMPT, actor.name, None, **{names.ATTEMPT: position.attempt})
        finally:
            if since is not None:
                del actor.counts.in_retry[attempt]

    return attempts


def _pause_seconds(retry: Retry, attempt: Attempt, error: Exception) -> float | None:
    """Return the pause before another attempt, in seconds; None if there is no further attempt."""
    if attempt._frame.state != "running":
        return None  # the item was cancelled, and the handler has raised another error then
    number = attempt._position.attempt
    is_last = retry.attempts is not None and number >= retry.attempts
    if is_last or attempt._actor.bound._is_stopped:
        return None
    if attempt._readers and any(reader.buffer.position for reader in attempt._readers):
        return None  # the values read from a stream are gone: another attempt would miss these values
    pause = pause_after(retry, error, number)
    if pause is None:
        return None
    deadline = attempt._frame.deadline
    if deadline is not None and attempt._member.group.loop.time() + pause >= deadline:
        return None  # the deadline would pass first: this error says more than a later timeout
    return pause


_WAIT: Final = number_of("a number of seconds that is not negative, or None", lambda value: value >= 0)


def pause_after(retry: Retry, error: Exception, failed_attempt: int) -> float | None:
    """Return how long to wait after attempt number `failed_attempt`, counted from 1; None if the wait is too long."""
    try:
        asked = None if retry.wait is None else retry.wait(error, failed_attempt)
    except Exception as of_wait:  # noqa: BLE001 - user code: failover and fallback must still run
        add_note(error, f"no further attempt: wait= of Retry raised {logs.shown(of_wait)}")
        return None
    if asked is not None:
        check("wait(error, attempt)", asked, _WAIT, "the result of Retry.")
        if retry.attempts is not None:
            return None if asked > retry.max_backoff_seconds else float(asked)
        if asked:  # 0 is a date that has passed: without a pause, an outage would be polled all the time
            return min(float(asked), retry.max_backoff_seconds)
    import random  # here, because the import takes time and most programs have no retries

    # The exponent is bounded because a float overflows at 2**1024, long after any sensible pause.
    pause = min(retry.max_backoff_seconds, retry.backoff_seconds * 2.0 ** min(failed_attempt - 1, 60))
    return pause * (1 - retry.jitter * random.random())


def _or_instead(run: Run, substitute: Callable[[Attempt, Exception], Awaitable[Any]]) -> Run:
    """Return a `Run` with a substitute after an error of the last attempt, unless the item has ended."""

    async def run_or_substitute(attempt: Attempt) -> Any:
        try:
            return await run(attempt)
        except Interrupted:
            raise
        except Exception as error:  # the substitute gets every error of the node
            if attempt._frame.state != "running":
                raise
            attempt._frame.is_substitute = True
            return await substitute(attempt, error)

    return run_or_substitute


def _failing_over(failover: Failover) -> Callable[[Attempt, Exception], Awaitable[Any]]:
    async def fail_over(attempt: Attempt, error: Exception) -> Any:
        actor, frame, position = attempt._actor, attempt._frame, attempt._position
        actor.counted().failed_over += 1
        if frame.span is not None:
            spans.happened(names.FAILOVER, actor.name, error)
        handled(attempt, "failover", error)
        position.attempt_deadline = None
        leave_outside_call(attempt._member, actor, frame)
        began = perf_counter()
        try:
            return await failover(attempt)
        finally:
            attempt._began += perf_counter() - began  # the substitute's time is not the node's

    return fail_over


def _falling_back(fallback: Callable[[Exception], Any]) -> Callable[[Attempt, Exception], Awaitable[Any]]:
    async def fall_back(attempt: Attempt, error: Exception) -> Any:
        if attempt._frame.span is not None:
            spans.happened(names.FALLBACK, attempt._actor.name, error)
        value: Any = fallback(error)
        return await value if inspect.isawaitable(value) else value

    return fall_back


def _counted(run: Run) -> Run:
    async def execution(attempt: Attempt) -> Any:
        try:
            return await run(attempt)
        finally:
            attempt._position.attempt_deadline = None
            leave_outside_call(attempt._member, attempt._actor, attempt._frame)
            count_execution(attempt._actor, attempt._began, attempt._frame, attempt._position)

    return execution


# The stack of nodes without a policy: one stack for all such nodes, since most nodes have no policy.
run_once: Run = _counted(_one_attempt(None, None))


async def traced(run: Run, attempt: Attempt) -> Any:
    """Run a step of a sampled item inside a span."""
    assert attempt._frame.span is not None
    with TracedExecution(attempt._frame.span, attempt._frame, attempt._actor) as execution:
        value = await run(attempt)
        execution.returned(value)
        return value


def invoking(run: Run, streams: Sequence[int] = ()) -> "Invoke":
    """Return a function that a worker calls to run a step for a frame.

    Args:
        run: the stack of the step.
        streams: the slots of the streams that the step reads; the step leaves the streams at its end. After an attempt
            that has read a value from a stream, there is no further attempt: the value is gone.
    """

    async def invoke(worker: "Worker", actor: "NodeActor", frame: Frame) -> Any:
        readers: Sequence[Reader[Any]] = [frame.values[slot] for slot in streams] if streams else ()
        for reader in readers:
            reader.buffer.read_by = worker, readers
        try:
            attempt = Attempt(worker, actor, frame, readers)
            value = await (run(attempt) if frame.span is None else traced(run, attempt))
            worker.attempt = 1  # reset here, because a node without a policy does not set it
            return value
        finally:
            value = None  # breaks a cycle: errors in it may refer to this stack frame
            for reader in readers:
                reader.buffer.read_by = None
                reader.leave()

    return invoke


def within_handlers(invoke: "Invoke") -> "Invoke":
    """Return `invoke` for calls that bound how many of their handlers run at a time: runs with `max_workers`."""

    async def within(worker: "Worker", actor: "NodeActor", frame: Frame) -> Any:
        handlers, limiter = worker.group.handlers, actor.limiter
        if handlers is None:  # a failover, which takes the place of its node, or a computation of a cache
            return await invoke(worker, actor, frame)
        if handlers.locked():
            # Give the place of the node back while this waits: a handler of the call may need it for a nested call.
            limiter.release()
            try:
                await handlers.acquire()
            except asyncio.CancelledError:
                limiter.take_over_limit()  # the worker gives the place back
                raise
            if limiter.free <= 0:
                handlers.release()
                actor.offer(frame)  # the inbox has room: either no bound, or only this frame comes here
                raise Requeued
            limiter.free -= 1
        else:
            await handlers.acquire()
        try:
            return await invoke(worker, actor, frame)
        finally:
            handlers.release()

    return within


# Hedging: a second attempt begins beside a slow first attempt, and the first result of the two counts.


class HedgeBudget:
    """How many second attempts a node may still make, over all its call sites in an Engine."""

    __slots__ = ("_share", "_tokens")

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = 1.0

    def called(self) -> None:
        """Count a call: the budget grows by the share of a call."""
        self._tokens = min(10.0, self._tokens + self._share)

    def take(self) -> bool:
        """Take the budget of one second attempt; return whether there was enough."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def hedged(after_seconds: float, budget: HedgeBudget) -> Around:
    """Return a layer that runs an attempt, and perhaps a second attempt beside it; the first result counts.

    Args:
        after_seconds: after how many seconds the second attempt begins.
        budget: bounds the number of second attempts.
    """

    def around(run: Run) -> Run:
        begin = partial(_Second, run)

        async def attempts(attempt: Attempt) -> Any:
            if attempt._position.attempt == 1:
                budget.called()
            async with Race(attempt, after_seconds, budget, begin) as race:
                value = await run(attempt)
                if not race.has_won:
                    return value
                attempt._frame.drop_unread(value)
            return race.value

        return attempts

    return around


class Race:
    """Two attempts of one item. The first runs in the `async with` block, and perhaps a second in a task beside it.

    If the result of the second attempt counts, the first is cancelled, and the block ends without an error.

    Args:
        first: the first attempt.
        after_seconds: after how many seconds the second attempt begins.
        budget: bounds the number of second attempts.
        begin: begins the second attempt, and returns its task.

    Attributes:
        has_won: whether the result of the second attempt counts.
        value: this result.
    """

    # Defaults in the class, because most races end before a second attempt.
    has_won = _is_over = False
    value: Any = None
    _second: MemberTask | None = None
    _error: Exception | None = None  # the error of the first attempt, which waits for the second
    _decided: "asyncio.Future[None]"  # ends this wait if the second attempt wins

    def __init__(
        self, first: Attempt, after_seconds: float, budget: HedgeBudget, begin: "Callable[[Race], MemberTask]"
    ) -> None:
        self.first = first
        self._budget = budget
        self._begin = begin
        self._timer = first._member.group.loop.call_later(after_seconds, self._begin_second)

    def wins(self) -> bool:
        """Take note of a result of the second attempt; return whether the result counts."""
        first = self.first
        self.has_won = not self._is_over and first._frame.state == "running"
        if self.has_won:
            first._actor.counted().hedges_won += 1
            if first._frame.span is not None:
                spans.happened(names.HEDGE_WON, first._actor.name)
            if self._error is not None:
                handled(first, "hedge", self._error)
                self._decided.set_result(None)
            else:
                cut_short(first._member, LOST)
        return self.has_won

    async def __aenter__(self) -> "Race":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        self._timer.cancel()
        second, member = self._second, self.first._member
        if second is None:
            return False
        try:
            if not isinstance(error, Exception | asyncio.CancelledError | None):
                self.has_won = False
            elif self.has_won:
                # While the first attempt unwound, its item may have ended, or its task was cancelled from outside.
                if member.cut is not LOST or undo_cut(member, self.first._undisturbed):
                    self.has_won = False
                    if not isinstance(error, asyncio.CancelledError):
                        raise asyncio.CancelledError from None
            elif isinstance(error, Interrupted):  # a question is not a failure
                pass
            elif isinstance(error, Exception) and second.task is not None:
                self._error, self._decided = error, member.group.loop.create_future()
                await asyncio.wait([second.task, self._decided], return_when=asyncio.FIRST_COMPLETED)
            return self.has_won
        finally:
            self._is_over = True
            self._second = self._error = None  # breaks cycles
            if not self.has_won:
                second.lose()

    def _begin_second(self) -> None:
        """Begin the second attempt, if a place is free and the budget allows it."""
        actor, frame, handlers = self.first._actor, self.first._frame, self.first._member.group.handlers
        if frame.state != "running" or actor.bound._is_stopped or actor.limiter.free <= 0:
            return
        if (handlers is not None and handlers.locked()) or not self._budget.take():
            return
        actor.counted().hedged += 1
        if frame.span is not None:
            spans.happened(names.HEDGE, actor.name)
        self._second = self._begin(self)


class _Second(MemberTask):
    """The second attempt of a function."""

    __slots__ = ()

    def __init__(self, run: Run, race: Race) -> None:
        first = race.first
        super().__init__(first._actor, first._member.group, first._frame)
        # In a copy of the context of the first attempt, which the timer runs in.
        self._begin(self._work(run, race), "hedge", copy_context())

    def cancel_if_in(self, frame: Frame) -> None:
        """Cancel the attempt of a frame that has ended."""
        if self.position.frame is frame:
            cut_short(self, STOPPED)

    def lose(self) -> None:
        """Cancel the attempt; a call in a process goes on, and keeps its place."""
        cut_short(self, LOST)

    async def _work(self, run: Run, race: Race) -> None:
        first, position, actor = race.first, self.position, self._actor
        frame, position.task = first._frame, self.task
        try:
            second = Attempt(self, actor, frame)
            position.attempt = first._position.attempt
            async with self.group.handlers or nullcontext():
                value = await run(second)
            if race.wins():
                race.value = value
            else:
                frame.drop_unread(value)
        except asyncio.CancelledError:
            pass  # cancelled by the engine, or with the loop: the first attempt decides the outcome of the item
        except BaseException as error:  # noqa: BLE001 - the first attempt decides
            if not isinstance(error, Exception):  # as in a worker: the exception ends more than the item
                frame.fail(error, actor, position.attempt)
            else:
                handled(first, "hedge", error)
        finally:
            position.attempt_deadline = None
            leave_outside_call(self, actor, frame)
