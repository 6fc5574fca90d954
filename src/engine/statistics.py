"""What statistics say: differences of two looks, the node that limits, and how long something has run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, replace
from time import perf_counter
from typing import Any, ClassVar, Final, Protocol, TypeVar

from ..actors.node_actor import ActorStatistics
from ..telemetry.tables.characters import printable


class Uptime:
    """A watch that stands still once what it measures has ended.

    It uses the clock of `busy_seconds` and `put_wait_seconds`, which are compared with it, and not that of the loop.
    """

    __slots__ = ("_began", "_ended")

    def __init__(self) -> None:
        self._began = perf_counter()
        self._ended: float | None = None

    def restart(self) -> None:
        """Count from now on."""
        self._began = perf_counter()

    def stop(self) -> None:
        """Stand still; the first call counts."""
        if self._ended is None:
            self._ended = perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning, until the end."""
        return (perf_counter() if self._ended is None else self._ended) - self._began


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Record = TypeVar("Record", bound=_Dataclass)


def less(later: Record, earlier: Record, *counters: str) -> Record:
    """Return a record with those of its fields that count reduced by what they were; one that is None stays None.

    Raises:
        ValueError: a counter has become smaller, so the records are not two of the same.
    """
    changes: dict[str, Any] = {}
    for name in counters:
        now, before = getattr(later, name), getattr(earlier, name)
        if now is None:
            continue
        changes[name] = now - (before or 0)
        if changes[name] < 0:
            raise ValueError(
                f"since() takes an earlier look at the same counters, but {name} was {before}, and is {now}"
            )
    return replace(later, **changes)


def actors_less(later: Iterable[ActorStatistics], earlier: Iterable[ActorStatistics]) -> tuple[ActorStatistics, ...]:
    """Return what each node did between two looks; one that is new did all of it."""
    before = dict(_numbered(earlier))
    return tuple(_actor_less(now, before[key]) if key in before else now for key, now in _numbered(later))


def _actor_less(now: ActorStatistics, before: ActorStatistics) -> ActorStatistics:
    inbox = less(now.inbox, before.inbox, "puts", "put_wait_seconds", "get_wait_seconds")
    return replace(less(now, before, "completed", "failed", "retried", "restarts", "busy_seconds"), inbox=inbox)


def _numbered(actors: Iterable[ActorStatistics]) -> Iterable[tuple[tuple[str, str, int], ActorStatistics]]:
    """Yield actors with what tells each from the others, also from one of the same name."""
    seen: Counter[tuple[str, str]] = Counter()
    for actor in actors:
        seen[actor.graph, actor.node] += 1
        yield (actor.graph, actor.node, seen[actor.graph, actor.node]), actor


# Which node limits a pipeline, where its counters say so.
#
# A profile has a rule of its own, `telemetry/profiling/verdict.py`, and neither can read the other. That one asks what
# was used most of the time, for which every handler has to be timed; this one is asked while nobody takes a profile,
# when async handlers are not timed, and so it reads who waits before whom. A full inbox alone would not do for the
# profile either: it says nothing of a pool, a reader or what is in flight. Where both name a node, it is the same one.

# Items that waited for room, on average: with fewer, the inbox was full now and then, which limits nothing.
LEAST_WAITING: Final = 0.5


@dataclass(frozen=True)
class Bottleneck:
    """The node that limits a stream or a deployment. `str()` says it in a sentence.

    Attributes:
        graph: name of its graph.
        node: name of the node, as drawn.
        waiting: how many items waited for room in its inbox, on average.
        busy_share: how much of the time its places were busy, from 0 to 1, on average; None if that is not measured.
        concurrency: the most items in flight in it; None if unlimited.
    """

    graph: str
    node: str
    waiting: float
    busy_share: float | None
    concurrency: int | None

    def __str__(self) -> str:
        from ..telemetry.tables.table import significant

        waiting = f"on average {significant(self.waiting)} items waited for room in its inbox"
        sentence = f"{printable(self.node)} limits it: {waiting}"
        if self.busy_share is None:
            return sentence
        places = "its only place was" if self.concurrency == 1 else f"its {self.concurrency:,} places were"
        return f"{sentence}, while {places} {min(self.busy_share, 1):.0%} busy"


def find_bottleneck(actors: Sequence[ActorStatistics], elapsed_seconds: float | None) -> Bottleneck | None:
    """Return the node that limits, on average over the time that the counters cover; None if they do not say.

    Backpressure fills every inbox up to the slowest node, so in each graph it is the last one for whose inbox items
    had to wait. Of several graphs, that for which most waited.

    Args:
        actors: the nodes; those of one graph in topological order.
        elapsed_seconds: the time that the counters cover; None if unknown, and then nothing can be said.
    """
    from ..telemetry.profiling.limits import LEAST_USED

    if not elapsed_seconds:
        return None
    found: dict[str, Bottleneck] = {}
    for actor in actors:
        share = _busy_share(actor, elapsed_seconds)
        waiting = actor.inbox.put_wait_seconds / elapsed_seconds
        if waiting >= LEAST_WAITING and (share is None or share >= LEAST_USED):
            found[actor.graph] = Bottleneck(actor.graph, actor.node, waiting, share, actor.concurrency)
    return max(found.values(), key=lambda node: node.waiting, default=None)


def _busy_share(actor: ActorStatistics, elapsed_seconds: float) -> float | None:
    if actor.busy_seconds is None or actor.concurrency is None:
        return None
    return actor.busy_seconds / elapsed_seconds / actor.concurrency
