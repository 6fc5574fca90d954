"""ExecutionSampler: times all executions of one node, or a fair sample of them, while a profile is taken."""

import itertools
import threading
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..telemetry.profiling import collectors
from ..telemetry.profiling.collectors import Collector
from ..telemetry.profiling.durations import NO_DEPTH, NOTHING_OUTSIDE, DepthWatch, Durations, OutsideSeconds
from ..telemetry.profiling.records import Execution, TimedReading

if TYPE_CHECKING:
    import asyncio

    from .frame import Frame
    from .node_actor import NodeActor

# Timing an execution takes 3 us, longer than a whole hop. So only a sample of a busy node is timed: `_SAMPLE`
# executions in a row, and then none during a pause. All nodes of a scope together then have about 10,000 timed
# executions in a second, which take 3 % of that second. A node that runs fewer than `_SAMPLE` times between two pauses
# is timed each time.
_SAMPLE: Final = 64
_PAUSE_SECONDS_PER_NODE: Final = 0.006
_LEAST_PAUSE_SECONDS: Final = 0.02
# Looks go on for hours, so their samples have `_FEW` executions, and their pauses are `_SELDOM` times as long, up to
# `_MOST_PAUSE_SECONDS`, so that a change is still seen soon.
_FEW: Final = 8
_SELDOM: Final = 8
_MOST_PAUSE_SECONDS: Final = 12.0
# The first sample of a node is larger, so that short profiles see every item.
_FIRST_OF_ALL: Final = 640
_LEAST_FIRST: Final = 16


_numbers = itertools.count()


class Sampling(NamedTuple):
    """How many executions of a node are timed, and how long the pauses are.

    Args:
        first: how many executions in a row the first sample has.
        pause_seconds: the pause between two samples, in seconds.
    """

    first: int
    pause_seconds: float


def sampling_of(nodes: int) -> Sampling:
    """Return how to sample each node of a scope with this number of nodes."""
    return Sampling(
        max(_LEAST_FIRST, _FIRST_OF_ALL // max(1, nodes)), max(_LEAST_PAUSE_SECONDS, _PAUSE_SECONDS_PER_NODE * nodes)
    )


class ExecutionSampler:
    """Times executions of one actor; made when a profile begins, and dropped when the last profile ends.

    Args:
        actor: the actor whose executions are timed.
        switch: turns the timing of the actor on (with this sampler) or off (with None); None if the actor times every
            execution by itself.
        sampling: how many executions are timed, and how long the pauses are.

    Attributes:
        names: the name of the node; for a chain of plain functions, the name of each function.
        between: when each function of a chain but the last has returned, in the execution that runs now.
        busy_seconds: for each name, the time of all executions, extrapolated from the timed executions.
        blocked_seconds: how long workers held a finished item, because the next node had no room.
        durations: for each name, how long executions took.
        outside: how long items waited and ran on devices and in threads. The code that runs them there adds to this
            attribute, on the loop.
        held: for how long items were in the node, as a sum over all items; and for how long looks have counted them,
            both in seconds.
    """

    def __init__(
        self, actor: "NodeActor", switch: "Callable[[ExecutionSampler | None], None] | None", sampling: Sampling
    ) -> None:
        inbox = actor.intake
        self._actor = actor
        self._switch = switch
        self._size = sampling.first if switch is not None else _SAMPLE
        self._sampling, self._further = sampling, _SAMPLE
        self._pause_seconds = sampling.pause_seconds
        self._means: list[float] = []  # how long executions took in the last sample
        self._window: list[tuple[Any, ...]] = []  # moments, then frame and item: two moments, or more for a chain
        self._ended = actor.completed + actor.failed
        self._is_on = True
        self._number = next(_numbers)
        self._lock = threading.Lock()  # a thread other than the loop's may read a profile
        held = inbox.statistics()
        self._depth = DepthWatch(held.depth, held.capacity)
        self.held = 0.0, 0.0
        self.names = [link.name for link in actor.bound._links] or [actor.name]
        self.between: list[float] = []
        self.busy_seconds = [0.0] * len(self.names)
        self.blocked_seconds = 0.0
        self.durations = [Durations() for _ in self.names]
        self.outside = NOTHING_OUTSIDE
        if switch is not None:
            switch(self)

    def for_profile(self, *, on: bool) -> None:
        """For a profile, record each change of the inbox's depth, and time often; otherwise record depths at looks."""
        self._actor.intake.watch = self._depth if on else None
        self._depth.keep_points(on=on)
        pause = self._sampling.pause_seconds
        self._pause_seconds = pause if on else max(pause, min(_SELDOM * pause, _MOST_PAUSE_SECONDS))
        self._further = _SAMPLE if on else _FEW

    def look(self, seconds: float) -> None:
        """Note how many items are in the node now, and how many wait for it; on the loop.

        Args:
            seconds: the time since the previous look, in seconds; this look stands for the whole time.
        """
        actor = self._actor
        self._depth.changed(len(actor.intake))
        held, looked = self.held
        if taken := actor.limiter.in_flight:  # without finished items, which wait for room in the next node
            taken -= sum(consumer.inbox.waiting_putters for consumer in actor.consumers)
        self.held = held + max(taken, 0) * seconds, looked + seconds

    def add(self, began: float, ended: float, frame: "Frame | None", loop: "asyncio.AbstractEventLoop") -> None:
        """Take the times of an execution that has ended.

        Args:
            began: when the execution began, in seconds of `perf_counter`.
            ended: when the execution ended, in the same time.
            frame: the item's frame; None if unknown.
            loop: the loop of the actor.
        """
        window, marks, further = self._window, [began], len(self.names) - 1
        if further:
            marks += [mark for mark in self.between[-further:] if mark >= began]  # not the marks of a failed run
            marks += [ended] * (further + 1 - len(marks))
            self.between.clear()
        if len(window) >= self._size:
            return  # an item with a sampled span takes a path that always reports, also in a pause
        window.append((*marks, ended, *((None, None) if frame is None else (frame.identity, frame.item))))
        if len(window) < self._size:
            return
        if self._switch is None:
            self.fold()
        else:
            self._switch(None)
            loop.call_later(self._pause_seconds, self._resume)

    def in_thread(self, fn: Callable[..., Any], *, is_free: bool) -> "TimedInThread":
        """Return a function of the node that times its run; a thread is about to run it once."""
        return TimedInThread(fn, self, is_free=is_free)

    def fold(self) -> None:
        """Extrapolate the executions that were timed since the last call to all executions since then."""
        actor = self._actor
        with self._lock:
            window, self._window = self._window, []
            self._hand_over_depths()
            total = actor.completed + actor.failed
            ran, self._ended = total - self._ended, total
            if not window:
                for at, mean in enumerate(self._means if self._switch is not None else ()):
                    self.busy_seconds[at] += mean * ran
                return
            weight = 1.0 if self._switch is None else max(1.0, ran / len(window))
            timed: list[list[Execution]] = [
                [(each[at], each[at + 1], each[-2], each[-1]) for each in window] for at in range(len(self.names))
            ]
            totals: list[float] = []
            for at, executions in enumerate(timed):
                seconds = [ended - began for began, ended, _, _ in executions]
                durations = self.durations[at].since(None)  # looks keep the old durations
                durations.add(seconds, weight)
                self.durations[at] = durations
                totals.append(sum(seconds))
                self.busy_seconds[at] += totals[at] * weight
            self._means = [total / len(window) for total in totals]
        for name, executions in zip(self.names, timed, strict=True):
            collectors.report(Collector.executed, actor.graph, name, executions)

    def reading(self, at: int = 0) -> TimedReading:
        """Return the figures up to now; for a chain, the figures of its function at this place."""
        self.fold()
        is_first, is_last = not at, at == len(self.names) - 1
        return TimedReading(
            self.durations[at], self._depth.totals() if is_first else NO_DEPTH,
            self.blocked_seconds if is_last else 0.0, self.outside,
            counts_busy=self._actor.is_untimed or not is_first or not is_last, begin=self._number, held=self.held,
        )  # fmt: skip

    def end(self) -> None:
        """End the timing."""
        self.fold()
        self._is_on = False
        self._size = 0  # executions in flight add nothing more, and do not turn off the timing of the next sampler
        self._actor.intake.watch = None
        if self._switch is not None:
            self._switch(None)

    def _hand_over_depths(self) -> None:
        points = self._depth.points
        if points:
            moved = [points.popleft() for _ in range(len(points))]
            collectors.report(Collector.depth_changed, self._actor.graph, self._actor.name, moved)

    def _resume(self) -> None:
        if self._is_on and self._switch is not None:
            self.fold()
            self._size = self._further
            self._switch(self)


class TimedInThread:
    """A function of a node that runs once in a thread; times the run, its processor time, and the hops to and fro.

    Args:
        fn: the function.
        sampler: takes the times.
        is_free: whether a thread is free. Otherwise the time until the function begins is no hop, but a wait for a
            thread.
    """

    __slots__ = ("_began", "_cpu_seconds", "_ended", "_fn", "_handed_over", "_sampler")

    def __init__(self, fn: Callable[..., Any], sampler: ExecutionSampler, *, is_free: bool) -> None:
        self._fn = fn
        self._sampler = sampler
        self._handed_over = perf_counter() if is_free else None
        self._began = self._cpu_seconds = self._ended = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function in the thread, and note when it began, when it ended, and its processor time."""
        self._began = perf_counter()
        computed = thread_time()
        try:
            return self._fn(*args, **kwargs)
        finally:
            self._cpu_seconds = thread_time() - computed
            self._ended = perf_counter()

    def came_back(self) -> None:
        """Add the times of this run to the sampler; called on the loop once it has the result or stops waiting."""
        if not self._ended:
            return
        hop_seconds, hops = perf_counter() - self._ended, 1
        if self._handed_over is not None:
            hop_seconds, hops = hop_seconds + self._began - self._handed_over, 2
        spent = OutsideSeconds(0.0, 0.0, 0.0, self._ended - self._began, self._cpu_seconds, hop_seconds, hops)
        self._sampler.outside = self._sampler.outside.plus(spent)
