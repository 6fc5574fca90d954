"""Service: resident graphs that many callers share."""

import asyncio
from collections.abc import AsyncIterable, Coroutine, Iterable
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, Unpack

from .._errors import DeadlineExceeded, EngineClosedError, EngineLoopError, ReentrantCallError
from ..actors.actor import ActorStatistics
from ..actors.frame import Frame
from .admission import Admission, AdmissionStatistics
from .graph import Call, Graph, as_call
from .options import CallOptions, ExecutionOptions, resolve, scoped_options
from .pipeline import Pipeline
from .scope import Scope, enclosing_frame, end_span, start_span
from .source import Calls
from .stream import Stream
from .uninterrupted import uninterrupted
from .wiring import Wired

if TYPE_CHECKING:
    from .engine import Engine

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

ServiceState = Literal["starting", "ready", "draining", "stopped"]


@dataclass(frozen=True)
class ServiceStatistics:
    """A snapshot of a deployment.

    Attributes:
        state: starting, ready, draining or stopped.
        completed: calls that ended with a result.
        failed: calls that ended with an error.
        cancelled: calls whose caller went away.
        admission: places, and who waits for one.
        actors: the nodes.
    """

    state: ServiceState
    completed: int
    failed: int
    cancelled: int
    admission: AdmissionStatistics
    actors: tuple[ActorStatistics, ...]


class Service(Generic[P, R]):
    """Graphs made resident by `engine.deploy`: one set of actors and stateful nodes for all calls.

    An async context manager: a normal exit drains it, an exception aborts it.

    Attributes:
        state: "starting", "ready", "draining" or "stopped".
    """

    def __init__(self, engine: "Engine", graphs: tuple[Graph[..., Any], ...], options: ExecutionOptions) -> None:
        checked_graphs(graphs)
        self.state: ServiceState = "starting"
        self._engine = engine
        self._graphs = graphs
        self._options = options
        # A running deployment keeps its plans, whatever is rebound meanwhile.
        self._wired: dict[Graph[..., Any], Wired] = {}
        self._scope: Scope | None = None
        self._admission: Admission | None = None
        self._started = False
        self._ready = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._live: set[Frame] = set()
        self._streams: set[Pipeline] = set()
        self._items = 0
        self._counts = {"done": 0, "failed": 0, "cancelled": 0, "running": 0}

    async def __aenter__(self) -> Self:
        if self._scope is not None or self.state == "stopped":
            raise EngineClosedError(
                "this deployment was started or stopped already; engine.deploy(...) makes a new one"
            )
        self._engine.check_loop()
        options = self._options
        scheduler = "actors" if options.scheduler == "auto" else options.scheduler
        self._engine.open.add(self)
        self._scope = Scope(self._engine, options, scheduler)
        self._admission = Admission(self._scope.loop, options.max_in_flight, options.max_queue)
        try:
            for graph in self._graphs:
                self._wired[graph] = await self._scope.prepare(graph.plan())
            if self._is_stopped():
                raise self._stopped_error()
        except BaseException:
            self._started, self._stopping = True, None
            await self.abort()
            raise
        self._started = True
        self.state = "ready"
        self._ready.set()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            await self.drain()
        else:
            await self.abort()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the first of the deployed graphs; `await` the result. Raises as `run` does."""
        # Not an `async def` itself: a second coroutine around `_run` would cost as much as a hop.
        call: Call[R] = self._graphs[0](*args, **kwargs)
        if scoped_options():
            return self.run(call)
        return self._run(call, self._options.timeout_seconds, self._options.priority)

    async def run(self, call: Call[T], /, **options: Unpack[CallOptions]) -> T:
        """Run one call of a deployed graph.

        Args:
            call: the call.
            **options: `timeout_seconds` and `priority`.

        Raises:
            Overloaded: every place and every place in the queue is taken.
            TimeoutError: the call did not finish within `timeout_seconds`, waiting for a place included.
            ReentrantCallError: called from inside one of its own nodes.
            EngineClosedError: the deployment is draining or stopped.
        """
        merged = resolve("service.run", options, self._inherited())
        result: T = await self._run(as_call(call, "service.run"), merged.timeout_seconds, merged.priority)
        return result

    def stream(self, calls: Iterable[Call[T]] | AsyncIterable[Call[T]], /, **options: Unpack[CallOptions]) -> Stream[T]:
        """Run many calls of deployed graphs, and yield their results in input order.

        Args:
            calls: the calls.
            **options: `timeout_seconds`, `priority`, `ordered`, `on_error`, and `max_in_flight` of this stream.
        """
        self._check_callable()
        merged = resolve("service.stream", options, self._inherited())
        return Stream(self._engine, calls, merged, self._pipeline)

    async def map(self, calls: Iterable[Call[T]], /, **options: Unpack[CallOptions]) -> list[T]:
        """Run many calls of deployed graphs; returns their results in input order."""
        async with self.stream(calls, **options) as results:
            return [result async for result in results]

    async def ready(self) -> None:
        """Wait until calls are served.

        Raises:
            EngineClosedError: the deployment failed to start, or was stopped.
        """
        await self._ready.wait()
        if self.state == "stopped":
            raise self._stopped_error()

    async def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Refuse new calls, finish those that were accepted, and stop; what is left after the timeout is aborted.

        Args:
            timeout_seconds: how long to wait for accepted calls; None for as long as they take.
        """
        self._refuse_from_inside()
        if self.state == "ready":
            self.state = "draining"
            for pipeline in self._streams:
                pipeline.finish()
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.state == "draining" and self._is_busy():
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Refuse new calls, end those in flight with `EngineClosedError`, and stop; waits until nothing is left."""
        self._refuse_from_inside()
        await uninterrupted(self.abort_soon())

    def _is_stopped(self) -> bool:
        return self.state == "stopped"

    async def _stop(self) -> None:
        if self._scope is None or not self._started:
            return  # `__aenter__` sees that it was stopped, and ends what it has begun
        error = EngineClosedError("this deployment was stopped while the call was in flight")
        for frame in list(self._live):
            frame.fail(EngineClosedError(str(error)))
        for pipeline in list(self._streams):
            pipeline.abort(error)
            await pipeline.aclose()
        await self._scope.close()

    def statistics(self) -> ServiceStatistics:
        """Return a snapshot of the counters."""
        if self._admission is None or self._scope is None:
            empty = AdmissionStatistics(0, self._options.max_in_flight, 0, self._options.max_queue, 0, 0, None)
            return ServiceStatistics(self.state, 0, 0, 0, empty, ())
        return ServiceStatistics(
            self.state,
            self._counts["done"],
            self._counts["failed"],
            self._counts["cancelled"],
            self._admission.statistics(),
            tuple(actor.statistics() for actor in self._scope.wiring.actors()),
        )

    def abort_soon(self) -> "asyncio.Task[None]":
        """Refuse new calls from now on, and begin to end those in flight; returns the task that does."""
        self.state = "stopped"
        self._ready.set()
        self._idle.set()
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(), name="penstock-service-stop")
        return self._stopping

    def frame_settled(self, frame: Frame) -> None:
        """Nothing runs for a call any more."""
        self._live.discard(frame)
        self._counts[frame.state] += 1
        assert self._admission is not None
        self._admission.release()
        if not self._live:
            self._idle.set()

    async def _run(self, call: Call[Any], timeout_seconds: float | None, priority: int) -> Any:
        scope, admission = self._check_callable()
        wired = self._wired.get(call.graph) or await self._deployed(call.graph)
        deadline = None if timeout_seconds is None else scope.loop.time() + timeout_seconds
        if not admission.reserve_nowait():
            await self._reserve(admission, call, priority, deadline)
        context = copy_context()
        span, traced = start_span(call, context)
        flight = _Flight(self, scope.loop.create_future())
        crew = scope.crew(context, traced=traced, deadline=deadline)
        frame = Frame(wired.program, call.arguments, crew, flight, self._items, enclosing_frame())
        frame.priority = priority
        self._live.add(frame)
        self._items += 1
        frame.span = span if traced else None
        if deadline is not None and timeout_seconds is not None:
            frame.expire_at(deadline, timeout_seconds)
        if frame.state == "running":
            crew.launch(frame, wired.entries)
        try:
            await flight.outcome_known
        except asyncio.CancelledError:
            frame.cancel()
            raise
        finally:
            if span is not None:
                end_span(span, frame)
        return frame.outcome()

    async def _deployed(self, graph: Graph[..., Any]) -> Wired:
        if graph not in self._wired:
            raise EngineClosedError(
                f"graph {graph.name!r} is not part of this deployment of {self.names}; deploy them together: "
                "engine.deploy(first, second)"
            )
        return self._wired[graph]

    async def _reserve(self, admission: Admission, call: Call[Any], priority: int, deadline: float | None) -> None:
        """Wait for a place; the deadline covers it, and a deployment that stops meanwhile says so."""
        timer = asyncio.timeout_at(deadline)
        try:
            async with timer:
                await admission.reserve(priority, call.graph.name)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise DeadlineExceeded(f"the call of graph {call.graph.name!r} got no place before its deadline") from error
        if self.state == "stopped":
            admission.release()
            raise self._stopped_error()

    def _is_busy(self) -> bool:
        """Whether accepted calls have not ended; those of a stream may end unread."""
        return bool(self._live or self._admission_queue() or any(p.window.running for p in self._streams))

    def _admission_queue(self) -> int:
        return 0 if self._admission is None else self._admission.statistics().queued

    def _pipeline(self, calls: Calls, options: ExecutionOptions) -> Pipeline:
        scope, admission = self._check_callable()
        pipeline = Pipeline(scope, calls, options, prepare=self._deployed, owns_scope=False, admission=admission)
        pipeline.window.service = self
        self._streams.add(pipeline)
        pipeline.on_closed = self._stream_closed
        pipeline.on_item_settled = self._idle.set
        return pipeline

    def _stream_closed(self, pipeline: Pipeline) -> None:
        self._streams.discard(pipeline)
        self._idle.set()

    def _inherited(self) -> dict[str, Any]:
        options = self._options
        return {"timeout_seconds": options.timeout_seconds, "max_in_flight": options.max_in_flight}

    def _check_callable(self) -> tuple[Scope, Admission]:
        if self._scope is None or self._admission is None:
            raise EngineClosedError(
                "this deployment was not started; enter it first: async with engine.deploy(...) as service"
            )
        if self.state != "ready":
            raise self._stopped_error()
        if asyncio.get_running_loop() is not self._scope.loop:
            raise EngineLoopError("this deployment runs on another event loop; call it from there")
        self._refuse_from_inside()
        return self._scope, self._admission

    def _refuse_from_inside(self) -> None:
        """Refuse what waits for this deployment in one of its own nodes.

        The frames around the caller lead to the deployments that they belong to.
        """
        frame = enclosing_frame()
        if frame is None:  # nearly always
            return
        services = [self, *(frame.listener.service for frame in frame.lineage() if frame.listener.service is not None)]
        if self in services[1:]:
            chain = " → ".join(service.names for service in reversed(services[: services.index(self, 1) + 1]))
            raise ReentrantCallError(
                f"{chain}: a deployment was called, drained or aborted from inside one of its own nodes, which would "
                "wait for itself for ever; call the graph inside the graph instead, where it is inlined, or use "
                "engine.run"
            )

    def _stopped_error(self) -> EngineClosedError:
        return EngineClosedError(f"the deployment of {self.names} is {self.state} and takes no more calls")

    @property
    def names(self) -> str:
        """The names of the deployed graphs."""
        return ", ".join(graph.name for graph in self._graphs)


def checked_graphs(graphs: tuple[object, ...]) -> None:
    """Raise TypeError for what is no graph."""
    for graph in graphs:
        if not isinstance(graph, Graph):
            raise TypeError(f"engine.deploy takes graphs, not calls or functions: got {graph!r}")


class _Flight:
    """One call of a deployment: it listens to its frame."""

    __slots__ = ("outcome_known", "service")

    def __init__(self, service: Service[Any, Any], outcome_known: "asyncio.Future[None]") -> None:
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
