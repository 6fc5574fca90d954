"""Resources: what is open in one Engine, who uses it, and how it is opened and closed."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextvars import Context
from copy import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..._errors import EngineClosedError, NodeCancelledError, NodeError
from ...actors.keeper import Keeper
from ...actors.uninterrupted import uninterrupted
from ...telemetry import logs
from ..program import Program
from .opening import Opening

if TYPE_CHECKING:
    from ..planning import ChosenScheduler, Plan

_MARK = "__penstock_opening__"


class Entry:
    """A resource that is open, or being opened or closed.

    Attributes:
        opening: which one.
        keeper: what keeps it open.
        candidate: what opens the next one, while it is reloaded.
        users: the scopes that use it; of an Engine that keeps it open anyway, those that wait for it.
        programs: those whose frames have it.
        ending: it is being closed, or its opening is cancelled.
        retiring: tasks that close what it was before it was reloaded.
    """

    def __init__(self, opening: Opening, keeper: Keeper[Any]) -> None:
        self.opening = opening
        self.keeper = keeper
        self.candidate: Keeper[Any] | None = None
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
        if not all(entry.keeper.is_open for entry in entries):  # one was lost while the next was opened
            entries = await self._use_all(program, user)
        for entry in entries:
            if not entry.keeper.is_open:  # and again: it is not to be had
                await asyncio.wait([entry.keeper.task])
                raise self.failure(entry.opening, entry.keeper, program.name)
        for entry in entries:
            entry.programs.add(program)
        self._fill([program])

    async def value_of(self, opening: Opening) -> Any:
        """Return what a resource gives, for a graph that is called without an engine."""
        return (await self._use(opening, None, object())).keeper.value

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
            if not entry.keeper.is_open:
                entry.keeper.end_soon()
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

    def new_keeper(self, opening: Opening) -> Keeper[Any]:
        """Begin to open a resource."""
        # An empty context: what is shared must not see the variables, or the span, of whoever happened to come first.
        return Keeper(opening.manager(), f"penstock-resource-{opening.name}", Context())

    def swap(self, entry: Entry, keeper: Keeper[Any]) -> Keeper[Any]:
        """Have the frames that begin from now on see another one; returns what keeps the one before open."""
        before, entry.keeper = entry.keeper, keeper
        self._watch(entry)
        self._fill(entry.programs)
        return before

    def failure(self, opening: Opening, keeper: Keeper[Any], graph: str | None) -> BaseException:
        """Return the error of an opening for one of those who waited for it, with a note."""
        error = keeper.error
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
            if entry is not None and (entry.ending or entry.keeper.is_leaving):
                await asyncio.wait([entry.keeper.task])  # never two at a time: it may hold what the next one needs
                continue
            if self.closed:
                raise EngineClosedError(f"resource {opening.name!r} is not opened any more: the Engine was closed")
            if entry is None:
                entry = self.entries[opening] = Entry(opening, self.new_keeper(opening))
                self._watch(entry)
            elif entry.keeper.task.done():  # it has ended by itself
                entry.keeper = self.new_keeper(opening)
                self._watch(entry)
            entry.users.add(user)
            keeper = entry.keeper
            try:
                await keeper.settled()
            except BaseException:
                await self._left_waiting(entry, user)
                raise
            if keeper.is_open and not entry.ending:
                if not self._closes_unused:
                    entry.users.discard(user)
                self._fill(program for program in entry.programs if not program.is_filled)
                return entry
            entry.users.discard(user)
            was_replaced = keeper.error is None and entry.keeper is not keeper  # by a reload: there is another one
            if not (entry.ending or was_replaced):
                raise self.failure(opening, keeper, graph)

    async def _left_waiting(self, entry: Entry, user: object) -> None:
        """Whoever waited was cancelled: the last one cancels the opening, and waits until it has unwound.

        Not during a reload, which has an opening of its own under way, and ends this one when it has succeeded.
        """
        entry.users.discard(user)
        if (
            entry.users
            or entry.ending
            or entry.candidate is not None
            or (entry.keeper.is_open and not self._closes_unused)
        ):
            return
        try:
            await uninterrupted(self._end([entry]))
        except Exception as error:  # noqa: BLE001 - of the opening's own unwinding; the cancellation goes on
            logs.warning("resource.not_closed", resource=entry.opening.name, error=repr(error))

    async def _end(self, entries: Iterable[Entry]) -> None:
        errors: list[BaseException] = []
        ending = sorted(entries, key=lambda entry: entry.keeper.number, reverse=True)
        for entry in ending:
            entry.ending = True
            for program in entry.programs:
                program.empty()
        for entry in ending:
            if entry.candidate is not None:
                await entry.candidate.ended()
            if entry.retiring:
                await asyncio.wait(entry.retiring)
            had_ended = entry.keeper.task.done()  # it was lost, which was logged, or whoever waited for it was told why
            error = await entry.keeper.ended()
            if error is not None and not had_ended:
                errors.append(error)
            self._forget(entry)
        for error in errors[1:]:
            logs.warning("resource.not_closed", error=repr(error))
        if errors:
            raise errors[0]

    def _watch(self, entry: Entry) -> None:
        keeper = entry.keeper
        # An empty context, as for its task: that of the caller would be kept for as long as the resource is open.
        keeper.task.add_done_callback(lambda _: self._keeper_ended(entry, keeper), context=Context())

    def _keeper_ended(self, entry: Entry, keeper: Keeper[Any]) -> None:
        """An opening failed, or what was open has ended by itself: whoever needs it next opens it again."""
        error = keeper.error  # retrieved here, because whoever waited for an opening may have left
        if entry.keeper is not keeper or entry.ending:
            return
        if keeper.was_opened:
            why = "its task was cancelled" if keeper.task.cancelled() else repr(error)
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
            keepers = [entry.keeper for entry in entries if entry is not None and entry.keeper.is_open]
            if len(keepers) == len(entries):
                program.fill(keeper.value for keeper in keepers)

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
