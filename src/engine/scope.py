"""What an Engine owns, and a scope in it: one `run`, `stream` or `deploy`; what is open in both, and how it ends."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary, WeakSet

from .._errors import DeploymentFailed, EngineClosedError, EngineLoopError
from ..actors.frame import Frame
from ..actors.node_actor import UNLIMITED, NodeActor
from ..actors.supervision import Escalation, Supervisor, SupervisorFlags
from ..actors.tasks import Condition, EagerStarts, uninterrupted
from ..actors.threads import ThreadShare
from ..actors.worker import WorkerGroup
from ..telemetry import metrics
from ..telemetry.metrics import Reading
from ..telemetry.profiling import collectors
from .counters import run_levels
from .instances import InstanceRegistry, stateful_nodes
from .open_resources import Resources
from .options import DEFAULT_WORKERS, ChosenScheduler, ExecutionOptions
from .planning import check_stream_limits
from .pools import Pools
from .program import Plan, Program, Wired
from .statistics import Uptime
from .tracing.tracer import Callee
from .wiring import SharedWirings, Wiring

if TYPE_CHECKING:
    from ..telemetry.profiling.records import Reader, WindowLook
    from .counters import Room


class Ongoing(Protocol):
    """What is open in an Engine, and ends with it: a stream of calls, the stream of one call, or a deployment."""

    def frames(self) -> Iterable[Frame]:
        """Return the calls and items for which something may still run."""
        ...

    def actors(self) -> list[NodeActor]:
        """Return the actors that they go through."""
        ...

    async def end(self) -> None:
        """End everything, since the Engine is closed; waits until nothing is left."""
        ...


class OpenStream(Ongoing, Protocol):
    """A stream of either kind, of which a profile reads how long its reader has waited."""

    @property
    def name(self) -> str:
        """The name of the graph that its items go through, or of one of them."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it runs on."""
        ...

    @property
    def reader_wait_seconds(self) -> float:
        """How long its reader has waited."""
        ...

    def look(self) -> "WindowLook | None":
        """Return what its items do now; None if it has no places for them."""
        ...


class Runtime:
    """What an Engine owns, what is open in it, and how that ends.

    Args:
        max_threads: the most threads that run handlers.
        max_processes: the most worker processes; None for as many as there are cores.
        is_default: nobody closes it: its processes end with the last scope, its threads with the loop.

    Attributes:
        pools: threads, worker processes and the limits of nodes.
        resources: what is open.
        reloads: for each resource that was reloaded, who does it now.
        frames: the calls of `run` in flight.
        counted_runs: of each graph, how many of its calls that give a value, or a stream, are in flight and count in
            metrics.
        streams: those that have begun and not ended.
        readers: who reads them.
        deployments: those that were entered and have not ended.
        scopes: runs, streams and deployments that are open.
        wirings: the actors of those that have their own.
        closed: whether `async with` was left, or is being left.
        loop: its event loop; None before its first use.
        loop_thread: the thread of its event loop, by the number of the operating system; None before its first use.
        eager_starts: says whether a call may begin at once; None before its first use.
    """

    def __init__(self, max_threads: int, max_processes: int | None, *, is_default: bool) -> None:
        self.pools = Pools(max_threads, max_processes, ends_with_loop=is_default)
        self.resources = Resources(closes_unused=is_default)
        self.reloads: WeakKeyDictionary[Callee, asyncio.Lock] = WeakKeyDictionary()
        self.frames: set[Frame] = set()
        self.counted_runs: Counter[str] = Counter()
        self.streams: set[Ongoing] = set()
        self.readers: set[Reader] = set()
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
        """Refuse another loop than the one of the first use, and any use after the end.

        Raises:
            EngineLoopError: this Engine belongs to another event loop, or none is running.
            EngineClosedError: this Engine was closed.
        """
        loop = running_loop()
        if self.closed:
            raise EngineClosedError("this Engine was closed; make a new one: async with engine.Engine() as e: ...")
        if self.loop is None:
            self.loop, self.loop_thread = loop, threading.get_native_id()
            self.eager_starts = EagerStarts(loop)
        elif self.loop is not loop:
            raise EngineLoopError(
                "this Engine was first used on another event loop; make one for each loop, or use the functions of "
                "penstock.engine, which have a default Engine for each"
            )

    def closed_error(self) -> EngineClosedError:
        """Return the error of a call that the end of the Engine ends."""
        return EngineClosedError("the Engine was closed while this call was in flight")

    def program(self, plan: Plan, scheduler: ChosenScheduler) -> Program:
        """Return what frames of a plan need to run under a scheduler.

        Raises:
            PlanError: under this one streams would wait for each other.
        """
        if scheduler in ("sequential", "wave") and scheduler not in plan._programs:
            check_stream_limits(plan.name, (one for step in plan.steps for one in step.chain), in_order=True)
        return self.resources.program(plan, scheduler)

    def shared_wiring(self, plan: Plan, scheduler: ChosenScheduler, options: ExecutionOptions) -> Wired | None:
        """Return actors that all runs of a plan share; None if it has stateful nodes, which each run has its own of.

        Args:
            plan: the plan.
            scheduler: the scheduler.
            options: those of the run.
        """
        # Kept with the plan and not here, so that graphs made by a factory for one call leave nothing behind.
        shared = plan._kept_by_engines.get(self)
        if not isinstance(shared, SharedWirings):
            if next(stateful_nodes(plan), None) is not None:
                return None
            shared = plan._kept_by_engines[self] = SharedWirings()
            self._shared.add(shared)
        wiring = shared.get(self.pools, scheduler, options)
        return wiring.wire(self.program(plan, scheduler))

    def counters(self) -> Iterable[Reading]:
        """Return nothing: it is scopes that count, for metrics."""
        return ()

    def levels(self) -> Iterable[Reading]:
        """Return how many runs are in flight, for metrics."""
        return run_levels(self.counted_runs)

    def open_scopes(self) -> list[Wiring]:
        """Return the actors of all scopes that are open, for a profile; those that runs share, until the loop ends."""
        if self.loop is not None and self.loop.is_closed():
            return []
        return [*(wiring for shared in self._shared for wiring in shared), *self.wirings]

    def open_readers(self) -> "list[Reader]":
        """Return the streams that are open, for a profile."""
        return list(self.readers)

    def stream_opened(self, stream: "OpenStream") -> None:
        """Keep a stream that has begun."""
        self.streams.add(stream)
        self.readers.add(stream)
        collectors.reader_opened(stream)

    def stream_closed(self, stream: "OpenStream") -> None:
        """Forget a stream that has ended."""
        self.streams.discard(stream)
        self.readers.discard(stream)
        collectors.reader_closed(stream)

    def shared_actors(self) -> list[NodeActor]:
        """Return the actors that runs share."""
        return [actor for shared in self._shared for wiring in shared for actor in wiring.actors()]

    def frames_in_flight(self) -> set[Frame]:
        """Return every call and item, of any scope, for which something may still run."""
        found = {*self.frames, *(frame for one in self._ongoing() for frame in one.frames())}
        return {frame for frame in found if not frame.settled}

    async def threads_returned(self) -> None:
        """Wait until no thread runs on for an item that has ended, in any scope that is open now."""
        for actor in [*self.shared_actors(), *(actor for one in self._ongoing() for actor in one.actors())]:
            await actor.all_returned()

    def _ongoing(self) -> "tuple[Ongoing, ...]":
        return (*self.streams, *self.deployments)

    def scope_opened(self) -> None:
        """Count a scope that uses the pools."""
        self.scopes += 1

    async def scope_closed(self) -> None:
        """The default Engine's worker processes end with the last scope that may use them."""
        self.scope_closed_nowait()
        if self._is_default and not self.scopes:
            await self.pools.close_processes()

    def scope_closed_nowait(self) -> None:
        """Count a scope that used no processes."""
        self.scopes -= 1
        if not self.scopes:
            self._last_scope_closed.notify_all()

    def has_to_close_processes(self) -> bool:
        """Whether the end of the last scope ends worker processes."""
        return self._is_default and self.pools.has_processes and self.scopes == 1

    async def close(self) -> None:
        """End what is still open, then the threads and worker processes; waits for what runs in them."""
        self.closed = True
        self.resources.refuse()
        for frame in list(self.frames):
            frame.fail(self.closed_error())
        for one in self._ongoing():
            await one.end()
        # Handlers that are unwinding, and runs that were entering a stateful node.
        await self._last_scope_closed.wait_for(lambda: not self.scopes)
        try:
            await self.resources.close()
        finally:
            await self.pools.close()


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop.

    Raises:
        EngineLoopError: none is running.
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
    """Actors, instances of stateful nodes and workers of one scope.

    Args:
        engine: the inside of the Engine that it is part of.
        options: its options.
        scheduler: the scheduler, chosen.
        flags: how stateful nodes are restarted.
        is_one_call: whether it is for one call alone.
        is_admitted: whether admission bounds the calls in it, as in a deployment.
        threads: those that it may have busy, of a run; its own share of them by default.

    Attributes:
        options: the same.
        on_failed: called when they crash too often, with a function that makes an error out of the name of what
            failed; whoever owns the scope ends what is in it, and closes it.
        threads: those that it may have busy.
        groups: the workers in it; each goes when its last worker has ended.
        is_open: whether `close` has not begun.
    """

    def __init__(
        self,
        engine: Runtime,
        options: ExecutionOptions,
        scheduler: ChosenScheduler,
        flags: SupervisorFlags = SupervisorFlags(),  # noqa: B008 - it is immutable
        *,
        is_one_call: bool = False,
        is_admitted: bool = False,
        threads: ThreadShare | None = None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.scheduler: ChosenScheduler = scheduler
        self.on_failed: Escalation | None = None
        self.threads = threads or engine.pools.share_of_threads(options.max_workers)
        self.instances = InstanceRegistry(engine.pools, self.threads, Supervisor(flags, self._failed))
        # Only a pipeline bounds its actors: elsewhere each frame has workers of its own, and admission bounds frames.
        default = UNLIMITED if is_admitted else DEFAULT_WORKERS
        max_workers = (options.max_workers or default) if scheduler == "actors" else None
        room: Room = (1, "call") if is_one_call else (options.max_in_flight, "max_in_flight")
        self.wiring = Wiring(
            engine.pools, self.instances, max_workers, room, device_strategy=options.device_strategy,
            threads=self.threads,
        )  # fmt: skip
        self.groups: set[WorkerGroup] = set()
        self.uptime = Uptime()
        self.is_open = True
        engine.scope_opened()
        engine.wirings.add(self.wiring)
        collectors.scope_opened(self.wiring)
        if options.collect_metrics:
            metrics.opened(self.wiring)

    async def prepare(self, plan: Plan) -> Wired:
        """Return the actors of a plan; the first time, open the resources and enter the stateful nodes it uses."""
        program = self.engine.program(plan, self.scheduler)
        await self.engine.resources.hold(program, self)
        await self.instances.open(plan)
        return self.wiring.wire(program)

    def group(self, context: Context, *, ends_at: float | None = None) -> WorkerGroup:
        """Return a new group, which is gone when it is closed and its workers have ended."""
        group = WorkerGroup(self.loop, context, self.groups.discard, ends_at=ends_at, threads=self.threads)
        self.groups.add(group)
        return group

    async def close(self) -> None:
        """Wait until all groups have ended, and leave the stateful nodes. Frames must have been ended before."""
        await uninterrupted(self._close())

    async def _close(self) -> None:
        self.uptime.stop()
        self.is_open = False
        try:
            await self._workers_ended()
            await self.instances.close()
        finally:
            try:
                await self.engine.resources.release(self)
            finally:
                await self.engine.scope_closed()

    async def _workers_ended(self) -> None:
        try:
            for group in list(self.groups):
                group.close()
            # Not by an event: a worker cancelled before its first step, when a loop is shut down, never says so.
            tasks = [worker.task for group in self.groups for worker in group.workers if worker.task is not None]
            if tasks:
                await asyncio.wait(tasks)
            await self.wiring.returned()  # a thread may still be in an instance
        finally:
            self.engine.wirings.discard(self.wiring)
            collectors.scope_closed(self.wiring)
            metrics.closed(self.wiring)

    def _failed(self, make_error: Callable[[str], DeploymentFailed]) -> None:
        if self.on_failed is not None:
            self.on_failed(make_error)
