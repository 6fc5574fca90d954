"""Engine: owns threads, processes and the limits of nodes; `run`, `stream` and `deploy` are its verbs."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary, WeakSet

from .._errors import EngineClosedError, EngineLoopError
from .._public import LateModule
from ..actors.accepted import check, optional, whole
from ..actors.cancellation import Condition, uninterrupted
from ..actors.current import EagerStarts
from ..actors.frame import Frame
from ..actors.node_actor import NodeActor
from ..actors.supervision import Strategy, SupervisorFlags
from ..actors.threads import ProcessPoolStatistics, ThreadPoolStatistics
from ..telemetry import metrics
from ..telemetry.counters import ActorStatistics
from ..telemetry.metrics import Reading
from ..telemetry.profiling import collectors
from ..telemetry.rendered import Rendered
from .counters import run_levels
from .graph import Call, Graph, as_call, as_graph
from .instances import stateful_nodes
from .open_resources import Resources
from .options import DEFAULT_WORKERS, CallOptions, ExecutionOptions, checked, of_engine, resolve
from .pipeline import is_shown
from .planning import ChosenScheduler, Plan, values
from .pools import Pools
from .program import Program
from .running import run_call
from .scope import SharedWirings, Wired, Wiring
from .streaming import CallsStream, Stream
from .values import OwnScope, StreamingCall, ValuesStream

if TYPE_CHECKING:
    from .. import engine
    from ..telemetry.tables import Table
    from .deployment import Deployment
    from .pipeline import Pipeline
    from .resource import Resource
else:
    engine = LateModule(__package__)


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
        pipelines: the streams that have begun and not ended.
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
        self.resources = Resources(closes_unused=is_default, on_lost=self._resource_lost)
        self.reloads: WeakKeyDictionary[Resource[..., Any], asyncio.Lock] = WeakKeyDictionary()
        self.frames: set[Frame] = set()
        self.counted_runs: Counter[str] = Counter()
        self.pipelines: set[Pipeline | StreamingCall] = set()
        self.deployments: set[Deployment] = set()
        self.scopes = 0
        self.wirings: set[Wiring] = set()
        self.closed = False
        self._is_default = is_default
        self.loop_thread: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.eager_starts: EagerStarts | None = None
        self._last_scope_closed = Condition()
        self._plans: WeakSet[Plan] = WeakSet()
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

    def shared_wiring(self, plan: Plan, scheduler: ChosenScheduler, options: "ExecutionOptions") -> Wired | None:
        """Return actors that all runs of a plan share; None if it has stateful nodes, which each run has its own of.

        Args:
            plan: the plan.
            scheduler: the scheduler.
            options: those of the run.
        """
        # Kept with the plan and not here, so that graphs made by a factory for one call leave nothing behind.
        shared = plan._wirings.get(self)
        if shared is None:
            if next(stateful_nodes(plan), None) is not None:
                return None
            shared = plan._wirings[self] = SharedWirings()
            self._plans.add(plan)
        wiring = shared.get(self.pools, scheduler, options)
        return wiring.wire(self.resources.program(plan, scheduler))

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
        shared = [wiring for plan in self._plans for wiring in plan._wirings[self]]
        return [*shared, *self.wirings]

    def open_readers(self) -> "list[Pipeline | StreamingCall]":
        """Return the streams that are open, for a profile."""
        return list(self.pipelines)

    def stream_opened(self, stream: "Pipeline | StreamingCall") -> None:
        """Keep a stream that has begun."""
        self.pipelines.add(stream)
        collectors.reader_opened(stream)

    def stream_closed(self, stream: "Pipeline | StreamingCall") -> None:
        """Forget a stream that has ended."""
        self.pipelines.discard(stream)
        collectors.reader_closed(stream)

    def shared_actors(self) -> list[NodeActor]:
        """Return the actors that runs share."""
        return [actor for plan in self._plans for wiring in plan._wirings[self] for actor in wiring.actors()]

    def frames_in_flight(self) -> set[Frame]:
        """Return every call and item, of any scope, for which something may still run."""
        found = {*self.frames, *(frame for pipeline in self.pipelines for frame in pipeline.frames())}
        for deployment in self.deployments:
            if deployment.in_flight is not None:
                found |= deployment.in_flight.live
        return {frame for frame in found if not frame.settled}

    def _resource_lost(self, programs: Collection[Program]) -> None:
        for deployment in self.deployments:
            deployment.graphs.lost(programs)

    async def threads_returned(self) -> None:
        """Wait until no thread runs on for an item that has ended, in any scope that is open now."""
        actors = self.shared_actors()
        for pipeline in self.pipelines:
            actors += pipeline.actors()
        for deployment in self.deployments:
            if deployment.scope is not None:
                actors += deployment.scope.wiring.actors()
        for actor in actors:
            await actor.all_returned()

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
        for pipeline in list(self.pipelines):
            # The next read raises this, and does not look like the end of the stream.
            pipeline.abort(EngineClosedError("the Engine was closed while this stream was open"))
            await pipeline.aclose()
        for deployment in list(self.deployments):
            await deployment.end()
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


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class EngineStatistics(Rendered):
    """A snapshot of an Engine. It shows itself as a table: printed, with rich, and in a notebook.

    Attributes:
        runs_in_flight: calls of `run` in flight.
        scopes: runs, streams and deployments that are open.
        threads: the thread pool; None before its first use.
        processes: the worker processes; None before their first use.
        actors: the nodes that `run` has used, over all of its calls.
    """

    runs_in_flight: int
    scopes: int
    threads: ThreadPoolStatistics | None
    processes: ProcessPoolStatistics | None
    actors: tuple[ActorStatistics, ...]

    def _table(self) -> "Table":
        from .tables import engine_table

        return engine_table(self)


class Engine:
    """Owns what calls share: threads, worker processes and the limits of nodes (`concurrency=8` is eight in it).

    An async context manager, for one event loop. The verbs of the module `penstock.engine` use a default Engine for
    each running loop, which needs no closing.

    Args:
        max_processes: the most worker processes; as many as there are cores that this process may use by default.
        **options: execution options for all calls of this Engine. It has `max_workers` threads.

    Raises:
        OptionsError: an option is unknown or out of its range.
    """

    _is_default = False

    def __init__(self, *, max_processes: int | None = None, **options: Unpack[CallOptions]) -> None:
        checked(options, "Engine")
        check("max_processes", max_processes, optional(whole(1)))
        self._options: dict[str, Any] = dict(options)
        # Those of `with execution_options(...)` count for what is called there, and not for what an Engine owns.
        self._runtime = Runtime(
            of_engine(options).max_workers or DEFAULT_WORKERS, max_processes, is_default=self._is_default
        )

    async def __aenter__(self) -> Self:
        self._runtime.check_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End what is still open, then the threads and worker processes; waits for what runs in them."""
        await uninterrupted(self._runtime.close())

    async def run(self, call: Call[R] | Graph[[], R], /, **options: Unpack[CallOptions]) -> R:
        """Run one call and return its result; see `penstock.engine.run`."""
        self._runtime.check_loop()
        result: R = await run_call(self._runtime, as_call(call, "engine.run"), resolve("run", options, self._options))
        return result

    @overload
    def stream(
        self, call: Call[AsyncIterator[R]], /, *, progress: bool = False, **options: Unpack[CallOptions]
    ) -> Stream[R]: ...
    @overload
    def stream(
        self,
        calls: Iterable[Call[R]] | AsyncIterable[Call[R]],
        /,
        *,
        progress: bool = False,
        **options: Unpack[CallOptions],
    ) -> Stream[R]: ...
    def stream(self, calls: Any, /, *, progress: bool = False, **options: Unpack[CallOptions]) -> Stream[Any]:
        """Run many calls as a pipeline, or one call that gives a stream; see `penstock.engine.stream`."""
        shows_progress = is_shown(progress)
        if isinstance(calls, Call):
            call: Call[Any] = calls  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of it
            values(call.graph)
            merged = resolve("stream(call)", options, self._options)
            return ValuesStream(partial(self._streaming_call, call, merged), shows_progress=shows_progress)
        merged = resolve("stream", options, self._options)
        return CallsStream(self._runtime, calls, merged, shows_progress=shows_progress)

    def _streaming_call(self, call: Call[Any], options: ExecutionOptions) -> StreamingCall:
        self._runtime.check_loop()
        return StreamingCall(OwnScope(self._runtime, options), call, options)

    def deploy(
        self,
        graph: Graph[P, R],
        /,
        *more: Graph[..., Any],
        strategy: Strategy = "one_for_one",
        max_restarts: int = 3,
        within_seconds: float = 5.0,
        warmup: bool = False,
        **options: Unpack[CallOptions],
    ) -> "engine.Service[P, R]":
        """Make graphs resident, for servers; see `penstock.engine.deploy`."""
        from . import Service

        flags = SupervisorFlags(strategy, max_restarts, within_seconds)
        graphs: tuple[Graph[..., Any], ...] = (graph, *more)
        return Service(self._runtime, graphs, resolve("deploy", options, self._options), flags, warms_up=warmup)

    def plan(self, graph: Graph[..., Any], /) -> Plan:
        """Return what a graph will do; see `penstock.engine.plan`."""
        return as_graph(graph, "engine.plan")._planned(is_cached=resolve("Engine", {}, self._options).enable_caching)

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the counters."""
        runtime = self._runtime
        actors = tuple(actor.statistics() for actor in runtime.shared_actors())
        return EngineStatistics(len(runtime.frames), runtime.scopes, *runtime.pools.statistics(), actors)


class _DefaultEngine(Engine):
    """Nobody closes it: its processes end with the last scope, its threads with the loop."""

    _is_default = True


# An Engine refers to its loop, so weak references would not let go of either.
_defaults: dict[asyncio.AbstractEventLoop, Engine] = {}


def default_engine() -> Engine:
    """Return the default Engine of the running loop.

    Raises:
        EngineLoopError: none is running.
    """
    loop = running_loop()
    engine = _defaults.get(loop)
    if engine is None:
        for other in [other for other in list(_defaults) if other.is_closed()]:
            _defaults.pop(other, None)  # another thread may be at it, too
        engine = _defaults[loop] = _DefaultEngine()
    return engine
