"""Which node limits a pipeline, where its counters say so.

A profile has a rule of its own, `telemetry/profiling/verdict.py`, and neither can read the other. That one asks what
was used most of the time, for which every handler has to be timed; this one is asked while nobody takes a profile, when
async handlers are not timed, and so it reads who waits before whom. A full inbox alone would not do for the profile
either: it says nothing of a pool, a reader or what is in flight. Where both name a node, it is the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...actors.node_actor import ActorStatistics
from ...telemetry.tables.characters import printable

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
        from ...telemetry.tables.quantities import significant

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
    from ...telemetry.profiling.verdicts.limits.limit import LEAST_USED

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
