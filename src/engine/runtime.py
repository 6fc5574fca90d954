"""Runtime: the inside of an Engine, which its runs, streams and deployments share."""

import asyncio
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from .._errors import EngineClosedError, EngineLoopError
from ..actors.condition import Condition
from ..actors.frame import Frame
from ..actors.node_actor import NodeActor
from ..telemetry import metrics
from ..telemetry.metrics import Reading
from ..telemetry.profiling import registry
from .instance_registry import stateful_nodes
from .metering import run_levels
from .planning import ChosenScheduler, Plan
from .pools import Pools
from .program import Program
from .resources.registry import Resources
from .shared_wirings import SharedWirings
from .wiring import Wired, Wiring

if TYPE_CHECKING:
    from .deployment import Deployment
    from .options import ExecutionOptions
    from .pipeline import Pipeline
    from .resources.resource import Resource
    from .streams.streaming_call import StreamingCall


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
        self._last_scope_closed = Condition()
        self._plans: WeakSet[Plan] = WeakSet()
        registry.hosts.add(self)
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
        registry.reader_opened(stream)

    def stream_closed(self, stream: "Pipeline | StreamingCall") -> None:
        """Forget a stream that has ended."""
        self.pipelines.discard(stream)
        registry.reader_closed(stream)

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
