"""Device queue: the calls that wait for a device on one event loop, and what is handed to it next."""

import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .._errors import EngineClosedError, Overloaded
from ..actors.batching import Batch
from ..actors.cancellation import Condition, postpone, raise_postponed, until
from .failed_batches import Gathering
from .untyped_jax import jax

if TYPE_CHECKING:
    from ..actors.frame import Frame
    from ..actors.sampler import ExecutionSampler
    from ..telemetry.spans import DeviceWait
    from .compiling import Program


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
        sampler: times the node that it is for, while a profile is taken.
        frame: that of its item; None for what is no node.
        returned: whether the device has nothing to do with it any more.
    """

    __slots__ = (
        "_on_returned",
        "_turn",
        "args",
        "arrived_at",
        "deadline",
        "frame",
        "group",
        "hands_on",
        "label",
        "lane",
        "priority",
        "program",
        "result",
        "returned",
        "sampler",
        "size_bytes",
        "started",
        "wait",
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
        self.sampler: ExecutionSampler | None = None
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


# Jobs of all nodes that the device's thread holds ahead.
DEFAULT_WINDOW = 32

# Of arguments that the device's thread holds ahead, of all nodes. A batch that takes long to transfer is as large as
# this, or smaller: 256 MB are 20 ms and more over PCIe, and a small part of the memory of a device.
DEFAULT_WINDOW_BYTES = 256 * 1024 * 1024


class Start(Protocol):
    """Has the device run some calls together."""

    def __call__(self, calls: list[DeviceCall], /) -> None:
        """Begin; `DeviceQueue.returned` is called in the end."""
        ...


class Lane:
    """The calls of one node that wait for a device.

    Args:
        name: name of the node, for errors.
        queue: of the device.
        start: has the device run some of them together.
        batch: how many those are; None for one by one.
        limit: the most jobs of this node that the device holds.
    """

    def __init__(self, name: str, queue: "DeviceQueue", start: Start, batch: Batch | None, limit: int) -> None:
        self.name = name
        self.queue = queue
        self.start = start
        self.waiting: Gathering[DeviceCall] = Gathering(batch or _ONE_BY_ONE)
        self.gathers = batch is not None
        self.free = limit
        self.largest: dict[Hashable, int] = {}  # of these groups, more calls together did not fit the device
        self.served = 0.0
        self.replicas: tuple[Lane, ...] = (self,)

    @property
    def has_room(self) -> bool:
        """Whether the device would take more of it."""
        return self.free > 0 and self.queue.has_room

    @property
    def is_next(self) -> bool:
        """Whether no other device that has a copy of the node, and room, is less busy."""
        if len(self.replicas) == 1:
            return True
        return all(self.queue.running <= one.queue.running for one in self.replicas if one.has_room)


def share(lanes: Sequence[Lane]) -> None:
    """Have several devices take the calls of one node, each when it is the next free one."""
    for lane in lanes:
        lane.waiting = lanes[0].waiting
        lane.replicas = tuple(lanes)


_ONE_BY_ONE = Batch(1)


class DeviceQueue:
    """What waits for one device or mesh on one event loop.

    Nodes take turns by item: the one that had the fewest is next. A batch is made when the device has room for it,
    so requests gather while it is busy, and nobody waits for others beyond `max_wait_seconds`.

    Args:
        name: of the device.
        loop: the event loop.
        window: the most jobs that the device holds.
        window_bytes: of their arguments; once the device holds as much, it gets no more until one has ended.

    Attributes:
        running: jobs that it holds.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        window: int = DEFAULT_WINDOW,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
    ) -> None:
        self._name = name
        self._loop = loop
        self._window = window
        self._window_bytes = window_bytes
        self._busy: dict[Lane, None] = {}  # those with calls that wait
        self._served = 0.0  # what the lane had had that was served last
        self.running = 0
        self._held_bytes = 0
        self._look_armed = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._idle = Condition()

    async def run(self, lane: Lane, call: DeviceCall) -> Any:
        """Run a call; returns its result. What it raises is what `submit` raises, or the call has failed with."""
        result: asyncio.Future[Any] = self._loop.create_future()
        call.result = result
        self.submit(lane, call)
        try:
            return await result
        finally:
            call.withdraw()
            call.result = None
            del result  # it refers to an error, and that to this frame

    async def run_to_end(self, lane: Lane, call: DeviceCall) -> Any:
        """Run a call whose result must not be lost, because it takes the place of what the call destroys.

        A cancellation takes it back if the device has not begun with it. Otherwise the caller gets the result, or the
        error, and the cancellation where it waits next.
        """
        raise_postponed()
        task = asyncio.current_task()
        assert task is not None
        undisturbed = task.cancelling()
        call.may_be_taken_back()
        result: asyncio.Future[Any] = self._loop.create_future()
        call.result = result
        self.submit(lane, call)
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError as error:
            if not result.done() and call.take_back():
                call.withdraw()
                raise
            args = error.args
            try:
                await until(result.done, partial(asyncio.wait, [result]))
            except asyncio.CancelledError as another:
                args = another.args
            postpone(args, undisturbed)
        call.result = None
        try:
            return result.result()
        finally:
            del result  # it refers to an error, and that to this frame

    def submit(self, lane: Lane, call: DeviceCall) -> None:
        """Have a call run; its result comes through its future.

        Raises:
            EngineClosedError: the Engine was closed.
            Overloaded: too many calls wait.
        """
        if self._closed:
            raise EngineClosedError(f"device {self._name} takes no more calls: its Engine was closed")
        call.lane = lane
        if not lane.gathers and not self._busy and lane.free and self.has_room and len(lane.replicas) == 1:
            self._begin(lane, [call])  # nobody waits, so it need not either
            return
        if lane.waiting.is_full:
            self._drop_unwanted(lane)
            if lane.waiting.is_full:
                raise Overloaded(
                    f"node {lane.name!r} refuses an item: {lane.waiting.count} wait already, as many as one batch and "
                    "max_queue= of its Batch"
                )
        lane.waiting.add(call)
        if len(lane.replicas) == 1:
            self._offer(lane)
        else:
            for one in sorted(lane.replicas, key=lambda one: one.queue.running):
                one.queue._offer(one)

    def take_out(self, lane: Lane, call: DeviceCall) -> None:
        """Have a call wait no longer."""
        lane.waiting.discard(call)
        _forget_if_empty(lane)

    def returned(self, lane: Lane, calls: list[DeviceCall]) -> None:
        """The device is done with the job of these calls."""
        self.running -= 1
        lane.free += 1
        for call in calls:
            self._held_bytes -= call.size_bytes
        if self._busy:
            self._look()
        if not self.running:
            self._idle.notify_all()

    async def close(self) -> None:
        """Refuse more calls, drop those that wait, and wait for those that run."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for lane in list(self._busy):
            for call in lane.waiting.all():
                lane.waiting.discard(call)
                call.fail(EngineClosedError("the Engine was closed while this call waited for a device"))
        self._busy.clear()
        await self._idle.wait_for(lambda: not self.running)

    @property
    def has_room(self) -> bool:
        """Whether it takes more jobs."""
        return self.running < self._window and self._held_bytes < self._window_bytes and not self._closed

    def _offer(self, lane: Lane) -> None:
        """Take from a lane, as soon as it is its turn."""
        if lane not in self._busy:
            # One that was idle does not catch up on what others had meanwhile, nor a new one on what they ever had.
            lane.served = max(lane.served, self._served)
            self._busy[lane] = None
        if lane.gathers:
            self._look_soon()  # after what else comes in this turn of the loop
        elif lane.has_room:
            self._look()

    def _look_soon(self) -> None:
        if not self._look_armed:
            self._look_armed = True
            self._loop.call_soon(self._look)

    def _look(self, due: float = 0.0) -> None:
        """Hand jobs to the device, as long as it takes more."""
        self._look_armed = False
        if self._closed:
            return
        now = max(self._loop.time(), due)  # a timer may run a clock's tick too early
        before = self.running
        while self.has_room and (found := self._next(now)) is not None:
            self._begin(*found)
        if self.running != before:
            self._tell_replicas()
        self._arm_timer(now)

    def _begin(self, lane: Lane, calls: list[DeviceCall]) -> None:
        lane.free -= 1
        self._served = max(lane.served, self._served)
        lane.served += len(calls)
        self.running += 1
        for call in calls:
            call.started = True
            self._held_bytes += call.size_bytes
        lane.start(calls)

    def _tell_replicas(self) -> None:
        """Have other devices look, which may be the next free ones now."""
        for lane in self._busy:
            for one in lane.replicas:
                if one is not lane and one.has_room:
                    one.queue._look_soon()

    def _next(self, now: float) -> tuple[Lane, list[DeviceCall]] | None:
        for lane in sorted(self._busy, key=lambda lane: lane.served) if len(self._busy) > 1 else tuple(self._busy):
            while lane.free and lane.is_next and (taken := lane.waiting.take(now, lane.largest)):
                _forget_if_empty(lane)
                wanted = [call for call in taken if self._is_wanted(call, now)]
                if wanted:
                    return lane, wanted
        return None

    def _is_wanted(self, call: DeviceCall, now: float) -> bool:
        if call.is_wanted(now):
            return True
        call.expire()  # it costs the device nothing
        return False

    def _drop_unwanted(self, lane: Lane) -> None:
        now = self._loop.time()
        for call in lane.waiting.all():
            if not call.is_wanted(now):
                self.take_out(lane, call)
                call.expire()

    def _arm_timer(self, now: float) -> None:
        """Look again when the next batch is due, if only time keeps it from running."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.has_room:
            return
        due_at: float | None = None
        for lane in self._busy:
            if not lane.gathers or not lane.free or (due := lane.waiting.due_at()) is None:
                continue
            if due > now and (due_at is None or due < due_at):  # what is due already waits for something else
                due_at = due
        if due_at is not None:
            self._timer = self._loop.call_at(due_at, self._look, due_at)


def _forget_if_empty(lane: Lane) -> None:
    if not lane.waiting.count:
        for one in lane.replicas:
            one.queue._busy.pop(one, None)


def owned(value: Any) -> Any:
    """Return a pytree whose arrays of NumPy nobody else writes to: on a CPU, they would be used in place."""
    return jax.tree.map(_copy, value)


def _copy(leaf: Any) -> Any:
    return np.array(leaf) if issubclass(type(leaf), np.ndarray) else leaf
