"""Engine: owns threads, processes and the limits of nodes; `run`, `stream` and `deploy` are its verbs."""

import asyncio
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, Self, TypeVar, Unpack
from weakref import WeakKeyDictionary, WeakSet

from .._errors import EngineClosedError, EngineLoopError
from ..actors.actor import ActorStatistics
from ..actors.frame import Frame
from ..actors.processes import ProcessPoolStatistics
from ..actors.threads import ThreadPoolStatistics
from .graph import Call, Graph, as_call
from .instances import stateful_nodes
from .options import DEFAULTS, CallOptions, checked, resolve
from .pipeline import Pipeline
from .plan import ChosenScheduler, Plan
from .pools import Pools
from .running import run_call
from .scope import closed_error
from .service import Service
from .stream import Stream
from .wiring import Wired, Wiring

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class EngineStatistics:
    """A snapshot of an Engine.

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


class Engine:
    """Owns what calls share: threads, worker processes and the limits of nodes (`concurrency=8` is eight in it).

    An async context manager, for one event loop. The verbs of the module `penstock.engine` use a default Engine for
    each running loop, which needs no closing.

    Args:
        **options: execution options for all calls of this Engine.

    Raises:
        OptionsError: an option is unknown or out of its range.
    """

    _is_default = False

    def __init__(self, **options: Unpack[CallOptions]) -> None:
        checked(options, "Engine")
        self._options: dict[str, Any] = dict(options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._all_closed = asyncio.Event()
        self._scopes = 0
        max_threads = self._options.get("max_workers", DEFAULTS.max_workers)
        self.pools = Pools(max_threads, ends_with_loop=self._is_default)
        self.frames: set[Frame] = set()
        self.pipelines: set[Pipeline] = set()
        self.open: WeakSet[Stream[Any] | Service[Any, Any]] = WeakSet()
        self._plans: WeakSet[Plan] = WeakSet()

    async def __aenter__(self) -> Self:
        self.check_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End what is still open, then the threads and worker processes; waits for what runs in them."""
        self._closed = True
        for frame in list(self.frames):
            frame.fail(closed_error("the Engine"))
        for scope in list(self.open):
            await scope.abort()
        while self._scopes:  # handlers that are unwinding, and runs that were entering a stateful node
            self._all_closed.clear()
            await self._all_closed.wait()
        await self.pools.close()

    async def run(self, call: Call[R] | Graph[[], R], /, **options: Unpack[CallOptions]) -> R:
        """Run one call and return its result; see `penstock.engine.run`."""
        self.check_loop()
        result: R = await run_call(self, as_call(call, "engine.run"), resolve("run", options, self._options))
        return result

    def stream(self, calls: Iterable[Call[R]] | AsyncIterable[Call[R]], /, **options: Unpack[CallOptions]) -> Stream[R]:
        """Run many calls as a pipeline; see `penstock.engine.stream`."""
        return Stream(self, calls, resolve("stream", options, self._options))

    def deploy(self, graph: Graph[P, R], /, *more: Graph[..., Any], **options: Unpack[CallOptions]) -> Service[P, R]:
        """Make graphs resident, for servers; see `penstock.engine.deploy`."""
        return Service(self, (graph, *more), resolve("deploy", options, self._options))

    def plan(self, graph: Graph[..., Any], /) -> Plan:
        """Return what a graph will do; see `penstock.engine.plan`."""
        return graph.plan()

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the counters."""
        actors = [
            actor.statistics()
            for plan in self._plans
            for wiring in plan.wirings[self].values()
            for actor in wiring.actors()
        ]
        threads, processes = self.pools.statistics()
        return EngineStatistics(len(self.frames), self._scopes, threads, processes, tuple(actors))

    @property
    def closed(self) -> bool:
        """Whether `async with` was left, or is being left."""
        return self._closed

    def check_loop(self) -> None:
        """Refuse another loop than the one of the first use, and any use after the end.

        Raises:
            EngineLoopError: this Engine belongs to another event loop.
            EngineClosedError: this Engine was closed.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineClosedError("this Engine was closed; make a new one: async with engine.Engine() as e: ...")
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EngineLoopError(
                "this Engine was first used on another event loop; make one for each loop, or use the functions of "
                "penstock.engine, which have a default Engine for each"
            )

    def shared_wiring(self, plan: Plan, scheduler: ChosenScheduler) -> Wired | None:
        """Return actors that all runs of a plan share; None if it has stateful nodes, which each run has its own of."""
        # Kept with the plan and not here, so that graphs made by a factory for one call leave nothing behind.
        shared = plan.wirings.get(self)
        if shared is None:
            if next(stateful_nodes(plan), None) is not None:
                return None
            shared = plan.wirings[self] = {}
            self._plans.add(plan)
        wiring = shared.get(scheduler)
        if wiring is None:
            # Every run has workers of its own, so nothing but the limits of nodes is shared and bounded here.
            wiring = shared[scheduler] = Wiring(self.pools, None, None)
        return wiring.wire(plan.program(scheduler))

    def scope_opened(self) -> None:
        """Count a scope that uses the pools."""
        self._scopes += 1

    async def scope_closed(self) -> None:
        """The default Engine's worker processes end with the last scope that may use them."""
        self.scope_closed_nowait()
        if self._is_default and not self._scopes:
            await self.pools.close_processes()

    def scope_closed_nowait(self) -> None:
        """Count a scope that used no processes."""
        self._scopes -= 1
        if not self._scopes:
            self._all_closed.set()

    def has_to_close_processes(self) -> bool:
        """Whether the end of the last scope ends worker processes."""
        return self._is_default and self.pools.has_processes and self._scopes == 1


class _DefaultEngine(Engine):
    """Nobody closes it: its processes end with the last scope, its threads with the loop."""

    _is_default = True


_defaults: WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = WeakKeyDictionary()


def default_engine() -> Engine:
    """Return the default Engine of the running loop."""
    loop = asyncio.get_running_loop()
    engine = _defaults.get(loop)
    if engine is None:
        engine = _defaults[loop] = _DefaultEngine()
    return engine
