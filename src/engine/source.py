"""Sources: where a stream's calls come from, and how they are asked for as there is room."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeAlias

from ..actors.actor import Actor
from ..actors.crew import Crew
from ..actors.current import Position
from ..actors.frame import NOTHING, Frame
from .graph import Call, Graph
from .window import Window
from .wiring import Wired

Calls: TypeAlias = Iterable[Call[Any]] | AsyncIterable[Call[Any]]
Prepare: TypeAlias = Callable[[Graph[..., Any]], Awaitable[Wired]]

# Items that are taken from a source that never waits before the loop gets its turn.
_BURST = 64


class _Ended(Exception):
    """The source has no more calls. A StopIteration cannot travel through a future."""


class PulledSource:
    """A plain iterable whose calls are asked for by the workers themselves: no hop between the source and its item.

    What a worker cannot do, because it has to wait, is left to the task of the source: entering a stateful node, and
    an inbox that is full.
    """

    def __init__(
        self,
        calls: Iterable[Call[Any]],
        window: Window,
        crew: Crew,
        prepare: Prepare,
        parent: Frame | None,
        deadline: float | None,
    ) -> None:
        # A generator is stepped by whichever worker is free, but always in one context: it may set variables in it.
        self._context = crew.context.copy()
        self._iterator: Iterator[Any] = self._context.run(iter, calls)
        self._window = window
        self._crew = crew
        self._prepare = prepare
        self._parent = parent
        self._deadline = deadline
        # Spans and deadlines are looked after between two steps, which takes a worker.
        self._may_run = deadline is None and not crew.traced and window.ordered
        self._wired: dict[Graph[..., Any], Wired] = {}
        self._unprepared: Call[Any] | None = None
        self._blocked: tuple[Frame, list[Actor]] | None = None
        self._stopped: asyncio.Future[None] = crew.loop.create_future()

    async def run(self) -> None:
        """Let the workers pull until there are no more calls.

        Raises:
            Exception: what the source raised, or a stateful node that did not start.
        """
        try:
            while True:
                self._go_on()
                await self._stopped
                self._stopped = self._crew.loop.create_future()
                if self._unprepared is not None:
                    await self._start_unprepared(self._unprepared)
                if self._blocked is not None:
                    frame, full = self._blocked
                    self._blocked = None
                    for actor in full:
                        await actor.queue(frame)
                    del frame, full
        except _Ended:
            return
        finally:
            self._crew.feed = self._window.on_room = None
            self._context.run(close_nowait, self._iterator)

    def pull(self, position: Position) -> tuple[Actor, Frame] | None:
        """Return an item to run, its place already taken.

        Items of a graph that is one chain of plain functions are run here, one after the other: they cannot wait, so
        there is nothing to carry on.

        Returns:
            None if there is no item now, or what there was has been run, or was given to others.
        """
        window, crew, parent, frames = self._window, self._crew, self._parent, self._window.frames
        run, iterator = self._context.run, self._iterator
        index, limit = window.submitted, window.limit
        ends_at = min(index + _BURST, limit)
        graph: Graph[..., Any] | None = None
        actor: Actor | None = None  # the chain of plain functions that all of the graph is; None if it is not
        while index < ends_at:
            try:
                call = run(next, iterator)
            except BaseException as error:  # noqa: BLE001 - it ends the stream; a worker only asked for a call
                self._stop(_Ended() if isinstance(error, StopIteration) else error)
                return None
            if call.__class__ is not Call or call.graph is not graph:
                wired = self._wired.get(call.graph) if call.__class__ is Call else None
                if wired is None:
                    self._unprepared = call
                    window.reserved = 1
                    self._stop(None)
                    return None
                graph, program = call.graph, wired.program
                # From the second item on, which has found the names of the functions and ... TODO
                actor = position.actor = wired.chain if self._may_run else None
                if actor is not None and not (actor.completed and actor.places.free > 0):
                    actor = None
            frame = frames[index] = Frame(program, call.arguments, crew, window, index, parent)
            index += 1
            window.submitted = index
            if actor is None:
                return self._hand_over(frame, wired)
            position.frame = frame
            try:
                value = actor.run_inline(frame.values)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its item's outcome
                position.frame = None
                self._failed(frame, actor, error)
                continue
            position.frame = None
            if frame.state != "running":  # the handler itself ended its item, e.g. by closing the stream
                frame.leave()
                return None
            actor.completed += 1
            # `Frame.end_with`, as far as it applies here: two calls less for items that cost hardly more than that.
            frame.result = value
            frame.state = "done"
            frame.values = NOTHING
            if frame.item == window.position:
                window.wake_reader()
            if actor.was_slow:
                actor.was_slow = False
                return None
        if index >= limit:
            crew.feed = None
            window.on_room = self._go_on
        return None

    def _hand_over(self, frame: Frame, wired: Wired) -> tuple[Actor, Frame] | None:
        """Give a new item to the worker that asked for it, or let it into its actors."""
        if self._deadline is not None:
            frame.deadline = self._deadline
        entry = wired.only_entry
        if entry is None or entry.places.free <= 0:
            self._enter(frame, wired)
            return None
        entry.places.free -= 1
        return entry, frame

    def _failed(self, frame: Frame, actor: Actor, error: BaseException) -> None:
        if frame.state != "running":
            frame.leave()
            return
        actor.failed += 1
        frame.fail(error, actor)

    def _enter(self, frame: Frame, wired: Wired) -> None:
        full = self._crew.start(frame, wired.entries)
        if full:
            self._blocked = frame, full
            self._stop(None)

    async def _start_unprepared(self, call: Any) -> None:
        self._unprepared = None
        try:
            self._wired[call.graph] = await self._prepare(checked_call(call, self._window.submitted).graph)
        except BaseException:
            self._window.reserved = 0
            raise
        wired = self._wired[call.graph]
        frame = self._window.new_frame(wired, call.arguments, self._crew, self._parent)
        if self._deadline is not None:
            frame.deadline = self._deadline
        self._enter(frame, wired)

    def _go_on(self) -> None:
        self._crew.feed = self.pull
        if not self._crew.armed:
            self._crew.arm()

    def _stop(self, error: BaseException | None) -> None:
        """Hand over to the task of the source."""
        self._crew.feed = None
        if self._stopped.done():
            return
        if error is None:
            self._stopped.set_result(None)
        else:
            self._stopped.set_exception(error)


async def feed(calls: Calls, window: Window, start: Callable[[Any, int], Awaitable[None]]) -> bool:
    """Ask a source for calls, one by one, and start them; for async iterables, and items with workers of their own.

    Args:
        calls: the calls.
        window: reserves a place before each call is asked for.
        start: starts one call, given its index.

    Returns:
        Whether the source has no more calls; False if the window was closed before.

    Raises:
        Exception: what the source raised, or `start`.
    """
    source = calls.__aiter__() if isinstance(calls, AsyncIterable) else _stepwise(iter(calls))
    try:
        while True:
            window.asking = True
            if window.submitted >= window.limit:
                room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                window.on_room = lambda room=room: None if room.done() else room.set_result(None)
                await room
            if window.closed:  # a source may swallow the cancellation that told it to stop
                return False
            window.reserved = 1
            try:
                try:
                    call = await source.__anext__()
                except StopAsyncIteration:
                    return True
                window.asking = False
                await start(call, window.submitted)
            finally:
                window.reserved = 0
            del call  # it would keep the last item alive while the source is waited for
            if window.submitted % _BURST == 0:
                await asyncio.sleep(0)
    finally:
        window.on_room = None
        aclose = getattr(source, "aclose", None)
        if aclose is not None:
            await aclose()


def checked_call(call: Any, index: int) -> Call[Any]:
    """Return the call; raises TypeError if a source gave something else."""
    if isinstance(call, Call):
        return call  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of Call[Any]
    raise TypeError(f"a stream is made of calls of graphs, such as search(url); item {index} is {call!r}")


def close_nowait(iterator: Iterator[Any]) -> None:
    """Close a generator, so that its `finally` runs now."""
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


async def _stepwise(iterator: Iterator[Any]) -> AsyncIterator[Any]:
    try:
        for call in iterator:
            yield call
            del call
    finally:
        close_nowait(iterator)
