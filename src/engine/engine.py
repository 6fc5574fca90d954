"""Engine: owns threads, processes and the limits of nodes; `run`, `stream` and `deploy` are its verbs."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Never, ParamSpec, Self, TypeVar, Unpack, overload

from .._errors import DeploymentFailed, OptionsError
from .._public import LateModule
from ..actors.accepted import check, optional, whole
from ..actors.supervision import Strategy, SupervisorFlags
from ..actors.tasks import uninterrupted, until
from ..actors.threads import ThreadPoolStatistics
from ..telemetry.counters import ActorStatistics
from ..telemetry.tables import UNKNOWN, Rendered, Table, count, of
from .admission import fair_shares
from .call import RunningCall
from .call_scopes import OwnScope
from .call_stream import Stream, is_shown
from .checkpoint import Checkpoint, Checkpointer
from .events import Event, EventBuffer, Value
from .graph import (
    Call,
    DurableKey,
    Graph,
    as_call,
    as_graph,
    durable_call,
    gives_one_value,
    one_value,
    refuse_key,
)
from .instances import opens
from .keeping import Keeper
from .one_call_stream import EventStream, OfCall, OfCalls, StreamingCall, check_events, stream_of
from .options import DEFAULT_WORKERS, CallOptions, ExecutionOptions, OnFinished, checked, chosen, of_engine, resolve
from .pipeline import CallsStream, own_pipeline
from .pools import ProcessPoolStatistics
from .program import Plan, Wired
from .scope import Runtime, Scope, running_loop, started

if TYPE_CHECKING:
    from .. import engine
else:
    engine = LateModule(__package__)


P = ParamSpec("P")
E = TypeVar("E")
R = TypeVar("R")
Tag = TypeVar("Tag")
T = TypeVar("T")


class OfSavedCall(OfCall, total=False):
    """The options of `stream` for one call that gives a stream."""

    checkpoint: Checkpoint | None


class OfDeployment(CallOptions, total=False):
    """The options of `deploy`, without `key`."""

    strategy: Strategy
    max_restarts: int
    within_seconds: float
    warmup: bool
    weights: Mapping[Any, float] | None
    max_in_flight_per_key: int | None
    max_queue_per_key: int | None


@dataclass(frozen=True)
class EngineStatistics(Rendered):
    """A snapshot of an Engine. It shows itself as a table: printed, with rich, and in a notebook.

    Attributes:
        runs_in_flight: how many calls of `run` are in flight.
        scopes: how many runs, streams and deployments are open.
        threads: the thread pool; None before its first use.
        processes: the worker processes; None before their first use.
        actors: the nodes that `run` has used, with their counters over all calls of `run`.
    """

    runs_in_flight: int
    scopes: int
    threads: ThreadPoolStatistics | None
    processes: ProcessPoolStatistics | None
    actors: tuple[ActorStatistics, ...]

    def _table(self) -> Table:
        from .tables import table_of

        threads = processes = UNKNOWN
        if (pool := self.threads) is not None:
            threads = f"{of(pool.busy, pool.threads)} busy, {count(pool.queued)} queued, {count(pool.completed)} done"
        if (workers := self.processes) is not None:
            processes = (
                f"{of(workers.busy, workers.workers)} busy, {count(workers.queued)} queued, "
                f"{count(workers.completed)} done, {count(workers.died)} died, {count(workers.killed)} killed"
            )
        facts = (
            ("engine", f"{count(self.runs_in_flight)} runs in flight, {count(self.scopes)} scopes open"),
            ("threads", threads),
            ("processes", processes),
        )
        return table_of(facts, self.actors)


class Engine:
    """The threads, the worker processes and the limits of nodes that calls share.

    A node with `concurrency=8` handles eight items at a time in one Engine. An Engine is an async context manager, and
    belongs to one event loop: the loop of its first use. The functions of the module `penstock.engine` use a default
    Engine of the running loop, which need not be closed.

    Args:
        max_processes: the most worker processes; by default as many as the cores that this process may use.
        **options: execution options for all calls of this Engine; `max_workers` is also the number of its threads.

    Raises:
        OptionsError: an option is unknown or out of its range.
    """

    def __init__(self, *, max_processes: int | None = None, **options: Unpack[CallOptions]) -> None:
        checked(options, "Engine")
        check("max_processes", max_processes, optional(whole(1)))
        self._options: dict[str, Any] = dict(options)
        self._runtime = _runtime_of(self._options, max_processes)

    async def __aenter__(self) -> Self:
        self._runtime.check_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End all open scopes, then the threads and worker processes; wait until their handlers have returned."""
        await uninterrupted(self._runtime.close())

    async def run(
        self,
        call: Call[R] | Graph[[], R],
        /,
        *more: Never,
        durable_key: str | None = None,
        answer: object = ...,
        on_finished: OnFinished = "again",
        checkpoint: Checkpoint | None = None,
        **options: Unpack[CallOptions],
    ) -> R:
        """Run one call of a graph and return its result.

        Args:
            call: the call, `search(url)`; a graph without parameters may be passed itself.
            *more: nothing; arguments of the graph are part of the call.
            durable_key: for a graph with a durable loop (`ps.while_loop(..., durable=...)`), the key of the loop in its
                store. If the process of a call dies, or the call fails, run the key again with the same arguments, and
                the loop goes on. After its result, the key begins a new loop.
            answer: the answer to the question that the key waits with, after `Interrupted`; or an `Answer`, which
                answers one particular question. By default, no answer.
            on_finished: what to do if the key has its result already: "again" begins a new loop, "return" returns the
                result, and "raise" raises `KeyFinished`. "return" and "raise" refuse other arguments, so a request that
                is sent twice runs nothing twice.
            checkpoint: where the state of the `ps.fold` of the graph is saved; the next run goes on from there.
            **options: `scheduler`, `timeout_seconds`, `max_workers`, `reuse_plans`, `device_strategy` and others; see
                `ExecutionOptions`.

        Returns:
            The result of the graph.

        Raises:
            Exception: the error of the node that failed first, with a note that names graph, node, item and attempt.
            TimeoutError: the call did not finish within `timeout_seconds`.
            GraphTraceError: the graph does something that a trace cannot represent.
            PlanError: the graph returns a stream of values: read it with `engine.stream(call)`.
            OptionsError: an option is unknown or does not apply; a graph with a durable loop has no key, or a graph
                without one has a key. Subclasses: `OtherArguments`, if the key belongs to a call with other arguments;
                `StaleAnswer`, if the key does not wait for this answer; `KeyFinished`, if the key has its result, and
                `on_finished="raise"` is given or the result could not be stored.
            Interrupted: a node has asked a question (`ps.interrupt`); a call with the answer and the same key goes on.
            KeyInUse: another call has the key.
            NotStorable: an argument, the answer, a question or a state of the loop cannot be stored.
        """
        runtime, asked = self._runtime, DurableKey(durable_key, answer, on_finished)
        runtime.check_loop()
        one, merged = as_call(call, "engine.run", more), resolve("run", options, self._options)
        plan = one_value(one.graph, merged, "engine.run", asked)
        saving = None if checkpoint is None else _saving(checkpoint, one, plan, asked)
        result: R
        if durable_key is None:
            result = await _run_call(runtime, one, merged, plan, saving)
        else:
            async with durable_call(plan, one, asked, runtime.pools.threads, merged) as kept:
                if not kept.is_finished:
                    kept.result = await _run_call(runtime, one, merged, plan, ends_at=kept.ends_at)
            result = kept.result
        return result

    @overload
    def stream(  # type: ignore[overload-overlap]
        self, call: Call[AsyncIterator[R]], /, *, events: type[E], capacity: int | None = None,
        **options: Unpack[OfSavedCall],
    ) -> Stream[Event[E] | Value[R]]: ...  # fmt: skip
    @overload
    def stream(
        self, call: Call[R], /, *, events: type[E], capacity: int | None = None, **options: Unpack[OfCall]
    ) -> EventStream[E, R]: ...
    @overload
    def stream(self, call: Call[AsyncIterator[R]], /, **options: Unpack[OfSavedCall]) -> Stream[R]: ...
    @overload
    def stream(
        self, calls: Iterable[Call[R, Tag]] | AsyncIterable[Call[R, Tag]], /, **options: Unpack[OfCalls]
    ) -> Stream[R, Tag]: ...
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
        checkpoint: Checkpoint | None = None,
        **options: Unpack[CallOptions],
    ) -> Stream[Any]:
        """Run many calls as a pipeline and yield their results in input order; or yield the values of one call.

        Args:
            calls: the calls, from any iterable or async iterable; the stream asks for the next call when it has room
                for the call. Or a single call of a graph that returns an `AsyncIterator`. The code of a plain iterable
                sees the context variables of the caller, but may run outside of any task, where
                `asyncio.current_task()` is None; an async iterable is iterated in a separate task.
            events: for a single call, also of a graph that returns one value: the class of the events to read, which
                nodes hand out with `penstock.emit`; `object` for all. The stream is an `EventStream` then, of `Event`
                objects, and for a graph that returns an `AsyncIterator` a stream of `Event` and `Value` objects.
            capacity: the most events that wait for their reader; a node that emits a further event waits for room. 16
                by default.
            progress: whether a bar on standard error shows the rate, the errors, the node that limits and, if `calls`
                has a length as a list has, the time that is left. Nothing is shown if standard error is not a terminal.
            durable_key: for a single call of a graph with a durable loop, the key of the loop in its store; see `run`.
            answer: the answer to the question that the key waits with.
            on_finished: what to do if the key has its result already; see `run`.
            checkpoint: for a single call: where the call is saved while it runs; the next run goes on from there.
            **options: `scheduler`, `timeout_seconds`, `max_workers`, `reuse_plans`, `device_strategy`; for many calls
                also `max_in_flight`, `ordered`, `order_by`, `on_error`, `trace_items`.

        Returns:
            A `Stream`, an async iterator and async context manager.

        Raises:
            TypeError: the argument is neither a call nor an iterable of calls.
            PlanError: the graph of the single call returns one value: use `engine.run`. Or a step of the graph cannot
                be saved with `checkpoint=`.
            OptionsError: an option is unknown or does not apply.
            EngineLoopError: no event loop is running.
            MissingExtraError: `progress=True` needs rich, which is not installed.
        """
        runtime, asked = self._runtime, DurableKey(durable_key, answer, on_finished)
        shows_progress = is_shown(progress)
        check_events(events, capacity, is_one_call=isinstance(calls, Call))
        if isinstance(calls, Call):
            call: Call[Any] = calls  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of it
            gives_stream = call.graph._present_trace().gives_stream
            if not gives_stream and events is None:
                raise gives_one_value(call.graph, "engine")
            merged = resolve("stream(call)", options, self._options)
            saving = None
            if checkpoint is not None:
                if not gives_stream:
                    raise OptionsError("checkpoint= with events= is for a graph that returns a stream")
                saving = _saving(checkpoint, call, call.graph._planned(merged), asked)

            def start(buffer: EventBuffer | None) -> StreamingCall:
                runtime.check_loop()
                return StreamingCall(OwnScope(runtime, merged, asked, saving), call, merged, buffer)

            return stream_of(call, start, events, capacity, shows_progress=shows_progress)
        if checkpoint is not None:
            raise OptionsError(
                "checkpoint= is for one call of a graph that returns a stream; make the source a stream of that graph, "
                "engine.stream(train(data.order(source)), checkpoint=...)"
            )
        refuse_key(asked, "engine.stream")
        merged = resolve("stream", options, self._options)
        return CallsStream(calls, merged, partial(own_pipeline, runtime), shows_progress=shows_progress)

    @overload
    def deploy(
        self, graph: Graph[P, R], /, *, key: Callable[P, Hashable] | None = ..., **options: Unpack[OfDeployment]
    ) -> "engine.Service[P, R]": ...
    @overload
    def deploy(
        self, graph: Graph[P, R], second: Graph[..., object], /, *more: Graph[..., object],
        key: Callable[[Call[Any]], Hashable] | None = ..., **options: Unpack[OfDeployment],
    ) -> "engine.Service[P, R]": ...  # fmt: skip
    def deploy(
        self,
        graph: Graph[P, R],
        /,
        *more: Graph[..., object],
        strategy: Strategy = "one_for_one",
        max_restarts: int = 3,
        within_seconds: float = 5.0,
        warmup: bool = False,
        key: Callable[..., Hashable] | None = None,
        weights: Mapping[Any, float] | None = None,
        max_in_flight_per_key: int | None = None,
        max_queue_per_key: int | None = None,
        **options: Unpack[CallOptions],
    ) -> "engine.Service[P, R]":
        """Make graphs resident, so that many callers share their actors, limits and stateful nodes.

        Args:
            graph: the graph that `await service(...)` calls.
            *more: further graphs, which `service.run(call)` calls; all graphs share the instances of stateful nodes.
            strategy: which other stateful nodes are restarted together with a crashed one: none ("one_for_one"), all
                ("one_for_all"), or the nodes that were started after it ("rest_for_one").
            max_restarts: how many restarts are allowed within `within_seconds`; a further restart ends the deployment
                with `DeploymentFailed`.
            within_seconds: the length of the window in which restarts are counted, in seconds.
            warmup: whether the deployment compiles the programs of its device nodes before it is ready, for the
                `sample_input=` of each node.
            key: a function that returns the key of a call, such as its tenant. The function has the parameters of the
                graph; with several graphs, its argument is the `Call`. Keys share the places fairly, by the time for
                which their calls hold places; a stream holds its place as long as it is open. Within a key, calls of
                higher priority come first. When the queue is full, the newest waiting call of the key that is furthest
                over its share is refused in the place of the new call. Actors see the key in `Work.key`.
            weights: the weights of keys; a key with weight 2 has twice the share of a key without a weight, which has
                weight 1.
            max_in_flight_per_key: how many places one key may hold at a time; None for all places.
            max_queue_per_key: how many calls of one key may wait; further calls are refused. None without a limit.
            **options: `max_in_flight`, `max_queue`, `max_workers`, `scheduler`, `timeout_seconds`, `reuse_plans`,
                `device_strategy`.

        Returns:
            A `Service`, an async context manager.

        Raises:
            TypeError: an argument is not a graph.
            OptionsError: an option is unknown, does not apply, or does not accept its value.
            EngineLoopError: no event loop is running.
        """
        from . import Service

        runtime = self._runtime
        flags = SupervisorFlags(strategy, max_restarts, within_seconds)
        graphs: tuple[Graph[..., Any], ...] = tuple(as_graph(each, "engine.deploy") for each in (graph, *more))
        shares = fair_shares(graphs, key, weights, max_in_flight_per_key, max_queue_per_key)
        merged = resolve("deploy", options, self._options)
        return Service(runtime, graphs, merged, flags, warms_up=warmup, shares=shares)

    def plan(self, graph: Graph[..., object], /) -> Plan:
        """Return the plan of a graph: its steps after the planning passes, and the changes of each pass.

        No event loop is needed. `print(engine.plan(graph))` shows the plan.

        Args:
            graph: the graph, not a call of it.

        Returns:
            The `Plan`.

        Raises:
            TypeError: the argument is not a graph.
            GraphTraceError: the graph does something that a trace cannot represent.
            PlanError: the type of a value does not fit the parameter that takes it.
        """
        return as_graph(graph, "engine.plan")._planned(resolve("Engine", {}, self._options))

    async def memory(
        self,
        what: "Call[object] | Graph[[], object] | Plan",
        /,
        *,
        items: int | None = None,
        **options: Unpack[CallOptions],
    ) -> "engine.MemoryReport":
        """Run a call once and report its memory; or report how much memory the device nodes of a plan will take.

        For each device node, the report has the bytes of arguments, outputs and temporaries of its programs, as XLA
        states them. For each node, it has the bytes of an item, of a result and of a full inbox in a pipeline. It also
        has the most bytes in flight at a time. Measuring takes time, so do not use it in production. Programs are
        compiled off the loop.

        Args:
            what: a call, which runs once; or a plan (`engine.plan(graph)`), which does not run: its device nodes with
                `sample_input=` are compiled.
            items: for a call that gives a stream, how many values are read; all by default.
            **options: the options of `run`.

        Returns:
            A `MemoryReport`; `str()` shows it as a table.

        Raises:
            Exception: the error of the call, or of a function while it was traced.
            OptionsError: an option is unknown or does not apply.
        """
        from .footprint import memory_of_call, memory_of_plan

        check("items", items, optional(whole(1)), "memory(")
        runtime = self._runtime
        runtime.check_loop()
        if isinstance(what, Plan):
            return await memory_of_plan(runtime, what, resolve("run", options, self._options))
        call = as_call(what, "engine.memory")
        gives_stream = call.graph._present_trace().gives_stream
        merged = resolve("stream(call)" if gives_stream else "run", options, self._options)

        async def run(on_prepared: Callable[[Scope], None]) -> None:
            plan = one_value(call.graph, merged, "engine.memory")
            await _run_call(runtime, call, merged, plan, on_prepared=on_prepared)

        return await memory_of_call(runtime, call, merged, run, items)

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the counters."""
        runtime = self._runtime
        actors = tuple(actor.statistics() for actor in runtime.shared_actors())
        return EngineStatistics(len(runtime.frames), runtime.scopes, *runtime.pools.statistics(), actors)


class DefaultEngine(Engine):
    """One Engine for each running loop. Its methods are the functions of `penstock.engine`.

    No `async with` closes such an Engine: its processes end with its last scope, its threads with the loop.
    """

    # Not a WeakKeyDictionary: each Engine refers to its loop, so no key would ever vanish. Closed loops are removed
    # below.
    _runtimes: ClassVar[dict[asyncio.AbstractEventLoop, Runtime]] = {}

    def __init__(self) -> None:
        self._options = {}

    @property
    def _runtime(self) -> Runtime:  # type: ignore[override]
        """The inside of the Engine of the running loop.

        Raises:
            EngineLoopError: no event loop is running.
        """
        loop = running_loop()
        runtime = self._runtimes.get(loop)
        if runtime is None:
            for other in [other for other in list(self._runtimes) if other.is_closed()]:
                self._runtimes.pop(other, None)  # another thread may have removed the loop already
            runtime = self._runtimes[loop] = _runtime_of({}, None, is_default=True)
        return runtime


def _runtime_of(options: Mapping[str, Any], max_processes: int | None, *, is_default: bool = False) -> Runtime:
    # A `with execution_options(...)` applies to the calls inside; it does not set the number of threads of an Engine.
    return Runtime(of_engine(options).max_workers or DEFAULT_WORKERS, max_processes, is_default=is_default)


default = DefaultEngine()


# Running one call.


def _saving(checkpoint: Checkpoint, call: Call[Any], plan: Plan, asked: DurableKey) -> Checkpointer:
    if asked.key is not None:
        raise OptionsError(
            "a call has durable_key= for a durable loop, or checkpoint= for a stream or a fold, but not both: leave "
            "out one of the two"
        )
    return Checkpointer(checkpoint, call, plan)


async def _run_call(
    runtime: Runtime,
    call: Call[Any],
    options: ExecutionOptions,
    plan: Plan,
    saving: Checkpointer | None = None,
    ends_at: float | None = None,
    on_prepared: Callable[[Scope], None] | None = None,
    keeper: Keeper | None = None,
) -> Any:
    """Run one call from start to end. When this returns or raises, no task and no thread of the call is left."""
    is_shared = saving is None and on_prepared is None and keeper is None
    wired = runtime.shared_wiring(plan, chosen(options), options) if is_shared else None
    run, resources = _Run(runtime, call, options, ends_at), runtime.resources
    if keeper is not None:
        run.keep(keeper)
    if wired is not None:
        runtime.scopes += 1
        try:
            if wired.program.resources and not resources.hold_nowait(wired.program, run):
                await run.started(resources.hold(wired.program, run), plan)
            return await run.run_to_end(wired)
        finally:
            try:
                if wired.program.resources:
                    await resources.release(run)
            finally:
                await runtime.scope_closed()
    scope = Scope(
        runtime, options, chosen(options), is_one_call=True, counts_handlers=run.handlers is not None,
        threads=run.threads, saving=saving, keeps=keeper is not None,
    )  # fmt: skip
    try:
        wired = await run.started(scope.prepare(plan), plan)
        if on_prepared is not None:
            on_prepared(scope)
        scope.on_failed = run.fail_with
        if saving is not None:
            saving.on_failure = run.fail
        result = await run.run_to_end(wired)
        if saving is not None:
            saving.is_done = True
        return result
    finally:
        await scope.close()


def kept_plan(graph: Graph[..., Any]) -> Plan:
    """Return the plan of a graph for runs whose steps are kept: each step by itself.

    Raises:
        PlanError: the calls of the graph give streams.
    """
    return one_value(graph, _kept_options(), "durable.run")


async def run_kept(call: Call[R], keeper: Keeper) -> R:
    """Run a call in the default Engine, and ask a keeper before each of its steps."""
    runtime = default._runtime
    runtime.check_loop()
    options = _kept_options()
    plan = one_value(call.graph, options, "durable.run")
    result: R = await _run_call(runtime, call, options, plan, keeper=keeper)
    return result


def _kept_options() -> ExecutionOptions:
    return replace(resolve("run", {}, {}), fuse=False)


class _Run(RunningCall):
    """A call of `run`."""

    def __init__(
        self, runtime: Runtime, call: Call[Any], options: ExecutionOptions, ends_at: float | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        seconds = options.timeout_seconds
        super().__init__(loop, call.graph.name, options, call._trace_headers, seconds, ends_at=ends_at)
        if options.collect_metrics:
            self.count(runtime.counted_runs)
        self.threads = runtime.pools.share_of_threads(options.max_workers)
        if options.max_workers is not None:
            self.handlers = asyncio.Semaphore(options.max_workers)
        self._runtime = runtime
        self._call = call
        self._options = options
        self._over: asyncio.Future[None] = loop.create_future()

    async def started(self, starting: Coroutine[Any, Any, T], plan: Plan) -> T:
        """Wait for the resources and stateful nodes of the graph to start; the deadline covers the start."""
        try:
            return await started(
                starting, self._graph, self.ends_at, self._options, self.run_span if opens(plan) else None
            )
        except BaseException as error:
            self.report("failed", error)
            raise

    async def run_to_end(self, wired: Wired) -> Any:
        """Launch the call and wait until its last worker has ended; return the result or raise the error."""
        runtime = self._runtime
        if runtime.closed:  # the Engine was closed while resources or stateful nodes started
            error = runtime.closed_error()
            self.report("failed", error)
            raise error
        runtime.frames.add(self)
        self.launch(wired, self._call.arguments, 0, runtime.eager_starts)
        try:
            await self._over
        except asyncio.CancelledError:
            self.cancel()
            self.drop_unread()  # if the call was done already
            await until(lambda: not self._unwinding(), lambda: asyncio.wait(self._unwinding()))
            raise
        finally:
            runtime.frames.discard(self)
            self.report()
            if self.late_scope is not None:
                await self.late_scope.close()
        return self.outcome()

    def new_scope(self) -> Scope:
        """Return a scope for nested calls of handlers; see `RunningCall`."""
        scope = Scope(self._runtime, self._options, "parallel", is_one_call=True, threads=self.threads)
        scope.on_failed = self.fail_with
        return scope

    def fail_with(self, make_error: Callable[[str], DeploymentFailed]) -> None:
        """Fail the call: its stateful nodes crash too often."""
        if self in self._runtime.frames and self.state == "running":
            self.fail(make_error(f"the run of graph {self._call.graph.name!r}"))

    def ended(self) -> None:
        """Release the caller: the last worker of the call has ended."""
        if not self._over.done():
            self._over.set_result(None)

    def _unwinding(self) -> list[asyncio.Task[None]]:
        # Ask the tasks, and do not rely on `ended`: a task that is cancelled before its first step never calls `ended`.
        return [worker.task for worker in self.workers if worker.task and not worker.task.done()]
