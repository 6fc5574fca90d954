"""An event loop that chooses at random, but from a seed, which runnable task takes the next step."""

import asyncio
import contextvars
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVarTuple

from ._virtual_clock import VirtualClockLoop

Ts = TypeVarTuple("Ts")

# How often a step that could run now waits for a later turn. Without it, tasks woken by two callbacks of one iteration
# would always run in that order; a quarter mixes neighbours well and still ends a round soon.
_POSTPONE_PROBABILITY = 0.25


@dataclass(frozen=True)
class Step:
    """One step of one task, waiting for its turn."""

    task_number: int
    callbacks_before: int
    run: Callable[[], object]


def task_of(callback: Callable[..., object]) -> asyncio.Task[object] | None:
    """Returns the task whose step the callback is, or None; asyncio tells them apart in the same way, to print them."""
    owner: asyncio.Task[object] | None = getattr(callback, "__self__", None)  # or an object of any other kind
    return owner if isinstance(owner, asyncio.Task) else None


class SeededLoop(VirtualClockLoop):
    """A virtual-time loop that shuffles the steps of runnable tasks; one seed replays one interleaving.

    Only steps of tasks change places. Plain callbacks (`call_soon`, done-callbacks of futures, transports) keep the
    order in which they were registered, and no step runs before a callback that was registered before it: asyncio
    promises both, and its own transports rely on them. So every interleaving that this loop finds is one that another
    order of arrival could have produced.

    A replay is exact as long as the program is: threads, real sockets and the iteration order of sets of strings are
    outside the loop's reach. Tasks are chosen by the order of their creation, so sets of tasks do no harm.

    Args:
        seed: any integer; two loops with one seed run one program in one order.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._steps: list[Step] = []
        self._callbacks = 0
        self._task_numbers: weakref.WeakKeyDictionary[asyncio.Task[object], int] = weakref.WeakKeyDictionary()
        self._tasks_seen = 0
        self._turn_context = contextvars.Context()
        super().__init__()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio, except that a step of a task gets a turn, and which step takes a turn is drawn then."""
        task = task_of(callback)
        if task is None:
            self._callbacks += 1
            return super().call_soon(callback, *args, context=context)
        used = context if context is not None else contextvars.copy_context()
        number = self._number_of(task)
        self._steps.append(Step(number, self._callbacks, lambda: used.run(callback, *args)))
        return self._add_turn()

    def _number_of(self, task: asyncio.Task[object]) -> int:
        number = self._task_numbers.get(task)
        if number is None:
            number = self._task_numbers[task] = self._tasks_seen
            self._tasks_seen += 1
        return number

    def _add_turn(self) -> asyncio.Handle:
        # In a context of its own, because a context cannot be entered twice and the step enters the task's.
        return super().call_soon(self._take_turn, self._callbacks, context=self._turn_context)

    def _take_turn(self, callbacks_run: int) -> None:
        """Runs one waiting step, of which there are as many as turns.

        When a turn comes, the `callbacks_run` plain callbacks registered before it have run, so a step may take it if
        no more than those were registered before the step. The step that this turn was made for may, unless it is
        gone already, and then another one that was due before is left: there is always a choice.
        """
        if self._random.random() < _POSTPONE_PROBABILITY:
            self._add_turn()
            return
        free = [step for step in self._steps if step.callbacks_before <= callbacks_run]
        free.sort(key=lambda step: step.task_number)
        step = self._random.choice(free)
        self._steps.remove(step)
        self._run_step(step)

    def _run_step(self, step: Step) -> None:
        step.run()
