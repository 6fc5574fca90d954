"""Node actor: one call site of a node in one scope, with its inbox, its limiter and its counters."""

from collections import deque
from collections.abc import Awaitable, Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ref

from .._errors import ReentrantCallError
from ..telemetry import logs
from ..telemetry.counters import ActorStatistics, CacheStatistics
from .channel import Channel
from .invocation import SLOW_SECONDS, Link, ThreadCall, compose, failed_link, invoke, invoke_plain, running_link
from .loop_host import RestartGate
from .own_loops import Mailbox
from .policy import Policy
from .tasks import Condition

if TYPE_CHECKING:
    from ..telemetry.spans import AttributeValue
    from .frame import Frame
    from .invocation import AsyncLine, Carrier, Hedging
    from .sampler import ExecutionSampler, Sampling
    from .supervision import Child
    from .threads import Lane
    from .worker import Member, Worker


# No limit is a very large number, so that the hot path needs no branch for it; but not larger, because Python counts a
# quarter faster below 2 ** 30.
UNLIMITED = (1 << 30) - 1
# How many items a node may have waiting for each worker process, besides the one that runs there.
AHEAD_ITEMS = 23
# The queue of a group of workers before its first frame; it stays empty. It saves each call the 760 bytes of a deque.
NOTHING_READY: "deque[tuple[NodeActor, Frame]]" = deque()


class Limiter:
    """The free places of a node: of one call site, or (`shared`) of all call sites under one limit.

    Invariant: while a place is free, no inbox behind these places holds a frame. So a worker that finds `free > 0` may
    take a place without looking at any queue, and still no frame is overtaken.

    `free` may be negative: a thread that was abandoned keeps a place, while the worker that has left it gives back its
    own (see `owe`).

    Besides its places, there may be room for items that are sent `ahead` to worker processes or threads, which have not
    begun. In threads, a `lane` keeps no more from running than there are places.
    """

    __slots__ = ("ahead", "free", "lane", "limit", "nested", "shared", "waiting")

    def __init__(self, limit: int = UNLIMITED, *, shared: bool = False, ahead: int = 0) -> None:
        self.limit = limit
        self.shared = shared
        self.ahead = ahead
        self.free = limit + ahead
        self.lane: Lane | None = None  # for a node in threads with items ahead
        # The actors whose inbox is not empty, each once; they take turns, item by item. A list, because there are few,
        # and an empty deque takes 760 bytes, which add up in an idle deployment.
        self.waiting: list[NodeActor] = []
        # For `refuse_if_endless`: the frames that waited here while a handler around them held one of these places.
        self.nested: list[ref[Frame]] | None = None

    @property
    def in_flight(self) -> int:
        """How many places are taken now, without those of items ahead."""
        return min(self.limit + self.ahead - self.free, self.limit)

    def look_ahead(self, items: int) -> None:
        """Have room for so many items besides the places."""
        more, self.ahead = items - self.ahead, items
        self.free += min(more, 0)
        for _ in range(more):
            self.release()

    def release(self) -> None:
        """Give a place back: the next queued frame gets it, if there is one."""
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
        # A hot path: `Frame.dequeued` for a frame that waits at one actor only, and `WorkerGroup.enqueue`, written out.
        if frame.further_queues:
            frame.dequeued(actor)
        else:
            frame.queued_at = None
        group = frame.group
        ready = group.ready
        if ready is NOTHING_READY:
            ready = group.ready = deque()
        ready.append((actor, frame))
        if not group.armed:
            group.arm()

    def owe(self) -> None:
        """Take one more place, for a thread that runs on after its worker has left; `release` gives it back."""
        self.free -= 1


class KeepsResults(Protocol):
    """A call site of a node that keeps its results."""

    def statistics(self) -> CacheStatistics:
        """Return a snapshot of its counters."""
        ...

    def cancel(self) -> None:
        """Cancel the computations that its calls have begun."""
        ...

    async def close(self) -> None:
        """Cancel the computations that its calls have begun, and wait until they have unwound."""
        ...


def refuse_if_endless(actor: "NodeActor", frame: "Frame") -> None:
    """Fail a frame that has begun to wait for a shared place, if no place would ever become free.

    That is the case if each place is held by a handler with a nested run that waits for a place here. A frame that
    begins to wait is what completes such a circle, so the check is made then. Only circles through a single limit are
    found, not two nodes that wait for places of each other.
    """
    limiter = actor.limiter
    if actor not in waits_at(frame) or not _holders(frame, limiter):
        return
    frames = [other for reference in limiter.nested or () if (other := reference()) is not None]
    waiting = [other for other in frames if other is not frame and _waits_for(other, limiter)] + [frame]
    limiter.nested = [ref(other) for other in waiting]
    holders: set[Member] = set()
    for other in waiting:
        holders |= _holders(other, limiter)
    if len(holders) >= limiter.limit:
        actor.failed += 1
        frame.fail(_error(actor, frame), actor)


def waits_at(frame: "Frame") -> "list[NodeActor]":
    """Return the actors at which a frame waits: for a place or for room, or ahead of the threads."""
    if frame.state != "running":
        return []
    actors = frame.queues()
    for worker in frame.group.workers:
        call, position = worker.outside_call, worker.position
        if position.frame is frame and position.actor is not None and isinstance(call, ThreadCall) and call.is_ahead:
            actors.append(position.actor)
    return actors


def _waits_for(frame: "Frame", limiter: "Limiter") -> bool:
    return any(actor.limiter is limiter for actor in waits_at(frame))


def _holders(frame: "Frame", limiter: "Limiter") -> "set[Member]":
    """Return the workers that hold one of these places while they run a handler around the frame."""
    holders: set[Member] = set()
    for inner in frame.lineage():
        caller, outer = inner.group.caller, inner.parent
        if outer is not None and caller is not None and caller.limiter is limiter:
            # A handler that has ended without waiting for its nested run holds no place.
            holders.update(worker for worker in outer.group.workers if worker.is_in(outer, caller))
    return holders


def _error(actor: "NodeActor", frame: "Frame") -> ReentrantCallError:
    limit = actor.limiter.limit
    chain = [_place(actor, frame)]
    for inner in frame.lineage():
        if inner.parent is not None and inner.group.caller is not None:
            chain.insert(0, _place(inner.group.caller, inner.parent))
    held = "the only place is" if limit == 1 else f"all {limit} places are"
    return ReentrantCallError(
        f"{' → '.join(chain)}: {held} held by handlers that wait, by way of a nested call, for a place of the same "
        "node, which would never end; call the graph inside the graph instead of running it inside the node, move "
        f"the nested call to a node without `concurrency`, or set a `concurrency` above {limit}"
    )


def _place(actor: "NodeActor", frame: "Frame") -> str:
    return f"node {actor.name!r} of graph {frame.layout.name!r}"


# How a worker runs the handler: the first two are the hot path for plain functions and for `async def` without a
# policy; all other actors are GENERAL.
INLINE: Final = 0
ASYNC: Final = 1
GENERAL: Final = 2

# A handler that holds the loop longer than this is reported: other items wait, and a person notices 50 ms.
BLOCKING_SECONDS = 0.05

Values = list[Any]
# How a handler is run with its arguments: on the loop, in a thread, in a process, or as a sub-graph.
Body = Callable[["Worker", "NodeActor", "Frame", tuple[Any, ...], dict[str, Any]], Awaitable[Any]]
# In mode GENERAL: the function that a worker calls for a frame.
Invoke = Callable[["Worker", "NodeActor", "Frame"], Awaitable[Any]]
# Runs the failover of a node; of one that gives a stream, it returns a function that begins it.
Failover = Callable[["Member", "Frame"], Any]


class NodeActor:
    """A call site of a node in a scope: its function, the slots of its values, its limiter, its inbox and its counters.

    Wiring makes it once for a scope. Workers then only read it, and write its counters.
    """

    __slots__ = (
        "_all_returned",
        "abandoned",
        "args_of",
        "begins_later",
        "body",
        "busy_seconds",
        "cache",
        "carrier",
        "completed",
        "consumers",
        "emits",
        "ends_line",
        "failed",
        "failed_over",
        "failover",
        "fn",
        "gate",
        "graph",
        "hedge",
        "hedged",
        "hedges_won",
        "inbox",
        "index",
        "instance",
        "invoke",
        "join",
        "kwargs_of",
        "limiter",
        "line",
        "links",
        "mode",
        "name",
        "needs_thread",
        "out",
        "owner",
        "policy",
        "reads",
        "retried",
        "run",
        "sampler",
        "slot",
        "span_attributes",
        "spans_others",
        "successor",
        "warned",
        "was_slow",
        "widens",
        "work",
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
        self.invoke: Invoke = invoke
        self.body: Body = _unset
        self.needs_thread = False  # whether its body runs in a thread
        self.begins_later = False  # whether its body tells when it has begun; a timeout counts from then
        self.emits = False  # whether its handler may call `penstock.emit`
        self.carrier: Carrier | None = None  # runs executions outside of the loop; only without timeout and retries
        self.links: tuple[Link, ...] = ()  # the plain functions of the chain
        self.run: Callable[[Values], Any] = _unset  # all links, composed into one function
        self.slot = -1  # the slot of the only argument; -1 if `args_of` and `kwargs_of` build the arguments
        self.args_of: Callable[[Values], tuple[Any, ...]] = _no_args
        self.kwargs_of: Callable[[Values], dict[str, Any]] | None = None
        self.out = 0
        self.reads: tuple[int, ...] = ()  # the slots to release when it is done
        self.consumers: tuple[NodeActor, ...] = ()
        self.successor: NodeActor | None = None  # the only consumer, if it waits for nothing else
        self.join = -1  # the index of the only consumer, if that waits for others as well
        self.widens = False  # whether it, or a step behind it, has several readers
        self.line: AsyncLine | None = None  # the rest of a line of async nodes, written out as one function
        self.ends_line = False  # whether its value is the result of the graph, and it is always the last step
        self.work: Mailbox[Any] | None = None  # for an actor that owns its loop: the inbox of the loop
        self.completed = 0
        self.failed = 0
        self.retried = 0
        self.failed_over = 0
        self.hedged = 0
        self.hedges_won = 0
        self.hedge: Hedging | None = None
        self.cache: KeepsResults | None = None
        self.failover: Failover | None = None
        self.busy_seconds = 0.0
        self.warned = False
        self.was_slow = False
        self.spans_others = False  # whether it gives or reads a stream: then its time includes that of other nodes
        self.span_attributes: dict[str, AttributeValue] | None = None  # those of every execution, once one was sampled
        self.owner: object = None  # the pools of its Engine, for `nesting.pools_around`
        self.gate: RestartGate | None = None  # for a stateful node that may be restarted
        self.instance: Child | None = None  # for a stateful node
        self.sampler: ExecutionSampler | None = None  # while a profile is taken
        self.abandoned = 0  # how many threads run on after their item has ended
        self._all_returned: Condition | None = None

    def enter(self, frame: "Frame") -> bool:
        """Let a frame in whose inputs are complete: it runs or is queued; return False if the inbox is full."""
        limiter = self.limiter
        if limiter.free > 0:
            limiter.free -= 1
            frame.group.enqueue(self, frame)
            return True
        return self.offer(frame)

    def offer(self, frame: "Frame") -> bool:
        """Queue a frame, when no place is free; return False if the inbox is full."""
        inbox, limiter = self.inbox, self.limiter
        if not inbox.put_nowait(frame, frame.priority):
            return False
        if frame.queued_at is None:  # `Frame.queued` written out
            frame.queued_at = self
        else:
            frame.queued(self)
        if inbox.count == 1:
            limiter.waiting.append(self)
        if limiter.shared:
            self.begins_to_wait(frame)
        return True

    def begins_to_wait(self, frame: "Frame") -> None:
        """Look soon whether a frame that waits for a shared place, or is ahead of the threads, waits for itself."""
        if frame.parent is not None or frame.waiters:
            frame.group.loop.call_soon(refuse_if_endless, self, frame)

    def offer_new(self, frames: "list[Frame]") -> None:
        """Queue new frames, when no place is free; the inbox must have room for all of them."""
        inbox = self.inbox
        inbox.put_many_nowait(frames)
        if inbox.count == len(frames):
            self.limiter.waiting.append(self)
        shared = self.limiter.shared
        for frame in frames:
            frame.queued_at = self
            if shared and frame.parent is not None:
                frame.group.loop.call_soon(refuse_if_endless, self, frame)

    async def queue(self, frame: "Frame", *, is_full: bool = False) -> None:
        """Let a frame in, waiting for room in the inbox, which is backpressure.

        Args:
            frame: the frame.
            is_full: whether `enter` or `offer` has refused the frame just now, so that they need not be tried again.
        """
        if frame.state != "running" or (not is_full and self.enter(frame)):
            return
        frame.queued(self)
        try:
            await self.inbox.put_queued(frame, frame.priority)
        except BaseException:
            self.withdraw(frame)
            raise

    def withdraw(self, frame: "Frame") -> None:
        """Take a frame that has ended out of the inbox, which makes room for the next one."""
        if frame.dequeued(self) and self.inbox.discard(frame, frame.priority) and not self.inbox.count:
            self.limiter.waiting.remove(self)

    def label(self, error: BaseException | None = None) -> str:
        """Return the name of the node that runs now, or that raised `error`; in a chain, the name of that link."""
        if len(self.links) < 2:
            return self.name
        code = self.run.__code__
        number = running_link(code) if error is None else failed_link(code, error.__traceback__)
        return self.name if number is None else self.links[number].name

    def arguments(self, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Build the positional and keyword arguments from the slots of a frame."""
        args = (values[self.slot],) if self.slot >= 0 else self.args_of(values)
        return args, {} if self.kwargs_of is None else self.kwargs_of(values)

    def noticed(self, seconds: float, value: Any) -> None:
        """Take the report of a chain of plain functions that was slow, or returned a coroutine."""
        if seconds > SLOW_SECONDS:
            self.was_slow = True
            self.watch(seconds)
        self.refuse_coroutine(value, self.links[-1].name)

    def refuse_coroutine(self, value: Any, name: str) -> None:
        """Raise a TypeError if a plain function returned a coroutine, which would never be awaited."""
        if value.__class__ is CoroutineType:
            value.close()
            raise TypeError(
                f"node {name!r} is a plain `def` that returned a coroutine; declare it `async def` and await inside"
            )

    def watch(self, elapsed_seconds: float) -> None:
        """Log once if this node held the event loop for too long, with the remedy."""
        if self.warned or elapsed_seconds <= BLOCKING_SECONDS:
            return
        self.warned = True
        log_blocking(" → ".join(link.name for link in self.links) or self.name, self.graph, elapsed_seconds)

    @property
    def intake(self) -> "Channel[Frame] | Mailbox[Any]":
        """The inbox in which its items wait: its own, or that of the loop that it owns."""
        return self.inbox if self.work is None else self.work

    @property
    def measured_seconds(self) -> float | None:
        """How long its handlers took in total, in seconds; None if that is not measured."""
        return None if self.is_untimed or self.spans_others else self.busy_seconds

    @property
    def is_untimed(self) -> bool:
        """Whether its executions are timed only while a profile is taken: timing one takes as long as a whole hop."""
        return self.invoke is invoke_plain

    @property
    def is_stopped(self) -> bool:
        """Whether its instance, or its loop, has ended and is not restarted, so that further attempts would fail."""
        return (self.gate is not None and self.gate.is_stopped) or (self.work is not None and self.work.closed)

    def measure(self, sampling: "Sampling | None") -> None:
        """Time all executions, or a sample, from now on; None ends that."""
        if sampling is not None:
            from .sampler import ExecutionSampler

            switch = {ASYNC: self._time_async, INLINE: self._time_inline}.get(self.mode)
            self.sampler = ExecutionSampler(self, switch, sampling)
        elif self.sampler is not None:
            self.sampler.end()
            self.sampler = None

    def _time_async(self, sampler: "ExecutionSampler | None") -> None:
        self.mode = ASYNC if sampler is None else GENERAL

    def _time_inline(self, sampler: "ExecutionSampler | None") -> None:
        self.run = compose(self.links, self, sampler)

    def thread_returned(self) -> None:
        """Note that an abandoned thread has returned, and give back its place."""
        self.abandoned -= 1
        self.limiter.release()
        if not self.abandoned and self._all_returned is not None:
            self._all_returned.notify_all()

    async def all_returned(self) -> None:
        """Wait until all abandoned threads of this actor have returned."""
        if self._all_returned is None:  # made here, because most actors never have such a thread
            self._all_returned = Condition()
        await self._all_returned.wait_for(lambda: not self.abandoned)

    def statistics(self) -> ActorStatistics:
        """Return a snapshot of the counters."""
        limited = self.limiter.limit < UNLIMITED
        return ActorStatistics(
            graph=self.graph,
            node=self.name,
            completed=self.completed,
            failed=self.failed,
            retried=self.retried,
            restarts=0 if self.instance is None else self.instance.restarts,
            in_flight=self.limiter.in_flight,
            concurrency=self.limiter.limit if limited else None,
            busy_seconds=self.measured_seconds,
            inbox=self.intake.statistics(),
            state=None if self.instance is None else self.instance.state,
            places=id(self.limiter),
            failed_over=self.failed_over,
            hedged=self.hedged,
            hedges_won=self.hedges_won,
            cache=None if self.cache is None else self.cache.statistics(),
        )


def log_blocking(node: str, graph: str | None, elapsed_seconds: float) -> None:
    """Log that a node held the event loop for too long, with the remedy."""
    logs.warning(
        "node.blocks_loop",
        node=node,
        graph=graph,
        milliseconds=round(elapsed_seconds * 1000),
        remedy='declare it @node(runs_on="thread") or runs_on="process", so that the event loop stays free',
    )


def _no_args(values: Values) -> tuple[Any, ...]:
    return ()


class _Unset:
    """Stands in for a function that an actor does not have, such as `fn` of a step of control flow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("an actor was run before it was wired")


_unset = _Unset()
