"""Window: the places of a stream, and the order in which its items are taken out.

The reorder window is enforced at admission: an item counts from before it is asked for until it is taken out in its
turn. So a slow first item fills the window and no node ever waits for it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ..actors.crew import Crew
from ..actors.frame import AnyDeployment, Frame
from .wiring import Wired


class Window:
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
        on_fatal: Callable[[BaseException | None], None],
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

    def new_frame(self, wired: Wired, arguments: tuple[Any, ...], crew: Crew, parent: Frame | None) -> Frame:
        """Start the next item, for which a place was reserved."""
        index = self.submitted
        self.submitted = index + 1
        self.reserved = 0
        frame = self.frames[index] = Frame(wired.program, arguments, crew, self, index, parent)
        return frame

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

    async def wait(self) -> None:
        """Wait until something has happened that the reader may want to see."""
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

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
