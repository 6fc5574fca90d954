"""One device or mesh as one Engine uses it: its waiting calls, the order in which it runs them, and their batches."""

import asyncio
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from .._errors import DeviceError, EngineClosedError, Overloaded, with_cause
from ..actors.batching import SHORT_SECONDS, Batch, BatchQueue
from ..actors.execution import STEP_SLOTS, DetachedStep
from ..actors.tasks import Condition, ResumingFuture, postpone, raise_postponed, until
from ..actors.threads import LoopMailbox
from ..telemetry import spans
from .arguments import Arguments, BatchLog
from .batch_items import BatchItem
from .compiling import CACHE, JittedFunction
from .device_errors import is_out_of_memory
from .dispatch import THREADS, BatchJob, Job, SingleJob
from .parameters import PlacedParameters, SameParameters, with_same
from .programs import Executable
from .shardings import Placement
from .untyped_jax import jax

if TYPE_CHECKING:
    from ..actors.frame import Frame
    from ..actors.sampler import ExecutionSampler
    from ..telemetry.spans import DeviceWait


@dataclass(slots=True, eq=False, repr=False)
class DeviceCall:
    """One call that waits, runs, and gives its caller a result.

    A call that runs cannot be stopped: its caller is released at once, and the end of the scope waits for the call.

    Attributes:
        jitted: the function that the call runs.
        args: the arguments, one for each parameter. In a batch, a `BatchItem`, unless `Arguments.alike` found the
            arguments to be like those of the call before.
        result: the future that the caller waits for. None before the call is submitted, and once the caller has the
            result or has left: an error refers to this call by its traceback, so call and future would keep each other
            alive.
        leaves: the leaves of the arguments; empty if they are not known.
        returns_pending: the caller gets the result before it is ready, to give it to another call.
        priority: higher first.
        deadline: when the caller stops waiting, in the loop's time.
        group: calls of one group may run in one batch.
        label: label of the node in its graph; None if the call does not come from a node.
        size_bytes: size of the arguments that may have to be transferred.
        wait: the sampled span that waits for the call; None if there is none.
        arrived_at: when the call began to wait, in the loop's time.
        queue: the queue in which the call waits or has waited; None before.
        started: whether the call was handed to the device's thread.
        sampler: measures the node of the call, while a profile is taken.
        frame: the frame of the call's item; None if the call does not come from a node.
        returned: whether the device is done with the call. A call whose result is handed on before the result is ready
            is done once the call is enqueued.
    """

    # Ownership: the event loop owns a call, and alone writes `result`, `started` and `returned`. The threads of the
    # device read the arguments of the constructor until they post the end of the call, and ask `is_left` at any time.
    # `_turn` is taken once: by the dispatch thread, to begin, or by the loop, to take the call back. The dispatch
    # thread writes `_has_begun`, and the loop reads it when the call has come back.

    jitted: JittedFunction
    args: tuple[Any, ...]
    size_bytes: int = 0
    priority: int = 0
    deadline: float | None = None
    label: str | None = None
    sampler: "ExecutionSampler | None" = None
    frame: "Frame | None" = None
    group: Hashable = field(default=None, init=False)
    arrived_at: float = field(default=0.0, init=False)
    result: asyncio.Future[Any] | None = field(default=None, init=False)
    leaves: Sequence[Any] = field(default=(), init=False)
    returns_pending: bool = field(default=False, init=False)
    wait: "DeviceWait | None" = field(default=None, init=False)
    queue: "CallQueue | None" = field(default=None, init=False)
    started: bool = field(default=False, init=False)
    returned: bool = field(default=False, init=False)
    _has_begun: bool = field(default=False, init=False)
    _on_returned: tuple[Callable[[], None], ...] = field(default=(), init=False)
    _turn: "threading.Lock | None" = field(default=None, init=False)

    def begin(self) -> bool:
        """Note that the device enqueues the call; return False if the call was taken back. On the device's thread."""
        if self._turn is None:
            return True
        self._has_begun = self._turn.acquire(blocking=False)
        return self._has_begun

    def take_back(self) -> bool:
        """Keep the call from running and return True; return False if the device has begun to run the call."""
        assert self._turn is not None
        return self._turn.acquire(blocking=False)

    def waited_for_again(self) -> "asyncio.Future[Any]":
        """Return another future of a result that must not be lost, after the first one was cancelled."""
        result = self.result
        assert result is not None
        if result.cancelled():
            result = self.result = result.get_loop().create_future()
        return result

    @property
    def cost(self) -> float:
        """The cost of the call's arguments, which are a `BatchItem`."""
        return cast("BatchItem", self.args).cost

    @property
    def is_left(self) -> bool:
        """Whether the caller has left. On any thread."""
        result = self.result
        return result is None or result.cancelled()

    def is_wanted(self, now: float) -> bool:
        """Whether the caller waits for the result, and its deadline has not passed."""
        result = self.result
        return result is not None and not result.done() and (self.deadline is None or now < self.deadline)

    def hand_on(self, value: Any) -> None:
        """Give the caller a result that is not ready yet, unless the caller has left."""
        result = self.result
        if result is None:
            return
        if not result.done():
            result.set_result(value)
        elif self._has_begun and result.cancelled():  # its caller was cancelled, and has not run since
            self.waited_for_again().set_result(value)

    def finish(self, value: Any) -> None:
        """Note that the device is done with the call, and give the caller the result unless it has it or has left."""
        self.end()
        self.hand_on(value)

    def fail(self, error: BaseException) -> None:
        """Note that the device is done with the call, and raise an error in the caller, unless the caller has left."""
        self.end()
        if isinstance(error, StopIteration):  # a future refuses a StopIteration
            substitute = RuntimeError("a device call raised StopIteration, which cannot travel through a future")
            error = with_cause(substitute, error)
        self._raise(error)

    def withdraw(self) -> None:
        """Note that the caller has left, and free the call's place in the queue at once, unless the call runs."""
        if self.queue is not None and not self.started and not self.returned:
            self.queue.discard(self)
            self.drop()

    def drop(self) -> None:
        """Forget a call that will not run, and cancel its result."""
        self._cancel()
        self.end()

    def abandon(self) -> bool:
        """Note that the caller has left; return whether the device is still busy with the call."""
        self._cancel()
        return self.started and not self.returned

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the device is done with this call."""
        self._on_returned += (callback,)

    def _raise(self, error: BaseException) -> None:
        if self._has_begun and self.result is not None and self.result.cancelled():
            self.waited_for_again()
        if self.result is not None and not self.result.done():
            self.result.set_exception(error)

    def _cancel(self) -> bool:
        return self.result is not None and self.result.cancel()

    def end(self) -> None:
        """Note that the device is done with the call, and forget the arguments."""
        self.returned = True
        self.args = self.leaves = ()
        if self._on_returned:
            callbacks, self._on_returned = self._on_returned, ()
            for callback in callbacks:
                callback()


class DetachedDeviceCall(DeviceCall, DetachedStep):
    """A call that no worker waits for: the first step of a graph's call, which continues that call when it ends."""

    __slots__ = STEP_SLOTS

    @property
    def is_left(self) -> bool:
        """Whether the caller has left. On any thread."""
        return self._is_left

    def is_wanted(self, now: float) -> bool:
        """Whether the caller waits for the result, and its deadline has not passed."""
        return not self._is_over and (self.deadline is None or now < self.deadline)

    # Continues the graph's call with a result, ready or not, unless the caller has left.
    hand_on = DetachedStep.set_result  # pyright: ignore[reportAssignmentType] - a call of this class is such a step
    _raise = DetachedStep.set_exception  # pyright: ignore[reportAssignmentType]
    _cancel = DetachedStep.cancel  # pyright: ignore[reportAssignmentType]


class CallQueue:
    """The calls of one node that wait for a device.

    Args:
        name: name of the node, for errors.
        device: the device that the calls wait for.
        batch: how many calls run together; None if the calls run one by one.
        limit: the most jobs of this node that the device holds.
        fewest_rows: number of rows of the smallest program, for packed rows; 1 otherwise.

    Attributes:
        largest: the most calls together, by group, for groups of which more calls did not fit the device.
    """

    def __init__(
        self, name: str, device: "EngineDevice", batch: Batch | None, limit: int, fewest_rows: int = 1
    ) -> None:
        self.name = name
        self.device = device
        self.waiting: BatchQueue[DeviceCall] = BatchQueue(batch or _ONE_BY_ONE, fewest_rows)
        self.gathers = batch is not None
        self._may_refuse = batch is not None and batch.max_queue is not None
        self.free = limit
        self.arrived: dict[DeviceCall, None] = {}  # calls that came since the device last looked at this queue
        self.served = 0.0
        self.replicas: tuple[CallQueue, ...] = (self,)
        self.largest: dict[Hashable, int] = {}

    def start(self, calls: list[DeviceCall]) -> None:
        """Have the device run some calls together; at the end, `EngineDevice.returned` is called."""
        raise NotImplementedError

    def admit(self, now: float) -> None:
        """Put the calls that have just arrived among those that wait for a batch."""

    def fill(self, now: float) -> None:
        """Add waiting calls to a batch that the device's thread has not begun, even if it is another queue's turn."""

    @property
    def has_room(self) -> bool:
        """Whether the device would take another job of this node."""
        return self.free > 0 and self.device.has_room

    @property
    def is_next(self) -> bool:
        """Whether this device is the least busy among the devices that have a copy of the node and room for a job."""
        if len(self.replicas) == 1:
            return True
        return all(self.device.running <= one.device.running for one in self.replicas if one.has_room)

    async def run(self, call: DeviceCall) -> Any:
        """Run a call and return its result; raises what `submit` raises, or the error of the call."""
        result: asyncio.Future[Any] = ResumingFuture(loop=self.device.loop)
        call.result = result
        self.submit(call)
        try:
            return await result
        finally:
            if not call.returned:
                call.withdraw()
            call.result = None
            del result  # break the cycle of future, error, traceback and frame

    async def run_to_end(self, call: DeviceCall) -> Any:
        """Run a call whose result must not be lost, because the call destroys its arguments.

        A cancellation takes the call back if the device has not begun to run it. Otherwise the caller gets the result
        or the error, and the cancellation is raised where the caller waits next.
        """
        loop = self.device.loop
        task = asyncio.current_task(loop)
        assert task is not None
        undisturbed = task.cancelling()
        if undisturbed:
            raise_postponed()
        call._turn = threading.Lock()  # taken once and never given back: by the device, or by `take_back`
        result: asyncio.Future[Any] = ResumingFuture(loop=loop)
        call.result = result
        self.submit(call)
        try:
            return await result
        except asyncio.CancelledError as error:
            args = error.args
            if result.cancelled():
                if call.take_back():
                    call.withdraw()
                    raise
                result = call.waited_for_again()
                try:
                    await until(result.done, partial(asyncio.wait, [result]))
                except asyncio.CancelledError as another:
                    args = another.args
            postpone(args, undisturbed)
            return result.result()
        finally:
            call.result = None
            del result  # break the cycle of future, error, traceback and frame

    def submit(self, call: DeviceCall) -> None:
        """Have a call run; the call's future gets the result.

        Raises:
            EngineClosedError: the Engine was closed.
            Overloaded: too many calls wait.
        """
        device, waiting = self.device, self.waiting
        if device.is_closed:
            raise EngineClosedError(f"device {device.name} takes no more calls: its Engine was closed")
        call.queue = self
        if not self.gathers and not device.busy and self.free and device.has_room and len(self.replicas) == 1:
            device.begin(self, [call])  # no call waits and the device has room: begin at once
            return
        if self._may_refuse and waiting.is_full and not self._make_room():
            raise Overloaded(
                f"node {self.name!r} refuses an item: {waiting.count} items wait already, which is one batch and "
                "max_queue= of its Batch: try again later, or raise max_queue="
            )
        call.arrived_at = device.loop.time()
        waiting.add(call)
        if len(self.replicas) == 1:
            device.offer(self)
        else:
            for one in sorted(self.replicas, key=lambda one: one.device.running):
                one.device.offer(one)

    def _make_room(self) -> bool:
        """Drop calls of a full queue whose callers have left, and begin due batches; return whether there is room."""
        waiting = self.waiting
        for unwanted in waiting.drop_unwanted(self.device.loop.time()):
            unwanted.end()
        for one in self.replicas:
            one.device.look(enough=lambda: not waiting.is_full)
        return not waiting.is_full

    def discard(self, call: DeviceCall) -> None:
        """Remove a call from the queue, if the call still waits."""
        self.arrived.pop(call, None)
        self.waiting.discard(call)
        self.forget_if_empty()

    def forget_if_empty(self) -> None:
        """Have the devices skip this queue while no call waits in it."""
        if not self.waiting.count and not self.arrived:
            for one in self.replicas:
                one.device.busy.pop(one, None)


def share(queues: Sequence[CallQueue]) -> None:
    """Have several devices share the calls of one node: the next free one takes the next call."""
    for queue in queues:
        queue.waiting = queues[0].waiting
        queue.replicas = tuple(queues)


_ONE_BY_ONE = Batch(1)

# How many jobs of one node the device's thread holds ahead. There are enough that a burst of tiny kernels does not wait
# for the event loop between two of them, and so few that another node is served soon.
AHEAD = 16


class SingleCallQueue(CallQueue):
    """Has a device run the calls of a node one by one.

    Args:
        name: name of the node.
        device: the device that runs the calls.
        jitted: the function that all calls run; None if each call has its own (`DeviceCall.jitted`).
        parameters: positions of the arguments that are parameters.
        limit: the most calls that the device's thread holds.
        job: makes the job of a call.
    """

    def __init__(
        self,
        name: str,
        device: "EngineDevice",
        jitted: JittedFunction | None = None,
        parameters: tuple[int, ...] = (),
        limit: int = AHEAD,
        job: Callable[..., SingleJob] = SingleJob,
    ) -> None:
        super().__init__(name, device, None, limit)
        self._job = job
        self._jitted = jitted
        self._parameters = parameters

    def start(self, calls: list[DeviceCall]) -> None:
        """Have the device run the only call of the list."""
        self._job(self._jitted or calls[0].jitted, self.device, calls[0], self, self._parameters).submit()

    def give(self, call: DeviceCall, value: Any) -> None:
        """Give a caller its result, which no thread waits for."""
        # Results that are not ready do not pile up: the device's thread enqueues no more than it may have in flight.
        try:
            self.device.returned(self, [call])
        finally:
            call.finish(value)  # this may run code of the caller

    def ended(self, job: Job) -> None:
        """Give a caller its result or its error."""
        if job.error is not None and is_out_of_memory(job.error):
            job.error = self._too_large(job, job.error)
        try:
            self.device.returned(self, job.calls)
        finally:
            job.settle()  # this may run code of the caller

    def _too_large(self, job: Job, error: BaseException) -> DeviceError:
        call, place = job.calls[0], self.device.name
        arguments = described([leaf for leaf in jax.tree.leaves(call.args) if hasattr(leaf, "shape")])
        found = DeviceError(f"a call of {call.jitted.name!r} does not fit the memory of {place}: {arguments}")
        return with_cause(found, error)


def described(arrays: Sequence[Any]) -> str:
    """Return dtypes, shapes and size of arrays, for an error."""
    texts = [f"{array.dtype}[{','.join(map(str, array.shape))}]" for array in arrays]
    return f"{', '.join(texts)}; {sum([array.nbytes for array in arrays]):,} bytes"


# How many jobs of all nodes the device's thread holds ahead.
DEFAULT_WINDOW = 32

# Bytes of arguments that the device's thread holds ahead, for all nodes together. To transfer as much over PCIe takes
# 20 ms and more, and it is a small part of the memory of a device.
DEFAULT_WINDOW_BYTES = 256 * 1024 * 1024


class EngineDevice:
    """A device or mesh as one Engine uses it: the waiting calls, a lease on its thread, and its way back to the loop.

    Nodes and device actors (`devices.actor`) take turns by item: the queue that was served the fewest items is next. A
    batch is made when the device has room for one, so requests gather while the device is busy. No call waits for other
    calls longer than `max_wait_seconds`.

    Args:
        placement: the device or mesh.
        mailbox: brings outcomes to the event loop.
        loop: the event loop.
        window: the most jobs that the device holds.
        window_bytes: the most bytes of their arguments. A device that holds as many gets no job until one has ended.

    Attributes:
        name: name of the placement.
        thread: the thread that dispatches the jobs.
        parameters: arrays that stay on the device until it is closed, such as the weights of a model.
        functions: the queue of each device actor, which belongs to no node.
        busy: the queues with calls that wait.
        running: number of jobs that the device holds.
    """

    # Ownership: the event loop owns this object and its queues. Only `parameters` belongs to the dispatch thread, until
    # that thread has ended. Threads reach the loop through `mailbox` alone.

    def __init__(
        self,
        placement: Placement,
        mailbox: LoopMailbox,
        loop: asyncio.AbstractEventLoop,
        window: int = DEFAULT_WINDOW,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
    ) -> None:
        self.placement = placement
        self.name = placement.name
        self.mailbox = mailbox
        self.loop = loop
        self.thread = THREADS.acquire(placement)
        self.parameters = PlacedParameters()
        self.functions: WeakKeyDictionary[object, SingleCallQueue] = WeakKeyDictionary()
        self.busy: dict[CallQueue, None] = {}
        self.running = 0
        self.is_closed = False
        self._window, self._window_bytes = window, window_bytes
        self._held_bytes = 0
        self._served = 0.0  # `CallQueue.served` of the last queue whose calls ran
        self.will_look = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle = Condition()

    def returned(self, queue: CallQueue, calls: list[DeviceCall]) -> None:
        """Note that the device is done with the job of these calls, or that the job is enqueued and no thread waits."""
        self.running -= 1
        queue.free += 1
        self.let_go(calls)
        if self.busy:
            self.look()
        if not self.running and self.is_closed:
            self._idle.notify_all()

    def compile(self, jitted: JittedFunction, args: tuple[Any, ...]) -> "asyncio.Future[Executable]":
        """Have a function compiled for arguments like these; the returned future gets the program or the error.

        Nothing is compiled if the future is cancelled before the compilation begins.
        """
        done: asyncio.Future[Executable] = self.loop.create_future()
        mailbox, wait = self.mailbox, spans.waiting()
        trace = None if wait is None else wait.context
        CACHE.compile(
            jitted, args, lambda found: mailbox.post(_tell, done, found), trace, lambda: not done.cancelled()
        )  # fmt: skip
        return done

    async def close(self) -> None:
        """Refuse further calls, fail the waiting calls, wait for the running ones, and give the lease back."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for queue in list(self.busy):
            queue.admit(0.0)
            for call in queue.waiting.entries():
                queue.waiting.discard(call)
                call.fail(EngineClosedError("the Engine was closed while this call waited for a device"))
        self.busy.clear()
        await self._idle.wait_for(lambda: not self.running)
        ended = asyncio.Event()
        is_last = THREADS.release(self.placement, lambda: self.mailbox.post(ended.set))
        await ended.wait()
        if is_last:
            self.thread.join()  # this takes no time: the threads are about to return

    @property
    def has_room(self) -> bool:
        """Whether the device takes another job."""
        return self.running < self._window and self._held_bytes < self._window_bytes and not self.is_closed

    def offer(self, queue: CallQueue) -> None:
        """Take calls from a queue, in turn with the other queues, until the queue is empty."""
        if queue not in self.busy:
            # A queue that was empty, or is new, does not catch up on the items that other queues had meanwhile.
            queue.served = max(queue.served, self._served)
            self.busy[queue] = None
        if queue.gathers:
            self._look_soon()  # after the other calls that come in this turn of the loop
        elif queue.has_room:
            self.look()

    def _look_soon(self) -> None:
        if not self.will_look:
            self.will_look = True
            self.loop.call_soon(self.look)

    def look(self, due: float = 0.0, enough: Callable[[], bool] = bool) -> None:
        """Hand jobs to the device while it takes more and `enough` is false.

        Args:
            due: the time for which the timer was set; the present time counts as at least this.
            enough: asked before each job.
        """
        self.will_look = False
        if self.is_closed:
            return
        now = max(self.loop.time(), due)  # a timer may run one tick of the clock too early
        before = self.running
        for queue in tuple(self.busy):
            if queue.arrived:
                queue.admit(now)
            if self._held_bytes < self._window_bytes:
                queue.fill(now)
        while not enough() and self.has_room and (found := self._next(now)) is not None:
            self.begin(*found)
        if self.running != before:
            self._tell_replicas()
        self._arm_timer(now)

    def begin(self, queue: CallQueue, calls: list[DeviceCall]) -> None:
        """Have the device run some calls of a queue together."""
        queue.free -= 1
        self._served = max(queue.served, self._served)
        self.running += 1
        self.hold(queue, calls)
        queue.start(calls)

    def hold(self, queue: CallQueue, calls: list[DeviceCall]) -> None:
        """Count calls that the device's thread gets, in a new job or in a job that it has not begun."""
        queue.served += len(calls)
        for call in calls:
            call.started = True
            self._held_bytes += call.size_bytes

    def let_go(self, calls: list[DeviceCall]) -> None:
        """Stop counting calls that the device's thread no longer holds."""
        for call in calls:
            self._held_bytes -= call.size_bytes

    def _tell_replicas(self) -> None:
        """Have other devices that have copies of the waiting nodes look for calls: their turn may have come."""
        for queue in self.busy:
            for one in queue.replicas:
                if one is not queue and one.has_room:
                    one.device._look_soon()

    def _next(self, now: float) -> tuple[CallQueue, list[DeviceCall]] | None:
        for queue in sorted(self.busy, key=lambda queue: queue.served) if len(self.busy) > 1 else tuple(self.busy):
            while queue.free and queue.is_next and (taken := queue.waiting.take(now, largest=queue.largest)):
                queue.forget_if_empty()
                if wanted := _wanted(taken, now):
                    return queue, wanted
        return None

    def _arm_timer(self, now: float) -> None:
        """Set the timer to the moment when the next batch is due, if the batch waits for nothing but time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.has_room:
            return
        dues = [queue.waiting.due_at for queue in self.busy if queue.gathers and queue.free]
        later = [due for due in dues if due is not None and due > now]  # a batch that is due waits for something else
        if later:
            self._timer = self.loop.call_at(min(later), self.look, min(later))


def _wanted(taken: list[DeviceCall], now: float) -> list[DeviceCall]:
    """Return the calls whose callers still wait, and forget the other calls."""
    wanted: list[DeviceCall] = []
    for call in taken:
        if call.is_wanted(now):
            wanted.append(call)
        else:
            call.end()  # its own deadline raises the error, which says more
    return wanted


def _tell(done: "asyncio.Future[Executable]", found: Executable | BaseException) -> None:
    if done.done():
        return
    if isinstance(found, BaseException):
        done.set_exception(found)
    else:
        done.set_result(found)


async def all_compiled(
    programs: "Sequence[asyncio.Future[Executable]]", on_progress: Callable[[int, int], object] | None = None
) -> None:
    """Wait for programs, which are compiled one after the other. After an error, no other program begins.

    Args:
        programs: the programs, as `EngineDevice.compile` returns them.
        on_progress: called after each program, with the number of compiled programs and the number of all programs.
    """
    try:
        for count, program in enumerate(programs, 1):
            await program
            if on_progress is not None:
                on_progress(count, len(programs))
    finally:
        for program in programs:
            program.cancel()  # no effect on a compilation that has ended


def batch_size(count: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest size that holds `count` items; the sizes ascend, and the last one holds them."""
    return sizes[bisect_left(sizes, count)]


# How long batches stay smaller after a batch did not fit. By then, another process or node that held the memory may be
# gone. If the memory is still short, a few batches fail once more in each such time.
LIMIT_SECONDS = 60.0


class BatchCallQueue(CallQueue):
    """Has a device run the calls of a node in batches, and runs a batch that has failed again in parts.

    Args:
        arguments: makes the arguments of the program from those of the calls.
        parameters: positions of the arguments that are parameters, each with its `SameParameters`.
        device: the device that runs the batches.
        jitted: the vectorised program.
        batch: how many calls run together.
        sizes: the sizes that batches are padded to, in ascending order.
        prefetch: the most batches that the device holds: one runs while the next is transferred.
        log: counts the batches.
        in_parts: runs a failed batch again in parts, then calls the given function; None if no batch may run again.

    Attributes:
        items: describes and stacks the arguments of the calls.
    """

    # Ownership: the event loop owns this queue. The dispatch thread asks `rows_of` and `_sizes` how many rows a job
    # has; the fields that these read never change. The thread may have begun with `_unbegun`: `is_closed` of that job,
    # read under its `lock`, says so.

    def __init__(
        self,
        arguments: Arguments,
        parameters: Sequence[tuple[int, SameParameters]],
        device: EngineDevice,
        jitted: JittedFunction,
        batch: Batch,
        sizes: tuple[int, ...],
        prefetch: int,
        log: BatchLog,
        *,
        in_parts: "Callable[[BatchCallQueue, BatchJob, Callable[[], None]], object] | None",
    ) -> None:
        super().__init__(arguments.name, device, batch, prefetch, sizes[0])
        assert arguments.items is not None
        self.items = arguments.items
        # Limits count calls. With packed rows, a limit counts the calls of full rows.
        packed = self.items.packed
        self._most_per_row = 1 if packed is None else packed.items_per_row
        self._limits_end_at = 0.0  # when `largest` is forgotten, in the loop's time
        self._unbegun: BatchJob | None = None  # the last job of the thread, if further calls may be added to the job
        # The most calls of that job. 0 with packed rows: there the costs decide how many calls have room.
        assert batch.max_size != "auto"  # the size was found before
        self._most = 0 if batch._rows is not None else batch.max_size
        self._under_way: list[BatchJob] = []  # the batches that the device has
        self._is_slow = False  # whether the last batch took longer than the loop needs to hand over another one
        self._counts_turn = False  # whether `_turn` is scheduled
        self._arguments = arguments
        self._parameters = parameters
        self._sizes = sizes
        self._log = log
        self._jitted = jitted
        self._in_parts = in_parts

    def start(self, calls: list[DeviceCall]) -> None:
        """Have the device run some calls as one batch."""
        rows = len(self.rows_of(calls))
        job = self.run_batch(calls, partial(self._ended, self.device.loop.time()))
        self._under_way.append(job)
        self._unbegun = job if rows < self._most and len(self.replicas) == 1 else None

    @property
    def is_next(self) -> bool:
        """Whether the device is the least busy one with a copy of the node, and the batch waits for no more callers."""
        waiting = self.waiting
        if len(self.replicas) > 1 or waiting.is_due(-math.inf):
            return super().is_next
        if waiting.waits_for_callers():
            if not self._counts_turn:
                self._counts_turn = True
                self.device.loop.call_soon(self._turn)
            return False
        # A small batch that is handed over now would begin before the callers of the running batch can call again.
        running = self._under_way
        is_small = self._is_slow and running and sum([len(job.held) for job in running]) >= waiting.count
        return not is_small or not waiting.holds_only(running[-1].held[0].group)

    def submit(self, call: DeviceCall) -> None:
        """Have a call run in a batch; the call's future gets the result.

        Raises:
            EngineClosedError: the Engine was closed.
            Overloaded: too many calls wait.
            Exception: the arguments cannot be stacked. Raised here only if the batch has `max_queue=` or the node has
                several devices; otherwise the call's future gets this error.
        """
        device = self.device
        if self._may_refuse or len(self.replicas) > 1 or device.is_closed:
            self._look_at(call)
            super().submit(call)
            return
        call.queue = self
        self.arrived[call] = None
        if not device.will_look or self not in device.busy:
            device.offer(self)

    def admit(self, now: float) -> None:
        """Put the calls that have just arrived among those that wait for a batch.

        Nearly always all calls are alike, and one comparison shows that.
        """
        if not self.arrived:
            return
        calls, self.arrived = [*self.arrived], {}
        alike = self._arguments.alike([call.args for call in calls])
        for call in calls:
            call.arrived_at = now
            if alike is not None:
                call.group, call.size_bytes = alike
                continue
            try:
                self._look_at(call)
            except BaseException as error:  # noqa: BLE001 - any exception is the outcome of its item
                call.fail(error)
            else:
                self.waiting.add(call)
        if alike is not None:
            self.waiting.add_alike(calls)
        elif not self.waiting.count:
            self.forget_if_empty()

    def _look_at(self, call: DeviceCall) -> None:
        if (alike := self._arguments.alike([call.args])) is not None:
            call.group, call.size_bytes = alike
            return
        item, call.group = self._arguments.describe_item(with_same(self._parameters, call.args))
        call.args, call.size_bytes = item, item.size_bytes

    def _turn(self) -> None:
        self._counts_turn = False
        self.admit(self.device.loop.time())
        self.waiting.turn()
        self.device.look()

    def _over(self, job: BatchJob, began: float) -> None:
        """Note that a batch has ended: its callers have their results, and may call again."""
        now = self.device.loop.time()
        self.admit(now)
        self._under_way.remove(job)
        self._is_slow = now - began > SHORT_SECONDS
        if self._is_slow:
            self.waiting.returned(len(job.held))
        self.device.returned(self, job.held)

    def fill(self, now: float) -> None:
        """Add waiting calls to the last batch of the device's thread, unless the thread has begun with that batch.

        A thread that waits for the interpreter, or for a place on the device, begins a batch milliseconds after it got
        it. Calls that come meanwhile join the batch at once, without waiting for `max_wait_seconds`.
        """
        job = self._unbegun
        if job is None:
            return
        with job.lock:
            if job.is_closed or (group := job.calls[0].group) in self.largest:
                self._unbegun = None
                return
            left = [call for call in job.calls if call.is_left]
            staying = len(job.calls) - len(left)
            added = _wanted(self.waiting.take_more(group, self._most - staying), now)
            if added:
                job.change(left, added)
            else:
                left = []  # if all callers of a job have left, the job is skipped
        self.device.hold(self, added)
        self.device.let_go(left)
        for call in left:
            call.drop()
        self.forget_if_empty()

    def run_batch(
        self, calls: list[DeviceCall], on_over: Callable[[BatchJob], None], size: int | None = None
    ) -> BatchJob:
        """Have the device run some calls as a batch of `size` rows; by default of as few rows as hold the calls."""

        def over(job: BatchJob) -> None:
            if job.stacked is not None and job.has_run:
                self._log.add(job.stacked)
            on_over(job)

        def size_of(calls: list[DeviceCall]) -> int:
            return size or batch_size(len(self.rows_of(calls)), self._sizes)

        job = BatchJob(self._jitted, self.device, calls, over, self._arguments, size_of)
        job.submit()
        return job

    def _ended(self, began: float, job: BatchJob) -> None:
        if self._unbegun is job:
            self._unbegun = None
        if self.largest and self.device.loop.time() >= self._limits_end_at:
            self.largest.clear()
        if job.error is not None and job.has_run and self._in_parts is not None and isinstance(job.error, Exception):
            self._in_parts(self, job, partial(self._over, job, began))
            return
        try:
            job.settle()
        finally:
            self._over(job, began)

    def exceeded(self, job: BatchJob) -> bool:
        """Halve later batches of calls like these, which did not fit the device; return whether fewer calls may fit."""
        assert job.stacked is not None
        rows = job.stacked.size
        half = max([size for size in self._sizes if size <= rows // 2], default=self._sizes[0])
        if half == rows:
            return False
        if not self.largest:
            self._limits_end_at = self.device.loop.time() + LIMIT_SECONDS
        group, most = job.calls[0].group, half * self._most_per_row
        self.largest[group] = min(most, self.largest.get(group, most))
        return True

    def first(self, calls: Sequence[DeviceCall], most: int) -> int:
        """Return how many of the first calls make a batch that is limited to `most` calls."""
        rows = max(1, most // self._most_per_row)
        return most if self.items.packed is None else sum(map(len, self.rows_of(calls)[:rows]))

    def rows_of(self, calls: Sequence[DeviceCall]) -> Sequence[Any]:
        """Return the rows of a batch of calls of one group: the calls, or with packed rows the items of each row."""
        if self.items.packed is None:
            return calls
        return self.items.rows_of([cast("BatchItem", call.args) for call in calls])

    def describe(self, call: DeviceCall) -> str:
        """Return dtypes, shapes and size of the arguments of a call, for an error."""
        return described(self._arguments.as_item(call.args, call.group).arrays)
