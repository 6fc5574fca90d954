"""The record of a node's counters, which statistics, metrics, profiles, live looks and drawings all read.

Only the actor of a node writes them down. What a record says over time is the difference of two (`counted`), what
several nodes or scopes say together is their sum (`total`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ActorState: TypeAlias = Literal["running", "restarting", "stopped"]
"""What the `state` of a stateful node may be, in its statistics."""


@dataclass(frozen=True)
class ChannelStatistics:
    """A snapshot of a channel.

    A `put_wait_seconds` that grows means that the consumer is the bottleneck; a `get_wait_seconds` that grows
    means that the producer is.

    Attributes:
        depth: items held now.
        capacity: items it may hold; None if unbounded.
        high_water: the most items it ever held.
        bytes_held: bytes held now, where the size of items is known.
        puts: items that entered since the channel was made.
        waiting_putters: tasks that wait for room now.
        waiting_getters: tasks that wait for an item now.
        put_wait_seconds: time that putters spent waiting, in total; of those that wait now, until now.
        get_wait_seconds: time that getters spent waiting, in total; of those that wait now, nothing yet.
    """

    depth: int
    capacity: int | None
    high_water: int
    bytes_held: int
    puts: int
    waiting_putters: int
    waiting_getters: int
    put_wait_seconds: float
    get_wait_seconds: float


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
            policy that starts no tasks, which is not timed, and for a node that gives or reads a stream, whose time is
            that of the nodes before it as well.
        inbox: the inbox; a full one (and a growing `put_wait_seconds`) says that this node limits the pipeline.
        state: of a stateful node or one that owns its loop: "running"; "restarting" from a crash on until it runs
            again; "stopped" if it will not, because it is not restarted or its scope has ended. None for other nodes.
        places: a number that stands for its places: `in_flight` and `concurrency` of records with the same number are
            of the same places.
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
    places: int | None = field(default=None, repr=False, compare=False)


def name_of(graph: str, node: str) -> str:
    """Return what to call a node in a sentence: one in a body of control flow has the name of the body before its own.

    Args:
        graph: name of its graph; of a body "graph/body".
        node: its name, as drawn.
    """
    return "/".join([*graph.split("/")[1:], node])


Record = TypeVar("Record", bound="DataclassInstance")

_COUNTERS = "completed", "failed", "retried", "restarts", "busy_seconds"
_INBOX_COUNTERS = "puts", "put_wait_seconds", "get_wait_seconds"


def less(later: Record, earlier: Record, *counters: str) -> Record:
    """Return a record with those of its fields that count reduced by what they were; one that is None stays None."""
    changes = {
        name: now - (getattr(earlier, name) or 0) for name in counters if (now := getattr(later, name)) is not None
    }
    return replace(later, **changes)


def counted(now: ActorStatistics, before: ActorStatistics | None, less: Callable[..., Any] = less) -> ActorStatistics:
    """Return what was counted between two looks at one node; everything, if there was no earlier one.

    Args:
        now: the later look.
        before: the earlier one.
        less: takes the one from the other; it may refuse to.
    """
    if before is None:
        return now
    changed: ActorStatistics = less(now, before, *_COUNTERS)
    return replace(changed, inbox=less(now.inbox, before.inbox, *_INBOX_COUNTERS))


def total(records: Iterable[ActorStatistics]) -> ActorStatistics:
    """Return what records add up to, under the names of the first; places that several share count once."""
    first, *others = records
    if not others:
        return first
    every = first, *others
    stopped: list[ActorState] = [one.state for one in every if one.state is not None and one.state != "running"]
    places = {one.places if one.places is not None else -number: one for number, one in enumerate(every, 1)}
    inboxes = [one.inbox for one in every]
    return ActorStatistics(
        first.graph,
        first.node,
        sum(one.completed for one in every),
        sum(one.failed for one in every),
        sum(one.retried for one in every),
        sum(one.restarts for one in every),
        sum(one.in_flight for one in places.values()),
        _limit([one.concurrency for one in places.values()]),
        None if all(one.busy_seconds is None for one in every) else sum(one.busy_seconds or 0.0 for one in every),
        ChannelStatistics(
            depth=sum(inbox.depth for inbox in inboxes),
            capacity=_limit([inbox.capacity for inbox in inboxes]),
            high_water=max(inbox.high_water for inbox in inboxes),
            bytes_held=sum(inbox.bytes_held for inbox in inboxes),
            puts=sum(inbox.puts for inbox in inboxes),
            waiting_putters=sum(inbox.waiting_putters for inbox in inboxes),
            waiting_getters=sum(inbox.waiting_getters for inbox in inboxes),
            put_wait_seconds=sum(inbox.put_wait_seconds for inbox in inboxes),
            get_wait_seconds=sum(inbox.get_wait_seconds for inbox in inboxes),
        ),
        stopped[0] if stopped else first.state,
    )


def _limit(limits: list[int | None]) -> int | None:
    """Return the sum of limits; None if one of them is none."""
    return None if None in limits else sum(limit or 0 for limit in limits)
