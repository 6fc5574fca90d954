"""Running the bodies of control flow: private sub-graphs, driven by the worker that is in the control-flow step.

The worker works in the body's crew itself, so a loop costs no task and no wake-up for each iteration; only what runs
beside it gets workers of its own.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from ..actors import current
from ..actors.crew import Crew
from ..actors.frame import Frame
from ..actors.invocation import call_in_thread
from ..actors.node_actor import Body, NodeActor
from ..actors.threads import ThreadPool
from ..actors.uninterrupted import until
from ..actors.worker import Worker
from ..telemetry import spans
from .control import Control, check_items, checked_branch, iteration_limit

if TYPE_CHECKING:
    from .wiring import Wired

Args = tuple[Any, ...]


def body_of(control: Control, bodies: "tuple[Wired, ...]", threads: Callable[[], ThreadPool]) -> Body:
    """Return what runs a control-flow step: it decides which body runs on what.

    Args:
        control: the kind of the step.
        bodies: its bodies.
        threads: returns the threads of the Engine.
    """
    counts = [len(wired.program.plan.captures) for wired in bodies]

    def captured(args: Args, index: int, own: int) -> Args:
        """Return what body `index` takes from outside; `own` arguments of the step come first."""
        start = own + sum(counts[:index])
        return args[start : start + counts[index]]

    async def cond(worker: Worker, actor: NodeActor, frame: Frame, args: Args, kwargs: dict[str, Any]) -> Any:
        index = 0 if args[0] else 1
        return await run_body(worker, bodies[index], frame, (args[1], *captured(args, index, 2)), frame.item)

    async def switch(worker: Worker, actor: NodeActor, frame: Frame, args: Args, kwargs: dict[str, Any]) -> Any:
        index = checked_branch(args[0], len(bodies))
        return await run_body(worker, bodies[index], frame, (args[1], *captured(args, index, 2)), frame.item)

    async def while_loop(worker: Worker, actor: NodeActor, frame: Frame, args: Args, kwargs: dict[str, Any]) -> Any:
        predicate, body = bodies
        outside = captured(args, 0, 1), captured(args, 1, 1)
        value = args[0]
        for iteration in range(control.limit):
            if not await run_body(worker, predicate, frame, (value, *outside[0]), iteration):
                return value
            value = await run_body(worker, body, frame, (value, *outside[1]), iteration)
            # A body that never waits must not keep the loop from others, nor a deadline from being noticed.
            if iteration % 64 == 63:
                await asyncio.sleep(0)
        if await run_body(worker, predicate, frame, (value, *outside[0]), control.limit):
            raise iteration_limit(control.limit)
        return value

    async def map_each(worker: Worker, actor: NodeActor, frame: Frame, args: Args, kwargs: dict[str, Any]) -> Any:
        items = args[0]
        check_items(items)
        if _is_array_of_jax(items):
            # Its rows are computed, by programs that are compiled: seconds for some thousand rows.
            items = await call_in_thread(threads(), worker, list, (items,), {})
        return await _BodyRuns(worker, bodies[0], frame, captured(args, 0, 1)).run(items, control.limit)

    return {"cond": cond, "switch": switch, "while_loop": while_loop, "map_each": map_each}[control.kind]


async def run_body(worker: Worker, wired: "Wired", parent: Frame, inputs: Args, item: int) -> Any:
    """Run a body once, for one value; returns its result."""
    return (await _BodyRuns(worker, wired, parent, inputs[1:]).run(inputs[:1], 1, item))[0]


def _is_array_of_jax(items: object) -> bool:
    jax: Any = sys.modules.get("jax")  # nobody else could have made one
    return jax is not None and not isinstance(items, list | tuple) and isinstance(items, jax.Array)


class _BodyRuns:
    """The runs of a body for several values, a bounded number at a time. It listens to their frames."""

    def __init__(self, worker: Worker, wired: "Wired", parent: Frame, outside: Args) -> None:
        self._worker = worker
        self._wired = wired
        self._parent = parent
        self._outside = outside
        self._empty = asyncio.Event()
        self._span = None if parent.span is None else spans.present()  # that of the step around
        crew = parent.crew
        self._crew = Crew(
            crew.loop, copy_context(), self._ended, traced=crew.traced, deadline=crew.deadline, threads=crew.threads
        )
        self._results: list[Any] = []
        self._frames: dict[int, Frame] = {}
        self._error: BaseException | None = None
        self._next = 0
        self._limit = 1
        self._first_item = 0
        self._filling = False
        self._stopped = False
        self._items: Sequence[Any] = ()

    async def run(self, items: Iterable[Any], limit: int, first_item: int = 0) -> list[Any]:
        """Run the body for each of `items`, `limit` at a time; returns the results in order."""
        self._items = items if isinstance(items, list | tuple) else list(items)
        self._results = [None] * len(self._items)
        self._limit = limit
        self._first_item = first_item
        crew = self._crew
        crew.is_exclusive = len(self._items) == 1
        worker, around = Worker(crew, nested=True), self._worker
        # A body that never waits is short, but many of them must not keep the loop from others.
        worker.budget = worker.inner_budget = around.inner_budget
        token = current.source.set(worker.position)
        self._parent.body_begun(self)
        try:
            self._fill()
            await worker.run()
        except BaseException:
            self.stop()
            raise
        finally:
            around.inner_budget = min(worker.budget, worker.inner_budget)
            self._parent.body_ended(self)
            current.source.reset(token)
            crew.close()
            await until(self._empty.is_set, self._empty.wait)
        if self._error is not None:
            raise self._error
        if self._stopped:  # the cancel of this task is about to come
            raise asyncio.CancelledError
        return self._results

    def stop(self) -> None:
        """Begin nothing more, and cancel what runs."""
        self._stopped = True
        for frame in list(self._frames.values()):
            frame.cancel()

    @property
    def service(self) -> None:
        """A body belongs to the frame around it."""

    def frame_done(self, frame: Frame) -> None:
        """Keep the result; a failure ends the whole."""
        index = frame.item - self._first_item
        if frame.state == "done":
            self._results[index] = frame.result
        elif self._error is None and frame.error is not None:
            self._error = frame.error
            for other in list(self._frames.values()):
                other.cancel()
        if frame.settled:
            self.frame_settled(frame)

    def _ended(self, crew: Crew) -> None:
        self._empty.set()

    def frame_settled(self, frame: Frame) -> None:
        """Start the next item in the place of this one."""
        del self._frames[frame.item]
        self._fill()

    def _fill(self) -> None:
        """Start items while there is room; a body without steps ends at once, so this comes back to itself."""
        if self._filling:
            return
        self._filling = True
        while (
            self._error is None
            and not self._stopped
            and self._next < len(self._items)
            and len(self._frames) < self._limit
        ):
            self._start(self._next)
        self._filling = False
        if not self._frames:
            self._crew.close()

    def _start(self, index: int) -> None:
        self._next = index + 1
        inputs = (self._items[index], *self._outside)
        frame = self._parent.inner(self._wired.program, inputs, self._crew, self, self._first_item + index)
        if self._span is not None:
            frame.span = spans.FrameSpan(self._span)
        self._frames[frame.item] = frame
        self._crew.start(frame, self._wired.entries)
