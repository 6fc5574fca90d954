"""Verdict: which node limits, why, and what to do about it.

Whatever is bounded can limit: the places of a node, the threads or processes of a pool, the event loop, a device, what
may be in flight, who reads a stream and who feeds it. What was used most of the time does. If nothing was, whoever
calls does: one call after the other, or hardly any. Then of a call the longest path through its graph counts, for
nodes that run side by side take the time of the slowest.

What statistics call the bottleneck is found without times of handlers: see `engine/statistics/bottleneck.py`.
"""

from dataclasses import replace
from math import inf

from ...tables.quantities import milliseconds
from .critical_path import critical_paths
from .evidence import Evidence
from .limits.limit import LEAST_USED, MOST_HEADROOM, Limit, Verdict
from .limits.limits import limits, obstacles
from .limits.streams import SOONER
from .model import Change, Model, without_pool_waits


def find_verdict(evidence: Evidence) -> Verdict:
    """Return what limits."""
    nodes = evidence.sums.nodes
    if evidence.elapsed_seconds <= 0 or not any(node.completed or node.failed for node in nodes.values()):
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
