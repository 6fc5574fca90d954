"""How steps run that are not handlers of nodes: control flow with its bodies, and the opening of streams."""

import asyncio
import functools
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Self, cast

from opentelemetry.trace import Span

from .._errors import add_note
from ..actors import current
from ..actors.attempts import Failover
from ..actors.execution import Attempt, Bound, Run, begin_detached
from ..actors.executions import call_in_thread, take_thread
from ..actors.frame import Frame, Listener, Place
from ..actors.generators import GeneratorTask, waits_for_itself
from ..actors.loop_host import LoopHost, LoopStream
from ..actors.node_actor import Invoke, NodeActor
from ..actors.stream_buffer import DEFAULT_CAPACITY, BarrierBuffer, Reader, SplitBuffer, StreamBuffer
from ..actors.tasks import until
from ..actors.threads import ThreadPool
from ..actors.worker import Worker, WorkerGroup
from ..telemetry import logs, spans
from ..telemetry.counters import Cuts
from .checkpoint import StepCheckpoint
from .control import Control, OnError, Outcome, check_items, checked_branch, failed_item, in_step, iteration_limit
from .keeping import Keeper, keeps
from .nesting import listener_of
from .program import Wired
from .source import InputOrder, advance

# The bodies of control flow are private sub-graphs. The worker that runs the control-flow step drives them. It works in
# the group of the body itself, so an iteration of a loop costs no task and no wake-up. Further workers start only for
# steps that run beside each other.

Args = tuple[Any, ...]


def body_of(
    control: Control, bodies: tuple[Wired, ...], threads: Callable[[], ThreadPool], place: StepCheckpoint | None = None
) -> Bound:
    """Return the `Bound` that runs a control-flow step: it chooses the body, and passes the arguments to the body.

    Args:
        control: the construct of the step.
        bodies: the bodies of the step.
        threads: returns the threads of the Engine.
        place: handles the barriers of a `fold`; None where no barrier passes.
    """
    counts = [len(wired.program.plan.captures) for wired in bodies]

    def captured(args: Args, index: int, own: int) -> Args:
        """Return the values that body `index` captures; `own` arguments of the step stand before them."""
        start = own + sum(counts[:index])
        return args[start : start + counts[index]]

    async def choice(worker: Worker, actor: NodeActor, frame: Frame, args: Args) -> Any:
        index = checked_branch(args[0], len(bodies)) if control.kind == "switch" else 0 if args[0] else 1
        index = _branch_again(actor, frame, len(bodies), index) if actor.owner.keeps else index
        inputs = args[1], *captured(args, index, 2)
        return await run_body(worker, bodies[index], frame, inputs, frame.item, part=f":{index}")

    async def while_loop(worker: Worker, actor: NodeActor, frame: Frame, args: Args) -> Any:
        predicate, body = bodies
        outside = captured(args, 0, 1), captured(args, 1, 1)
        step, value = 0, args[0]
        scope, call = actor.owner, None  # the scope of all calls of the graph, or of one
        if scope.keeps and (place := frame.place) is not None:
            return await _kept_loop(worker, place.keeper, place.of(actor.name), frame, bodies, control, outside, value)
        if control.durable is not None:
            from ..saving.durable import present

            call = present.get()
            assert call is not None  # a call without a key is refused if its graph has a durable loop
            step, value = await call.begin_loop(value, frame)
            scope.stored = scope.stored or Cuts("every iteration")
        while await run_body(worker, predicate, frame, (value, *outside[0]), step):
            if step >= control.limit:
                raise iteration_limit(control.limit)
            iteration = run_body(worker, body, frame, (value, *outside[1]), step, owned=value is not args[0])
            step += 1
            if call is not None:
                value = await call.iteration(step, iteration)
                scope.stored = scope.stored.one_more(call.stored_bytes)
                continue
            value = await iteration
            # A body that never suspends must not keep the event loop from other tasks, nor from the timer of a
            # deadline.
            if step % 64 == 0:
                await asyncio.sleep(0)
        return value

    async def map_each(worker: Worker, actor: NodeActor, frame: Frame, args: Args) -> Any:
        lists = list(args[: control.inputs])
        for number, items in enumerate(lists):
            check_items(items)
            if _is_array_of_jax(items):
                # In a thread: `list` computes each row with compiled programs; some thousand rows take seconds.
                await take_thread(worker)
                lists[number] = await call_in_thread(threads(), worker, list, (items,), {})
        items = lists[0] if control.inputs == 1 else in_step(lists)
        runs = _ListMap(worker, bodies[0], frame, captured(args, 0, control.inputs), control, actor)
        runs.keeps_errors = actor.owner.keeps and control.on_error != "raise"
        return await runs.run(items, control.limit)

    async def fold(worker: Worker, actor: NodeActor, frame: Frame, args: Args) -> Any:
        skips = control.on_error == "skip"
        outside = captured(args, 0, 2)
        return await _Fold(worker, actor, bodies[0], frame, outside, args[0].buffer, skips=skips).run(args[1], place)

    return _InBodies(
        {"cond": choice, "switch": choice, "while_loop": while_loop, "map_each": map_each, "fold": fold}[control.kind]
    )


def _branch_again(actor: NodeActor, frame: Frame, count: int, index: int) -> int:
    """Return the branch below which a keeper has something, or `index`."""
    if (place := frame.place) is None:
        return index
    path = place.of(actor.name)
    return next((one for one in range(count) if place.keeper.entered(f"{path}:{one}/")), index)


async def _kept_loop(
    worker: Worker,
    keeper: Keeper,
    path: str,
    frame: Frame,
    bodies: tuple[Wired, ...],
    control: Control,
    outside: tuple[Args, Args],
    initial: Any,
) -> Any:
    """Run a loop from the last state that is kept, and keep the state of each iteration that has a kept step."""
    predicate, body = bodies
    has_kept = keeps(body.program.plan)
    step, value = keeper.began_loop(path, initial)
    while keeper.entered(f"{path}[{step}]/") or await run_body(
        worker, predicate, frame, (value, *outside[0]), step, part="[{}]?"
    ):
        if step >= control.limit:
            raise iteration_limit(control.limit)
        value = await run_body(worker, body, frame, (value, *outside[1]), step, owned=value is not initial)
        step += 1
        if has_kept:
            keeper.iterated(path, step, value)
        if step % 64 == 0:  # as in a loop without a keeper
            await asyncio.sleep(0)
    return value


class _InBodies(Bound):
    """Runs a control-flow step in its bodies."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[Worker, NodeActor, Frame, Args], Coroutine[Any, Any, Any]]) -> None:
        super().__init__()
        self._run = run

    def run(self, attempt: Attempt) -> Coroutine[Any, Any, Any]:
        """Run the bodies."""
        return self._run(cast("Worker", attempt._member), attempt._actor, attempt._frame, attempt.args)


async def run_body(
    worker: Worker, wired: Wired, parent: Frame, inputs: Args, item: int, *, owned: bool = False, part: str = "[{}]"
) -> Any:
    """Run a body once, for one value, and return the result.

    Args:
        worker: the worker of the step.
        wired: the body.
        parent: the frame of the step.
        inputs: the arguments of the body.
        item: the number of the run.
        owned: whether the body itself has made the value before.
        part: how paths name the run, behind the label of the step.
    """
    runs = _ListMap(worker, wired, parent, inputs)
    runs.owns_state, runs.part = owned, part
    return (await runs.run([()], 1, item))[0]


def runs_beside_others(frame: Frame) -> bool:
    """Whether other frames of the same body may run at the same time; True for a frame outside of bodies."""
    listener = listener_of(frame)
    return not isinstance(listener, _ListMap | _Fold) or (isinstance(listener, _ListMap) and listener.is_map)


def _is_array_of_jax(items: object) -> bool:
    jax: Any = sys.modules.get("jax")  # if JAX was not imported, there is no array of JAX
    return jax is not None and not isinstance(items, list | tuple) and isinstance(items, jax.Array)


class _Bodies(Listener):
    """The frames of one body inside of another frame; this object starts each frame, and ends all frames."""

    frame_class = Frame
    frames: dict[int, Frame]  # the frames that have not ended; with a window, also frames that wait for their turn
    owns_state = False  # whether the next frame gets a state that the frame before has made
    _needs_no_worker = False  # whether each frame has one step, which may run outside of the event loop
    _error: BaseException | None = None  # the error of the frame that has ended all frames

    def __init__(self, wired: Wired, parent: Frame, outside: Args, step: str) -> None:
        self._wired = wired
        self._parent = parent
        self._outside = outside
        self._overwrites = wired.program.plan.overwrites
        # The span of the control-flow step, if it is sampled.
        self._span: Span | None = None if parent.span is None else spans.present()
        self.frames = {}
        self._stopped = False
        self._step = step
        self._open_group()

    def _open_group(self) -> None:
        self._empty = asyncio.Event()
        self._group = self._parent.group.for_bodies(self._ended)
        self._group.step = self._step

    def _start(
        self, values: Args, item: int, listener: Listener, on_stream: "Callable[[Reader[Any]], None] | None" = None
    ) -> None:
        wired, parent, group = self._wired, self._parent, self._group
        frame = self.frames[item] = self.frame_class(
            wired.program, values + self._outside, group, listener, item, parent
        )
        frame.priority = parent.priority
        if on_stream is not None:
            frame.on_result_stream = on_stream
        if parent.key is not None:
            frame.key = parent.key
        if self.owns_state and self._overwrites is not None:
            frame.owns_state = True
        if self._span is not None:
            frame.span = spans.FrameSpan(self._span, wired.program.name)
        elif self._needs_no_worker and not group.ready and begin_detached(wired.entries[0], frame):
            return
        group.start(frame, wired.entries)

    def stop(self) -> None:
        """Start no further frames, and cancel the frames that run."""
        self._stopped = True
        for frame in list(self.frames.values()):
            frame.cancel()

    async def _work(self, around: Worker | None, begin: Callable[[], None]) -> None:
        """Work in the group, in the task of a worker, until the group is closed and nothing runs in it.

        Args:
            around: the worker; None for another task, which gives other tasks a turn each time.
            begin: starts the first frames.

        Raises:
            BaseException: the error of the frame that has ended all frames.
            CancelledError: the frames were stopped.
        """
        worker = Worker(self._group, nested=True)
        # The worker of the body uses up the budget of the worker around it. A body that never suspends is short, but
        # many such bodies must not keep the event loop from other tasks.
        worker.budget = 0
        if around is not None:
            worker.budget, around.inner = around.budget, worker
        token = current.source.set(worker.position)
        self._parent.body_begun(self.stop)
        try:
            begin()
            await worker.run()
        except BaseException:
            self.stop()
            # In Python 3.11, a task stays cancelled after a TaskGroup inside it has failed. The failure came first.
            if self._error is None or self._parent.state != "running":
                raise
        finally:
            if around is not None:
                around.budget, around.inner = worker.budget, None
            self._parent.body_ended(self.stop)
            current.source.reset(token)
            try:
                await self._unwound()
            finally:  # it raises if this task is cancelled meanwhile
                if self._parent.state != "running":
                    self._error = None  # nobody is told
        error = self._error
        if error is not None:
            self._error = None
            try:
                raise error
            finally:
                del error  # breaks a cycle, as in `Frame.tell_error`
        if self._stopped:  # the frame around the bodies has ended, and a cancellation of this task is on its way
            raise asyncio.CancelledError

    def _with_loss(self, error: BaseException) -> BaseException:
        """Return the error of an iteration, with a note if the state at its beginning is lost."""
        if (step := self._overwrites) is not None and isinstance(error, Exception):
            add_note(error, f"the state of {self._group.step} is lost: {step.label}, with donate=True, overwrites it")
        return error

    async def _unwound(self) -> None:
        """Wait until all handlers have ended, even if the caller is cancelled."""
        self._group.close()
        await until(self._empty.is_set, self._group.members_left)

    def _ended(self, group: WorkerGroup) -> None:
        self._empty.set()


class _ListMap(_Bodies):
    """The runs of a body for several values, a bounded number at a time. This object listens to their frames.

    There is no `ReorderWindow`: a run that has ended makes room for the next run at once, in any order. Each iteration
    of a loop makes a `_ListMap`, so the constructor has to be cheap.
    """

    def __init__(
        self,
        worker: Worker | None,
        wired: Wired,
        parent: Frame,
        outside: Args,
        control: Control | None = None,
        actor: NodeActor | None = None,
        step: str = "",
    ) -> None:
        super().__init__(wired, parent, outside, step or cast("Any", worker).actor.name)
        self._worker = worker
        self.turns: dict[NodeActor, InputOrder] = {}
        self._is_zipped = control is None or control.inputs > 1  # whether each item is a tuple of values
        self._on_error: OnError = "raise" if control is None else control.on_error
        self._actor = actor  # counts the items of a `map_each`
        self._failed: dict[int, Exception] = {}  # errors of items that do not end the other items
        self._results: list[Any] = []
        self._next = 0
        self._limit = 1
        self._first_item = 0
        self._filling = False
        self._items: Sequence[Any] = ()

    part = "[{}]"  # how paths name a run, behind the label of the step
    keeps_errors = False  # whether errors of items are kept, so that these items do not run again
    called: Place | None = None  # the place of a call that a handler makes

    def place_of(self, frame: Frame, around: Place) -> Place | None:
        """Return the place of a run of the body."""
        return self.called or Place(around.keeper, f"{around.of(self._step)}{self.part.format(frame.item)}/")

    async def run(self, items: Iterable[Any], limit: int, first_item: int = 0) -> list[Any]:
        """Run the body for each of `items`, `limit` at a time; return the results in the order of the items."""
        self._items = items if isinstance(items, list | tuple) else list(items)
        self._results = [None] * len(self._items)
        self._limit = limit
        self._first_item = first_item
        self._group.is_exclusive = len(self._items) == 1
        await self._work(self._worker, self._fill)
        if self._actor is not None:
            # the actor counts items, and the worker is about to count the step as one more item
            self._actor.completed -= 1
        return self._results if self._on_error == "raise" else self._outcomes()

    def instead_of_handler(self) -> Self:
        """Count all handlers of the runs as the one handler that they replace; return the runs."""
        self._group.handlers = None
        return self

    def _outcomes(self) -> list[Any]:
        """Return the results of a `map_each` where the error of an item does not end the other items."""
        failed, on_error = self._failed, self._on_error
        self._failed = {}
        results: list[Any] = []
        for index, result in enumerate(self._results):
            if index in failed:
                results += failed_item(index, failed[index], on_error)
            else:
                results.append(Outcome(index, result, None) if on_error == "return" else result)
        return results

    def _kept_error(self, index: int) -> Exception | None:
        place = self._parent.place
        if place is None:
            return None
        found: Exception | None = place.keeper.failed_item(f"{place.of(self._step)}[{self._first_item + index}]/")
        return found

    @property
    def is_map(self) -> bool:
        """Whether these are the runs of a `map_each`."""
        return self._actor is not None

    def frame_done(self, frame: Frame) -> None:
        """Keep the result of a run; a failure stops all runs."""
        index = frame.item - self._first_item
        if frame.state == "done":
            self._results[index] = frame.result
            if frame.unread:
                frame.pass_unread()
            if self._actor is not None:
                self._actor.completed += 1
        elif self._on_error != "raise" and isinstance(frame.error, Exception):
            assert self._actor is not None  # only a `map_each` goes on after an error
            self._actor.failed += 1
            self._failed[index] = frame.error
            if self.keeps_errors and (place := frame.place) is not None:
                place.keeper.item_failed(place.path, frame.error)
            frame.tell_error()
        elif self._error is None and frame.error is not None:
            self._error = self._with_loss(frame.error)
            frame.tell_error()
            self.stop()
        if frame.settled:
            self.frame_settled(frame)
        if self.turns:
            advance(self.turns)

    def frame_settled(self, frame: Frame) -> None:
        """Start the next run in the place of a run whose last handler has ended."""
        del self.frames[frame.item]
        self._fill()

    def _fill(self) -> None:
        """Start runs while there is room. A body without steps ends at once and calls this again; that call returns."""
        if self._filling:
            return
        self._filling = True
        while not self._stopped and self._next < len(self._items) and len(self.frames) < self._limit:
            index = self._next
            self._next = index + 1
            item = self._items[index]
            if self.keeps_errors and (error := self._kept_error(index)) is not None:
                self._failed[index] = error
                continue
            self._start(item if self._is_zipped else (item,), self._first_item + index, self)
        self._filling = False
        if not self.frames:
            self._group.close()


class _Fold(_Bodies):
    """The runs of a body for the state and one value of a stream after the other. This object listens to their frames.

    The values that the stream holds are folded in one group, in which the worker of the step works. So such a value
    costs no task, only a hop. A snapshot stores the state of the fold between two values.

    Attributes:
        count: how many values of the stream were folded.
    """

    def __init__(
        self,
        worker: Worker,
        actor: NodeActor,
        wired: Wired,
        parent: Frame,
        outside: Args,
        values: StreamBuffer[Any],
        *,
        skips: bool,
    ) -> None:
        super().__init__(wired, parent, outside, actor.name)
        self.count = 0
        self._worker = worker
        self._actor = actor
        self._values = values
        self._skips = skips
        self._state: Any = None
        self._starting = False

    def state(self) -> Any:
        """Return the state of the fold, and how many values were folded."""
        return {"value": self._state, "count": self.count}

    def restore(self, state: Any) -> None:
        """Begin with the state of a snapshot."""
        self._state, self.count = state.values()

    async def run(self, initial: Any, place: StepCheckpoint | None) -> Any:
        """Fold the stream to its end, from the initial state or that of a snapshot, and return the last state."""
        self._state, values = initial, self._values
        if place is not None:
            await place.saving.begin_fold(place.stop, self, values)
        while values.held or not (values.ended or values.abandoned):
            if values.held:
                await self._work(self._worker, self._go_on)
                self._open_group()
            else:
                await values.wait()
        if values.error is not None:
            await values.get()  # raises it
        # the actor counts values, and the worker is about to count the step as one more value
        self._actor.completed -= 1
        return self._state

    def frame_done(self, frame: Frame) -> None:
        """Keep the state. A failure ends the fold, unless failed values are skipped."""
        if frame.state == "done":
            self._state, self.owns_state = frame.result, True
            if frame.unread:
                frame.pass_unread()
            self._actor.completed += 1
        elif frame.error is not None:
            if self._skips and isinstance(frame.error, Exception):
                self._skip(frame)
            else:
                self._error = self._with_loss(frame.error)
            frame.tell_error()
        if frame.settled:
            self.frame_settled(frame)

    def frame_settled(self, frame: Frame) -> None:
        """Go on with the next value."""
        del self.frames[frame.item]
        self._go_on()

    def _skip(self, frame: Frame) -> None:
        name = frame.layout.name
        self._actor.failed += 1
        spans.item_skipped(self._span, name, frame.item, frame.error)
        logs.warning("fold.value_skipped", graph=name, item=frame.item, error=frame.error)

    def _go_on(self) -> None:
        """Start the next value that is there. A body without steps ends at once, and calls this method again."""
        if self._starting:
            return
        self._starting = True
        values = self._values
        while not self.frames and values.held and self._error is None and not self._stopped:
            self.count += 1
            self._start((self._state, values.pass_on()), self.count - 1, self)
        self._starting = False
        if not self.frames:
            self._group.close()


# Steps that give streams.


def failing_over(wired: Wired, captured: Callable[[list[Any]], Args]) -> Failover:
    """Return a function that runs the failover of a node.

    Args:
        wired: the failover, as a body.
        captured: builds the arguments of the failover from the values of the frame.
    """

    async def run(attempt: Attempt) -> Any:
        frame, limiter = attempt._frame, attempt._actor.limiter
        # The place is free meanwhile: the failover has places of its own, and may be long.
        limiter.release()
        try:
            runs = _ListMap(cast("Worker", attempt._member), wired, frame, captured(frame.values))
            runs.part = "!"
            return (await runs.instead_of_handler().run([()], 1, frame.item))[0]
        finally:
            limiter.take_over_limit()

    return run


# Makes the iterator of a failover that gives a stream. Called when the stream of the node is opened, since the
# arguments are gone after that.
StreamFailover = Callable[[Frame, NodeActor], Callable[[], Any]]


def stream_failing_over(wired: Wired, captured: Callable[[list[Any]], Args]) -> StreamFailover:
    """Return the `StreamFailover` of a node that gives a stream; arguments as for `failing_over`."""

    def of(frame: Frame, actor: NodeActor) -> Callable[[], Any]:
        inputs, step = captured(frame.values), actor.name
        return lambda: _StreamOfBody(wired, frame, inputs, step).values()

    return of


def computing(wired: Wired, captured: Callable[[list[Any]], Args]) -> Invoke:
    """Return a function that runs a body in the place of a step; arguments as for `failing_over`."""

    async def run(worker: Worker, actor: NodeActor, frame: Frame) -> Any:
        return await run_body(worker, wired, frame, captured(frame.values), frame.item)

    return run


class _StreamOfBody(_Bodies):
    """The run of a body that gives a stream. This object listens to the frame."""

    def __init__(self, wired: Wired, parent: Frame, outside: Args, step: str) -> None:
        super().__init__(wired, parent, outside, step)
        self._group.is_exclusive = True
        self._opened: asyncio.Future[Reader[Any]] = self._group.loop.create_future()

    async def values(self) -> AsyncGenerator[Any, None]:
        """Yield the values of the stream."""
        parent = self._parent
        parent.body_begun(self.stop)
        try:
            self._start((), parent.item, self, self._opened.set_result)
            async for value in await self._opened:
                yield value
                del value
        finally:
            parent.body_ended(self.stop)
            self.stop()
            await self._unwound()

    def frame_done(self, frame: Frame) -> None:
        """Raise the error of a body whose stream was not opened."""
        if not self._opened.done():
            self._opened.set_exception(frame.error or asyncio.CancelledError())
        if frame.settled:
            self.frame_settled(frame)

    def frame_settled(self, frame: Frame) -> None:
        """Forget the frame."""
        self.frames.pop(frame.item, None)


def opening(
    capacity: int,
    streams: tuple[int, ...],
    first: Run,
    failover: StreamFailover | None,
    place: StepCheckpoint | None,
    host: LoopHost | None = None,
) -> Invoke:
    """Return a function that opens the stream of a node.

    Args:
        capacity: how many values the stream holds for its reader.
        streams: the slots of the streams that the node itself reads.
        first: gets the iterator and its first value, with the policy of the node.
        failover: makes the iterator of the failover; None without a failover.
        place: handles barriers; None where no barrier passes.
        host: runs the loop of an actor that owns its loop; None for other nodes.
    """

    async def open_node(worker: Worker, actor: NodeActor, frame: Frame) -> Any:
        args, kwargs = actor.arguments(frame.values)
        readers = [frame.values[slot] for slot in streams]
        instead = None if failover is None else failover(frame, actor)
        make = functools.partial(actor.fn, *args, **kwargs)
        if host is not None:
            make = functools.partial(LoopStream, host, args[0], frame.priority, frame.deadline, frame.key, capacity)
        buffer, start = buffer_of(place, capacity, make, readers)
        return GeneratorTask(actor, frame, buffer, start, readers, failover=instead, first=first).open()

    return open_node


def buffer_of(
    place: StepCheckpoint | None,
    capacity: int,
    start: Callable[[], Any],
    readers: Iterable[Any],
    holders: Sequence[Any] = (),
) -> tuple[StreamBuffer[Any], Callable[[], Any]]:
    """Return the buffer for the values of a stream, and a function that makes its iterator.

    With `place`, barriers pass both. The iterator has the state, unless `holders` have the states of the step and of
    the steps that run as a part of it.
    """
    if place is None:
        return StreamBuffer(capacity), start
    buffer: BarrierBuffer[Any] = BarrierBuffer(capacity)
    place.pass_barriers(readers, [buffer])
    return buffer, place.begin(start, [buffer], holders)


def splitting(count: int, ahead: int, place: StepCheckpoint | None = None) -> Invoke:
    """Return a function that opens the branches of a split, each with at most `ahead` values."""

    async def open_branches(worker: Worker, actor: NodeActor, frame: Frame) -> Any:
        (values,), _ = actor.arguments(frame.values)
        parts: Sequence[StreamBuffer[Any]] = [StreamBuffer(ahead) for _ in range(count)]
        if place is not None:
            parts = passing = [BarrierBuffer[Any](ahead) for _ in range(count)]
            place.pass_barriers([values], passing)
        buffer = SplitBuffer(parts, waits_for_itself)
        return GeneratorTask(actor, frame, buffer, lambda: values, (values,)).open()

    return open_branches


def branch(number: int) -> Invoke:
    """Return a function that takes one branch of a split, which is open."""

    async def take_branch(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        (readers,), _ = actor.arguments(frame.values)
        reader: Reader[Any] = readers[number]
        return reader

    return take_branch


def input_of(parameter: str, place: StepCheckpoint | None = None) -> Invoke:
    """Return a function that opens a stream that was passed as an argument."""

    async def open_input(worker: Worker, actor: NodeActor, frame: Frame) -> Any:
        given = frame.values[actor.slot]
        if not hasattr(given, "__aiter__"):
            raise TypeError(
                f"parameter {parameter!r} of graph {actor.graph!r} is a stream: pass an async iterator, got {given!r}"
            )
        buffer, start = buffer_of(place, DEFAULT_CAPACITY, lambda: given, ())
        return GeneratorTask(actor, frame, buffer, start, given=given).open()

    return open_input


async def hand_over(worker: Worker, actor: NodeActor, frame: Frame) -> None:
    """Hand the stream that a graph returns to its reader; the frame goes on until the stream has been read."""
    assert frame.on_result_stream is not None
    frame.add_pending()
    frame.on_result_stream(frame.values[actor.slot])
