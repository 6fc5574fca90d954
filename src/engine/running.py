"""Running one call: `engine.run`."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from .._errors import DeadlineExceeded, DeploymentFailed
from ..actors.cancellation import until
from ..actors.current import enclosing_frame, is_detached
from ..actors.frame import Frame
from ..actors.worker import WorkerGroup
from ..telemetry import spans
from .counters import RunMeter, end_call
from .graph import Call
from .options import ExecutionOptions
from .planning import ChosenScheduler, Plan, one_value
from .scope import Scope, Wired

if TYPE_CHECKING:
    from .engine import Runtime

T = TypeVar("T")


async def run_call(runtime: "Runtime", call: Call[Any], options: ExecutionOptions) -> Any:
    """Run one call from start to end; nothing of it is left when this returns or raises."""
    plan = one_value(call.graph, options, "engine.run")
    scheduler: ChosenScheduler = "parallel" if options.scheduler == "auto" else options.scheduler
    wired = runtime.shared_wiring(plan, scheduler, options)
    if wired is not None and wired.program.resources:
        return await _run_with_resources(runtime, call, options, wired)
    if wired is not None:
        runtime.scope_opened()
        try:
            return await _Run(runtime, call, options).finish(wired)
        finally:
            if runtime.has_to_close_processes():
                await runtime.scope_closed()
            else:
                runtime.scope_closed_nowait()
    return await _run_in_own_scope(runtime, call, options, plan, scheduler)


async def _run_in_own_scope(
    runtime: "Runtime", call: Call[Any], options: ExecutionOptions, plan: Plan, scheduler: ChosenScheduler
) -> Any:
    run = _Run(runtime, call, options)
    scope = Scope(runtime, options, scheduler, is_one_call=True, threads=run.threads)
    try:
        wired = await run.started(scope.prepare(plan))
        scope.on_failed = run.fail
        return await run.finish(wired)
    finally:
        await scope.close()


async def _run_with_resources(runtime: "Runtime", call: Call[Any], options: ExecutionOptions, wired: Wired) -> Any:
    run = _Run(runtime, call, options)
    runtime.scope_opened()
    try:
        if not runtime.resources.hold_nowait(wired.program, run):
            await run.started(runtime.resources.hold(wired.program, run))
        return await run.finish(wired)
    finally:
        try:
            await runtime.resources.release(run)
        finally:
            await runtime.scope_closed()


class _Run:
    """One call on its own: it listens to its frame."""

    __slots__ = (
        "_call",
        "_frame",
        "_group",
        "_meter",
        "_options",
        "_runtime",
        "_span",
        "_traced",
        "_waiter",
        "deadline",
        "threads",
    )  # fmt: skip

    def __init__(self, runtime: "Runtime", call: Call[Any], options: ExecutionOptions) -> None:
        self._runtime = runtime
        self._call = call
        self._options = options
        self._frame: Frame | None = None
        self._meter = RunMeter(call.graph.name, runtime.counted_runs) if options.collect_metrics else None
        loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] = loop.create_future()
        context = copy_context()
        self._span, self._traced = spans.start_run(
            call.graph.name, context, is_wanted=options.trace_execution, headers=call._trace_headers
        )
        seconds = options.timeout_seconds
        self.deadline = None if seconds is None else loop.time() + seconds
        self.threads = runtime.pools.share_of_threads(options.max_workers)
        self._group = WorkerGroup(
            loop, context, self._ended, traced=self._traced, ends_at=self.deadline, threads=self.threads
        )

    async def started(self, starting: Coroutine[Any, Any, T]) -> T:
        """Wait for the start of what the graph needs; the deadline covers it as well."""
        timer = asyncio.timeout_at(self.deadline)
        try:
            async with timer:
                return await starting
        except BaseException as error:
            substitute = self.not_started(error, timed_out=timer.expired())
            if substitute is error:
                raise
            raise substitute from None

    async def finish(self, wired: Wired) -> Any:
        if self._runtime.closed:  # while something was opened
            raise self.not_started(self._runtime.closed_error(), timed_out=False)
        parent = enclosing_frame()
        frame = self._frame = Frame(wired.program, self._call.arguments, self._group, self, 0, parent)
        if self._span is not None and self._traced:
            frame.span = spans.FrameSpan(self._span)
        if self.deadline is not None and self._options.timeout_seconds is not None:
            frame.expire_at(self.deadline, self._options.timeout_seconds)
        if parent is not None and is_detached():
            frame.expire_with_parent()
        self._runtime.frames.add(frame)
        if frame.state == "running":
            self._group.launch(frame, wired.entries)
        try:
            await self._waiter
        except asyncio.CancelledError:
            frame.cancel()
            await until(lambda: not self._unwinding(), lambda: asyncio.wait(self._unwinding()))
            raise
        finally:
            self._runtime.frames.discard(frame)
            self._frame = None
            end_call(frame.state, frame.error, self._span, self._meter)
        return frame.outcome()

    def fail(self, make_error: "Callable[[str], DeploymentFailed]") -> None:
        """Its stateful nodes crash too often."""
        if self._frame is not None and self._frame.state == "running":
            self._frame.fail(make_error(f"the run of graph {self._call.graph.name!r}"))

    def not_started(self, error: BaseException, *, timed_out: bool) -> BaseException:
        """End the span of a call that did not start; returns what to raise."""
        if timed_out and self._options.timeout_seconds is not None:
            name, seconds = self._call.graph.name, self._options.timeout_seconds
            error = DeadlineExceeded(
                f"the resources and stateful nodes of graph {name!r} did not start within {seconds:g} s"
            )
        end_call("failed", error, self._span, self._meter)
        return error

    def _unwinding(self) -> list[asyncio.Task[None]]:
        # By tasks and not by the group: a worker that is cancelled before its first step never tells the group.
        return [worker.task for worker in self._group.workers if worker.task and not worker.task.done()]

    @property
    def service(self) -> None:
        """A run belongs to no deployment."""

    def frame_done(self, frame: Frame) -> None:
        """The outcome is known: let the workers end."""
        self._group.close()

    def frame_settled(self, frame: Frame) -> None:
        """The end of the last worker says so, too."""

    def _ended(self, group: WorkerGroup) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)
