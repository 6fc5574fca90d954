"""Executions: how the handler of a node runs on the loop, in a thread, or in a loop of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from functools import partial
from math import isfinite
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from .._errors import EngineClosedError
from ..telemetry import names, spans
from ..telemetry.counters import Figure
from .chains import WATCHED, run_linkwise, watched
from .execution import Attempt, Bound, DetachedRequest, DetachedStep
from .frame import LEFT_OUT, Frame
from .loop_host import LoopHost, figure_of
from .own_loops import Mailbox, Request
from .supervision import Child
from .threads import Job, ThreadPool

if TYPE_CHECKING:
    from .node_actor import NodeActor
    from .worker import Member


class Inline(Bound):
    """Calls a plain `def` on the event loop, or a chain of them, whose further links get spans of their own."""

    __slots__ = ()

    async def run(self, attempt: Attempt) -> Any:
        """Call the functions."""
        actor = attempt._actor
        began = perf_counter()
        value = run_linkwise(self._links, actor, attempt._frame, attempt.args, attempt.kwargs)
        actor.watch(perf_counter() - began)
        return value


class OnLoop(Bound):
    """Awaits an `async def` in the task of the worker."""

    __slots__ = ()

    can_emit = True

    def run(self, attempt: Attempt) -> Awaitable[Any]:
        """Return the coroutine."""
        actor = attempt._actor
        work: Any = actor.fn(*attempt.args, **attempt.kwargs)
        if actor.completed < WATCHED and work.__class__ is CoroutineType:
            work = watched(actor.watch, work)
        result: Awaitable[Any] = work
        return result


class StartsTasks(OnLoop):
    """Awaits an `async def` that starts tasks; these tasks have to know the item."""

    __slots__ = ()

    def run(self, attempt: Attempt) -> Awaitable[Any]:
        """Return the coroutine."""
        attempt._position.remember()
        return super().run(attempt)


LEFT_OUT.add(spans.in_thread.__code__)


class InThread(Bound):
    """Calls a plain `def` in a thread, in a copy of the caller's context.

    Args:
        pool_of: returns the threads.
        instance: as for `Bound`.
    """

    __slots__ = ("_pool_of",)

    _waits_for = names.THREAD_WAIT

    begins_later = True  # the scope may have to wait for a thread
    can_emit = True

    def __init__(self, pool_of: Callable[[], ThreadPool], instance: Child | None) -> None:
        super().__init__(instance)
        self._pool_of = pool_of

    async def run(self, attempt: Attempt) -> Any:
        """Wait until the scope may keep one more thread busy, and call the function in a thread."""
        actor, member = attempt._actor, attempt._member
        pool, sampler, asked = self._pool_of(), actor.sampler, perf_counter()
        await take_thread(member)
        if member.group.threads is not None or member.position.timeout is not None:
            attempt.begun(member.position.waited_seconds + perf_counter() - asked)
        given, timed = perf_counter(), None
        result: asyncio.Future[Any] | None
        if sampler is not None:
            timed = sampler.in_thread(actor.fn, is_free=pool.has_free_thread)
        fn = timed or actor.fn
        if attempt._frame.span is not None:
            fn = partial(spans.in_thread, fn)
        try:
            result = call_in_thread(pool, member, fn, attempt.args, attempt.kwargs)
            value = await (result if actor.policy.discard is None else _or_discarded(result, attempt))
        finally:
            result = None  # breaks a cycle: an error in it refers to this stack frame
            if timed is not None:
                timed.came_back()
            if isinstance(member.outside_call, Job):  # a wait for a thread is no work of the node
                member.position.waited_seconds += max(0.0, member.outside_call.began - given)
        actor.refuse_coroutine(value, actor.name)
        return value


async def _or_discarded(result: "asyncio.Future[Any]", attempt: Attempt) -> Any:
    """Wait for the result of a thread; if the attempt ends before the thread, discard the late result."""

    def returned_late(result: "asyncio.Future[Any]") -> None:
        if not result.cancelled() and result.exception() is None and result.result() is not None:
            attempt._frame.came(result.result(), attempt._actor)

    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        result.add_done_callback(returned_late)
        raise
    finally:
        del result  # breaks a cycle


async def take_thread(worker: "Member") -> None:
    """Wait until the run, stream or deployment of a worker may keep one more thread busy."""
    if worker.group.threads is not None:
        await worker.group.threads.take()


def call_in_thread(
    pool: ThreadPool,
    worker: "Member",
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> "asyncio.Future[Any]":
    """Run a blocking function in a thread, in a copy of the caller's context; `take_thread` must have been awaited."""
    context, share = copy_context(), worker.group.threads
    job = worker.outside_call = Job(context, fn, args, kwargs)
    if share is not None:
        job.then(share.give_back)
    # The thread knows this item even after the worker has gone on to the next item.
    job.handling = context.run(worker.position.remember)
    try:
        return pool.begin(job)
    except (EngineClosedError, RuntimeError):  # the pool is closed, or no thread can start
        job.on_returned()
        raise


class InOwnLoop(Bound):
    """Puts items into the inbox of an actor that owns its loop.

    Args:
        host: the host that runs the loop.
    """

    __slots__ = ("_host",)

    def __init__(self, host: LoopHost) -> None:
        super().__init__(host)
        self._host = host

    @property
    def _inbox(self) -> Mailbox[Any]:
        """The inbox of the loop."""
        return self._host.inbox

    def figures(self) -> Sequence[Figure]:
        """Return the finite numbers that the actor has reported; all call sites return the same numbers."""
        told = [figure_of(name, value) for name, value in self._host.told.copy().items() if isfinite(value)]
        return [*told, *self._host.figures()]

    async def run(self, attempt: Attempt) -> Any:
        """Give the actor an item, and return its result."""
        frame = attempt._frame
        return await self._host.run(attempt.args[0], frame.priority, attempt.deadline, frame.key, frame.leaves_running)

    def _begin(
        self, actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DetachedStep | None:
        """Give the actor an item without a worker; return None if the inbox is full: then a worker has to wait.

        Raises:
            ActorStopped: the loop has ended.
        """
        step = DetachedRequest(actor, frame)
        outcome: Any = step  # has the methods of a future that settle it
        request: Request[Any, Any] = Request(args[0], frame.priority, frame.deadline, frame.key, outcome)
        if not self._host.submit_nowait(request):
            return None
        step.request = request
        return step
