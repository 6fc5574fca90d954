"""Service: resident graphs that many callers share."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Generic, ParamSpec, Self, TypeAlias, TypeVar, Unpack, overload

from .._errors import DeploymentFailed, EngineClosedError, EngineLoopError, PlanError
from ..actors.accepted import SWITCH, TIMEOUT, check
from ..actors.frame import Frame
from ..actors.supervision import SupervisorFlags
from ..actors.tasks import ContextTask, start_task, uninterrupted
from ..telemetry import logs, metrics, spans
from ..telemetry.counters import ActorStatistics
from ..telemetry.rendered import Rendered
from ..telemetry.tables import Table, count, of, rate
from ..telemetry.tables import to_html as table_to_html
from ..telemetry.tables import to_text as table_to_text
from . import drawing
from .admission import AdmissionStatistics
from .deployment import Deployment, ServiceCall, ServiceState
from .drawing import Drawing
from .graph import Call, Graph, as_call, as_graph
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
from .values import DeploymentScope, StreamingCall, ValuesStream
from .wiring import Wiring


def to_text(statistics: "ServiceStatistics", graphs: Iterable[Graph[..., Any]], deployment: Deployment) -> str:
    """Return the totals and the drawings of the graphs."""
    drawings = map(drawing.to_text, _drawings(statistics, graphs, deployment))
    return "\n\n".join([table_to_text(_summary(statistics)), *drawings])


def to_html(statistics: "ServiceStatistics", graphs: Iterable[Graph[..., Any]], deployment: Deployment) -> str:
    """Return the totals and the drawings of the graphs, for a notebook."""
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
    """Return the drawing of a plan at work.

    Args:
        plan: the plan.
        wiring: where its actors are.
        elapsed_seconds: the time that their counters cover; None if nothing is to be said of rates.
    """
    return _with_loads(drawing_of(_kept(plan)), plan, wiring, elapsed_seconds)


def _kept(plan: Plan) -> Trace:
    """Return the trace of a plan without what its passes have dropped or merged."""
    steps = tuple(
        replace(step, bodies=tuple(map(_kept, planned.bodies)) if step is planned.head else step.bodies)
        for planned in plan.steps
        for step in planned.chain
    )
    return replace(plan.trace, steps=steps, result=plan.result)


def _with_loads(drawing: Drawing, plan: Plan, wiring: Wiring, elapsed_seconds: float | None) -> Drawing:
    wired = wiring.wired(plan)
    actors: dict[str, ActorStatistics] = {}
    together: dict[str, str] = {}  # the further steps of a chain, and the one whose actor runs them
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
    """Return the state of a deployment and its totals, without its nodes."""
    calls = [
        f"{count(statistics.completed)} completed", f"{count(statistics.failed)} failed",
        f"{count(statistics.cancelled)} cancelled", f"{count(statistics.expired)} expired",
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

    def _table(self) -> Table:
        return table_of(_summary(self).facts, self.actors)


class Service(Generic[P, R]):
    """Graphs made resident by `engine.deploy`: one set of actors and stateful nodes for all calls.

    An async context manager: a normal exit drains it, an exception aborts it. It raises `DeploymentFailed` if stateful
    nodes crashed more often than it restarts them.
    """

    def __init__(
        self,
        runtime: Runtime,
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
        if scoped.get():
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
        if options or scoped.get():
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
        await _reload(self._deployment, resource)

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
        if self._options.collect_metrics and metrics.meter_provider() is not None:
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
        call.join(scope)
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


# Reloading a resource of a deployment.


_Known: TypeAlias = dict[int, Any]  # what is of a resource in a graph, by the number of the value


async def _reload(deployment: Deployment, resource: object) -> None:
    """Open a resource anew for every distinct arguments that a deployment uses it with, and swap.

    Raises:
        PlanError: the deployment does not use it.
        EngineClosedError: the deployment is not ready, or was stopped meanwhile.
        Exception: what an opening raised; the old ones stay in place then.
    """
    openings = _openings(deployment, resource)
    runtime = deployment.runtime
    # One reload of a resource at a time: a later one opens again, since it may have been asked for after a change.
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
    while opening not in entries:  # it was lost, and a call that opened it again has given up
        await deployment.reopen(opening)
    entry = entries[opening]
    _check_wanted(deployment, entry)
    return entry


def _check_wanted(deployment: Deployment, entry: Entry) -> None:
    """Refuse to go on when the deployment was stopped meanwhile, or what is to be replaced is being closed."""
    if deployment.state != "ready":
        raise deployment.stopped_error()
    if entry.ending:
        raise EngineClosedError(f"resource {entry.opening.name!r} is not reloaded: its Engine is being closed")


def _check_fits(entry: Entry) -> None:
    """Ask the executors of the nodes that use a resource whether its new value is one for them."""
    assert entry.candidate is not None
    if not entry.context_task.was_opened:
        return  # it was lost, and is only being opened again: there is nothing to compare with
    values = entry.context_task.value, entry.candidate.value
    for program in entry.programs:
        _check_plan(program.plan, entry.opening, ({}, {}), values)


def _check_plan(plan: Plan, opening: Opening, around: tuple[_Known, _Known], values: tuple[Any, Any]) -> None:
    """Ask the executors of a graph's nodes, and of those of its bodies.

    Args:
        plan: of the graph.
        opening: of the resource.
        around: for a body, what it takes of the present value, and of the new one.
        values: the present one, and the new one.
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
    """Close what was opened for a reload that failed, the last opened first."""
    for entry in reversed(entries):
        context_task = entry.candidate
        if context_task is None:
            continue
        was_open = context_task.is_open
        error = await context_task.ended()
        entry.candidate = None  # not before: what ends the resource waits for it
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
    """Close what was replaced, the last opened first, once nothing can use it any more."""
    await departed(frames)
    frames.clear()
    await runtime.threads_returned()
    for context_task in sorted(replaced, key=lambda context_task: context_task.number, reverse=True):
        error = await context_task.ended()
        if error is not None:
            logs.warning("resource.not_closed", resource=name, error=repr(error))
