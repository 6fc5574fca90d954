"""In flight: the calls of one deployment that have not ended, and how many have ended in which way."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from .._errors import DeadlineExceeded, Overloaded, PenstockError
from ..actors.condition import Condition
from ..actors.frame import Frame
from .admission import Admission

if TYPE_CHECKING:
    from .pipeline import Pipeline


class InFlight:
    """What is in flight in one deployment, and what has ended there.

    Args:
        admission: its places.
        changed: notified when something has ended that its end waits for.

    Attributes:
        admission: the same.
        live: the calls in flight, but not the items of streams of calls.
        items: calls that were admitted; the number of the next one.
        counts: calls and items that have ended, by how.
    """

    __slots__ = ("_changed", "_preparing", "_refusal", "_streams", "admission", "counts", "items", "live")

    def __init__(self, admission: Admission, changed: Condition) -> None:
        self.admission = admission
        self.live: set[Frame] = set()
        self.items = 0
        self.counts = {"done": 0, "failed": 0, "cancelled": 0, "expired": 0, "running": 0}
        self._streams: set[Pipeline] = set()
        self._preparing: set[asyncio.Timeout] = set()  # calls that wait for something else than a place
        self._refusal: Callable[[], PenstockError] | None = None
        self._changed = changed

    @property
    def is_busy(self) -> bool:
        """Whether accepted calls have not ended; those of a stream may end unread."""
        waiting = self._preparing or self.admission.statistics().queued
        return bool(self.live or waiting or any(stream.window.running for stream in self._streams))

    async def reserve(self, graph: str, priority: int, deadline: float | None) -> None:
        """Take a place for a call, waiting for one if need be; a call that gets none is counted.

        Raises:
            Overloaded: as many calls wait as may.
            DeadlineExceeded: it got no place in time.
        """
        timer = asyncio.timeout_at(deadline)
        too_late = f"the call of graph {graph!r} got no place before its deadline"
        # What is refused is counted as that.
        await self._wait(self.admission.reserve(priority, graph), timer, too_late, counted=(Overloaded,))

    async def prepare(self, preparing: Awaitable[None], graph: str, deadline: float | None) -> None:
        """Wait for what a call needs; a call that does not get it is counted.

        Raises:
            DeadlineExceeded: it took too long.
            PenstockError: the deployment has ended.
        """
        timer = asyncio.timeout_at(deadline)
        too_late = f"the resources of graph {graph!r} were not opened again before the deadline of a call"
        self._preparing.add(timer)
        try:
            await self._wait(preparing, timer, too_late)
        finally:
            self._preparing.discard(timer)
            self._changed.notify_all()

    async def _wait(
        self, needed: Awaitable[None], timer: asyncio.Timeout, too_late: str, counted: tuple[type[Exception], ...] = ()
    ) -> None:
        """Wait for what a call needs; a call that does not get it is counted, unless the error is `counted` already."""
        try:
            async with timer:
                await needed
        except counted:
            raise
        except BaseException as error:
            reason = self._not_begun(error, timer, too_late)
            if reason is error:
                raise
            raise reason from error

    def _not_begun(self, error: BaseException, timer: asyncio.Timeout, too_late: str) -> BaseException:
        """Count a call that does not begin; returns what to raise."""
        if isinstance(error, asyncio.CancelledError):
            self.counts["cancelled"] += 1
            return error
        is_over = isinstance(error, TimeoutError) and timer.expired()
        if is_over and self._refusal is None:
            self.counts["expired"] += 1
            return DeadlineExceeded(too_late)
        self.counts["failed"] += 1
        return self._refusal() if is_over and self._refusal is not None else error

    def turn_away(self) -> None:
        """A call got its place, and cannot be served any more."""
        self.admission.release()
        self.counts["failed"] += 1

    def settled(self, frame: Frame) -> None:
        """Nothing runs for a call any more: its place is free."""
        self.live.discard(frame)
        self._count(frame)
        self.admission.release()
        if not self.live:
            self._changed.notify_all()

    def stream_opened(self, stream: "Pipeline") -> None:
        """A stream of calls has begun; its items are counted here."""
        self._streams.add(stream)
        stream.on_closed = self._stream_closed
        stream.on_item_settled = self._item_settled

    def finish_streams(self) -> None:
        """Ask the sources of streams for no more."""
        for stream in self._streams:
            stream.finish()

    async def end(self, make_error: Callable[[], PenstockError], refusal: Callable[[], PenstockError]) -> None:
        """End everything, each with an error of its own; waits for the streams.

        Args:
            make_error: makes the error of a call that is interrupted.
            refusal: makes that of a call that waits for something else than a place: places become free now.
        """
        self._refusal = refusal
        for timer in self._preparing:
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time())
        for frame in list(self.live):
            if frame.state == "running":  # others have ended, and are unwinding
                frame.fail(make_error())
        for stream in list(self._streams):
            stream.abort(make_error())
            await stream.aclose()

    def _count(self, frame: Frame) -> None:
        self.counts["expired" if frame.has_expired else frame.state] += 1

    def _item_settled(self, frame: Frame) -> None:
        self._count(frame)
        self._changed.notify_all()

    def _stream_closed(self, stream: "Pipeline") -> None:
        self._streams.discard(stream)
        self._changed.notify_all()
