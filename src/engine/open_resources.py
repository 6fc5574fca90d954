"""What resources are open in one Engine: who uses them, how they are opened, reloaded and closed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextvars import Context
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from .._errors import EngineClosedError, EngineLoopError, NodeCancelledError, NodeError, PlanError
from ..actors.cancellation import ContextTask, uninterrupted
from ..actors.current import start_task
from ..actors.frame import AnyDeployment, Frame, Listener
from ..telemetry import logs
from .node import Node, is_known, value_of
from .program import Program
from .resource import Opening, Resource, opened_eagerly

if TYPE_CHECKING:
    from .deployment import Deployment
    from .engine import Runtime
    from .planning import ChosenScheduler, Plan


# Departures: waiting until certain frames have ended and nothing runs for them any more.
#
# Nobody keeps count of that for every frame: only when somebody has to know, the frames that are in flight get a
# listener between themselves and theirs. So a frame costs nothing for it.


async def departed(frames: Iterable[Frame]) -> None:
    """Wait until nothing runs for any of these frames; from the first step on, none that ends is missed."""
    departures = [_Departure(frame) for frame in frames if not frame.settled]
    for departure in departures:
        await departure.gone.wait()


def listener_of(frame: Frame) -> Listener:
    """Return the listener that the frame was made with."""
    listener = frame.listener
    while isinstance(listener, _Departure):
        listener = listener.listener
    return listener


class _Departure:
    """Passes on what happens to a frame, and notes when it has settled."""

    def __init__(self, frame: Frame) -> None:
        self.gone = asyncio.Event()
        self.listener = frame.listener
        frame.listener = self

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment that the frame belongs to."""
        return self.listener.service

    def frame_done(self, frame: Frame) -> None:
        """The outcome is known."""
        self.listener.frame_done(frame)
        if frame.settled:
            self.gone.set()

    def frame_settled(self, frame: Frame) -> None:
        """The last handler has unwound."""
        self.listener.frame_settled(frame)
        self.gone.set()


_MARK = "__penstock_opening__"


class Entry:
    """A resource that is open, or being opened or closed.

    Attributes:
        opening: which one.
        context task: what keeps it open.
        candidate: what opens the next one, while it is reloaded.
        users: the scopes that use it; of an Engine that keeps it open anyway, those that wait for it.
        programs: those whose frames have it.
        ending: it is being closed, or its opening is cancelled.
        retiring: tasks that close what it was before it was reloaded.
    """

    def __init__(self, opening: Opening, context_task: ContextTask[Any]) -> None:
        self.opening = opening
        self.context_task = context_task
        self.candidate: ContextTask[Any] | None = None
        self.users: set[object] = set()
        self.programs: WeakSet[Program] = WeakSet()
        self.ending = False
        self.retiring: set[asyncio.Task[None]] = set()


class Resources:
    """The resources of one Engine, or of one graph that is called without.

    Args:
        closes_unused: close a resource when nobody uses it any more, and not only in the end.
        on_lost: called with programs whose frames have a resource that has ended by itself.

    Attributes:
        closed: nothing is opened any more.
        entries: what is open, or being opened or closed.
    """

    def __init__(self, *, closes_unused: bool, on_lost: "Callable[[Collection[Program]], None] | None" = None) -> None:
        self.closed = False
        self.entries: dict[Opening, Entry] = {}
        self._closes_unused = closes_unused
        self._on_lost = on_lost

    @property
    def has_opened(self) -> bool:
        """Whether anything is open, or being opened or closed."""
        return bool(self.entries)

    def program(self, plan: "Plan", scheduler: "ChosenScheduler") -> Program:
        """Return what frames of a plan need to run; with resources, a copy whose frames have those of this Engine."""
        program = plan._program(scheduler)
        if not program.resources:
            return program
        # Kept with the plan and not here, so that graphs made by a factory for one call leave nothing behind.
        own = plan._programs_with_resources.setdefault(self, {})
        if scheduler not in own:
            own[scheduler] = copy(program)
        return own[scheduler]

    def hold_nowait(self, program: Program, user: object) -> bool:
        """Have a scope use the resources of a program, if all are open already; whether they are."""
        if not program.resources:
            return True
        if not program.is_filled:
            return False
        if self._closes_unused:
            entries = [self.entries[opening] for opening in program.resources]
            if any(entry.ending for entry in entries):
                return False
            for entry in entries:
                entry.users.add(user)
        return True

    async def hold(self, program: Program, user: object) -> None:
        """Have a scope use the resources of a program, and open those that are not open.

        Args:
            program: its frames have them from now on.
            user: the scope, which calls `release` in the end, also if this fails.

        Raises:
            Exception: what the opening of one raised, with a note.
            EngineClosedError: the Engine was closed meanwhile.
        """
        if self.hold_nowait(program, user):
            return
        entries = await self._use_all(program, user)
        if not all(entry.context_task.is_open for entry in entries):  # one was lost while the next was opened
            entries = await self._use_all(program, user)
        for entry in entries:
            if not entry.context_task.is_open:  # and again: it is not to be had
                await asyncio.wait([entry.context_task.task])
                raise self.failure(entry.opening, entry.context_task, program.name)
        for entry in entries:
            entry.programs.add(program)
        self._fill([program])

    async def value_of(self, opening: Opening) -> Any:
        """Return what a resource gives, for a graph that is called without an engine."""
        return (await self._use(opening, None, object())).context_task.value

    async def release(self, user: object) -> None:
        """A scope has ended; close what nobody uses any more, the last opened first. Every one is closed.

        Raises:
            Exception: the first that a closing raised; further ones are logged.
        """
        if not self._closes_unused:
            return
        unused: list[Entry] = []
        for entry in self.entries.values():
            if user in entry.users:
                entry.users.discard(user)
                if not entry.users and not entry.ending:
                    unused.append(entry)
        if unused:
            await uninterrupted(self._end(unused))

    def refuse(self) -> None:
        """Open nothing any more, and cancel the openings that go on: the Engine is being closed."""
        self.closed = True
        for entry in self.entries.values():
            if not entry.context_task.is_open:
                entry.context_task.end_soon()
            if entry.candidate is not None:
                entry.candidate.end_soon()

    async def close(self) -> None:
        """Close everything, the last opened first; every one is closed.

        Raises:
            Exception: the first that a closing raised; further ones are logged.
        """
        self.refuse()
        if self.entries:
            await uninterrupted(self._end([entry for entry in self.entries.values() if not entry.ending]))

    def new_context_task(self, opening: Opening) -> ContextTask[Any]:
        """Begin to open a resource."""
        # An empty context: what is shared must not see the variables, or the span, of whoever happened to come first.
        return ContextTask(opening.manager(), f"penstock-resource-{opening.name}", Context())

    def swap(self, entry: Entry, context_task: ContextTask[Any]) -> ContextTask[Any]:
        """Have the frames that begin from now on see another one; returns what keeps the one before open."""
        before, entry.context_task = entry.context_task, context_task
        self._watch(entry)
        self._fill(entry.programs)
        return before

    def failure(self, opening: Opening, context_task: ContextTask[Any], graph: str | None) -> BaseException:
        """Return the error of an opening for one of those who waited for it, with a note."""
        error = context_task.error
        if self.closed:
            return EngineClosedError(f"the Engine was closed while resource {opening.name!r} was opened")
        if error is None:
            error = NodeCancelledError(
                "the opening was cancelled, but not by the engine: something that it awaited was, or its own task"
            )
        place = "" if graph is None else f" for graph {graph!r}"
        return _noted(error, f"while resource {opening.name!r} was opened{place}")

    async def _use_all(self, program: Program, user: object) -> list[Entry]:
        return [await self._use(opening, program.name, user) for opening in program.resources]

    async def _use(self, opening: Opening, graph: str | None, user: object) -> Entry:
        while True:
            entry = self.entries.get(opening)
            if entry is not None and (entry.ending or entry.context_task.is_leaving):
                await asyncio.wait(
                    [entry.context_task.task]
                )  # never two at a time: it may hold what the next one needs
                continue
            if self.closed:
                raise EngineClosedError(f"resource {opening.name!r} is not opened any more: the Engine was closed")
            if entry is None:
                entry = self.entries[opening] = Entry(opening, self.new_context_task(opening))
                self._watch(entry)
            elif entry.context_task.task.done():  # it has ended by itself
                entry.context_task = self.new_context_task(opening)
                self._watch(entry)
            entry.users.add(user)
            context_task = entry.context_task
            try:
                await context_task.settled()
            except BaseException:
                await self._left_waiting(entry, user)
                raise
            if context_task.is_open and not entry.ending:
                if not self._closes_unused:
                    entry.users.discard(user)
                self._fill(program for program in entry.programs if not program.is_filled)
                return entry
            entry.users.discard(user)
            was_replaced = (
                context_task.error is None and entry.context_task is not context_task
            )  # by a reload: there is another one
            if not (entry.ending or was_replaced):
                raise self.failure(opening, context_task, graph)

    async def _left_waiting(self, entry: Entry, user: object) -> None:
        """Whoever waited was cancelled: the last one cancels the opening, and waits until it has unwound.

        Not during a reload, which has an opening of its own under way, and ends this one when it has succeeded.
        """
        entry.users.discard(user)
        if (
            entry.users
            or entry.ending
            or entry.candidate is not None
            or (entry.context_task.is_open and not self._closes_unused)
        ):
            return
        try:
            await uninterrupted(self._end([entry]))
        except Exception as error:  # noqa: BLE001 - of the opening's own unwinding; the cancellation goes on
            logs.warning("resource.not_closed", resource=entry.opening.name, error=repr(error))

    async def _end(self, entries: Iterable[Entry]) -> None:
        errors: list[BaseException] = []
        ending = sorted(entries, key=lambda entry: entry.context_task.number, reverse=True)
        for entry in ending:
            entry.ending = True
            for program in entry.programs:
                program.empty()
        for entry in ending:
            if entry.candidate is not None:
                await entry.candidate.ended()
            if entry.retiring:
                await asyncio.wait(entry.retiring)
            had_ended = (
                entry.context_task.task.done()
            )  # it was lost, which was logged, or whoever waited for it was told why
            error = await entry.context_task.ended()
            if error is not None and not had_ended:
                errors.append(error)
            self._forget(entry)
        for error in errors[1:]:
            logs.warning("resource.not_closed", error=repr(error))
        if errors:
            raise errors[0]

    def _watch(self, entry: Entry) -> None:
        context_task = entry.context_task
        # An empty context, as for its task: that of the caller would be kept for as long as the resource is open.
        context_task.task.add_done_callback(lambda _: self._context_task_ended(entry, context_task), context=Context())

    def _context_task_ended(self, entry: Entry, context_task: ContextTask[Any]) -> None:
        """An opening failed, or what was open has ended by itself: whoever needs it next opens it again."""
        error = context_task.error  # retrieved here, because whoever waited for an opening may have left
        if entry.context_task is not context_task or entry.ending:
            return
        if context_task.was_opened:
            why = "its task was cancelled" if context_task.task.cancelled() else repr(error)
            logs.warning("resource.ended", resource=entry.opening.name, error=why)
        for program in entry.programs:
            program.is_filled = False
        if self._on_lost is not None:
            self._on_lost(entry.programs)
        if not entry.programs:
            self._forget(entry)

    def _fill(self, programs: Iterable[Program]) -> None:
        for program in programs:
            entries = [self.entries.get(opening) for opening in program.resources]
            context_tasks = [
                entry.context_task for entry in entries if entry is not None and entry.context_task.is_open
            ]
            if len(context_tasks) == len(entries):
                program.fill(context_task.value for context_task in context_tasks)

    def _forget(self, entry: Entry) -> None:
        if self.entries.get(entry.opening) is entry:
            del self.entries[entry.opening]


def _noted(error: BaseException, note: str) -> BaseException:
    """Add a note; an exception that has one, for another caller, is wrapped, or it would collect those of all."""
    if not isinstance(error, Exception):
        return error
    try:
        if hasattr(error, _MARK):
            wrapped = NodeError(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        error.add_note(note)
        setattr(error, _MARK, True)
    except Exception:  # noqa: BLE001 - an exception that refuses attributes goes without
        pass
    return error


_Known: TypeAlias = dict[int, Any]  # what is of a resource in a graph, by the number of the value


async def reload(deployment: "Deployment", resource: object) -> None:
    """Open a resource anew for every distinct arguments that a deployment uses it with, and swap.

    Raises:
        PlanError: the deployment does not use it.
        EngineClosedError: the deployment is not ready, or was stopped meanwhile.
        Exception: what an opening raised; the old ones stay in place then.
    """
    openings = _openings(deployment, resource)
    runtime = deployment.runtime
    # One reload of a resource at a time: a later one opens again, since it may have been asked for after a change.
    lock = runtime.reloads.setdefault(openings[0].resource, asyncio.Lock())
    async with lock:
        entries = [await _entry(deployment, opening) for opening in openings]
        try:
            for entry in entries:
                await _open_next(deployment, entry)
            for entry in entries:
                _check_wanted(deployment, entry)
                _check_fits(entry)
        except BaseException:
            await uninterrupted(_discard(entries))
            raise
        _swap(runtime, entries)


def _openings(deployment: "Deployment", resource: object) -> list[Opening]:
    if deployment.scope is None or deployment.state != "ready":
        raise deployment.stopped_error()
    if asyncio.get_running_loop() is not deployment.scope.loop:
        raise EngineLoopError("this deployment runs on another event loop than this code; call it from there")
    if not isinstance(resource, Resource):
        raise TypeError(f"service.reload takes a resource, got {resource!r}")
    name: str = resource.name
    used = dict.fromkeys(opening for wired in deployment.graphs for opening in wired.program.resources)
    openings = [opening for opening in used if opening.resource is resource]
    if not openings:
        names = ", ".join(dict.fromkeys(opening.name for opening in used)) or "none"
        raise PlanError(f"resource {name!r} is not used by this deployment of {deployment.names}; it uses: {names}")
    return openings


async def _entry(deployment: "Deployment", opening: Opening) -> Entry:
    entries = deployment.runtime.resources.entries
    while opening not in entries:  # it was lost, and a call that opened it again has given up
        await deployment.reopen(opening)
    entry = entries[opening]
    _check_wanted(deployment, entry)
    return entry


def _check_wanted(deployment: "Deployment", entry: Entry) -> None:
    """Refuse to go on when the deployment was stopped meanwhile, or what is to be replaced is being closed."""
    if deployment.state != "ready":
        raise deployment.stopped_error()
    if entry.ending:
        raise EngineClosedError(f"resource {entry.opening.name!r} is not reloaded: its Engine is being closed")


def _check_fits(entry: Entry) -> None:
    """Ask the executors of the nodes that use a resource whether its new value is one for them."""
    assert entry.candidate is not None
    if not entry.context_task.was_opened:
        return  # it was lost, and is only being opened again: there is nothing to compare with
    values = entry.context_task.value, entry.candidate.value
    for program in entry.programs:
        _check_plan(program.plan, entry.opening, ({}, {}), values)


def _check_plan(plan: "Plan", opening: Opening, around: tuple[_Known, _Known], values: tuple[Any, Any]) -> None:
    """Ask the executors of a graph's nodes, and of those of its bodies.

    Args:
        plan: of the graph.
        opening: of the resource.
        around: for a body, what it takes of the present value, and of the new one.
        values: the present one, and the new one.
    """
    old, new = around
    if opening in plan.trace.resources:
        source = plan.trace.resources[opening]
        old, new = {**old, source: values[0]}, {**new, source: values[1]}
    for step in plan.steps:
        callee = step.head.callee
        if isinstance(callee, Node) and callee.runs_in:
            try:
                for read in step.head.reads():
                    if read.source in old:
                        callee.runs_in.check_reload(value_of(read, old), value_of(read, new))
            except Exception as error:
                error.add_note(f"resource {opening.name!r} was not reloaded: node {step.label!r} uses it")
                raise
        for body in step.bodies:
            taken = [(source, template) for source, template in body.trace.captured if is_known(template, old.keys())]
            inside = tuple([{source: value_of(one, known) for source, one in taken} for known in (old, new)])
            _check_plan(body, opening, (inside[0], inside[1]), values)


async def _open_next(deployment: "Deployment", entry: Entry) -> None:
    resources = deployment.runtime.resources
    context_task = entry.candidate = resources.new_context_task(entry.opening)
    await context_task.settled()
    _check_wanted(deployment, entry)
    if not context_task.is_open:
        raise resources.failure(entry.opening, context_task, deployment.names)


async def _discard(entries: list[Entry]) -> None:
    """Close what was opened for a reload that failed, the last opened first."""
    for entry in reversed(entries):
        context_task = entry.candidate
        if context_task is None:
            continue
        was_open = context_task.is_open
        error = await context_task.ended()
        entry.candidate = None  # not before: what ends the resource waits for it
        if was_open and error is not None:
            logs.warning("resource.not_closed", resource=entry.opening.name, error=repr(error))


def _swap(runtime: "Runtime", entries: list[Entry]) -> None:
    replaced: list[ContextTask[Any]] = []
    for entry in entries:
        context_task, entry.candidate = entry.candidate, None
        assert context_task is not None
        replaced.append(runtime.resources.swap(entry, context_task))
    programs = {program for entry in entries for program in entry.programs}
    frames = [frame for frame in runtime.frames_in_flight() if frame.layout in programs]
    work = _retire(runtime, entries[0].opening.name, replaced, frames)
    task = start_task(asyncio.get_running_loop(), work, name="penstock-resource-retires", context=Context())
    for entry in entries:
        entry.retiring.add(task)
        task.add_done_callback(entry.retiring.discard)


async def _retire(runtime: "Runtime", name: str, replaced: list[ContextTask[Any]], frames: list[Frame]) -> None:
    """Close what was replaced, the last opened first, once nothing can use it any more."""
    await departed(frames)
    frames.clear()
    await runtime.threads_returned()
    for context_task in sorted(replaced, key=lambda context_task: context_task.number, reverse=True):
        error = await context_task.ended()
        if error is not None:
            logs.warning("resource.not_closed", resource=name, error=repr(error))


async def run_eagerly(running: Coroutine[Any, Any, Any]) -> Any:
    """Run the function of a graph to its end; the outermost call closes what was opened on the way."""
    around = opened_eagerly.get()
    if around is not None and not around.closed:
        return await running
    resources = Resources(closes_unused=False)
    token = opened_eagerly.set(resources)
    is_stream = False
    result: Any
    try:
        result = await running
        is_stream = isinstance(result, AsyncIterator) and resources.has_opened
    finally:
        opened_eagerly.reset(token)
        if not is_stream:
            await resources.close()
    if is_stream:
        return _reading(result, resources)
    return result  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of Any


async def _reading(values: Any, resources: Resources) -> AsyncGenerator[Any, None]:
    """Yield the values of a stream that the call gave: what it was opened for ends with the last of them."""
    try:
        async for value in values:
            yield value
    finally:
        try:
            aclose = getattr(values, "aclose", None)
            if aclose is not None:
                await aclose()
        finally:
            await resources.close()
