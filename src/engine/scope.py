"""Scope: what belongs to one `run`, `stream` or `deploy` and ends with it."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING

from .._errors import DeploymentFailed
from ..actors.crew import Crew
from ..actors.supervision import SupervisorFlags
from ..actors.supervisor import Escalation, Supervisor
from ..actors.threads import ThreadShare
from ..actors.uninterrupted import uninterrupted
from ..telemetry import metrics
from ..telemetry.profiling import registry
from .instance_registry import InstanceRegistry
from .planning import ChosenScheduler, Plan
from .uptime import Uptime
from .wiring import Wired, Wiring

if TYPE_CHECKING:
    from .options import ExecutionOptions
    from .readings import Room
    from .runtime import Runtime


class Scope:
    """Actors, instances of stateful nodes and workers of one scope.

    Args:
        engine: the inside of the Engine that it is part of.
        options: its options.
        scheduler: the scheduler, chosen.
        flags: how stateful nodes are restarted.
        is_one_call: whether it is for one call alone.
        threads: those that it may have busy, of a run; its own share of them by default.

    Attributes:
        options: the same.
        on_failed: called when they crash too often, with a function that makes an error out of the name of what
            failed; whoever owns the scope ends what is in it, and closes it.
        is_open: whether `close` has not begun.
    """

    def __init__(
        self,
        engine: "Runtime",
        options: "ExecutionOptions",
        scheduler: ChosenScheduler,
        flags: SupervisorFlags = SupervisorFlags(),  # noqa: B008 - it is immutable
        *,
        is_one_call: bool = False,
        threads: ThreadShare | None = None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.scheduler: ChosenScheduler = scheduler
        self.on_failed: Escalation | None = None
        self._threads = threads or engine.pools.share_of_threads(options.max_workers)
        self.instances = InstanceRegistry(engine.pools, self._threads, Supervisor(flags, self._failed))
        # Only a pipeline bounds its actors: elsewhere each frame has workers of its own, and admission bounds frames.
        max_workers = options.max_workers if scheduler == "actors" else None
        room: Room = (1, "call") if is_one_call else (options.max_in_flight, "max_in_flight")
        self.wiring = Wiring(
            engine.pools, self.instances, max_workers, room, device_strategy=options.device_strategy,
            threads=self._threads,
        )  # fmt: skip
        self._crews: set[Crew] = set()
        self.uptime = Uptime()
        self.is_open = True
        engine.scope_opened()
        engine.wirings.add(self.wiring)
        registry.scope_opened(self.wiring)
        if options.collect_metrics:
            metrics.opened(self.wiring)

    async def prepare(self, plan: Plan) -> Wired:
        """Return the actors of a plan; the first time, open the resources and enter the stateful nodes it uses."""
        program = self.engine.resources.program(plan, self.scheduler)
        await self.engine.resources.hold(program, self)
        await self.instances.open(plan)
        return self.wiring.wire(program)

    def crew(self, context: Context, *, traced: bool = False, deadline: float | None = None) -> Crew:
        """Return a new crew, which is gone when it is closed and its workers have ended."""
        threads = self._threads
        crew = Crew(self.loop, context, self._crew_ended, traced=traced, deadline=deadline, threads=threads)
        self._crews.add(crew)
        return crew

    async def close(self) -> None:
        """Wait until all crews have ended, and leave the stateful nodes. Frames must have been ended before."""
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
            for crew in list(self._crews):
                crew.close()
            # Not by an event: a worker cancelled before its first step, when a loop is shut down, never says so.
            tasks = [worker.task for crew in self._crews for worker in crew.workers if worker.task is not None]
            if tasks:
                await asyncio.wait(tasks)
            await self.wiring.returned()  # a thread may still be in an instance
        finally:
            self.engine.wirings.discard(self.wiring)
            registry.scope_closed(self.wiring)
            metrics.closed(self.wiring)

    def _failed(self, make_error: "Callable[[str], DeploymentFailed]") -> None:
        if self.on_failed is not None:
            self.on_failed(make_error)

    def _crew_ended(self, crew: Crew) -> None:
        self._crews.discard(crew)
