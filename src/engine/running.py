"""Running one call: `engine.run`."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from .._errors import DeadlineExceeded, DeploymentFailed
from ..actors.cancellation import until
from .call import RunningCall
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
            return await _Run(runtime, call, options).run_to_end(wired)
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
        scope.on_failed = run.fail_with
        return await run.run_to_end(wired)
    finally:
        await scope.close()


async def _run_with_resources(runtime: "Runtime", call: Call[Any], options: ExecutionOptions, wired: Wired) -> Any:
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
    """One call on its own."""

    def __init__(self, runtime: "Runtime", call: Call[Any], options: ExecutionOptions) -> None:
        loop = asyncio.get_running_loop()
        seconds = options.timeout_seconds
        super().__init__(loop, call.graph.name, options, call._trace_headers, timeout_seconds=seconds)
        if options.collect_metrics:
            self.count(runtime.counted_runs)
        self.threads = runtime.pools.share_of_threads(options.max_workers)
        self._runtime = runtime
        self._call = call
        self._is_launched = False
        self._over: asyncio.Future[None] = loop.create_future()

    async def started(self, starting: Coroutine[Any, Any, T]) -> T:
        """Wait for the start of what the graph needs; the deadline covers it as well."""
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
        """Run it to its end; nothing of it is left then."""
        runtime = self._runtime
        if runtime.closed:  # while something was opened
            raise self._not_started(runtime.closed_error(), timed_out=False)
        runtime.frames.add(self)
        self._is_launched = True
        self.launch(wired, self._call.arguments, 0, runtime.eager_starts)
        try:
            await self._over
        except asyncio.CancelledError:
            self.cancel()
            await until(lambda: not self._unwinding(), lambda: asyncio.wait(self._unwinding()))
            raise
        finally:
            runtime.frames.discard(self)
            self.report()
        return self.outcome()

    def fail_with(self, make_error: "Callable[[str], DeploymentFailed]") -> None:
        """Its stateful nodes crash too often."""
        if self._is_launched and self.state == "running":
            self.fail(make_error(f"the run of graph {self._call.graph.name!r}"))

    def ended(self) -> None:
        """Release the caller: nothing runs for it any more."""
        if not self._over.done():
            self._over.set_result(None)

    def _not_started(self, error: BaseException, *, timed_out: bool) -> BaseException:
        """End the span of a call that did not start; returns what to raise."""
        if timed_out and self.timeout_seconds is not None:
            error = DeadlineExceeded(
                f"the resources and stateful nodes of graph {self._call.graph.name!r} did not start within "
                f"{self.timeout_seconds:g} s"
            )
        self.report("failed", error)
        return error

    def _unwinding(self) -> list[asyncio.Task[None]]:
        # By tasks and not by `ended`: a worker that is cancelled before its first step never says that it has ended.
        return [worker.task for worker in self.workers if worker.task and not worker.task.done()]
