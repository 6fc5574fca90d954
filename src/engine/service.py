"""Service: resident graphs that many callers share."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from .._errors import DeploymentFailed
from ..actors.accepted import SWITCH, TIMEOUT, check
from ..actors.supervision import SupervisorFlags
from ..telemetry import metrics, spans
from ..telemetry.counters import ActorStatistics
from ..telemetry.rendered import Rendered
from ..telemetry.tables import to_html as table_to_html
from ..telemetry.tables import to_text as table_to_text
from . import drawing
from .admission import AdmissionStatistics
from .deployment import Deployment, ServiceCall, ServiceState
from .drawing import Drawing
from .graph import Call, Graph, as_call, as_graph
from .node import Node
from .open_resources import reload
from .options import CallOptions, ExecutionOptions, resolve, scoped_options
from .picture import drawing_of, running_drawing
from .pipeline import Pipeline, is_shown
from .scope import Wired
from .source import Calls
from .statistics import Bottleneck, actors_less, find_bottleneck, since
from .streaming import CallsStream, Stream
from .tables import service_summary
from .values import DeploymentScope, StreamingCall, ValuesStream

if TYPE_CHECKING:
    from ..telemetry.tables import Table
    from .engine import Runtime


def to_text(statistics: "ServiceStatistics", graphs: "Iterable[Graph[..., Any]]", deployment: "Deployment") -> str:
    """Return the totals and the drawings of the graphs."""
    drawings = map(drawing.to_text, _drawings(statistics, graphs, deployment))
    return "\n\n".join([table_to_text(service_summary(statistics)), *drawings])


def to_html(statistics: "ServiceStatistics", graphs: "Iterable[Graph[..., Any]]", deployment: "Deployment") -> str:
    """Return the totals and the drawings of the graphs, for a notebook."""
    drawings = map(drawing.to_svg, _drawings(statistics, graphs, deployment))
    return "\n".join([table_to_html(service_summary(statistics)), *drawings])


def _drawings(
    statistics: "ServiceStatistics", graphs: "Iterable[Graph[..., Any]]", deployment: "Deployment"
) -> Iterator[Drawing]:
    for graph in graphs:
        wired = deployment.graphs.find(graph)
        if wired is None or deployment.scope is None:  # not started yet
            yield drawing_of(graph._present_trace())
        else:
            yield running_drawing(wired.program.plan, deployment.scope.wiring, statistics.elapsed_seconds)


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class ServiceStatistics(Rendered):
    """A snapshot of a deployment. It shows itself as a table: printed, with rich, and in a notebook.

    Attributes:
        state: starting, ready, draining or stopped.
        completed: calls that ended with a result.
        failed: calls that ended with another error than `DeadlineExceeded`.
        cancelled: calls whose caller went away.
        admission: places, and who waits for one.
        actors: the nodes.
        elapsed_seconds: the time that the counters cover: since it is ready, until it stopped; None before.
        bottleneck: the node that limits it, on average over that time; None if the counters do not say.
        expired: calls that ended with `DeadlineExceeded`, those that got no place in time too. So
            `completed + failed + cancelled + expired + admission.refused` is how many calls of `run`, and of `stream`
            of one call, have ended, and how many items of the other streams.
    """

    state: ServiceState
    completed: int
    failed: int
    cancelled: int
    admission: AdmissionStatistics
    actors: tuple[ActorStatistics, ...]
    elapsed_seconds: float | None = None
    expired: int = 0

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The node that limits it, on average; None if the counters do not say."""
        return find_bottleneck(self.actors, self.elapsed_seconds)

    def since(self, earlier: "ServiceStatistics") -> "ServiceStatistics":
        """Return what happened after an earlier look: counters less what they were then, all else as it is now.

        Raises:
            ValueError: `earlier` is not an earlier look at the same deployment.
        """
        return replace(
            since(self, earlier, "completed", "failed", "cancelled", "expired", "elapsed_seconds"),
            admission=since(self.admission, earlier.admission, "admitted", "refused"),
            actors=actors_less(self.actors, earlier.actors),
        )

    def _table(self) -> "Table":
        from .tables import service_table

        return service_table(self)


class Service(Generic[P, R]):
    """Graphs made resident by `engine.deploy`: one set of actors and stateful nodes for all calls.

    An async context manager: a normal exit drains it, an exception aborts it. It raises `DeploymentFailed` if stateful
    nodes crashed more often than it restarts them.
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
        for graph in graphs:
            as_graph(graph, "engine.deploy")
        check("warmup", warms_up, SWITCH)
        self._runtime = runtime
        self._graphs = graphs
        self._options = options
        self._deployment = Deployment(runtime, graphs, options, flags, warms_up=warms_up)

    @property
    def state(self) -> ServiceState:
        """Return "starting", "ready", "draining" or "stopped"."""
        return self._deployment.state

    def __str__(self) -> str:

        return to_text(self.statistics(), self._graphs, self._deployment)

    def _repr_html_(self) -> str:

        return to_html(self.statistics(), self._graphs, self._deployment)

    async def __aenter__(self) -> Self:
        await self._deployment.start()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            await self.drain()
            return
        await self._deployment.end()
        # A cancellation of the caller must go on; and it may be this very failure that has come here.
        if issubclass(exc_type, Exception) and not issubclass(exc_type, DeploymentFailed):
            self._deployment.check_failed()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the first of the deployed graphs; `await` the result. Raises as `run` does."""
        # Not an `async def` itself: a second coroutine around `_run` would cost as much as a hop.
        graph = self._graphs[0]
        if scoped_options():
            return self.run(graph(*args, **kwargs))
        return self._run(graph, graph._arguments(args, kwargs), None, self._options)

    async def run(self, call: Call[T], /, **options: Unpack[CallOptions]) -> T:
        """Run one call of a deployed graph.

        Args:
            call: the call.
            **options: `timeout_seconds`, `priority` and `trace_execution`.

        Raises:
            Overloaded: every place and every place in the queue is taken.
            TimeoutError: the call did not finish within `timeout_seconds`, waiting for a place included.
            ReentrantCallError: called from inside one of its own nodes.
            EngineClosedError: the deployment is draining or stopped.
            DeploymentFailed: its stateful nodes crashed more often than it restarts them.
            PlanError: the graph is not part of the deployment.
        """
        merged = self._options  # as it is nearly always
        if options or scoped_options():
            merged = resolve("service.run", options, self._inherited())
        call = as_call(call, "service.run")
        result: T = await self._run(call.graph, call.arguments, call._trace_headers, merged)
        return result

    @overload
    def stream(
        self, call: Call[AsyncIterator[T]], /, *, progress: bool = False, **options: Unpack[CallOptions]
    ) -> Stream[T]: ...
    @overload
    def stream(
        self,
        calls: Iterable[Call[T]] | AsyncIterable[Call[T]],
        /,
        *,
        progress: bool = False,
        **options: Unpack[CallOptions],
    ) -> Stream[T]: ...
    def stream(self, calls: Any, /, *, progress: bool = False, **options: Unpack[CallOptions]) -> Stream[Any]:
        """Run many calls of deployed graphs, and yield their results in input order; or yield the values of one call.

        Args:
            calls: the calls; or one call, of a graph that returns an `AsyncIterator`.
            progress: whether a bar shows how it gets on; see `penstock.engine.stream`.
            **options: `timeout_seconds`, `priority`, `trace_execution`; of many calls also `ordered`, `on_error`,
                `trace_items`, and `max_in_flight` of this stream.

        Raises:
            OptionsError: an option is unknown or does not apply.
            PlanError: the graph is not part of the deployment, or the only call gives one value.
        """
        self._deployment.check_callable()
        shows_progress = is_shown(progress)
        if isinstance(calls, Call):
            call: Call[Any] = calls  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of it
            self._deployment.graphs.values(call.graph)
            merged = resolve("service.stream(call)", options, self._inherited())
            return ValuesStream(partial(self._streaming_call, call, merged), shows_progress=shows_progress)
        merged = resolve("service.stream", options, self._inherited())
        return CallsStream(self._runtime, calls, merged, self._pipeline, shows_progress=shows_progress)

    async def map(
        self, calls: Iterable[Call[T]], /, *, progress: bool = False, **options: Unpack[CallOptions]
    ) -> list[T]:
        """Run many calls of deployed graphs; returns their results in input order."""
        async with self.stream(calls, progress=progress, **options) as results:
            return await results._collect()

    async def wait_ready(self) -> None:
        """Wait until calls are served.

        Raises:
            EngineClosedError: the deployment failed to start, or was stopped.
            DeploymentFailed: its stateful nodes crashed more often than it restarts them.
        """
        await self._deployment.wait_ready()

    async def wait_stopped(self) -> None:
        """Wait until it is stopped: what a server does that has nothing else to wait for.

        Returns when it was drained or aborted. Its stateful nodes may still be closing then; the end of the
        `async with` waits for that. A task of one of its own nodes may wait here as well.

        Raises:
            DeploymentFailed: its stateful nodes crashed more often than it restarts them; at once, so that whoever
                supervises the program is told.
        """
        await self._deployment.wait_stopped()

    async def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Refuse new calls, finish those that were accepted, and stop; what is left after the timeout is aborted.

        Args:
            timeout_seconds: how long to wait for accepted calls; None for as long as they take.

        Raises:
            OptionsError: `timeout_seconds` is no such number.
            ReentrantCallError: called from inside one of its own nodes.
            DeploymentFailed: its stateful nodes crashed more often than it restarts them.
        """
        check("timeout_seconds", timeout_seconds, TIMEOUT)
        await self._deployment.drain(timeout_seconds)

    async def abort(self) -> None:
        """Refuse new calls, end those in flight with `EngineClosedError`, and stop; waits until nothing is left.

        Raises:
            ReentrantCallError: called from inside one of its own nodes.
            DeploymentFailed: its stateful nodes crashed more often than it restarts them.
        """
        await self._deployment.abort()

    async def reload(self, resource: Node[..., Any], /) -> None:
        """Open a resource anew, and give it to the calls that are admitted from now on; no call is dropped or fails.

        Calls in flight keep the one that they began with; it is closed after the last of them. A resource belongs to
        the Engine, so whatever else uses it with the same arguments there gets the new one as well.

        Args:
            resource: the resource; it is opened for each distinct arguments that the deployment uses it with.

        Raises:
            PlanError: the deployment does not use it; the message names those that it does.
            EngineClosedError: the deployment is not ready.
            Exception: what an opening raised; the old ones stay in place then.
        """
        await reload(self._deployment, resource)

    def statistics(self) -> ServiceStatistics:
        """Return a snapshot of the counters."""
        deployment = self._deployment
        scope, in_flight = deployment.scope, deployment.in_flight
        if scope is None or in_flight is None:
            empty = AdmissionStatistics(0, self._options.max_in_flight, 0, self._options.max_queue, 0, 0, None)
            return ServiceStatistics(self.state, 0, 0, 0, empty, ())
        return ServiceStatistics(
            self.state,
            in_flight.counts["done"],
            in_flight.counts["failed"],
            in_flight.counts["cancelled"],
            in_flight.admission.statistics(),
            tuple(actor.statistics() for actor in scope.wiring.actors()),
            None if self.state == "starting" else scope.uptime.seconds,
            in_flight.counts["expired"],
        )

    async def _run(
        self,
        graph: Graph[..., Any],
        arguments: tuple[Any, ...],
        headers: Mapping[str, str] | None,
        options: ExecutionOptions,
    ) -> Any:
        deployment = self._deployment
        scope, in_flight = deployment.check_callable()
        call = ServiceCall(deployment, scope, in_flight, graph.name, options, headers)
        if self._options.collect_metrics and metrics.are_recorded():
            call.count()
        try:
            wired = deployment.graphs.ready.get(graph)
            if wired is None:
                wired = deployment.graphs.one_value(graph, "service.run")
                await deployment.restored(wired, graph, call.ends_at)
            if not in_flight.admission.reserve_nowait():
                began = perf_counter()
                await in_flight.reserve(graph.name, call.priority, call.ends_at)
                spans.admitted(call.run_span, perf_counter() - began)
                deployment.check_admitted(in_flight)
        except BaseException as error:
            call.report("running", error)
            raise
        scope.groups.add(call)
        in_flight.live.add(call)
        item = in_flight.items
        in_flight.items = item + 1
        call.launch(wired, arguments, item, scope.engine.eager_starts)
        del arguments  # the handlers let go of them when they have been read
        try:
            await call.outcome_known
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            call.report()
        return call.outcome()

    async def _deployed(self, graph: Graph[..., Any]) -> Wired:
        deployment = self._deployment
        return await deployment.restored(deployment.graphs.one_value(graph, "service.stream of many calls"), graph)

    def _pipeline(self, calls: Calls, options: ExecutionOptions) -> Pipeline:
        scope, in_flight = self._deployment.check_callable()
        pipeline = Pipeline(
            scope, calls, options, prepare=self._deployed, owns_scope=False, admission=in_flight.admission
        )
        pipeline.window.service = self._deployment
        in_flight.stream_opened(pipeline)
        return pipeline

    def _streaming_call(self, call: Call[Any], options: ExecutionOptions) -> StreamingCall:
        return StreamingCall(DeploymentScope(self._deployment), call, options)

    def _inherited(self) -> dict[str, Any]:
        options = self._options
        return {
            "timeout_seconds": options.timeout_seconds,
            "max_in_flight": options.max_in_flight,
            "trace_execution": options.trace_execution,
            "trace_items": options.trace_items,
            "collect_metrics": options.collect_metrics,
        }
