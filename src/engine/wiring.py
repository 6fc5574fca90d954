"""Wiring: the actors of one scope, made from programs and connected."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import length_hint
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from ..actors import attempts
from ..actors.chains import LONGEST_LINE, SHORTEST_PART, Link, compose, compose_line
from ..actors.channel import Channel
from ..actors.execution import ASYNC, GENERAL, INLINE, Bound
from ..actors.executions import Inline
from ..actors.frame import Frame
from ..actors.loop_host import Actor, StreamActor
from ..actors.node_actor import UNLIMITED, Limiter, NodeActor
from ..actors.own_loops import bytes_of
from ..actors.policy import Cache, Policy
from ..actors.stream_buffer import DEFAULT_CAPACITY
from ..actors.supervision import Child
from ..actors.threads import ThreadShare
from ..telemetry import metrics
from ..telemetry.metrics import Reading
from ..telemetry.profiling import collectors
from ..telemetry.profiling.collectors import Collector
from .bodies import body_of, branch, computing, hand_over, input_of, splitting
from .caching import CacheSite, Identity
from .control import Control
from .counters import StepSite, node_counters, node_levels, step_sites, step_snapshots
from .executions import count_handlers, wire
from .instances import Instance, InstanceRegistry
from .keeping import keep
from .node import CallSite, Execution, Node, Scope, Site, is_node
from .options import ChosenScheduler, ExecutionOptions
from .pools import Pools
from .program import Plan, PlannedStep, Program, Unit, Wired
from .stages import StageIterator
from .stream_map import JoinedMap, Stage, StreamMap, mapping, pass_on
from .tracing.template import Read, Template, arguments_builder, is_known, reads, value_of

if TYPE_CHECKING:
    from ..actors.loop_host import LoopHost
    from ..telemetry.counters import Cuts
    from ..telemetry.profiling.records import ScopeKind, ScopeSnapshot, StepSnapshot
    from .checkpoint import Checkpointer, StepCheckpoint
    from .counters import Room


_PLAIN = Policy()
Failover: TypeAlias = tuple[Wired, Callable[[list[Any]], tuple[Any, ...]]]

# A slot for `engine/interception.py`: called with each call site of a node that is wired.
fault_at_wiring: Callable[[NodeActor, Node[..., Any]], None] | None = None


class Wiring(Scope):
    """Makes and connects the actors of one scope: the actors of its plan, and of the bodies of control flow.

    Args:
        pools: the Engine's threads, processes and limits.
        instances: the scope's instances of stateful nodes.
        max_workers: the most items in an `async def` node; None outside of pipelines, where inboxes have no bound
            either.
        room: how many calls there may be at a time, and the option that bounds them; None without a bound.
        device_strategy: the execution option.
        threads: the threads that the scope may use; None for all threads of the Engine.
        has_places_in_threads: whether a thread node has as many places as the scope has threads; if not, the node has
            no limit of its own.
        counts_handlers: whether the calls are runs that bound how many of their handlers run at a time.
        saving: the snapshots of the only call of the scope; None if the call is not saved.
        keeps: whether the steps of its runs are kept, as far as a run has a keeper.

    Attributes:
        keeps: the argument of the same name.
        opened: the scope object, which opens nested calls of handlers; None if runs share the actors.
        opened_at: when the wiring was made, in seconds since 1970.
    """

    def __init__(
        self,
        pools: "Pools",
        instances: InstanceRegistry | None,
        max_workers: int | None,
        room: "Room | None" = None,
        *,
        device_strategy: str,
        threads: ThreadShare | None = None,
        has_places_in_threads: bool = True,
        counts_handlers: bool = False,
        saving: "Checkpointer | None" = None,
        keeps: bool = False,
    ) -> None:
        self._pools = pools
        self.instances = instances
        self._max_workers = max_workers
        self._wired: dict[Plan, Wired] = {}
        self._bodies: dict[Plan, Wired] = {}  # also graphs that handlers call
        # the stages that run as one, by the stream of the last stage
        self._stages: dict[tuple[Plan, int], list[Stage]] = {}
        self._room = room
        self.admitted: Callable[[], tuple[int, int]] | None = None
        self.progress: Callable[[], tuple[int, int | None, int]] | None = None
        if saving is not None:
            self.progress = lambda: _progress_of(saving)
        self.stored: Cuts | None = None  # by durable loops
        self._device_strategy = device_strategy
        self._threads = threads
        self._has_places_in_threads = has_places_in_threads
        self._counts_handlers = counts_handlers
        self._saving = saving
        self.keeps = keeps
        self.opened: Any = None
        self.opened_at = time()
        self._sites: tuple[int, list[StepSite]] = (0, [])  # the number of programs, and their call sites
        # How many profiles and looks have asked for the timing of handlers, and how many of these for all depths.
        self._measured = 0, 0
        self._looked_at = 0.0
        self._ended: dict[NodeActor, int] = {}  # how many items had left the nodes that are not timed yet
        self._was_idle = False
        self._discards = False  # whether a graph is being wired that has nodes with `discard=`

    def wire(self, program: Program, *, is_body: bool = False) -> Wired:
        """Return the actors of a program; the first call in a scope makes them.

        Args:
            program: the program.
            is_body: whether it is a body of control flow, or a graph that a handler calls. A body runs inside its step,
                whose places bound it, so the inboxes of the body have no bound.
        """
        wired = self._bodies if is_body else self._wired
        if program.plan not in wired:
            around = self._max_workers, self._discards
            self._max_workers = None if is_body else self._max_workers
            self._discards = discards = self._discards or _any_discards(program.plan)
            try:
                actors = tuple(self._actor(program, unit) for unit in program.units)
            finally:
                self._max_workers, self._discards = around
            for unit, actor in zip(program.units, actors, strict=True):
                actor.consumers = tuple(actors[index] for index in unit.consumers)
                if len(actor.consumers) == 1 and not actor.reads and program.countdown[unit.consumers[0]] == 1:
                    actor.successor = actor.consumers[0]
            for actor in reversed(actors):
                actor.widens = len(actor.consumers) > 1 or any(consumer.widens for consumer in actor.consumers)
            entries = tuple(actors[index] for index in program.entries)
            # The end of a frame looks for results that nobody has read, so no step ends it with its own value.
            if program.is_line and not discards and program.plan.result == Read(program.plan.steps[-1].source):
                actors[-1].ends_line = True
            _compose_lines(actors)
            if self._measured[0]:
                _measure(actors, self._measured)
            wired[program.plan] = Wired(program, actors, entries)
        return wired[program.plan]

    async def returned(self) -> None:
        """End the computations for caches. Wait for all threads that still run for an item that has ended."""
        caches = [actor.bound for actor in self.actors() if isinstance(actor.bound, CacheSite)]
        for cache in caches:  # all before the first wait: one computation may wait for another
            cache.cancel()
        for cache in caches:
            await cache.close()
        for actor in self.actors():
            await actor.all_returned()

    def wired(self, plan: Plan) -> Wired | None:
        """Return the actors of a plan, or of the plan of a body; None if the plan is not part of the scope."""
        return self._wired.get(plan) or self._bodies.get(plan)

    def actors(self) -> list[NodeActor]:
        """Return every actor of the scope that stands for a node; actors in bodies of control flow come last."""
        return [
            actor
            for wired in self._all_wired()
            for actor, unit in zip(wired.actors, wired.program.units, strict=True)
            if unit.step is not None
        ]

    def step_snapshots(self) -> "Iterator[StepSnapshot]":
        """Yield the counters of all nodes, also of nodes in bodies of control flow."""
        return step_snapshots(self.sites(), self._pools, self._threads, is_empty=self._is_empty)

    def snapshot(self, seconds: float, steps: "tuple[StepSnapshot, ...]") -> "ScopeSnapshot":
        """Return a snapshot of the scope, which is taken at this time, with these snapshots of its nodes."""
        from ..telemetry.profiling.records import ScopeSnapshot

        return ScopeSnapshot(
            id(self), seconds, steps, self.admitted and self.admitted(), self.id, self.kind, self.opened_at,
            tuple([(digest, name) for digest, (name, _) in self.drawings().items()]),
            self.stored if self._saving is None else self._saving.cuts, self.progress and self.progress(),
        )  # fmt: skip

    @property
    def _is_empty(self) -> bool:
        """Whether no call of the deployment is in flight; False for other scopes, which do not know."""
        return self.admitted is not None and not self.admitted()[0]

    def sites(self) -> list[StepSite]:
        """Return the call sites of all nodes, also of nodes in bodies of control flow."""
        wired = self._all_wired()
        if len(wired) != self._sites[0]:
            self._sites = len(wired), step_sites(wired, self._room)
        return self._sites[1]

    @property
    def kind(self) -> "ScopeKind":
        """The kind of the scope, for a look of `penstock top`."""
        if self.stored is not None:
            return "durable loop"
        if self.admitted is not None:
            return "deployment"
        if self.opened is None:
            return "runs"
        return "call" if self._room is not None and self._room.bound == "call" else "stream"

    @property
    def id(self) -> str:
        """A text that identifies the scope, also after its end, for a look of `penstock top`."""
        return f"{id(self):x}-{self.opened_at:.3f}"

    def drawings(self) -> dict[str, tuple[str, object]]:
        """Return the name and the drawing of each graph, by its digest, for a look of `penstock top`."""
        plans = {plan._drawn[0]: plan for plan in [one.program.plan for one in self._all_wired()]}
        used = {site.drawing for site in self.sites()}
        return {digest: (plan.name, plan._drawn[1]) for digest, plan in plans.items() if digest in used}

    def activity(self) -> int | None:
        """Return how many executions have ended in the nodes; None while one runs, or if a node has its own loop."""
        actors = [actor for wired in self._all_wired() for actor in wired.actors]
        if any(actor.bound._inbox is not None or actor.counts.abandoned for actor in actors):
            return None
        # Of an empty scope, items are in other scopes that share the places.
        if not self._is_empty and any(actor.limiter.in_flight for actor in actors):
            return None
        return sum([actor.completed + actor.failed for actor in actors])

    def counters(self) -> Iterator[Reading]:
        """Yield the counters of all nodes for metrics, also of nodes in bodies of control flow."""
        return node_counters(self._all_wired())

    def levels(self) -> Iterator[Reading]:
        """Yield how many items run and wait in each node now, for metrics."""
        return node_levels(self._all_wired())

    def _all_wired(self) -> list[Wired]:
        return [*self._wired.values(), *self._bodies.values()]

    def measure(self, *, on: bool, depths: bool = True) -> None:
        """Turn the timing of handlers on or off. Timing stays on until it was turned off as often as on.

        Args:
            on: whether it is turned on.
            depths: whether inboxes tell of each change of their depth, too.
        """
        were = self._measured
        step = 1 if on else -1
        self._measured = were[0] + step, were[1] + step * depths
        self._looked_at = perf_counter()
        self._ended.clear()
        if [*map(bool, were)] != [*map(bool, self._measured)]:
            for wired in self._all_wired():
                _measure(wired.actors, self._measured)

    def look(self, now: float) -> None:
        """Note how many items the nodes hold now, if the wiring is measured; on the loop, for a look."""
        seconds, self._looked_at = now - self._looked_at, now
        was_idle, self._was_idle = self._was_idle, self._is_empty
        is_idle = was_idle and self._was_idle
        sites = self.sites()
        if is_idle and len(sites) <= _MOST_AT_ONCE:
            return
        for actor in [site.actor for site in sites]:
            if actor.sampler is not None:
                if not is_idle:
                    actor.sampler.look(seconds)
            elif self._measured[0]:
                ended = actor.completed + actor.failed
                if self._ended.setdefault(actor, ended) != ended or actor.limiter.in_flight:
                    _measure((actor,), self._measured, len(sites))

    def _actor(self, program: Program, unit: Unit) -> NodeActor:
        step = unit.step
        place = None
        if self._saving is not None and unit.source is not None:
            place = self._saving.place(program.plan, unit.source)
        if step is None:
            actor = _added_actor(program, unit, place)
        elif is_node(step.head.callee):
            node = step.head.callee
            if node.policy.cache is not None:
                actor = self._cached(program, unit, step, node, node.policy.cache)
            else:
                actor = self._node_actor(program, unit, step, node, place)
                if fault_at_wiring is not None:
                    fault_at_wiring(actor, node)
        else:
            control = step.head.callee
            assert isinstance(control, Control)
            # Control flow that gives a stream would hold a place until the stream has ended, so it has no limit.
            limit = self._max_workers if control.is_async else None
            limiter = Limiter(UNLIMITED if limit is None else limit)
            actor = NodeActor(step.label, program.name, unit.index, _PLAIN, limiter, self._inbox())
            bodies = tuple(map(self._wired_body, step.run_bodies))
            if control.kind == "split":
                actor.invoke = splitting(control.limit, control.ahead, place)
            elif control.kind == "branch":
                actor.invoke = branch(control.limit)
            elif step.head.is_joined:
                self._note_stage(program, unit, step, actor)
                actor.invoke = pass_on
            elif control.over_stream:
                kind: Callable[..., StreamMap] = StreamMap
                if step.joined is not None:
                    kind = partial(JoinedMap, self._note_stage(program, unit, step, actor))
                actor.invoke = mapping(control, bodies[0], place, keeps_unread=self._discards, kind=kind)
            else:
                actor.bound = body_of(control, bodies, self._pools.threads, place)
                actor.invoke = attempts.invoking(attempts.compose(_PLAIN), unit.streams)
                actor.bound._spans_others = bool(unit.streams)  # a `fold`
        actor.owner = self
        actor.slot = unit.slot
        actor.args_of = unit.args_of
        actor.kwargs_of = unit.kwargs_of
        if self._discards and step is not None:
            _begin_to_read(program, unit, step, actor)
        if actor.bound._links:
            actor.run = compose(actor.bound._links, actor)
        actor.out = unit.out
        actor.reads = unit.reads
        if self.keeps and step is not None:
            keep(actor, program, unit)
        return actor

    def _note_stage(self, program: Program, unit: Unit, step: PlannedStep, actor: NodeActor) -> list[Stage]:
        """Note a stage that runs together with others. Return the stages before it, and the stage itself last."""
        before = self._stages.pop((program.plan, unit.sources[0]), [])
        self._stages[program.plan, step.source] = found = [
            *before, Stage(actor, partial(self._wired_body, step.bodies[0]))
        ]  # fmt: skip
        return found

    def _wired_body(self, body: Plan) -> Wired:
        return self.wire(body._program("parallel"), is_body=True)

    def _node_actor(
        self, program: Program, unit: Unit, step: PlannedStep, node: Node[..., Any], place: "StepCheckpoint | None"
    ) -> NodeActor:
        execution, instance = node.runs_on, self._child_of(node)
        limiter = self._limiter(node, execution, instance)
        actor = NodeActor(step.label, program.name, unit.index, node.policy, limiter, self._inbox(node, unit))
        actor.fn = instance.handler if isinstance(instance, Instance) else node._target
        if isinstance(owner := getattr(actor.fn, "__self__", None), Actor | StreamActor):
            actor.fn = cast("Any", owner).loop  # only its name is used
        site = Site(self, program, unit, node, instance, self._failover(program, step), place)
        bound = execution.bind(site)
        if not node._reads_streams:
            bound._links = (Link(step.label, actor.fn, node.policy.model), *_further_links(step))
        bound._instance = instance if execution.has_one_instance else None
        bound._emits = node.policy.effectful is not False and bound.can_emit
        bound._spans_others = node.gives_stream or bool(unit.streams)
        actor.bound = bound
        wire(execution, site, actor)
        return actor

    def _child_of(self, node: Node[..., Any]) -> "Instance | LoopHost | None":
        """Return the instance of a stateful node in the scope, or the runner of the loop of a node; None for others."""
        if not node._is_stateful or not node._has_instance:
            return None
        assert self.instances is not None
        return self.instances.child_of(node)

    def _failover(self, program: Program, step: PlannedStep) -> "Failover | None":
        """Return the body of the failover of a node, and the function that builds its arguments; None without one."""
        if not step.bodies:
            return None
        body = self._wired_body(step.bodies[0])
        return body, arguments_builder(step.head.captured, program.slots)

    def _cached(self, program: Program, unit: Unit, step: PlannedStep, node: Node[..., Any], cache: Cache) -> NodeActor:
        """Return the actor of a node with `cache=`. The actor takes no place: the body takes the places of the node."""
        actor = NodeActor(
            step.label, program.name, unit.index, Policy(model=node.policy.model), Limiter(), self._inbox()
        )  # fmt: skip
        actor.fn = node._target  # only its name is used
        body = self._wired_body(step.bodies[0])
        captured = arguments_builder(step.head.captured, program.slots)
        if not program.plan.keeps_results:
            actor.bound, actor.invoke = Bound(), computing(body, captured)
            actor.bound._spans_others = True
            return actor
        named = dict(zip(node._positional, range(len(step.head.args)), strict=False))
        shared = frozenset([named.get(name, name) for name in call_site(program, unit).resources])
        instance = None if node.bound_to is None else Identity(node.bound_to)
        store, identity = self._pools.results(node.origin, cache), (node.origin._replacement, instance)
        actor.bound = site = CacheSite(store, cache, node.name, identity, shared, body, captured)
        site._spans_others = True
        actor.invoke = site.invoke
        if self._counts_handlers:
            count_handlers(actor)
        return actor

    def _limiter(self, node: Node[..., Any], execution: Execution, instance: Child | None) -> Limiter:
        limit, ahead, key = execution._limits(node, self, instance)
        if key is None:
            return Limiter(UNLIMITED if limit is None else limit, ahead=ahead)
        return self._pools.limiter(key, UNLIMITED if limit is None else limit, ahead)

    def instance(self, node: Node[..., Any]) -> Any:
        """Return the present instance of a class that is a node."""
        child = self._child_of(node)
        if not isinstance(child, Instance):
            raise TypeError(f"node {node.name!r} has no instance: it is not a class, or it owns its loop")
        return child.value

    def _inbox(self, node: Node[..., Any] | None = None, unit: Unit | None = None) -> "Channel[Frame]":
        # For a node that gives a stream, `capacity=` is the capacity of the stream, not of the inbox.
        policy = _PLAIN if node is None or node.gives_stream else node.policy
        capacity = None if self._max_workers is None else inbox_capacity(policy)
        if policy.max_bytes is None or capacity is None or unit is None:
            return Channel(capacity)
        return Channel(capacity, max_bytes=policy.max_bytes, size_of=_size_of(unit))


def _begin_to_read(program: Program, unit: Unit, step: PlannedStep, actor: NodeActor) -> None:
    """Make a step note when it begins to read the results of nodes with `discard=`."""
    callee = step.head.callee
    if is_node(callee):
        held = {one.source for one in program.plan.steps if one.bodies or _discards(one.head.callee)}
        held |= {*program.plan.parameter_sources}
        parts = program.parts(read for read in step.head.reads() if read.source in held)
    elif isinstance(callee, Control) and callee.kind == "map_each" and not callee.over_stream:
        parts = program.parts(reads(*step.head.args[: callee.inputs]))  # its bodies read the items inside
    else:
        return  # the step only passes values on
    if parts:
        actor.mode = GENERAL
        actor.invoke = attempts.reading(actor.invoke, parts, inside=is_node(callee))


def _discards(callee: object) -> bool:
    return is_node(callee) and callee.policy.discard is not None


def _any_discards(plan: Plan) -> bool:
    return any(_discards(one.head.callee) or any(map(_any_discards, one.bodies)) for one in plan.steps)


def _compose_lines(actors: Sequence[NodeActor]) -> None:
    """Give the first async node of each line of nodes a function that takes items through the line."""
    consumers = {consumer for actor in actors for consumer in actor.consumers}
    behind_others = {actor.successor for actor in actors if _goes_on(actor)}
    for first in actors:
        if first in behind_others:
            continue
        line = [first]
        while line[-1].successor is not None and _goes_on(line[-1]):
            line.append(line[-1].successor)
        while line:
            if line[0].mode != ASYNC or line[0].slot < 0:
                del line[0]
                continue
            part, line = line[:LONGEST_LINE], line[LONGEST_LINE:]
            is_whole = part[0] not in consumers and part[-1].ends_line
            if is_whole or len(part) >= SHORTEST_PART:
                part[0].line = compose_line(part, is_whole=is_whole)


def _goes_on(actor: NodeActor) -> bool:
    following = actor.successor
    return (
        following is not None
        and actor.mode in (ASYNC, INLINE)
        and (following.mode == INLINE or (following.mode == ASYNC and following.slot == actor.out))
        and following.out == actor.out  # else the value is also part of the result, and has to stay in its slot
        # An item that goes on takes the next place before it gives back its own. Two places of one limit are often not
        # free.
        and following.limiter is not actor.limiter
    )


# Of a larger graph, looks have an actor time its handlers once an item is in the actor, or has left it.
_MOST_AT_ONCE: Final = 64


def _progress_of(saving: "Checkpointer") -> tuple[int, int | None, int]:
    """Return how many records the source has given, and will have; if that is unknown, how many values were taken."""
    source = saving.source
    left = length_hint(source, -1) if isinstance(saving.source, StageIterator) else -1  # runs no code of users
    return (saving.position(), None, 0) if left < 0 else (saving.record, saving.record + left, saving.begun)


def _measure(actors: Sequence[NodeActor], measured: tuple[int, int], nodes: int = 0) -> None:
    """Have actors time their handlers, or end that.

    Args:
        actors: the actors.
        measured: how many have asked for that, and how many of these for each change of the depths of inboxes.
        nodes: how many nodes the scope has, if these are some of them; 0 for all.
    """
    from ..actors.sampler import sampling_of

    sampling = sampling_of(nodes or len(actors)) if measured[0] else None
    is_later = not nodes and not measured[1] and len(actors) > _MOST_AT_ONCE
    for actor in actors:
        if (actor.sampler is None) != (sampling is None) and not (sampling and is_later):
            actor.measure(sampling)
        if actor.sampler is not None:
            actor.sampler.for_profile(on=bool(measured[1]))


def _added_actor(program: Program, unit: Unit, place: "StepCheckpoint | None") -> NodeActor:
    """Return the actor of a unit that Penstock has added to the user's steps.

    The actor takes no place of a limit. Metrics, profiles and pictures leave it out.
    """
    actor = NodeActor(f"({unit.role})", program.name, unit.index, _PLAIN, Limiter(), Channel(None))
    if unit.role == "input":
        names = dict(zip(program.plan.parameter_sources, program.plan.parameters, strict=True))
        assert unit.source is not None
        actor.name = names[unit.source]
        actor.invoke = input_of(actor.name, place)
    elif unit.role == "result":
        actor.invoke = hand_over
    else:
        actor.mode, actor.fn, actor.bound = INLINE, lambda: None, Inline()
        actor.bound._links = (Link(actor.name, actor.fn),)
        actor.invoke = attempts.invoking(attempts.compose(_PLAIN))
    return actor


def _further_links(step: PlannedStep) -> Iterator[Link]:
    for label, link in zip(step.tail_labels, step.chain[1:], strict=True):
        assert is_node(link.callee)  # only nodes are chained
        yield Link(label, link.callee._target, link.callee.policy.model)


def _size_of(unit: Unit) -> Callable[[Frame], int]:
    def size_of(frame: Frame) -> int:
        try:
            args = (frame.values[unit.slot],) if unit.slot >= 0 else unit.args_of(frame.values)
            return sum(bytes_of(arg) for arg in args)
        except Exception:  # noqa: BLE001 - user code, such as a missing attribute: the handler will meet that error
            return 0

    return size_of


class SharedWirings:
    """The wirings that runs of one plan in one Engine share.

    Runs share a wiring if they have the same values of the options on which a wiring depends (see `get`). The wirings
    are freed with the plan or with the Engine, whichever is freed first; no call closes them.
    """

    def __init__(self) -> None:
        self._wirings: dict[tuple[ChosenScheduler, str, bool, bool, bool], Wiring] = {}

    def get(self, pools: Pools, scheduler: ChosenScheduler, options: ExecutionOptions) -> Wiring:
        """Return the wiring for runs with these options; the first call makes it."""
        device_strategy, is_counted = options.device_strategy, options.collect_metrics
        has_all_threads = pools.share_of_threads(options.max_workers) is None
        counts_handlers = options.max_workers is not None
        key = scheduler, device_strategy, is_counted, has_all_threads, counts_handlers
        wiring = self._wirings.get(key)
        if wiring is None:
            # Every run has its own workers, so only the limits of nodes are shared and bounded here. Where each run has
            # a share of the threads, its items wait for the share, and must not fill the places of a node meanwhile.
            wiring = self._wirings[key] = Wiring(
                pools, None, None, device_strategy=device_strategy, has_places_in_threads=has_all_threads,
                counts_handlers=counts_handlers,
            )  # fmt: skip
            collectors.report(Collector.scope_opened, wiring)
            if is_counted:
                metrics.opened(wiring)
        return wiring

    def __iter__(self) -> Iterator[Wiring]:
        return iter(list(self._wirings.values()))

    def __del__(self) -> None:
        for (_, _, is_counted, _, _), wiring in self._wirings.items():
            collectors.report(Collector.scope_vanished, wiring)
            if is_counted:
                metrics.registry.vanished(wiring)


async def warm_up(program: Program, pools: Pools, device_strategy: str, known: Mapping[int, Any] | None = None) -> None:
    """Prepare the executors of all nodes for calls, for instance by compiling; also in bodies of control flow.

    Args:
        program: a program whose resources are open.
        pools: the Engine's threads, processes and limits.
        device_strategy: the execution option.
        known: for a body, the values of the resources that it takes from outside.

    Raises:
        PlanError: an executor does not know what to prepare.
    """
    if known is None:
        known = dict(zip(program.plan.trace.resources.values(), program.blank, strict=False))
    for unit in program.units:
        if unit.step is None:
            continue
        if (executor := executor_of(unit.step)) is not None:
            await warm_up_node(program, unit, executor, pools, device_strategy, known)
        for body in unit.step.run_bodies:
            await warm_up(body._program("parallel"), pools, device_strategy, _inside(body, known))


async def warm_up_node(
    program: "Program", unit: Unit, executor: Execution, pools: "Pools", device_strategy: str, known: Mapping[int, Any]
) -> None:
    """Prepare the executor of one node for calls, while these resources are open.

    Raises:
        PlanError: the executor does not know what to prepare.
    """
    await executor._warm_up(call_site(program, unit), pools, device_strategy, _resources_of(unit, known))


def _inside(body: "Plan", known: Mapping[int, Any]) -> dict[int, Any]:
    """Return the resources that a body takes from outside, by their numbers in the body."""
    return {
        source: value_of(template, known)
        for source, template in body.trace.captured
        if is_known(template, known.keys())
    }


# The facts about a call of a node, for its executor.


def call_site(program: Program, unit: Unit) -> CallSite:
    """Return the facts about a call site that the executor of the node needs."""
    step = unit.step
    assert step is not None
    node = step.head.callee
    assert is_node(node)
    named = list(step.head.named_arguments())
    shared = [name for name, template in named if is_known(template, program.plan.resource_sources)]
    return CallSite(
        node, step.label, frozenset(shared), _constants(dict(named), node), _returns_pending(program, unit, node),
        _owned(program, unit, node), _state(program, unit),
    )  # fmt: skip


def _resources_of(unit: Unit, known: Mapping[int, Any]) -> dict[str, Any]:
    """Return the arguments that come from resources, by parameter.

    Args:
        unit: the unit that calls the node.
        known: the values of resources, by their numbers.
    """
    assert unit.step is not None
    named = unit.step.head.named_arguments()
    return {name: value_of(template, known) for name, template in named if is_known(template, known.keys())}


def _constants(given: Mapping[str, Template], node: Node[..., Any]) -> dict[str, Any]:
    defaults = {name: one.default for name, one in node._parameters.items() if one.default is not one.empty}
    written = {name: value_of(template, {}) for name, template in given.items() if not any(reads(template))}
    return {**{name: value for name, value in defaults.items() if name not in given}, **written}


def _returns_pending(program: Program, unit: Unit, node: Node[..., Any]) -> bool:
    assert unit.step is not None
    policy = node.policy
    if not policy.is_once:
        return False  # only a finished result shows whether the attempt succeeded, and in time
    consumers = [program.units[index] for index in unit.consumers]  # some may only wait for the unit
    readers = [executor_of(one.step) if unit.source in one.sources else None for one in consumers]
    is_result = unit.step.source in {read.source for read in reads(program.plan.result)}
    kind = type(node._runs_on)
    return (
        bool(readers)
        and not is_result
        and all(one is not None and type(one) is kind and one._takes_unready for one in readers)
    )


def _owned(program: Program, unit: Unit, node: Node[..., Any]) -> frozenset[str]:
    if node.policy.retry is not None or node.policy.fallback is not None:
        return frozenset()
    assert unit.step is not None
    arguments = list(unit.step.head.named_arguments())
    read = Counter(one.source for _, template in arguments for one in reads(template))
    makers = {one.step.source: (one, one.step.head.callee) for one in program.units if one.step is not None}
    owned: set[str] = set()
    for name, template in arguments:
        if not isinstance(template, Read) or template.path or read[template.source] != 1:
            continue
        maker, made_by = makers.get(template.source, (None, None))
        if maker is None or not is_node(made_by):
            continue
        if len(maker.consumers) == 1 and _returns_pending(program, maker, made_by):
            owned.add(name)
    return frozenset(owned)


def _state(program: Program, unit: Unit) -> str | None:
    if unit.step is None or unit.step is not program.plan.overwrites:
        return None
    state = Read(program.plan.parameter_sources[0])
    return next(name for name, template in unit.step.head.named_arguments() if template == state)


def inbox_capacity(policy: Policy) -> int:
    """Return how many items the inbox of a node holds in a pipeline."""
    # A node with more places has an inbox of that size: items that began together end together, and then the next
    # items have to be in the inbox.
    return policy.capacity or max(DEFAULT_CAPACITY, policy.concurrency or 0)


def executor_of(step: PlannedStep | None) -> Execution | None:
    """Return the executor that compiles the function of a step; None if the step has no executor, or is not a node."""
    callee = None if step is None else step.head.callee
    return callee.runs_on if is_node(callee) and callee.runs_on._is_compiled else None
