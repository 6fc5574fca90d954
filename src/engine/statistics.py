"""What statistics say: differences of two looks, the node that limits, and how long something has run."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from ..telemetry.counters import ActorStatistics, Record, counted, less, name_of
from ..telemetry.text import printable


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


def since(later: Record, earlier: Record, *counters: str) -> Record:
    """Return a record with those of its fields that count reduced by what they were.

    Raises:
        ValueError: a counter has become smaller, so the records are not two of the same.
    """
    changed = less(later, earlier, *counters)
    for name in counters:
        if (getattr(changed, name) or 0) < 0:
            raise ValueError(
                f"since() takes an earlier look at the same counters, but {name} was {getattr(earlier, name)}, and is "
                f"{getattr(later, name)}"
            )
    return changed


def actors_less(later: Iterable[ActorStatistics], earlier: Iterable[ActorStatistics]) -> tuple[ActorStatistics, ...]:
    """Return what each node did between two looks; one that is new did all of it."""
    before = dict(_numbered(earlier))
    return tuple(counted(now, before.get(key), since) for key, now in _numbered(later))


def _numbered(actors: Iterable[ActorStatistics]) -> Iterable[tuple[tuple[str, str, int], ActorStatistics]]:
    """Yield actors with what tells each from the others, also from one of the same name."""
    seen: Counter[tuple[str, str]] = Counter()
    for actor in actors:
        seen[actor.graph, actor.node] += 1
        yield (actor.graph, actor.node, seen[actor.graph, actor.node]), actor


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
        from ..telemetry.tables import significant

        waiting = f"on average {significant(self.waiting)} items waited for room in its inbox"
        sentence = f"{printable(name_of(self.graph, self.node))} limits it: {waiting}"
        if self.busy_share is None:
            return sentence
        places = "its only place was" if self.concurrency == 1 else f"its {self.concurrency:,} places were"
        return f"{sentence}, while {places} {min(self.busy_share, 1):.0%} busy"


def find_bottleneck(actors: Iterable[ActorStatistics], elapsed_seconds: float | None) -> Bottleneck | None:
    """Return the node that limits, on average over the time that the counters cover; None if they do not say.

    A verdict uses the same rule, and others that need the times of a profile.

    Args:
        actors: the nodes; those of one graph in topological order.
        elapsed_seconds: the time that the counters cover; None if unknown, and then nothing can be said.
    """
    from ..telemetry.profiling.limits import full_inboxes

    if not elapsed_seconds:
        return None
    found = full_inboxes((actor, elapsed_seconds) for actor in actors)
    most = max(found, key=lambda inbox: inbox.waiting, default=None)
    if most is None:
        return None
    node = most.node
    return Bottleneck(node.graph, node.node, most.waiting, most.busy_share, node.concurrency)
