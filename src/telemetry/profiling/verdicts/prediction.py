"""Prediction: what a change of a node would do to the throughput."""

from dataclasses import dataclass

from ...tables.characters import printable
from ...tables.quantities import rate, significant
from ..sums import Name
from .evidence import Evidence
from .limits.limit import Verdict
from .model import Change, Model
from .verdict import verdict_of


@dataclass(frozen=True)
class Prediction:
    """What would have been if a node had been another. `str()` says it in one sentence.

    Attributes:
        node: name of the node.
        graph: name of its graph.
        speedup: how many times as fast its handler becomes.
        concurrency: how many items it may have at a time; None for as many as now.
        items_per_second: items that went through the graph.
        predicted_items_per_second: as many as would have.
        factor: the one over the other.
        verdict: what would limit then.
    """

    node: str
    graph: str
    speedup: float
    concurrency: int | None
    items_per_second: float
    predicted_items_per_second: float
    factor: float
    verdict: Verdict

    def __str__(self) -> str:
        changes = [f"{significant(self.speedup)} times as fast"] if self.speedup != 1 else []
        changes += [f"with {self.concurrency:,} places"] if self.concurrency is not None else []
        return printable(
            f'"{self.node}" {" and ".join(changes) or "as it is"}: {rate(self.predicted_items_per_second, "items")} '
            f"instead of {rate(self.items_per_second, 'items')} ({significant(self.factor)} times as many); then "
            f"{self.verdict}"
        )


def predict(
    evidence: Evidence, node: str, *, graph: str | None = None, speedup: float = 1.0, concurrency: int | None = None
) -> Prediction:
    """Return what a change of a node would do.

    Raises:
        ValueError: there is no such node, or several, or the change is none that could be made.
    """
    name = _found(evidence, node, graph)
    if not speedup > 0:
        raise ValueError(f"speedup= is how many times as fast the node becomes, above 0, not {speedup!r}")
    if concurrency is not None:
        _check_places(evidence, name, concurrency)
    model = Model.of(evidence)
    changed = model.changed(Change(name, speedup, concurrency))
    bound = changed.bound()
    factor = model.bound() / bound if bound else 1.0
    per_second = evidence.sums.items(name[0]) / evidence.elapsed_seconds if evidence.elapsed_seconds else 0.0
    verdict = verdict_of(changed.sped_up(factor))
    return Prediction(name[1], name[0], speedup, concurrency, per_second, per_second * factor, factor, verdict)


def _found(evidence: Evidence, node: str, graph: str | None) -> Name:
    names = [name for name, total in evidence.sums.nodes.items() if total.completed or total.failed]
    found = [name for name in names if name[1] == node and graph in (None, name[0])]
    if len(found) == 1:
        return found[0]
    if found:
        graphs = ", ".join(repr(name[0]) for name in found)
        raise ValueError(f"several graphs have a node {node!r}: say which, with graph= one of {graphs}")
    known = ", ".join(repr(name[1]) for name in names) or "none"
    raise ValueError(f"nothing called {node!r} ran while the profile was taken; what ran: {known}")


def _check_places(evidence: Evidence, name: Name, concurrency: int) -> None:
    total = evidence.sums.nodes[name]
    if concurrency < 1:
        raise ValueError(f"concurrency= is a number of places, at least 1, not {concurrency!r}")
    if total.reading.gathers or not evidence.sums.own_places(total):
        raise ValueError(f"{name[1]!r} has no places of its own that could be more or fewer")
