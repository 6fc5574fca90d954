"""Actor: one call site of a node in one scope, with its inbox, its places and its counters."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import structlog

from .channel import Channel, ChannelStatistics
from .places import Places
from .policy import Policy

if TYPE_CHECKING:
    from .crew import Worker
    from .frame import Frame

_log: structlog.stdlib.BoundLogger = structlog.get_logger("penstock")

# How a worker runs the handler. The first two are the hot path; everything with a policy takes the third.
INLINE: Final = 0
ASYNC: Final = 1
GENERAL: Final = 2

# A body that holds the loop longer than this is reported: at 50 ms a person notices, and other items wait.
BLOCKING_SECONDS = 0.05

Values = list[Any]
Invoke = Callable[["Worker", "Actor", "Frame"], Awaitable[Any]]


@dataclass(frozen=True)
class Link:
    """One node of an inline chain: its function, and how it takes its arguments from the value before it."""

    name: str
    fn: Callable[[Any], Any]


@dataclass(frozen=True)
class ActorStatistics:
    """A snapshot of an actor.

    Attributes:
        node: name of the node, as drawn.
        completed: items that it finished with a result.
        failed: items that ended in an error here, after the last attempt and the fallback.
        retried: attempts beyond the first.
        in_flight: items in it now, over all call sites that share its places.
        concurrency: the most items in flight; None if unlimited.
        busy_seconds: time spent in its handlers, waits included; counted for plain functions, threads, processes and
            nodes with a policy. An `async def` without a policy is not timed.
        inbox: the inbox; a full one (and a growing `put_wait_seconds`) says that this node limits the pipeline.
    """

    node: str
    completed: int
    failed: int
    retried: int
    in_flight: int
    concurrency: int | None
    busy_seconds: float
    inbox: ChannelStatistics


class Actor:
    """A node at work: what to run, where its values come from and go, who may run now and who waits.

    Built once for a scope and then only read by the workers, except for its counters.
    """

    __slots__ = (
        "args_of", "bodies", "busy_seconds", "completed", "consumers", "failed", "fn", "graph", "inbox", "index",
        "invoke", "kwargs_of", "links", "mode", "name", "out", "places", "policy", "reads", "reported", "retried",
        "slot", "successor",
    )  # fmt: skip

    def __init__(self, name: str, graph: str, index: int, policy: Policy, places: Places, inbox: "Channel[Frame]") -> None:
        self.name = name
        self.graph = graph
        self.index = index
        self.policy = policy
        self.places = places
        self.inbox = inbox
        self.mode = GENERAL
        self.fn: Callable[..., Any] = _unset
        self.invoke: Invoke = _unset
        self.links: tuple[Link, ...] = ()
        self.slot = -1  # the slot of the only argument, or -1: `args_of` and `kwargs_of` build them
        self.args_of: Callable[[Values], tuple[Any, ...]] = _no_args
        self.kwargs_of: Callable[[Values], dict[str, Any]] | None = None
        self.out = 0
        self.reads: tuple[int, ...] = ()  # slots to give up when done
        self.consumers: tuple[Actor, ...] = ()
        self.successor: Actor | None = None  # the only consumer, if it waits for nothing else
        self.bodies: tuple[Any, ...] = ()
        self.completed = 0
        self.failed = 0
        self.retried = 0
        self.busy_seconds = 0.0
        self.reported = False

    def offer(self, frame: "Frame") -> bool:
        """Queue a complete frame, for want of a free place; returns False if the inbox is full."""
        if not self.inbox.put_nowait(frame, frame.priority):
            return False
        frame.queued_at.append(self)
        self._line_up()
        return True

    async def queue(self, frame: "Frame") -> None:
        """Queue a frame in a full inbox: the producer waits here, which is backpressure."""
        frame.queued_at.append(self)
        try:
            await self.inbox.put(frame, frame.priority)
        except BaseException:
            self.withdraw(frame)
            raise

    def withdraw(self, frame: "Frame") -> None:
        """Take a cancelled frame out of the inbox, and let the next one in."""
        if self in frame.queued_at:
            frame.queued_at.remove(self)
            if self.inbox.discard(frame, frame.priority) and not len(self.inbox):
                self.places.waiting.remove(self)

    def _line_up(self) -> None:
        if len(self.inbox) == 1:
            self.places.waiting.append(self)

    def run_inline(self, values: Values) -> Any:
        """Run a plain function, and the chain of plain functions behind it, watching the clock: they hold the loop."""
        self.link = self.links[0]
        began = perf_counter()
        if self.slot >= 0:
            value = self.fn(values[self.slot])
        elif self.kwargs_of is None:
            value = self.fn(*self.args_of(values))
        else:
            value = self.fn(*self.args_of(values), **self.kwargs_of(values))
        for link in self.links[1:]:
            self.link = link
            value = link.fn(value)
        elapsed = perf_counter() - began
        self.busy_seconds += elapsed
        if elapsed > BLOCKING_SECONDS:
            self.report_blocking(elapsed)
        return value

    def report_blocking(self, elapsed_seconds: float) -> None:
        """Log once that this node holds the event loop, with the remedy."""
        if self.reported:
            return
        self.reported = True
        _log.warning(
            "node.blocks_loop", node=self.name, graph=self.graph, milliseconds=round(elapsed_seconds * 1000),
            remedy='declare it @node(runs_on="thread") or runs_on="process", so that the event loop stays free',
        )  # fmt: skip

    def statistics(self) -> ActorStatistics:
        """Return a snapshot of the counters."""
        limited = self.places.limit < 1 << 40
        return ActorStatistics(
            node=self.name,
            completed=self.completed,
            failed=self.failed,
            retried=self.retried,
            in_flight=self.places.in_flight,
            concurrency=self.places.limit if limited else None,
            busy_seconds=self.busy_seconds,
            inbox=self.inbox.statistics(),
        )


def _no_args(values: Values) -> tuple[Any, ...]:
    return ()


def _unset(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("an actor was run before it was wired")
