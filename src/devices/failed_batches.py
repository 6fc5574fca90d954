"""Failed batches, which run again in parts. This code runs on the event loop."""

from collections.abc import Callable

from .._errors import DeviceError, with_cause
from .device_errors import is_out_of_memory
from .dispatch import BatchJob
from .engine_device import BatchCallQueue, DeviceCall


class PartsOfBatch:
    """Runs a failed batch again in parts, until each call has its result or an error of its own.

    If memory was short, the parts are as large as the present limit; otherwise they are halves. So n calls of which k
    fail run at most 2 k ceil(log2 n) times again, and never more than 2 n times.

    Args:
        queue: runs the parts.
        job: the failed batch.
        on_over: called after the last part.
    """

    def __init__(self, queue: BatchCallQueue, job: BatchJob, on_over: Callable[[], None]) -> None:
        self._queue = queue
        self._on_over = on_over
        # A stack of parts, the next one last: the calls, and the number of rows; None for as few as hold the calls.
        self._parts: list[tuple[list[DeviceCall], int | None]] = []
        self._ended(job)

    def _ended(self, job: BatchJob) -> None:
        calls, error, stacked = job.calls, job.error, job.stacked
        if stacked is not None and error is not None and is_out_of_memory(error):
            self._too_large(job)
        elif stacked is not None and isinstance(error, Exception) and job.has_run and len(calls) > 1:
            job.take_error()
            half = (len(calls) + 1) // 2
            # The halves are padded to the same size, whose program exists already.
            self._parts += [(calls[half:], stacked.size), (calls[:half], stacked.size)]
        else:
            job.settle()
        self._run_next()

    def _run_next(self) -> None:
        if not self._parts:
            self._on_over()
            return
        calls, rows = self._parts.pop()
        limit = self._queue.largest.get(calls[0].group)
        if rows is None and limit is not None:
            count = self._queue.first(calls, limit)
            self._parts += [(calls[count:], None)] if calls[count:] else []
            calls = calls[:count]
        self._queue.run_batch(calls, self._ended, rows)

    def _too_large(self, job: BatchJob) -> None:
        """Run the calls of a batch that did not fit the memory in smaller batches; fail them if none is smaller."""
        queue, calls, cause = self._queue, job.calls, job.take_error()
        if queue.exceeded(job):
            self._parts.append((calls, None))
            return
        what = "item" if queue.items.packed is None else "row"
        for call in calls:
            error = DeviceError(
                f"one {what} of node {queue.name!r} does not fit the memory of {queue.device.name}: "
                f"{queue.describe(call)}"
            )
            call.fail(with_cause(error, cause))
