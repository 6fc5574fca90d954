"""The record of a node's counters, which statistics, metrics, profiles, live looks and drawings all read.

Only the actor of a node makes such records. What happened over time is the difference of two records (`counted`); the
counters of several nodes or scopes are the sum of their records (`ActorStatistics.total`).
"""

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, replace
from operator import attrgetter
from time import time
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from .tables import duration

ActorState: TypeAlias = Literal["running", "restarting", "stopped"]
"""What the `state` of a stateful node may be, in its statistics."""


@dataclass(frozen=True)
class ChannelStatistics:
    """A snapshot of a channel.

    If `put_wait_seconds` grows, the consumer is the bottleneck; if `get_wait_seconds` grows, the producer is the
    bottleneck.

    Attributes:
        depth: how many items it holds now.
        capacity: how many items it may hold; None if unbounded.
        high_water: the most items that it has held at a time.
        bytes_held: how many bytes it holds now, counted for items whose size is known.
        puts: how many items have entered since the channel was made.
        waiting_putters: how many tasks wait for room now.
        waiting_getters: how many tasks wait for an item now.
        put_wait_seconds: how long puts have waited for room in total, including the puts that wait now.
        get_wait_seconds: how long gets have waited for an item in total; gets that wait now do not count yet.
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
class CacheStatistics:
    """A snapshot of the results that a node keeps, with `cache=`.

    Attributes:
        hits: how many calls got a kept result.
        misses: how many calls have begun a computation.
        joined: how many calls have waited for the computation of another call.
        evicted: how many results were removed to make room for newer results, over all call sites in the Engine.
        bytes_held: how many bytes the results that are kept now take, with their keys, over all call sites in the
            Engine.
        store: a number that identifies the results: records with the same number share them.
    """

    hits: int
    misses: int
    joined: int
    evicted: int
    bytes_held: int
    store: int = field(default=0, repr=False, compare=False)


class Figure(NamedTuple):
    """A number that an execution reports for a node.

    Attributes:
        name: the name of the counted or measured quantity, such as "sent".
        unit: the unit of the number, as OpenTelemetry writes units: "By", "s", "{call}".
        value: the number now.
        place: the machine that the number belongs to, if the node runs on several machines; otherwise empty.
    """

    name: str
    unit: str
    value: float
    place: str = ""


# Functions that return lines of a live look that belong to no node, in the order of their registration.
_tellers: dict[object, Callable[[], Iterable[tuple[str, str]]]] = {}


def tell_in_top(tell: Callable[[], Iterable[tuple[str, str]]]) -> Callable[[], None]:
    """Have each live look, such as that of `python -m penstock top`, show lines that belong to no node.

    Args:
        tell: returns pairs of a label and a text. It is called in another thread.

    Returns:
        A function that removes these lines from looks.
    """
    mark = object()
    _tellers[mark] = tell
    return lambda: _tellers.pop(mark, None) and None


def told() -> tuple[tuple[str, str], ...]:
    """Return the lines of a live look that belong to no node."""
    return tuple(line for tell in list(_tellers.values()) for line in tell())


@dataclass(frozen=True)
class ActorStatistics:
    """A snapshot of an actor.

    Attributes:
        graph: the name of its graph, or of the body of control flow that it belongs to.
        node: the name of the node, as drawn.
        completed: how many items it has finished with a result, or how many streams it has given to their end; for a
            `fold` or a `map_each`, how many values it has folded or mapped.
        failed: how many items have ended here with an error, after the last attempt and the fallback; for a `fold` or a
            `map_each`, how many values have failed in it, including the one that ended it.
        retried: how many attempts there were beyond the first of each item.
        restarts: how often its instance was replaced by a new one; 0 for a node without an instance.
        in_flight: how many items are in it now, over all call sites that share its places.
        concurrency: how many items it handles at a time; None if unlimited.
        busy_seconds: the time spent in its handlers, waits included, summed over items. None for an `async def` that
            has no policy and starts no tasks, because it is not timed; and for a node that gives or reads a stream,
            because its time would include the time of the nodes before it.
        inbox: the inbox. If it is full, and its `put_wait_seconds` grows, this node limits the pipeline.
        state: for a stateful node, or an actor that owns its loop: "running"; "restarting" after a crash until it runs
            again; "stopped" if it is not restarted, or if its scope has ended. None for other nodes.
        places: a number that identifies its places: records with the same number share `in_flight` and `concurrency`.
        hedged: how many items have got a second attempt beside the first.
        hedges_won: how many of these items got their result from the second attempt.
        cache: the statistics of its cache; None for a node without `cache=`.
        failed_over: how many items its failover took over, after the last attempt.
        figures: the numbers that an actor that owns its loop reports with `report`, or another execution with its
            `penstock.extension.Bound.figures`.
        retrying_seconds: the time since the first failure of the item that is retried for the longest time now.
        retrying_error: the class of the last error of this item; empty if no item is retried.
        outage: `retrying_seconds` and `retrying_error` in a sentence; empty if no item is retried.
        success_rate: the share of the items that ended with a result, from 0 to 1; None before one has ended.
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
    failed_over: int = 0
    hedged: int = 0
    hedges_won: int = 0
    cache: CacheStatistics | None = None
    figures: tuple[Figure, ...] = ()
    retrying_seconds: float = 0.0
    retrying_error: str = ""

    @property
    def outage(self) -> str:
        """A sentence: for how long items are retried now, and after which error; empty if no item is retried."""
        if not self.retrying_error:
            return ""
        lasting = f"{name_of(self.graph, self.node)} has been retried for {duration(self.retrying_seconds)}"
        return f"{lasting}: {self.retrying_error}"

    @property
    def success_rate(self) -> float | None:
        """The share of the items that ended with a result, from 0 to 1; None before one has ended."""
        return share(self.completed, self.failed)

    @staticmethod
    def total(records: "Iterable[ActorStatistics]") -> "ActorStatistics":
        """Return the sum of records, with the names of the first; places that several records share count once."""
        first, *others = records
        if not others:
            return first
        every = first, *others
        stopped: list[ActorState] = [one.state for one in every if one.state is not None and one.state != "running"]
        places: dict[int, ActorStatistics] = {}
        for number, one in enumerate(every, 1):
            key = -number if one.places is None else one.places
            if key not in places or one.in_flight > places[key].in_flight:  # an idle scope counts no items of others
                places[key] = one
        inboxes = [one.inbox for one in every]
        longest = max(every, key=lambda one: one.retrying_seconds)
        return changed(
            first,
            in_flight=sum(one.in_flight for one in places.values()),
            concurrency=_limit([one.concurrency for one in places.values()]),
            inbox=changed(
                first.inbox,
                capacity=_limit([inbox.capacity for inbox in inboxes]),
                high_water=max(inbox.high_water for inbox in inboxes),
                **_sums(inboxes, *INBOX_COUNTERS, "depth", "bytes_held", "waiting_putters", "waiting_getters"),
            ),
            state=stopped[0] if stopped else first.state,
            cache=_total_of_caches([one.cache for one in every if one.cache is not None]),
            figures=_total_of_figures(figure for one in every for figure in one.figures),
            retrying_seconds=longest.retrying_seconds,
            retrying_error=longest.retrying_error,
            **_sums(every, *_COUNTERS),
        )


@dataclass(frozen=True)
class ProgramMemory:
    """The memory that one compiled program takes on each of its devices, as its compiler says.

    While the program runs, it takes the sum of the bytes of arguments, outputs and temporary values, less
    `reused_bytes`. Its code takes memory once.

    Attributes:
        arguments: the types and shapes of the arguments that it is compiled for, such as "x: float32[64,3]".
        argument_bytes: the size of its arguments, parameters included.
        output_bytes: the size of its results.
        temporary_bytes: the size of its temporary values, which it needs only while it runs.
        reused_bytes: the size of arguments whose memory the results take (donation).
        code_bytes: the size of its code; 0 where the compiler does not say.
        calls: how often it has run.
        program: a number that identifies the program.
    """

    arguments: str
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    reused_bytes: int
    code_bytes: int
    calls: int
    program: int

    @property
    def total_bytes(self) -> int:
        """The bytes that it takes while it runs, without its code."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes - self.reused_bytes


def _total_of_figures(figures: "Iterable[Figure]") -> tuple[Figure, ...]:
    found: dict[tuple[str, str, str], float] = {}
    for name, unit, value, place in figures:
        found[name, unit, place] = found.get((name, unit, place), 0) + value
    return tuple([Figure(name, unit, value, place) for (name, unit, place), value in found.items()])


def share(completed: int, failed: int) -> float | None:
    """Return the share of the items that ended with a result; None before one has ended."""
    return completed / (completed + failed) if completed + failed else None


def name_of(graph: str, node: str) -> str:
    """Return the name of a node for a sentence; in a body of control flow, the name of the body comes first.

    Args:
        graph: the name of its graph; for a body, "graph/body".
        node: the name of the node, as drawn.
    """
    return "/".join([*graph.split("/")[1:], node])


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Record = TypeVar("Record", bound=_Dataclass)

_COUNTERS = "completed", "failed", "retried", "restarts", "busy_seconds", "failed_over", "hedged", "hedges_won"
_CACHE_COUNTERS = "hits", "misses", "joined", "evicted"
INBOX_COUNTERS = "puts", "put_wait_seconds", "get_wait_seconds"


def changed(record: Record, **changes: object) -> Record:
    """Return a copy with other values of some fields, as `replace` does, in a fifth of the time; not for slots."""
    twin = object.__new__(type(record))
    object.__setattr__(twin, "__dict__", vars(record) | changes)
    return twin


def less(later: Record, earlier: Record, *counters: str) -> Record:
    """Return the later record, with the named counters reduced by their earlier values; None stays None."""
    difference = changed(later)
    now, before = vars(difference), vars(earlier)
    for name in counters:
        if now[name] is not None:
            now[name] -= before[name] or 0
    return difference


def counted(now: ActorStatistics, before: ActorStatistics | None, less: Callable[..., Any] = less) -> ActorStatistics:
    """Return the counts of a node between two records; if there is no earlier record, the counts of the later one.

    Args:
        now: the later record.
        before: the earlier record.
        less: subtracts the earlier record from the later one; it may raise.
    """
    if before is None:
        return now
    done: ActorStatistics = less(now, before, *_COUNTERS)
    has_cache = now.cache is not None and before.cache is not None
    cache = less(now.cache, before.cache, *_CACHE_COUNTERS) if has_cache else None
    vars(done).update(inbox=less(now.inbox, before.inbox, *INBOX_COUNTERS), cache=cache)  # a new record
    return done


# Places that are free for half of the time limit nothing: if the inbox before them was full, a burst filled it.
LEAST_USED: Final = 0.5
# At least so many items must have waited for room, on average. With fewer, the inbox was full only now and then.
_LEAST_WAITING: Final = 0.5


def full_inboxes(nodes: Iterable[tuple[ActorStatistics, float]]) -> list[tuple[ActorStatistics, float, float | None]]:
    """Return the node that limits each graph, from the counters that are always kept.

    Backpressure fills all inboxes up to the slowest node. So the slowest node of a graph is the last one, in
    topological order, with a full inbox. If that node is known to be idle for much of the time, the inbox was full
    because of a burst.

    Args:
        nodes: the counters of each node, and the seconds that they cover; nodes of one graph in topological order.

    Returns:
        The counters of each such node; how many items waited for room in its inbox, on average; and the share of the
        time for which its places were busy, from 0 to 1, which is None if it is not measured.
    """
    found: dict[str, tuple[ActorStatistics, float, float | None]] = {}
    for node, seconds in nodes:
        waiting = node.inbox.put_wait_seconds
        if not seconds or waiting < _LEAST_WAITING * seconds:
            continue
        waiting /= seconds
        is_known = node.busy_seconds is not None and node.concurrency is not None
        share = (node.busy_seconds or 0.0) / seconds / (node.concurrency or 1) if is_known else None
        if share is None or share >= LEAST_USED:
            found[node.graph] = node, waiting, share
    return list(found.values())


def _sums(records: Iterable[object], *names: str) -> dict[str, Any]:
    """Return the sum of each of the named numbers; None for a number that no record has."""
    found: list[tuple[Any, ...]] = list(map(attrgetter(*names), records))
    columns = zip(names, zip(*found, strict=True), strict=True)
    return {name: sum(filter(None, all_)) if all_.count(None) < len(found) else None for name, all_ in columns}


def _total_of_caches(caches: list[CacheStatistics]) -> CacheStatistics | None:
    if not caches:
        return None
    stores = {one.store: one for one in caches}.values()
    return replace(caches[0], **_sums(caches, "hits", "misses", "joined"), **_sums(stores, "evicted", "bytes_held"))


def _limit(limits: list[int | None]) -> int | None:
    """Return the sum of limits; None if one of them is None, which means unlimited."""
    return None if None in limits else sum(limit or 0 for limit in limits)


class Cuts(NamedTuple):
    """The snapshots of a call with `checkpoint=`, or the states that durable loops have stored.

    Args:
        asked: how often snapshots are asked for, such as "every 60 s".
        made: how many snapshots were made.
        newest: when the newest snapshot was made, in seconds since 1970; 0 before the first.
        bytes: the size of the newest snapshot.
        reached: the time between the last two snapshots, in seconds; None before the second.
    """

    asked: str
    made: int = 0
    newest: float = 0.0
    bytes: int = 0
    reached: float | None = None

    def one_more(self, size: int) -> "Cuts":
        """Return the record after one more snapshot, made now; `size` is in bytes."""
        now = time()
        return Cuts(self.asked, self.made + 1, now, size, now - self.newest if self.made else None)


class SavedSnapshots(NamedTuple):
    """The costs of the snapshots of a call with `checkpoint=`.

    Attributes:
        saved: how many snapshots were written.
        skipped: how many were left out, because the snapshot before was still being written, or because of `max_bytes`.
        failed: how many could not be written.
        bytes: the size of all written snapshots.
        write_seconds: how long the writing took, beside the pipeline.
        copy_seconds: how long states were copied, while their steps waited.
        reader_seconds: how long the reader waited for the copies of its state and of the values that it had not taken.
        most_values: the most values that the reader has taken between two snapshots.
    """

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    bytes: int = 0
    write_seconds: float = 0.0
    copy_seconds: float = 0.0
    reader_seconds: float = 0.0
    most_values: int = 0

    def plus(self, other: "SavedSnapshots") -> "SavedSnapshots":
        """Return the sum of both."""
        both = SavedSnapshots._make(one + more for one, more in zip(self, other, strict=True))
        return both._replace(most_values=max(self.most_values, other.most_values))
