"""Deployment: the inside of a Service: how it starts, when calls may come, and how it ends."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from .._errors import DeploymentFailed, EngineClosedError, EngineLoopError, PenstockError
from ..actors.condition import Condition
from ..actors.frame import Frame
from ..actors.started_tasks import start_task
from ..actors.supervision import SupervisorFlags
from ..actors.uninterrupted import uninterrupted
from ..telemetry import logs, metrics
from ..telemetry.metrics import Reading
from .admission import Admission
from .graph import Graph
from .hosted_graphs import HostedGraphs
from .in_flight import InFlight
from .inside import host_context, refuse_from_inside
from .metering import deployment_counters, deployment_levels
from .options import ExecutionOptions
from .scope import Scope
from .wiring import Wired

if TYPE_CHECKING:
    from .resources.opening import Opening
    from .runtime import Runtime

ServiceState = Literal["starting", "ready", "draining", "stopped"]
"""What `service.state` may be."""


class Deployment:
    """Graphs made resident: the life of one deployment, from starting to stopped.

    Attributes:
        runtime: the inside of its Engine.
        graphs: the deployed graphs, and their actors.
        state: "starting", "ready", "draining" or "stopped".
        scope: where its calls run; None before it is entered.
        in_flight: the calls that have not ended; None before it is entered.
    """

    def __init__(
        self,
        runtime: "Runtime",
        graphs: tuple[Graph[..., Any], ...],
        options: ExecutionOptions,
        flags: SupervisorFlags,
        *,
        warms_up: bool = False,
    ) -> None:
        self.runtime = runtime
        self.graphs = HostedGraphs(graphs)
        self._options = options
        self._flags = flags
        self._warms_up = warms_up
        self._failure: Callable[[str], DeploymentFailed] | None = None
        self._close_error: Exception | None = None
        self.state: ServiceState = "starting"
        self.scope: Scope | None = None
        self.in_flight: InFlight | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._changed = Condition()

    @property
    def names(self) -> str:
        """The names of the deployed graphs."""
        return self.graphs.names

    def counters(self) -> Iterable[Reading]:
        """Return what its admission has counted, for metrics."""
        return () if self.in_flight is None else deployment_counters(self.names, self.in_flight.admission.statistics())

    def levels(self) -> Iterable[Reading]:
        """Return how its places are taken now, for metrics."""
        return () if self.in_flight is None else deployment_levels(self.names, self.in_flight.admission.statistics())

    async def start(self) -> None:
        """Make the actors and enter the stateful nodes.

        Raises:
            EngineClosedError: it was started before, or stopped, perhaps meanwhile.
            Exception: a graph cannot be traced, or a stateful node did not start.
        """
        if self.scope is not None or self.state == "stopped":
            raise EngineClosedError(
                "this deployment was started or stopped already; engine.deploy(...) makes a new one"
            )
        self.runtime.check_loop()
        options = self._options
        scheduler = "actors" if options.scheduler == "auto" else options.scheduler
        self.runtime.deployments.add(self)
        context = host_context(self)
        self.scope = context.run(Scope, self.runtime, options, scheduler, self._flags)
        self.scope.on_failed = self._fail
        admission = Admission(self.scope.loop, options.max_in_flight, options.max_queue)
        self.in_flight = InFlight(admission, self._changed)
        if options.collect_metrics:
            metrics.opened(self)
        # A task of its own: whoever aborts meanwhile cancels the start, and not the caller.
        self._starting = start_task(
            self.scope.loop,
            self.graphs.prepare(self.scope, warms_up=self._warms_up),
            name="penstock-service-start",
            context=context,
        )
        try:
            await asyncio.wait([self._starting])
            if self._is_stopped():
                raise self.stopped_error()
            self._starting.result()
        except BaseException:
            await uninterrupted(self.abort_soon())
            raise
        self.scope.uptime.restart()
        self.state = "ready"
        self._changed.notify_all()

    async def ready(self) -> None:
        """Wait until calls are served.

        Raises:
            EngineClosedError: the deployment failed to start, or was stopped.
        """
        await self._changed.wait_for(lambda: self.state != "starting")
        if self._is_stopped():
            raise self.stopped_error()

    async def drain(self, timeout_seconds: float | None) -> None:
        """Refuse new calls, finish those that were accepted, and stop.

        Raises:
            DeploymentFailed: stateful nodes crashed too often.
            Exception: a stateful node could not be left.
        """
        refuse_from_inside(self)
        if self.state == "ready":
            self.state = "draining"
            if self.in_flight is not None:
                self.in_flight.finish_streams()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait_for(lambda: self.state != "draining" or not self._is_busy())
        except TimeoutError:
            pass
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Refuse new calls, end those in flight, and stop; waits until nothing is left.

        Raises:
            DeploymentFailed: stateful nodes crashed too often.
            Exception: a stateful node could not be left.
        """
        await self.end()
        self.check_failed()

    async def end(self) -> None:
        """Do as `abort` does, for those who say themselves that it has failed.

        Raises:
            Exception: a stateful node could not be left.
        """
        refuse_from_inside(self)
        await uninterrupted(self.abort_soon())

    async def stopped(self) -> None:
        """Wait until it takes no more calls and none is in flight.

        Raises:
            DeploymentFailed: stateful nodes crashed too often.
        """
        await self._changed.wait_for(self._is_stopped)
        self.check_failed()

    def abort_soon(self) -> "asyncio.Task[None]":
        """Refuse new calls from now on, and begin to end those in flight; returns the task that does."""
        self.state = "stopped"
        self._changed.notify_all()
        if self._stopping is None:
            self._stopping = start_task(asyncio.get_running_loop(), self._stop(), name="penstock-service-stop")
        return self._stopping

    async def _stop(self) -> None:
        if self.scope is None or self.in_flight is None or self._starting is None:
            return  # it was never entered
        self._starting.cancel()
        await asyncio.wait([self._starting])
        if not self._starting.cancelled():
            self._starting.exception()  # `start` raises it, or says that it was stopped
        await self.in_flight.end(self._interrupted_error, self.stopped_error)
        try:
            await self.scope.close()
        except Exception as error:
            if self._failure is None:
                raise
            if error is self.stopped_error().__cause__:  # an instance ended by itself: that is why it failed
                return
            # Why it failed matters more than what else goes wrong at its end.
            self._close_error = error
            logs.warning("deployment.not_released", deployment=self.names, error=repr(error))
        finally:
            self.runtime.deployments.discard(self)
            metrics.closed(self)

    def _fail(self, make_error: "Callable[[str], DeploymentFailed]") -> None:
        """Stateful nodes crash too often: end everything, and say why from now on."""
        if self._stopping is None:
            self._failure = make_error
            self.abort_soon()

    def check_failed(self) -> None:
        """Raise DeploymentFailed if stateful nodes crashed too often."""
        if self._failure is not None:
            raise self.stopped_error()

    def check_callable(self) -> tuple[Scope, InFlight]:
        """Return what a call needs.

        Raises:
            EngineClosedError: the deployment was not started, or takes no more calls.
            EngineLoopError: it runs on another event loop.
            ReentrantCallError: called by one of its own nodes.
        """
        if self.scope is None or self.in_flight is None:
            raise EngineClosedError(
                "this deployment was not started; enter it first: async with engine.deploy(...) as service"
            )
        if self.state != "ready":
            raise self.stopped_error()
        if asyncio._get_running_loop() is not self.scope.loop:  # None outside of any
            raise EngineLoopError("this deployment runs on another event loop than this code; call it from there")
        refuse_from_inside(self)
        return self.scope, self.in_flight

    async def restored(self, wired: Wired, graph: Graph[..., Any], deadline: float | None = None) -> Wired:
        """Return the actors of a graph, once its resources are open: one may have ended by itself.

        Raises:
            DeadlineExceeded: it took too long.
            EngineClosedError: the deployment was stopped meanwhile.
            Exception: what an opening raised; the next call tries again.
        """
        if self.graphs.is_complete(graph):
            return wired
        scope, in_flight = self.check_callable()
        await in_flight.prepare(self._restore(graph, scope), graph.name, deadline)
        return wired

    async def reopen(self, opening: "Opening") -> None:
        """Open what was lost and is used by one of the graphs.

        Raises:
            EngineClosedError: the deployment was stopped, perhaps meanwhile.
            Exception: what the opening raised.
        """
        if self.scope is None or self.state != "ready":
            raise self.stopped_error()
        await self._restore(self.graphs.that_uses(opening), self.scope)

    async def _restore(self, graph: Graph[..., Any], scope: Scope) -> None:
        await self.graphs.restore(graph, scope)
        if self._is_stopped():
            raise self.stopped_error()

    def check_admitted(self, in_flight: InFlight) -> None:
        """Give the place back that a call waited for, if the deployment was stopped meanwhile.

        Raises:
            EngineClosedError: it was.
        """
        if self._is_stopped():
            in_flight.turn_away()
            raise self.stopped_error()

    def _is_stopped(self) -> bool:
        return self.state == "stopped"

    def _is_busy(self) -> bool:
        return self.in_flight is not None and self.in_flight.is_busy

    def _interrupted_error(self) -> PenstockError:
        if self._failure is not None:
            return self.stopped_error()
        return EngineClosedError("this deployment was stopped while the call was in flight")

    def stopped_error(self) -> PenstockError:
        """Return the error of a call that comes before the start, or too late."""
        if self._failure is not None:
            error = self._failure(f"the deployment of {self.names}")
            if self._close_error is not None:
                error.add_note(f"and its stateful nodes could not be left: {self._close_error!r}")
            return error
        return EngineClosedError(f"the deployment of {self.names} is {self.state} and takes no more calls")


class Flight:
    """One call of a deployment: it listens to its frame."""

    __slots__ = ("_in_flight", "outcome_known", "service")

    def __init__(self, service: Deployment, in_flight: InFlight, outcome_known: "asyncio.Future[None]") -> None:
        self.service = service
        self._in_flight = in_flight
        self.outcome_known = outcome_known

    def frame_done(self, frame: Frame) -> None:
        """Release the caller at once."""
        frame.crew.close()
        if not self.outcome_known.done():
            self.outcome_known.set_result(None)
        if frame.error is not None and not isinstance(frame.error, Exception):
            self.service.abort_soon()  # KeyboardInterrupt and SystemExit end the scope
        if not frame.unwinding:
            self._in_flight.settled(frame)

    def frame_settled(self, frame: Frame) -> None:
        """Give the place back, now that nothing runs for the call any more."""
        self._in_flight.settled(frame)
