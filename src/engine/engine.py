"""Engine: owns threads, processes and the limits of nodes; `run`, `stream` and `deploy` are its verbs."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Never, ParamSpec, Self, TypeVar, Unpack, overload

from .._errors import DeadlineExceeded, DeploymentFailed, OptionsError
from .._public import LateModule
from ..actors.accepted import check, optional, whole
from ..actors.supervision import Strategy, SupervisorFlags
from ..actors.tasks import uninterrupted, until
from ..actors.threads import ProcessPoolStatistics, ThreadPoolStatistics
from ..telemetry.counters import ActorStatistics
from ..telemetry.tables import UNKNOWN, Rendered, Table, count, of
from .admission import fair_shares
from .call import RunningCall
from .call_scopes import OwnScope
from .call_stream import CallsStream, Stream
from .checkpoint import Checkpoint, Checkpointer
from .events import Event, EventBuffer, Value
from .graph import (
    Call,
    Graph,
    as_call,
    as_graph,
    check_key,
    durable_call,
    gives_one_value,
    one_value,
    refuse_key,
    time_left,
)
from .one_call_stream import EventStream, StreamingCall, check_events, stream_of
from .options import (
    DEFAULT_WORKERS,
    CallOptions,
    ChosenScheduler,
    ExecutionOptions,
    OnFinished,
    checked,
    of_engine,
    resolve,
)
from .pipeline import is_shown
from .program import Plan, Wired
from .scope import Runtime, Scope, running_loop

if TYPE_CHECKING:
    from .. import engine
else:
    engine = LateModule(__package__)


P = ParamSpec("P")
E = TypeVar("E")
R = TypeVar("R")
Tag = TypeVar("Tag")
T = TypeVar("T")


@dataclass(frozen=True)
class EngineStatistics(Rendered):
    """A snapshot of an Engine. It shows itself as a table: printed, with rich, and in a notebook.

    Attributes:
        runs_in_flight: how many calls of `run` are in flight.
        scopes: how many runs, streams and deployments are open.
        threads: the thread pool; None before its first use.
        processes: the worker processes; None before their first use.
        actors: the nodes that `run` has used, with their counters over all of its calls.
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
    Engine for each running loop, which needs no closing.

    Args:
        max_processes: the most worker processes; by default as many as there are cores that this process may use.
        **options: execution options for all calls of this Engine; `max_workers` is also the number of its threads.

    Raises:
        OptionsError: an option is unknown or out of its range.
    """

    _is_default = False

    def __init__(self, *, max_processes: int | None = None, **options: Unpack[CallOptions]) -> None:
        checked(options, "Engine")
        check("max_processes", max_processes, optional(whole(1)))
        self._options: dict[str, Any] = dict(options)
        # A `with execution_options(...)` is for the calls made inside it; it does not size the threads of an Engine.
        self._runtime = Runtime(
            of_engine(options).max_workers or DEFAULT_WORKERS, max_processes, is_default=self._is_default
        )

    async def __aenter__(self) -> Self:
        self._runtime.check_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End what is still open, then the threads and worker processes; wait until their handlers have returned."""
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
        """Run one call and return its result; see `penstock.engine.run`."""
        self._runtime.check_loop()
        one, merged = as_call(call, "engine.run", more), resolve("run", options, self._options)
        plan = one_value(one.graph, merged, "engine.run", durable_key, answer, on_finished)
        saving = None if checkpoint is None else _saving(checkpoint, one, plan, durable_key)
        result: R
        if durable_key is None:
            result = await _run_call(self._runtime, one, merged, plan, saving)
        else:
            threads = self._runtime.pools.threads
            async with durable_call(plan, one, durable_key, answer, on_finished, threads, merged) as kept:
                if not kept.is_finished:
                    kept.result = await _run_call(self._runtime, one, time_left(merged, kept), plan)
            result = kept.result
        return result

    @overload
    def stream(  # type: ignore[overload-overlap]
        self,
        call: Call[AsyncIterator[R]],
        /,
        *,
        events: type[E],
        capacity: int | None = None,
        progress: bool = False,
        durable_key: str | None = ...,
        answer: object = ...,
        on_finished: OnFinished = ...,
        checkpoint: Checkpoint | None = None,
        **options: Unpack[CallOptions],
    ) -> Stream[Event[E] | Value[R]]: ...
    @overload
    def stream(
        self,
        call: Call[R],
        /,
        *,
        events: type[E],
        capacity: int | None = None,
        progress: bool = False,
        durable_key: str | None = ...,
        answer: object = ...,
        on_finished: OnFinished = ...,
        **options: Unpack[CallOptions],
    ) -> EventStream[E, R]: ...
    @overload
    def stream(
        self,
        call: Call[AsyncIterator[R]],
        /,
        *,
        progress: bool = False,
        durable_key: str | None = ...,
        answer: object = ...,
        on_finished: OnFinished = ...,
        checkpoint: Checkpoint | None = None,
        **options: Unpack[CallOptions],
    ) -> Stream[R]: ...
    @overload
    def stream(
        self,
        calls: Iterable[Call[R, Tag]] | AsyncIterable[Call[R, Tag]],
        /,
        *,
        progress: bool = False,
        **options: Unpack[CallOptions],
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
        """Run many calls as a pipeline, or one call that gives a stream or events; see `penstock.engine.stream`."""
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
                saving = _saving(checkpoint, call, call.graph._planned(merged), durable_key)
            start = partial(self._streaming_call, call, merged, durable_key, answer, on_finished, saving)
            is_saved = saving is not None
            return stream_of(call, start, events, capacity, shows_progress=shows_progress, is_saved=is_saved)
        if checkpoint is not None:
            raise OptionsError(
                "checkpoint= is for one call of a graph that returns a stream; make the source a stream of that graph, "
                "engine.stream(train(data.order(source)), checkpoint=...)"
            )
        refuse_key(durable_key, answer, on_finished, "engine.stream")
        merged = resolve("stream", options, self._options)
        return CallsStream(self._runtime, calls, merged, shows_progress=shows_progress)

    def _streaming_call(
        self,
        call: Call[Any],
        options: ExecutionOptions,
        key: str | None,
        answer: object,
        on_finished: OnFinished,
        saving: Checkpointer | None,
        events: EventBuffer | None,
    ) -> StreamingCall:
        self._runtime.check_loop()
        kept = None
        if key is not None or on_finished != "again":
            plan = call.graph._planned(options)
            key = check_key(plan, "engine.stream", key, answer, on_finished)
            kept = durable_call(plan, call, key, answer, on_finished, self._runtime.pools.threads, options)
        return StreamingCall(OwnScope(self._runtime, options, key, answer, saving), call, options, kept, events)

    @overload
    def deploy(
        self,
        graph: Graph[P, R],
        /,
        *,
        strategy: Strategy = ...,
        max_restarts: int = ...,
        within_seconds: float = ...,
        warmup: bool = ...,
        key: Callable[P, Hashable] | None = ...,
        weights: Mapping[Any, float] | None = ...,
        max_in_flight_per_key: int | None = ...,
        max_queue_per_key: int | None = ...,
        **options: Unpack[CallOptions],
    ) -> "engine.Service[P, R]": ...
    @overload
    def deploy(
        self,
        graph: Graph[P, R],
        second: Graph[..., Any],
        /,
        *more: Graph[..., Any],
        strategy: Strategy = ...,
        max_restarts: int = ...,
        within_seconds: float = ...,
        warmup: bool = ...,
        key: Callable[[Call[Any]], Hashable] | None = ...,
        weights: Mapping[Any, float] | None = ...,
        max_in_flight_per_key: int | None = ...,
        max_queue_per_key: int | None = ...,
        **options: Unpack[CallOptions],
    ) -> "engine.Service[P, R]": ...
    def deploy(
        self,
        graph: Graph[P, R],
        /,
        *more: Graph[..., Any],
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
        """Make graphs resident, for servers; see `penstock.engine.deploy`."""
        from . import Service

        flags = SupervisorFlags(strategy, max_restarts, within_seconds)
        graphs: tuple[Graph[..., Any], ...] = tuple(as_graph(each, "engine.deploy") for each in (graph, *more))
        shares = fair_shares(graphs, key, weights, max_in_flight_per_key, max_queue_per_key)
        merged = resolve("deploy", options, self._options)
        return Service(self._runtime, graphs, merged, flags, warms_up=warmup, shares=shares)

    def plan(self, graph: Graph[..., Any], /) -> Plan:
        """Return what a graph will do; see `penstock.engine.plan`."""
        return as_graph(graph, "engine.plan")._planned(resolve("Engine", {}, self._options))

    async def memory(
        self, what: "Call[Any] | Graph[[], Any] | Plan", /, *, items: int | None = None, **options: Unpack[CallOptions]
    ) -> "engine.MemoryReport":
        """Run a call once, or compile a plan, and report what it takes; see `penstock.engine.memory`."""
        from .footprint import memory_of_call, memory_of_plan

        check("items", items, optional(whole(1)), "memory(")
        self._runtime.check_loop()
        if isinstance(what, Plan):
            return await memory_of_plan(self._runtime, what, resolve("run", options, self._options))
        call = as_call(what, "engine.memory")
        gives_stream = call.graph._present_trace().gives_stream
        merged = resolve("stream(call)" if gives_stream else "run", options, self._options)

        async def run(on_prepared: Callable[[Scope], None]) -> None:
            plan = one_value(call.graph, merged, "engine.memory")
            scheduler: ChosenScheduler = "parallel" if merged.scheduler == "auto" else merged.scheduler
            await _run_in_own_scope(self._runtime, call, merged, plan, scheduler, on_prepared)

        return await memory_of_call(self._runtime, call, merged, run, items)

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the counters."""
        runtime = self._runtime
        actors = tuple(actor.statistics() for actor in runtime.shared_actors())
        return EngineStatistics(len(runtime.frames), runtime.scopes, *runtime.pools.statistics(), actors)


class _DefaultEngine(Engine):
    """An Engine that no `async with` closes: its processes end with its last scope, its threads with the loop."""

    _is_default = True


# Not a WeakKeyDictionary: each Engine refers to its loop, so no key would ever go. Closed loops are removed below.
_defaults: dict[asyncio.AbstractEventLoop, Engine] = {}


def default_engine() -> Engine:
    """Return the default Engine of the running loop.

    Raises:
        EngineLoopError: no event loop is running.
    """
    loop = running_loop()
    engine = _defaults.get(loop)
    if engine is None:
        for other in [other for other in list(_defaults) if other.is_closed()]:
            _defaults.pop(other, None)  # another thread with a loop of its own may have removed it already
        engine = _defaults[loop] = _DefaultEngine()
    return engine


# Running one call.


def _saving(checkpoint: Checkpoint, call: Call[Any], plan: Plan, key: str | None) -> Checkpointer:
    if key is not None:
        raise OptionsError(
            "a call has durable_key=, for a durable loop, or checkpoint=, for a stream or a fold, and not both"
        )
    return Checkpointer(checkpoint, call, plan)


async def _run_call(
    runtime: Runtime, call: Call[Any], options: ExecutionOptions, plan: Plan, saving: Checkpointer | None = None
) -> Any:
    """Run one call from start to end; when this returns or raises, none of its tasks and threads is left."""
    scheduler: ChosenScheduler = "parallel" if options.scheduler == "auto" else options.scheduler
    if saving is not None:
        return await _run_in_own_scope(runtime, call, options, plan, scheduler, saving=saving)
    wired = runtime.shared_wiring(plan, scheduler, options)
    if wired is not None and wired.program.resources:
        return await _run_with_resources(runtime, call, options, wired)
    if wired is not None:
        runtime.scope_opened()
        try:
            return await _Run(runtime, call, options).run_to_end(wired)
        finally:
            if runtime.has_to_close_processes():
                await runtime.scope_closed()
            else:
                runtime.scope_closed_nowait()
    return await _run_in_own_scope(runtime, call, options, plan, scheduler)


async def _run_in_own_scope(
    runtime: Runtime,
    call: Call[Any],
    options: ExecutionOptions,
    plan: Plan,
    scheduler: ChosenScheduler,
    on_prepared: Callable[[Scope], None] | None = None,
    saving: Checkpointer | None = None,
) -> Any:
    run = _Run(runtime, call, options)
    scope = Scope(
        runtime, options, scheduler, is_one_call=True, counts_handlers=run.handlers is not None, threads=run.threads,
        saving=saving,
    )  # fmt: skip
    try:
        wired = await run.started(scope.prepare(plan))
        if on_prepared is not None:
            on_prepared(scope)
        scope.on_failed = run.fail_with
        if saving is None:
            return await run.run_to_end(wired)
        saving.on_failure = run.fail
        result = await run.run_to_end(wired)
        saving.is_done = True
        return result
    finally:
        await scope.close()


async def _run_with_resources(runtime: Runtime, call: Call[Any], options: ExecutionOptions, wired: Wired) -> Any:
    run = _Run(runtime, call, options)
    runtime.scope_opened()
    try:
        if not runtime.resources.hold_nowait(wired.program, run):
            await run.started(runtime.resources.hold(wired.program, run))
        return await run.run_to_end(wired)
    finally:
        try:
            await runtime.resources.release(run)
        finally:
            await runtime.scope_closed()


class _Run(RunningCall):
    """A call of `run`."""

    def __init__(self, runtime: Runtime, call: Call[Any], options: ExecutionOptions) -> None:
        loop = asyncio.get_running_loop()
        seconds = options.timeout_seconds
        super().__init__(loop, call.graph.name, options, call._trace_headers, timeout_seconds=seconds)
        if options.collect_metrics:
            self.count(runtime.counted_runs)
        self.threads = runtime.pools.share_of_threads(options.max_workers)
        if options.max_workers is not None:
            self.handlers = asyncio.Semaphore(options.max_workers)
        self._runtime = runtime
        self._call = call
        self._options = options
        self._over: asyncio.Future[None] = loop.create_future()

    async def started(self, starting: Coroutine[Any, Any, T]) -> T:
        """Wait for the resources and stateful nodes of the graph to start; the deadline of the call covers that."""
        timer = asyncio.timeout_at(self.ends_at)
        try:
            async with timer:
                return await starting
        except BaseException as error:
            substitute = self._not_started(error, timed_out=timer.expired())
            if substitute is error:
                raise
            raise substitute from None

    async def run_to_end(self, wired: Wired) -> Any:
        """Launch the call and wait until its last worker has ended; return the result or raise the error."""
        runtime = self._runtime
        if runtime.closed:  # the Engine was closed while resources or stateful nodes started
            raise self._not_started(runtime.closed_error(), timed_out=False)
        runtime.frames.add(self)
        self.launch(wired, self._call.arguments, 0, runtime.eager_starts)
        try:
            await self._over
        except asyncio.CancelledError:
            self.cancel()
            self.drop_unread()  # if it was done already
            await until(lambda: not self._unwinding(), lambda: asyncio.wait(self._unwinding()))
            raise
        finally:
            runtime.frames.discard(self)
            self.report()
            if self.late_scope is not None:
                await self.late_scope.close()
        return self.outcome()

    def new_scope(self) -> Scope:
        """Return a scope for what its handlers call; see `RunningCall`."""
        scope = Scope(self._runtime, self._options, "parallel", is_one_call=True, threads=self.threads)
        scope.on_failed = self.fail_with
        return scope

    def fail_with(self, make_error: Callable[[str], DeploymentFailed]) -> None:
        """Fail the call, because its stateful nodes crash too often."""
        if self in self._runtime.frames and self.state == "running":
            self.fail(make_error(f"the run of graph {self._call.graph.name!r}"))

    def ended(self) -> None:
        """Release the caller: the last worker of the call has ended."""
        if not self._over.done():
            self._over.set_result(None)

    def _not_started(self, error: BaseException, *, timed_out: bool) -> BaseException:
        """End the span of a call that could not be launched; return the error to raise."""
        if timed_out and self.timeout_seconds is not None:
            error = DeadlineExceeded(
                f"the resources and stateful nodes of graph {self._call.graph.name!r} did not start within "
                f"{self.timeout_seconds:g} s"
            )
        self.report("failed", error)
        return error

    def _unwinding(self) -> list[asyncio.Task[None]]:
        # The tasks are asked, not `ended`: a task that is cancelled before its first step never calls that.
        return [worker.task for worker in self.workers if worker.task and not worker.task.done()]
