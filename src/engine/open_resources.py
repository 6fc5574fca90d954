"""What resources are open in one Engine: who uses them, how they are opened, replaced and closed."""

import asyncio
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Iterable,
    Mapping,
)
from contextvars import Context, ContextVar
from copy import copy
from types import TracebackType
from typing import Any, cast
from weakref import WeakSet

from .._errors import EngineClosedError, NodeCancelledError, ResourceError, add_note, copy_of
from ..actors.tasks import ContextTask, uninterrupted
from ..telemetry import logs
from .options import ChosenScheduler
from .program import Plan, Program
from .tracing.tracer import Callee


class Opening:
    """A resource and the static arguments that it is opened with; equal ones are opened once and shared.

    Attributes:
        resource: the resource.
        opener: its function, or the fake that `testing.replace` put in its place when the graph was traced.
        name: name of the resource.
    """

    __slots__ = ("_args", "_hash", "_key", "_kwargs", "name", "opener", "resource")

    def __init__(
        self,
        resource: Callee,
        opener: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
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

    def manager(self) -> "_Opened":
        """Return what opens it once."""
        return _Opened(self)

    def make(self) -> Any:
        """Call the function."""
        return self.opener(*self._args, **self._kwargs)

    @property
    def arguments(self) -> str:
        """The arguments, as one would write them."""
        named = [f"{name}={value!r}" for name, value in self._kwargs.items()]
        return ", ".join([*map(repr, self._args), *named])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opening) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


class _Opened:
    """Runs the function of a resource to its `yield` and, later, to its end."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._generator: AsyncGenerator[Any, None] | None = None

    async def __aenter__(self) -> Any:
        made = self._opening.make()
        if not inspect.isasyncgen(made):  # a fake may just give the value
            return await made if inspect.isawaitable(made) else made
        self._generator = cast("AsyncGenerator[Any, None]", made)
        try:
            return await anext(self._generator)
        except StopAsyncIteration:
            raise ResourceError(
                f"resource {self._opening.name!r} ended without a `yield`: it yields what it opened, once"
            ) from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        generator = self._generator
        if generator is None:
            return
        try:
            # A host that is cancelled, by a loop that is shut down or by a task group of the resource's own, raises
            # at the `yield`, as it would inside any other `async with`.
            await (anext(generator) if error is None else generator.athrow(error))
        except StopAsyncIteration:
            return
        await generator.aclose()
        raise ResourceError(f"resource {self._opening.name!r} yielded twice: it yields what it opened, once")


def _exact(value: object) -> Hashable:
    """Return what tells values apart that are equal and yet not the same, such as 1 and True."""
    if type(value) is tuple:
        return tuple, tuple([_exact(member) for member in cast("tuple[object, ...]", value)])
    return type(value), value


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

    Attributes:
        closed: nothing is opened any more.
        entries: what is open, or being opened or closed.
        on_lost: called with programs whose frames have a resource that has ended by itself.
    """

    def __init__(self, *, closes_unused: bool) -> None:
        self.closed = False
        self.entries: dict[Opening, Entry] = {}
        self._closes_unused = closes_unused
        self.on_lost: set[Callable[[Collection[Program]], None]] = set()

    @property
    def has_opened(self) -> bool:
        """Whether anything is open, or being opened or closed."""
        return bool(self.entries)

    def program(self, plan: Plan, scheduler: ChosenScheduler) -> Program:
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
        elif isinstance(error, Exception):
            error = copy_of(error)  # all who have waited for it are told
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
        for lost in self.on_lost:
            lost(entry.programs)
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


# What the present call that runs without an engine has opened: `run_eagerly` sets it.
opened_eagerly: ContextVar[Resources | None] = ContextVar("penstock_eager_resources", default=None)


def open_eagerly(opening: Opening) -> Coroutine[Any, Any, Any] | None:
    """Return what opens a resource until the present call ends; None outside of any such call."""
    resources = opened_eagerly.get()
    return None if resources is None or resources.closed else resources.value_of(opening)
