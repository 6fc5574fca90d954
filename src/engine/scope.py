"""Runtime: the threads, resources and open scopes of an Engine; and Scope: one `run`, `stream` or `deploy`."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import Context
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from .._errors import DeadlineExceeded, DeploymentFailed, EngineClosedError, EngineLoopError, PlanError
from ..actors.frame import Frame
from ..actors.node_actor import UNLIMITED, NodeActor
from ..actors.supervision import Escalation, Supervisor, SupervisorFlags
from ..actors.tasks import Condition, EagerStarts, uninterrupted
from ..actors.threads import ThreadShare
from ..actors.worker import WorkerGroup
from ..telemetry import metrics, names, spans
from ..telemetry.metrics import Reading, series
from ..telemetry.profiling import collectors
from ..telemetry.profiling.collectors import Collector
from .counters import Room
from .instances import InstanceRegistry, stateful_nodes
from .node import refuse_spawned_script
from .open_resources import Resources
from .options import DEFAULT_WORKERS, ChosenScheduler, ExecutionOptions
from .planning import check_splits, check_stream_limits
from .pools import Pools
from .program import Plan, Program, Wired
from .statistics import Uptime
from .tracing.tracer import Callee
from .wiring import SharedWirings, Wiring

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from ..telemetry.profiling.records import ItemLook, ProfiledStream, StepContents
    from .checkpoint import Checkpointer

T = TypeVar("T")


class Ongoing(Protocol):
    """An open stream of calls, stream of values or deployment, which ends with its Engine."""

    def frames(self) -> Iterable[Frame]:
        """Return the calls and items for which handlers may still run."""
        ...

    def actors(self) -> list[NodeActor]:
        """Return the actors that these calls and items go through."""
        ...

    async def end(self) -> None:
        """End all calls and items, and wait until their handlers have ended: the Engine is being closed."""
        ...


if TYPE_CHECKING:

    class OpenStream(Ongoing, ProfiledStream, Protocol):
        """A stream of calls or of values: it ends with its Engine, and a profile sees how long its reader waits."""


class Runtime:
    """The inside of an Engine: its threads, resources and open scopes, and how they end.

    Args:
        max_threads: the most threads that run handlers.
        max_processes: the most processes for nodes; None for the number of cores.
        is_default: whether this is a default Engine, which no `async with` closes: it ends with its last scope, or
            with the loop.

    Attributes:
        pools: threads, the pools of executions and the limits of nodes.
        resources: the resources that are open.
        reloads: for each resource that was reloaded, the lock that lets one reload run at a time.
        frames: the calls of `run` in flight.
        counted_runs: the number of runs, and streams of values, in flight by graph, as far as metrics count them.
        streams: the streams that have begun and not ended.
        deployments: the deployments that were entered and have not ended.
        scopes: how many runs, streams and deployments are open.
        wirings: the actors of each open scope that does not share actors.
        closed: whether `async with` was left, or is being left.
        loop: the event loop; None before the first use of the Engine.
        loop_thread: the identifier that the operating system gives to the thread of the loop; None before the first
            use.
        eager_starts: decides whether a call may begin at once; None before the first use.
    """

    def __init__(self, max_threads: int, max_processes: int | None, *, is_default: bool) -> None:
        self.pools = Pools(max_threads, max_processes, ends_with_loop=is_default)
        self.resources = Resources(closes_unused=is_default)
        self.reloads: WeakKeyDictionary[Callee, asyncio.Lock] = WeakKeyDictionary()
        self.frames: set[Frame] = set()
        self.counted_runs: Counter[str] = Counter()
        self.streams: set[OpenStream] = set()
        self.deployments: set[Ongoing] = set()
        self.scopes = 0
        self.wirings: set[Wiring] = set()
        self.closed = False
        self._is_default = is_default
        self.loop_thread: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.eager_starts: EagerStarts | None = None
        self._last_scope_closed = Condition()
        self._shared: WeakSet[SharedWirings] = WeakSet()
        collectors.hosts.add(self)
        metrics.opened(self)

    def check_loop(self) -> None:
        """Check that the Engine may be used here. The first use binds the Engine to an event loop.

        Raises:
            EngineLoopError: this Engine belongs to another event loop, or no loop is running.
            EngineClosedError: this Engine was closed.
        """
        loop = running_loop()
        if self.closed:
            raise EngineClosedError("this Engine was closed; make a new one: async with engine.Engine() as e: ...")
        if self.loop is None:
            refuse_spawned_script()
            self.loop, self.loop_thread = loop, threading.get_native_id()
            self.eager_starts = EagerStarts(loop)
        elif self.loop is not loop:
            raise EngineLoopError(
                "this Engine was first used on another event loop; make one for each loop, or use the functions of "
                "penstock.engine, which have a default Engine for each"
            )

    def closed_error(self) -> EngineClosedError:
        """Return the error for a call that is in flight when the Engine is closed."""
        return EngineClosedError("the Engine was closed while this call was in flight")

    def program(self, plan: Plan, scheduler: ChosenScheduler) -> Program:
        """Return the program of a plan for a scheduler, with the resources of this Engine.

        Raises:
            PlanError: under this scheduler, streams of the graph would wait for each other for ever.
        """
        if scheduler in ("sequential", "wave") and scheduler not in plan._programs:
            check_stream_limits(plan.name, [one for step in plan.steps for one in step.chain], in_order=True)
            check_splits(Program(plan, scheduler))
        return self.resources.program(plan, scheduler)

    def shared_wiring(self, plan: Plan, scheduler: ChosenScheduler, options: ExecutionOptions) -> Wired | None:
        """Return the actors that all runs of a plan share; None for a plan with stateful nodes, which are not shared.

        Args:
            plan: the plan.
            scheduler: the scheduler.
            options: the options of the run.
        """
        # The plan keeps the actors, not the Engine: so they are freed with a graph that is made for a single call.
        shared = plan._kept_by_engines.get(self)
        if not isinstance(shared, SharedWirings):
            if next(stateful_nodes(plan), None) is not None:
                return None
            shared = plan._kept_by_engines[self] = SharedWirings()
            self._shared.add(shared)
        wiring = shared.get(self.pools, scheduler, options)
        return wiring.wire(self.program(plan, scheduler))

    def counters(self) -> Iterable[Reading]:
        """Return nothing: for metrics, scopes have the counters."""
        return ()

    def levels(self) -> Iterable[Reading]:
        """Yield how many calls of `run` are in flight, by graph, for metrics."""
        for graph, count in self.counted_runs.copy().items():
            yield series(names.METRIC_RUN_IN_FLIGHT, (names.GRAPH, graph)), count, None

    def open_scopes(self) -> list[Wiring]:
        """Return the actors of open scopes, and actors that runs share, for a profile; none once the loop has ended."""
        if self.loop is not None and self.loop.is_closed():
            return []
        return [*(wiring for shared in self._shared for wiring in shared), *self.wirings]

    def open_readers(self) -> "list[ProfiledStream]":
        """Return the streams that are open, for a profile."""
        return list(self.streams)

    def stream_opened(self, stream: "OpenStream") -> None:
        """Note a stream that has begun, so that it ends with the Engine, and report it to profiles."""
        self.streams.add(stream)
        collectors.report(Collector.reader_opened, stream)

    def stream_closed(self, stream: "OpenStream") -> None:
        """Forget a stream that has ended, and report its end to profiles."""
        self.streams.discard(stream)
        collectors.report(Collector.reader_closed, stream)

    def shared_actors(self) -> list[NodeActor]:
        """Return the actors that runs share."""
        return [actor for shared in self._shared for wiring in shared for actor in wiring.actors()]

    def frames_in_flight(self) -> set[Frame]:
        """Return the calls and items of all scopes for which handlers may still run."""
        found = {*self.frames, *(frame for one in self._ongoing() for frame in one.frames())}
        # A look in another thread may see a call that is being made, before it has a layout.
        return {frame for frame in found if hasattr(frame, "layout") and not frame.settled}

    def looked_at(self, items: "Mapping[Any, float]") -> "list[ItemLook]":
        """Return where items in flight are, for a look; `items` has the age of each, in seconds."""
        from .in_flight import described

        return list(described(items, self.open_scopes()))

    def contents(self) -> "Iterable[tuple[int, StepContents]]":
        """Return the contents of the steps that have items, each with the id of its actor, for a look."""
        from .in_flight import contents_of

        return contents_of(self.frames_in_flight()).items()

    async def threads_returned(self) -> None:
        """Wait for all threads that still run for an ended item, in the scopes that are open now."""
        for actor in [*self.shared_actors(), *(actor for one in self._ongoing() for actor in one.actors())]:
            await actor.all_returned()

    def _ongoing(self) -> "tuple[Ongoing, ...]":
        return (*self.streams, *self.deployments)

    async def scope_closed(self) -> None:
        """Count a scope as closed. After the last scope, a default Engine ends the pools that end with scopes."""
        self.scopes -= 1
        if not self.scopes:
            self._last_scope_closed.notify_all()
            if self._is_default:
                await self.pools.close_with_scopes()

    async def close(self) -> None:
        """End all calls, streams and deployments, then resources, pools and threads; wait until all have ended."""
        self.closed = True
        self.resources.refuse()
        for frame in list(self.frames):
            frame.fail(self.closed_error())
        for one in self._ongoing():
            await one.end()
        # Wait for handlers that are unwinding, and for runs that were entering a stateful node.
        await self._last_scope_closed.wait_for(lambda: not self.scopes)
        try:
            await self.resources.close()
        finally:
            await self.pools.close()
            await self.threads_returned()  # late results of these threads may have to be discarded


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop.

    Raises:
        EngineLoopError: no event loop is running.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise EngineLoopError(
            "no event loop of asyncio is running: call this inside an `async def main()`, and start that with "
            "asyncio.run(main()); to make streams and services before, make an Engine first: e = engine.Engine(), "
            "e.deploy(...)"
        ) from None


class Scope:
    """One `run`, `stream` or `deploy`: its actors, its instances of stateful nodes and its workers.

    Args:
        engine: the Engine that the scope is part of.
        options: the options of the scope.
        scheduler: the scheduler, which is never "auto".
        flags: how stateful nodes are restarted.
        is_one_call: whether the scope is for a single call.
        counts_handlers: whether this call bounds how many of its handlers run at a time.
        is_admitted: whether admission bounds the calls in the scope, as in a deployment.
        threads: the share of threads that a run already has; by default the scope makes a share.
        saving: the snapshots of the only call; None if the call is not saved.
        keeps: whether the steps of its runs are kept.

    Attributes:
        options: the options of the scope.
        on_failed: called when stateful nodes crash too often. The argument is a function that makes the error from the
            name of the run, stream or deployment that failed. Then the owner of the scope ends the calls and closes the
            scope.
        threads: the share of the Engine's threads that the scope may keep busy.
        groups: the groups of workers; a group leaves when its last worker has ended.
        called: the graphs of the nodes that handlers have called; see `late_steps.py`.
    """

    def __init__(
        self,
        engine: Runtime,
        options: ExecutionOptions,
        scheduler: ChosenScheduler,
        flags: SupervisorFlags = SupervisorFlags(),  # noqa: B008 - it is immutable
        *,
        is_one_call: bool = False,
        counts_handlers: bool = False,
        is_admitted: bool = False,
        threads: ThreadShare | None = None,
        saving: "Checkpointer | None" = None,
        keeps: bool = False,
    ) -> None:
        self.engine = engine
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.scheduler: ChosenScheduler = scheduler
        self.on_failed: Escalation | None = None
        self.threads = threads or engine.pools.share_of_threads(options.max_workers)
        self.instances = InstanceRegistry(engine.pools, Supervisor(flags, self._failed))
        # Only the actors of a pipeline need a bound: elsewhere each frame has its own workers, and admission or the
        # caller bounds the frames.
        default = UNLIMITED if is_admitted else DEFAULT_WORKERS
        max_workers = (options.max_workers or default) if scheduler == "actors" else None
        room = Room(1, "call") if is_one_call else Room(options.max_in_flight, "max_in_flight")
        self.wiring = Wiring(
            engine.pools, self.instances, max_workers, room, device_strategy=options.device_strategy,
            threads=self.threads, counts_handlers=counts_handlers, saving=saving, keeps=keeps,
        )  # fmt: skip
        self.instances.scope = self.wiring
        self.wiring.opened = self
        self.called: dict[object, Any] = {}
        self._preparing = asyncio.Lock()
        self._saving = saving
        self.groups: set[WorkerGroup] = set()
        self.uptime = Uptime()
        engine.scopes += 1
        engine.wirings.add(self.wiring)
        collectors.report(Collector.scope_opened, self.wiring)
        if options.collect_metrics:
            metrics.opened(self.wiring)

    async def prepare(self, plan: Plan) -> Wired:
        """Return the actors of a plan; at the first call, open its resources and enter its stateful nodes."""
        program = self.engine.program(plan, self.scheduler)
        await self.engine.resources.hold(program, self)
        await self.instances.open(plan)
        if self._saving is not None:
            await self._saving.open(plan, self.instances)
        return self.wiring.wire(program)

    async def prepare_called(self, plan: Plan) -> Wired:
        """Return the actors of a plan that a handler calls; at the first call, open its resources and nodes.

        Raises:
            PlanError: the scope is saved, and the plan has stateful nodes, whose states the snapshots would not have.
        """
        if self._saving is not None and (node := next(stateful_nodes(plan), None)) is not None:
            raise PlanError(
                f"ps.call({node.name}, ...): a call with checkpoint= has the states of the steps of its graph alone; "
                "call this stateful node in the graph"
            )
        program = self.engine.program(plan, "parallel")
        if self.wiring.wired(plan) is None or not self.engine.resources.hold_nowait(program, self):
            async with self._preparing:
                await self.engine.resources.hold(program, self)
                await self.instances.open(plan)
        return self.wiring.wire(program, is_body=True)

    def group(self, context: Context, *, ends_at: float | None = None) -> WorkerGroup:
        """Return a new group of workers, which leaves `groups` when it is closed and its workers have ended."""
        group = WorkerGroup(self.loop, context, self.groups.discard, ends_at=ends_at, threads=self.threads)
        self.groups.add(group)
        return group

    async def close(self) -> None:
        """Wait until all workers have ended, and leave the stateful nodes. All frames must have ended before."""
        await uninterrupted(self._close())

    async def _close(self) -> None:
        self.uptime.stop()
        try:
            await self._workers_ended()
            try:
                if self._saving is not None:
                    await self._saving.close()
            finally:
                await self.instances.close()
        finally:
            try:
                await self.engine.resources.release(self)
            finally:
                self.on_failed = None  # breaks a cycle with the run of this scope
                await self.engine.scope_closed()

    async def _workers_ended(self) -> None:
        try:
            for group in list(self.groups):
                group.close()
            # Wait for tasks, not for an event: a task that is cancelled before its first step, for instance when the
            # loop is shut down, could never set the event.
            tasks = [worker.task for group in self.groups for worker in group.workers if worker.task is not None]
            if tasks:
                await asyncio.wait(tasks)
            await self.wiring.returned()  # a thread may still run a method of a stateful node
        finally:
            self.engine.wirings.discard(self.wiring)
            collectors.report(Collector.scope_closed, self.wiring)
            metrics.registry.closed(self.wiring)

    def _failed(self, make_error: Callable[[str], DeploymentFailed]) -> None:
        if self.on_failed is not None:
            self.on_failed(make_error)


async def started(
    starting: Awaitable[T], graph: str, deadline: float | None, options: ExecutionOptions, span: "Span | None"
) -> T:
    """Wait until the resources and stateful nodes of a graph have started; the deadline of the call covers the start.

    Args:
        starting: starts the resources and stateful nodes.
        graph: the name of the graph.
        deadline: the deadline, on the clock of the event loop; None without a deadline.
        options: the options of the call.
        span: the span of the call, in which the wait is noted; None for a call without a span.

    Raises:
        DeadlineExceeded: the resources and nodes had not started at the deadline.
    """
    timer = asyncio.timeout_at(deadline)
    began = perf_counter()
    try:
        async with timer:
            return await starting
    except TimeoutError as error:
        if not timer.expired():
            raise
        told = f"the resources and stateful nodes of graph {graph!r} did not start within {options.timeout_seconds:g} s"
        raise DeadlineExceeded(told) from error
    finally:
        spans.waited(span, names.OPEN_WAIT, began)
