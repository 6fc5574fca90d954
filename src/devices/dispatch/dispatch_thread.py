"""Dispatch: the one thread from which everything is enqueued on a device or mesh.

One thread keeps the order of what is enqueued; what meshes that overlap have to keep besides is in `enqueue_order`.
Nothing of this happens on an event loop: a tiny kernel runs inline in the dispatch, and the 33rd computation in flight
on a CPU blocks it. A second thread waits for the oldest computation, so that the transfers of the next one begin while
the present one runs, also when the next one comes late.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol, TypeAlias

from ..._errors import ActorRestarted
from ...actors.threads import before_interpreter_exit
from ...telemetry import logs, metrics, names
from ...telemetry.metrics import Reading, series
from ..jax_types import are_ready
from .failed_arrays import ORIGINS

# Computations in flight. Two overlap the transfer of one with the computation of the other; more only hide how long a
# single dispatch takes. It also bounds what results that nobody has seen may hold.
DEFAULT_DEPTH = 4


class Job(Protocol):
    """Something to enqueue; its methods are called on the dispatch thread, which must not be held up."""

    def begin(self) -> bool:
        """Return whether anybody still wants it."""
        ...

    def dispatch(self) -> "list[Any] | None":
        """Enqueue it; returns the arrays that it will give. None: not yet, it will be submitted again, or never."""
        ...

    def inputs(self) -> Iterable[Any]:
        """The arrays that it reads."""
        ...

    def wait(self, arrays: list[Any], busy_until: float) -> None:
        """Block until these are ready, which `dispatch` gave.

        Args:
            arrays: what it gives.
            busy_until: when what was enqueued before it was ready, in seconds of `time.perf_counter`.

        Raises:
            JaxRuntimeError: one failed.
        """
        ...

    def ready(self) -> None:
        """What it gives is ready."""
        ...

    def failed(self, error: BaseException) -> None:
        """It could not be enqueued, or failed."""
        ...


_InFlight: TypeAlias = tuple[Job, list[Any], int, float]  # the number of restarts before it, and when it began


class DispatchThread:
    """Enqueues jobs in the order in which they come, and says when each is ready.

    Args:
        name: of the device or mesh.
        check: called first, on the thread; what it raises is what every job fails with.
        depth: the most computations in flight.

    Attributes:
        restarts: how often one of its two threads has died and begun anew.
    """

    def __init__(self, name: str, check: Callable[[], None], depth: int = DEFAULT_DEPTH) -> None:
        self._name = name
        self._check = check
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._in_flight: SimpleQueue[_InFlight | None] = SimpleQueue()
        # One token for each computation that may be in flight. A semaphore is ten times slower: it is Python code.
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        # Each is written by one thread only.
        self._handed_over = 0
        self._waited_for = 0
        self.restarts = 0
        # Of the thread that waits while anything is in flight, else of the one that dispatches.
        self._busy_seconds = 0.0
        self._busy_until = 0.0
        self._on_ended: list[Callable[[], object]] = []
        # No daemons: a daemon thread inside JAX while the interpreter ends aborts the process.
        self._threads = (
            threading.Thread(target=self._dispatch_all, name=f"penstock-device-{name}", daemon=False),
            threading.Thread(target=self._wait_for_all, name=f"penstock-device-{name}-wait", daemon=False),
        )
        for thread in self._threads:
            thread.start()
        _running.add(self)
        metrics.opened(self)

    def counters(self) -> Iterable[Reading]:
        """Return what it has counted, for metrics."""
        of = names.DEVICE, self._name
        return [
            (series(names.METRIC_DEVICE_BUSY_TIME, of), self._busy_seconds, None),
            (series(names.METRIC_DEVICE_RESTARTS, of), self.restarts, None),
        ]

    def levels(self) -> Iterable[Reading]:
        """Return nothing: computations in flight are too short to be seen."""
        return ()

    def submit(self, job: Job) -> None:
        """Enqueue a job after those that were submitted before; from any thread."""
        self._jobs.put(job)

    def end(self, on_ended: Callable[[], object] | None = None) -> None:
        """Do what was submitted, then end.

        Args:
            on_ended: called as the last thing that happens, on a thread that has nothing left to do but to return.
        """
        if on_ended is not None:
            self._on_ended.append(on_ended)
        self._jobs.put(None)

    def join(self) -> None:
        """Block until both threads have ended."""
        for thread in self._threads:
            thread.join()

    def _dispatch_all(self) -> None:
        begin: Callable[[Job], None] = self._dispatch
        try:
            self._check()
        except Exception as error:  # noqa: BLE001 - a device that cannot be used is what every caller has to know
            begin = _failing(error)
        while not self._ran_to_end(lambda: self._take_jobs(begin)):
            pass
        self._in_flight.put(None)

    def _take_jobs(self, begin: "Callable[[Job], None]") -> None:
        while (job := self._jobs.get()) is not None:
            try:
                begin(job)
            except BaseException as error:
                self._answer_for(job, error)
                raise
            del job  # a thread that waits for the next job must not hold the last one

    def _dispatch(self, job: Job) -> None:
        self._room.get()
        began = perf_counter()
        arrays: list[Any] | None = None
        is_handed_over = False
        try:
            try:
                if job.begin():
                    arrays = job.dispatch()
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the caller, not to this thread
                job.failed(ORIGINS.cause_of(error, job.inputs()))
            if arrays is None:
                return
            if self._handed_over == self._waited_for and are_ready(arrays):  # what is small has run inline
                self._wait(job, arrays, self.restarts, began)
                return
            self._handed_over += 1
            self._in_flight.put((job, arrays, self.restarts, began))
            is_handed_over = True
        finally:
            if not is_handed_over:
                self._room.put(None)

    def _wait_for_all(self) -> None:
        while not self._ran_to_end(self._take_in_flight):
            pass
        self._threads[0].join()
        _running.discard(self)
        metrics.closed(self)
        for callback in self._on_ended:
            callback()

    def _take_in_flight(self) -> None:
        while (found := self._in_flight.get()) is not None:
            try:
                self._wait(*found)
            except BaseException as error:
                self._answer_for(found[0], error)
                raise
            finally:
                self._waited_for += 1
                self._room.put(None)
            del found  # as above

    def _wait(self, job: Job, arrays: list[Any], restarts: int, began: float) -> None:
        try:
            try:
                job.wait(arrays, self._busy_until)
            finally:
                self._was_busy(began)
        except BaseException as error:  # noqa: BLE001 - as above
            # Its traceback is that of this wait: it would say nothing, and hold the arrays.
            job.failed(ORIGINS.cause_of(error.with_traceback(None), job.inputs()))
            return
        if restarts == self.restarts:
            job.ready()
        else:
            job.failed(self._restarted())

    def _was_busy(self, began: float) -> None:
        """Count the time of a computation, as far as none before it counted it."""
        now = perf_counter()
        self._busy_seconds += now - max(began, self._busy_until)
        self._busy_until = now

    def _answer_for(self, job: Job, error: BaseException) -> None:
        """Have a job fail in whose course a thread dies: nobody else would tell its callers."""
        with suppress(Exception):  # that may be what has just failed
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


def _failing(error: Exception) -> "Callable[[Job], None]":
    def fail(job: Job) -> None:
        job.failed(type(error)(*error.args))  # one object raised for many callers would collect all of their notes

    return fail


_running: set[DispatchThread] = set()


def _end_all() -> None:
    threads = list(_running)
    for thread in threads:
        thread.end()
    for thread in threads:
        thread.join()


before_interpreter_exit(_end_all)
