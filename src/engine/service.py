"""Service: resident graphs that many callers share."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Never,
    ParamSpec,
    Required,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from .._errors import DeploymentFailed, Interrupted, KeyInUse, OptionsError, Overloaded, PenstockError, UnknownKey
from ..actors.accepted import NAME, SWITCH, TIMEOUT, check, whole
from ..actors.supervision import SupervisorFlags
from ..telemetry import metrics
from ..telemetry.counters import ActorStatistics, share
from ..telemetry.tables import Rendered, Table, count, of, rate, to_html, to_text
from .admission import AdmissionStatistics, FairShares, keys_less
from .call_scopes import DeploymentScope
from .call_stream import Stream, is_shown
from .deployment import Deployment, ServiceCall, ServiceState
from .detached import KEPT, DetachedStream, EventLog, Missed
from .drawing import Drawing
from .events import Event, EventBuffer, Value
from .graph import NO_KEY, Call, DurableKey, Graph, as_call, durable_call, gives_one_value, refuse_key
from .node import Node
from .one_call_stream import EventStream, OfCall, OfCalls, StreamingCall, check_events, stream_of
from .options import CallOptions, ExecutionOptions, OnFinished, resolve, scoped
from .picture import drawing_of, shown
from .pipeline import CallsStream, Pipeline
from .program import Plan, Wired
from .reloading import reload
from .scope import Runtime
from .source import Calls
from .statistics import Bottleneck, actors_less, find_bottleneck, since
from .tables import mean_rate, or_unknown, table_of
from .wiring import Wiring

if TYPE_CHECKING:
    from ..saving.durable import Durable


def _with_loads(drawing: Drawing, plan: Plan, wiring: Wiring, elapsed_seconds: float | None) -> Drawing:
    wired = wiring.wired(plan)
    actors: dict[str, ActorStatistics] = {}
    for unit, actor in () if wired is None else zip(wired.program.units, wired.actors, strict=True):
        if unit.step is not None:
            actors[str(unit.step.head.source)] = actor.statistics()
    bodies = [body for planned in plan.steps for body in planned.bodies]
    return Drawing(
        drawing.title,
        tuple(replace(node, actors=(actors[node.id],) if node.id in actors else ()) for node in drawing.nodes),
        tuple(
            (owner_id, _with_loads(drawn, body, wiring, elapsed_seconds))
            for (owner_id, drawn), body in zip(drawing.bodies, bodies, strict=True)
        ),
        elapsed_seconds,
    )


def _summary(statistics: "ServiceStatistics") -> Table:
    """Return a table of the state and the totals of a deployment, without its nodes."""
    calls = [
        f"{count(statistics.completed)} completed", f"{count(statistics.failed)} failed",
        f"{count(statistics.cancelled)} cancelled", f"{count(statistics.expired)} expired",
        *([f"{count(statistics.interrupted)} interrupted"] if statistics.interrupted else []),
        mean_rate(statistics.completed, statistics.elapsed_seconds),
    ]  # fmt: skip
    admission = statistics.admission
    places = [
        f"{of(admission.in_flight, admission.max_in_flight)} in flight",
        f"{of(admission.queued, admission.max_queue)} queued",
        f"{count(admission.refused)} refused",
        f"{rate(admission.calls_per_second, 'calls')} while full",
    ]
    facts = (
        ("service", statistics.state),
        ("calls", ", ".join(calls)),
        ("admission", ", ".join(places)),
        ("bottleneck", or_unknown(statistics.bottleneck)),
    )
    return Table(facts)


_INHERITED = ("timeout_seconds", "max_in_flight", "trace_execution", "trace_items", "collect_metrics")
# how many keys a store lists at a time; other calls of the same file wait some milliseconds meanwhile
_RUNS_AT_ONCE = 1000
P = ParamSpec("P")
E = TypeVar("E")
R = TypeVar("R")
T = TypeVar("T")
Tag = TypeVar("Tag")


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
        elapsed_seconds: the time that the counters cover, in seconds: from the moment at which the deployment became
            ready until it stopped, or until now; None before the deployment is ready.
        bottleneck: the node that limits the deployment, on average over that time; None if no inbox was full.
        expired: how many calls ended with `DeadlineExceeded`, also while they waited for a place. The sum
            `completed + failed + cancelled + expired + interrupted + admission.refused` counts each call of the
            service, each stream of values, and each item of a stream of calls that has ended.
        interrupted: how many calls ended with `Interrupted`, because a node asked a question.
        success_rate: the share of `completed` in `completed + failed + expired`; None before the first such call.
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
        """The share of `completed` in `completed + failed + expired`; None before the first such call."""
        return share(self.completed, self.failed + self.expired)

    def since(self, earlier: "ServiceStatistics") -> "ServiceStatistics":
        """Return the difference of this snapshot and an earlier snapshot.

        Args:
            earlier: an earlier snapshot of the same deployment.

        Returns:
            The counters less the counters of `earlier`; all other values are the values of this snapshot.

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


class OfDetachedCall(OfCalls, total=False):
    """The options of `stream` for one call that goes on without its reader."""

    durable_key: Required[str]
    answer: object
    on_finished: OnFinished


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

    @property
    def graphs(self) -> tuple[Graph[..., Any], ...]:
        """The graphs that are deployed; `service(...)` calls the first one."""
        return self._graphs

    def __str__(self) -> str:
        statistics = self.statistics()
        drawings = [shown(drawing, "text") for drawing in self._drawings(statistics.elapsed_seconds)]
        return "\n\n".join([to_text(_summary(statistics)), *drawings])

    def _repr_html_(self) -> str:
        statistics = self.statistics()
        drawings = [shown(drawing, "svg") for drawing in self._drawings(statistics.elapsed_seconds)]
        return "\n".join([to_html(_summary(statistics)), *drawings])

    def _drawings(self, elapsed_seconds: float | None) -> Iterator[Drawing]:
        scope = self._deployment.scope
        for graph in self._graphs:
            wired = self._deployment.wired.get(graph)
            if wired is None or scope is None:  # not started yet
                yield drawing_of(graph._present_trace())
            else:
                plan = wired.program.plan
                yield _with_loads(plan._drawn[1], plan, scope.wiring, elapsed_seconds)

    async def __aenter__(self) -> Self:
        await self._deployment.start()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            await self.drain()
            return
        await self._deployment.end()
        # A cancellation of the caller must go on. The exception may be this failure itself, which need not be raised
        # a second time.
        if issubclass(exc_type, Exception) and not issubclass(exc_type, DeploymentFailed):
            self._deployment.check_failed()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the first of the deployed graphs: `await service(...)`.

        Returns:
            A coroutine, which returns the result of the graph, and raises the errors of `run`.
        """
        # A plain `def`: a second coroutine around `_run` would cost as much as a hop between two nodes.
        graph = self._graphs[0]
        if scoped.get():
            return self.run(graph(*args, **kwargs))
        return self._run(graph, graph._arguments(args, kwargs), None, self._options)

    def run(
        self,
        call: Call[T],
        /,
        *more: Never,
        durable_key: str | None = None,
        answer: object = ...,
        on_finished: OnFinished = "again",
        detached: bool = False,
        **options: Unpack[CallOptions],
    ) -> Coroutine[Any, Any, T]:
        """Run one call of a deployed graph.

        Args:
            call: the call; a graph without parameters may be passed itself.
            *more: nothing; arguments of the graph are part of the call.
            durable_key: for a graph with a durable loop, the key of the loop in its store; see `penstock.engine.run`.
            answer: the answer to the question that the key waits with.
            on_finished: what to do if the key has its result already; see `penstock.engine.run`.
            detached: for a call with `durable_key`, whether the call goes on if this coroutine is cancelled; `attach`
                reads the call then.
            **options: `timeout_seconds`, `priority` and `trace_execution`.

        Returns:
            A coroutine, which returns the result of the graph.

        Raises:
            Exception: the error of the node that failed first, with a note that names graph, node, item and attempt.
            Overloaded: all places, and all places in the queue, are taken.
            TimeoutError: the call did not finish within `timeout_seconds`, including its wait for a place.
            ReentrantCallError: a node of the deployment makes the call.
            EngineClosedError: the deployment is not ready.
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them.
            PlanError: the graph is not part of the deployment, or its calls give streams.
            OptionsError: an option is unknown or does not apply; or as for `durable_key=` of `penstock.engine.run`.
            Interrupted: a node has asked a question; a call with the answer and the same key goes on.
            KeyInUse: another call has the key.
        """
        # A plain `def`, like `__call__`, for the call without options.
        if (more or options or detached or scoped.get() or durable_key is not None or type(call) is not Call
                or answer is not ... or on_finished != "again"):  # fmt: skip
            return self._run_with(call, more, durable_key, answer, on_finished, detached, options)
        return self._run(call.graph, call.arguments, None, self._options)

    async def _run_with(
        self, call: Call[T], more: tuple[object, ...], durable_key: str | None, answer: object, on_finished: OnFinished,
        detached: bool, options: CallOptions,
    ) -> T:  # fmt: skip
        merged = self._merged("service.run", options)
        call = as_call(call, "service.run", more)
        result: T
        if durable_key is None and answer is ... and on_finished == "again" and not detached:
            result = await self._run(call.graph, call.arguments, call._trace_headers, merged)
            return result
        check("detached", detached, SWITCH)
        self._deployment.check_callable()
        asked = DurableKey(durable_key, answer, on_finished)
        plan = self._deployment.one_value(call.graph, "service.run", asked).program.plan
        if detached:
            key = cast("str", durable_key)  # `stream` refuses a call without a key
            return await self.stream(
                call, events=object, detached=True, durable_key=key, answer=answer, on_finished=on_finished, **options
            ).result()
        async with durable_call(plan, call, asked, self._runtime.pools.threads, merged) as kept:
            if not kept.is_finished:
                headers = call._trace_headers
                kept.result = await self._run(call.graph, call.arguments, headers, merged, asked, kept.ends_at)
        result = kept.result
        return result

    async def resume(
        self, key: str, /, *, answer: object = ..., detached: bool = False, **options: Unpack[CallOptions]
    ) -> Any:
        """Go on with a key of a durable loop. The call need not be given, since it is stored with the key.

        Args:
            key: the key.
            answer: the answer to the question that the key waits with.
            detached: whether the call goes on if this coroutine is cancelled, as for `run`.
            **options: the options of `run`.

        Returns:
            The result of the graph; a key that has a result already returns this result.

        Raises:
            UnknownKey: nothing is kept under the key.
            OptionsError: the graph of the key is not deployed here, or has other parameters now; an earlier version has
                kept the key, without arguments; or two stores have the key.
            Exception: as for `run`.
        """
        check("key", key, NAME, "service.resume(")
        return await self._resume(key, None, options, answer=answer, detached=detached)

    async def _resume(self, key: str, of_graph: str | None, options: CallOptions, **how: Any) -> Any:
        self._deployment.check_callable()
        elsewhere, found = "", dict[Any, dict[str, Any]]()  # by graph, the arguments
        for durable, graphs in self._durable_graphs().items():
            name, arguments = await durable._stored_call(key) or ("", {})
            if of_graph not in (None, name):
                continue  # in this store, the key belongs to a call of another graph
            if name in graphs:
                found[graphs[name]] = arguments
            else:
                elsewhere = elsewhere or name
        names = [graph.name for graph in found]
        if not found and elsewhere:
            raise OptionsError(
                f"service.resume({key!r}): the key belongs to graph {elsewhere!r}, which is not part of this deployment"
            )
        if not found:
            raise UnknownKey(f"service.resume({key!r}): no graph of this deployment keeps anything under this key")
        if len(found) > 1:
            raise OptionsError(
                f"service.resume({key!r}): graphs {names} have this key, each in a store of its own; give the call, "
                f"such as service.run({names[0]}(...), durable_key={key!r})"
            )
        [(graph, arguments)] = found.items()
        parameters = graph._signature.parameters
        if parameters.keys() != arguments.keys():
            raise OptionsError(
                f"service.resume({key!r}): graph {graph.name!r} has the parameters {list(parameters)}, and was called "
                f"with {list(arguments)}; give the call, service.run({graph.name}(...), durable_key={key!r})"
            )
        call = Call[Any](graph, tuple(arguments[parameter] for parameter in parameters))
        return await self.run(call, durable_key=key, on_finished="return", **how, **options)

    async def resume_all(
        self, *, concurrency: int = 8, detached: bool = False, **options: Unpack[CallOptions]
    ) -> dict[str, BaseException]:
        """Go on with all unfinished keys that wait for no answer and that no call has, in any process.

        The calls of these keys have failed, were cancelled, or their processes have died. This coroutine returns when
        all keys have ended or ask a question; in a server, write `asyncio.create_task(service.resume_all())`.

        Args:
            concurrency: how many keys go on at a time.
            detached: whether calls that have begun go on if this coroutine is cancelled; `attach` reads them then.
            **options: the options of `run`, for each call.

        Returns:
            The keys that have neither a result nor a question now, each with the reason: the error of its call, or the
            error of `resume` if there was no call.

        Raises:
            OptionsError: `concurrency` is not a whole number of at least 1, or a store cannot be listed.
            EngineClosedError: the deployment is not ready.
        """
        check("concurrency", concurrency, whole(1), "service.resume_all(")
        self._deployment.check_callable()
        keys: dict[tuple[str, str], None] = {}  # keys with their graphs: two stores may have the same key
        for durable in self._durable_graphs():
            for state in ("failed", "stopped"):
                last = None
                while page := await durable.runs(state=state, before=last, limit=_RUNS_AT_ONCE):
                    keys |= dict.fromkeys((run.key, run.graph) for run in page)
                    last = page[-1]
        left: dict[str, BaseException] = {}

        async def advance() -> None:
            while keys:
                (key, graph), _ = keys.popitem()
                outcome: Any
                resumed = self._resume(key, graph, options, detached=detached)
                (outcome,) = await asyncio.gather(resumed, return_exceptions=True)
                if isinstance(outcome, Overloaded):
                    keys[key, graph] = None
                    await asyncio.sleep(outcome.retry_after_seconds or 1)
                elif isinstance(outcome, BaseException) and not isinstance(outcome, Interrupted):
                    left[key] = outcome

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(keys))):
                group.create_task(advance())
        return left

    @overload
    def stream(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, call: Call[AsyncIterator[T]], /, *, events: type[E], capacity: int | None = None,
        **options: Unpack[OfCall],
    ) -> Stream[Event[E] | Value[T]]: ...  # fmt: skip
    @overload
    def stream(
        self, call: Call[T], /, *, events: type[E], capacity: int | None = None, **options: Unpack[OfCall]
    ) -> EventStream[E, T]: ...
    @overload
    def stream(self, call: Call[AsyncIterator[T]], /, **options: Unpack[OfCall]) -> Stream[T]: ...
    @overload
    def stream(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, call: Call[AsyncIterator[T]], /, *, events: type[E], detached: Literal[True],
        **options: Unpack[OfDetachedCall],
    ) -> DetachedStream[Event[E] | Value[T] | Missed, Never]: ...  # fmt: skip
    @overload
    def stream(
        self, call: Call[T], /, *, events: type[E], detached: Literal[True], **options: Unpack[OfDetachedCall]
    ) -> DetachedStream[Event[E] | Missed, T]: ...
    @overload
    def stream(
        self, calls: Iterable[Call[T, Tag]] | AsyncIterable[Call[T, Tag]], /, **options: Unpack[OfCalls]
    ) -> Stream[T, Tag]: ...
    def stream(
        self,
        calls: Any,
        /,
        *,
        events: type[Any] | None = None,
        capacity: int | None = None,
        progress: bool = False,
        durable_key: str | None = None,
        answer: object = ...,
        on_finished: OnFinished = "again",
        detached: bool = False,
        **options: Unpack[CallOptions],
    ) -> Stream[Any]:
        """Run many calls of deployed graphs, and yield their results in input order; or yield the values of one call.

        Each call takes a place of the deployment, like a call of `run`.

        Args:
            calls: the calls, from any iterable or async iterable; or a single call of a graph that returns an
                `AsyncIterator`, or of any graph with `events=`.
            events: the class of the events that are read; see `penstock.engine.stream`.
            capacity: the most events that wait for their reader.
            progress: whether a bar shows the progress; see `penstock.engine.stream`.
            durable_key: for a single call of a graph with a durable loop, the key of the loop in its store; see
                `penstock.engine.run`.
            answer: the answer to the question that the key waits with.
            on_finished: what to do if the key has its result already; see `penstock.engine.run`.
            detached: for a single call with `durable_key` and `events`, whether the call begins at once, and goes on
                without a reader; see `attach`.
            **options: `timeout_seconds`, `priority`, `trace_execution`; for many calls also `ordered`, `order_by`,
                `on_error`, `trace_items`, and `max_in_flight` for this stream.

        Returns:
            A `Stream`, an async iterator and async context manager; for a detached call a `DetachedStream`. If another
            call has its key, the first read raises `KeyInUse`.

        Raises:
            TypeError: the argument is neither a call nor an iterable of calls.
            OptionsError: an option is unknown or does not apply.
            PlanError: the graph of the single call is not deployed here, or gives one value.
            EngineClosedError: the deployment is not ready.
            ReentrantCallError: a node of the deployment makes the call.
        """
        self._deployment.check_callable()
        shows_progress, asked = is_shown(progress), DurableKey(durable_key, answer, on_finished)
        check_events(events, capacity, is_one_call=isinstance(calls, Call))
        if isinstance(calls, Call):
            call: Call[Any] = calls  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of it
            gives_stream = self._deployment.deployed(call.graph).program.plan._gives_stream
            if not gives_stream and events is None:
                raise gives_one_value(call.graph, "service")
            merged = self._merged("service.stream(call)", options)

            def start(buffer: EventBuffer | None) -> StreamingCall:
                return StreamingCall(DeploymentScope(self._deployment, asked), call, merged, buffer)

            if not detached:
                return stream_of(call, start, events, capacity, shows_progress=shows_progress)
            durable = self._durable(call.graph)
            if durable is None or durable_key is None or events is None or capacity is not None:
                raise OptionsError(
                    "detached=True is for a call of a graph with a durable loop: give its durable_key=, by which a "
                    f"reader attaches again, and events=; leave out capacity=, since the last {KEPT:,} events are kept"
                )
            stream = stream_of(call, start, object, None, shows_progress=shows_progress)
            try:
                log = self._deployment.detached.begin((durable, durable_key), stream)
            except KeyInUse as error:  # the reader gets the error, so that `asgi.event_stream(statuses=)` can answer it
                log = EventLog()
                log.outcome.set_exception(error)
            return DetachedStream[Any, Any](log, None, events, log.last)
        refuse_key(asked, "service.stream")
        if detached:
            raise OptionsError("detached=True is for one call with durable_key=, not for many: use service.run")
        merged = resolve("service.stream", options, self._inherited())
        return CallsStream(calls, merged, self._pipeline, shows_progress=shows_progress)

    async def map(
        self, calls: Iterable[Call[T]], /, *, progress: bool = False, **options: Unpack[CallOptions]
    ) -> list[T]:
        """Run many calls of deployed graphs and return the list of their results.

        Args:
            calls: the calls.
            progress: whether a bar shows the progress; see `penstock.engine.stream`.
            **options: the options of `stream`.

        Returns:
            The results in input order; with `on_error="skip"` without the results of failed calls.

        Raises:
            Exception: the error of the first failed call in input order; the other calls are cancelled.
        """
        async with self.stream(calls, progress=progress, **options) as results:
            return [result async for result in results]

    def attach(
        self, key: str, /, *, events: type[E], after: int = 0
    ) -> DetachedStream[Event[E] | Value[Any] | Missed, Any]:
        """Read a detached call: its kept events and values, and later events and values.

        The last 1,000 events and values of a key are kept in the process of its call. They are still kept after the end
        of the call, for the 100 calls that ended last. The outcome of a call that has ended comes from the store.

        Args:
            key: the key of the call.
            events: the class of the events that are read.
            after: the `number` of the event or value that was read last; 0 for all that are kept.

        Returns:
            A `DetachedStream`. Several streams may read the same call. The first read raises `UnknownKey` if nothing is
            kept under the key; `KeyInUse` if another process, or a call that is not detached, has the key;
            `KeyStopped` if the key has no result and no call; `KeyFinished` if the result is not kept; `Interrupted` if
            the key waits for an answer.

        Raises:
            OptionsError: an argument does not accept its value.
            EngineClosedError: the deployment takes no calls, and the call does not run in it.
        """
        check("key", key, NAME, "service.attach(")
        check("after", after, whole(0), "service.attach(")
        check_events(events, None, is_one_call=True)
        log = self._deployment.detached.find(key)
        if log is None:
            self._deployment.check_callable()
        return DetachedStream(log, partial(self._found, key), events, after)

    async def _found(self, key: str) -> EventLog:
        """Return the log of a call that runs here, or of an ended call, with the outcome that is stored."""
        self._deployment.check_callable()
        detached, found = self._deployment.detached, None
        for durable, graphs in self._durable_graphs().items():
            log = EventLog(detached.ended.get((durable, key)))
            try:
                log.outcome.set_result(await durable._result(key, graphs, needs_one=not log.gives_values))
            except UnknownKey:
                continue
            except PenstockError as error:
                log.outcome.set_exception(error)
                log.outcome.exception()  # mark the error as retrieved: the reader may leave earlier
            found = log
            break
        found = detached.find(key) or found  # a call may have begun meanwhile
        if found is not None:
            return found
        raise UnknownKey(f"service.attach({key!r}): no graph of this deployment keeps anything under this key")

    async def wait_ready(self) -> None:
        """Wait until calls are served.

        Raises:
            EngineClosedError: the deployment failed to start, or was stopped.
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them.
        """
        await self._deployment.wait_ready()

    async def wait_stopped(self) -> None:
        """Wait until the deployment is stopped; for a server that waits for nothing else.

        This returns when the deployment was drained or aborted. Stateful nodes may still be closing then; the end of
        the `async with` waits for them. A task of a node of the deployment may call this as well.

        Raises:
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them. This is raised at
                once, so that a supervisor of the program can restart the program.
        """
        await self._deployment.wait_stopped()

    async def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Refuse new calls, finish the calls that were accepted, and stop.

        Args:
            timeout_seconds: how long to wait for accepted calls, in seconds; the remaining calls are aborted then. None
                waits as long as the calls take.

        Raises:
            OptionsError: `timeout_seconds` is neither None nor a number of seconds.
            ReentrantCallError: a node of the deployment calls this, and would wait for itself.
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them.
        """
        check("timeout_seconds", timeout_seconds, TIMEOUT)
        await self._deployment.drain(timeout_seconds)

    async def abort(self) -> None:
        """Refuse new calls, end the calls in flight with `EngineClosedError`, and wait until their handlers have ended.

        Raises:
            ReentrantCallError: a node of the deployment calls this, and would wait for itself.
            DeploymentFailed: stateful nodes crashed more often than the deployment restarts them.
        """
        await self._deployment.abort()

    async def reload(self, resource: Node[..., Any], /) -> None:
        """Open a resource again, and give the new value to all calls that are admitted afterwards; no call is lost.

        Calls in flight keep the old value, which is closed after the last of these calls. Resources belong to the
        Engine: every other graph of the Engine that uses the resource with the same arguments gets the new value, too.

        Args:
            resource: the resource. If the deployment uses the resource with different arguments, it is opened once for
                each set of arguments.

        Raises:
            TypeError: the argument is not a resource.
            PlanError: the deployment does not use this resource; the message names the resources that it uses.
            EngineClosedError: the deployment is not ready.
            Exception: the resource could not be opened, or a node refuses its new value; the old values stay in place.
        """
        await reload(self._deployment, resource)

    def statistics(self) -> ServiceStatistics:
        """Return a snapshot of the counters of the deployment and of its nodes."""
        deployment = self._deployment
        scope, counts = deployment.scope, deployment.counts
        if scope is None:
            empty = AdmissionStatistics(0, self._options.max_in_flight, 0, self._options.max_queue, 0, 0, None)
            return ServiceStatistics(self.state, 0, 0, 0, empty, ())
        return ServiceStatistics(
            self.state,
            counts["done"],
            counts["failed"],
            counts["cancelled"],
            deployment.admission.statistics(),
            tuple(actor.statistics() for actor in scope.wiring.actors()),
            None if self.state == "starting" else scope.uptime.seconds,
            counts["expired"],
            counts["interrupted"],
        )

    async def _run(
        self,
        graph: Graph[..., Any],
        arguments: tuple[Any, ...],
        headers: Mapping[str, str] | None,
        options: ExecutionOptions,
        asked: DurableKey = NO_KEY,
        ends_at: float | None = None,
    ) -> Any:
        deployment = self._deployment
        scope = deployment.check_callable()
        call = ServiceCall(scope.loop, graph.name, options, headers, options.timeout_seconds, ends_at=ends_at)
        if self._options.collect_metrics and metrics.meter_provider() is not None:
            call.count()
        try:
            wired, account = deployment.ready.get(graph), None
            if (
                wired is None
                or not wired.program.is_filled
                or deployment.by_key
                or not deployment.admission.reserve_nowait()
            ):
                wired = wired or deployment.one_value(graph, "service.run", asked)
                account = await deployment.admit(graph, arguments, wired, call.priority, call.ends_at, call.run_span)
        except BaseException as error:
            call.report("running", error)
            raise
        call.admitted(deployment, scope, account)
        call.launch(wired, arguments, next(deployment.numbers), scope.engine.eager_starts)
        del arguments  # only the frame holds the arguments, until their last reader is done
        try:
            await call.outcome_known
        except asyncio.CancelledError:
            call.cancel()
            call.drop_unread()  # if the call was done already
            raise
        finally:
            if call.is_reported:
                call.report()
        return call.result if call.state == "done" else call.outcome()

    async def _deployed(self, graph: Graph[..., Any]) -> Wired:
        deployment = self._deployment
        return await deployment.restored(deployment.one_value(graph, "service.stream of many calls"))

    def _pipeline(self, calls: Calls, options: ExecutionOptions) -> Pipeline:
        deployment = self._deployment
        scope = deployment.check_callable()
        pipeline = Pipeline(
            scope, calls, options, prepare=self._deployed, owns_scope=False, admission=deployment.admission
        )
        pipeline.window.service = deployment
        deployment.stream_opened(pipeline)
        return pipeline

    def _durable_graphs(self) -> "dict[Durable, dict[str, Graph[..., Any]]]":
        """Return the graphs with durable loops by their names, for each store of durable loops."""
        found: dict[Durable, dict[str, Graph[..., Any]]] = {}
        for graph in self._graphs:
            durable = self._durable(graph)
            if durable is not None:
                found.setdefault(durable, {})[graph.name] = graph
        return found

    def _durable(self, graph: Graph[..., Any]) -> "Durable | None":
        own = self._deployment.deployed(graph).program.plan._durable
        return own and (self._options.durable or own)

    def _merged(self, verb: str, options: Mapping[str, Any]) -> ExecutionOptions:
        """Return the options of one call: nearly always the options of the deployment."""
        if not options and not scoped.get():
            return self._options
        return replace(resolve(verb, options, self._inherited()), durable=self._options.durable)

    def _inherited(self) -> dict[str, Any]:
        return {name: getattr(self._options, name) for name in _INHERITED}
