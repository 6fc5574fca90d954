"""How metrics and profiles read the counters of nodes, runs and deployments."""

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..actors.node_actor import NOTHING, UNLIMITED, NodeActor
from ..telemetry import names
from ..telemetry.counters import INBOX_COUNTERS, changed, less
from ..telemetry.metrics import Reading, Series, series
from .control import Control
from .node import Node, is_node
from .program import Plan, PlannedStep, Wired
from .tracing.ref import definition_location, is_users

if TYPE_CHECKING:  # loaded only when a profile is taken
    from ..actors.threads import ThreadShare
    from ..telemetry.profiling.records import BodyPlace, Bound, Capacity, StepSnapshot
    from .pools import Pools


@lru_cache(1_000)  # scopes of the same graph open and close again and again, each time with the same series
def _of_node(metric: str, graph: str, node: str, outcome: str = "") -> Series:
    """Return the series of a metric of one node."""
    of = (names.GRAPH, graph), (names.NODE, node)
    return series(metric, *of, (names.OUTCOME, outcome)) if outcome else series(metric, *of)


def node_counters(wired: Iterable[Wired]) -> Iterator[Reading]:
    """Yield the counters of nodes, for metrics; a step of control flow is not a node, but its bodies have nodes.

    Args:
        wired: all actors of a scope, also actors of bodies.
    """
    for actor in _nodes(wired):
        # This does not use `actor.statistics()`: each scope is read when it ends, and the record would take four times
        # as long.
        of = actor.graph, actor.name
        yield _of_node(names.METRIC_NODE_EXECUTIONS, *of, "done"), actor.completed, None
        yield _of_node(names.METRIC_NODE_EXECUTIONS, *of, "failed"), actor.failed, None
        if (busy_seconds := actor.measured_seconds) is not None:
            yield _of_node(names.METRIC_NODE_BUSY_TIME, *of), busy_seconds, None
        if actor.policy.retry is not None:
            yield _of_node(names.METRIC_NODE_RETRIES, *of), actor.counts.retried, None
        if actor.policy.failover is not None:
            yield _of_node(names.METRIC_NODE_FAILOVERS, *of), actor.counts.failed_over, None
        if actor.policy.hedge is not None:
            yield _of_node(names.METRIC_NODE_HEDGES, *of), actor.counts.hedged, None
            yield _of_node(names.METRIC_NODE_HEDGES_WON, *of), actor.counts.hedges_won, None
        if (kept := actor.bound._cache_statistics()) is not None:
            for outcome in ("hits", "misses", "joined"):
                yield _of_node(names.METRIC_NODE_CACHE_CALLS, *of, outcome), getattr(kept, outcome), None
            yield _of_node(names.METRIC_NODE_CACHE_EVICTIONS, *of), kept.evicted, kept.store
        if (instance := actor.bound._instance) is not None:
            yield _of_node(names.METRIC_NODE_RESTARTS, *of), instance.restarts, instance
        # Call sites of one node that owns its loop put their items into the same inbox.
        if actor.intake.capacity is not None:
            yield _of_node(names.METRIC_QUEUE_PUT_WAIT_TIME, *of), actor.intake.put_wait_seconds, actor.bound._inbox


def node_levels(wired: Iterable[Wired]) -> Iterator[Reading]:
    """Yield how many items are in each node and in its inbox now, for metrics; `wired` as in `node_counters`."""
    for actor in _nodes(wired):
        now = actor.statistics()
        of = now.graph, now.node
        yield _of_node(names.METRIC_NODE_IN_FLIGHT, *of), now.in_flight, actor.limiter
        if now.concurrency is not None:
            yield _of_node(names.METRIC_NODE_MAX_IN_FLIGHT, *of), now.concurrency, actor.limiter
        yield _of_node(names.METRIC_QUEUE_DEPTH, *of), now.inbox.depth, actor.bound._inbox
        if now.inbox.capacity is not None:
            yield _of_node(names.METRIC_QUEUE_CAPACITY, *of), now.inbox.capacity, actor.bound._inbox
        for figure in now.figures:
            named = (
                (names.GRAPH, now.graph),
                (names.NODE, now.node),
                (names.FIGURE, figure.name),
                (names.UNIT, figure.unit),
                *([(names.MACHINE, figure.place)] if figure.place else ()),
            )
            yield series(names.METRIC_NODE_FIGURE, *named), figure.value, actor.bound._inbox
        if now.cache is not None:
            yield _of_node(names.METRIC_NODE_CACHE_SIZE, *of), now.cache.bytes_held, now.cache.store
        if actor.policy.max_bytes is not None:
            yield _of_node(names.METRIC_QUEUE_SIZE, *of), now.inbox.bytes_held, actor.bound._inbox


def _nodes(wired: Iterable[Wired]) -> Iterator[NodeActor]:
    return (actor for one in wired for actor, step in _steps(one).items() if is_node(step.head.callee))


def _steps(wired: Wired) -> dict[NodeActor, PlannedStep]:
    """Return the actors of steps, and their steps."""
    both = zip(wired.actors, wired.program.units, strict=True)
    return {actor: unit.step for actor, unit in both if unit.step is not None}


class Room(NamedTuple):
    """How many runs of a plan there may be at a time.

    Args:
        limit: how many runs.
        bound: the option or construct that bounds the runs.
        mapping: for the body of a `map_each`, whose limit holds for each run: the actor of that step.
        at: "file:line" of the `map_each`.
    """

    limit: int
    bound: "Bound"
    mapping: NodeActor | None = None
    at: str = ""


class StepSite(NamedTuple):
    """The constant facts about a node in a scope.

    Args:
        actor: the actor of the node.
        step: the step of the node.
        room: how many runs of the plan there may be at a time.
        first: a snapshot of the node, whose other facts never change.
        at: "file:line" of each function of the chain of the step.
        drawing: the digest of the drawing of the graph; empty without a drawing.
        boxes: the place in the drawing of each function of the chain.
    """

    actor: NodeActor
    step: PlannedStep
    room: Room | None
    first: "StepSnapshot"
    at: tuple[str, ...]
    drawing: str
    boxes: tuple[str, ...]


def step_sites(wired: list[Wired], room: Room | None) -> list[StepSite]:
    """Return each node of a scope; a step of control flow is not a node, but its bodies have nodes.

    Args:
        wired: all actors of the scope, also actors of bodies.
        room: how many calls there may be in the scope at a time.
    """
    from ..telemetry.profiling.records import StepSnapshot

    placed = _placed(wired, room)
    found: list[StepSite] = []
    for one in wired:
        plan, steps = one.program.plan, _steps(one)
        nodes = {actor: step for actor, step in steps.items() if is_node(step.head.callee)}
        around, plan_room, digest, prefix = placed[plan]
        for actor, step in nodes.items():
            readers = _readers(actor, nodes)
            behind = tuple(set(readers) - {consumer.name for consumer in actor.consumers})
            at = tuple([_at(called.callee, called.location) for called in step.chain if is_node(called.callee)])
            boxes = tuple([f"{prefix}{called.source}" if digest else "" for called in step.chain])
            node = step.head.callee
            assert is_node(node)
            execution, is_stream = node.runs_on, actor.bound._spans_others
            first = StepSnapshot(  # it keeps no actor alive, but its scope does, so that no other actor gets its id
                NOTHING, key=id(actor), runs_on=execution._place,
                holds_loop=execution._is_inline and not node.is_async and not is_stream, gathers=execution._gathers,
                holds=execution._holds, is_on_loop=execution._is_inline, owns_loop=execution._runs_loop,
                pool=execution.pool, batch_size=0 if execution._holds is None else execution._batch.max_size,
                batch_wait_seconds=0.0 if execution._holds is None else execution._batch.max_wait_seconds, places=(),
                consumers=readers, behind=behind, around=around, at=at[0], drawing=digest, step=boxes[0],
            )  # fmt: skip
            found.append(StepSite(actor, step, plan_room, first, at, digest, boxes))
    return found


class _Placed(NamedTuple):
    """The place of a plan in a scope.

    Attributes:
        around: for the plan of a body: the nodes before and after it in the graph around it.
        room: how many runs of the plan there may be at a time.
        drawing: the digest of the drawing that has the plan; empty without a drawing.
        prefix: the prefix of the ids of its steps in that drawing.
    """

    around: "BodyPlace | None"
    room: Room | None
    drawing: str
    prefix: str


def _placed(wired: list[Wired], room: Room | None) -> dict[Plan, _Placed]:
    """Return the place of each plan; `room` is for calls of the scope."""
    from ..telemetry.profiling.records import BodyPlace

    by_plan = {one.program.plan: one for one in wired}
    bodies = {body for plan in by_plan for step in plan.steps for body in step.run_bodies}
    found = {plan: _Placed(None, room, plan._drawn[0], "") for plan in by_plan if plan not in bodies}
    left = list(found)
    for plan in left:
        place, steps = found[plan], _steps(by_plan[plan])
        names = {actor: [body.name for body in step.run_bodies] or [actor.name] for actor, step in steps.items()}
        for actor, step in steps.items():
            if not step.bodies:
                continue
            inside, control = place.room, step.head.callee
            if isinstance(control, Control) and control.kind == "map_each":
                inside = Room(control.limit, "map_each", actor, step.head.location)
            sources = [name for other in steps if actor in other.consumers for name in names[other]]
            consumers = [name for other in actor.consumers for name in names.get(other, ())]
            around = BodyPlace(by_plan[plan].program.name, tuple(sources), tuple(consumers))
            for number, body in enumerate(dict.fromkeys((*step.bodies, *step.run_bodies))):
                if body in by_plan:  # the joint body of several stages is not drawn
                    drawing = place.drawing if number < len(step.bodies) else ""
                    found[body] = _Placed(around, inside, drawing, f"{place.prefix}{step.head.source}.{number}.")
                    left.append(body)
    return found


def step_snapshots(
    sites: Iterable[StepSite], pools: "Pools", threads: "ThreadShare | None", *, is_empty: bool
) -> "Iterator[StepSnapshot]":
    """Yield a snapshot of each node, for a profile.

    Args:
        sites: the nodes.
        pools: the threads and processes of the Engine.
        threads: the share of threads that the scope may keep busy; None for all threads.
        is_empty: whether no call is in the scope now.
    """
    for site in sites:
        whole = _step_snapshot(site, pools, threads, is_empty=is_empty)
        yield from _of_chain(whole, site) if site.step.tail_labels else (whole,)


def _of_chain(whole: "StepSnapshot", site: StepSite) -> "Iterator[StepSnapshot]":
    """Yield a snapshot of each function of a chain. The functions share one actor, whose inbox counts for the first."""
    sampler, labels = site.actor.sampler, (site.step.label, *site.step.tail_labels)
    empty = less(whole.counters.inbox, whole.counters.inbox, *INBOX_COUNTERS)
    for at, label in enumerate(labels):
        busy_seconds = None if sampler is None else sampler.busy_seconds[at]
        counters = changed(whole.counters, node=label, busy_seconds=busy_seconds)
        timed = None if sampler is None else sampler.reading(at)
        if at:
            counters = changed(counters, failed=0, inbox=empty)
        one = whole._replace(
            counters=counters, key=(whole.key, at), timed=timed, at=site.at[at], step=site.boxes[at]
        )  # fmt: skip
        yield one if label == labels[-1] else one._replace(consumers=labels[at + 1 : at + 2], behind=())


def _readers(actor: NodeActor, nodes: "Collection[NodeActor]") -> tuple[str, ...]:
    """Return the names of the nodes that wait for the value of `actor`, directly or behind a step of control flow."""
    found: dict[NodeActor, None] = {}
    left = [*actor.consumers]
    for consumer in left:
        if consumer not in found:
            found[consumer] = None
            left += () if consumer in nodes else consumer.consumers
    return tuple([consumer.name for consumer in found if consumer in nodes])


def _at(node: Node[..., object], called_at: str) -> str:
    """Return the "file:line" of the function or class of a node, or else of its call."""
    found = definition_location(node.runs_on._fn or node.origin.fn)
    file = found.rpartition(":")[0]
    return found if file and is_users(file) else called_at


def _step_snapshot(site: StepSite, pools: "Pools", threads: "ThreadShare | None", *, is_empty: bool) -> "StepSnapshot":
    actor, node = site.actor, site.step.head.callee
    assert is_node(node)
    is_stream, sampler = actor.bound._spans_others, actor.sampler
    timed = None if sampler is None else sampler.reading()  # also brings `busy_seconds` up to date
    is_sampled = sampler is not None and actor.is_untimed and not is_stream
    counters = actor.statistics(sampler.busy_seconds[0] if sampler is not None and is_sampled else None)
    # In call sites of other scopes that share the places; a thread whose caller has left is of this scope, or of those.
    if is_empty and counters.in_flight and not actor.counts.abandoned:
        counters = changed(counters, in_flight=0)
    places = () if is_stream else tuple(_places(actor, node, site.room, pools, threads))
    return site.first._replace(counters=counters, places=places, timed=timed)


def _places(
    actor: NodeActor, node: Node[..., object], room: Room | None, pools: "Pools", threads: "ThreadShare | None"
) -> "Iterator[Capacity]":
    """Yield the places of a node, and then the places of the pool of the Engine that the node uses."""
    from ..telemetry.profiling.records import Capacity

    own, is_own, pool = actor.limiter, actor.limiter.limit < UNLIMITED, node.runs_on.pool
    is_stateful = node.template is not None or node.runs_on._runs_loop
    is_shared = node.policy.concurrency is not None and not is_stateful
    if room is not None and room.limit < own.limit:
        mapping = room.mapping
        runs, seconds = (None, 0.0) if mapping is None else (mapping.limiter.in_flight, mapping.busy_seconds)
        around = own if is_shared else None
        yield Capacity(id(actor), room.limit, room.bound, runs=runs, run_seconds=seconds, at=room.at, around=around)
        # How many runs of a `map_each` there are at a time has no bound, so all of them together may reach this limit.
        is_own = is_own and mapping is not None
    if is_own:
        yield Capacity(own, own.limit, _bound(node), is_shared=is_shared)
    if pool == "threads" and threads is not None:
        yield Capacity(threads, threads.limit, pool, is_shared=True)
    if pool is not None:
        yield Capacity((pools, pool), pools.size_of(pool), pool, is_shared=True)


def _bound(node: Node[..., object]) -> "Bound":
    if node.policy.concurrency is not None:
        return "concurrency"
    return "state" if node.template is not None else node.runs_on._bound_by(node)
