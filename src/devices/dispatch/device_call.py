"""Device call: one call of a function on a device, from the moment at which it waits to its result."""

import asyncio
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ...actors.frame import Frame
    from ...actors.recorder import Recorder
    from ...telemetry.spans import DeviceWait
    from ..programs.compiling import Program
    from .device_queue import Lane


class Result(Protocol):
    """What waits for the result of a call: a future, or what stands for one."""

    def done(self) -> bool:
        """Whether it has the result, or wants it no more."""
        ...

    def cancelled(self) -> bool:
        """Whether it wants the result no more; on any thread."""
        ...

    def cancel(self) -> bool:
        """There will be no result; returns whether it was waited for."""
        ...

    def set_result(self, value: Any, /) -> None:
        """Here it is."""
        ...

    def set_exception(self, error: BaseException, /) -> None:
        """The call has failed."""
        ...


class DeviceCall:
    """One call that waits, runs, and gives its caller a result.

    A call that runs cannot be stopped: its caller is released at once, and whoever closes the scope waits for it.

    Attributes:
        program: what it runs.
        args: the arguments, one for each parameter.
        result: what the caller waits for; None before, and once it has it, or has left: an error refers to all that
            was called on its way, and would never be freed if one of those referred to it.
        hands_on: the caller gets the result before it is ready, to give it to another call.
        priority: higher first.
        deadline: when nobody will wait for it any more, in the loop's time.
        group: calls of one group may run together.
        label: of the node in its graph; None for what is no node.
        size_bytes: of the arguments that may have to be transferred.
        wait: the sampled span that waits for it; None without one.
        arrived_at: when it began to wait, in the loop's time.
        lane: where it waits, or has waited; None before.
        started: whether it was handed to the device's thread.
        recorder: times the node that it is for, while a profile is taken.
        frame: that of its item; None for what is no node.
        returned: whether the device has nothing to do with it any more.
    """

    __slots__ = (
        "_on_returned", "_turn", "args", "arrived_at", "deadline", "frame", "group", "hands_on", "label", "lane",
        "priority", "program", "recorder", "result", "returned", "size_bytes", "started", "wait",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        program: "Program",
        args: tuple[Any, ...],
        *,
        hands_on: bool = False,
        priority: int = 0,
        deadline: float | None = None,
        group: Hashable = None,
        label: str | None = None,
        size_bytes: int = 0,
    ) -> None:
        self.program = program
        self.args: tuple[Any, ...] = args
        self.result: Result | None = None
        self.hands_on = hands_on
        self.priority = priority
        self.deadline = deadline
        self.group = group
        self.label = label
        self.size_bytes = size_bytes
        self.wait: DeviceWait | None = None
        self.arrived_at = loop.time()
        self.lane: Lane | None = None
        self.started = False
        self.returned = False
        self.recorder: Recorder | None = None
        self.frame: Frame | None = None
        self._on_returned: tuple[Callable[[], None], ...] = ()
        self._turn: threading.Lock | None = None

    def may_be_taken_back(self) -> None:
        """Prepare for `take_back`, before it is submitted."""
        self._turn = threading.Lock()  # taken once and never given back, by the device or by who takes the call back

    def begin(self) -> bool:
        """The device enqueues it now; returns False if it was taken back. On the device's thread."""
        return self._turn is None or self._turn.acquire(blocking=False)

    def take_back(self) -> bool:
        """Keep it from running, unless the device has begun with it; returns whether it was kept from it."""
        assert self._turn is not None
        return self._turn.acquire(blocking=False) and self._cancel()

    @property
    def is_left(self) -> bool:
        """Whether the caller has left. On any thread."""
        result = self.result
        return result is None or result.cancelled()

    def is_wanted(self, now: float) -> bool:
        """Whether somebody waits for the result, and will when it comes."""
        if self.result is None or self.result.done():
            return False
        return self.deadline is None or now < self.deadline

    def hand_on(self, value: Any) -> None:
        """Give the caller a result that is not ready yet, unless it has left."""
        if self.result is not None and not self.result.done():
            self.result.set_result(value)

    def finish(self, value: Any) -> None:
        """Give the caller the result, unless it has it or has left; the device is done with it."""
        self._return()
        self.hand_on(value)

    def fail(self, error: BaseException) -> None:
        """Raise an error in the caller, unless it has left; the device is done with it."""
        self._return()
        if self.result is not None and not self.result.done():
            if isinstance(error, StopIteration):  # a future refuses it
                substitute = RuntimeError("a device call raised StopIteration, which cannot travel through a future")
                substitute.__cause__ = error
                error = substitute
            self.result.set_exception(error)

    def withdraw(self) -> None:
        """Nobody waits for it any more: free its place at once, unless it runs."""
        if self.lane is not None and not self.started and not self.returned:
            self.lane.queue.take_out(self.lane, self)
            self.drop()

    def drop(self) -> None:
        """Forget it: it will not run."""
        self._cancel()
        self._return()

    def expire(self) -> None:
        """Forget it: it will not run. Its caller is released by its own deadline, which says more."""
        self._return()

    def abandon(self) -> bool:
        """Nobody waits for it any more; returns whether the device is still busy with it."""
        self._cancel()
        return self.started and not self.returned

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the device is done with it."""
        self._on_returned += (callback,)

    def _cancel(self) -> bool:
        return self.result is not None and self.result.cancel()

    def _return(self) -> None:
        self.returned = True
        self.args = ()
        if self._on_returned:
            callbacks, self._on_returned = self._on_returned, ()
            for callback in callbacks:
                callback()
