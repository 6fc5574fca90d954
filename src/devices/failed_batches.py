"""Batches that failed, run again in parts.

Where memory was short, the parts are smaller; else they are halved until the items that fail are alone. All of this
happens on the event loop.
"""

from collections.abc import Callable
from functools import partial

from .._errors import DeviceError
from .device_errors import is_out_of_memory
from .dispatch import BatchJob
from .engine_device import BatchCallQueue, DeviceCall


def in_parts(queue: BatchCallQueue, job: BatchJob, then: Callable[[], None]) -> None:
    """Run a batch that failed in parts, until each of its calls has its result or an error of its own.

    Args:
        queue: runs them.
        job: the batch that failed.
        then: called after the last part.
    """
    assert job.error is not None
    if is_out_of_memory(job.error):
        _Halving(queue, job, then).go_on()
    else:
        _Search(queue, job, then).go_on()


class _Search:
    """Runs a batch that failed again in parts, until the calls that fail are alone."""

    def __init__(self, queue: BatchCallQueue, job: BatchJob, then: Callable[[], None]) -> None:
        error = job.take_error()
        assert isinstance(error, Exception)
        self._queue = queue
        self._then = then
        self._calls = job.calls
        self._size = None if job.stacked is None else job.stacked.size
        self._bisection = Bisection(len(job.calls), error)
        if len(job.calls) == 1:
            job.calls[0].fail(error)

    def go_on(self) -> None:
        """Run the next part; after the last one, call `then`."""
        positions = self._bisection.next_batch()
        if positions:
            # Of the same size, whose program is there.
            calls = [self._calls[position] for position in positions]
            self._queue.run_batch(calls, partial(self._ended, len(calls) == 1), self._size)
        else:
            self._then()

    def _ended(self, is_alone: bool, job: BatchJob) -> None:
        if job.error is not None and job.has_run and is_out_of_memory(job.error):
            self._bisection.succeeded()  # its calls are taken care of
            in_parts(self._queue, job, self.go_on)
            return
        if isinstance(job.error, Exception):
            self._bisection.failed(job.error)
            if is_alone:
                job.settle()
            else:
                job.take_error()
        else:
            self._bisection.succeeded()
            job.settle()
        self.go_on()


class _Halving:
    """Runs a batch that did not fit the memory of the device again in parts that are smaller."""

    def __init__(self, queue: BatchCallQueue, job: BatchJob, then: Callable[[], None]) -> None:
        self._queue = queue
        self._then = then
        self._group = job.calls[0].group
        self._left: list[DeviceCall] = []
        self._too_large(job)

    def go_on(self) -> None:
        """Run the next part; after the last one, call `then`."""
        queue = self._queue
        if self._left:
            size = queue.limits.size(self._group)
            size = len(self._left) if size is None else queue.first(self._left, size)
            part, self._left = self._left[:size], self._left[size:]
            queue.run_batch(part, self._ended)
        else:
            self._then()

    def _ended(self, job: BatchJob) -> None:
        if job.error is not None and is_out_of_memory(job.error):
            self._too_large(job)
        elif isinstance(job.error, Exception) and job.has_run:
            in_parts(self._queue, job, self.go_on)
            return
        else:
            job.settle()
        self.go_on()

    def _too_large(self, job: BatchJob) -> None:
        cause = job.take_error()
        what = "item" if self._queue.packed is None else "row"
        if self._queue.exceeded(job):
            self._left = [*job.calls, *self._left]
            return
        for call in job.calls:
            error = DeviceError(
                f"one {what} of node {self._queue.name!r} does not fit the memory of "
                f"{self._queue.device.name}: {self._queue.describe(call)}"
            )
            error.__cause__ = cause
            call.fail(error)


class Bisection:
    """Finds which items of a batch make it fail, so that the others can succeed.

    It runs nothing: run `next_batch()` until there is none, and tell it after each whether that one has `succeeded` or
    `failed`. A search halves what holds a failing item: if the first half succeeds, the other one holds it, and is not
    run as a whole; if it fails, the other one waits, to be run together with everything else that waits when the
    failing item is found. So one failing item of n costs at most ceil(log2 n) + 2 runs, and k of them at most
    k * (ceil(log2 n) + 2). After n runs items run one by one: there are never more than 2 n.

    An item has failed only if it was run alone. If what fails is not the same each time, the bound holds as well.

    Args:
        count: items of the batch.
        error: of the batch; for one of one item, that item's.

    Attributes:
        errors: of the items that failed, by their position in the batch.
    """

    def __init__(self, count: int, error: Exception) -> None:
        self._count = count
        self._runs = 0
        self._batch: list[int] = []  # what runs now
        self._suspects = list(range(count))  # one of them fails
        self._waiting: list[int] = []  # of these, nothing is known
        self.errors: dict[int, Exception] = {}
        if count == 1:
            self._batch = self._suspects
            self.failed(error)

    def next_batch(self) -> list[int]:
        """Return the positions of the items to run next; an empty list if every item has succeeded or failed."""
        if self._runs >= self._count:
            self._waiting = self._suspects + self._waiting
            self._suspects = []
            self._batch = self._waiting[:1]
        elif self._suspects:
            self._batch = self._suspects[: (len(self._suspects) + 1) // 2]
        else:
            self._batch = sorted(self._waiting)  # in another order, packed items might need more rows
        self._runs += bool(self._batch)
        return list(self._batch)

    def succeeded(self) -> None:
        """Note that the batch to run has succeeded."""
        self._drop(self._batch)

    def failed(self, error: Exception) -> None:
        """Note that the batch to run has failed."""
        batch = self._batch
        if len(batch) == 1:
            self.errors[batch[0]] = error
        self._waiting += self._suspects
        self._suspects = []
        self._drop(batch)
        if len(batch) > 1:
            self._suspects = batch

    def _drop(self, batch: list[int]) -> None:
        done = set(batch)
        self._suspects = [one for one in self._suspects if one not in done]
        self._waiting = [one for one in self._waiting if one not in done]
