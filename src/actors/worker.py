"""Workers: asyncio tasks that carry frames through actors, and the groups that they belong to."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from time import perf_counter
from typing import Any, Protocol, cast

from .._errors import Interrupted
from . import current
from .frame import NOTHING, Frame, Interruption, foreign_cancel
from .invocation import LONGEST_LINE, DetachedStep, OutsideCall, cut_line
from .node_actor import ASYNC, INLINE, NOTHING_READY, Limiter, NodeActor
from .tasks import start_eagerly, start_task
from .threads import ThreadShare

# Worker: a plain asyncio task that carries frames through actors.
#
# It runs a handler from its first step to its last. Then it carries the frame on into the next actor, if that has a
# free place; otherwise it puts the frame into the inbox of that actor, and takes the next frame that is ready.

# pyright loses the types in the loop that carries a frame from actor to actor, because each actor is read from the one
# before; mypy does not, and checks them.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false


# How many hops a worker makes before it yields to the loop: about 0.1 ms with handlers that do nothing. That is long
# against the cost of the yield (2 us), and short against any timer.
BUDGET = 256
# How many turns of the loop frames may wait for workers that go on: a turn costs as much as one more worker.
TURNS = 4
_NO_FRAME: Frame = cast("Frame", None)
_NO_ACTOR: NodeActor = cast("NodeActor", None)
_NO_GROUP: "WorkerGroup" = cast("WorkerGroup", None)
_OWN_CANCEL = "penstock: the item has ended"


class Worker(current.Position):
    """One task that runs handlers, one after the other; it is also the position of that task.

    Attributes:
        group: the group that the worker belongs to. It is removed when the worker has ended, or there would be a cycle:
            contexts refer to positions, and groups to contexts.
        outside_call: the last call in a thread or on a device, which may go on after its attempt has ended.
        cancels: how often the engine has cancelled this task without undoing it yet.
        undisturbed: the value of `cancelling()` of the task without the cancellations of the engine.
        budget: how many hops it may make before it yields to the loop; when it has ended, how many were left.
        inner_budget: how many hops are left to the workers inside of its handlers, which run bodies of control flow in
            the same task.
        first: the frame that it begins with, the actors that the frame has to enter, and the actor that it comes from.
    """

    __slots__ = (
        "_nested",
        "budget",
        "cancels",
        "first",
        "group",
        "inner_budget",
        "outside_call",
        "undisturbed",
    )  # fmt: skip

    def __init__(self, group: "WorkerGroup", *, nested: bool = False) -> None:
        # `Position.__init__` written out.
        self.frame = self.actor = self.attempt_deadline = self.timeout = None
        self.attempt = 1
        self.waited_seconds = 0.0
        self.task = asyncio.current_task() if nested else None
        self.group = group
        self.cancels = 0
        self.first: tuple[Frame, tuple[NodeActor, ...], NodeActor | None] | None = None
        self.outside_call: OutsideCall | None = None
        self.budget = self.inner_budget = BUDGET
        self.undisturbed = 0
        self._nested = nested
        group.joined(self)

    @property
    def position(self) -> current.Position:
        """The worker itself, which is its position."""
        return self

    def is_in(self, frame: Frame, actor: NodeActor) -> bool:
        """Whether it runs the handler of `actor` for `frame`."""
        return self.frame is frame and self.actor is actor

    def cancel_if_in(self, frame: Frame) -> None:
        """Cancel the task if it still runs a handler of `frame`."""
        if self.frame is frame and self.task is not None and not self.cancels:
            self.cancels += 1
            self.task.cancel(_OWN_CANCEL)

    async def run(self) -> None:  # noqa: C901 - the hot path: every call out of it costs as much as a hop
        """Run handlers until the group is closed and no frame is ready."""
        group = self.group
        traced = group.traced
        loop, deadline = group.loop, group.ends_at
        task = self.task = asyncio.current_task(group.loop)
        assert task is not None
        undisturbed = self.undisturbed = task.cancelling()
        leaves_early = group.is_exclusive and not self._nested
        if not self._nested:
            group.runnable -= 1
        actor = _NO_ACTOR
        frame: Frame
        values: list[Any]
        following: NodeActor | None
        full: tuple[NodeActor, ...]
        pulled: tuple[NodeActor, Frame] | None = None
        value: Any = None
        failure: BaseException | None = None
        stopped = False  # this worker has to end: its task was cancelled, but not by the engine
        budget = self.budget
        try:
            if self.first is not None:
                frame, entries, before = self.first
                self.first = None
                if before is None and len(entries) == 1 and frame.state == "running" and entries[0].limiter.free > 0:
                    entries[0].limiter.free -= 1  # `WorkerGroup.start` written out, without the queue
                    pulled = entries[0], frame
                else:
                    full = self._begin(frame, entries, before)
                    if full and not await self._enter(full, before, undisturbed):
                        return
                    self.frame = self.actor = None
                frame = _NO_FRAME
            while True:
                if pulled is not None:
                    actor, frame = pulled
                    pulled = None
                elif group.ready:
                    actor, frame = group.ready.popleft()
                elif group.feed is not None:
                    pulled = group.feed.pull(self)
                    if pulled is None:
                        # The pull has run a burst of items, and there may be more. It may also have removed the feed.
                        if not group.ready and group.feed is not None:  # pyright: ignore[reportUnnecessaryComparison]
                            await self._let_others_run()
                        continue
                    actor, frame = pulled
                    pulled = None
                elif group.closed or (
                    leaves_early and len(group.workers) > 1 and (actor is _NO_ACTOR or not actor.widens)
                ):
                    return
                else:
                    await group.wait_for_work()
                    budget = BUDGET
                    continue
                if not group.armed and (group.feed is not None or group.ready):
                    group.arm()
                if frame.state != "running":
                    actor.limiter.release()
                    continue
                self.frame = frame
                values = frame.values
                while True:
                    self.actor = actor
                    if deadline is not None and loop.time() >= deadline:
                        await self._expire(actor, frame, deadline)
                        if frame.state != "running":
                            actor.limiter.release()
                            break
                    try:
                        mode = actor.mode
                        if mode == ASYNC and not traced:
                            slot = actor.slot
                            if actor.line is not None and deadline is None and budget > LONGEST_LINE:
                                self.budget = budget
                                going = actor.line(self, frame, values)
                                frame, values = _NO_FRAME, NOTHING  # the line may go on to further items
                                come = await going
                                budget = self.budget
                                if come is None:
                                    break
                                assert self.frame is not None
                                frame = self.frame
                                values = frame.values
                                actor, value, hops = come
                                come = None
                                budget -= hops
                            elif slot >= 0:
                                value = await actor.fn(values[slot])
                            elif actor.kwargs_of is None:
                                value = await actor.fn(*actor.args_of(values))
                            else:
                                value = await actor.fn(*actor.args_of(values), **actor.kwargs_of(values))
                        elif mode == INLINE and not traced and actor.completed:
                            value = actor.run(values)
                            if actor.was_slow:
                                actor.was_slow = False
                                budget = 0
                        else:
                            value = await actor.invoke(self, actor, frame)
                    except BaseException as error:
                        failure = error
                        if frame is _NO_FRAME:
                            if self.frame is None or self.actor is None:  # it came between two items of the line
                                raise
                            frame, actor = self.frame, self.actor
                            budget = self.budget - LONGEST_LINE  # how far it came was not counted
                            cut_line(error)
                    if failure is not None or frame.state != "running":  # a late result is discarded
                        stopped = self._is_stopped(undisturbed)
                        self._end_without_result(actor, frame, failure, stopped=stopped)
                        break
                    actor.completed += 1
                    limiter = actor.limiter
                    following = actor.successor
                    full = ()
                    if following is not None:
                        # The value has one reader, which waits for nothing else.
                        values[actor.out] = value
                        if following.limiter.free > 0:
                            following.limiter.free -= 1
                        else:
                            if not following.offer(frame):
                                full = (following,)
                            following = None
                    elif actor.ends_line:
                        self.frame = None
                        # `Frame.end_with` written out.
                        frame.result = value
                        frame.state = "done"
                        frame.values = NOTHING
                        if frame.timer is not None:
                            frame.timer.cancel()
                        frame.listener.frame_done(frame)
                    else:
                        values[actor.out] = value
                        join = actor.join
                        if join >= 0 and (left := frame.missing[join]) > 1:
                            # `_distribute` written out for a branch that is not the last.
                            frame.missing[join] = left - 1
                            for slot in actor.reads:
                                left = frame.readers[slot] = frame.readers[slot] - 1
                                if not left:
                                    values[slot] = None
                        elif actor.consumers:
                            following, full = self._distribute(actor, frame)
                        else:
                            self._finish(actor, frame)
                    if full:
                        stopped = not await self._wait_for_room(full, limiter, undisturbed)
                    elif limiter.waiting:
                        limiter.release()
                    else:
                        limiter.free += 1
                    if following is None:
                        break
                    actor = following
                    budget -= 1
                    if budget <= 0:
                        budget = BUDGET
                        await self._let_others_run(actor, frame)
                        if frame.state != "running":
                            actor.limiter.release()
                            break
                # An idle worker holds no item. And a cancellation that is on its way must not hit the next item.
                self.frame = self.actor = None
                value = failure = following = None
                frame, values = _NO_FRAME, NOTHING
                budget -= 1
                if stopped or task.cancelling() != undisturbed:
                    if self._nested:
                        raise asyncio.CancelledError
                    return
                if budget <= LONGEST_LINE:  # so that the next frame can go through a whole line
                    budget = BUDGET
                    await self._let_others_run()
        finally:
            self.budget = budget
            self.frame = self.task = None
            self.group = _NO_GROUP
            group.left(self)

    def next_item(self, actor: NodeActor) -> Frame | None:
        """Take the next item from the feed, if it begins in `actor` and `run` has nothing to do before.

        This is what `run` does between two items that go through one line of nodes, which has ended the first.
        """
        group, task = self.group, self.task
        assert group.feed is not None
        assert task is not None
        if group.ready or self.budget <= LONGEST_LINE or task.cancelling() != self.undisturbed or actor.mode != ASYNC:
            return None
        if not group.armed:
            group.arm()
        pulled = group.feed.pull(self)
        if pulled is None:
            if not group.ready and group.feed is not None:  # pyright: ignore[reportUnnecessaryComparison] - see `run`
                self.budget = 0
            return None
        first, frame = pulled
        if first is not actor:
            group.enqueue(first, frame)
            return None
        self.frame, self.actor = frame, actor
        return frame

    def _finish(self, actor: NodeActor, frame: Frame) -> None:
        """Count a step without readers as done; the last one finishes the frame."""
        if frame.sinks_left > 1:
            frame.sinks_left -= 1
            for slot in actor.reads:
                frame.release(slot)
        else:  # the frame has ended, and gives up all of its slots at once
            frame.sinks_left = 0
            self.frame = None
            frame.finish()

    def _begin(self, frame: Frame, entries: tuple[NodeActor, ...], before: NodeActor | None) -> tuple[NodeActor, ...]:
        """Let the first frame into actors; return the actors whose inbox is full.

        Args:
            frame: the frame.
            entries: the actors whose inputs are complete.
            before: the actor that the frame comes from, in which it holds a place until it has entered the others; None
                if the frame is new.
        """
        full: list[NodeActor] = []
        if frame.state == "running":
            group = self.group
            armed, group.armed = group.armed, True  # no callback is needed: this worker runs the frames that are ready
            full = group.start(frame, entries)
            group.armed = armed
        if full:
            self.frame, self.actor = frame, before
        elif before is not None:
            before.limiter.release()
        return tuple(full)

    async def _enter(self, full: tuple[NodeActor, ...], before: NodeActor | None, undisturbed: int) -> bool:
        """Wait until the first frame has entered the full inboxes; return False if this worker has to end."""
        if before is None:
            return await self._queue(full, undisturbed, is_full=True)
        return await self._wait_for_room(full, before.limiter, undisturbed)

    def _distribute(self, actor: NodeActor, frame: Frame) -> tuple[NodeActor | None, tuple[NodeActor, ...]]:
        """Tell the readers of a value that it is ready.

        Returns:
            Of the actors whose inputs are complete now: one to carry the frame on into, or None; and those whose inbox
            is full.
        """
        following: NodeActor | None = None
        full: tuple[NodeActor, ...] = ()
        readers, missing = frame.readers, frame.missing
        for slot in actor.reads:  # `Frame.release` written out
            readers[slot] -= 1
            if not readers[slot]:
                frame.values[slot] = None
        for consumer in actor.consumers:
            missing[consumer.index] -= 1
            if missing[consumer.index]:
                continue
            limiter = consumer.limiter
            if limiter.free > 0:
                limiter.free -= 1
                if following is None:
                    following = consumer
                else:
                    self.group.enqueue(consumer, frame)
            elif not consumer.offer(frame):
                full = (*full, consumer)
        if full and following is not None:
            # This worker is about to wait; another one has to carry the frame on.
            self.group.enqueue(following, frame)
            following = None
        return following, full

    async def _wait_for_room(self, full: tuple[NodeActor, ...], limiter: Limiter, undisturbed: int) -> bool:
        """Wait until full inboxes have room, which is backpressure; return False if this worker has to end.

        The worker keeps its place in the present node meanwhile, so that the node stands still. But a place that other
        call sites share is given back first: one of these call sites may have to run before there is room.
        """
        sampler = None if self.actor is None else self.actor.sampler
        began = 0.0 if sampler is None else perf_counter()
        if limiter.shared:
            limiter.release()
        try:
            return await self._queue(full, undisturbed, is_full=not limiter.shared)
        finally:
            if not limiter.shared:
                limiter.release()
            if sampler is not None:
                sampler.blocked_seconds += perf_counter() - began

    async def _queue(self, full: tuple[NodeActor, ...], undisturbed: int, *, is_full: bool) -> bool:
        """Wait until the present frame is in the inbox of each actor; return False if this worker has to end.

        Args:
            full: the actors.
            undisturbed: the value of `cancelling()` of this task without the cancellations of the engine.
            is_full: whether the actors have refused the frame just now.
        """
        frame = self.frame
        assert frame is not None
        going_on = True
        try:
            for actor in full:
                await actor.queue(frame, is_full=is_full)
                is_full = False  # there may be room in the others by now
        except asyncio.CancelledError as error:
            going_on = not self._is_stopped(undisturbed)
            self.frame = None
            if frame.state == "running":
                if self._nested and not going_on:
                    frame.cancel()
                else:
                    frame.fail(foreign_cancel(error), full[0])
                return going_on
        if frame.state == "failed" or frame.state == "cancelled":  # another worker may have carried it to "done"
            frame.leave()
        return going_on

    def _end_without_result(
        self, actor: NodeActor, frame: Frame, failure: BaseException | None, *, stopped: bool = False
    ) -> None:
        """Record the failure of a handler; or, if its frame has ended meanwhile, that the handler has unwound."""
        self.frame = None
        if frame.state != "running":
            if failure is not None and not isinstance(failure, asyncio.CancelledError):
                frame.fail(failure, actor, self.attempt)  # too late to be the outcome: it is only logged
            frame.leave()
        elif stopped and self._nested and (failure is None or isinstance(failure, asyncio.CancelledError)):
            frame.cancel()
        else:
            if not isinstance(failure, Interrupted | Interruption):  # a question is not a failure
                actor.failed += 1
            if failure is None or isinstance(failure, asyncio.CancelledError):
                failure = foreign_cancel(failure)
            frame.fail(failure, actor, self.attempt)
        self.attempt = 1
        actor.limiter.release()

    def _is_stopped(self, undisturbed: int) -> bool:
        """Undo the cancellations that the engine sent; return whether others remain, so that the worker has to end."""
        task = self.task
        assert task is not None
        while self.cancels:
            self.cancels -= 1
            if task.cancelling() > undisturbed:  # unless the handler has called uncancel() itself
                task.uncancel()
        return task.cancelling() > undisturbed

    async def _expire(self, actor: NodeActor, frame: Frame, deadline: float) -> None:
        """Yield to the loop, so that the timer of the deadline runs, which has passed while handlers held the loop."""
        while frame.state == "running" and self.group.loop.time() >= deadline:
            await self._let_others_run(actor, frame)

    async def _let_others_run(self, actor: NodeActor | None = None, frame: Frame | None = None) -> None:
        """Yield to the loop once. The engine does not cancel a worker meanwhile: it is between two handlers."""
        group = self.group
        self.frame = None
        group.runnable += 1
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if actor is not None and frame is not None:
                group.enqueue_first(actor, frame)
            raise
        finally:
            group.runnable -= 1
        self.frame = frame


# WorkerGroup: a group of workers with one queue of work.
#
# All items of an unsampled stream have one group; each call of a deployment and each `run` has its own. The workers of
# a group share a context, and an item runs in the context of its group.
#
# How many workers are there? As many as there are handlers suspended at the same time, plus one. They are not counted:
# a worker that leaves work in `ready` schedules one callback. When that runs, the loop has control again, so all
# workers are suspended, and if there is still work, one more worker is needed. A node that never suspends keeps one. If
# handlers suspend and return at once, a few workers do all: more are made only for what these would leave for long. In
# the group of one frame, a worker that finds no work ends, unless a step behind it may need several workers again.

_NONE_FULL: list[NodeActor] = []


class Feed(Protocol):
    """A source of items for workers that have nothing to do."""

    def pull(self, position: current.Position, /) -> tuple[NodeActor, Frame] | None:
        """Return an item and the actor that runs it, with the place in the actor already taken.

        Returns:
            None if there is no item now, or if short items were run right here, at the position of the worker.
        """
        ...

    def wanted(self) -> int:
        """Return an estimate of how many workers would get an item now."""
        ...


class Member(Protocol):
    """A member of a group: a worker, or the task of a generator.

    Attributes:
        group: the group that it belongs to.
        task: the task.
        outside_call: its last job in a thread or on a device, which may go on after its attempt.
        cancels: how often the engine has cancelled its task and not yet undone it.
    """

    group: "WorkerGroup"
    task: asyncio.Task[Any] | None
    outside_call: OutsideCall | None
    cancels: int

    @property
    def position(self) -> current.Position:
        """The frame and the actor that it works for."""
        ...

    def is_in(self, frame: Frame, actor: NodeActor, /) -> bool:
        """Whether it runs the handler, or the stream, of `actor` for `frame`, and holds a place of the actor."""
        ...

    def cancel_if_in(self, frame: Frame, /) -> None:
        """Cancel the task if it still works for `frame`."""
        ...


class WorkerGroup:
    """A group of workers with one queue of work.

    Args:
        context: the context of the handlers; each worker after the first gets a copy of it.
        on_empty: called with the group when it is closed and its last worker has ended.
        traced: whether the frames are sampled, so that node executions take the general path, which opens spans.
        ends_at: the time at which a timer ends the frames, in the loop's time; None without one. Workers look at it, to
            yield to the loop so that the timer can run.
        threads: the share of threads that the frames may keep busy; None for all threads of the Engine.

    Attributes:
        ready: frames to run next, each with an actor in which it already holds a place; `enqueue` adds one.
        workers: the members of the group; `joined` and `left` maintain it.
        runnable: how many workers are scheduled on the loop and will run in a coming turn.
        armed: whether a callback to `_find_workers` is scheduled.
        feed: the source that idle workers ask for items; None if it has none now.
        closed: whether workers end when they find no work.
        is_exclusive: whether the group has a single frame, so that its workers never go on to another item.
        detached: the first step of its only frame, while that runs outside of the loop and needs no worker.
        waited_for_in: the groups whose members a scope waits for, to which this one is added with its first member.
        caller: for a run, stream or call inside of a handler: the actor of that handler.
        events: for the events that its handlers emit, an `EventBuffer` of the engine; None if they are not read.
    """

    # As in a frame, attributes that few groups need have their defaults in the class, and attributes that every worker
    # reads are assigned. Most groups are for one call, with one worker and an empty queue.
    _idle: "list[asyncio.Future[None]] | None" = None
    caller: NodeActor | None = None
    detached: "DetachedStep | None" = None
    events: Any = None
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
        """Return a group for the bodies of a step of control flow: in the present context, otherwise as this one."""
        group = WorkerGroup(
            self.loop, copy_context(), on_empty, traced=self.traced, ends_at=self.ends_at, threads=self.threads
        )
        if self.events is not None:
            group.events = self.events
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
        """Remove a member that has ended; others run the frames that are ready, and the last one ends the group."""
        if isinstance(self.workers, set):
            self.workers.discard(member)
        else:
            self.workers = ()
        if self.ready and not self.armed:
            self.arm()
        if self.closed and not self.workers:
            self.ended()

    def enqueue(self, actor: NodeActor, frame: Frame) -> None:
        """Have a frame run in an actor in which it already holds a place."""
        if self.ready is NOTHING_READY:
            self.ready = deque()
        self.ready.append((actor, frame))
        if not self.armed:
            self.arm()

    def enqueue_first(self, actor: NodeActor, frame: Frame) -> None:
        """Put a frame first in the queue; only for a worker that is about to end: `left` then arms the group."""
        self.enqueue(actor, frame)
        self.ready.rotate(1)

    def arm(self) -> None:
        """Schedule `_find_workers`, which runs when all workers are suspended."""
        self.armed = True
        self.loop.call_soon(self._find_workers)

    def start(self, frame: Frame, entries: tuple[NodeActor, ...]) -> list[NodeActor]:
        """Let a new frame into the actors that wait for no other; return the actors whose inbox is full."""
        if len(entries) == 1:  # nearly always
            limiter = entries[0].limiter
            if limiter.free > 0:
                limiter.free -= 1
                self.enqueue(entries[0], frame)
                return _NONE_FULL
        elif not entries:
            frame.finish()
            return _NONE_FULL
        full: list[NodeActor] = []
        if self.ready is NOTHING_READY:
            self.ready = deque()
        ready = self.ready
        for actor in entries:  # `NodeActor.enter` and `enqueue` written out
            limiter = actor.limiter
            if limiter.free > 0:
                limiter.free -= 1
                ready.append((actor, frame))
            elif not actor.offer(frame):
                full.append(actor)
        if ready and not self.armed:
            self.arm()
        return full

    def cancel_workers(self, frame: Frame) -> int:
        """Cancel all workers that run a handler of `frame`; return how many there are."""
        if self.detached is not None:
            self.detached.leave()
        current_task = asyncio.current_task(self.loop) if self.workers else None
        count = 0
        for worker in self.workers:
            if worker.position.frame is frame:
                count += 1
                if worker.task is current_task:
                    # A handler cancels its own item. A cancel() from inside could hit the next item instead, so this
                    # waits until the handler is suspended.
                    self.loop.call_soon(worker.cancel_if_in, frame)
                else:
                    worker.cancel_if_in(frame)
        return count

    def close(self) -> None:
        """Note that no more work will come, so that workers end when they find none."""
        self.closed = True
        if self._idle:
            self._wake(len(self._idle))
        if not self.workers:
            self.ended()

    def ended(self) -> None:
        """Call `on_empty`, once; the function is forgotten then, because it may refer to this group."""
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
        except BaseException:
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
        self.armed = False  # only now: while the feed puts frames into `ready`, it need not arm the group
        if not wanted:
            self._left_over = 0
            return
        if self.runnable:  # a worker is about to run; look again after that
            self.arm()
            return
        more = self._wake(wanted)  # if there is an idle worker, one may be enough for all the work
        if not more:
            # Doubling their number reaches any number of workers in a few turns of the loop, and makes few in vain if
            # handlers suspend only now and then.
            more = min(wanted, max(1, len(self.workers)))
            taken = self._left_over - wanted
            if taken > 0:  # handlers return at once, so the workers will soon take more
                more = max(0, min(more, wanted // TURNS - taken))
            for _ in range(more):
                self.hire()
        self._left_over = wanted - more
        self.arm()

    def _wake(self, wanted: int) -> int:
        """Wake up to `wanted` idle workers; return how many there were."""
        before = self.runnable
        while self._idle and self.runnable - before < wanted:
            future = self._idle.pop()
            if not future.done():
                self.runnable += 1
                future.set_result(None)
        return self.runnable - before

    def hire(
        self,
        frame: Frame | None = None,
        entries: tuple[NodeActor, ...] = (),
        before: NodeActor | None = None,
        *,
        eagerly: bool = False,
    ) -> None:
        """Start one more worker.

        Args:
            frame: the frame that it begins with, if any.
            entries: the actors that the frame has to enter.
            before: the actor that the frame comes from, in which it holds a place until it has entered the others.
            eagerly: whether the worker takes its first step at once.
        """
        worker = Worker(self)
        worker.first = None if frame is None else (frame, entries, before)
        # Tasks may share a context, but `current()` finds the worker in it, so each further worker needs a copy.
        context = self.context if len(self.workers) == 1 else self.context.copy()
        context.run(current.source.set, worker)
        self.runnable += 1
        if eagerly:
            start_eagerly(self.loop, worker.run(), context)
        else:
            # With a name, because asyncio takes half a microsecond to make one up.
            worker.task = start_task(self.loop, worker.run(), name="penstock-worker", context=context)


def _ignore(group: WorkerGroup) -> None:
    """Do nothing: `on_empty` was called before."""
