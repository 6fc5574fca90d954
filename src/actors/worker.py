"""Workers: asyncio tasks that carry frames through actors, and the groups that they belong to."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from enum import Enum
from time import perf_counter
from typing import Any, Final, Protocol, cast

from .._errors import Interrupted
from . import current
from .chains import LONGEST_LINE
from .channel import Channel
from .execution import INLINE, STOPPED, OutsideCall, Requeued, cut_short, end_calls, undo_cut
from .frame import NOTHING, Frame, Interruption, cut_line, foreign_cancel
from .node_actor import NOTHING_READY, Limiter, NodeActor
from .policy import Policy
from .tasks import start_eagerly, start_task
from .threads import ThreadShare

# Worker: a plain asyncio task that carries frames through actors.
#
# A worker runs a handler from its first step to its last. Then it carries the frame on into the next actor, if that
# actor has a free place. Otherwise it puts the frame into the inbox of that actor, and takes the next ready frame.
#
# Ownership. Only the thread of the loop writes to a worker, its group and its actors. Other threads read `frame`,
# `actor` and `attempt` through a `Handling`, and write nothing. Only the worker writes its fields, except for these:
# - `first`: `WorkerGroup.start_worker` writes it before the task begins.
# - `cut`: code that cuts the handler short sets it, and the code around the handler resets it once it has unwound.
# - `attempt`, `attempt_deadline`, `waited_seconds` and `outside_call` belong to the attempt while a handler runs.
# - `frame` and `actor`: a line and the feed write them in the task of the worker, while the worker waits for the two.
# - `budget`: lines, slow chains, and the worker of a body in the same task use it up as well.

# pyright loses the types in the loop that carries a frame from actor to actor, because each actor is read from the
# actor before. mypy keeps these types, and checks them.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false


# How many hops a worker makes before it yields to the loop: about 0.1 ms with handlers that do nothing. That is long
# against the cost of the yield (2 us), and short against any timer.
BUDGET = 256
# How many turns of the loop frames may wait for the present workers before more are started: a turn costs as much as
# one more worker.
TURNS = 4
_NO_FRAME: Frame = cast("Frame", None)
_NO_ACTOR: Final = NodeActor("(none)", "", 0, Policy(), Limiter(), Channel(None))
_NO_GROUP: "WorkerGroup" = cast("WorkerGroup", None)


class Worker(current.Position):
    """One task that runs handlers, one after the other; a worker is also the position of that task.

    Attributes:
        group: the group that the worker belongs to; reset when the worker has ended, to break a cycle: contexts refer
            to positions, and groups to contexts.
        outside_call: the last call in a thread or on a device, which may go on after its attempt has ended.
        cut: why the engine has cut the present handler short; see `Member`.
        undisturbed: the value of `cancelling()` of the task without the cancellations of the engine.
        budget: how many hops the worker may make before it yields to the loop. Workers inside of its handlers, which
            run bodies of control flow in the same task, use up the same budget.
        first: the frame that the worker begins with, the actors that the frame has to enter, and the actor that the
            frame comes from.
    """

    __slots__ = (
        "_nested", "budget", "cut", "first", "group", "outside_call", "undisturbed",
    )  # fmt: skip

    def __init__(self, group: "WorkerGroup", *, nested: bool = False) -> None:
        # `Position.__init__` written out.
        self.frame = self.actor = self.attempt_deadline = self.timeout = self.calls = self.inner = None
        self.attempt = 1
        self.waited_seconds = 0.0
        self.task = asyncio.current_task() if nested else None
        self.group = group
        self.cut: str | None = None
        self.first: tuple[Frame, tuple[NodeActor, ...], NodeActor | None] | None = None
        self.outside_call: OutsideCall | None = None
        self.budget = BUDGET
        self.undisturbed = 0
        self._nested = nested
        group.runnable += 1
        group.joined(self)

    @property
    def position(self) -> current.Position:
        """The worker itself, which is its position."""
        return self

    def cancel_if_in(self, frame: Frame) -> None:
        """Cancel the task if it still runs a handler of `frame`."""
        if self.frame is frame:
            cut_short(self, STOPPED)

    async def run(self) -> None:  # noqa: C901 - the hot path: a further function call costs as much as a hop
        """Run handlers until the group is closed and no frame is ready."""
        group = self.group
        loop, deadline, traced = group.loop, group.ends_at, group.traced
        task = self.task = asyncio.current_task(loop)
        assert task is not None
        undisturbed = self.undisturbed = task.cancelling()
        leaves_early = group.is_exclusive and not self._nested
        group.runnable -= 1
        actor, frame = _NO_ACTOR, _NO_FRAME
        value: Any = None
        going: Any = None
        following: NodeActor | None
        first: tuple[NodeActor, Frame] | None = None
        try:
            if self.first is not None:
                first = await self._enter(*self.first)
            while True:
                if first is not None:
                    actor, frame = first
                    first = None
                elif group.ready:
                    actor, frame = group.ready.popleft()
                elif group.feed is not None:
                    pulled = group.feed.pull(self)
                    if pulled.__class__ is NoItem:
                        if pulled is NoItem.AGAIN:
                            await self._let_others_run()
                        continue
                    actor, frame = pulled  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues] - `isinstance` is slower
                elif group.closed or (leaves_early and len(group.workers) > 1 and not actor.widens):
                    return
                else:
                    await group.wait_for_work()
                    self.budget = BUDGET
                    continue
                if frame.state != "running":  # the frame has ended while it was in `ready`
                    actor.limiter.release()
                    continue
                self.frame, values, following = frame, frame.values, actor
                while following is not None:
                    actor = self.actor = following
                    budget = self.budget
                    if budget <= 0 or (deadline is not None and loop.time() >= deadline):
                        # The loop gets its turn, in which also the timer of the deadline runs.
                        self.budget = 0
                        group.enqueue_first(actor, frame)
                        break
                    self.budget = budget - 1
                    try:
                        if traced or actor.completed < (mode := actor.mode):
                            value = await actor.invoke(self, actor, frame)
                        elif mode == INLINE:
                            value = actor.run(values, self)
                        elif actor.line is not None and deadline is None and budget > LONGEST_LINE:
                            going = actor.line(self, frame, values)
                            frame, values = _NO_FRAME, NOTHING  # the line may go on to further items
                            value = await going
                            if self.frame is None:
                                break
                            actor, frame = self.actor, self.frame
                            values = frame.values
                        elif actor.slot >= 0:
                            value = await actor.fn(values[actor.slot])
                        elif actor.kwargs_of is None:
                            value = await actor.fn(*actor.args_of(values))
                        else:
                            value = await actor.fn(*actor.args_of(values), **actor.kwargs_of(values))
                    except BaseException as error:
                        if self.frame is None:  # the error came between two items of a line
                            raise
                        self._end_without_result(error)
                        break
                    if frame.state != "running":  # a late result is discarded
                        self._end_without_result(None)
                        break
                    actor.completed += 1
                    limiter = actor.limiter
                    following = actor.successor
                    if following is not None and following.limiter.free > 0:
                        # The value has one reader, which waits for no other input.
                        following.limiter.free -= 1
                        values[actor.out] = value
                    elif following is not None:
                        values[actor.out] = value
                        if not following.offer(frame):
                            await self._wait_for_room([following])
                            break
                        following = None
                    elif actor.consumers:
                        values[actor.out] = value
                        following, full = self._distribute(actor, frame)
                        if full:
                            await self._wait_for_room(full)
                            break
                    else:
                        self.frame = None
                        frame.step_ended(actor, value)
                    if limiter.waiting:
                        limiter.release()
                    else:
                        limiter.free += 1
                # An idle worker keeps no item alive. And a cancellation that is on its way must not hit the next item.
                self.frame = self.actor = None
                value = going = following = None
                frame, values = _NO_FRAME, NOTHING
                if task.cancelling() != undisturbed:
                    raise asyncio.CancelledError
                if self.budget < LONGEST_LINE:  # so that the next frame can go through a whole line
                    await self._let_others_run()
        finally:
            self.frame = self.task = None
            self.group = _NO_GROUP
            group.left(self)

    def next_item(self, actor: NodeActor) -> Frame | None:
        """Take the next item from the feed, if it begins in `actor` and `run` has no other work to do first.

        A line of nodes calls this between two items, instead of returning to `run`.
        """
        group, task = self.group, self.task
        assert group.feed is not None
        assert task is not None
        if (
            group.ready
            or self.budget < LONGEST_LINE
            or task.cancelling() != self.undisturbed
            or actor.completed < actor.mode  # the actor is timed from now on
        ):
            return None
        pulled = group.feed.pull(self)
        if pulled.__class__ is NoItem:
            if pulled is NoItem.AGAIN:
                self.budget = 0
            return None
        first, frame = pulled  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues] - see `run`
        if first is not actor:
            group.enqueue(first, frame)
            return None
        self.frame, self.actor = frame, actor
        return frame

    async def _enter(
        self, frame: Frame, entries: tuple[NodeActor, ...], before: NodeActor | None
    ) -> tuple[NodeActor, Frame] | None:
        """Have the first frame of the worker enter actors; return the actor that the worker runs next, if any.

        Args:
            frame: the frame.
            entries: the actors, whose inputs are complete.
            before: the actor that the frame comes from, where it holds a place until it has entered the others; None if
                the frame is new.
        """
        self.first = None
        entered: tuple[NodeActor, Frame] | None = None
        full = _NONE_FULL
        if frame.state == "running":
            if len(entries) == 1 and entries[0].limiter.free > 0:  # `WorkerGroup.start` written out, without the queue
                entries[0].limiter.free -= 1
                entered = entries[0], frame
            else:
                full = self.group.start(frame, entries)
        if full:
            self.frame, self.actor = frame, before
            await self._wait_for_room(full)
            self.frame = self.actor = None
        elif before is not None:
            before.limiter.release()
        return entered

    def _distribute(self, actor: NodeActor, frame: Frame) -> tuple[NodeActor | None, list[NodeActor]]:
        """Tell the readers of a value that it is ready.

        A copy in `run` for all branches but the last would save 2 to 3 % of a fan-out that waits; it would add five
        branches of code there.

        Returns:
            Two values about the actors whose inputs are complete now: the actor to carry the frame on into, or None;
            and the actors whose inbox is full.
        """
        following: NodeActor | None = None
        full = _NONE_FULL
        missing = frame.missing
        for slot in actor.reads:
            frame.release(slot)
        for consumer in actor.consumers:
            index = consumer.index
            left = missing[index] = missing[index] - 1
            if left:
                continue
            limiter = consumer.limiter
            if limiter.free > 0:
                limiter.free -= 1
                if following is None:
                    following = consumer
                else:
                    self.group.enqueue(consumer, frame)
            elif not consumer.offer(frame):
                full = [*full, consumer]
        if full and following is not None:
            # This worker is about to wait; another worker has to carry the frame on.
            self.group.enqueue(following, frame)
            following = None
        return following, full

    async def _wait_for_room(self, full: list[NodeActor]) -> None:
        """Wait until full inboxes have room for the present frame; so backpressure reaches the present node.

        The worker keeps its place in the present node meanwhile, so that the node stands still. But a place that other
        call sites share is given back first: one of these call sites may have to run before an inbox has room.
        """
        if self.actor is None:  # the frame is new
            await self._queue(full, is_full=True)
            return
        sampler, limiter = self.actor.sampler, self.actor.limiter
        began = 0.0 if sampler is None else perf_counter()
        if limiter.shared:
            limiter.release()
        try:
            await self._queue(full, is_full=not limiter.shared)
        finally:
            if not limiter.shared:
                limiter.release()
            if sampler is not None:
                sampler.blocked_seconds += perf_counter() - began

    async def _queue(self, full: list[NodeActor], *, is_full: bool) -> None:
        """Wait until the present frame is in the inbox of each of these actors.

        Args:
            full: the actors.
            is_full: whether the actors have refused the frame just now.
        """
        frame = self.frame
        assert frame is not None
        try:
            for actor in full:
                await actor.queue(frame, is_full=is_full)
                is_full = False  # the other inboxes may have room by now
        except asyncio.CancelledError as error:
            stopped = undo_cut(self, self.undisturbed)
            self.frame = None
            if frame.state == "running":
                if self._nested and stopped:
                    frame.cancel()
                    raise
                frame.fail(foreign_cancel(error), full[0])
                return
        if frame.state == "failed" or frame.state == "cancelled":  # not "done" by another worker
            frame.leave()

    def _end_without_result(self, failure: BaseException | None) -> None:
        """Record the failure of the handler; or, if its frame has ended meanwhile, the end of the handler.

        Raises:
            asyncio.CancelledError: the handler around a body was cancelled. This is the error that has arrived, by
                whose arguments a scope of anyio recognises its own cancellation.
        """
        frame, actor = self.frame, self.actor
        assert frame is not None
        assert actor is not None
        self.frame = None
        stopped = undo_cut(self, self.undisturbed)
        cancelled = failure if stopped and self._nested and isinstance(failure, asyncio.CancelledError) else None
        if isinstance(failure, Requeued):
            return
        if failure is not None:
            cut_line(failure)
        if frame.state != "running":
            if failure is not None and not isinstance(failure, asyncio.CancelledError):
                frame.fail(failure, actor, self.attempt)  # too late for the outcome: the failure is only logged
            frame.leave()
        elif cancelled is not None:
            frame.cancel()
        elif failure is not None:
            if not isinstance(failure, Interrupted | Interruption):  # a question is not a failure
                actor.failed += 1
            if isinstance(failure, asyncio.CancelledError):
                failure = foreign_cancel(failure)
            frame.fail(failure, actor, self.attempt)
        self.attempt = 1
        actor.limiter.release()
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                del cancelled, failure  # breaks a cycle: the traceback of the error refers to this frame

    async def _let_others_run(self) -> None:
        """Yield to the loop once. The engine does not cancel the worker meanwhile, because no handler runs in it."""
        group = self.group
        if self.calls is not None:
            await end_calls(self)
        group.runnable += 1
        try:
            await asyncio.sleep(0)
        finally:
            group.runnable -= 1
        self.budget = BUDGET


# WorkerGroup: a group of workers with one queue of work.
#
# All items of an unsampled stream have one group; each call of a deployment and each `run` has its own group. The
# workers of a group share a context, and an item runs in the context of its group.
#
# A group needs as many workers as handlers are suspended at the same time, plus one. Suspended handlers are not
# counted. Instead, a worker that leaves work in `ready` schedules one callback. When the callback runs, the loop has
# control again, so all workers are suspended. If work is still left, one more worker is needed. Handlers that never
# suspend need one worker. For handlers that suspend and return at once, a few workers are enough: more are made only
# for frames that would wait long. In the group of one frame, a worker that finds no work ends, unless a later step may
# need several workers again.

_NONE_FULL: list[NodeActor] = []


class NoItem(Enum):
    """Why a feed has no item for a worker."""

    AGAIN = "items were run in `pull` itself, or put into an inbox: the loop gets its turn, and more may follow"
    NO_ROOM = "the limit of items in flight is reached; the feed is removed meanwhile"
    NEEDS_ACTORS = "the actors for the graph of the next item are not made yet; the feed is removed meanwhile"
    BLOCKED = "an item waits for room in an inbox; the feed is removed meanwhile"
    ENDED = "no more items come; the feed is removed"


class Feed(Protocol):
    """A source of items for workers that have nothing to do."""

    def pull(self, worker: Worker, /) -> tuple[NodeActor, Frame] | NoItem:
        """Return the actor that runs an item, with a place taken, and the item; or why the feed has no item."""
        ...

    def wanted(self) -> int:
        """Return an estimate of how many workers would get an item now."""
        ...


class Member(Protocol):
    """A member of a group: a worker, or a `MemberTask`.

    Attributes:
        group: the group that the member belongs to.
        task: the task.
        outside_call: the last job in a thread or on a device, which may go on after its attempt.
        cut: why the engine has cut the present handler short: STOPPED, RESTARTED or LOST; None if it has not.
    """

    group: "WorkerGroup"
    task: asyncio.Task[Any] | None
    outside_call: OutsideCall | None
    cut: str | None

    @property
    def position(self) -> current.Position:
        """The frame and the actor that the member works for."""
        ...

    def cancel_if_in(self, frame: Frame, /) -> None:
        """Cancel the task if the member still works for `frame`."""
        ...


class WorkerGroup:
    """A group of workers with one queue of work.

    Args:
        context: the context of the handlers; each worker after the first gets a copy of it.
        on_empty: called with the group when it is closed and its last worker has ended.
        traced: whether the frames are sampled, so that node executions take the general path, which opens spans.
        ends_at: the time at which a timer ends the frames, in the loop's time; None without a timer. Workers then yield
            to the loop, so that the timer can run.
        threads: the share of threads that the frames may keep busy; None for all threads of the Engine.

    Attributes:
        ready: frames to run next, each with an actor in which it already holds a place; `enqueue` adds one.
        workers: the members of the group; `joined` and `left` maintain it.
        runnable: how many workers are scheduled on the loop and will run in a coming turn.
        armed: whether a callback to `_find_workers` is scheduled.
        feed: the source that idle workers ask for items; None if the source has no items now.
        closed: whether workers end when they find no work.
        is_exclusive: whether the group has a single frame, so that its workers never go on to another item.
        waited_for_in: the groups whose members a scope waits for; the first member adds this group to them.
        caller: for a run, stream or call inside of a handler: the actor of that handler.
        events: the `EventBuffer` for events that handlers of the group emit; None if nobody reads the events.
        handlers: bounds how many handlers of a run, in all its groups, run at a time; None without a bound.
        step: for a group inside of a step: the name of the step, and the number of the call in its handler.
    """

    # As in a frame, attributes that few groups need have their defaults in the class, and attributes that every worker
    # reads are assigned. Most groups are for one call, with one worker and an empty queue.
    _idle: "list[asyncio.Future[None]] | None" = None
    caller: NodeActor | None = None
    events: Any = None
    handlers: asyncio.Semaphore | None = None
    step: str | None = None
    is_exclusive = False
    _left_over = 0  # how many frames the last `_find_workers` left to the present workers
    waited_for_in: "set[WorkerGroup] | None" = None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        on_empty: Callable[["WorkerGroup"], None],
        *,
        traced: bool = False,
        ends_at: float | None = None,
        threads: ThreadShare | None = None,
    ) -> None:
        self.loop = loop
        self.context = context
        self.traced = traced
        self.ends_at = ends_at
        self.threads = threads
        self.ready: deque[tuple[NodeActor, Frame]] = NOTHING_READY
        self.workers: tuple[Member, ...] | set[Member] = ()
        self.feed: Feed | None = None
        self.runnable = 0
        self.armed = False
        self.closed = False
        self._on_empty = on_empty

    def for_bodies(self, on_empty: Callable[["WorkerGroup"], None]) -> "WorkerGroup":
        """Return a group for the bodies of a step of control flow: like this group, but in the present context."""
        group = WorkerGroup(
            self.loop, copy_context(), on_empty, traced=self.traced, ends_at=self.ends_at, threads=self.threads
        )
        group.events, group.handlers = self.events, self.handlers
        return group

    def joined(self, member: Member) -> None:
        """Add a member that has begun."""
        if not self.workers:
            self.workers = (member,)
            if self.waited_for_in is not None:
                self.waited_for_in.add(self)
        elif isinstance(self.workers, set):
            self.workers.add(member)
        else:
            self.workers = {*self.workers, member}

    def left(self, member: Member) -> None:
        """Remove a member that has ended. Other members run the ready frames; the last member ends the group."""
        if isinstance(self.workers, set):
            self.workers.discard(member)
        else:
            self.workers = ()
        if self.ready and not self.armed:
            self.schedule_check()
        if self.closed and not self.workers:
            self.ended()

    def enqueue(self, actor: NodeActor, frame: Frame) -> None:
        """Have a frame run in an actor in which it already holds a place."""
        if self.ready is NOTHING_READY:
            self.ready = deque()
        self.ready.append((actor, frame))
        if not self.armed:
            self.schedule_check()

    def enqueue_first(self, actor: NodeActor, frame: Frame) -> None:
        """Put a frame first in the queue, for a worker that has used up its budget and is about to yield."""
        self.enqueue(actor, frame)
        self.ready.rotate(1)

    def schedule_check(self) -> None:
        """Schedule `_find_workers`, which runs when all workers are suspended."""
        self.armed = True
        self.loop.call_soon(self._find_workers)

    def start(self, frame: Frame, entries: tuple[NodeActor, ...]) -> list[NodeActor]:
        """Let a new frame enter the actors whose inputs are complete; return the actors whose inbox is full."""
        if not entries:
            frame.finish()
        full = _NONE_FULL
        for actor in entries:
            limiter = actor.limiter
            if limiter.free > 0:
                limiter.free -= 1
                self.enqueue(actor, frame)
            elif not actor.offer(frame):
                full = [*full, actor]
        return full

    def cancel_workers(self, frame: Frame) -> int:
        """Cancel all workers that run a handler of `frame`; return how many there are."""
        if frame.detached is not None:
            frame.detached.leave()
        current_task = asyncio.current_task(self.loop) if self.workers else None
        count = 0
        for worker in self.workers:
            if worker.position.frame is frame:
                count += 1
                if worker.task is current_task:
                    # A handler cancels its own item. A cancel() from inside could hit the next item instead, so the
                    # cancel waits until the handler is suspended.
                    self.loop.call_soon(worker.cancel_if_in, frame)
                else:
                    worker.cancel_if_in(frame)
        return count

    def close(self) -> None:
        """Note that no more work will come, so that workers without work end."""
        self.closed = True
        if self._idle:
            self._wake(len(self._idle))
        if not self.workers:
            self.ended()

    async def members_left(self) -> None:
        """Wait until the present members have left the group.

        A worker whose task is cancelled before its first step, as when the loop is shut down, cannot leave by itself.
        """
        members = {member.task: member for member in self.workers if member.task is not None}
        await (asyncio.wait(members) if members else asyncio.sleep(0))
        for task, member in members.items():
            if isinstance(member, Worker) and member.task is task:
                self.runnable -= 1
                self.left(member)

    def outlived_by(self, call: OutsideCall) -> None:
        """Note a call outside of the loop that goes on after its attempt has ended; most groups do not wait for it."""

    def ended(self) -> None:
        """Call `on_empty` once, and forget the function, because it may refer to this group."""
        on_empty, self._on_empty = self._on_empty, _ignore
        on_empty(self)

    async def wait_for_work(self) -> None:
        """Suspend the calling worker until there is work, or the group is closed."""
        future = self.loop.create_future()
        if self._idle is None:
            self._idle = []
        self._idle.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future in self._idle:
                self._idle.remove(future)
            elif not future.cancelled():
                self.runnable -= 1
            raise
        self.runnable -= 1

    def _find_workers(self) -> None:
        """Wake or start workers for the frames that are ready."""
        wanted = 0 if self.feed is None else self.feed.wanted()
        wanted += len(self.ready)
        self.armed = False  # only after `wanted()`, in which the feed may put frames into `ready`
        if not wanted:
            self._left_over = 0
            return
        if self.runnable:  # a worker is about to run: check again after it
            self.schedule_check()
            return
        more = self._wake(wanted)  # an idle worker may be enough for all the work
        if not more:
            # Doubling the number reaches any number of workers in a few turns of the loop. Few workers are made in vain
            # if handlers suspend only now and then.
            more = min(wanted, max(1, len(self.workers)))
            taken = self._left_over - wanted
            if taken > 0:  # handlers return at once, so the workers will soon take more
                more = max(0, min(more, wanted // TURNS - taken))
            for _ in range(more):
                self.start_worker()
        self._left_over = wanted - more
        self.schedule_check()

    def _wake(self, wanted: int) -> int:
        """Wake up to `wanted` idle workers; return how many were woken."""
        before = self.runnable
        while self._idle and self.runnable - before < wanted:
            future = self._idle.pop()
            if not future.done():
                self.runnable += 1
                future.set_result(None)
        return self.runnable - before

    def start_worker(
        self,
        frame: Frame | None = None,
        entries: tuple[NodeActor, ...] = (),
        before: NodeActor | None = None,
        *,
        eagerly: bool = False,
    ) -> None:
        """Start one more worker.

        Args:
            frame: the frame that the worker begins with, if any.
            entries: the actors that the frame has to enter.
            before: the actor that the frame comes from, where it holds a place until it has entered the others.
            eagerly: whether the worker takes its first step at once.
        """
        worker = Worker(self)
        worker.first = None if frame is None else (frame, entries, before)
        # Tasks may share a context, but `current()` finds the worker in it, so each further worker needs a copy.
        context = self.context if len(self.workers) == 1 else self.context.copy()
        context.run(current.source.set, worker)
        if eagerly:
            start_eagerly(self.loop, worker.run(), context)
        else:
            # With a name, because asyncio takes half a microsecond to make up a name.
            worker.task = start_task(self.loop, worker.run(), name="penstock-worker", context=context)


def _ignore(group: WorkerGroup) -> None:
    """Do nothing: `on_empty` was called before."""
