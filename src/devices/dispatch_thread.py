"""The thread that enqueues every computation of a device or mesh, and the search for the origin of an error."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Protocol, TypeAlias

from .._errors import ActorRestarted, copy_of
from ..actors.frame import blame
from ..actors.threads import ThreadOwner
from ..telemetry import logs, metrics, names
from ..telemetry.metrics import Reading, series
from .self_check import self_check
from .shardings import Placement
from .untyped_jax import jax


def is_ready(array: Any) -> bool:
    """Return whether the computation of an array has ended, also with an error."""
    if not hasattr(array, "is_ready"):  # typed random keys have all methods of an array but this one
        array = jax.random.key_data(array)
    return bool(array.is_ready())


def are_ready(arrays: Iterable[Any]) -> bool:
    """Return whether the computations of arrays have ended, also with an error; what was donated counts as ended."""
    for array in arrays:
        try:
            if not (array.is_deleted() or is_ready(array)):
                return False
        except (RuntimeError, ValueError):
            if not array.is_deleted():  # else it was donated after the check above
                raise
    return True


def wait_until_ready(arrays: Iterable[Any]) -> None:
    """Block until the computations of arrays have ended; arrays that were donated meanwhile are skipped.

    Raises:
        JaxRuntimeError: one failed.
    """
    left = [array for array in arrays if not array.is_deleted()]
    try:
        if len(left) == 1:
            left[0].block_until_ready()
        else:
            jax.block_until_ready(left)  # in one call, which gives the interpreter up once
    except (RuntimeError, ValueError):
        if not any(array.is_deleted() for array in left):
            raise
        for array in left:
            try:
                array.block_until_ready()
            except (RuntimeError, ValueError):
                if not array.is_deleted():
                    raise


# Origins: which computation an asynchronous error comes from.
#
# A result that is handed on before it is ready may turn out to be an error later, and then each computation that reads
# it fails with that error, too: on any device, and perhaps before the first one is known to have failed. The error
# belongs to the first.


class Origin:
    """A computation whose result is handed on before it is ready.

    Args:
        label: label of the node in its graph; None if the computation does not come from a node.
        inputs: the arrays that it reads.
    """

    __slots__ = ("_error", "_inputs", "_label")

    def __init__(self, label: str | None, inputs: Iterable[Any]) -> None:
        self._label = label
        self._inputs = tuple(inputs)
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the computation has ended with an error."""
        return self._error is not None

    def over(self, error: BaseException | None) -> None:
        """Note that the computation has ended, with an error or without one, and forget its inputs."""
        if error is not None:
            self._error = self._blamed(copy_of(error).with_traceback(None))  # a traceback would hold the arrays
        self._inputs = ()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error of the computation that failed first, where this one has failed with `error`."""
        inputs = self._inputs  # before the error: `over` sets that first
        if self._error is not None:
            return copy_of(self._error)
        return self._blamed(ORIGINS.cause_of(error, inputs))

    def taken_over(self, error: BaseException) -> None:
        """Add a note to an error: the result was donated, so it cannot be asked whether it is the cause."""
        error.add_note(f"it computed in the memory of the result of node {self._label!r}, which may be what has failed")

    def _blamed(self, error: BaseException) -> BaseException:
        if self._label is not None:
            blame(error, self._label)
        return error


class Origins:
    """Maps arrays that were handed on before they were ready to their computations, until these have succeeded."""

    def __init__(self) -> None:
        self._results: dict[Origin, list[weakref.ref[Any]]] = {}  # arrays are not hashable

    def add(self, arrays: Iterable[Any], origin: Origin) -> None:
        """Note that arrays are the results of a computation."""
        self._results[origin] = [*map(weakref.ref, arrays)]

    def over(self, origin: Origin, error: BaseException | None) -> None:
        """Note that a computation has ended, with an error or without one."""
        origin.over(error)
        arrays = [array for reference in self._results.pop(origin, ()) if (array := reference()) is not None]
        if error is None:
            if not all(array.is_deleted() for array in arrays):
                return
            arrays = arrays[:1]  # all were donated, so none can be asked how it ended: one of them stands for all
        if arrays:
            self._results[origin] = [weakref.ref(array, self._forget(origin)) for array in arrays]

    def cause_of(self, error: BaseException, inputs: Iterable[Any]) -> BaseException:
        """Return the error of the computation that failed first; `error` itself if no input has failed.

        Args:
            error: the error of a computation.
            inputs: the arrays that the computation read.
        """
        for array in inputs if self._results else ():
            origin = self._origin_of(array)
            if origin is None:
                continue
            if array.is_deleted():
                origin.taken_over(error)
            elif (failure := _failure_of(array)) is not None:
                return origin.cause_of(failure)
        return error

    def _origin_of(self, array: Any) -> Origin | None:
        found = (
            origin for origin, results in list(self._results.items()) if any(one() is array for one in results)
        )  # fmt: skip
        return next(found, None)

    def _forget(self, origin: Origin) -> "Callable[[weakref.ref[Any]], None]":
        def forget(gone: "weakref.ref[Any]") -> None:
            results = [one for one in self._results.get(origin, ()) if one is not gone]
            if results:
                self._results[origin] = results
            else:
                self._results.pop(origin, None)

        return forget


def _failure_of(array: Any) -> BaseException | None:
    if not is_ready(array):
        return None
    try:
        array.block_until_ready()
    except Exception as error:  # noqa: BLE001 - whatever the computation of it has raised
        return error.with_traceback(None)
    return None


# One for the process: results go from device to device.
ORIGINS = Origins()


# Dispatch: the one thread that enqueues every computation of a device or mesh.
#
# One thread keeps the order of what is enqueued; what meshes that overlap have to keep besides is in `EnqueueOrder`.
# Nothing of this happens on an event loop: a tiny kernel runs inline in the dispatch, and the 33rd computation in
# flight on a CPU blocks it.
#
# A second thread waits for the oldest computation, so that the transfers of the next one begin while the present one
# runs, also when the next one comes late. Where computations are short, the thread waits itself as soon as enough is in
# flight: to hand one over costs a fifth of a kernel of 0.2 ms, on two cores.

# Computations in flight. Two overlap the transfer of one with the computation of the other; four leave room for items
# that come in bursts. More keep the device busy while this thread is kept from enqueueing, because an event loop has
# the interpreter: for 5 ms, Python's default switch interval. What is set in this process is not asked: the depth would
# depend on whether a device is opened before or inside of `engine.tuned_for_serving`. Not more than that takes: what is
# in flight cannot be cancelled, and holds results that no caller has seen.
LEAD_SECONDS = 0.005
MIN_DEPTH = 4
MAX_DEPTH = 16  # on a CPU, enqueueing the 33rd blocks
_RECENT = 8  # computations that say how long one takes

# Results that were handed on are not waited for. Still, one of so many such computations is waited for, so that it is
# known how long they take. Not each, because to hand one to the second thread costs as much as a small computation.
_TIMED_EVERY = 16


class Dispatchable(Protocol):
    """A job that a `DispatchThread` enqueues. Its methods are called on that thread, and must not hold it up."""

    def begin(self) -> bool:
        """Return whether a caller still waits for the job."""
        ...

    def dispatch(self) -> "list[Any] | None":
        """Enqueue the job and return the arrays of its result; None if it is submitted again later, or never runs."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits until the job's arrays are ready, or a queue has to know when they are."""
        ...

    def hand_on(self, arrays: list[Any]) -> None:
        """Give the result to the caller before it is ready, if the caller accepts that.

        Args:
            arrays: what `dispatch` returned.
        """
        ...

    def inputs(self) -> Iterable[Any]:
        """Return the arrays that the job reads."""
        ...

    def wait(self, arrays: list[Any], busy_until: float) -> None:
        """Block until the arrays that `dispatch` returned are ready.

        Args:
            arrays: what `dispatch` returned.
            busy_until: when the computation that was enqueued before it was ready, in seconds of `time.perf_counter`.

        Raises:
            JaxRuntimeError: the computation failed.
        """
        ...

    def ready(self) -> None:
        """Take note that the job's arrays are ready."""
        ...

    def failed(self, error: BaseException) -> None:
        """Take note that the job could not be enqueued, or has failed."""
        ...


_InFlight: TypeAlias = tuple[Dispatchable, list[Any], int, float]  # the number of restarts before it, and when it began


class DispatchThread(ThreadOwner):
    """Enqueues jobs in the order in which they come, and says when each is ready.

    Args:
        name: name of the device or mesh.
        check: called first, on the thread; if it raises, every job fails with that error.

    Attributes:
        restarts: how often one of its two threads has died and begun anew.
    """

    def __init__(self, name: str, check: Callable[[], None]) -> None:
        self._name = name
        self._check = check
        self._jobs: SimpleQueue[Dispatchable | None] = SimpleQueue()
        self._in_flight: deque[_InFlight] = deque()  # of those that the second thread has not
        self._lent: SimpleQueue[_InFlight | None] = SimpleQueue()
        self._returned: SimpleQueue[None] = SimpleQueue()
        self._lent_out = 0  # how many the second thread has, as far as the first one knows
        self.restarts = 0
        # Of the second thread while it has any computation, else of the first one.
        self._busy_seconds = 0.0
        self._busy_until = 0.0
        self._usual_seconds = LEAD_SECONDS / MIN_DEPTH  # of a computation, recently
        self._came_alone = 0  # jobs in a row: nothing was in flight, and nothing came while they were
        self._timed_seconds = 0.0  # of those whose end was seen
        self._untimed = _TIMED_EVERY  # computations since, whose end was not
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

    def levels(self) -> Iterable[Reading]:
        """Return nothing: computations in flight are too short to be sampled."""
        return ()

    def submit(self, job: Dispatchable) -> None:
        """Enqueue a job after those that were submitted before; from any thread."""
        self._jobs.put(job)

    def end(self, on_ended: Callable[[], object] | None = None) -> None:
        """Run the jobs that were submitted before, then end.

        Args:
            on_ended: called as the last thing that happens, on a thread that has nothing left to do but to return.
        """
        if on_ended is not None:
            self._on_ended.append(on_ended)
        self._jobs.put(None)

    def abandon(self) -> None:
        """End; see `ThreadOwner`."""
        self.end()

    def join(self) -> None:
        """Block until both threads have ended."""
        for thread in self._threads:
            thread.join()

    def begin_without_threads(self) -> None:
        """Have no threads in a process that was forked: they run in its parent."""
        self._threads = ()

    def _dispatch_all(self) -> None:
        begin: Callable[[Dispatchable], None] = self._dispatch
        try:
            self._check()
        except Exception as error:  # noqa: BLE001 - every caller gets the reason why the device is unusable
            begin = _failing(error)
        while not self._ran_to_end(lambda: self._take_jobs(begin)):
            pass
        while not self._ran_to_end(self._wait_for_all):
            pass
        self._lent.put(None)

    def _take_jobs(self, begin: "Callable[[Dispatchable], None]") -> None:
        jobs, in_flight = self._jobs, self._in_flight
        while True:
            depth, is_idle = self._depth(), jobs.empty()
            # Where computations are short, as a rule, a job that comes late may as well wait for one of several; and
            # for the only one, if none has come late for some time.
            waits_itself = is_idle and depth > MIN_DEPTH and len(in_flight) > (self._came_alone < _RECENT)
            if waits_itself and in_flight[0][0].is_awaited:
                self._wait_for_oldest()
                self._came_alone *= jobs.empty()
                continue
            if len(in_flight) + self._lent_out >= depth:
                self._wait_for_oldest()
                continue
            job = self._next_when_idle() if is_idle else jobs.get()
            if job is None:
                return
            while self._lent_out and not self._returned.empty():
                self._take_back()
            self._came_alone = 0 if in_flight or self._lent_out else self._came_alone + 1
            try:
                begin(job)
            except BaseException as error:
                self._answer_for(job, error)
                raise
            del job  # a thread that waits for the next job must not hold the last one

    def _next_when_idle(self) -> Dispatchable | None:
        """Wait for the next job, while the second thread waits for what is in flight."""
        # If no caller waits for the computations in flight, and the next job comes soon, as in a loop of training
        # steps, they are looked at then: that is cheaper than to hand them to the second thread.
        if self._in_flight and self._untimed < _TIMED_EVERY and not any(one[0].is_awaited for one in self._in_flight):
            try:
                return self._jobs.get(timeout=LEAD_SECONDS)
            except Empty:
                pass
        self._lend()
        return self._jobs.get()

    def _dispatch(self, job: Dispatchable) -> None:
        began = perf_counter()
        try:
            arrays = job.dispatch() if job.begin() else None
        except BaseException as error:  # noqa: BLE001 - every error is the caller's, not this thread's
            job.failed(ORIGINS.cause_of(error, job.inputs()))
            return
        if arrays is None:
            return
        if not self._in_flight and not self._lent_out and are_ready(arrays):  # a small computation has run inline
            self._wait(job, arrays, self.restarts, began, is_late=True)
            return
        self._in_flight.append((job, arrays, self.restarts, began))
        self._take_ended()
        # Last, as the event loop wakes for it, and wants the interpreter.
        job.hand_on(arrays)

    def _take_ended(self) -> None:
        """Finish the jobs in flight that have ended, and for which no caller waits."""
        in_flight = self._in_flight
        while len(in_flight) > 1 and not self._lent_out and not in_flight[0][0].is_awaited:
            if not are_ready(in_flight[0][1]):
                return
            self._untimed += 1
            self._finish(in_flight.popleft(), is_timed=False)

    def _depth(self) -> int:
        """Return how many computations may be in flight: as many as last for the lead."""
        if self._usual_seconds * MAX_DEPTH <= LEAD_SECONDS:
            return MAX_DEPTH
        return max(MIN_DEPTH, int(LEAD_SECONDS / self._usual_seconds))

    def _wait_for_oldest(self) -> None:
        if self._lent_out:
            self._take_back()
        else:
            self._finish(self._in_flight.popleft())

    def _wait_for_all(self) -> None:
        while self._in_flight or self._lent_out:
            self._wait_for_oldest()

    def _lend(self) -> None:
        """Have the second thread wait for the jobs in flight, after those that it has."""
        if self._in_flight:
            self._untimed = 0
        while self._in_flight:
            self._lent.put(self._in_flight[0])
            self._lent_out += 1
            self._in_flight.popleft()

    def _take_back(self) -> None:
        """Wait until the second thread is done with one."""
        self._returned.get()
        self._lent_out -= 1

    def _wait_for_lent(self) -> None:
        while not self._ran_to_end(self._take_lent):
            pass
        self._threads[0].join()
        metrics.closed(self)
        for callback in self._on_ended:
            callback()

    def _take_lent(self) -> None:
        while (found := self._lent.get()) is not None:
            try:
                self._finish(found)
            finally:
                self._returned.put(None)
            del found  # a thread that waits for the next computation must not hold the last one

    def _finish(self, found: _InFlight, *, is_timed: bool = True) -> None:
        try:
            self._wait(*found, is_late=not is_timed or are_ready(found[1]), is_timed=is_timed)
        except BaseException as error:
            self._answer_for(found[0], error)
            raise

    def _wait(
        self, job: Dispatchable, arrays: list[Any], restarts: int, began: float, *, is_late: bool, is_timed: bool = True
    ) -> None:
        try:
            try:
                job.wait(arrays, self._busy_until)
            finally:
                self._was_busy(began, is_late=is_late, is_timed=is_timed)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller, as in `_dispatch`
            # Its traceback is that of this wait: it would say nothing, and hold the arrays.
            job.failed(ORIGINS.cause_of(error.with_traceback(None), job.inputs()))
            return
        if restarts == self.restarts:
            job.ready()
        else:
            job.failed(self._restarted())

    def _was_busy(self, began: float, *, is_late: bool, is_timed: bool) -> None:
        """Count the time of a computation, without the part in which an earlier one was computed."""
        now = perf_counter()
        seconds = now - max(began, self._busy_until)
        self._busy_seconds += seconds if is_timed else min(seconds, self._timed_seconds)
        self._busy_until = now
        # If it had ended before this thread looked, its time is unknown, and more should have been in flight.
        self._usual_seconds += ((0.0 if is_late else seconds) - self._usual_seconds) / _RECENT
        if is_timed:
            self._timed_seconds = seconds

    def _answer_for(self, job: Dispatchable, error: BaseException) -> None:
        """Fail the job during which a thread has died: nothing else would release its callers."""
        with suppress(Exception):  # the call of `failed` may be the one that has just raised
            job.failed(self._restarted(error))

    def _ran_to_end(self, run: Callable[[], None]) -> bool:
        """Run the loop of a thread; returns False if it has died, and has to begin anew.

        What was submitted stays in its queue. What was under way ends with `ActorRestarted`: nothing that was done on
        the device since is known to be as it should. Each death costs at least one attempt, so there is an end to it.
        """
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - nothing is expected to arrive here
            self.restarts += 1
            logs.warning("device.restarted", device=self._name, restarts=self.restarts, error=repr(error))
            return False
        return True

    def _restarted(self, cause: BaseException | None = None) -> ActorRestarted:
        after = "" if cause is None else f", after: {cause!r}"
        error = ActorRestarted(f"the thread of device {self._name} was restarted while this call was on its way{after}")
        error.__cause__ = cause
        return error


def _failing(error: Exception) -> "Callable[[Dispatchable], None]":
    def fail(job: Dispatchable) -> None:
        job.failed(copy_of(error).with_traceback(None))

    return fail


class DispatchThreads:
    """Shares one dispatch thread per device or mesh between all Engines and event loops of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[Placement, tuple[DispatchThread, int]] = {}

    def acquire(self, placement: Placement) -> DispatchThread:
        """Return the thread of a device or mesh; it goes on until `release`."""
        with self._lock:
            thread, leases = self._threads.get(placement) or (self._start(placement), 0)
            self._threads[placement] = thread, leases + 1
            return thread

    def release(self, placement: Placement, on_ended: Callable[[], object]) -> None:
        """Give a lease back; the last one ends the thread, once it has done what was submitted.

        Args:
            placement: the device or mesh.
            on_ended: called on some thread once nothing lives on because of this lease.
        """
        with self._lock:
            thread, leases = self._threads.pop(placement)
            if leases > 1:
                self._threads[placement] = thread, leases - 1
        if leases > 1:
            on_ended()
        else:
            thread.end(on_ended)

    def _start(self, placement: Placement) -> DispatchThread:
        return DispatchThread(placement.name, lambda: self_check().verify(placement.devices[0]))


# One for the process, as the devices are.
THREADS = DispatchThreads()
