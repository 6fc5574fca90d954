"""Deployment: the inside of a Service: where its calls run, what is in flight, and how it starts and stops."""

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from .._errors import (
    DeadlineExceeded,
    DeploymentFailed,
    EngineClosedError,
    EngineLoopError,
    PenstockError,
    PlanError,
)
from ..actors.frame import Frame
from ..actors.supervision import SupervisorFlags
from ..actors.uninterrupted import uninterrupted
from ..telemetry import logs
from .admission import Admission
from .graph import Call, Graph
from .inside import host_context, refuse_from_inside
from .options import ExecutionOptions
from .scope import Scope
from .streams.flow import gives_one_value, gives_stream
from .wiring import Wired

if TYPE_CHECKING:
    from .pipeline import Pipeline
    from .runtime import Runtime

ServiceState = Literal["starting", "ready", "draining", "stopped"]
"""What `service.state` may be."""


class Deployment:
    """Graphs made resident, and what is in flight in them.

    Attributes:
        names: the names of the deployed graphs.
        state: "starting", "ready", "draining" or "stopped".
        scope: where its calls run; None before it is entered.
        admission: its places; None before it is entered.
        wired: the actors of each graph whose calls give one value. A running deployment keeps its plans, whatever is
            rebound meanwhile.
        wired_streams: those of the graphs whose calls give streams.
        live: the calls in flight.
        items: calls that were admitted; the number of the next one.
        counts: the calls that have ended, by how.
    """

    def __init__(
        self,
        runtime: "Runtime",
        graphs: tuple[Graph[..., Any], ...],
        options: ExecutionOptions,
        flags: SupervisorFlags,
    ) -> None:
        self._runtime = runtime
        self._graphs = graphs
        self._options = options
        self._flags = flags
        self._failure: Callable[[str], DeploymentFailed] | None = None
        self._close_error: Exception | None = None
        self.names = ", ".join(graph.name for graph in graphs)
        self.state: ServiceState = "starting"
        self.scope: Scope | None = None
        self.admission: Admission | None = None
        self.wired: dict[Graph[..., Any], Wired] = {}
        self.wired_streams: dict[Graph[..., Any], Wired] = {}
        self.live: set[Frame] = set()
        self.items = 0
        self.counts = {"done": 0, "failed": 0, "cancelled": 0, "expired": 0, "running": 0}
        self._streams: set[Pipeline] = set()
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        # An Event costs 760 bytes, and a server may have a thousand deployments: made when somebody waits for it.
        self._changed: asyncio.Event | None = None

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
        self._runtime.check_loop()
        options = self._options
        scheduler = "actors" if options.scheduler == "auto" else options.scheduler
        self._runtime.deployments.add(self)
        context = host_context(self)
        self.scope = context.run(Scope, self._runtime, options, scheduler, self._flags)
        self.scope.on_failed = self._fail
        self.admission = Admission(self.scope.loop, options.max_in_flight, options.max_queue)
        # A task of its own: whoever aborts meanwhile cancels the start, and not the caller.
        self._starting = self.scope.loop.create_task(
            self._prepare(self.scope), name="penstock-service-start", context=context
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
        self.change()

    async def _prepare(self, scope: Scope) -> None:
        for graph in self._graphs:
            plan = graph._planned()
            (self.wired_streams if plan._gives_stream else self.wired)[graph] = await scope.prepare(plan)

    async def ready(self) -> None:
        """Wait until calls are served.

        Raises:
            EngineClosedError: the deployment failed to start, or was stopped.
        """
        while self.state == "starting":
            await self._change()
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
            for pipeline in self._streams:
                pipeline.finish()
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.state == "draining" and self._is_busy():
                    await self._change()
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
        while not self._is_stopped():
            await self._change()
        self.check_failed()

    def abort_soon(self) -> "asyncio.Task[None]":
        """Refuse new calls from now on, and begin to end those in flight; returns the task that does."""
        self.state = "stopped"
        self.change()
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(), name="penstock-service-stop")
        return self._stopping

    async def _stop(self) -> None:
        if self.scope is None or self._starting is None:
            return  # it was never entered
        self._starting.cancel()
        await asyncio.wait([self._starting])
        if not self._starting.cancelled():
            self._starting.exception()  # `start` raises it, or says that it was stopped
        for frame in list(self.live):
            if frame.state == "running":  # others have ended, and are unwinding
                frame.fail(self._interrupted_error())
        for pipeline in list(self._streams):
            pipeline.abort(self._interrupted_error())
            await pipeline.aclose()
        try:
            await self.scope.close()
        except Exception as error:
            if self._failure is None:
                raise
            # Why it failed matters more than what else goes wrong at its end.
            self._close_error = error
            logs.warning("deployment.not_released", deployment=self.names, error=repr(error))
        finally:
            self._runtime.deployments.discard(self)

    def _fail(self, make_error: "Callable[[str], DeploymentFailed]") -> None:
        """Stateful nodes crash too often: end everything, and say why from now on."""
        if self._stopping is None:
            self._failure = make_error
            self.abort_soon()

    def check_failed(self) -> None:
        """Raise DeploymentFailed if stateful nodes crashed too often."""
        if self._failure is not None:
            raise self.stopped_error()

    def check_callable(self) -> tuple[Scope, Admission]:
        """Return what a call needs.

        Raises:
            EngineClosedError: the deployment was not started, or takes no more calls.
            EngineLoopError: it runs on another event loop.
            ReentrantCallError: called by one of its own nodes.
        """
        if self.scope is None or self.admission is None:
            raise EngineClosedError(
                "this deployment was not started; enter it first: async with engine.deploy(...) as service"
            )
        if self.state != "ready":
            raise self.stopped_error()
        if asyncio._get_running_loop() is not self.scope.loop:  # None outside of any
            raise EngineLoopError("this deployment runs on another event loop than this code; call it from there")
        refuse_from_inside(self)
        return self.scope, self.admission

    def check_admitted(self, admission: Admission) -> None:
        """Give the place back that a call waited for, if the deployment was stopped meanwhile.

        Raises:
            EngineClosedError: it was.
        """
        if self.state == "stopped":
            admission.release()
            self.counts["failed"] += 1
            raise self.stopped_error()

    def one_value(self, graph: Graph[..., Any], verb: str) -> Wired:
        """Return the actors of a graph whose calls give one value.

        Raises:
            PlanError: it is not part of this deployment, or gives streams.
        """
        if graph in self.wired_streams:
            raise gives_stream(graph, verb)
        if graph not in self.wired:
            raise self._not_deployed(graph)
        return self.wired[graph]

    def values(self, graph: Graph[..., Any]) -> Wired:
        """Return the actors of a graph whose calls give streams.

        Raises:
            PlanError: it is not part of this deployment, or gives one value.
        """
        if graph in self.wired:
            raise gives_one_value(graph, "service")
        if graph not in self.wired_streams:
            raise self._not_deployed(graph)
        return self.wired_streams[graph]

    def all_wired(self) -> Iterator[Wired]:
        """Yield the actors of every graph."""
        yield from self.wired.values()
        yield from self.wired_streams.values()

    def _not_deployed(self, graph: Graph[..., Any]) -> PlanError:
        return PlanError(
            f"graph {graph.name!r} is not part of this deployment of {self.names}; deploy them together: "
            f"engine.deploy({self.names}, {graph.name})"
        )

    @property
    def runtime(self) -> "Runtime":
        """The inside of its Engine."""
        return self._runtime

    @property
    def service(self) -> "Deployment":
        """What its calls belong to: itself."""
        return self

    async def admit(self, call: Call[Any], priority: int) -> tuple[Scope, Wired, int]:
        """Wait for a place for a call that gives a stream; returns the scope, the actors and the call's number."""
        scope, admission = self.check_callable()
        wired = self.values(call.graph)
        if not admission.reserve_nowait():
            await admission.reserve(priority, call.graph.name)
            self.check_admitted(admission)
        self.items += 1
        return scope, wired, self.items - 1

    def begun(self, frame: Frame) -> None:
        """A call is in flight."""
        self.live.add(frame)

    async def call_ended(self) -> None:
        """A call that gave a stream has ended; the scope goes on."""

    def frame_settled(self, frame: Frame) -> None:
        """Nothing runs for a call any more."""
        self.live.discard(frame)
        self._count(frame)
        assert self.admission is not None
        self.admission.release()
        if not self.live:
            self.change()

    def stream_opened(self, pipeline: "Pipeline") -> None:
        """Have a stream belong to this deployment."""
        pipeline.window.service = self
        self._streams.add(pipeline)
        pipeline.on_closed = self._stream_closed
        pipeline.on_item_settled = self._item_settled

    def _count(self, frame: Frame) -> None:
        expired = frame.state == "failed" and isinstance(frame.error, DeadlineExceeded)
        self.counts["expired" if expired else frame.state] += 1

    def _item_settled(self, frame: Frame) -> None:
        self._count(frame)
        self.change()

    def _stream_closed(self, pipeline: "Pipeline") -> None:
        self._streams.discard(pipeline)
        self.change()

    def change(self) -> None:
        """Have those look again who wait for something here."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _is_stopped(self) -> bool:
        return self.state == "stopped"

    def _is_busy(self) -> bool:
        """Whether accepted calls have not ended; those of a stream may end unread."""
        return bool(self.live or self._queued() or any(p.window.running for p in self._streams))

    def _queued(self) -> int:
        return 0 if self.admission is None else self.admission.statistics().queued

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

    __slots__ = ("outcome_known", "service")

    def __init__(self, service: Deployment, outcome_known: "asyncio.Future[None]") -> None:
        self.service = service
        self.outcome_known = outcome_known

    def frame_done(self, frame: Frame) -> None:
        """Release the caller at once."""
        frame.crew.close()
        if not self.outcome_known.done():
            self.outcome_known.set_result(None)
        if frame.error is not None and not isinstance(frame.error, Exception):
            self.service.abort_soon()  # KeyboardInterrupt and SystemExit end the scope
        if frame.settled:
            self.service.frame_settled(frame)

    def frame_settled(self, frame: Frame) -> None:
        """Give the place back, now that nothing runs for the call any more."""
        self.service.frame_settled(frame)
