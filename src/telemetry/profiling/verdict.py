"""Verdict: which node limits, why, what to do about it, and what a change would bring."""

from dataclasses import dataclass, replace
from math import inf

from ..counters import name_of
from ..tables.characters import printable
from ..tables.rendered import Rendered
from ..tables.table import Table, milliseconds, rate, significant
from .evidence import Evidence, critical_paths
from .limits import LEAST_USED, MOST_HEADROOM, SOONER, Limit, Verdict, limits, obstacles
from .model import Change, Model, without_pool_waits
from .sums import Name

# Verdict: which node limits, why, and what to do about it.
#
# Whatever is bounded can limit: the places of a node, the threads or processes of a pool, the event loop, a device,
# what may be in flight, who reads a stream and who feeds it. What was used most of the time does. If nothing was,
# whoever calls does: one call after the other, or hardly any. Then of a call the longest path through its graph counts,
# for nodes that run side by side take the time of the slowest.
#
# What statistics call the bottleneck is one part of it: `full_inboxes`, which needs no times of handlers.


def find_verdict(evidence: Evidence) -> Verdict:
    """Return what limits."""
    nodes = evidence.sums.nodes
    if evidence.elapsed_seconds <= 0 or not any(node.ended for node in nodes.values()):
        return Verdict(None, "nothing ran while the profile was taken", "put the calls inside of its `with` block")
    # What a handler waits for its turn on the loop is part of why its places are taken, and no reason to spare them.
    plain = without_pool_waits(evidence)
    return _choose([*limits(plain), *obstacles(plain)], Model.of(evidence))


def verdict_of(model: Model) -> Verdict:
    """Return what limits in a model."""
    return _choose([*limits(model.evidence)], model)


def _choose(found: list[Limit], model: Model) -> Verdict:
    evidence = model.evidence
    most = max(found, key=lambda limit: (round(limit.used, 2), limit.precedence), default=None)
    if most is not None and most.used >= LEAST_USED:
        return replace(most.verdict, headroom=_headroom(model, most))
    idle = "no node is busy for more than half of the time that it could be"
    if evidence.readers:
        return Verdict(None, f"the source limits: {idle}, and readers wait for items", SOONER, limit="source")
    path = _longest_path(model)
    return path or Verdict(None, f"the callers limit: {idle}", "have more calls at a time", limit="callers")


def _headroom(model: Model, most: Limit) -> float | None:
    """Return how many times faster all gets without the node, or else without what limits."""
    verdict = most.verdict
    if verdict.node is not None and verdict.graph is not None:
        rest = model.changed(Change((verdict.graph, verdict.node), inf)).bound()
    else:
        rest = max(
            (limit.used for limit in limits(model.evidence) if limit.verdict.limit != verdict.limit), default=0.0
        )
    return min(most.used / rest, MOST_HEADROOM) if rest else MOST_HEADROOM


def _longest_path(model: Model) -> Verdict | None:
    """Return the node that takes most of the time of the calls, where these come one by one; None if they do not."""
    nodes, elapsed = model.evidence.sums.nodes, model.evidence.elapsed_seconds
    paths = critical_paths(nodes).values()
    path = max(paths, key=lambda each: each.seconds * model.evidence.sums.items(each.graph), default=None)
    if path is None or path.seconds * model.evidence.sums.items(path.graph) < LEAST_USED * elapsed:
        return None
    slowest = max(path.nodes, key=lambda node: nodes[path.graph, node].mean_seconds)
    seconds = nodes[path.graph, slowest].mean_seconds
    share = seconds / path.seconds
    reason = f"of the longest path through the graph it takes {share:.0%}, {milliseconds(seconds)} each time"
    free = model.changed(Change((path.graph, slowest), inf)).bound()
    headroom = min(model.bound() / free, MOST_HEADROOM) if free else MOST_HEADROOM
    return Verdict(slowest, reason, "make it faster, or have more calls at a time", path.graph, "path", headroom)


@dataclass(frozen=True)
class Prediction(Rendered):
    """What would have been if a node had been another. `str()` says it in one sentence, notebooks show it as a table.

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
        return printable(f"{self._change()}: {self._effect()}; then {self.verdict}")

    def _change(self) -> str:
        changes = [f"{significant(self.speedup)} times as fast"] if self.speedup != 1 else []
        changes += [f"with {self.concurrency:,} places"] if self.concurrency is not None else []
        return f'"{name_of(self.graph, self.node)}" {" and ".join(changes) or "as it is"}'

    def _effect(self) -> str:
        predicted, measured = rate(self.predicted_items_per_second, "items"), rate(self.items_per_second, "items")
        return f"{predicted} instead of {measured} ({significant(self.factor)} times as many)"

    def _table(self) -> Table:
        return Table((("what if", self._change()), ("throughput", self._effect()), ("then", str(self.verdict))))


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
    names = [name for name, total in evidence.sums.nodes.items() if total.ended]
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
