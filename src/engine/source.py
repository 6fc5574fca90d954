"""The source of a stream of calls, the code that takes calls from it, and the window of items in flight."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

from .._errors import NodeCancelledError, NotFinished, OptionsError, with_cause
from ..actors.frame import NOTHING, AnyDeployment, Frame, Listener
from ..actors.node_actor import Invoke, NodeActor
from ..actors.stream_buffer import StreamBuffer
from ..actors.worker import NoItem, Worker, WorkerGroup
from .graph import Call, Graph
from .nesting import listener_of
from .program import Wired

# A `ReorderWindow` holds the places of a stream of calls, or of a `map_each` over a stream, and the order in which
# items are taken out. An item counts in the window from before the source is asked for it until the reader takes it, in
# its turn. So a slow first item fills the window, and the source waits; the results of later items wait here, and no
# node waits with them.


class ReorderWindow(Listener):
    """The items in flight of a stream: it listens to their frames, and hands them to the reader when they have ended.

    Args:
        size: the most items that count at a time.
        ordered: whether the reader gets items in input order, or as they end.
        on_fatal: called with an error that ends the whole stream, such as KeyboardInterrupt.
        on_settled: called with a frame when its last handler has ended; may be None.

    Attributes:
        submitted: how many items were started; also the index of the next item.
        limit: the index of the first item for which there is no place yet.
        reserved: 1 while the source is being asked for an item, whose place is taken already; else 0.
        position: how many items the reader has taken; in input order, also the index of the next item to be taken.
        frames: the items that were started and not yet taken, by index.
        turns: whose turn it is at each node that takes items in order.
        on_room: called once when there is room again.
        on_settled: the same.
        service: the deployment that the stream belongs to.
        asking: whether the task of the source waits for room, or for the source.
        closed: whether the source is asked for no more items.
        failed: how many items ended without a result.
        cancelled: how many of these were cancelled by the end of the stream.
        expired: how many of these had no time left.
    """

    __slots__ = (
        "_completion_order", "_loop", "_on_fatal", "_reader", "_unwinding", "asking", "cancelled",
        "closed", "expired", "failed", "frames", "limit", "on_room", "on_settled", "position", "reserved",
        "service", "size", "submitted", "turns",
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
        self.on_settled = on_settled
        self._completion_order: deque[int] | None = None if ordered else deque()
        self._reader: asyncio.Future[None] | None = None
        self._unwinding: set[int] = set()  # items that were taken, but whose handlers still unwind: these count as well
        self.size = size
        self.submitted = 0
        self.limit = size
        self.reserved = 0
        self.position = 0
        self.asking = False
        self.closed = False
        self.service: AnyDeployment | None = None  # pyright: ignore[reportIncompatibleMethodOverride] - set later
        self.failed = 0
        self.cancelled = 0
        self.expired = 0
        self.frames: dict[int, Frame] = {}
        self.turns: dict[NodeActor, InputOrder] = {}
        self.on_room: Callable[[], None] | None = None

    @property
    def in_flight(self) -> int:
        """How many items count now: from before the source is asked for an item until the reader has taken it."""
        return self.submitted + self.reserved + self.size - self.limit

    def go_on_from(self, item: int) -> None:
        """Begin with this item: the items before it left before a restart."""
        self.submitted = self.position = item
        self.limit = item + self.size

    def new_frame(self, wired: Wired, arguments: tuple[Any, ...], group: WorkerGroup, parent: Frame | None) -> Frame:
        """Make the frame of the next item, for which a place was reserved."""
        frame = Frame(wired.program, arguments, group, self, self.submitted, parent)
        self.started(frame)
        return frame

    def started(self, frame: Frame) -> None:
        """Note the frame of the next item."""
        self.frames[self.submitted] = frame
        self.submitted += 1
        self.reserved = 0

    @property
    def running(self) -> int:
        """How many items have not ended yet."""
        # Iterate over a copy: metrics read this in another thread.
        return sum(frame.state == "running" for frame in list(self.frames.values()))

    @property
    def completed(self) -> int:
        """How many items ended with a result; computed only here, so that items need not count it."""
        return self.submitted - self.failed - self.running

    def peek(self) -> Frame | None:
        """Return the item whose turn it is, if it has ended, without taking it."""
        if self._completion_order is None:
            frame = self.frames.get(self.position)
            return None if frame is None or frame.state == "running" else frame
        return self.frames[self._completion_order[0]] if self._completion_order else None

    def take(self) -> Frame | None:
        """Take the item whose turn it is, if it has ended."""
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
        """Forget the items that were not taken; the stream is closed."""
        for frame in self.frames.values():
            frame.drop_unread()
            frame.tell_error()
        self.frames.clear()
        if self._completion_order is not None:
            self._completion_order.clear()

    @property
    def ordered(self) -> bool:
        """Whether the reader gets items in input order."""
        return self._completion_order is None

    @property
    def has_reader(self) -> bool:
        """Whether a reader waits for an item."""
        return self._reader is not None

    async def wait(self, inputs: Iterable[StreamBuffer[Any]] = ()) -> None:
        """Wait for `wake_reader`; then the caller has to look for changes.

        Args:
            inputs: streams; the wait also ends when one of them has another value, or has ended.
        """
        self._reader = self._loop.create_future()
        for values in inputs:
            values.waiter, values.reader_is_busy = self._reader, bool(self.frames)
        try:
            await self._reader
        finally:
            self._reader = None
            for values in inputs:
                values.waiter = None

    def wake_reader(self) -> None:
        """Wake the reader, if it waits."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def frame_done(self, frame: Frame) -> None:
        """Count an item that has ended, and wake the reader if it is the turn of this item."""
        if frame.state != "done":
            self.failed += 1
            self.expired += frame.has_expired
            self.cancelled += isinstance(frame.error, NotFinished)
            if frame.error is not None and not isinstance(frame.error, Exception):
                self._on_fatal(frame.error)
        has_turn = frame.item == self.position
        if frame.state == "cancelled":
            self.cancelled += not frame.has_expired  # only the end of the stream cancels its items
            has_turn = False
        elif self._completion_order is not None:
            self._completion_order.append(frame.item)
            has_turn = True
        if has_turn:
            self.wake_reader()
        if self.on_settled is not None and not frame.unwinding:
            self.on_settled(frame)
        if self.turns:
            advance(self.turns)

    def frame_settled(self, frame: Frame) -> None:
        """Report that the last handler of an item has ended; if the item was taken before, its place is free now."""
        if self.on_settled is not None:
            self.on_settled(frame)
        if frame.item in self._unwinding:
            self._unwinding.discard(frame.item)
            self.limit += 1
            self._make_room()
            self.wake_reader()  # the reader may wait for the last item to leave the window

    def _make_room(self) -> None:
        on_room, self.on_room = self.on_room, None
        if on_room is not None:
            on_room()


class InputOrder:
    """The turns of items at one node that takes items in their order.

    Args:
        frames: the items that have not ended, by their index; ended items may still be there.
    """

    def __init__(self, frames: dict[int, Frame]) -> None:
        self._frames = frames
        self._is_taken = False
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next = min(frames, default=0)  # the item whose turn it is, or an earlier item that has ended

    async def wait(self, item: int) -> None:
        """Wait for the turn of an item."""
        turn = self._waiting[item] = asyncio.get_running_loop().create_future()
        self.advance()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.over()
            else:
                del self._waiting[item]
                self.advance()
            raise

    def over(self) -> None:
        """Note that the item whose turn it was has left the node."""
        self._is_taken = False
        self._next += 1
        self.advance()

    def advance(self) -> None:
        """Give the turn to the next item that has not ended, if this item waits."""
        last = max(self._waiting, default=-1)
        while self._next <= last and not self._is_taken:
            frame = self._frames.get(self._next)
            if frame is None or frame.state != "running":
                self._next += 1
                continue
            turn = self._waiting.get(self._next)
            if turn is None or turn.done():
                return
            del self._waiting[self._next]
            self._is_taken = True
            turn.set_result(None)


def advance(turns: dict[NodeActor, InputOrder]) -> None:
    """Wake items that waited for the end of an earlier item."""
    for one in turns.values():
        one.advance()


def in_input_order(invoke: Invoke) -> Invoke:
    """Wrap an `Invoke` so that items enter the node one after the other, in the input order of their stream."""
    present = asyncio.Lock()  # several streams, each in its own order, may share the instance

    async def invoke_in_order(worker: Any, actor: NodeActor, frame: Frame) -> Any:
        window: Any = listener_of(frame)
        turns: dict[NodeActor, InputOrder] | None = getattr(window, "turns", None)
        if turns is None:  # a single call, which has no order
            async with present:
                return await invoke(worker, actor, frame)
        if actor not in turns:
            turns[actor] = InputOrder(window.frames)
        await turns[actor].wait(frame.item)
        try:
            async with present:
                return await invoke(worker, actor, frame)
        finally:
            turns[actor].over()

    return invoke_in_order


Calls: TypeAlias = Iterable[Call[Any]] | AsyncIterable[Call[Any]]
Prepare: TypeAlias = Callable[[Graph[..., Any]], Awaitable[Wired]]

# How many items are taken from a source that never waits before the event loop gets its turn.
_BURST = 64


class _Ended(Exception):
    """The source has no more calls. A StopIteration cannot travel through a future."""


class PulledSource:
    """A plain iterable as a source: workers themselves take calls from it, so that no item needs a hop.

    A worker does not wait here. If something has to be awaited, such as the start of a stateful node or a full inbox,
    the task of the source does that (`run`).
    """

    def __init__(
        self,
        calls: Iterable[Call[Any]],
        window: ReorderWindow,
        group: WorkerGroup,
        prepare: Callable[[Call[Any]], Awaitable[Wired]],
        tagged: Callable[[Any], None],
        parent: Frame | None,
        deadline: float | None,
    ) -> None:
        # Different workers step a generator, but always in this context, in which the generator may set variables.
        self._context = group.context.copy()
        self._iterator: Iterator[Any] = self._context.run(iter, calls)
        self._next_call: Callable[[], Any] = partial(self._context.run, next, self._iterator)
        self._window = window
        self._group = group
        self._prepare = prepare
        self._tagged = tagged
        self._parent = parent
        self._deadline = deadline
        # Items with spans or a deadline cannot run inside of `pull`: a worker has to handle these between steps.
        self._may_run = deadline is None and not group.traced and window.ordered
        self._wired: dict[Graph[..., Any], Wired] = {}
        # Of the last item: its graph, the actors, the one in which it began, and the only one if it may run here.
        self._graph: Graph[..., Any] | None = None
        self._actors: Wired | None = None
        self._entry: NodeActor | None = None
        self._chain: NodeActor | None = None
        self._asked_for: Call[Any] | None = None  # a call from the source that could not be started yet
        self._blocked: tuple[Frame, list[NodeActor]] | None = None  # an item, and the full inboxes that it has to enter
        self._stopped: asyncio.Future[None] = group.loop.create_future()

    def end(self) -> None:
        """Ask the iterable for no further call; a call that it has given already begins."""
        self._next_call = iter(()).__next__
        if self._asked_for is None and self._blocked is None:
            self._stop(_Ended())

    async def run(self) -> None:
        """Let the workers pull calls until there are no more calls.

        Raises:
            Exception: the error of the source, or of a stateful node that did not start.
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

    def pull(self, worker: Worker | None) -> tuple[NodeActor, Frame] | NoItem:
        """Take a call from the source, and return its item and the actor that runs it, with the place already taken.

        If the graph is one chain of plain functions, its items are run right here: they cannot wait, so there is
        nothing for a worker to carry on.

        Args:
            worker: the worker that asks; None if the caller is not a worker, so that no handler may run here.

        Returns:
            The actor and the item; or the reason why there is no item.
        """
        window, group = self._window, self._group
        while window.submitted < window.limit:
            call = self._asked_for
            if call is None:
                try:
                    call = self._next_call()
                except BaseException as error:  # noqa: BLE001 - the error ends the stream; the worker only asked for a call
                    self._stop(_Ended() if isinstance(error, StopIteration) else error)
                    return NoItem.ENDED
            else:
                self._asked_for = None
            if (call.__class__ is not Call or call.graph is not self._graph) and not self._knows_graph_of(call):
                self._asked_for = call
                self._stop(None)
                return NoItem.NEEDS_ACTORS
            wired, chain, entry = self._actors, self._chain, self._entry
            assert wired is not None
            # The first item goes the longer way, through a worker, which looks at each function of the chain.
            if chain is not None and chain.completed and chain.limiter.free > 0 and worker is not None:
                self._run_inline_batch(call, wired, chain, worker)
                return NoItem.AGAIN
            frame = window.new_frame(wired, call.arguments, group, self._parent)
            if self._deadline is not None:
                frame.deadline = self._deadline
            if entry is not None and entry.limiter.free > 0:
                entry.limiter.free -= 1
                return entry, frame
            full = group.start(frame, wired.entries)
            if full:
                self._blocked = frame, full
                self._stop(None)
                return NoItem.BLOCKED
            if group.ready:
                return group.ready.popleft()
            if window.submitted % _BURST == 0:
                return NoItem.AGAIN
        self._wait_for_room()
        return NoItem.NO_ROOM

    def _knows_graph_of(self, call: Any) -> bool:
        """Note the actors of a call of another graph than the last call. Return False if they are not known yet."""
        is_plain = call.__class__ is Call
        is_known = is_plain or getattr(call, "_trace_headers", ...) is None  # one with a tag alone
        wired = self._wired.get(call.graph) if is_known else None
        if wired is None:
            return False
        if not is_plain:
            self._tagged(call.tag)
        self._graph, self._actors = call.graph, wired
        self._entry = wired.entries[0] if len(wired.entries) == 1 else None  # the actor in which every frame begins
        self._chain = wired.chain if self._may_run else None
        return True

    def _goes_on_with(self, call: Any, graph: Graph[..., Any]) -> bool:
        """Return whether a call that is not a plain call of this graph is a call of it with a tag."""
        return getattr(call, "graph", None) is graph and self._knows_graph_of(call)

    def wanted(self) -> int:
        """Return how many workers would get an item now, if items begin in the same actor as the last item."""
        room = self._window.limit - self._window.submitted
        if room <= 0:
            self._wait_for_room()
            return 0
        free = 1 if self._entry is None else self._entry.limiter.free
        if free <= 0:
            # The items would only wait in an inbox, so they are put there now, without waking a worker.
            item = self.pull(None)
            if not isinstance(item, NoItem):
                self._group.enqueue(*item)
            return 0 if self._group.feed is None else 1
        return min(free, room)

    def _run_inline_batch(self, call: Call[Any], wired: Wired, chain: NodeActor, worker: Worker) -> None:
        """Run items of a chain, one after the other, as long as they are short and there is room for more items."""
        # Without this loop, a chain of nearly empty plain nodes takes 1.48 times as long. So
        # `ReorderWindow.new_frame` and `Frame.end_with` are written out as far as they apply, and the reader, which
        # cannot run meanwhile, is woken once.
        window, group, parent = self._window, self._group, self._parent
        graph, program, frames, run = call.graph, wired.program, window.frames, chain.run
        next_call = self._next_call
        index = window.submitted
        ends_at = min(index + _BURST, window.limit)
        worker.actor = chain
        try:
            while True:
                frame = frames[index] = Frame(program, call.arguments, group, window, index, parent)
                index += 1
                window.submitted = index
                worker.frame = frame
                try:
                    value = run(frame.values, worker)
                except BaseException as error:  # noqa: BLE001 - an exception of a handler is the outcome of its item
                    worker.frame = None
                    _fail(frame, chain, error)
                else:
                    worker.frame = None
                    # the handler itself ended its item, for instance by closing the stream
                    if frame.state != "running":
                        frame.leave()
                        return
                    chain.completed += 1
                    frame.result = value
                    frame.state = "done"
                    frame.values = NOTHING
                if index >= ends_at or worker.budget <= 0:
                    return
                try:
                    call = next_call()
                except BaseException as error:  # noqa: BLE001 - the error ends the stream, as in `pull`
                    self._stop(_Ended() if isinstance(error, StopIteration) else error)
                    return
                if (call.__class__ is not Call or call.graph is not graph) and not self._goes_on_with(call, graph):
                    self._asked_for = call
                    return
        finally:
            window.wake_reader()

    async def _prepare_graph(self, call: Any) -> None:
        """Make the actors of a graph that comes for the first time; `pull` then starts the call."""
        self._window.reserved = 1
        try:
            self._wired[call.graph] = await self._prepare(checked_call(call, self._window.submitted, trace_items=False))
        finally:
            self._window.reserved = 0

    def _wait_for_room(self) -> None:
        if self._window.closed:
            self._stop(_Ended())
            return
        self._group.feed = None
        self._window.on_room = self._go_on

    def _go_on(self) -> None:
        self._group.feed = self
        if not self._group.armed:
            self._group.schedule_check()

    def _stop(self, error: BaseException | None) -> None:
        """Stop the workers from pulling, and wake the task of the source; an error ends the task."""
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
        window: the window; a place is reserved in it before the source is asked for a call.
        start: starts one call, given its index.

    Returns:
        Whether the source has no more calls; False if the window was closed before.

    Raises:
        Exception: the error of the source, or of `start`.
    """
    source = calls.__aiter__() if isinstance(calls, AsyncIterable) else _stepwise(iter(calls))
    try:
        while True:
            window.asking = not window.closed
            if window.asking and window.submitted >= window.limit:
                room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                window.on_room = lambda room=room: None if room.done() else room.set_result(None)
                await room
            if window.closed:  # checked as well, because a source may swallow the cancellation that tells it to stop
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
            del call  # else the arguments of the last item would stay alive while this waits for the source
            if window.submitted % _BURST == 0:
                await asyncio.sleep(0)
    finally:
        window.on_room = None
        aclose = getattr(source, "aclose", None)
        if aclose is not None:
            await aclose()


async def enter(frame: Frame, full: Iterable[NodeActor], window: ReorderWindow) -> None:
    """Wait until a new item is in the inboxes that had no room."""
    try:
        for actor in full:
            await actor.queue(frame)
    except asyncio.CancelledError as error:
        if not window.closed:  # not cancelled by the engine, which would also cancel this item
            told = "the source of this stream was cancelled while this item waited to enter"
            frame.fail(with_cause(NodeCancelledError(told), error))
        raise


def _fail(frame: Frame, actor: NodeActor, error: BaseException) -> None:
    ended = frame.state != "running"
    frame.fail(error, actor)  # a frame that has ended already only logs the error
    if ended:
        frame.leave()
    else:
        actor.failed += 1


def checked_call(call: Any, index: int, *, trace_items: bool) -> Call[Any]:
    """Check an object that a source has given, and return it as a call.

    Args:
        call: the object.
        index: the index of the item.
        trace_items: the option of the stream.

    Raises:
        TypeError: the object is not a call.
        OptionsError: the call continues the trace of its headers, in a stream whose items are all in one trace.
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
    """Close the iterator if it is a generator, so that its `finally` blocks run now."""
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
