"""The resources of one Engine: how they are opened, shared, replaced by a reload, and closed."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Hashable, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import Context, ContextVar
from copy import copy
from typing import Any, cast
from weakref import WeakSet

from .._errors import EngineClosedError, NodeCancelledError, ResourceError, add_note, copy_of
from ..actors.tasks import ContextTask, close_stream, uninterrupted
from ..telemetry import logs
from .options import ChosenScheduler
from .program import Plan, Program
from .tracing.tracer import Callee


class Opening:
    """A resource and the static arguments that it is opened with; equal openings are opened once and shared.

    Attributes:
        resource: the resource.
        opener: the function of the resource, or the fake that replaced it when the graph was traced.
        name: the name of the resource.
    """

    __slots__ = ("_args", "_hash", "_key", "_kwargs", "name", "opener", "resource")

    def __init__(
        self, resource: Callee, opener: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.resource = resource
        self.opener = opener
        self.name = resource.name
        self._args = args
        self._kwargs = kwargs
        self._key = (
            id(resource),
            id(opener),
            tuple([_exact(arg) for arg in args]),
            tuple([(name, _exact(arg)) for name, arg in sorted(kwargs.items())]),
        )
        self._hash = hash(self._key)

    @asynccontextmanager
    async def manager(self) -> AsyncGenerator[Any, None]:
        """Run the function of the resource up to its `yield`, and at the end the code after it."""
        made = self.opener(*self._args, **self._kwargs)
        if not inspect.isasyncgen(made):  # a fake may simply return the value
            yield await made if inspect.isawaitable(made) else made
            return
        generator = cast("AsyncGenerator[Any, None]", made)
        try:
            async with asynccontextmanager(lambda: generator)() as value:
                yield value
        except RuntimeError as error:
            if not logs.shown(error, str).startswith("generator didn't"):
                raise
            raise ResourceError(f"a @resource function must yield exactly once; {self.name!r}: {error}") from error

    @property
    def arguments(self) -> str:
        """The arguments, as the source text of a call."""
        named = [f"{name}={value!r}" for name, value in self._kwargs.items()]
        return ", ".join([*map(repr, self._args), *named])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opening) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def _exact(value: object) -> Hashable:
    """Return a key that also tells equal values of different types apart, such as 1 and True."""
    if type(value) is tuple:
        return tuple, tuple([_exact(member) for member in cast("tuple[object, ...]", value)])
    return type(value), value


class Entry:
    """A resource that is open, or being opened or closed.

    Attributes:
        opening: the resource and its arguments.
        context_task: the task that keeps the resource open.
        candidate: during a reload, the task that opens the new value.
        users: the scopes that use the resource. An Engine that keeps its resources open until it closes notes here only
            the scopes that wait for the opening.
        programs: the programs whose frames have the resource.
        ending: whether the resource is being closed, or its opening is being cancelled.
        retiring: the tasks that close old values of the resource, which reloads have replaced.
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
    """The resources of one Engine, or of one graph that is called without an engine.

    Args:
        closes_unused: whether a resource is closed when the last scope that uses it ends; otherwise only `close` does.

    Attributes:
        closed: whether new openings are refused.
        entries: the resources that are open, or being opened or closed.
    """

    def __init__(self, *, closes_unused: bool) -> None:
        self.closed = False
        self.entries: dict[Opening, Entry] = {}
        self._closes_unused = closes_unused

    def program(self, plan: Plan, scheduler: ChosenScheduler) -> Program:
        """Return the program of a plan; for a plan with resources, a copy for the resources of this Engine."""
        program = plan._program(scheduler)
        if not program.resources:
            return program
        # The plan keeps the copies, not this object: so the copies end with a graph that a factory has made for a
        # single call.
        own = plan._programs_with_resources.setdefault(self, {})
        if scheduler not in own:
            own[scheduler] = copy(program)
        return own[scheduler]

    def hold_nowait(self, program: Program, user: object) -> bool:
        """Have a scope use the resources of a program if all of them are open; return whether they are."""
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
        """Have a scope use the resources of a program; open the resources that are not open yet.

        Args:
            program: the program; its frames have the resources from now on.
            user: the scope, which has to call `release` at its end, even if `hold` raises.

        Raises:
            Exception: the error of a resource that did not open, with a note.
            EngineClosedError: the Engine was closed meanwhile.
        """
        if self.hold_nowait(program, user):
            return
        entries = await self._use_all(program, user)
        if not all(entry.context_task.is_open for entry in entries):  # a resource has ended while another was opened
            entries = await self._use_all(program, user)
        for entry in entries:
            if not entry.context_task.is_open:  # the resource has ended a second time: give up
                await asyncio.wait([entry.context_task.task])
                raise self.failure(entry.opening, entry.context_task, program.name)
        for entry in entries:
            entry.programs.add(program)
        self._fill([program])

    async def value_of(self, opening: Opening) -> Any:
        """Open a resource if it is not open, and return its value; for a graph that is called without an engine."""
        return (await self._use(opening, None, object())).context_task.value

    async def release(self, user: object) -> None:
        """Close the resources that only this scope has used, the last opened first; for a scope that has ended.

        Raises:
            Exception: the first error of closing. The other resources are closed all the same; their errors are
                logged.
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
        """Refuse new openings, and cancel openings under way, because the Engine is being closed."""
        self.closed = True
        for entry in self.entries.values():
            if not entry.context_task.is_open:
                entry.context_task.end_soon()
            if entry.candidate is not None:
                entry.candidate.end_soon()

    async def close(self) -> None:
        """Close all resources, the last opened first.

        Raises:
            Exception: the first error of a closing. The other resources are closed all the same; their errors are
                logged.
        """
        self.refuse()
        if self.entries:
            await uninterrupted(self._end([entry for entry in self.entries.values() if not entry.ending]))

    def new_context_task(self, opening: Opening) -> ContextTask[Any]:
        """Begin to open a resource, in a task that keeps it open."""
        # An empty context: a shared resource must not see the variables or the span of the call that came first.
        return ContextTask(opening.manager(), f"penstock-resource-{opening.name}", Context())

    def swap(self, entry: Entry, context_task: ContextTask[Any]) -> ContextTask[Any]:
        """Give frames that begin from now on a new value; return the task that keeps the old value open."""
        before, entry.context_task = entry.context_task, context_task
        self._watch(entry)
        self._fill(entry.programs)
        return before

    def failure(self, opening: Opening, context_task: ContextTask[Any], graph: str | None) -> BaseException:
        """Return the error of a failed opening, with a note, for one of the callers that waited for it."""
        error = context_task.error
        if self.closed:
            return EngineClosedError(f"the Engine was closed while resource {opening.name!r} was opened")
        if error is None:
            error = NodeCancelledError(
                "the opening was cancelled, but not by the engine: something that it awaited was, or its own task"
            )
        elif isinstance(error, Exception):
            error = copy_of(error)  # every caller that has waited for the opening gets a copy
        else:
            return error
        place = "" if graph is None else f" for graph {graph!r}"
        add_note(error, f"while resource {opening.name!r} was opened{place}")
        return error

    async def _use_all(self, program: Program, user: object) -> list[Entry]:
        return [await self._use(opening, program.name, user) for opening in program.resources]

    async def _use(self, opening: Opening, graph: str | None, user: object) -> Entry:
        while True:
            entry = self.entries.get(opening)
            if entry is not None and (entry.ending or entry.context_task.is_leaving):
                # Never open a resource twice at a time: the old value may hold something that the next needs: a port.
                await asyncio.wait([entry.context_task.task])
                continue
            if self.closed:
                raise EngineClosedError(f"resource {opening.name!r} was not opened: the Engine was closed")
            if entry is None:
                entry = self.entries[opening] = Entry(opening, self.new_context_task(opening))
                self._watch(entry)
            elif entry.context_task.task.done():  # the resource has ended by itself
                entry.context_task = self.new_context_task(opening)
                self._watch(entry)
            entry.users.add(user)
            context_task = entry.context_task
            try:
                await context_task.settled()
            except asyncio.CancelledError:
                await self._left_waiting(entry, user)
                raise
            if context_task.is_open and not entry.ending:
                if not self._closes_unused:
                    entry.users.discard(user)
                self._fill(program for program in entry.programs if not program.is_filled)
                return entry
            entry.users.discard(user)
            # A reload may have replaced the task while this call waited: then the loop looks at the new task.
            was_replaced = context_task.error is None and entry.context_task is not context_task
            if not (entry.ending or was_replaced):
                raise self.failure(opening, context_task, graph)

    async def _left_waiting(self, entry: Entry, user: object) -> None:
        """Handle the cancellation of a call that waited for an opening: the last such call cancels the opening.

        During a reload, the call does not cancel the opening: the reload opens a new value itself, and ends this
        opening when the new value is open.
        """
        entry.users.discard(user)
        if (
            entry.users
            or entry.ending
            or entry.candidate is not None
            or (entry.context_task.is_open and not self._closes_unused)
        ):
            return
        # An error of closing is only logged: the cancellation matters more to the caller.
        with logs.logged("resource.not_closed", resource=entry.opening.name):
            await uninterrupted(self._end([entry]))

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
            # The error of an ended task is known: it was logged when the resource ended, or raised in the callers that
            # waited for the opening.
            had_ended = entry.context_task.task.done()
            error = await entry.context_task.ended()
            if error is not None and not had_ended:
                errors.append(error)
            self._forget(entry)
        for error in errors[1:]:
            logs.warning("resource.not_closed", error=error)
        if errors:
            raise errors[0]

    def _watch(self, entry: Entry) -> None:
        context_task = entry.context_task
        # An empty context, as for the task: the caller's context would be kept alive as long as the resource is open.
        context_task.task.add_done_callback(lambda _: self._context_task_ended(entry, context_task), context=Context())

    def _context_task_ended(self, entry: Entry, context_task: ContextTask[Any]) -> None:
        """Note that an opening failed, or that an open resource ended by itself; the next call opens it again."""
        # Retrieve the error here, because the call that waited for the opening may have been cancelled: asyncio would
        # report an exception that was never retrieved.
        error = context_task.error
        if entry.context_task is not context_task or entry.ending:
            return
        if context_task.was_opened:
            why = "its task was cancelled" if context_task.task.cancelled() else logs.shown(error)
            logs.warning("resource.ended", resource=entry.opening.name, error=why)
        for program in entry.programs:
            program.is_filled = False
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


async def run_eagerly(running: Coroutine[Any, Any, Any]) -> Any:
    """Run the function of a graph without an engine; the outermost call closes the resources that were opened."""
    around = opened_eagerly.get()
    if around is not None and not around.closed:
        return await running
    resources = Resources(closes_unused=False)
    token = opened_eagerly.set(resources)
    is_stream = False
    result: Any
    try:
        result = await running
        is_stream = isinstance(result, AsyncIterator) and bool(resources.entries)
    finally:
        opened_eagerly.reset(token)
        if not is_stream:
            await resources.close()
    if is_stream:
        return _reading(result, resources)
    return result  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of Any


async def _reading(values: Any, resources: Resources) -> AsyncGenerator[Any, None]:
    """Yield the values of a stream, and close the resources of its call after the last value."""
    try:
        async for value in values:
            yield value
    finally:
        try:
            await close_stream(values)
        finally:
            await resources.close()


# The resources of the present call that runs without an engine; `run_eagerly` sets it.
opened_eagerly: ContextVar[Resources | None] = ContextVar("penstock_eager_resources", default=None)


def open_eagerly(opening: Opening) -> Coroutine[Any, Any, Any] | None:
    """Return a coroutine that opens a resource for the present call without an engine; None outside of such a call."""
    resources = opened_eagerly.get()
    return None if resources is None or resources.closed else resources.value_of(opening)
