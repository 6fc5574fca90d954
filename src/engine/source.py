"""Sources: where a stream's calls come from, and the window of those that are in flight."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeAlias

from .._errors import NodeCancelledError, OptionsError
from ..actors.current import Position
from ..actors.frame import NOTHING, AnyDeployment, Frame
from ..actors.node_actor import NodeActor
from ..actors.stream_buffer import StreamBuffer
from ..actors.worker import WorkerGroup
from .graph import Call, Graph
from .program import Wired

# ReorderWindow: the places of a stream of calls, or of a `map_each` over a stream, and the order in which items are
# taken out.
#
# The reorder window is enforced at admission: an item counts from before it is asked for until it is taken out in its
# turn. So a slow first item fills the window and no node ever waits for it.


class ReorderWindow:
    """Listens to the frames of a stream, and hands them out when they have ended.

    Args:
        size: the most items that count at a time.
        ordered: whether they are taken out in input order, or as they end.
        on_fatal: called with an error that ends the whole stream: KeyboardInterrupt, SystemExit.
        on_settled: called when nothing runs for an item any more; None if nobody has to know.

    Attributes:
        submitted: items that were started; the next one's index.
        limit: the index of the first item for which there is no place yet.
        reserved: the source is being asked for an item, whose place is taken: 1, else 0.
        position: in input order, the index of the next item to be taken out; else how many were.
        frames: the items that were started and not yet taken out.
        on_room: called once when there is room again.
        collected: takes the results as they end, in their turn; None where a reader takes each item out.
        service: the deployment that the stream belongs to.
        asking: the task of the source waits for room, or for the source.
        closed: nothing is asked of the source any more.
        failed: items that ended without a result.
        cancelled: those of them that the end of the stream has cancelled.
        expired: those of them that had no time left.
    """

    __slots__ = (
        "_completion_order", "_loop", "_on_fatal", "_on_settled", "_reader", "_unwinding", "asking", "cancelled",
        "closed", "collected", "expired", "failed", "frames", "limit", "on_room", "position", "reserved", "service",
        "size", "submitted",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        size: int,
        on_fatal: Callable[[BaseException], object],
        on_settled: Callable[[Frame], None] | None,
        *,
        ordered: bool,
    ) -> None:
        self._loop = loop
        self._on_fatal = on_fatal
        self._on_settled = on_settled
        self._completion_order: deque[int] | None = None if ordered else deque()
        self._reader: asyncio.Future[None] | None = None
        self._unwinding: set[int] = set()  # taken out, but still running: they count until they have unwound
        self.size = size
        self.submitted = 0
        self.limit = size
        self.reserved = 0
        self.position = 0
        self.asking = False
        self.closed = False
        self.collected: list[Any] | None = None
        self.service: AnyDeployment | None = None
        self.failed = 0
        self.cancelled = 0
        self.expired = 0
        self.frames: dict[int, Frame] = {}
        self.on_room: Callable[[], None] | None = None

    @property
    def in_flight(self) -> int:
        """Items that count now: from before the source is asked for them until they are taken out."""
        return self.submitted + self.reserved + self.size - self.limit

    def new_frame(self, wired: Wired, arguments: tuple[Any, ...], group: WorkerGroup, parent: Frame | None) -> Frame:
        """Start the next item, for which a place was reserved."""
        frame = Frame(wired.program, arguments, group, self, self.submitted, parent)
        self.started(frame)
        return frame

    def started(self, frame: Frame) -> None:
        """The next item is this one."""
        self.frames[self.submitted] = frame
        self.submitted += 1
        self.reserved = 0

    @property
    def running(self) -> int:
        """Items that have not ended yet."""
        return sum(frame.state == "running" for frame in list(self.frames.values()))  # metrics: in another thread

    @property
    def completed(self) -> int:
        """Items that ended with a result; worked out when it is asked for, so that an item does not pay for it."""
        return self.submitted - self.failed - self.running

    def peek(self) -> Frame | None:
        """Return the next item in its turn, if it has ended, and leave it there."""
        if self._completion_order is None:
            frame = self.frames.get(self.position)
            return None if frame is None or frame.state == "running" else frame
        return self.frames[self._completion_order[0]] if self._completion_order else None

    def take(self) -> Frame | None:
        """Take out the next item in its turn, if it has ended."""
        if self._completion_order is None:
            frames, position = self.frames, self.position
            frame = frames.get(position)
            if frame is None or frame.state == "running":
                return None
            del frames[position]
        elif self._completion_order:
            frame = self.frames.pop(self._completion_order.popleft())
            position = self.position
        else:
            return None
        self.position = position + 1
        if frame.unwinding:
            self._unwinding.add(frame.item)
        else:
            self.limit += 1
            if self.on_room is not None:
                self._make_room()
        return frame

    def clear(self) -> None:
        """Forget the items that nobody will take out."""
        self.frames.clear()
        if self._completion_order is not None:
            self._completion_order.clear()

    @property
    def ordered(self) -> bool:
        """Whether items are taken out in input order."""
        return self._completion_order is None

    @property
    def has_reader(self) -> bool:
        """Whether somebody waits for an item."""
        return self._reader is not None

    async def wait(self, values: StreamBuffer[Any] | None = None) -> None:
        """Wait until something has happened that the reader may want to see.

        Args:
            values: a stream of which the reader may want to see the next value, or the end, as well.
        """
        self._reader = self._loop.create_future()
        if values is not None:
            values.waiter = self._reader
        try:
            await self._reader
        finally:
            self._reader = None
            if values is not None:
                values.waiter = None

    def wake_reader(self) -> None:
        """Have the reader look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def frame_done(self, frame: Frame) -> None:
        """An item has ended."""
        if frame.state != "done":
            self.failed += 1
            self.expired += frame.has_expired
            if frame.error is not None and not isinstance(frame.error, Exception):
                self._on_fatal(frame.error)
        has_turn = frame.item == self.position
        if frame.state == "cancelled":
            self.cancelled += not frame.has_expired  # only a stream that ends cancels its items
            has_turn = False
        elif self._completion_order is not None:
            self._completion_order.append(frame.item)
            has_turn = True
        if has_turn and (self.collected is None or not self._collect(self.collected)):
            self.wake_reader()
        if self._on_settled is not None and not frame.unwinding:
            self._on_settled(frame)

    def frame_settled(self, frame: Frame) -> None:
        """Nothing runs for an item any more."""
        if self._on_settled is not None:
            self._on_settled(frame)
        if frame.item in self._unwinding:
            self._unwinding.discard(frame.item)
            self.limit += 1
            self._make_room()
            self.wake_reader()  # it may wait for the last item

    def _collect(self, collected: list[Any]) -> bool:
        """Take out what has ended with a result; returns whether items are left, none of which can be taken out."""
        while (frame := self.peek()) is not None:
            if frame.state != "done":
                return False  # the reader knows what to do with an error
            self.take()
            collected.append(frame.result)
        return self.position < self.submitted

    def _make_room(self) -> None:
        on_room, self.on_room = self.on_room, None
        if on_room is not None:
            on_room()


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
        window: ReorderWindow,
        group: WorkerGroup,
        prepare: Prepare,
        parent: Frame | None,
        deadline: float | None,
    ) -> None:
        # A generator is stepped by whichever worker is free, but always in one context: it may set variables in it.
        self._context = group.context.copy()
        self._iterator: Iterator[Any] = self._context.run(iter, calls)
        self._window = window
        self._group = group
        self._prepare = prepare
        self._parent = parent
        self._deadline = deadline
        # Spans and deadlines are looked after between two steps, which takes a worker.
        self._may_run = deadline is None and not group.traced and window.ordered
        self._wired: dict[Graph[..., Any], Wired] = {}
        self._entry: NodeActor | None = None  # where the last item began
        self._asked_for: Call[Any] | None = None  # the source gave it, and it waits for its graph's actors
        self._blocked: tuple[Frame, list[NodeActor]] | None = None
        self._stopped: asyncio.Future[None] = group.loop.create_future()

    async def run(self) -> None:
        """Let the workers pull until there are no more calls.

        Raises:
            Exception: what the source raised, or a stateful node that did not start.
        """
        try:
            while True:
                self._go_on()
                await self._stopped
                self._stopped = self._group.loop.create_future()
                if self._asked_for is not None:
                    await self._prepare_graph(self._asked_for)
                if self._blocked is not None:
                    frame, full = self._blocked
                    self._blocked = None
                    await enter(frame, full, self._window)
                    del frame, full
        except _Ended:
            return
        finally:
            self._group.feed = self._window.on_room = None
            self._context.run(close_nowait, self._iterator)

    def pull(self, position: Position | None) -> tuple[NodeActor, Frame] | None:
        """Return an item to run, its place already taken.

        Items of a graph that is one chain of plain functions are run here: they cannot wait, so there is nothing to
        carry on.

        Args:
            position: of the worker that asks; None if it is none, so that nothing may run here.

        Returns:
            None if there is no item now, or what there was has been run, or was given to others.
        """
        window, group, wired_for = self._window, self._group, self._wired
        run_in_context, iterator = self._context.run, self._iterator
        while window.submitted < window.limit:
            call = self._asked_for
            if call is None:
                try:
                    call = run_in_context(next, iterator)
                except BaseException as error:  # noqa: BLE001 - it ends the stream; a worker only asked for a call
                    self._stop(_Ended() if isinstance(error, StopIteration) else error)
                    return None
            else:
                self._asked_for = None
            wired = wired_for.get(call.graph) if call.__class__ is Call else None
            if wired is None:
                self._asked_for = call
                self._stop(None)
                return None
            if self._may_run and position is not None:
                chain = wired.chain
                # The first item goes the longer way, on which every function of the chain is looked at.
                if chain is not None and chain.completed and chain.limiter.free > 0:
                    self._burst(call, wired, chain, position)
                    return None
            entry = self._entry = wired.only_entry
            has_place = entry is not None and entry.limiter.free > 0
            if not has_place and entry is not None and entry.inbox.room:
                self._fill(call, wired, entry)
                if group.feed is not None and window.submitted >= window.limit:
                    self._wait_for_room()
                return None  # the loop gets its turn
            # `ReorderWindow.new_frame` written out, as in `_burst`; nothing is reserved by workers.
            index = window.submitted
            window.submitted = index + 1
            frame = window.frames[index] = Frame(wired.program, call.arguments, group, window, index, self._parent)
            if self._deadline is not None:
                frame.deadline = self._deadline
            if has_place:
                assert entry is not None
                entry.limiter.free -= 1
                return entry, frame
            full = group.start(frame, wired.entries)
            if full:
                self._blocked = frame, full
                self._stop(None)
                return None
            if group.ready:
                return None
        self._wait_for_room()
        return None

    def wanted(self) -> int:
        """Return how many workers would get an item now, if the next ones begin where the last one did."""
        room = self._window.limit - self._window.submitted
        if room <= 0:
            self._wait_for_room()
            return 0
        free = 1 if self._entry is None else self._entry.limiter.free
        if free <= 0:
            # What would only wait in an inbox is put there now, which takes no worker, and none has to be woken.
            item = self.pull(None)
            if item is not None:
                self._group.enqueue(*item)
            return 0 if self._group.feed is None else 1
        return min(free, room)

    def _burst(self, call: Call[Any], wired: Wired, chain: NodeActor, position: Position) -> None:
        """Run items of a chain, one after the other, as long as they are short and there is room for more."""
        # Everything in this loop is paid by items that do hardly anything: `ReorderWindow.new_frame` and
        # `Frame.end_with` are written out as far as they apply, and the reader, which cannot run meanwhile, is woken
        # once.
        window, group, parent = self._window, self._group, self._parent
        graph, program, frames, run = call.graph, wired.program, window.frames, chain.run
        run_in_context, iterator = self._context.run, self._iterator
        index = window.submitted
        ends_at = min(index + _BURST, window.limit)
        position.actor = chain
        try:
            while True:
                frame = frames[index] = Frame(program, call.arguments, group, window, index, parent)
                index += 1
                window.submitted = index
                position.frame = frame
                try:
                    value = run(frame.values)
                except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its item's outcome
                    position.frame = None
                    _fail(frame, chain, error)
                else:
                    position.frame = None
                    if frame.state != "running":  # the handler itself ended its item, e.g. by closing the stream
                        frame.leave()
                        return
                    chain.completed += 1
                    frame.result = value
                    frame.state = "done"
                    frame.values = NOTHING
                if index >= ends_at or chain.was_slow:
                    chain.was_slow = False
                    return
                try:
                    call = run_in_context(next, iterator)
                except BaseException as error:  # noqa: BLE001 - it ends the stream, as in `pull`
                    self._stop(_Ended() if isinstance(error, StopIteration) else error)
                    return
                if call.__class__ is not Call or call.graph is not graph:
                    self._asked_for = call
                    return
        finally:
            window.wake_reader()

    def _fill(self, call: Call[Any], wired: Wired, entry: NodeActor) -> None:
        """Put items where they would only wait, all at once, as long as there is room for more."""
        window, group, parent, deadline = self._window, self._group, self._parent, self._deadline
        graph, program, waiting = call.graph, wired.program, window.frames
        run_in_context, iterator = self._context.run, self._iterator
        index = window.submitted
        ends_at = min(index + entry.inbox.room, index + _BURST, window.limit)
        frames: list[Frame] = []
        try:
            while True:
                frame = waiting[index] = Frame(program, call.arguments, group, window, index, parent)
                frames.append(frame)
                if deadline is not None:
                    frame.deadline = deadline
                index += 1
                window.submitted = index
                if index >= ends_at:
                    return
                try:
                    call = run_in_context(next, iterator)
                except BaseException as error:  # noqa: BLE001 - it ends the stream, as in `pull`
                    self._stop(_Ended() if isinstance(error, StopIteration) else error)
                    return
                if call.__class__ is not Call or call.graph is not graph:
                    self._asked_for = call
                    return
        finally:
            entry.offer_new(frames)

    async def _prepare_graph(self, call: Any) -> None:
        """Enter the stateful nodes of a graph that comes for the first time; `pull` takes the call from there."""
        self._window.reserved = 1
        try:
            self._wired[call.graph] = await self._prepare(
                checked_call(call, self._window.submitted, trace_items=False).graph
            )
        finally:
            self._window.reserved = 0

    def _wait_for_room(self) -> None:
        self._group.feed = None
        self._window.on_room = self._go_on

    def _go_on(self) -> None:
        self._group.feed = self
        if not self._group.armed:
            self._group.arm()

    def _stop(self, error: BaseException | None) -> None:
        """Hand over to the task of the source."""
        self._group.feed = None
        if self._stopped.done():
            return
        if error is None:
            self._stopped.set_result(None)
        else:
            self._stopped.set_exception(error)


async def feed(calls: Calls, window: ReorderWindow, start: Callable[[Any, int], Awaitable[None]]) -> bool:
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


async def enter(frame: Frame, full: Iterable[NodeActor], window: ReorderWindow) -> None:
    """Wait until a new item is in the inboxes that had no room for it."""
    try:
        for actor in full:
            await actor.queue(frame)
    except asyncio.CancelledError as error:
        if not window.closed:  # not by the engine, which cancels its items itself: nobody else would end this one
            cancelled = NodeCancelledError("the source of this stream was cancelled while this item waited to enter")
            cancelled.__cause__ = error
            frame.fail(cancelled)
        raise


def _fail(frame: Frame, actor: NodeActor, error: BaseException) -> None:
    ended = frame.state != "running"
    frame.fail(error, actor)  # one that has ended already only logs it
    if ended:
        frame.leave()
    else:
        actor.failed += 1


def checked_call(call: Any, index: int, *, trace_items: bool) -> Call[Any]:
    """Return what a source gave, if it is a call that may come from there.

    Args:
        call: what it gave.
        index: of the item.
        trace_items: the option of the stream.

    Raises:
        TypeError: it is no call.
        OptionsError: it goes on from headers, in a stream whose items are all in one trace.
    """
    if isinstance(call, Call):
        found: Call[Any] = call  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of it
        if found._trace_headers is not None and not trace_items:
            raise OptionsError(
                f"item {index} of a stream goes on from the trace of its headers (telemetry.continued), but all items "
                "of this stream are in its own trace: pass trace_items=True"
            )
        return found
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
