"""Crew: a group of workers with one queue of work.

All items of an unsampled stream have one crew, every call of a deployment and every `run` has its own: workers share
a context, and an item has the context of its crew.

How many workers are there? As many as there are handlers suspended at the same time, plus one. Nobody counts that:
whoever leaves work in `ready` arms one callback. When it runs, the loop has control again, so every worker is
suspended, and if work is still there, more workers are needed. A node that never suspends keeps one.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

from . import current
from .errand import Carrier, Errand
from .frame import Frame
from .node_actor import NodeActor
from .started_tasks import start_task
from .threads import ThreadShare
from .worker import Worker

_NOBODY: list[NodeActor] = []


class Feed(Protocol):
    """Gives items to workers that have nothing to do."""

    def pull(self, position: current.Position, /) -> tuple[NodeActor, Frame] | None:
        """Return one more item, its place already taken.

        Returns:
            None if there is none now, or if it was so short that it has been run, at the worker's position.
        """
        ...

    def wanted(self) -> int:
        """Return how many workers would get an item now, as far as can be told."""
        ...


class Member(Protocol):
    """A task that works for frames: a worker, or the driver of a stream.

    Attributes:
        position: where it is.
        task: the task.
    """

    position: current.Position
    task: asyncio.Task[Any] | None

    def is_in(self, frame: Frame, actor: NodeActor, /) -> bool:
        """Whether it runs what `actor` does for `frame`, and holds its place."""
        ...

    def cancel_if_in(self, frame: Frame, /) -> None:
        """Cancel the task, provided that it still works for `frame`."""
        ...


class Crew:
    """A group of workers with one queue of work.

    Args:
        context: where handlers run; each worker gets a copy of it.
        on_empty: called with the crew when it is closed and its last worker has ended.
        traced: the frames are sampled, so every node execution takes the general path, which opens spans.
        deadline: that of the frames, in the loop's time: a timer ends them, but it has to get its turn.
        threads: those that they may have busy, together with others; None for as many as the Engine has.

    Attributes:
        ready: frames to run next, each with an actor whose place it already holds.
        runnable: workers that will run without anybody's help.
        armed: whether `_man` is due.
        feed: where workers that have nothing to do ask for more; None if there is nothing to ask for now.
        closed: whether workers end when nothing is left to do.
        is_exclusive: whether one frame has the crew to itself, so that its workers never go on to another item.
        errand: the first step of its only frame, while it is carried out elsewhere; no worker is needed until then.
        caller: the actor whose handler started what runs here, for a run, stream or call inside of a handler.
    """

    __slots__ = (
        "_idle",
        "armed",
        "caller",
        "closed",
        "context",
        "deadline",
        "errand",
        "feed",
        "is_exclusive",
        "loop",
        "on_empty",
        "ready",
        "runnable",
        "threads",
        "traced",
        "workers",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        on_empty: Callable[["Crew"], None],
        *,
        traced: bool = False,
        deadline: float | None = None,
        threads: ThreadShare | None = None,
    ) -> None:
        self.loop = loop
        self.context = context
        self.on_empty = on_empty
        self.traced = traced
        self.deadline = deadline
        self.threads = threads
        self.ready: deque[tuple[NodeActor, Frame]] = deque()
        self.workers: set[Member] = set()
        self.feed: Feed | None = None
        self.errand: Errand | None = None
        self._idle: list[asyncio.Future[None]] = []
        self.runnable = 0
        self.armed = False
        self.closed = False
        self.is_exclusive = False
        self.caller: NodeActor | None = None

    def enqueue(self, actor: NodeActor, frame: Frame) -> None:
        """Have a frame run in an actor whose place it already holds."""
        self.ready.append((actor, frame))
        if not self.armed:
            self.arm()

    def arm(self) -> None:
        """Look after the work in `ready` as soon as every worker is suspended."""
        self.armed = True
        self.loop.call_soon(self._man)

    def start(self, frame: Frame, entries: tuple[NodeActor, ...]) -> list[NodeActor]:
        """Let a new frame into the actors that wait for nothing; returns those whose inbox is full."""
        if len(entries) == 1:  # nearly always
            places = entries[0].places
            if places.free > 0:
                places.free -= 1
                self.ready.append((entries[0], frame))
                if not self.armed:
                    self.arm()
                return _NOBODY
        elif not entries:
            frame.finish()
            return _NOBODY
        return [actor for actor in entries if not actor.enter(frame)]

    def launch(self, frame: Frame, entries: tuple[NodeActor, ...]) -> None:
        """Start a frame that has this crew to itself.

        If its first step is carried out elsewhere, that begins now, and no worker is needed until it is over. Else its
        first worker takes the places when it runs, and not now: until then, others may come and go.
        """
        self.is_exclusive = True
        if frame.parent is not None and self.caller is None:
            self.caller = current.calling_actor()
        carrier = entries[0].carrier if len(entries) == 1 and frame.span is None else None
        if carrier is None or not self._sent_away(frame, entries[0], carrier):
            self.hire(frame, entries)

    def _sent_away(self, frame: Frame, entry: NodeActor, carrier: Carrier) -> bool:
        places = entry.places
        if places.free <= 0:
            return False
        places.free -= 1
        self.errand = Errand(self, entry, frame)
        if self.errand.begin(carrier):
            return True
        self.errand = None
        places.release()
        return False

    def cancel(self, frame: Frame) -> int:
        """Cancel every worker that is in `frame`; returns how many there are."""
        if self.errand is not None:
            self.errand.leave()
        current_task = asyncio.current_task(self.loop) if self.workers else None
        count = 0
        for worker in self.workers:
            if worker.position.frame is frame:
                count += 1
                if worker.task is current_task:
                    # A handler cancels its own item. A cancel() from inside could hit the next one: wait for its
                    # next suspension.
                    self.loop.call_soon(worker.cancel_if_in, frame)
                else:
                    worker.cancel_if_in(frame)
        return count

    def close(self) -> None:
        """No more work will come: workers end when they find nothing to do."""
        self.closed = True
        if self._idle:
            self._wake(len(self._idle))
        if not self.workers:
            self.ended()

    def ended(self) -> None:
        """The last worker has ended: say so, once, and let go of who is told, who may well hold this crew."""
        on_empty, self.on_empty = self.on_empty, _told
        on_empty(self)

    async def wait_for_work(self) -> None:
        """Park the calling worker until there is something to do, or the crew is closed."""
        future = self.loop.create_future()
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

    def _man(self) -> None:
        """Find or make workers for what is ready."""
        wanted = 0 if self.feed is None else self.feed.wanted()
        wanted += len(self.ready)
        self.armed = False  # not before: what the feed has left in `ready` is looked after here
        if not wanted:
            return
        if self.runnable:  # somebody is about to run; look again after that
            self.arm()
            return
        if not self._wake(wanted):
            # Doubling reaches any number in a few turns of the loop, and makes few too many where handlers suspend
            # only at times.
            for _ in range(min(wanted, max(1, len(self.workers)))):
                self.hire()
        self.arm()

    def _wake(self, wanted: int) -> bool:
        """Wake idle workers, as many as wanted; returns whether there was one, who may do it all."""
        before = self.runnable
        while self._idle and self.runnable - before < wanted:
            future = self._idle.pop()
            if not future.done():
                self.runnable += 1
                future.set_result(None)
        return self.runnable > before

    def hire(
        self, frame: Frame | None = None, entries: tuple[NodeActor, ...] = (), before: NodeActor | None = None
    ) -> None:
        """Start one more worker.

        Args:
            frame: it begins with this one, if any.
            entries: the actors that the frame is complete for.
            before: the actor that it comes from, in which it holds a place until it has entered those.
        """
        worker = Worker(self)
        worker.first = None if frame is None else (frame, entries, before)
        # Two tasks may share a context, but not what `current()` finds in it.
        context = self.context if len(self.workers) == 1 else self.context.copy()
        context.run(current.source.set, worker.position)
        self.runnable += 1
        worker.task = start_task(self.loop, worker.run(), context=context)


def _told(crew: Crew) -> None:
    """Nobody has to be told any more."""
