"""How metrics and profiles read the counters of nodes, runs and deployments."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from ..actors.node_actor import UNLIMITED, NodeActor
from ..telemetry import names
from ..telemetry.metrics import Reading, Series, series
from .control import Control
from .node import Node, is_node
from .program import Plan, Wired

if TYPE_CHECKING:  # loaded only when a profile is taken
    from ..actors.threads import ThreadShare
    from ..telemetry.profiling.records import Around, Bound, Capacity, NodeReading
    from .admission import AdmissionStatistics
    from .pools import Pools


@cache  # scopes of the same graph open and close again and again, each time with the same series
def _of_node(metric: str, graph: str, node: str, outcome: str = "") -> Series:
    """Return the series of a metric of one node."""
    of = (names.GRAPH, graph), (names.NODE, node)
    return series(metric, *of, (names.OUTCOME, outcome)) if outcome else series(metric, *of)


def node_counters(wired: Iterable[Wired]) -> Iterator[Reading]:
    """Yield the counters of nodes, for metrics; a step of control flow is not a node, but its bodies have nodes.

    Args:
        wired: all actors of a scope, also those of bodies.
    """
    for actor in _nodes(wired):
        # This does not use `actor.statistics()`: each scope is read when it ends, and making that record would take
        # four times as long.
        of = actor.graph, actor.name
        yield _of_node(names.METRIC_NODE_EXECUTIONS, *of, "done"), actor.completed, None
        yield _of_node(names.METRIC_NODE_EXECUTIONS, *of, "failed"), actor.failed, None
        if (busy_seconds := actor.measured_seconds) is not None:
            yield _of_node(names.METRIC_NODE_BUSY_TIME, *of), busy_seconds, None
        if actor.policy.retry is not None:
            yield _of_node(names.METRIC_NODE_RETRIES, *of), actor.retried, None
        if actor.failover is not None:
            yield _of_node(names.METRIC_NODE_FAILOVERS, *of), actor.failed_over, None
        if actor.hedge is not None:
            yield _of_node(names.METRIC_NODE_HEDGES, *of), actor.hedged, None
            yield _of_node(names.METRIC_NODE_HEDGES_WON, *of), actor.hedges_won, None
        if actor.cache is not None:
            kept = actor.cache.statistics()
            for outcome in ("hits", "misses", "joined"):
                yield _of_node(names.METRIC_NODE_CACHE_CALLS, *of, outcome), getattr(kept, outcome), None
            yield _of_node(names.METRIC_NODE_CACHE_EVICTIONS, *of), kept.evicted, kept.store
        if actor.instance is not None:
            yield _of_node(names.METRIC_NODE_RESTARTS, *of), actor.instance.restarts, id(actor.instance)
        # Call sites of one node that owns its loop put their items into the same inbox.
        if actor.intake.capacity is not None:
            yield _of_node(names.METRIC_QUEUE_PUT_WAIT_TIME, *of), actor.intake.put_wait_seconds, actor.work


def node_levels(wired: Iterable[Wired]) -> Iterator[Reading]:
    """Yield how many items are in each node and in its inbox now, for metrics; `wired` as in `node_counters`."""
    for actor in _nodes(wired):
        now = actor.statistics()
        of = now.graph, now.node
        yield _of_node(names.METRIC_NODE_IN_FLIGHT, *of), now.in_flight, actor.limiter
        if now.concurrency is not None:
            yield _of_node(names.METRIC_NODE_MAX_IN_FLIGHT, *of), now.concurrency, actor.limiter
        yield _of_node(names.METRIC_QUEUE_DEPTH, *of), now.inbox.depth, actor.work
        if now.inbox.capacity is not None:
            yield _of_node(names.METRIC_QUEUE_CAPACITY, *of), now.inbox.capacity, actor.work
        if now.cache is not None:
            yield _of_node(names.METRIC_NODE_CACHE_SIZE, *of), now.cache.bytes_held, now.cache.store
        if actor.policy.max_bytes is not None:
            yield _of_node(names.METRIC_QUEUE_SIZE, *of), now.inbox.bytes_held, actor.work


def _nodes(wired: Iterable[Wired]) -> Iterator[NodeActor]:
    for one in wired:
        for actor, unit in zip(one.actors, one.program.units, strict=True):
            if unit.step is not None and is_node(unit.step.head.callee):
                yield actor


def run_levels(in_flight: "Counter[str]") -> Iterator[Reading]:
    """Yield how many calls of `run` are in flight, by graph."""
    for graph, count in in_flight.copy().items():
        yield series(names.METRIC_RUN_IN_FLIGHT, (names.GRAPH, graph)), count, None


def deployment_counters(graphs: str, admission: "AdmissionStatistics") -> Iterator[Reading]:
    """Yield how many calls a deployment has refused.

    Args:
        graphs: the names of its graphs.
        admission: the counters of its admission.
    """
    yield series(names.METRIC_DEPLOYMENT_REFUSED, (names.GRAPH, graphs)), admission.refused, None


def deployment_levels(graphs: str, admission: "AdmissionStatistics") -> Iterator[Reading]:
    """Yield how many places of a deployment are taken, and how many calls wait; arguments as above."""
    of = names.GRAPH, graphs
    yield series(names.METRIC_DEPLOYMENT_IN_FLIGHT, of), admission.in_flight, None
    yield series(names.METRIC_DEPLOYMENT_MAX_IN_FLIGHT, of), admission.max_in_flight, None
    yield series(names.METRIC_DEPLOYMENT_QUEUED, of), admission.queued, None


# How many runs of a plan there may be at a time, and what bounds them; None without a bound.
Room: TypeAlias = "tuple[int, Bound] | None"


def node_readings(
    wired: Iterable[Wired], room: Room, pools: "Pools", threads: "ThreadShare | None"
) -> "Iterator[NodeReading]":
    """Yield a reading of each node, for a profile; a step of control flow is not a node, but its bodies have nodes.

    Args:
        wired: all actors of a scope, also those of bodies.
        room: how many calls there may be in the scope at a time.
        pools: the threads and processes of the Engine.
        threads: the share of threads that the scope may keep busy; None for all of them.
    """
    wired = list(wired)
    around = _around(wired)
    rooms = _rooms([one.program.plan for one in wired], room)
    for one in wired:
        room_of_plan = rooms.get(one.program.plan)
        nodes: dict[NodeActor, Node[..., object]] = {}
        for actor, unit in zip(one.actors, one.program.units, strict=True):
            node = None if unit.step is None else unit.step.head.callee
            if is_node(node):
                nodes[actor] = node
        for actor, node in nodes.items():
            yield replace(
                _reading(actor, node, room_of_plan, pools, threads),
                consumers=(readers := _readers(actor, nodes)),
                behind=tuple(set(readers) - {consumer.name for consumer in actor.consumers}),
                around=around.get(one.program.plan),
            )


def _readers(actor: NodeActor, nodes: "Collection[NodeActor]") -> tuple[str, ...]:
    """Return the names of the nodes that wait for the value of `actor`, directly or behind a step of control flow."""
    found: dict[NodeActor, None] = {}
    left = [*actor.consumers]
    for consumer in left:
        if consumer not in found:
            found[consumer] = None
            left += () if consumer in nodes else consumer.consumers
    return tuple([consumer.name for consumer in found if consumer in nodes])


def _around(wired: Iterable[Wired]) -> "dict[Plan, Around]":
    """Return for each body of control flow which nodes come before and after it in the graph around it."""
    from ..telemetry.profiling.records import Around

    found: dict[Plan, Around] = {}
    for one in wired:
        steps = {
            actor: unit.step for actor, unit in zip(one.actors, one.program.units, strict=True) if unit.step is not None
        }
        names = {
            actor: [body.name for body in step.bodies] if step.bodies else [actor.name] for actor, step in steps.items()
        }
        for actor, step in steps.items():
            if step.bodies:
                sources = [name for other in steps if actor in other.consumers for name in names[other]]
                consumers = [name for other in actor.consumers for name in names.get(other, ())]
                around = Around(one.program.name, tuple(sources), tuple(consumers))
                found |= dict.fromkeys(step.bodies, around)
    return found


def _rooms(plans: list[Plan], room: Room) -> dict[Plan, Room]:
    """Return how many runs there may be at a time of each plan, and of each body."""
    bodies = {body for plan in plans for step in plan.steps for body in step.bodies}
    rooms: dict[Plan, Room] = {plan: room for plan in plans if plan not in bodies}
    left = list(rooms)
    while left:
        plan = left.pop()
        for step in plan.steps:
            around = rooms[plan]
            control = step.head.callee
            if around is not None and isinstance(control, Control) and control.kind == "map_each":
                around = control.limit * around[0], "map_each"
            rooms |= dict.fromkeys(step.bodies, around)
            left += step.bodies
    return rooms


def _reading(
    actor: NodeActor,
    node: Node[..., object],
    room: Room,
    pools: "Pools",
    threads: "ThreadShare | None",
) -> "NodeReading":
    from ..telemetry.profiling.records import NodeReading

    runs_on = _runs_on(node)
    is_stream, sampler = actor.spans_others, actor.sampler
    timed = None if sampler is None else sampler.reading()  # it also brings `busy_seconds` up to date
    counters = actor.statistics()
    if sampler is not None and actor.is_untimed and not is_stream:
        counters = replace(counters, busy_seconds=sampler.busy_seconds)
    return NodeReading(
        counters,
        key=id(actor),  # a number, so that a reading keeps no actor alive
        runs_on=runs_on,
        holds_loop=runs_on == "loop" and not node.is_async and not is_stream,
        gathers=node._runs_loop or node._runs_in is not None,
        places=() if is_stream else tuple(_places(actor, node, runs_on, room, pools, threads)),
        timed=timed,
    )


def _runs_on(node: Node[..., object]) -> str:
    if node._runs_loop:
        return "own loop"
    if node._runs_in is not None:
        return node._runs_in.label
    return node._runs_on


def _places(
    actor: NodeActor, node: Node[..., object], runs_on: str, room: Room, pools: "Pools", threads: "ThreadShare | None"
) -> "Iterator[Capacity]":
    """Yield the places of a node, then those of the pool of threads or processes that it uses."""
    from ..telemetry.profiling.records import Capacity

    own = actor.limiter
    if room is not None and room[0] < own.limit:
        yield Capacity(id(actor), *room)
    elif own.limit < UNLIMITED:
        is_stateful = node.template is not None or node._runs_loop
        is_limited = node.policy.concurrency is not None
        yield Capacity(own, own.limit, _bound(node, runs_on), is_shared=is_limited and not is_stateful)
    if runs_on == "thread":
        if threads is not None:
            yield Capacity(threads, threads.limit, "threads", is_shared=True)
        yield Capacity((pools, "threads"), pools.max_threads, "threads", is_shared=True)
    elif runs_on == "process":
        yield Capacity((pools, "processes"), pools.max_processes, "processes", is_shared=True)


def _bound(node: Node[..., object], runs_on: str) -> "Bound":
    if node.policy.concurrency is not None:
        return "concurrency"
    if node.template is not None:
        return "state"
    if runs_on in ("thread", "process"):
        return "threads" if runs_on == "thread" else "processes"
    return "max_workers" if node.is_async else "loop"
