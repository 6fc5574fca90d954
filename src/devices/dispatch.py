"""The thread that enqueues every computation of a device or mesh, and the jobs that it runs."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from .._errors import ActorRestarted, copy_of, with_cause
from ..actors.threads import ThreadOwner
from ..telemetry import logs, metrics, names
from ..telemetry.metrics import CounterSource, Reading, series
from ..telemetry.profiling import collectors
from ..telemetry.spans import JobSpan
from .arguments import Stacked, on_host, split
from .batch_items import BatchItem
from .compiling import CACHE, JittedFunction
from .device_errors import ORIGINS, Origin, explained
from .job_times import JobTimes, jax_profiles, named_in_jax_profile
from .parameters import overwritable, owned
from .programs import are_arrays, are_ready, wait_until_ready
from .self_check import SELF_CHECK
from .shardings import Placement
from .untyped_jax import jax

if TYPE_CHECKING:
    from .arguments import Arguments
    from .engine_device import DeviceCall, EngineDevice, SingleCallQueue
    from .programs import Executable


# Dispatch: the one thread that enqueues every computation of a device or mesh.
#
# One thread keeps the computations in order; `EnqueueOrder` keeps the order between meshes that share devices. No event
# loop dispatches, because dispatching may block: a tiny kernel runs inline in the dispatch, and on a CPU the 33rd
# computation in flight blocks.
#
# A second thread waits for the oldest computation. So the transfers of the next computation begin while the present one
# runs, even when the next one comes late.

# How many computations may be in flight. With two, the transfer of one overlaps the computation of the other. Four
# leave room for bursts of items. More computations keep the device busy while an event loop holds the interpreter and
# so keeps this thread from enqueueing. That lasts 5 ms, Python's default switch interval. The interval that is set in
# this process is not read: the depth would depend on whether a device is opened before or inside of
# `engine.tuned_for_serving`. There are no more computations in flight than last for that time, because such a
# computation cannot be cancelled, and holds results that no caller has seen.
LEAD_SECONDS = 0.005
MIN_DEPTH = 4
MAX_DEPTH = 16  # on a CPU, enqueueing the 33rd blocks
_RECENT = 8  # the usual time of a computation is an average of about this many

# No thread waits for results that were handed on. Still, the second thread waits for one of so many such computations,
# to measure how long they take. To hand each one over would cost as much as a small computation.
_TIMED_EVERY = 16


# A computation in flight: its job, the arrays of its result, and when it began.
_InFlight: TypeAlias = "tuple[Job, list[Any], float]"


class DispatchThread(ThreadOwner, CounterSource):
    """Enqueues jobs in the order in which they come, and tells each job when its result is ready.

    Args:
        name: name of the device or mesh.
        check: called first, on the dispatch thread; if it raises, every job fails with that error.

    Attributes:
        submit: enqueues a job after the jobs that were submitted before; callable from any thread.
        restarts: how often a job has failed because one of the two threads could not go on with the job.
    """

    # Ownership: any thread submits. The first thread dispatches, and owns `_in_flight`, `_lent_out` and
    # `_untimed`. It hands computations to the second thread through `_handed`, and gets a count of the ended ones
    # through `_returned`. The fields that `_was_busy` writes belong to the second thread while that has a computation,
    # otherwise to the first thread. So the first thread waits for a job itself only while the second one has none. The
    # first thread reads `_depth` at any time. Both threads count `restarts`.

    def __init__(self, name: str, check: Callable[[], None]) -> None:
        self._name = name
        self._check = check
        self._unusable: Exception | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.submit: Callable[[Job], None] = self._jobs.put
        self._in_flight: deque[_InFlight] = deque()  # without those that the second thread has
        self._handed: SimpleQueue[_InFlight | None] = SimpleQueue()
        self._returned: SimpleQueue[None] = SimpleQueue()
        self._lent_out = 0  # how many computations the second thread has, as far as the first thread knows
        self.restarts = 0
        self._busy_seconds = 0.0
        self._busy_until = 0.0
        self._usual_seconds = LEAD_SECONDS / MIN_DEPTH  # how long a computation has taken recently
        self._depth = MIN_DEPTH  # how many computations may be in flight: as many as last for `LEAD_SECONDS`
        self._timed_seconds = 0.0  # time of the last computation whose end a thread has seen
        self._untimed = _TIMED_EVERY  # number of computations since then, whose ends no thread has seen
        self._on_ended: list[Callable[[], object]] = []
        self._threads: tuple[threading.Thread, ...] = (
            threading.Thread(target=self._dispatch_all, name=f"penstock-device-{name}", daemon=False),
            threading.Thread(target=self._wait_for_lent, name=f"penstock-device-{name}-wait", daemon=False),
        )
        for thread in self._threads:
            thread.start()
        super().__init__()
        metrics.opened(self)

    def counters(self) -> Iterable[Reading]:
        """Return how long the device was busy, and how often its threads were restarted, for metrics."""
        of = names.DEVICE, self._name
        return [
            (series(names.METRIC_DEVICE_BUSY_TIME, of), self._busy_seconds, None),
            (series(names.METRIC_DEVICE_RESTARTS, of), self.restarts, None),
        ]

    def end(self, on_ended: Callable[[], object] | None = None) -> None:
        """Run the jobs that were submitted before, then end.

        Args:
            on_ended: called last, on a thread that is about to return.
        """
        if on_ended is not None:
            self._on_ended.append(on_ended)
        self._jobs.put(None)

    def abandon(self) -> None:
        """Call `end`; see `ThreadOwner`."""
        self.end()

    def join(self) -> None:
        """Block until both threads have ended."""
        for thread in self._threads:
            thread.join()

    def begin_without_threads(self) -> None:
        """Have no threads in a forked process: the threads run in its parent."""
        self._threads = ()

    def _dispatch_all(self) -> None:
        try:
            self._check()
        except Exception as error:  # noqa: BLE001 - every caller gets the reason why the device is unusable
            self._unusable = error.with_traceback(None)
        self._take_jobs()
        while self._in_flight or self._lent_out:
            self._wait_for_oldest()
        self._handed.put(None)

    def _take_jobs(self) -> None:
        jobs, in_flight = self._jobs, self._in_flight
        while True:
            if len(in_flight) + self._lent_out >= self._depth:
                self._wait_for_oldest()
                continue
            job = self._next_when_idle() if jobs.empty() else jobs.get()
            if job is None:
                return
            while self._lent_out and not self._returned.empty():
                self._collect()
            self._safely(job, self._dispatch, job)
            del job  # a thread that waits for the next job must not hold the last one

    def _next_when_idle(self) -> "Job | None":
        """Wait for the next job, while the second thread waits for the computations in flight."""
        # If no caller waits for the computations in flight, the next job may come soon, as in a loop of training steps.
        # Then this thread looks at them when that job comes, which is cheaper than to hand them to the second thread.
        if self._in_flight and self._untimed < _TIMED_EVERY and not any(one[0].is_awaited for one in self._in_flight):
            try:
                return self._jobs.get(timeout=LEAD_SECONDS)
            except Empty:
                pass
        if self._in_flight:
            self._hand_to_waiter()
        return self._jobs.get()

    def _dispatch(self, job: "Job") -> None:
        began = perf_counter()
        try:
            if self._unusable is not None:
                raise copy_of(self._unusable)
            arrays = job.dispatch() if job.begin() else None
        except BaseException as error:  # noqa: BLE001 - every error is the caller's, not this thread's
            job.failed(ORIGINS.cause_of(job.explained(error), job.inputs(), has_ended=False))
            return
        if arrays is None:
            return
        if not self._in_flight and not self._lent_out and are_ready(arrays):  # a small computation has run inline
            self._wait(job, arrays, began)
            return
        self._in_flight.append((job, arrays, began))
        job.hand_on(arrays)
        self._take_ended()  # meanwhile the event loop wakes up

    def _take_ended(self) -> None:
        """Finish jobs in flight that have ended and that no caller waits for, if more than `MIN_DEPTH` are there."""
        in_flight = self._in_flight
        if len(in_flight) <= MIN_DEPTH:
            return
        while len(in_flight) > 1 and not self._lent_out and not in_flight[0][0].is_awaited:
            if not are_ready(in_flight[0][1]):
                return
            self._untimed += 1
            self._finish(in_flight.popleft(), False)

    def _wait_for_oldest(self) -> None:
        if self._lent_out:
            self._collect()
        else:
            self._finish(self._in_flight.popleft())

    def _hand_to_waiter(self) -> None:
        """Have the second thread wait for the jobs in flight, after the jobs that it has already."""
        self._untimed = 0
        while self._in_flight:
            self._handed.put(self._in_flight[0])
            self._lent_out += 1
            self._in_flight.popleft()

    def _collect(self) -> None:
        """Wait until the second thread is done with a job."""
        self._returned.get()
        self._lent_out -= 1

    def _wait_for_lent(self) -> None:
        while (found := self._handed.get()) is not None:
            self._finish(found)
            self._returned.put(None)
            del found  # a thread that waits for the next computation must not hold the last one
        self._threads[0].join()
        metrics.registry.closed(self)
        for callback in self._on_ended:
            callback()

    def _finish(self, found: _InFlight, is_timed: bool = True) -> None:
        self._safely(found[0], self._wait, *found, is_timed)

    def _wait(self, job: "Job", arrays: list[Any], began: float, is_timed: bool = True) -> None:
        is_late = not is_timed or are_ready(arrays)
        try:
            try:
                job.wait(arrays, self._busy_until)
            finally:
                self._was_busy(began, is_late=is_late, is_timed=is_timed)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller, as in `_dispatch`
            # The traceback shows only this wait. It would say nothing, and keep the arrays alive.
            job.failed(ORIGINS.cause_of(error.with_traceback(None), job.inputs()))
            return
        job.ready()

    def _was_busy(self, began: float, *, is_late: bool, is_timed: bool) -> None:
        """Count the time of a computation, without the part in which an earlier one was computed."""
        now = perf_counter()
        seconds = now - max(began, self._busy_until)
        self._busy_seconds += seconds if is_timed else min(seconds, self._timed_seconds)
        self._busy_until = now
        # If the computation had ended before this thread looked, its time is unknown and counts as 0, so that more
        # computations may be in flight.
        self._usual_seconds += ((0.0 if is_late else seconds) - self._usual_seconds) / _RECENT
        usual = self._usual_seconds
        self._depth = MAX_DEPTH if usual * MAX_DEPTH <= LEAD_SECONDS else max(MIN_DEPTH, int(LEAD_SECONDS / usual))
        if is_timed:
            self._timed_seconds = seconds

    def _safely(self, job: "Job", step: Callable[..., None], *args: Any) -> None:
        """Take a step of a job. If the step raises, although it handles errors of the job, fail the job, and go on."""
        try:
            step(*args)
        except BaseException as cause:  # noqa: BLE001 - nothing is expected here, and other jobs need the thread
            self.restarts += 1
            logs.warning("device.restarted", device=self._name, restarts=self.restarts, error=cause)
            what = f"the thread of device {self._name} could not go on with this call: {logs.shown(cause)}"
            with suppress(BaseException):  # the call of `failed` may be the one that has just raised
                job.failed(with_cause(ActorRestarted(what), cause))


class DispatchThreads:
    """Shares one dispatch thread per device or mesh between all Engines and event loops of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[Placement, tuple[DispatchThread, int]] = {}

    def acquire(self, placement: Placement) -> DispatchThread:
        """Return the thread of a device or mesh. The thread runs until `release`."""
        with self._lock:
            thread, leases = self._threads.get(placement) or (self._start(placement), 0)
            self._threads[placement] = thread, leases + 1
            return thread

    def release(self, placement: Placement, on_ended: Callable[[], object]) -> bool:
        """Give a lease back; the last lease ends the thread, after the jobs that were submitted.

        Args:
            placement: the device or mesh.
            on_ended: called, on any thread, once this lease keeps nothing alive but a thread that is about to return.

        Returns:
            Whether this was the last lease.
        """
        with self._lock:
            thread, leases = self._threads.pop(placement)
            if leases > 1:
                self._threads[placement] = thread, leases - 1
        if leases > 1:
            on_ended()
        else:
            thread.end(on_ended)
        return leases == 1

    def _start(self, placement: Placement) -> DispatchThread:
        return DispatchThread(placement.name, lambda: SELF_CHECK.verify(placement.devices[0]))


# One object for the process, because the process shares the devices.
THREADS = DispatchThreads()


class Job:
    """Runs a compiled program for some calls.

    The threads of the device call the methods of a job, so the methods must not block. When the job is over, the event
    loop calls `on_over` with the job.

    Attributes:
        calls: the calls that the job runs for.
        results: one result for each call, once the job has succeeded.
        error: the error with which the job failed; None if it has not failed.
        times: the times of the job's phases, while a profile is taken.
        stacked: the stacked arguments of a batch; None for another job, and before they are stacked.
        has_run: whether the job was enqueued: neither skipped, nor failed while its program was compiled.
        is_awaited: whether a caller waits until the job's arrays are ready, or a queue has to know when they are. Known
            once the result was handed on.
    """

    # Ownership: a job has one owner at a time, which may read and write all of its fields. The event loop makes and
    # submits the job. The dispatch thread begins it. If its program has to be compiled, the compile thread owns the job
    # until that is done. The dispatch thread enqueues the job and waits for it, or hands it to the second thread.
    # `_over` posts the job to the loop, which settles it. Meanwhile the loop may do two things only: have a call leave
    # (`DeviceCall.result`, `take_back`), and change a batch that is not closed.

    _is_batch = False

    def __init__(
        self, jitted: JittedFunction, device: "EngineDevice", calls: "list[DeviceCall]", on_over: Callable[[Any], None]
    ) -> None:
        self.calls: list[DeviceCall] = calls
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.has_run = False
        self.is_awaited = True
        self.times: JobTimes | None = None
        self.stacked: Stacked | None = None
        self._submitted_at = 0.0
        self._jitted = jitted
        self._device = device
        self._on_over: Callable[[Any], None] | None = on_over  # None once it was called
        self._compiled: Executable | BaseException | None = None  # outcome of the compilation that the job waited for
        self._args: tuple[Any, ...] | None = None
        self._leaves: list[Any] = []  # of `_args`
        self._given: Any = None
        self._origin: Origin | None = None
        self._is_over = False
        self._span: JobSpan | None = None  # if any of the calls is sampled

    def settle(self) -> None:
        """Give each call its result, or a copy of the job's error; on the loop."""
        error = self.take_error()
        if error is not None:
            for index, call in enumerate(self.calls):
                call.fail(copy_of(error) if index else error)
        elif self.results:
            for call, result in zip(self.calls, self.results, strict=True):
                call.finish(result)
        else:
            for call in self.calls:
                call.drop()  # the job was skipped: its callers have left

    def take_error(self) -> BaseException | None:
        """Return the job's error and forget it: job and traceback refer to each other, so neither would be freed."""
        error, self.error = self.error, None
        return error

    def submit(self) -> None:
        """Hand the job to the device's thread."""
        self._submitted_at = perf_counter()  # always: to ask whether a profile is taken would take longer
        self._device.thread.submit(self)

    def begin(self) -> bool:
        """Return whether a caller still waits for the job; if none does, the job is over."""
        if not self._is_wanted():
            self._over()
            return False
        if self._span is None:
            self._open_span()
        else:
            self._span.dispatching()
        return True

    def dispatch(self) -> list[Any] | None:
        """Enqueue the program and return the arrays of its result.

        If the program is not compiled yet, this method requests the compilation and returns None. The job is submitted
        again when the compilation has ended.
        """
        if isinstance(self._compiled, BaseException):
            raise self._compiled  # not from a local variable: the traceback would refer to that variable
        executable, self._compiled = self._compiled, None
        if self._args is None:
            if collectors.running:
                self._times_begin()
            self._args = self.arguments()
        elif self.times is not None:
            self.times.dispatch_begins()
        self._leaves, structure = jax.tree.flatten(self._args)
        span = self._span
        if executable is None:
            executable = CACHE.find(self._jitted, self._args, (self._leaves, structure))
        if executable is None:
            if self.times is not None:
                self.times.compile_begins()
            trace = None if span is None else span.context
            CACHE.compile(self._jitted, self._args, self._goes_on, trace, self._is_wanted)
            return None
        if not self.claim():
            self._over()
            return None
        self.has_run = True
        frames = [call.frame for call in self.calls]
        with named_in_jax_profile(self._jitted.name, frames) if jax_profiles() else nullcontext():
            self._given = self._enqueue(executable, self._args)
        if self.times is not None:
            self.times.dispatched()
        return self._arrays()

    def explained(self, error: BaseException) -> BaseException:
        """Return an error that says more than JAX's error, if that came from the call of the program."""
        return explained(error, self._jitted, self._args) if self.has_run and self._args is not None else error

    def _arrays(self) -> list[Any]:
        """Return the arrays of the program's result."""
        given = self._given
        return [given] if are_arrays((given,)) else jax.tree.leaves(given)

    def hand_on(self, arrays: list[Any]) -> None:
        """Give the result to the caller before it is ready, if the caller accepts that.

        Args:
            arrays: what `dispatch` returned.
        """

    def _times_begin(self) -> None:
        """Begin to measure the phases of the job, because a profile is taken."""
        self.times = JobTimes(self._submitted_at)
        self.times.dispatch_begins()

    def inputs(self) -> Iterable[Any]:
        """Return the arrays that the job reads."""
        if not self._leaves:
            self._leaves = jax.tree.leaves(self._args)
        return self._leaves

    def wait(self, arrays: list[Any], busy_until: float) -> None:
        """Block until the arrays that `dispatch` returned are ready.

        Args:
            arrays: the arrays that `dispatch` returned.
            busy_until: when the computation before this one was ready, as `perf_counter` tells the time.

        Raises:
            JaxRuntimeError: the computation failed.
        """
        if self.times is None:
            wait_until_ready(arrays)
        else:
            self.times.wait(self.inputs(), arrays, busy_until)

    def ready(self) -> None:
        """Give the callers their results."""
        try:
            self.results = self.results_of(self._given)
        except Exception as error:  # noqa: BLE001 - the result has an unexpected form: the callers get the error
            self.error = error
        self._over()

    def failed(self, error: BaseException) -> None:
        """Note the error, and have the event loop raise it in the callers."""
        self.error = error
        self._over()

    def claim(self) -> bool:
        """Return whether the job still has to run. After True its calls can no longer be taken back."""
        return True

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the program."""
        raise NotImplementedError

    def results_of(self, given: Any) -> list[Any]:
        """Return the result of each call, made from the program's result."""
        raise NotImplementedError

    def _enqueue(self, executable: "Executable", args: tuple[Any, ...]) -> Any:
        times, span = self.times, self._span
        if times is None and span is None:
            return executable.enqueue(args, self._leaves)
        # The arguments are transferred before the program is enqueued, so that the transfer is measured apart from it.
        around = _untold if span is None else span.transfer
        placed = executable.transferred(args, around) if times is None else times.place(executable, args, around)
        given = executable(*placed)
        if span is not None:
            stacked = self.stacked
            span.dispatched(*((None, None) if stacked is None else (stacked.size, stacked.packed_tokens)))
        return given

    def _place(self, args: tuple[Any, ...], parameters: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the arguments, with each parameter replaced by its copy on the device."""
        placed = self._device.parameters
        return tuple([
            placed.place((self._jitted, index), arg, self._span) if index in parameters else arg
            for index, arg in enumerate(args)
        ])  # fmt: skip

    def _open_span(self) -> None:
        if waits := [call.wait for call in self.calls if call.wait is not None]:
            jitted = self._jitted
            items = len(self.calls) if self._is_batch else None
            self._span = JobSpan(jitted.name, jitted.placement.name, waits, items)

    def _is_wanted(self) -> bool:
        return not all(call.is_left for call in self.calls)

    def _goes_on(self, compiled: "Executable | BaseException") -> None:
        """Continue with the outcome of the compilation. A second `find` would count a hit besides the miss."""
        if self.times is not None:
            self.times.compile_ended()
        self._compiled = compiled
        self.submit()

    def _over(self) -> None:
        if self._is_over:  # the device's thread has died in this method, and reports the end of the job again
            return
        self._is_over = True
        if self._origin is not None:
            ORIGINS.over(self._origin, self.error)
        if self._span is not None:
            self._span.end(self.error, has_run=self.has_run)
        self._args = self._given = self._compiled = None
        self._leaves = []
        if self.times is not None:
            self.times.leaves()
        on_over, self._on_over = self._on_over, None
        if on_over is not None:
            self._device.mailbox.post(self._ended, on_over)

    def _ended(self, on_over: Callable[[Any], None]) -> None:
        """Report the end of the job to the profiles, then to the queue of its calls; on the event loop."""
        if self.times is not None:
            self.times.tell(
                self._jitted, self.stacked, [call.frame for call in self.calls], [call.sampler for call in self.calls]
            )
        on_over(self)


def _untold(size_bytes: int) -> AbstractContextManager[None]:
    return nullcontext()


class SingleJob(Job):
    """Runs a program for one call.

    Args:
        jitted: the function that it runs.
        device: the device that runs the program.
        call: the call.
        queue: the queue of the call. Its `ended` is called on the event loop when the job is over, or its `give` when
            the result is handed on.
        parameters: positions of the arguments that are parameters.
    """

    def __init__(
        self,
        jitted: JittedFunction,
        device: "EngineDevice",
        call: "DeviceCall",
        queue: "SingleCallQueue",
        parameters: tuple[int, ...] = (),
    ) -> None:
        super().__init__(jitted, device, [call], queue.ended)
        self._queue = queue
        self._call_args = call.args
        self._parameters = parameters
        self._returns_pending = call.returns_pending

    def begin(self) -> bool:
        """Return whether the caller still waits for the job; if not, the job is over."""
        call = self.calls[0]
        if call.wait is None and not call.is_left:  # nearly always
            return True
        return super().begin()

    def claim(self) -> bool:
        """Return False if the call was taken back; after True it cannot be taken back."""
        call = self.calls[0]
        return call._turn is None or call.begin()

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the call."""
        args, self._call_args = self._call_args, ()
        if self._jitted.donate_argnums:
            args = overwritable(args, self._jitted.donate_argnums)
        if self._parameters:
            args = self._place(args, self._parameters)
        if not self._returns_pending:
            return args
        # The caller continues before the program has run, and may write to a buffer that on a CPU is the argument.
        return tuple(map(owned, args))

    def hand_on(self, arrays: list[Any]) -> None:
        """Give the result to the caller before it is ready, if the caller accepts that.

        Args:
            arrays: the arrays that `dispatch` returned.
        """
        if self._returns_pending:
            call, post = self.calls[0], self._device.mailbox.post
            # With several devices, the queue has to know which of them is free.
            self.is_awaited = bool(self.times or self._span) or len(self._queue.replicas) > 1
            self._origin = Origin(call.label, call.leaves or self.inputs())
            ORIGINS.add(arrays, self._origin)
            if self.times is not None:
                self.times.leaves()
                post(self.times.came_back)
            if self.is_awaited:
                post(call.hand_on, self._given)
            else:
                self._on_over = None
                post(self._queue.give, call, self._given)

    def ready(self) -> None:
        """Give the caller its result."""
        if self._is_over or self.times is not None or self._span is not None:
            super().ready()
            return
        # Nearly always this shorter code runs: the work of `ready`, `results_of`, `_over` and `settle` for one result.
        # Without it and the short `begin`, a small call takes 1.07 times as long (40 pairs of processes).
        if self._origin is not None:
            ORIGINS.over(self._origin, None)
        if self._on_over is not None:
            self._device.mailbox.post(self._queue.give, self.calls[0], self._given)
        self._is_over, self._on_over, self._args, self._given, self._leaves = True, None, None, None, []

    def results_of(self, given: Any) -> list[Any]:
        """Return the program's result as the result of the only call."""
        return [given]


class BatchJob(Job):
    """Runs a vectorised program for several calls.

    Args:
        jitted: the function that it runs.
        device: the device that it runs on.
        calls: the calls, all of one group; `args` of each are tuples, or a `BatchItem`.
        on_over: called on the event loop with the job when the job is over.
        arguments: makes the arguments of the program from the batch items.
        size_of: returns how many rows, padding included, a batch of the given calls has.

    Attributes:
        lock: held while calls are added or removed, and when the job is closed.
        is_closed: whether the thread has begun with the job. No call is added to a closed job.
        held: the calls that the device counts for the job until the job is over; `calls` are the ones that it runs.
    """

    # Ownership: until the job is closed, the event loop replaces `calls` and `held`, which are one list, under `lock`.
    # The dispatch thread closes the job, under `lock` too. From then on `held` does not change, and that thread alone
    # removes calls from `calls`: calls whose callers have left, and calls whose arguments have failed.

    _is_batch = True

    def __init__(
        self,
        jitted: JittedFunction,
        device: "EngineDevice",
        calls: "list[DeviceCall]",
        on_over: "Callable[[BatchJob], None]",
        arguments: "Arguments",
        size_of: "Callable[[list[DeviceCall]], int]",
    ) -> None:
        super().__init__(jitted, device, calls, on_over)
        self._arguments = arguments
        self._size_of = size_of
        self._size = 0  # known once the job is closed
        self.held = calls
        self.lock = threading.Lock()
        self.is_closed = False

    def change(self, left: "list[DeviceCall]", added: "list[DeviceCall]") -> None:
        """Remove and add calls of a job that is not closed. Called under `lock`.

        Args:
            left: calls whose callers have left.
            added: further calls.
        """
        self.calls = self.held = [call for call in self.calls if call not in left] + added
        # In a profile, each call of a job has the mean of the times that the calls took to reach the thread.
        self._submitted_at += (perf_counter() - self._submitted_at) * len(added) / len(self.calls)

    def begin(self) -> bool:
        """Close the job, without the calls whose callers have left; return whether any caller still waits."""
        with self.lock:
            is_first, self.is_closed = not self.is_closed, True
        if is_first:  # a job whose program had to be compiled begins again, with the same rows
            left = [call for call in self.calls if call.is_left]
            if len(left) < len(self.calls):  # otherwise the job is skipped
                if left:
                    self.calls = [call for call in self.calls if call not in left]
                    for call in left:
                        self._device.mailbox.post(call.drop)
                self._size = self._size_of(self.calls)
        return super().begin()

    def arguments(self) -> tuple[Any, ...]:
        """Stack the arguments of the calls."""
        arguments = self._arguments
        args, self.stacked = arguments.stack(self._items(), self.calls[0].group, self._size)
        return self._place(args, arguments.parameters) if arguments.parameters else args

    def _items(self) -> list[tuple[Any, ...]]:
        """Return the items to be stacked. If the computation of an item's array has failed, only that call fails."""
        calls = self.calls
        given = [call.args for call in calls]
        if all(item.is_on_host for item in given if isinstance(item, BatchItem)):  # nearly always
            return given
        items: list[tuple[Any, ...]] = []
        self.calls = []
        failed: BaseException | None = None
        began = perf_counter()
        for call, args in zip(calls, given, strict=True):
            item = self._arguments.as_item(args, call.group)
            try:
                items.append(on_host(item))
                self.calls.append(call)
            except (RuntimeError, ValueError) as error:  # as JAX raises the error of the computation of an argument
                failed = ORIGINS.cause_of(error.with_traceback(None), item.arrays)
                self._device.mailbox.post(call.fail, failed)
        if self.times is not None:
            self.times.fetched(began)
        if not items:
            assert failed is not None
            try:
                raise failed
            finally:
                del failed  # break the cycle of error, traceback and frame
        return items

    def results_of(self, given: Any) -> list[Any]:
        """Split the program's result into the rows of the calls."""
        assert self.stacked is not None
        if self.times is not None:
            given = self.times.fetch(given)
        return split(given, self.stacked, self._arguments.name)
