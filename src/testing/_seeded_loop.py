"""An event loop that chooses at random which runnable task takes the next step; a seed makes the choice repeatable."""

import asyncio
import contextvars
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVarTuple

from ._virtual_clock import VirtualClockLoop

Ts = TypeVarTuple("Ts")

# The probability with which a turn is put off to a later turn of the loop. Without this, two tasks that were woken in
# one turn of the loop would always run in the order of their wake-ups. A quarter mixes neighbours well, and turns stay
# short.
_POSTPONE_PROBABILITY = 0.25


@dataclass(frozen=True)
class LoopStep:
    """A step of a task that can run."""

    task_number: int
    callbacks_before: int
    run: Callable[[], object]


def task_of(callback: Callable[..., object]) -> asyncio.Task[object] | None:
    """Return the task if the callback is a step of a task, None otherwise; asyncio uses the same test in its reprs."""
    owner: asyncio.Task[object] | None = getattr(callback, "__self__", None)  # any object for other callbacks
    return owner if isinstance(owner, asyncio.Task) else None


class SeededLoop(VirtualClockLoop):
    """A virtual-time loop that shuffles the steps of runnable tasks; the same seed gives the same interleaving.

    Only steps of tasks change places. Plain callbacks (`call_soon`, done-callbacks of futures, transports) keep the
    order in which they were registered, and no step runs before a callback that was registered earlier: asyncio
    promises both, and its own transports rely on both. So each interleaving that this loop finds could also occur on
    another loop, with another order of arrivals.

    A replay is exact if the program itself is deterministic: the loop has no influence on threads, real sockets and the
    iteration order of sets of strings. Sets of tasks do no harm, because tasks are told apart by the order in which
    they were created.

    Args:
        seed: any integer; two loops with the same seed run a program in the same order.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._steps: list[LoopStep] = []
        self._callbacks = 0
        self._task_numbers: weakref.WeakKeyDictionary[asyncio.Task[object], int] = weakref.WeakKeyDictionary()
        self._tasks_seen = 0
        self._turn_context = contextvars.Context()
        super().__init__()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as asyncio does; for a step of a task, schedule a turn, which chooses a step."""
        task = task_of(callback)
        if task is None:
            self._callbacks += 1
            return super().call_soon(callback, *args, context=context)
        used = context if context is not None else contextvars.copy_context()
        number = self._number_of(task)
        self._steps.append(LoopStep(number, self._callbacks, lambda: used.run(callback, *args)))
        return self._add_turn()

    def _number_of(self, task: asyncio.Task[object]) -> int:
        number = self._task_numbers.get(task)
        if number is None:
            number = self._task_numbers[task] = self._tasks_seen
            self._tasks_seen += 1
        return number

    def _add_turn(self) -> asyncio.Handle:
        # Not in the context of the task: the step enters that context, and a context cannot be entered twice.
        return super().call_soon(self._take_turn, self._callbacks, context=self._turn_context)

    def _take_turn(self, callbacks_run: int) -> None:
        """Run one of the steps that can run; there are as many steps as turns.

        When a turn comes, the `callbacks_run` plain callbacks that were registered before the turn have run. A step may
        take the turn if no further callbacks were registered before the step. That is true for the step for which this
        turn was scheduled. If an earlier turn has taken that step, another step that could run earlier is left. So
        there is always a step to choose.
        """
        if self._random.random() < _POSTPONE_PROBABILITY:
            self._add_turn()
            return
        free = [step for step in self._steps if step.callbacks_before <= callbacks_run]
        free.sort(key=lambda step: step.task_number)
        step = self._random.choice(free)
        self._steps.remove(step)
        self._run_step(step)

    def _run_step(self, step: LoopStep) -> None:
        step.run()
