"""Engine: owns threads, processes and the limits of nodes; `run`, `stream` and `deploy` are its verbs."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack, overload

from ..actors.accepted import check, optional, whole
from ..actors.node_actor import ActorStatistics
from ..actors.supervision import Strategy, SupervisorFlags
from ..actors.threads import ThreadPoolStatistics
from ..actors.uninterrupted import uninterrupted
from ..telemetry.tables.rendered import Rendered
from .graph import Call, Graph, as_call, as_graph
from .options import CallOptions, ExecutionOptions, checked, of_engine, resolve
from .planning import Plan
from .progress import is_shown
from .running import run_call
from .runtime import Runtime, running_loop
from .streaming import CallsStream, Stream
from .streams.call_kinds import values
from .streams.call_scope import OwnScope
from .streams.streaming_call import StreamingCall
from .streams.values_stream import ValuesStream

if TYPE_CHECKING:
    from ..actors.processes import ProcessPoolStatistics
    from ..telemetry.tables.table import Table
    from .service import Service

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
    processes: "ProcessPoolStatistics | None"
    actors: tuple[ActorStatistics, ...]

    def _table(self) -> "Table":
        from .statistics.tables import engine_table

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
        self._runtime = Runtime(of_engine(options).max_workers, max_processes, is_default=self._is_default)

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
    ) -> "Service[P, R]":
        """Make graphs resident, for servers; see `penstock.engine.deploy`."""
        from .service import Service

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
