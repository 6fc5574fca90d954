"""Batch line: runs the batches of one node on a device, and finds out what to do with one that fails."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import DeviceError
from ...actors.batch import Batch
from ..dispatch.device_call import DeviceCall
from ..dispatch.device_queue import Lane
from ..dispatch.memory import is_out_of_memory
from .batch_job import BatchItem, BatchJob, BatchLayout
from .batch_statistics import BatchLog
from .bisection import Bisection
from .size_limits import SizeLimits

if TYPE_CHECKING:
    from ..dispatch.station import Station
    from ..programs.compiling import Program


class BatchLine:
    """The batches of one node on one device.

    Args:
        station: the device.
        program: the vectorised program.
        layout: how calls become its arguments.
        batch: how many run together.
        prefetch: the most batches that the device holds: one runs while the next is transferred.
        log: counts them.
        repeats: whether a batch that failed may run again, in parts.

    Attributes:
        lane: what waits.
        limits: how large its batches may be.
    """

    def __init__(
        self,
        station: "Station",
        program: "Program",
        layout: BatchLayout,
        batch: Batch,
        prefetch: int,
        log: BatchLog,
        *,
        repeats: bool,
    ) -> None:
        self.lane = Lane(layout.name, station.queue, self._start, batch, prefetch)
        self.limits = SizeLimits(layout.sizes, self.lane.largest)
        self._log = log
        self._station = station
        self._program = program
        self._layout = layout
        self._repeats = repeats

    def _start(self, calls: list[DeviceCall]) -> None:
        is_try = self.limits.begins(calls[0].group, len(calls))
        self.submit(calls, partial(self._ended, partial(self.lane.queue.returned, self.lane, calls), is_try))

    def submit(self, calls: list[DeviceCall], on_over: Callable[[BatchJob], None], size: int | None = None) -> None:
        """Have the device run some calls as a batch of so many rows."""

        def over(job: BatchJob) -> None:
            if job.stacked is not None and job.has_run:
                self._log.add(job.stacked)
            on_over(job)

        BatchJob(self._program, self._station.route, calls, over, self._layout, size).submit()

    def _ended(self, then: Callable[[], None], is_try: bool, job: BatchJob) -> None:
        if job.error is not None and job.has_run and self._repeats and isinstance(job.error, Exception):
            self.try_again(job, then)
            return
        if job.results and job.stacked is not None:
            self.limits.fitted(job.calls[0].group, job.stacked.size, is_try=is_try)
        try:
            job.settle()
        finally:
            then()

    def try_again(self, job: BatchJob, then: Callable[[], None]) -> None:
        """Run a batch that failed in parts, until each of its calls has its result or an error of its own."""
        assert job.error is not None
        if is_out_of_memory(job.error):
            _Halving(self, job, then).go_on()
        else:
            _Search(self, job, then).go_on()

    def exceeded(self, job: BatchJob) -> bool:
        """Note that a batch did not fit the memory of the device; returns whether a smaller one may."""
        assert job.stacked is not None
        return self.limits.exceeded(job.calls[0].group, job.stacked.size)

    @property
    def device(self) -> str:
        """Its name, for errors."""
        return self._station.placement.name

    def describe(self, call: DeviceCall) -> str:
        """Return what a call holds, for an error."""
        item: BatchItem = call.args[0]
        return self._layout.stacker.describe(item.item)


class _Search:
    """Runs a batch that failed again in parts, until the calls that fail are alone."""

    def __init__(self, owner: BatchLine, job: BatchJob, then: Callable[[], None]) -> None:
        error = job.take_error()
        assert isinstance(error, Exception)
        self._owner = owner
        self._then = then
        self._calls = job.calls
        self._size = None if job.stacked is None else job.stacked.size
        self._bisection = Bisection(len(job.calls), error)
        if len(job.calls) == 1:
            job.calls[0].fail(error)

    def go_on(self) -> None:
        """Run the next part; at the end, do what comes then."""
        positions = self._bisection.next_batch()
        if positions:
            # Of the same size, whose program is there.
            self._owner.submit([self._calls[position] for position in positions], self._ended, self._size)
        else:
            self._then()

    def _ended(self, job: BatchJob) -> None:
        if job.error is not None and job.has_run and is_out_of_memory(job.error):
            self._bisection.succeeded()  # its calls are taken care of
            self._owner.try_again(job, self.go_on)
            return
        if isinstance(job.error, Exception):
            self._bisection.failed(job.error)
            if len(job.calls) == 1:
                job.settle()
            else:
                job.take_error()
        else:
            self._bisection.succeeded()
            job.settle()
        self.go_on()


class _Halving:
    """Runs a batch that did not fit the memory of the device again in parts that are smaller."""

    def __init__(self, owner: BatchLine, job: BatchJob, then: Callable[[], None]) -> None:
        self._owner = owner
        self._then = then
        self._group = job.calls[0].group
        self._left: list[DeviceCall] = []
        self._too_large(job)

    def go_on(self) -> None:
        """Run the next part; at the end, do what comes then."""
        owner = self._owner
        if self._left:
            size = owner.limits.size(self._group) or len(self._left)
            part, self._left = self._left[:size], self._left[size:]
            owner.submit(part, self._ended)
        else:
            self._then()

    def _ended(self, job: BatchJob) -> None:
        if job.error is not None and is_out_of_memory(job.error):
            self._too_large(job)
        elif isinstance(job.error, Exception) and job.has_run:
            self._owner.try_again(job, self.go_on)
            return
        else:
            job.settle()
        self.go_on()

    def _too_large(self, job: BatchJob) -> None:
        cause = job.take_error()
        if self._owner.exceeded(job):
            self._left = [*job.calls, *self._left]
            return
        for call in job.calls:
            error = DeviceError(
                f"one item of node {self._owner.lane.name!r} does not fit the memory of "
                f"{self._owner.device}: {self._owner.describe(call)}"
            )
            error.__cause__ = cause
            call.fail(error)
