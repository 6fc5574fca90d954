"""The batches of one node on one device: begun, and run again in parts if they fail.

Where memory was short, the parts are smaller; else they are halved until the items that fail are alone.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Final

from .._errors import DeviceError
from ..actors.batching import Batch
from ..telemetry import metrics, names
from ..telemetry.metrics import Reading, series
from .arguments import Arguments, Stacked
from .compiling import JittedFunction
from .engine_device import CallQueue, DeviceCall, EngineDevice
from .jobs import BatchJob, is_out_of_memory
from .statistics import BatchStatistics


class BatchLog:
    """Counts the batches of a node on all of its devices, as `BatchStatistics` describes.

    Args:
        name: of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._batches = 0
        self._calls = 0
        self._rows = 0
        self._real_elements = 0
        self._elements = 0

    def add(self, stacked: Stacked) -> None:
        """Count a batch."""
        if not self._batches:
            metrics.opened(self)
        self._batches += 1
        self._calls += stacked.count
        self._rows += stacked.size
        self._real_elements += stacked.real_elements
        self._elements += stacked.elements

    def statistics(self) -> BatchStatistics:
        """Return a snapshot."""
        return BatchStatistics(self._batches, self._calls, self._rows, self._real_elements, self._elements)

    def counters(self) -> Iterable[Reading]:
        """Return what was counted, for metrics."""
        of = names.NODE, self._name
        padding = self._elements - self._real_elements
        return [
            (series(names.METRIC_BATCH_RUNS, of), self._batches, None),
            (series(names.METRIC_BATCH_ITEMS, of), self._calls, None),
            (series(names.METRIC_BATCH_ELEMENTS, of, (names.PADDING, False)), self._real_elements, None),
            (series(names.METRIC_BATCH_ELEMENTS, of, (names.PADDING, True)), padding, None),
        ]

    def levels(self) -> Iterable[Reading]:
        """Return nothing: a batch is counted when it has run."""
        return ()

    def __del__(self) -> None:
        if self._batches:  # the node is gone, and what it has done still counts
            metrics.vanished(self)


def batch_size(count: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of the sizes that holds `count` items, which the last one does."""
    return sizes[bisect_left(sizes, count)]


class BatchCallQueue(CallQueue):
    """Has a device run the calls of a node in batches, and those that fail again in parts.

    Args:
        arguments: how calls become the arguments of the program.
        device: where they run.
        jitted: the vectorised program.
        batch: how many run together.
        sizes: that batches are padded to, in ascending order.
        prefetch: the most batches that the device holds: one runs while the next is transferred.
        log: counts them.
        repeats: whether a batch that failed may run again, in parts.

    Attributes:
        limits: how large its batches may be.
    """

    def __init__(
        self,
        arguments: Arguments,
        device: EngineDevice,
        jitted: JittedFunction,
        batch: Batch,
        sizes: tuple[int, ...],
        prefetch: int,
        log: BatchLog,
        *,
        repeats: bool,
    ) -> None:
        super().__init__(arguments.name, device, batch, prefetch)
        self.limits = SizeLimits(sizes, self.largest)
        self._arguments = arguments
        self._sizes = sizes
        self._log = log
        self._jitted = jitted
        self._repeats = repeats

    def start(self, calls: list[DeviceCall]) -> None:
        """Have the device run some calls as one batch."""
        is_try = self.limits.begins(calls[0].group, len(calls))
        self.run_batch(calls, partial(self._ended, partial(self.device.returned, self, calls), is_try))

    def run_batch(self, calls: list[DeviceCall], on_over: Callable[[BatchJob], None], size: int | None = None) -> None:
        """Have the device run some calls as a batch of so many rows; by default the fewest that hold them."""

        def over(job: BatchJob) -> None:
            if job.stacked is not None and job.has_run:
                self._log.add(job.stacked)
            on_over(job)

        rows = size or batch_size(len(calls), self._sizes)
        BatchJob(self._jitted, self.device, calls, over, self._arguments, rows).submit()

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

    def describe(self, call: DeviceCall) -> str:
        """Return what a call holds, for an error."""
        assert self._arguments.stacker is not None
        return self._arguments.stacker.describe(call.args[0])


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
            self._queue.run_batch([self._calls[position] for position in positions], self._ended, self._size)
        else:
            self._then()

    def _ended(self, job: BatchJob) -> None:
        if job.error is not None and job.has_run and is_out_of_memory(job.error):
            self._bisection.succeeded()  # its calls are taken care of
            self._queue.try_again(job, self.go_on)
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
            size = queue.limits.size(self._group) or len(self._left)
            part, self._left = self._left[:size], self._left[size:]
            queue.run_batch(part, self._ended)
        else:
            self._then()

    def _ended(self, job: BatchJob) -> None:
        if job.error is not None and is_out_of_memory(job.error):
            self._too_large(job)
        elif isinstance(job.error, Exception) and job.has_run:
            self._queue.try_again(job, self.go_on)
            return
        else:
            job.settle()
        self.go_on()

    def _too_large(self, job: BatchJob) -> None:
        cause = job.take_error()
        if self._queue.exceeded(job):
            self._left = [*job.calls, *self._left]
            return
        for call in job.calls:
            error = DeviceError(
                f"one item of node {self._queue.name!r} does not fit the memory of "
                f"{self._queue.device.name}: {self._queue.describe(call)}"
            )
            error.__cause__ = cause
            call.fail(error)


# Batches that fit before a larger one is tried, at first, and at most after tries that have failed. A try that fails
# costs one run more, of what would have run anyway: a 16th of the work, and less than a thousandth in the end. A batch
# that fills a device takes milliseconds and more, so the limit follows within seconds or minutes when memory is free.
_FIRST_PATIENCE: Final = 16
_LAST_PATIENCE: Final = 1024

# Kinds of items of which a batch did not fit. One that is forgotten is learnt again.
_MOST_LIMITS: Final = 256


class SizeLimit:
    """The largest batch that fits, for items of one shape.

    What held the memory may be gone by now: another process, or another node. So when enough batches as large as the
    limit have fitted in a row, one of the next larger size is tried. If it does not fit, that takes twice as many the
    next time.

    Args:
        sizes: that batches are padded to, in ascending order.

    Attributes:
        size: the largest batch to run; a larger one runs as several batches, unless it is a try.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.size = sizes[-1]
        self._fitted = 0  # in a row, of that size
        self._patience: dict[int, int] = {}  # for each size that did not fit, how many that takes before it is tried

    @property
    def most(self) -> int | None:
        """The most calls of the next batch; None for as many as there may ever be."""
        larger = self._larger
        return None if larger is None else larger if self._has_patience_for(larger) else self.size

    @property
    def is_over(self) -> bool:
        """Whether enough batches of the largest size have fitted, too."""
        return self._larger is None and self._has_patience_for(self.size)

    def begins(self, count: int) -> bool:
        """Note that a batch of so many calls begins; returns whether it is a try."""
        if count <= self.size:
            return False
        self._fitted = 0  # it is the only one
        return True

    def fitted(self, size: int, *, is_try: bool) -> None:
        """Note that a batch padded to `size` did fit, and whether it was a try; other larger ones are from before."""
        if size == self.size:
            self._fitted += 1
        elif is_try and size == self._larger:
            self.size, self._fitted = size, 0

    def exceeded(self, size: int) -> bool:
        """Note that a batch padded to `size` did not fit, which halves the limit.

        Returns:
            Whether smaller batches may fit; if not, its items cannot be computed.
        """
        self._fitted = 0
        self._patience[size] = min(2 * self._patience.get(size, _FIRST_PATIENCE // 2), _LAST_PATIENCE)
        smaller = [one for one in self._sizes if one < size]
        if not smaller:
            return False
        self.size = min(self.size, max((one for one in smaller if one <= size // 2), default=smaller[0]))
        return True

    @property
    def _larger(self) -> int | None:
        index = bisect_right(self._sizes, self.size)
        return self._sizes[index] if index < len(self._sizes) else None

    def _has_patience_for(self, size: int) -> bool:
        return self._fitted >= self._patience.get(size, _FIRST_PATIENCE)


class SizeLimits:
    """The limits of one node on one device, by group of calls: a batch that is too large for one group fits others.

    Args:
        sizes: that batches are padded to, in ascending order.
        largest: of the lane: for each group that is limited, the most calls of the next batch. This keeps it.
    """

    def __init__(self, sizes: Sequence[int], largest: dict[Hashable, int]) -> None:
        self._sizes = sizes
        self._largest = largest
        self._limits: dict[Hashable, SizeLimit] = {}

    def size(self, group: Hashable) -> int | None:
        """Return the largest batch to run of a group; None if it has no limit."""
        limit = self._limits.get(group)
        return None if limit is None else limit.size

    def begins(self, group: Hashable, count: int) -> bool:
        """Note that a batch of so many calls begins; returns whether it is larger than the limit, as a try."""
        limit = self._limits.get(group) if self._limits else None  # nearly always there is none
        if limit is None or not limit.begins(count):
            return False
        self._tell(group, limit)
        return True

    def fitted(self, group: Hashable, size: int, *, is_try: bool) -> None:
        """Note that a batch padded to `size` did fit, and whether it began as a try."""
        limit = self._limits.get(group) if self._limits else None
        if limit is None:
            return
        limit.fitted(size, is_try=is_try)
        if limit.is_over:
            del self._limits[group]
        self._tell(group, limit)

    def exceeded(self, group: Hashable, size: int) -> bool:
        """Note that a batch padded to `size` did not fit; returns whether a smaller one may."""
        limit = self._limits.get(group)
        if limit is None:
            if len(self._limits) >= _MOST_LIMITS:
                forgotten = next(iter(self._limits))
                del self._limits[forgotten]
                self._largest.pop(forgotten, None)
            limit = self._limits[group] = SizeLimit(self._sizes)
        fits = limit.exceeded(size)
        self._tell(group, limit)
        return fits

    def _tell(self, group: Hashable, limit: SizeLimit) -> None:
        most = limit.most
        if most is None:
            self._largest.pop(group, None)
        else:
            self._largest[group] = most


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
            self._batch = self._waiting
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
