"""Statistics of streams, the node that limits a stream, differences of two snapshots, and uptimes."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter

from ..telemetry.counters import ActorStatistics, Record, counted, full_inboxes, less, name_of, share
from ..telemetry.logs import shown
from ..telemetry.tables import Rendered, Table, count, significant
from ..telemetry.text import printable


class Uptime:
    """A stopwatch, which runs from its making until `stop`.

    The stopwatch uses `perf_counter` and not the clock of the loop, because it is compared with `busy_seconds` and
    `put_wait_seconds`, which use `perf_counter`, too.
    """

    __slots__ = ("_began", "_ended")

    def __init__(self) -> None:
        self._began = perf_counter()
        self._ended: float | None = None

    def restart(self) -> None:
        """Count from now on instead."""
        self._began = perf_counter()

    def stop(self) -> None:
        """Stop the watch; further calls change nothing."""
        if self._ended is None:
            self._ended = perf_counter()

    @property
    def seconds(self) -> float:
        """The time from the beginning until `stop`, or until now, in seconds."""
        return (perf_counter() if self._ended is None else self._ended) - self._began


def since(later: Record, earlier: Record, *counters: str) -> Record:
    """Return the later record, with the named counters reduced by their values in the earlier record.

    Raises:
        ValueError: a counter has become smaller, so the two records are not of the same object.
    """
    changed = less(later, earlier, *counters)
    for name in counters:
        if (getattr(changed, name) or 0) < 0:
            raise ValueError(
                f"since() takes earlier statistics of the same object, but {name} was {getattr(earlier, name)}, and is "
                f"{getattr(later, name)}"
            )
    return changed


def actors_less(later: Iterable[ActorStatistics], earlier: Iterable[ActorStatistics]) -> tuple[ActorStatistics, ...]:
    """Return the counters of each node, less its counters in an earlier snapshot, if the node was in that snapshot."""
    before = dict(_numbered(earlier))
    return tuple(counted(now, before.get(key), since) for key, now in _numbered(later))


def _numbered(actors: Iterable[ActorStatistics]) -> Iterable[tuple[tuple[str, str, int], ActorStatistics]]:
    """Yield actors with a key for each: the graph, the node, and a number among actors with the same names."""
    seen: Counter[tuple[str, str]] = Counter()
    for actor in actors:
        seen[actor.graph, actor.node] += 1
        yield (actor.graph, actor.node, seen[actor.graph, actor.node]), actor


@dataclass(frozen=True)
class Bottleneck:
    """The node that limits a stream or a deployment. `str()` gives a sentence about the node and the reason.

    Attributes:
        graph: the name of its graph.
        node: the name of the node, as drawn.
        waiting: how many items waited for room in its inbox, on average.
        busy_share: the share of the time in which its places were busy, from 0 to 1, on average; None if it is not
            measured.
        concurrency: how many items the node handles at a time; None if unlimited.
    """

    graph: str
    node: str
    waiting: float
    busy_share: float | None
    concurrency: int | None

    def __str__(self) -> str:
        waiting = f"on average {significant(self.waiting)} items waited for room in its inbox"
        sentence = f"{printable(name_of(self.graph, self.node))} limits it: {waiting}"
        if self.busy_share is None:
            return sentence
        places = "its only place was" if self.concurrency == 1 else f"its {self.concurrency:,} places were"
        return f"{sentence}, while {places} {min(self.busy_share, 1):.0%} busy"


def find_bottleneck(actors: Iterable[ActorStatistics], elapsed_seconds: float | None) -> Bottleneck | None:
    """Return the node that limits, on average over the time that the counters cover; None if no inbox was full.

    The verdict of a profile uses the same rule, and further rules that need the times of a profile.

    Args:
        actors: the nodes; the nodes of one graph are in topological order.
        elapsed_seconds: the time that the counters cover, in seconds; None if unknown: then the result is None, too.
    """
    if not elapsed_seconds:
        return None
    found = full_inboxes((actor, elapsed_seconds) for actor in actors)
    if not found:
        return None
    node, waiting, busy_share = max(found, key=lambda inbox: inbox[1])
    return Bottleneck(node.graph, node.node, waiting, busy_share, node.concurrency)


def _behind(waiting: str, key: str) -> str:
    return f"{waiting} waiting for their keys, most of them for {printable(key):.60}"


@dataclass(frozen=True)
class StreamStatistics(Rendered):
    """A snapshot of a stream. A snapshot shows itself as a table when printed, with rich, and in a notebook.

    Attributes:
        submitted: how many items were taken from the source.
        completed: how many items ended with a result.
        failed: how many items ended with an error.
        skipped: how many of the failed items were skipped (`on_error="skip"`).
        yielded: how many items the reader got, as a result or as an error.
        in_flight: how many items count in `max_in_flight` now.
        actors: the nodes and their counters. For a stream of a deployment, the nodes of the deployment: their counters
            cover all of its calls.
        elapsed_seconds: for how long the stream has been open, or was open until it ended, in seconds; None before the
            stream is opened.
        actors_elapsed_seconds: the time that the counters of `actors` cover, in seconds; None before there are actors.
        expired: how many of the failed items ended with `DeadlineExceeded`, or were in flight when the time of the
            stream was over.
        interrupted: how many items ended with `Interrupted`, because a node has asked a question; these items do not
            count as failed.
        bottleneck: the node that limits, on average over `actors_elapsed_seconds`; None if no inbox was full.
        success_rate: the share of results among the items that have ended; None before an item has ended.
        snapshots_saved: with `checkpoint=`, how many snapshots were written.
        snapshots_skipped: how many snapshots were left out, because the last snapshot was still being written, or
            because of `max_bytes`.
        snapshots_failed: how many snapshots could not be written.
        snapshot_interval: the most values that the reader has taken from one snapshot to the next; 0 before the first
            snapshot.
        waiting_for_keys: with `order_by=`, how many items wait now for earlier calls of their keys.
        busiest_key: the key with the most waiting items; None if no item waits.
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
    interrupted: int = 0
    snapshots_saved: int = 0
    snapshots_skipped: int = 0
    snapshots_failed: int = 0
    snapshot_interval: int = 0
    waiting_for_keys: int = 0
    busiest_key: Hashable = None

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The node that limits the stream, on average over `actors_elapsed_seconds`; None if no inbox was full."""
        return find_bottleneck(self.actors, self.actors_elapsed_seconds)

    @property
    def success_rate(self) -> float | None:
        """The share of results among the items that have ended; None before an item has ended."""
        return share(self.completed, self.failed)

    def since(self, earlier: "StreamStatistics") -> "StreamStatistics":
        """Return the difference of this snapshot and an earlier snapshot.

        Args:
            earlier: an earlier snapshot of the same stream.

        Returns:
            A snapshot whose counters are reduced by the counters of `earlier`; all other values are from this snapshot.

        Raises:
            ValueError: `earlier` is not an earlier snapshot of the same stream.
        """
        return replace(
            since(
                self, earlier, "submitted", "completed", "failed", "skipped", "yielded", "expired", "interrupted",
                "elapsed_seconds", "actors_elapsed_seconds", "snapshots_saved", "snapshots_skipped", "snapshots_failed",
            ),
            actors=actors_less(self.actors, earlier.actors),
        )  # fmt: skip

    def _table(self) -> Table:
        from .tables import mean_rate, or_unknown, table_of

        numbers = ("submitted", "completed", "failed", "skipped", "yielded")
        items = [f"{count(getattr(self, name))} {name}" for name in numbers]
        if self.expired:
            items[2] += f" ({count(self.expired)} expired)"
        if self.interrupted:
            items.append(f"{count(self.interrupted)} interrupted")
        facts = [
            ("stream", f"{count(self.in_flight)} in flight"),
            ("items", ", ".join([*items, mean_rate(self.completed, self.elapsed_seconds)])),
            ("bottleneck", or_unknown(self.bottleneck)),
        ]
        if self.waiting_for_keys:
            facts.append(("order", _behind(count(self.waiting_for_keys), shown(self.busiest_key))))
        if any((self.snapshots_saved, self.snapshots_skipped, self.snapshots_failed)):
            snapshots = (
                f"{count(getattr(self, f'snapshots_{name}'))} {name}" for name in ("saved", "skipped", "failed")
            )
            interval = f"at most {count(self.snapshot_interval)} values apart"
            facts.append(("snapshots", ", ".join([*snapshots, interval])))
        return table_of(tuple(facts), self.actors)
