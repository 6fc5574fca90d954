"""Cancel an async function at every point of its run, in one run for each point."""

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, TypeVarTuple

from ._quiescence import wait_quiescent
from ._seeded_loop import LoopStep, SeededLoop, task_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, kw_only=True)
class CancelOutcome(Generic[T]):
    """The outcome of one run whose main task was cancelled after `step` steps.

    Attributes:
        step: how many callbacks and steps of tasks had run when the cancellation was sent; 0 is before the first step.
        cancelled: whether the cancellation was sent; False in the last outcome, whose run ended before that step.
        result: the result of the main function; None if the function raised.
        error: the exception that the main function raised, including CancelledError; None if the function returned.
        tasks_left: the tasks that were still alive after the end of the run, when all tasks were blocked.
        loop_errors: the errors that were reported to the exception handler of the loop.
    """

    step: int
    cancelled: bool
    result: T | None
    error: BaseException | None
    tasks_left: tuple[str, ...]
    loop_errors: tuple[str, ...]


def cancel_at_every_step(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    seed: int = 0,
    timeout_seconds: float | None = 3600.0,
) -> Iterator[CancelOutcome[T]]:
    """Run `main()` again and again, cancelled one step later each time, until a run ends before its cancellation.

    A step is one callback or one turn of any task. So each run is cancelled at another point: at a suspension point of
    `main` or of a task that it starts, or between the wake-up of a task and its next turn. All runs use a `SeededLoop`
    with the same seed, so they are equal up to the cancellation.

        for outcome in cancel_at_every_step(main):
            assert not outcome.tasks_left

    Args:
        main: an async function without parameters; called anew for each run.
        seed: the seed, which chooses the interleaving.
        timeout_seconds: how long one run may take, in virtual seconds. Pass None if `main` waits for threads that the
            loop does not know (see `VirtualClockLoop`).

    Yields:
        One outcome for each run, as soon as the run has ended, so that a test can check the effects of each run.

    Raises:
        TimeoutError: a run did not end, cancelled or not; a note names the step.
    """
    step = 0
    cancelled = True
    while cancelled:
        with asyncio.Runner(loop_factory=functools.partial(_CancellingLoop, seed)) as runner:
            outcome = runner.run(_observe(main, step, timeout_seconds))
        yield outcome
        cancelled = outcome.cancelled
        step += 1


async def _observe(
    main: Callable[[], Coroutine[Any, Any, T]], step: int, timeout_seconds: float | None
) -> CancelOutcome[T]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _CancellingLoop)
    loop_errors: list[str] = []
    loop.set_exception_handler(lambda _, report: loop_errors.append(_describe(report)))
    task = asyncio.create_task(main(), name="main")
    loop.cancel_after(task, step)
    await asyncio.wait([task], timeout=timeout_seconds)
    if not task.done():
        late = TimeoutError(f"the run did not end within {timeout_seconds} virtual seconds")
        late.add_note(f"cancelled at step {step} under seed {loop.seed}")
        raise late
    await wait_quiescent()
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    return CancelOutcome(
        step=step,
        cancelled=loop.cancel_sent,
        result=task.result() if error is None else None,
        error=error,
        tasks_left=tuple(sorted(repr(left) for left in asyncio.all_tasks() - {asyncio.current_task()})),
        loop_errors=tuple(loop_errors),
    )


def _describe(report: dict[str, Any]) -> str:
    error = report.get("exception")
    return f"{report['message']}: {error!r}" if error is not None else str(report["message"])


class _CancellingLoop(SeededLoop):
    """A loop that counts its steps, and cancels one task after a given number of steps."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cancel_sent = False
        self._target: asyncio.Task[Any] | None = None
        self._remaining = 0

    def cancel_after(self, task: asyncio.Task[Any], step: int) -> None:
        """Cancel the task after `step` more callbacks and steps, unless the task is done by then."""
        self._target, self._remaining = task, step
        self._cancel_if_due()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if task_of(callback) is not None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(self._counted(callback), *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._counted(callback), *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._counted(callback), *args, context=context)

    def _counted(self, callback: Callable[[*Ts], object]) -> Callable[[*Ts], None]:
        def run_and_count(*args: *Ts) -> None:
            try:
                callback(*args)
            finally:
                self._count()

        return run_and_count

    def _run_step(self, step: LoopStep) -> None:
        super()._run_step(step)
        self._count()

    def _count(self) -> None:
        if self._target is not None:
            self._remaining -= 1
            self._cancel_if_due()

    def _cancel_if_due(self) -> None:
        if self._target is not None and self._remaining <= 0:
            self.cancel_sent = self._target.cancel()
            self._target = None
