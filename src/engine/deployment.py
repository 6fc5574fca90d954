"""Deployment, the state behind a Service: its graphs, its calls in flight, and its life from start to stop."""

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from opentelemetry.trace import Span

from .._errors import (
    DeadlineExceeded,
    DeploymentFailed,
    EngineClosedError,
    EngineLoopError,
    Interrupted,
    NotFinished,
    Overloaded,
    PenstockError,
    PlanError,
)
from ..actors import current
from ..actors.frame import Frame
from ..actors.node_actor import NodeActor
from ..actors.supervision import SupervisorFlags
from ..actors.tasks import Condition, start_task, uninterrupted
from ..telemetry import logs, metrics, names, spans
from ..telemetry.metrics import Reading, series
from .admission import Admission, FairAdmission, FairShares, Share
from .call import RunningCall
from .detached import DetachedCalls
from .graph import NO_KEY, DurableKey, Graph, check_key, gives_stream
from .instances import stateful_nodes
from .nesting import context_owned_by, owner_deployments, refuse_from_inside
from .open_resources import Opening
from .options import ExecutionOptions
from .program import Program, Wired
from .scope import Runtime, Scope
from .wiring import warm_up

if TYPE_CHECKING:
    from .pipeline import Pipeline


ServiceState = Literal["starting", "ready", "draining", "stopped"]
"""The values of `service.state`."""


class Deployment:
    """Graphs made resident: the life of one deployment, from starting to stopped, and its calls in flight.

    Attributes:
        runtime: the shared state of its Engine.
        names: the names of the graphs, for messages.
        wired: the actors of each graph, with their plans from the start; later rebindings do not change these plans.
        ready: the actors of each graph whose calls give one value and need no key.
        state: "starting", "ready", "draining" or "stopped".
        scope: the scope of its calls; None before `start`.
        admission: the places of the deployment, from `start` on.
        by_key: whether the places are shared fairly between the keys of calls.
        live: the calls in flight, with the accounts of their keys; without the items of streams of calls.
        numbers: the numbers of the next calls.
        counts: how many calls and items have ended, by their outcome.
        detached: the detached calls.
    """

    admission: Admission

    def __init__(
        self,
        runtime: Runtime,
        graphs: tuple[Graph[..., Any], ...],
        options: ExecutionOptions,
        flags: SupervisorFlags,
        *,
        warms_up: bool = False,
        shares: FairShares | None = None,
    ) -> None:
        self.runtime = runtime
        self.names = ", ".join(graph.name for graph in graphs)
        self.wired: dict[Graph[..., Any], Wired] = {}
        self.ready: dict[Graph[..., Any], Wired] = {}
        self._graphs = graphs
        self._options = options
        self._shares = shares
        self.by_key = shares is not None
        self._flags = flags
        self._warms_up = warms_up
        self._failure: Callable[[str], DeploymentFailed] | None = None
        self._close_error: Exception | None = None
        self.state: ServiceState = "starting"
        self.scope: Scope | None = None
        self.live: dict[Frame, Share | None] = {}
        self.numbers = itertools.count()
        self.counts = {"done": 0, "failed": 0, "cancelled": 0, "expired": 0, "interrupted": 0, "running": 0}
        self._streams: set[Pipeline] = set()
        self._preparing: set[asyncio.Timeout] = set()  # the timers of calls that wait for a resource to be reopened
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._changed = Condition()
        self.detached = DetachedCalls(self._changed)

    def counters(self) -> Iterable[Reading]:
        """Yield how many calls the deployment has refused, for metrics."""
        of = names.GRAPH, self.names
        yield series(names.METRIC_DEPLOYMENT_REFUSED, of), self.admission.statistics().refused, None

    def levels(self) -> Iterable[Reading]:
        """Yield how many places are taken, and how many calls wait, for metrics."""
        now, of = self.admission.statistics(), (names.GRAPH, self.names)
        yield series(names.METRIC_DEPLOYMENT_IN_FLIGHT, of), now.in_flight, None
        yield series(names.METRIC_DEPLOYMENT_MAX_IN_FLIGHT, of), now.max_in_flight, None
        yield series(names.METRIC_DEPLOYMENT_QUEUED, of), now.queued, None

    def frames(self) -> Iterable[Frame]:
        """Return the calls for which handlers may still run, without the items of its streams."""
        return self.live

    def actors(self) -> list[NodeActor]:
        """Return the actors of all its graphs."""
        return [] if self.scope is None else self.scope.wiring.actors()

    async def start(self) -> None:
        """Make the actors and enter the stateful nodes.

        Raises:
            EngineClosedError: the deployment was started before, or was stopped, perhaps while it started.
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
        context = context_owned_by(self)
        self.scope = context.run(partial(Scope, is_admitted=True), self.runtime, options, scheduler, self._flags)
        self.scope.on_failed = self._fail
        places = self.scope.loop, options.max_in_flight, options.max_queue
        self.admission = Admission(*places) if self._shares is None else FairAdmission(*places, self._shares)
        self.scope.wiring.admitted = self.admission.taken
        if options.collect_metrics:
            metrics.opened(self)
        # In a task of its own, so that an abort can cancel the start without cancelling the caller.
        preparing = self._prepare(self.scope)
        self._starting = start_task(self.scope.loop, preparing, name="penstock-service-start", context=context)
        try:
            await asyncio.wait([self._starting])
            if self._is_stopped():
                raise self.stopped_error()
            self._starting.result()
            self.scope.uptime.restart()
            self.state = "ready"
            self._changed.notify_all()
        finally:
            if not self._is_ready():
                await uninterrupted(self.abort_soon())

    async def _prepare(self, scope: Scope) -> None:
        """Make the actors, and enter the stateful nodes.

        Raises:
            Exception: a graph cannot be traced or deployed, or a stateful node did not start.
        """
        for graph in self._graphs:
            plan = graph._planned(scope.options)
            for node in stateful_nodes(plan):
                if node.policy.ordered:
                    raise PlanError(
                        f"graph {graph.name!r} cannot be deployed: node {node.name!r} has ordered=True, and the calls "
                        "of a deployment have no order; use engine.stream(calls)"
                    )
            wired = self.wired[graph] = await scope.prepare(plan)
            if self._warms_up:
                await warm_up(wired.program, scope.engine.pools, scope.options.device_strategy)
            if not plan._gives_stream and plan._durable is None:
                self.ready[graph] = wired

    def one_value(self, graph: Graph[..., Any], verb: str, asked: DurableKey = NO_KEY) -> Wired:
        """Return the actors of a graph whose calls give one value.

        Raises:
            PlanError: the graph is not part of this deployment, or its calls give streams.
            OptionsError: the graph has a durable loop and the call has no key, or the call has a key and the graph has
                no durable loop.
        """
        wired = self.deployed(graph)
        if wired.program.plan._gives_stream:
            raise gives_stream(graph, verb)
        check_key(wired.program.plan, verb, asked)
        return wired

    def deployed(self, graph: Graph[..., Any]) -> Wired:
        """Return the actors of a graph.

        Raises:
            PlanError: the graph is not part of this deployment.
        """
        if graph not in self.wired:
            raise PlanError(
                f"graph {graph.name!r} is not part of this deployment of {self.names}; deploy them together: "
                f"engine.deploy({self.names}, {graph.name})"
            )
        return self.wired[graph]

    async def wait_ready(self) -> None:
        """Wait until calls are served.

        Raises:
            EngineClosedError: the deployment failed to start, or was stopped.
        """
        await self._changed.wait_for(lambda: self.state != "starting")
        if self._is_stopped():
            raise self.stopped_error()

    async def drain(self, timeout_seconds: float | None) -> None:
        """Refuse new calls, finish the accepted calls, and stop.

        Raises:
            DeploymentFailed: stateful nodes crashed too often.
            Exception: a stateful node could not be left.
        """
        refuse_from_inside(self)
        if self.state == "ready":
            self.state = "draining"
            for stream in self._streams:
                stream.finish()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait_for(lambda: self.state != "draining" or not self._is_busy())
        except TimeoutError:
            pass
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Refuse new calls, end the calls in flight, and stop; wait until all handlers and instances have ended.

        Raises:
            DeploymentFailed: stateful nodes crashed too often.
            Exception: a stateful node could not be left.
        """
        await self.end()
        self.check_failed()

    async def end(self) -> None:
        """Do as `abort` does, but do not raise `DeploymentFailed`.

        Raises:
            Exception: a stateful node could not be left.
        """
        refuse_from_inside(self)
        await uninterrupted(self.abort_soon())

    async def wait_stopped(self) -> None:
        """Wait until the deployment is stopped.

        Raises:
            DeploymentFailed: stateful nodes crashed too often.
        """
        await self._changed.wait_for(self._is_stopped)
        self.check_failed()

    def abort_soon(self) -> "asyncio.Task[None]":
        """Refuse new calls from now on, and start to end the calls in flight; return the task that ends them."""
        self.state = "stopped"
        self._changed.notify_all()
        if self._stopping is None:
            self._stopping = start_task(asyncio.get_running_loop(), self._stop(), name="penstock-service-stop")
        return self._stopping

    async def _stop(self) -> None:
        if self.scope is None or self._starting is None:
            return  # the deployment was never entered
        self._starting.cancel()
        await asyncio.wait([self._starting])
        if not self._starting.cancelled():
            self._starting.exception()  # marks it as retrieved: `start` raises it, or raises `stopped_error`
        await self._end_calls()
        try:
            await self.scope.close()
        except Exception as error:
            if self._failure is None:
                raise
            if error is self.stopped_error().__cause__:  # the same crash that made the deployment fail
                return
            # The reason for the failure matters more to the caller than an error of closing, which becomes a note.
            self._close_error = error
            logs.warning("deployment.not_released", deployment=self.names, error=error)
        finally:
            self.runtime.deployments.discard(self)
            metrics.registry.closed(self)

    def _fail(self, make_error: "Callable[[str], DeploymentFailed]") -> None:
        """End the deployment, because stateful nodes crash too often; later calls are refused with that reason."""
        if self._stopping is None:
            self._failure = make_error
            self.abort_soon()

    def check_failed(self) -> None:
        """Raise DeploymentFailed if stateful nodes crashed too often."""
        if self._failure is not None:
            raise self.stopped_error()

    def check_callable(self) -> Scope:
        """Check that a call may be made now; return the scope.

        Raises:
            EngineClosedError: the deployment was not started, or takes no more calls.
            EngineLoopError: the deployment runs on another event loop.
            ReentrantCallError: a node of this deployment makes the call.
        """
        scope = self.scope
        if scope is None:
            raise EngineClosedError(
                "this deployment was not started; enter it first: async with engine.deploy(...) as service"
            )
        if self.state != "ready":
            raise self.stopped_error()
        if asyncio._get_running_loop() is not scope.loop:  # None where no loop runs
            raise EngineLoopError("this deployment runs on another event loop than this code; call it from there")
        if current.source.get() is not None or owner_deployments.get():
            refuse_from_inside(self)
        return scope

    # The calls in flight.

    async def admit(
        self, graph: Graph[..., Any], arguments: tuple[Any, ...], wired: Wired, priority: int, deadline: float | None,
        span: Span | None = None,
    ) -> Share | None:  # fmt: skip
        """Wait until a call may begin, and take a place for it; count the call if it gets no place.

        Args:
            graph: the graph of the call.
            arguments: the arguments of the call.
            wired: the actors of the graph.
            priority: the priority of the call.
            deadline: the deadline of the call, on the clock of the event loop; None without a deadline.
            span: the span in which the waits of the call are noted; None for no note.

        Returns:
            The account of the key of the call; None without keys.

        Raises:
            Overloaded: the queue is full.
            DeadlineExceeded: the call could not begin before its deadline.
            EngineClosedError: the deployment was stopped meanwhile.
            Exception: the error of the function `key=`, or of a resource that did not open.
        """
        await self.restored(wired, deadline, span)
        try:
            share = self.admission.share_of(graph, arguments)
        except Exception:
            self.counts["failed"] += 1
            raise
        if not self.admission.reserve_nowait(share):
            began = perf_counter()
            timer = asyncio.timeout_at(deadline)
            too_late = f"the call of graph {graph.name!r} got no place before its deadline"
            try:
                # Admission counts the calls that it refuses.
                await self._wait(self.admission.reserve(priority, graph.name, share), timer, too_late, (Overloaded,))
            finally:  # a call that failed here may have had a place for a moment
                self._changed.notify_all()
                if not isinstance(sys.exception(), Overloaded):
                    spans.waited(span, names.ADMISSION_WAIT, began)
        if self._is_stopped():
            self.admission.release(share)
            self.counts["failed"] += 1
            raise self.stopped_error()
        return share

    async def _wait(
        self, needed: Awaitable[None], timer: asyncio.Timeout, too_late: str, counted: tuple[type[Exception], ...] = ()
    ) -> None:
        """Await `needed` before a call begins; if that fails, count the call, except for errors counted elsewhere."""
        try:
            async with timer:
                await needed
        except counted:
            raise
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        except BaseException as error:
            is_over = isinstance(error, TimeoutError) and timer.expired()
            self.counts["expired" if is_over and not self._is_stopped() else "failed"] += 1
            if not is_over:
                raise
            raise (self.stopped_error() if self._is_stopped() else DeadlineExceeded(too_late)) from error

    def begun(self, frame: Frame, share: Share | None) -> None:
        """Add a call with a place to the calls in flight, so that the end of the deployment ends the call."""
        if share is not None:
            frame.key = share.key
        self.live[frame] = share

    def settled(self, frame: Frame) -> None:
        """Count a call whose last handler has ended, and give back its place."""
        share = self.live.pop(frame)
        if frame.state == "done":
            self.counts["done"] += 1
        else:
            self._count(frame)
        self.admission.release(share)
        if not self.live:
            self._changed.notify_all()

    def stream_opened(self, stream: "Pipeline") -> None:
        """Keep a stream of calls until it is closed, and count its items."""
        self._streams.add(stream)
        stream.on_closed = self._stream_closed
        stream.on_item_settled = self._item_settled

    def _count(self, frame: Frame) -> None:
        state = frame.state
        if isinstance(frame.error, Interrupted):
            state = "interrupted"
        elif isinstance(frame.error, NotFinished):
            state = "cancelled"
        elif state != "done" and frame.has_expired:
            state = "expired"
        self.counts[state] += 1

    def _item_settled(self, frame: Frame) -> None:
        self._count(frame)
        self._changed.notify_all()

    def _stream_closed(self, stream: "Pipeline") -> None:
        self._streams.discard(stream)
        self._changed.notify_all()

    async def _end_calls(self) -> None:
        """End all calls and streams, each with an error of its own, and wait until the streams are closed.

        Calls that wait for a resource or a place end at once, before the handlers of the calls in flight have unwound.
        """
        self.admission.end(self.stopped_error)
        for timer in self._preparing:
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time())
        for frame in list(self.live):
            if frame.state == "running":  # the handlers of other calls are unwinding already
                frame.fail(self._interrupted_error())
        streams = list(self._streams)
        for stream in streams:
            stream.abort(self._interrupted_error())
        for stream in streams:
            await stream.gone()
        await self.detached.end(self._interrupted_error)

    async def restored(self, wired: Wired, deadline: float | None = None, span: Span | None = None) -> Wired:
        """Return the actors of a graph; first reopen the resources of the graph that have ended by themselves.

        The wait is noted in `span`, if there is one.

        Raises:
            DeadlineExceeded: the resources were not open before the deadline.
            EngineClosedError: the deployment was stopped meanwhile.
            Exception: the error of a resource that did not open; the next call tries again.
        """
        if wired.program.is_filled:
            return wired
        self.check_callable()
        timer = asyncio.timeout_at(deadline)
        too_late = f"the resources of graph {wired.program.name!r} were not opened again before the deadline of a call"
        self._preparing.add(timer)
        began = perf_counter()
        try:
            await self._wait(self._reopen(wired.program), timer, too_late)
        finally:
            spans.waited(span, names.OPEN_WAIT, began)
            self._preparing.discard(timer)
            self._changed.notify_all()
        return wired

    async def reopen(self, opening: Opening) -> None:
        """Reopen a resource that has ended by itself, and all other such resources of a graph that uses it.

        Raises:
            EngineClosedError: the deployment was stopped, perhaps meanwhile.
            Exception: the error of a resource that did not open.
        """
        if self.state != "ready":
            raise self.stopped_error()
        await self._reopen(next(one.program for one in self.wired.values() if opening in one.program.resources))

    async def _reopen(self, program: Program) -> None:
        resources, caller = self.runtime.resources, object()
        try:
            # The scope of the deployment may close meanwhile, so the caller holds the resources.
            await resources.hold(program, caller)
        finally:
            await resources.release(caller)
        if self._is_stopped():
            raise self.stopped_error()

    def _is_stopped(self) -> bool:
        return self.state == "stopped"

    def _is_ready(self) -> bool:
        # A function, because type checkers assume that an await does not change the state.
        return self.state == "ready"

    def _is_busy(self) -> bool:
        """Whether accepted calls have not ended. An item of a stream ends before its result is read."""
        if self._preparing or self.detached.running or not self.admission.is_idle:
            return True
        return any(stream.window.running for stream in self._streams)

    def _interrupted_error(self) -> PenstockError:
        if self._failure is not None:
            return self.stopped_error()
        return EngineClosedError("this deployment was stopped while the call was in flight")

    def stopped_error(self) -> PenstockError:
        """Return the error for calls made while the deployment is not ready."""
        if self._failure is not None:
            error = self._failure(f"the deployment of {self.names}")
            if self._close_error is not None:
                error.add_note(f"and its stateful nodes could not be left: {logs.shown(self._close_error)}")
            return error
        return EngineClosedError(f"the deployment of {self.names} is {self.state} and takes no more calls")


class ServiceCall(RunningCall):
    """A call to a deployment."""

    _deployment: Deployment
    outcome_known: "asyncio.Future[None]"

    def admitted(self, deployment: Deployment, scope: Scope, share: Share | None) -> None:
        """Note that the call has a place, and which objects to tell of its end; call this before `launch`."""
        self._deployment = deployment
        self.outcome_known = scope.loop.create_future()
        self.join(scope)
        deployment.begun(self, share)

    @property
    def service(self) -> Deployment:
        """The deployment that is called."""
        return self._deployment

    def frame_done(self, frame: Frame) -> None:
        """Release the caller at once."""
        self.closed = True
        if self.workers:  # nearly always one worker, which runs this code; no worker after a detached step
            if self._idle:
                self.close()
        else:
            self.ended()
        if not self.outcome_known.done():
            self.outcome_known.set_result(None)
        if self.state != "done" and self.ends_program:
            self._deployment.abort_soon()
        if not self.unwinding:
            self._deployment.settled(self)

    def frame_settled(self, frame: Frame) -> None:
        """Give back the place: the last handler of the call has ended."""
        self._deployment.settled(self)
