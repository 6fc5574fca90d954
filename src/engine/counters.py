"""What metrics read of nodes, calls, streams and deployments."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..actors.node_actor import NodeActor
from ..telemetry import names
from ..telemetry.metrics import Reading, series
from .node import Node

if TYPE_CHECKING:
    from .admission import AdmissionStatistics
    from .scope import Wired
    from .source import ReorderWindow


def node_counters(wired: "Iterable[Wired]") -> Iterator[Reading]:
    """Yield what nodes have done; control flow is none, what is in its bodies is.

    Args:
        wired: all actors of a scope, also those of bodies.
    """
    for actor in _nodes(wired):
        now = actor.statistics()
        of = (names.GRAPH, now.graph), (names.NODE, now.node)
        yield series(names.METRIC_NODE_EXECUTIONS, *of, (names.OUTCOME, "done")), now.completed, None
        yield series(names.METRIC_NODE_EXECUTIONS, *of, (names.OUTCOME, "failed")), now.failed, None
        if now.busy_seconds is not None:
            yield series(names.METRIC_NODE_BUSY_TIME, *of), now.busy_seconds, None
        if actor.policy.retry is not None:
            yield series(names.METRIC_NODE_RETRIES, *of), now.retried, None
        if actor.instance is not None:
            yield series(names.METRIC_NODE_RESTARTS, *of), now.restarts, id(actor.instance)
        # Call sites of one node that owns its loop put their items into the same inbox.
        if now.inbox.capacity is not None:
            yield series(names.METRIC_QUEUE_PUT_WAIT_TIME, *of), now.inbox.put_wait_seconds, actor.work


def node_levels(wired: "Iterable[Wired]") -> Iterator[Reading]:
    """Yield what is in nodes now; as above."""
    for actor in _nodes(wired):
        now = actor.statistics()
        of = (names.GRAPH, now.graph), (names.NODE, now.node)
        yield series(names.METRIC_NODE_IN_FLIGHT, *of), now.in_flight, actor.limiter
        if now.concurrency is not None:
            yield series(names.METRIC_NODE_MAX_IN_FLIGHT, *of), now.concurrency, actor.limiter
        yield series(names.METRIC_QUEUE_DEPTH, *of), now.inbox.depth, actor.work
        if now.inbox.capacity is not None:
            yield series(names.METRIC_QUEUE_CAPACITY, *of), now.inbox.capacity, actor.work
        if actor.policy.max_bytes is not None:
            yield series(names.METRIC_QUEUE_SIZE, *of), now.inbox.bytes_held, actor.work


def _nodes(wired: "Iterable[Wired]") -> Iterator[NodeActor]:
    for one in wired:
        for actor, unit in zip(one.actors, one.program.units, strict=True):
            if unit.step is not None and isinstance(unit.step.head.callee, Node):
                yield actor


def run_levels(in_flight: "Counter[str]") -> Iterator[Reading]:
    """Yield how many calls are in flight, of each graph."""
    for graph, count in in_flight.copy().items():
        yield series(names.METRIC_RUN_IN_FLIGHT, (names.GRAPH, graph)), count, None


def stream_counters(graph: str, window: "ReorderWindow") -> Iterator[Reading]:
    """Yield how many items of a stream of calls have ended, by how.

    Args:
        graph: name of the graph of its first call.
        window: its places and items.
    """
    failed, cancelled, expired = window.failed, window.cancelled, window.expired
    counts = {
        "done": window.completed,
        "failed": failed - cancelled - expired,
        "cancelled": cancelled,
        "expired": expired,
    }
    for outcome, count in counts.items():
        yield series(names.METRIC_STREAM_ITEMS, (names.GRAPH, graph), (names.OUTCOME, outcome)), count, None


def stream_levels(graph: str, window: "ReorderWindow") -> Iterator[Reading]:
    """Yield how many items of a stream of calls count in its limit, and the limit; as above."""
    of = names.GRAPH, graph
    yield series(names.METRIC_STREAM_IN_FLIGHT, of), window.in_flight, None
    yield series(names.METRIC_STREAM_MAX_IN_FLIGHT, of), window.size, None


def deployment_counters(graphs: str, admission: "AdmissionStatistics") -> Iterator[Reading]:
    """Yield how many calls a deployment has refused.

    Args:
        graphs: the names of its graphs.
        admission: its places.
    """
    yield series(names.METRIC_DEPLOYMENT_REFUSED, (names.GRAPH, graphs)), admission.refused, None


def deployment_levels(graphs: str, admission: "AdmissionStatistics") -> Iterator[Reading]:
    """Yield how the places of a deployment are taken; as above."""
    of = names.GRAPH, graphs
    yield series(names.METRIC_DEPLOYMENT_IN_FLIGHT, of), admission.in_flight, None
    yield series(names.METRIC_DEPLOYMENT_MAX_IN_FLIGHT, of), admission.max_in_flight, None
    yield series(names.METRIC_DEPLOYMENT_QUEUED, of), admission.queued, None
