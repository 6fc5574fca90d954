"""What metrics read of nodes, calls, streams and deployments."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from ..actors.node_actor import UNLIMITED, NodeActor
from ..telemetry import names
from ..telemetry.metrics import Reading, series
from .node import Node

if TYPE_CHECKING:
    from .admission import AdmissionStatistics
    from .scope import Wired
    from .source import ReorderWindow


class _NodeSeries:
    """The series of one node of one graph."""

    def __init__(self, graph: str, node: str) -> None:
        of = (names.GRAPH, graph), (names.NODE, node)
        self.done = series(names.METRIC_NODE_EXECUTIONS, *of, (names.OUTCOME, "done"))
        self.failed = series(names.METRIC_NODE_EXECUTIONS, *of, (names.OUTCOME, "failed"))
        self.busy_time = series(names.METRIC_NODE_BUSY_TIME, *of)
        self.retries = series(names.METRIC_NODE_RETRIES, *of)
        self.restarts = series(names.METRIC_NODE_RESTARTS, *of)
        self.put_wait_time = series(names.METRIC_QUEUE_PUT_WAIT_TIME, *of)
        self.in_flight = series(names.METRIC_NODE_IN_FLIGHT, *of)
        self.max_in_flight = series(names.METRIC_NODE_MAX_IN_FLIGHT, *of)
        self.depth = series(names.METRIC_QUEUE_DEPTH, *of)
        self.capacity = series(names.METRIC_QUEUE_CAPACITY, *of)
        self.size = series(names.METRIC_QUEUE_SIZE, *of)


_series_of = cache(_NodeSeries)


def node_counters(wired: "Iterable[Wired]") -> Iterator[Reading]:
    """Yield what nodes have done; control flow is none, what is in its bodies is.

    Args:
        wired: all actors of a scope, also those of bodies.
    """
    for actor, is_timed in _nodes(wired):
        of = _series_of(actor.graph, actor.name)
        yield of.done, actor.completed, None
        yield of.failed, actor.failed, None
        if is_timed and not actor.is_untimed:
            yield of.busy_time, actor.busy_seconds, None
        if actor.policy.retry is not None:
            yield of.retries, actor.retried, None
        instance = actor.instance
        if instance is not None:
            yield of.restarts, instance.restarts, id(instance)
        # Call sites of one node that owns its loop put their items into the same inbox.
        inbox = actor.intake
        if inbox.capacity is not None:
            yield of.put_wait_time, inbox.put_wait_seconds, actor.work


def node_levels(wired: "Iterable[Wired]") -> Iterator[Reading]:
    """Yield what is in nodes now; as above."""
    for actor, _ in _nodes(wired):
        of = _series_of(actor.graph, actor.name)
        limiter = actor.limiter
        yield of.in_flight, limiter.in_flight, limiter
        if limiter.limit < UNLIMITED:
            yield of.max_in_flight, limiter.limit, limiter
        inbox = actor.intake.statistics()
        yield of.depth, inbox.depth, actor.work
        if inbox.capacity is not None:
            yield of.capacity, inbox.capacity, actor.work
        if actor.policy.max_bytes is not None:
            yield of.size, inbox.bytes_held, actor.work


def _nodes(wired: "Iterable[Wired]") -> Iterator[tuple[NodeActor, bool]]:
    """Yield the actors of nodes, each with whether its time is its own."""
    for one in wired:
        for actor, unit in zip(one.actors, one.program.units, strict=True):
            node = None if unit.step is None else unit.step.head.callee
            if isinstance(node, Node):
                # The first value of a stream, and a node that reads one, take the time of the nodes before it as well.
                yield actor, not (node.gives_stream or unit.streams)


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
