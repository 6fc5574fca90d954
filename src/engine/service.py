"""Service: resident graphs that many callers share."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Generic, Never, ParamSpec, Self, TypeAlias, TypeVar, Unpack, overload

from .._errors import DeploymentFailed, EngineClosedError, EngineLoopError, PlanError
from ..actors.accepted import SWITCH, TIMEOUT, check
from ..actors.frame import Frame
from ..actors.supervision import SupervisorFlags
from ..actors.tasks import ContextTask, start_task, uninterrupted
from ..telemetry import logs, metrics, spans
from ..telemetry.counters import ActorStatistics, share
from ..telemetry.rendered import Rendered
from ..telemetry.tables import Table, count, of, rate
from ..telemetry.tables import to_html as table_to_html
from ..telemetry.tables import to_text as table_to_text
from . import drawing
from .admission import AdmissionStatistics, FairShares, keys_less
from .deployment import Deployment, ServiceCall, ServiceState
from .drawing import Drawing
from .events import Event, EventBuffer, Value
from .graph import (
    Call,
    Graph,
    as_call,
    check_key,
    durable_call,
    gives_one_value,
    refuse_key,
    time_left,
)
from .nesting import departed
from .node import Node, is_node
from .open_resources import Entry, Opening
from .options import CallOptions, ExecutionOptions, resolve, scoped
from .picture import drawing_of
from .pipeline import Pipeline, is_shown
from .program import Plan, Wired
from .resource import Resource
from .scope import Runtime
from .source import Calls
from .statistics import Bottleneck, actors_less, find_bottleneck, since
from .streaming import CallsStream, Stream
from .tables import mean_rate, or_unknown, table_of
from .tracing.template import is_known, value_of
from .tracing.tracer import Trace
from .values import DeploymentScope, EventStream, StreamingCall, check_events, stream_of
from .wiring import Wiring


def to_text(statistics: "ServiceStatistics", graphs: Iterable[Graph[..., Any]], deployment: Deployment) -> str:
    """Return the totals of a deployment and a drawing of each of its graphs, as text."""
    drawings = map(drawing.to_text, _drawings(statistics, graphs, deployment))
    return "\n\n".join([table_to_text(_summary(statistics)), *drawings])


def to_html(statistics: "ServiceStatistics", graphs: Iterable[Graph[..., Any]], deployment: Deployment) -> str:
    """Return the totals of a deployment and a drawing of each of its graphs, for a notebook."""
    drawings = map(drawing.to_svg, _drawings(statistics, graphs, deployment))
    return "\n".join([table_to_html(_summary(statistics)), *drawings])


def _drawings(
    statistics: "ServiceStatistics", graphs: Iterable[Graph[..., Any]], deployment: Deployment
) -> Iterator[Drawing]:
    for graph in graphs:
        wired = deployment.graphs.find(graph)
        if wired is None or deployment.scope is None:  # not started yet
            yield drawing_of(graph._present_trace())
        else:
            yield _running_drawing(wired.program.plan, deployment.scope.wiring, statistics.elapsed_seconds)


def _running_drawing(plan: Plan, wiring: Wiring, elapsed_seconds: float | None) -> Drawing:
    """Return the drawing of a plan with the load of its nodes.

    Args:
        plan: the plan.
        wiring: the actors of its scope.
        elapsed_seconds: the time that their counters cover; None to show no rates.
    """
    return _with_loads(drawing_of(_kept(plan)), plan, wiring, elapsed_seconds)


def _kept(plan: Plan) -> Trace:
    """Return the trace of a plan without the steps that its passes have dropped or merged."""
    steps = tuple(
        replace(step, bodies=tuple(map(_kept, planned.bodies)) if step is planned.head else step.bodies)
        for planned in plan.steps
        for step in planned.chain
    )
    return replace(plan.trace, steps=steps, result=plan.result)


def _with_loads(drawing: Drawing, plan: Plan, wiring: Wiring, elapsed_seconds: float | None) -> Drawing:
    wired = wiring.wired(plan)
    actors: dict[str, ActorStatistics] = {}
    together: dict[str, str] = {}  # each further step of a chain, and the name of the actor that runs the chain
    for unit, actor in () if wired is None else zip(wired.program.units, wired.actors, strict=True):
        if unit.step is not None:
            actors[str(unit.step.head.source)] = actor.statistics()
            together |= {str(step.source): actor.name for step in unit.step.chain[1:]}
    bodies = [body for planned in plan.steps for body in planned.bodies]
    return Drawing(
        drawing.title,
        tuple(
            replace(
                node,
                actors=(actors[node.id],) if node.id in actors else (),
                detail=_joined(node.detail, together, node.id),
            )
            for node in drawing.nodes
        ),
        tuple(
            (owner_id, _with_loads(drawn, body, wiring, elapsed_seconds))
            for (owner_id, drawn), body in zip(drawing.bodies, bodies, strict=True)
        ),
        elapsed_seconds,
    )


def _joined(detail: str, together: Mapping[str, str], node_id: str) -> str:
    return ", ".join(filter(None, [detail, f"with {together[node_id]}" if node_id in together else ""]))


def _summary(statistics: "ServiceStatistics") -> Table:
    """Return a table of the state and the totals of a deployment, without its nodes."""
    calls = [
        f"{count(statistics.completed)} completed", f"{count(statistics.failed)} failed",
        f"{count(statistics.cancelled)} cancelled", f"{count(statistics.expired)} expired",
        *([f"{count(statistics.interrupted)} interrupted"] if statistics.interrupted else []),
        mean_rate(statistics.completed, statistics.elapsed_seconds),
    ]  # fmt: skip
    facts = (
        ("service", statistics.state),
        ("calls", ", ".join(calls)),
        ("admission", _admission(statistics.admission)),
        ("bottleneck", or_unknown(statistics.bottleneck)),
    )
    return Table(facts)


def _admission(admission: AdmissionStatistics) -> str:
    parts = [
        f"{of(admission.in_flight, admission.max_in_flight)} in flight",
        f"{of(admission.queued, admission.max_queue)} queued",
        f"{count(admission.refused)} refused",
        f"{rate(admission.calls_per_second, 'calls')} while full",
    ]
    return ", ".join(parts)


P = ParamSpec("P")
E = TypeVar("E")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class ServiceStatistics(Rendered):
    """A snapshot of a deployment. It shows itself as a table: printed, with rich, and in a notebook.

    Attributes:
        state: starting, ready, draining or stopped.
        completed: how many calls ended with a result.
        failed: how many calls ended with an error other than `DeadlineExceeded`.
        cancelled: how many calls were cancelled because their caller left.
        admission: how many places are taken, and how many calls wait for one.
        actors: the nodes and their counters.
        elapsed_seconds: the time that the counters cover, in seconds: from when the deployment became ready until it
            stopped, or until now; None before it is ready.
        bottleneck: the node that limits the deployment, on average over that time; None if no inbox was full.
        expired: how many calls ended with `DeadlineExceeded`, also while they waited for a place. The sum
            `completed + failed + cancelled + expired + interrupted + admission.refused` counts each call of the
            service, each stream of values, and each item of a stream of calls that has ended.
        interrupted: how many calls ended with `Interrupted`, because a node has asked a question.
        success_rate: the share of `completed` in `completed + failed + expired`; None before the first of these.
    """

    state: ServiceState
    completed: int
    failed: int
    cancelled: int
    admission: AdmissionStatistics
    actors: tuple[ActorStatistics, ...]
    elapsed_seconds: float | None = None
    expired: int = 0
    interrupted: int = 0

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The node that limits the deployment, on average over that time; None if no inbox was full."""
        return find_bottleneck(self.actors, self.elapsed_seconds)

    @property
    def success_rate(self) -> float | None:
        """The share of `completed` in `completed + failed + expired`; None before the first of these."""
        return share(self.completed, self.failed + self.expired)

    def since(self, earlier: "ServiceStatistics") -> "ServiceStatistics":
        """Return what happened between an earlier snapshot and this one.

        Args:
            earlier: an earlier snapshot of the same deployment.

        Returns:
            The counters less those of `earlier`; all values that are no counters are as in this snapshot.

        Raises:
            ValueError: `earlier` is not an earlier snapshot of the same deployment.
        """
        admission = since(self.admission, earlier.admission, "admitted", "refused")
        return replace(
            since(self, earlier, "completed", "failed", "cancelled", "expired", "interrupted", "elapsed_seconds"),
            admission=replace(admission, keys=keys_less(self.admission.keys, earlier.admission.keys)),
            actors=actors_less(self.actors, earlier.actors),
        )

    def _table(self) -> Table:
        return table_of(_summary(self).facts, self.actors)


class Service(Generic[P, R]):
    """Graphs made resident by `engine.deploy`: one set of actors and stateful nodes for all calls.

    An async context manager: a normal exit drains the deployment, an exception aborts it. The exit raises
    `DeploymentFailed` if stateful nodes crashed more often than the deployment restarts them.
    """

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
        check("warmup", warms_up, SWITCH)
        self._runtime = runtime
        self._graphs = graphs
        self._options = options
        self._deployment = Deployment(runtime, graphs, options, flags, warms_up=warms_up, shares=shares)

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
        # A cancellation of the caller must go on. And the exception may be this failure itself, which need not be
        # raised a second time.
        if issubclass(exc_type, Exception) and not issubclass(exc_type, DeploymentFailed):
            self._deployment.check_failed()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the first of the deployed graphs: `await service(...)`.

        Returns:
            A coroutine, which returns the result of the graph and raises as `run` does.
        """
        # A plain `def`: a second coroutine around `_run` would cost as much as a hop between two nodes.
        graph = self._graphs[0]
        if scoped.get():
            return self.run(graph(*args, **kwargs))
        return self._run(graph, graph._arguments(args, kwargs), None, self._options)

    async def run(
        self,
        call: Call[T],
        /,
        *more: Never,
        key: str | None = None,
        answer: object = ...,
        **options: Unpack[CallOptions],
    ) -> T:
        """Run one call of a deployed graph.

        Args:
            call: the call; a graph without parameters may be passed itself.
            *more: nothing; arguments of the graph are part of the call.
            key: for a graph with a durable loop, the key that it is kept under; see `penstock.engine.run`.
            answer: the answer to the question that the key waits with.
            **options: `timeout_seconds`, `priority` and `trace_execution`.

        Returns:
            The result of the graph.

        Raises:
            Exception: the error of the node that failed first, with a note that names graph, node, item and attempt.
            Overloaded: all places, and all places in the queue, are taken.
            TimeoutError: the call did not finish within `timeout_seconds`, including its wait for a place.
            ReentrantCallError: a node of the deployment makes the call.
            EngineClosedError: the deployment is not ready.
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them.
            PlanError: the graph is not part of the deployment, or its calls give streams.
            OptionsError: an option is unknown or does not apply; or as for `key=` of `penstock.engine.run`.
            Interrupted: a node has asked a question; with its answer, the same key goes on.
            KeyInUse: the key is under way elsewhere.
        """
        merged = self._merged("service.run", options)
        call = as_call(call, "service.run", more)
        result: T
        if key is None and answer is ...:
            result = await self._run(call.graph, call.arguments, call._trace_headers, merged)
            return result
        self._deployment.check_callable()
        plan = self._deployment.graphs.one_value(call.graph, "service.run", key, answer).program.plan
        assert key is not None
        async with durable_call(plan, call, key, answer, self._runtime.pools.threads, merged) as kept:
            merged = time_left(merged, kept)
            result = await self._run(call.graph, call.arguments, call._trace_headers, merged, key)
        return result

    @overload
    def stream(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self,
        call: Call[AsyncIterator[T]],
        /,
        *,
        events: type[E],
        capacity: int | None = None,
        progress: bool = False,
        key: str | None = ...,
        answer: object = ...,
        **options: Unpack[CallOptions],
    ) -> Stream[Event[E] | Value[T]]: ...
    @overload
    def stream(
        self,
        call: Call[T],
        /,
        *,
        events: type[E],
        capacity: int | None = None,
        progress: bool = False,
        key: str | None = ...,
        answer: object = ...,
        **options: Unpack[CallOptions],
    ) -> EventStream[E, T]: ...
    @overload
    def stream(
        self,
        call: Call[AsyncIterator[T]],
        /,
        *,
        progress: bool = False,
        key: str | None = ...,
        answer: object = ...,
        **options: Unpack[CallOptions],
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
    def stream(
        self,
        calls: Any,
        /,
        *,
        events: type[Any] | None = None,
        capacity: int | None = None,
        progress: bool = False,
        key: str | None = None,
        answer: object = ...,
        **options: Unpack[CallOptions],
    ) -> Stream[Any]:
        """Run many calls of deployed graphs, and yield their results in input order; or yield the values of one call.

        Each call takes a place of the deployment, as a call of `run` does.

        Args:
            calls: the calls, from any iterable or async iterable; or a single call of a graph that returns an
                `AsyncIterator`, or of any graph with `events=`.
            events: the class of the events that are read; see `penstock.engine.stream`.
            capacity: the most events that wait for their reader.
            progress: whether a bar shows the progress; see `penstock.engine.stream`.
            key: for a single call of a graph with a durable loop, the key that it is kept under; see
                `penstock.engine.run`.
            answer: the answer to the question that the key waits with.
            **options: `timeout_seconds`, `priority`, `trace_execution`; for many calls also `ordered`, `on_error`,
                `trace_items`, and `max_in_flight` for this stream.

        Returns:
            A `Stream`, an async iterator and async context manager.

        Raises:
            TypeError: the argument is neither a call nor an iterable of calls.
            OptionsError: an option is unknown or does not apply.
            PlanError: the single call is not one of this deployment, or gives one value.
            EngineClosedError: the deployment is not ready.
            ReentrantCallError: a node of the deployment makes the call.
        """
        self._deployment.check_callable()
        shows_progress = is_shown(progress)
        check_events(events, capacity, is_one_call=isinstance(calls, Call))
        if isinstance(calls, Call):
            call: Call[Any] = calls  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of it
            gives_stream = self._deployment.graphs.deployed(call.graph).program.plan._gives_stream
            if not gives_stream and events is None:
                raise gives_one_value(call.graph, "service")
            start = partial(self._streaming_call, call, self._merged("service.stream(call)", options), key, answer)
            return stream_of(call, start, events, capacity, gives_stream=gives_stream, shows_progress=shows_progress)
        refuse_key(key, answer, "service.stream")
        merged = resolve("service.stream", options, self._inherited())
        return CallsStream(self._runtime, calls, merged, self._pipeline, shows_progress=shows_progress)

    async def map(
        self, calls: Iterable[Call[T]], /, *, progress: bool = False, **options: Unpack[CallOptions]
    ) -> list[T]:
        """Run many calls of deployed graphs and return the list of their results.

        Args:
            calls: the calls.
            progress: whether a bar shows the progress; see `penstock.engine.stream`.
            **options: those of `stream`.

        Returns:
            The results in input order; with `on_error="skip"` without those of calls that failed.

        Raises:
            Exception: the error of the first call in input order that failed; the others are cancelled.
        """
        async with self.stream(calls, progress=progress, **options) as results:
            return await results._collect()

    async def wait_ready(self) -> None:
        """Wait until calls are served.

        Raises:
            EngineClosedError: the deployment failed to start, or was stopped.
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them.
        """
        await self._deployment.wait_ready()

    async def wait_stopped(self) -> None:
        """Wait until the deployment is stopped; for a server that has nothing else to wait for.

        This returns when the deployment was drained or aborted. Its stateful nodes may still be closing then; the end
        of the `async with` waits for them. A task of one of its own nodes may wait here as well.

        Raises:
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them. It is raised at once,
                so that a supervisor of the program can restart it.
        """
        await self._deployment.wait_stopped()

    async def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Refuse new calls, finish the calls that were accepted, and stop.

        Args:
            timeout_seconds: how long to wait for accepted calls, in seconds; calls that are left then are aborted. None
                for as long as they take.

        Raises:
            OptionsError: `timeout_seconds` is neither None nor a number of seconds.
            ReentrantCallError: a node of the deployment calls this; it would wait for itself.
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them.
        """
        check("timeout_seconds", timeout_seconds, TIMEOUT)
        await self._deployment.drain(timeout_seconds)

    async def abort(self) -> None:
        """Refuse new calls, end the calls in flight with `EngineClosedError`, and wait until their handlers have ended.

        Raises:
            ReentrantCallError: a node of the deployment calls this; it would wait for itself.
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them.
        """
        await self._deployment.abort()

    async def reload(self, resource: Node[..., Any], /) -> None:
        """Open a resource anew, and give its new value to all calls that are admitted afterwards; no call is lost.

        Calls in flight keep the old value, which is closed after the last of them. Resources belong to the Engine:
        every other graph of the Engine that uses the resource with the same arguments gets the new value as well.

        Args:
            resource: the resource. If the deployment uses it with different arguments, it is opened once for each.

        Raises:
            TypeError: the argument is not a resource.
            PlanError: the deployment does not use this resource; the message names the resources that it uses.
            EngineClosedError: the deployment is not ready.
            Exception: the resource could not be opened, or a node refuses its new value; the old values stay in place.
        """
        await _reload(self._deployment, resource)

    def statistics(self) -> ServiceStatistics:
        """Return a snapshot of the counters of the deployment and of its nodes."""
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
            in_flight.counts["interrupted"],
        )

    async def _run(
        self,
        graph: Graph[..., Any],
        arguments: tuple[Any, ...],
        headers: Mapping[str, str] | None,
        options: ExecutionOptions,
        key: str | None = None,
    ) -> Any:
        deployment = self._deployment
        scope, in_flight = deployment.check_callable()
        call = ServiceCall(scope.loop, graph.name, options, headers, timeout_seconds=options.timeout_seconds)
        if self._options.collect_metrics and metrics.meter_provider() is not None:
            call.count()
        try:
            wired = deployment.graphs.ready.get(graph)
            if wired is None:
                wired = deployment.graphs.one_value(graph, "service.run", key)
                await deployment.restored(wired, graph, call.ends_at)
            account = None
            if in_flight.by_key and (account := in_flight.share_of(graph, arguments)) is not None:
                call.key = account.key
            if not in_flight.admission.reserve_nowait(account):
                began = perf_counter()
                await in_flight.reserve(graph.name, call.priority, call.ends_at, account)
                spans.admitted(call.run_span, perf_counter() - began)
                deployment.check_admitted(in_flight, account)
        except BaseException as error:
            call.report("running", error)
            raise
        call.admitted(deployment, scope, in_flight, account)
        item = in_flight.items
        in_flight.items = item + 1
        call.launch(wired, arguments, item, scope.engine.eager_starts)
        del arguments  # the frame alone holds them, until their last reader is done
        try:
            await call.outcome_known
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            if call.is_reported:
                call.report()
        return call.result if call.state == "done" else call.outcome()

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

    def _streaming_call(
        self,
        call: Call[Any],
        options: ExecutionOptions,
        key: str | None,
        answer: object,
        events: EventBuffer | None,
    ) -> StreamingCall:
        kept = None
        if key is not None:
            plan = self._deployment.graphs.deployed(call.graph).program.plan
            check_key(plan, "service.stream", key, answer)
            kept = durable_call(plan, call, key, answer, self._runtime.pools.threads, options)
        return StreamingCall(DeploymentScope(self._deployment, key, answer), call, options, kept, events)

    def _merged(self, verb: str, options: Mapping[str, Any]) -> ExecutionOptions:
        """Return the options of one call: those of the deployment, if there are no others, as is nearly always so."""
        return resolve(verb, options, self._inherited()) if options or scoped.get() else self._options

    def _inherited(self) -> dict[str, Any]:
        options = self._options
        return {
            "timeout_seconds": options.timeout_seconds,
            "max_in_flight": options.max_in_flight,
            "trace_execution": options.trace_execution,
            "trace_items": options.trace_items,
            "collect_metrics": options.collect_metrics,
        }


# Reloading a resource of a deployment.


_Known: TypeAlias = dict[int, Any]  # values of a graph that come from a resource, by the number of the value


async def _reload(deployment: Deployment, resource: object) -> None:
    """Open a resource anew, once for each tuple of arguments that the deployment uses it with, and swap the values.

    Raises:
        PlanError: the deployment does not use the resource.
        EngineClosedError: the deployment is not ready, or was stopped meanwhile.
        Exception: the resource could not be opened, or a node refuses its new value; the old values stay in place.
    """
    openings = _openings(deployment, resource)
    runtime = deployment.runtime
    # One reload of a resource at a time. A second reload waits and opens the resource once more, because whatever the
    # resource reads may have changed after the first reload began.
    lock = runtime.reloads.setdefault(openings[0].resource, asyncio.Lock())
    async with lock:
        entries = [await _entry(deployment, opening) for opening in openings]
        try:
            for entry in entries:
                await _open_next(deployment, entry)
            for entry in entries:
                _check_wanted(deployment, entry)
                _check_fits(entry)
        except BaseException:
            await uninterrupted(_discard(entries))
            raise
        _swap(runtime, entries)


def _openings(deployment: Deployment, resource: object) -> list[Opening]:
    if deployment.scope is None or deployment.state != "ready":
        raise deployment.stopped_error()
    if asyncio.get_running_loop() is not deployment.scope.loop:
        raise EngineLoopError("this deployment runs on another event loop than this code; call it from there")
    if not isinstance(resource, Resource):
        raise TypeError(f"service.reload takes a resource, got {resource!r}")
    name: str = resource.name
    used = dict.fromkeys(opening for wired in deployment.graphs for opening in wired.program.resources)
    openings = [opening for opening in used if opening.resource is resource]
    if not openings:
        names = ", ".join(dict.fromkeys(opening.name for opening in used)) or "none"
        raise PlanError(f"resource {name!r} is not used by this deployment of {deployment.names}; it uses: {names}")
    return openings


async def _entry(deployment: Deployment, opening: Opening) -> Entry:
    entries = deployment.runtime.resources.entries
    while opening not in entries:  # the resource ended by itself, and the call that reopened it has left meanwhile
        await deployment.reopen(opening)
    entry = entries[opening]
    _check_wanted(deployment, entry)
    return entry


def _check_wanted(deployment: Deployment, entry: Entry) -> None:
    """Refuse to go on if the deployment was stopped meanwhile, or if the present value is being closed."""
    if deployment.state != "ready":
        raise deployment.stopped_error()
    if entry.ending:
        raise EngineClosedError(f"resource {entry.opening.name!r} is not reloaded: its Engine is being closed")


def _check_fits(entry: Entry) -> None:
    """Ask the executors of the nodes that use a resource whether they accept its new value."""
    assert entry.candidate is not None
    if not entry.context_task.was_opened:
        return  # the resource has ended by itself and is being reopened: there is no value to compare with
    values = entry.context_task.value, entry.candidate.value
    for program in entry.programs:
        _check_plan(program.plan, entry.opening, ({}, {}), values)


def _check_plan(plan: Plan, opening: Opening, around: tuple[_Known, _Known], values: tuple[Any, Any]) -> None:
    """Ask the executors of the nodes of a graph, and of the nodes of its bodies.

    Args:
        plan: the plan of the graph.
        opening: the opening of the resource.
        around: for a body: the values that it captures and that come from the resource, with the present value of the
            resource, and with the new one.
        values: the present value of the resource, and the new one.
    """
    old, new = around
    if opening in plan.trace.resources:
        source = plan.trace.resources[opening]
        old, new = {**old, source: values[0]}, {**new, source: values[1]}
    for step in plan.steps:
        callee = step.head.callee
        if is_node(callee) and callee._runs_in:
            try:
                for read in step.head.reads():
                    if read.source in old:
                        callee._runs_in.check_reload(value_of(read, old), value_of(read, new))
            except Exception as error:
                error.add_note(f"resource {opening.name!r} was not reloaded: node {step.label!r} uses it")
                raise
        for body in step.bodies:
            taken = [(source, template) for source, template in body.trace.captured if is_known(template, old.keys())]
            inside = tuple([{source: value_of(one, known) for source, one in taken} for known in (old, new)])
            _check_plan(body, opening, (inside[0], inside[1]), values)


async def _open_next(deployment: Deployment, entry: Entry) -> None:
    resources = deployment.runtime.resources
    context_task = entry.candidate = resources.new_context_task(entry.opening)
    await context_task.settled()
    _check_wanted(deployment, entry)
    if not context_task.is_open:
        raise resources.failure(entry.opening, context_task, deployment.names)


async def _discard(entries: list[Entry]) -> None:
    """Close the values that were opened for a reload that failed, the last opened first."""
    for entry in reversed(entries):
        context_task = entry.candidate
        if context_task is None:
            continue
        was_open = context_task.is_open
        error = await context_task.ended()
        entry.candidate = None  # only now: the code that closes the resource waits for its candidate
        if was_open and error is not None:
            logs.warning("resource.not_closed", resource=entry.opening.name, error=repr(error))


def _swap(runtime: Runtime, entries: list[Entry]) -> None:
    replaced: list[ContextTask[Any]] = []
    for entry in entries:
        context_task, entry.candidate = entry.candidate, None
        assert context_task is not None
        replaced.append(runtime.resources.swap(entry, context_task))
    programs = {program for entry in entries for program in entry.programs}
    frames = [frame for frame in runtime.frames_in_flight() if frame.layout in programs]
    work = _retire(runtime, entries[0].opening.name, replaced, frames)
    task = start_task(asyncio.get_running_loop(), work, name="penstock-resource-retires", context=Context())
    for entry in entries:
        entry.retiring.add(task)
        task.add_done_callback(entry.retiring.discard)


async def _retire(runtime: Runtime, name: str, replaced: list[ContextTask[Any]], frames: list[Frame]) -> None:
    """Close the replaced values, the last opened first, once the calls that began with them have ended."""
    await departed(frames)
    frames.clear()
    await runtime.threads_returned()
    for context_task in sorted(replaced, key=lambda context_task: context_task.number, reverse=True):
        error = await context_task.ended()
        if error is not None:
            logs.warning("resource.not_closed", resource=name, error=repr(error))
