"""Node actor: one call site of a node in one scope, with its inbox, its limiter and its counters."""

import asyncio
import inspect
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from traceback import walk_stack, walk_tb
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakSet

from .._errors import ReentrantCallError
from ..telemetry import logs
from ..telemetry.counters import ActorStatistics, changed
from .chains import SLOW_SECONDS, compose, link_in
from .channel import EMPTY, Channel
from .execution import ASYNC, GENERAL, INLINE, Bound, DetachedStep, invoke_plain
from .policy import Policy
from .tasks import Condition

if TYPE_CHECKING:
    from ..telemetry.spans import AttributeValue
    from .chains import AsyncLine
    from .execution import Attempt
    from .frame import Frame
    from .sampler import ExecutionSampler, Sampling
    from .worker import Member, Worker


# "No limit" is a very large number, so that the hot path needs no branch. It is below 2 ** 30, where Python counts a
# quarter faster.
UNLIMITED = (1 << 30) - 1
# The queue of a group of workers before its first frame; it stays empty. Sharing it saves each call the 760 bytes of a
# deque.
NOTHING_READY: "deque[tuple[NodeActor, Frame]]" = deque()


class Limiter:
    """The free places of a node: for one call site, or (`shared`) for all call sites under one limit.

    Invariant: while a place is free, no inbox behind these places holds a frame. So a worker that finds `free > 0` may
    take a place without looking at any queue, and still no frame is overtaken.

    `free` may be negative: a thread that was abandoned keeps a place, while the worker that has left the thread gives
    back its own place (see `take_over_limit`).

    Besides the places, there may be room for items that are sent `ahead` to other processes, and have not begun there.
    """

    __slots__ = ("ahead", "free", "limit", "nested", "shared", "waiting")

    def __init__(self, limit: int = UNLIMITED, *, shared: bool = False, ahead: int = 0) -> None:
        self.limit = limit
        self.shared = shared
        self.ahead = ahead
        self.free = limit + ahead
        # The actors whose inbox is not empty, each once; they take turns, item by item. A list, because there are few
        # actors, and an empty deque takes 760 bytes, which add up in an idle deployment.
        self.waiting: list[NodeActor] = []
        # For `refuse_if_endless`: frames that waited somewhere while a handler around them held one of these places.
        self.nested: WeakSet[Frame] | None = None

    @property
    def in_flight(self) -> int:
        """How many places are taken now, not counting items ahead."""
        return min(self.limit + self.ahead - self.free, self.limit)

    def release(self) -> None:
        """Give a place back: the next queued frame gets the place, if a frame waits."""
        waiting = self.waiting
        if not waiting or self.free < 0:
            self.free += 1
            return
        actor = waiting[0]
        inbox = actor.inbox
        frame = inbox.get_nowait()
        if not inbox.count:
            del waiting[0]
        elif len(waiting) > 1:
            waiting.append(waiting.pop(0))
        # `Frame.dequeued` for a frame that waits at one actor only, and `WorkerGroup.enqueue`, written out. Without
        # these copies, ten nodes that wait and have a limit take 1.06 times as long.
        if len(frame.queues) > 1:
            frame.dequeued(actor)
        else:
            frame.queues = ()
        group = frame.group
        ready = group.ready
        if ready is NOTHING_READY:
            ready = group.ready = deque()
        ready.append((actor, frame))
        if not group.armed:
            group.schedule_check()

    def take_over_limit(self) -> None:
        """Take a further place, for a thread that runs on after its worker has left; `release` gives it back."""
        self.free -= 1


class Places(NamedTuple):
    """How many items a call site handles at a time.

    Attributes:
        limit: how many items; None without a limit.
        ahead: how many further items `Bound.run` may get before a place is free, so that they are there when a place
            becomes free; none for a node with `hedge=` or `max_bytes=`, and no more than its `capacity=`.
        key: call sites with the same key share the places, in the whole Engine: an object that can be weakly
            referenced, such as a node or the execution. None: the call site shares its places with no other.
    """

    limit: int | None = None
    ahead: int = 0
    key: object = None


NO_LIMIT: Final = Places()


def refuse_if_endless(actor: "NodeActor", frame: "Frame") -> None:
    """Fail a frame that has begun to wait for a shared place, if no place would ever become free.

    This is the case if each place is held by a handler whose nested run waits in the same way: for a place here, or for
    a place of another node. A frame that begins to wait completes such a circle, so the check is made then. Only a
    frame that keeps a place of the circle fails.
    """
    held = _held_around(frame)
    for limiter in held:
        if limiter.nested is None:
            limiter.nested = WeakSet()
        limiter.nested.add(frame)
    for around in frame.lineage():
        if around.waiting_inside is not None:
            around.waiting_inside.add(frame)
    if held and actor in frame.queues and frame.state == "running":
        endless = _endless(actor.limiter)
        if not held.isdisjoint(endless):
            actor.failed += 1
            frame.fail(_error(actor, frame, is_alone=len(endless) == 1), actor)


def _endless(first: Limiter) -> "set[Limiter]":
    """Return the limiters whose places would never become free, among `first` and the limiters that it waits for."""
    # For each frame inside of a handler that holds a place: these handlers, and the limiters at which the frame waits.
    inside: dict[Limiter, list[tuple[set[Member], set[Limiter]]]] = {}
    limiters = [first]
    for limiter in limiters:
        if limiter not in inside:
            waits = [(frame, {one.limiter for one in frame.queues}) for frame in limiter.nested or ()]
            inside[limiter] = [(_holders(frame, limiter), awaited) for frame, awaited in waits if awaited]
            limiters += [one for _, awaited in inside[limiter] for one in awaited]
    endless = set(inside)
    while True:
        going_on = {
            limiter
            for limiter in endless
            if len({one for held, awaited in inside[limiter] if awaited & endless for one in held}) < limiter.limit
        }
        if not going_on:
            return endless
        endless -= going_on


def _held_around(frame: "Frame") -> set[Limiter]:
    """Return the limiters with shared places of which handlers around the frame may hold a place."""
    callers = (inner.group.caller for inner in frame.lineage() if inner.parent is not None)
    limiters = {caller.limiter for caller in callers if caller is not None and caller.limiter.shared}
    return {limiter for limiter in limiters if _holders(frame, limiter)}


def _holders(frame: "Frame", limiter: "Limiter") -> "set[Member]":
    """Return the workers that hold one of these places while they run a handler around the frame."""
    holders: set[Member] = set()
    for inner in frame.lineage():
        caller, outer = inner.group.caller, inner.parent
        if outer is not None and caller is not None and caller.limiter is limiter:
            # A handler that has ended without waiting for its nested run holds no place.
            at_work = ((worker, worker.position) for worker in outer.group.workers)
            holders.update(worker for worker, at in at_work if at.frame is outer and at.actor is caller)
    return holders


def _error(actor: "NodeActor", frame: "Frame", *, is_alone: bool) -> ReentrantCallError:
    limit = actor.limiter.limit
    chain = [_place(actor, frame)]
    for inner in frame.lineage():
        if inner.parent is not None and inner.group.caller is not None:
            chain.insert(0, _place(inner.group.caller, inner.parent))
    held = "the only place is" if limit == 1 else f"all {limit} places are"
    awaited = "a place of the same node" if is_alone else "places of other nodes, whose handlers wait for these"
    remedy = "call the graph inside the graph instead of running it inside the node"
    if not is_alone:
        remedy = "let all handlers use these nodes in the same order"
    return ReentrantCallError(
        f"{' → '.join(chain)}: {held} held by handlers that wait, by way of a nested call, for {awaited}, which would "
        f"never end; {remedy}, move the nested call to a node without `concurrency`, or set a `concurrency` above "
        f"{limit}"
    )


def _place(actor: "NodeActor", frame: "Frame") -> str:
    return f"node {actor.name!r} of graph {frame.layout.name!r}"


# A handler that holds the loop longer than this is reported: other items wait meanwhile, and a person notices 50 ms.
BLOCKING_SECONDS = 0.05

Values = list[Any]
# In mode GENERAL: the function that a worker calls for a frame.
Invoke = Callable[["Worker", "NodeActor", "Frame"], Awaitable[Any]]
# Begins a step without a worker; see `Bound._begin`.
Begin = Callable[["NodeActor", "Frame", tuple[Any, ...], dict[str, Any]], DetachedStep | None]
_NOTHING_BOUND = Bound()


class StepCounts:
    """Counts of rare events of a step, and facts that are noted once. A step gets its own object at the first event.

    Attributes:
        retried: how many further attempts there were.
        in_retry: for each item that is retried: the clock of its loop, the time of its first error, and the class of
            its last error.
        failed_over: how many items the failover took over.
        hedged: how many second attempts have begun beside a first attempt.
        hedges_won: how many of these second attempts had the result that counts.
        abandoned: how many threads run on after their item has ended.
        all_returned: notified when no such thread is left; None while nobody waits for this.
        has_warned: whether a warning was logged that a handler held the event loop.
        span_attributes: the attributes that all spans of the step share, once an execution was sampled.
    """

    def __init__(self) -> None:
        self.retried = self.failed_over = self.hedged = self.hedges_won = self.abandoned = 0
        self.all_returned: Condition | None = None
        self.has_warned = False
        self.span_attributes: dict[str, AttributeValue] | None = None
        self.in_retry: dict[Attempt, tuple[Callable[[], float], float, str]] = {}


_NOTHING_COUNTED: Final = StepCounts()


class NodeActor:
    """A call site of a node in a scope: its function, the slots of its values, its limiter, its inbox and its counters.

    Wiring makes each actor once for a scope. Then workers only read the actor, and write its counters.
    """

    # Ownership. All fields belong to the thread of the loop. Wiring writes them. A profile, which changes the timing,
    # writes `mode`, `run` and `sampler`. Executions of the step write `completed`, `failed`, `busy_seconds` and
    # `counts`. Statistics and metrics read counters in other threads, one number at a time.

    __slots__ = (
        "args_of", "begin", "bound", "busy_seconds", "completed", "consumers", "counts", "ends_line", "failed", "fn",
        "graph", "inbox", "index", "invoke", "kwargs_of", "limiter", "line", "mode", "name", "out", "owner", "policy",
        "reads", "run", "sampler", "slot", "successor", "widens",
    )  # fmt: skip

    def __init__(
        self, name: str, graph: str, index: int, policy: Policy, limiter: Limiter, inbox: "Channel[Frame]"
    ) -> None:
        self.name = name
        self.graph = graph
        self.index = index
        self.policy = policy
        self.limiter = limiter
        self.inbox = inbox
        self.mode = GENERAL
        self.fn: Callable[..., Any] = _unset
        self.invoke: Invoke = _unset
        self.bound: Bound = _NOTHING_BOUND
        self.begin: Begin | None = None  # begins a step without a worker; only without a policy
        self.run: Callable[[Values, Worker], Any] = _unset  # all links, composed into one function
        self.slot = -1  # the slot of the only argument; -1 if `args_of` and `kwargs_of` build the arguments
        self.args_of: Callable[[Values], tuple[Any, ...]] = _no_args
        self.kwargs_of: Callable[[Values], dict[str, Any]] | None = None
        self.out = 0
        self.reads: tuple[int, ...] = ()  # the slots to release when the step is done
        self.consumers: tuple[NodeActor, ...] = ()
        self.successor: NodeActor | None = None  # the only consumer, if it waits for no other step
        self.widens = False  # whether this step, or a step behind it, has several readers
        self.line: AsyncLine | None = None  # the rest of a line of async nodes, as one function
        self.ends_line = False  # whether the value is the result of the graph, and the step is always the last
        self.completed = 0
        self.failed = 0
        self.busy_seconds = 0.0
        self.owner: Any = None  # the wiring that has made the actor, for nested calls of handlers
        self.sampler: ExecutionSampler | None = None  # while a profile is taken
        self.counts: StepCounts = _NOTHING_COUNTED

    def enter(self, frame: "Frame") -> bool:
        """Let in a frame with complete inputs: it runs or is queued. Return False if the inbox is full."""
        limiter = self.limiter
        if limiter.free > 0:
            limiter.free -= 1
            frame.group.enqueue(self, frame)
            return True
        return self.offer(frame)

    def offer(self, frame: "Frame") -> bool:
        """Queue a frame when no place is free. Return False if the inbox is full."""
        inbox, limiter = self.inbox, self.limiter
        if not inbox.put_nowait(frame, frame.priority):
            return False
        frame.queues += (self,)
        if inbox.count == 1:
            limiter.waiting.append(self)
        if limiter.shared:
            outer = frame.parent
            is_known = outer is None or (outer.parent is None and not outer.waiters and outer.waiting_inside is None)
            if frame.waiters or not is_known or frame.group.caller is not None:  # else no handler is around it
                frame.group.loop.call_soon(refuse_if_endless, self, frame)
        return True

    async def queue(self, frame: "Frame", *, is_full: bool = False) -> None:
        """Let a frame in, waiting for room in the inbox, which is backpressure.

        Args:
            frame: the frame.
            is_full: whether `enter` or `offer` has just refused the frame, so that they need not be tried again.
        """
        if frame.state != "running" or (not is_full and self.enter(frame)):
            return
        frame.queues += (self,)
        try:
            await self.inbox.put_queued(frame, frame.priority)
        except asyncio.CancelledError:
            self.withdraw(frame)
            raise

    def withdraw(self, frame: "Frame") -> None:
        """Take a frame that has ended out of the inbox, which makes room for the next frame."""
        if frame.dequeued(self) and self.inbox.discard(frame, frame.priority) and not self.inbox.count:
            self.limiter.waiting.remove(self)

    def label(self, error: BaseException | None = None) -> str:
        """Return the name of the node that runs now, or that raised `error`; in a chain, the name of the link."""
        if len(self.bound._links) < 2:
            return self.name
        code = self.run.__code__
        frames = walk_stack(sys._getframe()) if error is None else walk_tb(error.__traceback__)
        number = link_in(code, frames)
        return self.name if number is None else self.bound._links[number].name

    def arguments(self, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Build the positional and keyword arguments from the slots of a frame."""
        args = (values[self.slot],) if self.slot >= 0 else self.args_of(values)
        return args, {} if self.kwargs_of is None else self.kwargs_of(values)

    def noticed(self, worker: "Worker", seconds: float, value: Any) -> None:
        """Take the report of a chain of plain functions that was slow, or returned a coroutine."""
        if seconds > SLOW_SECONDS:
            worker.budget = 0  # the loop gets its turn
            self.watch(seconds)
        self.refuse_coroutine(value, self.bound._links[-1].name)

    def refuse_coroutine(self, value: Any, name: str) -> None:
        """Raise a TypeError if a plain function returned a coroutine, which would never be awaited."""
        if value.__class__ is CoroutineType:
            value.close()
            raise TypeError(
                f"node {name!r} is a plain `def` that returned a coroutine; declare it `async def` and await inside"
            )

    def watch(self, elapsed_seconds: float) -> None:
        """Log once if this node held the event loop for too long, with the remedy."""
        if elapsed_seconds <= BLOCKING_SECONDS or self.counts.has_warned:
            return
        self.counted().has_warned = True
        fn = self.bound._links[0].fn if self.bound._links else self.fn
        name = " → ".join(link.name for link in self.bound._links) or self.name
        report_blocking(fn, name, self.graph, elapsed_seconds)

    def counted(self) -> StepCounts:
        """Return the own counts of the actor, for writing."""
        if self.counts is _NOTHING_COUNTED:
            self.counts = StepCounts()
        return self.counts

    @property
    def intake(self) -> Channel[Any]:
        """The queue in which items wait: of the actor, or of the loop that the node owns."""
        own = self.bound._inbox
        return self.inbox if own is None else own.channel

    @property
    def measured_seconds(self) -> float | None:
        """How long handlers took in total, in seconds; None if not measured."""
        return None if self.is_untimed or self.bound._spans_others else self.busy_seconds

    @property
    def is_untimed(self) -> bool:
        """Whether executions are timed only while a profile is taken: timing costs as much as a whole hop."""
        return self.invoke is invoke_plain

    def measure(self, sampling: "Sampling | None") -> None:
        """Time all executions, or a sample, from now on; None ends that."""
        if sampling is not None:
            from .sampler import ExecutionSampler

            switch = self._time_async if self.is_untimed else self._time_inline if self.mode == INLINE else None
            self.sampler = ExecutionSampler(self, switch, sampling)
        elif self.sampler is not None:
            self.sampler.end()
            self.sampler = None

    def _time_async(self, sampler: "ExecutionSampler | None") -> None:
        self.mode = ASYNC if sampler is None else GENERAL

    def _time_inline(self, sampler: "ExecutionSampler | None") -> None:
        self.run = compose(self.bound._links, self, sampler)

    def thread_returned(self) -> None:
        """Note that an abandoned thread has returned, and give its place back."""
        counts = self.counts
        counts.abandoned -= 1
        self.limiter.release()
        if not counts.abandoned and counts.all_returned is not None:
            counts.all_returned.notify_all()

    async def all_returned(self) -> None:
        """Wait until all abandoned threads of this actor have returned."""
        counts = self.counts
        if counts.abandoned:
            if counts.all_returned is None:
                counts.all_returned = Condition()
            await counts.all_returned.wait_for(lambda: not counts.abandoned)

    def retrying(self) -> tuple[float, str]:
        """Return for how long items are retried, in seconds, and after which error; 0.0 and "" without retries."""
        for clock, since, error in list(self.counts.in_retry.values()):  # a copy, since metrics run in other threads
            return clock() - since, error  # the first item has waited longest
        return 0.0, ""

    def statistics(self, busy_seconds: float | None = None) -> ActorStatistics:
        """Return a snapshot of the counters.

        Args:
            busy_seconds: how long handlers took, as a sampler tells it of a node that is not timed otherwise.
        """
        retrying_seconds, retrying_error = self.retrying()
        limited, instance = self.limiter.limit < UNLIMITED, self.bound._instance
        return changed(
            NOTHING,  # as for channels
            graph=self.graph,
            node=self.name,
            completed=self.completed,
            failed=self.failed,
            retried=self.counts.retried,
            restarts=0 if instance is None else instance.restarts,
            in_flight=self.limiter.in_flight,
            concurrency=self.limiter.limit if limited else None,
            busy_seconds=self.measured_seconds if busy_seconds is None else busy_seconds,
            inbox=self.intake.statistics(),
            state=None if instance is None else instance.state,
            places=id(self.limiter),  # unique while the actor lives: records of one moment are compared
            failed_over=self.counts.failed_over,
            hedged=self.counts.hedged,
            hedges_won=self.counts.hedges_won,
            cache=self.bound._cache_statistics(),
            figures=tuple(logs.guarded("figures", self.bound.figures) or ()),
            retrying_seconds=retrying_seconds,
            retrying_error=retrying_error,
        )


NOTHING: Final = ActorStatistics(
    "", "", 0, 0, 0, 0, 0, None, None, EMPTY
)  # fmt: skip
_reported: WeakSet[object] = WeakSet()  # the functions of nodes that were reported, in any scope


def report_blocking(fn: object, node: str, graph: str | None, elapsed_seconds: float) -> None:
    """Log, once for each function, that a node held the event loop for too long, with the remedy."""
    if elapsed_seconds <= BLOCKING_SECONDS:
        return
    if callable(fn):
        fn = inspect.unwrap(fn)
    fn = getattr(fn, "__func__", fn)  # a bound method is a new object each time
    with suppress(TypeError):  # some callables have no weak references: they are reported for each scope
        if fn in _reported:
            return
        _reported.add(fn)
    logs.warning(
        "node.blocks_loop",
        node=node,
        graph=graph,
        milliseconds=round(elapsed_seconds * 1000),
        remedy='declare it @node(runs_on="thread") or runs_on="process", as a plain `def`, so that the event loop '
        "stays free; or, in an `async def`, await instead of blocking",
    )


def _no_args(values: Values) -> tuple[Any, ...]:
    return ()


class _Unset:
    """A stand-in for a function that an actor does not have, such as `fn` of a step of control flow; without a name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("an actor was run before it was wired")


_unset = _Unset()
