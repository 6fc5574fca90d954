"""What statistics say: differences of two looks, the node that limits, and how long something has run."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from ..telemetry.counters import ActorStatistics, Record, counted, less, name_of
from ..telemetry.rendered import Rendered
from ..telemetry.text import printable

if TYPE_CHECKING:
    from ..telemetry.tables import Table


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


@dataclass(frozen=True)
class StreamStatistics(Rendered):
    """A snapshot of a stream. It shows itself as a table: printed, with rich, and in a notebook.

    Attributes:
        submitted: items taken from the source.
        completed: items that ended with a result.
        failed: items that ended with an error.
        skipped: failed items that were skipped (`on_error="skip"`).
        yielded: items handed to the reader, as a result or as an error.
        in_flight: items that count in `max_in_flight` now.
        actors: the nodes; of a deployment's stream, those of the deployment, with all that they have done in it.
        elapsed_seconds: the time that the counters cover: since it is open, until it ended; None before.
        actors_elapsed_seconds: the time that those of `actors` cover; None before there are any.
        expired: those of the failed items that ended with `DeadlineExceeded`, or had not ended when the time of the
            stream was over.
        bottleneck: the node that limits, on average over that time; None if the counters do not say.
    """

    submitted: int
    completed: int
    failed: int
    skipped: int
    yielded: int
    in_flight: int
    actors: tuple[ActorStatistics, ...]
    elapsed_seconds: float | None = None
    actors_elapsed_seconds: float | None = None
    expired: int = 0

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The node that limits it, on average; None if the counters do not say."""
        return find_bottleneck(self.actors, self.actors_elapsed_seconds)

    def since(self, earlier: "StreamStatistics") -> "StreamStatistics":
        """Return what happened after an earlier look: counters less what they were then, all else as it is now.

        Raises:
            ValueError: `earlier` is not an earlier look at the same stream.
        """
        return replace(
            since(
                self, earlier, "submitted", "completed", "failed", "skipped", "yielded", "expired", "elapsed_seconds",
                "actors_elapsed_seconds",
            ),
            actors=actors_less(self.actors, earlier.actors),
        )  # fmt: skip

    def _table(self) -> "Table":
        from ..telemetry.tables import count
        from .tables import mean_rate, or_unknown, table_of

        numbers = ("submitted", "completed", "failed", "skipped", "yielded")
        items = [f"{count(getattr(self, name))} {name}" for name in numbers]
        if self.expired:
            items[2] += f" ({count(self.expired)} expired)"
        facts = (
            ("stream", f"{count(self.in_flight)} in flight"),
            ("items", ", ".join([*items, mean_rate(self.completed, self.elapsed_seconds)])),
            ("bottleneck", or_unknown(self.bottleneck)),
        )
        return table_of(facts, self.actors)
