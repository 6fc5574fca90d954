"""Node actor: one call site of a node in one scope, with its inbox, its places and its counters."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..telemetry import logs
from .chain import SLOW_SECONDS, Link, compose, failed_link, running_link
from .channel import Channel
from .channel_statistics import ChannelStatistics
from .condition import Condition
from .gate import Gate
from .invocation import invoke, timed
from .mailbox import Mailbox
from .places import Places
from .policy import Policy
from .reentrancy import refuse_if_endless
from .supervision import ActorState

if TYPE_CHECKING:
    from .errand import Carrier
    from .frame import Frame
    from .recorder import Recorder, Sampling
    from .worker import Worker

# How a worker runs the handler. The first two are the hot path; everything with a policy takes the third.
INLINE: Final = 0
ASYNC: Final = 1
GENERAL: Final = 2

# A body that holds the loop longer than this is reported: at 50 ms a person notices, and other items wait.
BLOCKING_SECONDS = 0.05

Values = list[Any]
# How a handler is run with its arguments: on the loop, in a thread, in a process, or as a sub-graph.
Body = Callable[["Worker", "NodeActor", "Frame", tuple[Any, ...], dict[str, Any]], Awaitable[Any]]
# What a worker calls for a frame in an actor of mode GENERAL.
Invoke = Callable[["Worker", "NodeActor", "Frame"], Awaitable[Any]]


class Replaceable(Protocol):
    """What a supervisor may replace."""

    @property
    def restarts(self) -> int:
        """How often it was replaced."""
        ...

    @property
    def state(self) -> ActorState:
        """Whether it runs, or will run again."""
        ...


@dataclass(frozen=True)
class ActorStatistics:
    """A snapshot of an actor.

    Attributes:
        graph: name of its graph, or of the body of control flow that it belongs to.
        node: name of the node, as drawn.
        completed: items that it finished with a result.
        failed: items that ended in an error here, after the last attempt and the fallback.
        retried: attempts beyond the first.
        restarts: how often its instance was replaced by a new one; 0 for what has no instance.
        in_flight: items in it now, over all call sites that share its places.
        concurrency: the most items in flight; None if unlimited.
        busy_seconds: time spent in its handlers, waits included, over all items; None for an `async def` without a
            policy that starts no tasks, which is not timed.
        inbox: the inbox; a full one (and a growing `put_wait_seconds`) says that this node limits the pipeline.
        state: of a stateful node or one that owns its loop: "running"; "restarting" from a crash on until it runs
            again; "stopped" if it will not, because it is not restarted or its scope has ended. None for other nodes.
    """

    graph: str
    node: str
    completed: int
    failed: int
    retried: int
    restarts: int
    in_flight: int
    concurrency: int | None
    busy_seconds: float | None
    inbox: ChannelStatistics
    state: ActorState | None = None


class NodeActor:
    """A node at work: what to run, where its values come from and go, who may run now and who waits.

    Built once for a scope and then only read by the workers, except for its counters.
    """

    __slots__ = (
        "_all_returned", "abandoned", "args_of", "body", "busy_seconds", "carrier", "completed", "consumers",
        "ends_line", "failed", "fn", "gate", "graph", "inbox", "index", "instance", "invoke", "kwargs_of", "links",
        "mode", "name", "out", "owner", "places", "policy", "reads", "recorder", "retried", "run", "slot",
        "successor", "warned", "was_slow", "work",
    )  # fmt: skip

    def __init__(
        self, name: str, graph: str, index: int, policy: Policy, places: Places, inbox: "Channel[Frame]"
    ) -> None:
        self.name = name
        self.graph = graph
        self.index = index
        self.policy = policy
        self.places = places
        self.inbox = inbox
        self.mode = GENERAL
        self.fn: Callable[..., Any] = _unset
        self.invoke: Invoke = invoke
        self.body: Body = _unset
        self.carrier: Carrier | None = None  # of a node that runs elsewhere, where one attempt is all there is to it
        self.links: tuple[Link, ...] = ()  # of plain functions
        self.run: Callable[[Values], Any] = _unset  # all of them in one
        self.slot = -1  # the slot of the only argument, or -1: `args_of` and `kwargs_of` build them
        self.args_of: Callable[[Values], tuple[Any, ...]] = _no_args
        self.kwargs_of: Callable[[Values], dict[str, Any]] | None = None
        self.out = 0
        self.reads: tuple[int, ...] = ()  # slots to give up when done
        self.consumers: tuple[NodeActor, ...] = ()
        self.successor: NodeActor | None = None  # the only consumer, if it waits for nothing else
        self.ends_line = False  # its value is the result of the graph, and nothing else is left to do
        self.work: Mailbox[Any] | None = None  # of an actor that owns its loop: what waits for the loop
        self.completed = 0
        self.failed = 0
        self.retried = 0
        self.busy_seconds = 0.0
        self.warned = False
        self.was_slow = False
        self.owner: object = None  # what its Engine owns; of no use down here
        self.gate: Gate | None = None  # of a stateful node that may be restarted
        self.instance: Replaceable | None = None  # of a stateful node
        self.recorder: Recorder | None = None  # while a profile is taken
        self.abandoned = 0  # threads that run on after their item has ended
        self._all_returned: Condition | None = None

    def enter(self, frame: "Frame") -> bool:
        """Let a complete frame in: it runs, or is queued; returns False if the inbox is full."""
        places = self.places
        if places.free > 0:
            places.free -= 1
            frame.crew.enqueue(self, frame)
            return True
        return self.offer(frame)

    def offer(self, frame: "Frame") -> bool:
        """Queue a complete frame, for want of a free place; returns False if the inbox is full."""
        if not self.inbox.put_nowait(frame, frame.priority):
            return False
        frame.queued(self)
        if self.inbox.count == 1:
            self.places.waiting.append(self)
        if frame.parent is not None and self.places.shared:
            frame.crew.loop.call_soon(refuse_if_endless, self, frame)
        return True

    def offer_new(self, frames: "list[Frame]") -> None:
        """Queue frames that have just been made, for want of a free place; no more than the inbox has room for."""
        inbox = self.inbox
        inbox.put_many_nowait(frames)
        if inbox.count == len(frames):
            self.places.waiting.append(self)
        shared = self.places.shared
        for frame in frames:
            frame.queued_at = self
            if shared and frame.parent is not None:
                frame.crew.loop.call_soon(refuse_if_endless, self, frame)

    async def queue(self, frame: "Frame") -> None:
        """Let a frame in although the inbox was full: the producer waits here, which is backpressure."""
        if frame.state != "running" or self.enter(frame):
            return
        frame.queued(self)
        try:
            await self.inbox.put(frame, frame.priority)
        except BaseException:
            self.withdraw(frame)
            raise

    def withdraw(self, frame: "Frame") -> None:
        """Take a cancelled frame out of the inbox, and let the next one in."""
        if frame.dequeued(self) and self.inbox.discard(frame, frame.priority) and not self.inbox.count:
            self.places.waiting.remove(self)

    def label(self, error: BaseException | None = None) -> str:
        """Return the name of the node that runs now, or in which `error` was raised: in a chain, that of the link."""
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
        """A plain function held the loop for long, or gave a coroutine."""
        if seconds > SLOW_SECONDS:
            self.was_slow = True
            self.watch(seconds)
        self.refuse_coroutine(value, self.links[-1].name)

    def refuse_coroutine(self, value: Any, name: str) -> None:
        """Raise for a plain function that returned a coroutine: nobody would ever await it."""
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
        """Where its items wait: its inbox, or that of the loop that it owns."""
        return self.inbox if self.work is None else self.work

    @property
    def is_untimed(self) -> bool:
        """Whether nobody but a profile times its executions: that would take as long as a whole hop."""
        return self.mode == ASYNC or self.invoke is timed

    @property
    def is_stopped(self) -> bool:
        """Whether no attempt can succeed any more: its instance, or its loop, has ended and is not restarted."""
        return (self.gate is not None and self.gate.is_stopped) or (self.work is not None and self.work.closed)

    def measure(self, sampling: "Sampling | None") -> None:
        """Time the executions from now on, all or a sample; with None, do not any more."""
        if sampling is not None:
            from .recorder import Recorder  # with the records of a profile

            switch = {ASYNC: self._time_async, INLINE: self._time_inline}.get(self.mode)
            self.recorder = Recorder(self, switch, sampling)
        elif self.recorder is not None:
            self.recorder.end()
            self.recorder = None

    def _time_async(self, recorder: "Recorder | None") -> None:
        self.mode, self.invoke = (ASYNC, invoke) if recorder is None else (GENERAL, timed)

    def _time_inline(self, recorder: "Recorder | None") -> None:
        self.run = compose(self.links, self, recorder)

    def thread_returned(self) -> None:
        """A thread that nobody waited for any more is back."""
        self.abandoned -= 1
        self.places.release()
        if not self.abandoned and self._all_returned is not None:
            self._all_returned.notify_all()

    async def all_returned(self) -> None:
        """Wait until no thread runs on in this actor that nobody waits for."""
        if self._all_returned is None:  # most actors never have such a thread
            self._all_returned = Condition()
        await self._all_returned.wait_for(lambda: not self.abandoned)

    def statistics(self) -> ActorStatistics:
        """Return a snapshot of the counters."""
        limited = self.places.limit < 1 << 40
        return ActorStatistics(
            graph=self.graph,
            node=self.name,
            completed=self.completed,
            failed=self.failed,
            retried=self.retried,
            restarts=0 if self.instance is None else self.instance.restarts,
            in_flight=self.places.in_flight,
            concurrency=self.places.limit if limited else None,
            busy_seconds=None if self.is_untimed else self.busy_seconds,
            inbox=self.intake.statistics(),
            state=None if self.instance is None else self.instance.state,
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
    """In the place of a function, for an actor that has none, or none yet: a step of control flow has only a body."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("an actor was run before it was wired")


_unset = _Unset()
