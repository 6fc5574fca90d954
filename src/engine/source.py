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
        window = self._window
        ends_at = window.submitted + _BURST
        while window.in_flight < window.size:
            window.in_flight += 1  # the place is reserved before the source is asked
            try:
                call = self._context.run(next, self._iterator)
            except BaseException as error:  # noqa: BLE001 - it ends the stream; a worker only asked for a call
                self._stop(_Ended() if isinstance(error, StopIteration) else error)
                window.release()
                return None
            wired = self._wired.get(call.graph) if call.__class__ is Call else None
            if wired is None:
                self._unprepared = call
                self._stop(None)
                return None
            index = window.submitted
            window.submitted = index + 1
            frame = window.frames[index] = Frame(wired.program, call.arguments, self._crew, window, index, self._parent)
            entry = wired.only_entry
            if entry is None or entry.places.free <= 0:
                if self._deadline is not None:
                    frame.deadline = self._deadline
                self._enter(frame, wired)
                return None
            if not (wired.is_chain and self._may_run and entry.completed):
                if self._deadline is not None:
                    frame.deadline = self._deadline
                entry.places.free -= 1
                return entry, frame
            self._run(index, frame, entry, position)
            if entry.was_slow or index >= ends_at:
                return None
        self._crew.feed = None
        window.on_room = self._go_on
        return None

    def _run(self, index: int, frame: Frame, actor: Actor, position: Position) -> None:
        position.frame, position.actor = frame, actor
        value: Any = None
        failure: BaseException | None = None
        try:
            value = actor.run_inline(frame.values)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its item's outcome
            failure = error
        position.frame = None
        if frame.state != "running":  # the handler itself ended its item, e.g. by closing the stream
            frame.leave()
        elif failure is None:
            actor.completed += 1
            # `Frame.end_with`, as far as it applies here: two calls less for items that cost hardly more than that.
            frame.result = value
            frame.state = "done"
            frame.values = NOTHING
            self._window.completed += 1
            if index == self._window.position:
                self._window.wake_reader()
        else:
            actor.failed += 1
            frame.fail(failure, actor)

    def _frame(self, call: Call[Any], wired: Wired) -> Frame:
        window = self._window
        index = window.submitted
        window.submitted = index + 1
        frame = window.frames[index] = Frame(wired.program, call.arguments, self._crew, window, index, self._parent)
        if self._deadline is not None:
            frame.deadline = self._deadline
        return frame

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
            self._window.release()
            raise
        self._enter(self._frame(call, self._wired[call.graph]), self._wired[call.graph])

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
            if window.in_flight >= window.size:
                room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                window.on_room = lambda room=room: None if room.done() else room.set_result(None)
                await room
            if window.closed:  # a source may swallow the cancellation that told it to stop
                return False
            window.in_flight += 1
            try:
                call = await source.__anext__()
                window.asking = False
            except BaseException as error:
                window.release()
                if isinstance(error, StopAsyncIteration):
                    return True
                raise
            try:
                await start(call, window.submitted)
            except BaseException:
                window.release()
                raise
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
