"""Jobs: one call, or a batch of calls, on its way through the dispatch thread; and the times of its phases."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .._errors import DeviceError, copy_of
from ..telemetry.profiling import collectors
from ..telemetry.profiling.durations import OutsideSeconds
from ..telemetry.profiling.records import DeviceWork, DeviceWorkKind
from ..telemetry.spans import JobSpan
from .arguments import BatchItem, Stacked, on_host, split
from .compile_cache import CACHE
from .compiling import JittedFunction
from .dispatch_thread import ORIGINS, Origin, are_ready, wait_until_ready
from .executable import is_device_array, is_random_key
from .parameters import owned
from .untyped_jax import jax

if TYPE_CHECKING:
    from .arguments import Arguments
    from .engine_device import DeviceCall, EngineDevice, SingleCallQueue
    from .executable import Executable


_ANNOTATION: Final[Any] = jax.profiler.TraceAnnotation
# The most items of a batch that are named in a profile of JAX: a longer list would not be read.
_NAMED: Final = 64


def _jax_profiles() -> bool:
    """Whether JAX takes a profile; takes less than a tenth of a microsecond."""
    taken: bool = _ANNOTATION.is_enabled()
    return taken


def _named_in_profile(node: str, calls: "Sequence[DeviceCall]") -> AbstractContextManager[None]:
    """Return an annotation for a profile of JAX: the node, and its items by index and by number in the timeline."""
    frames = [call.frame for call in calls[:_NAMED] if call.frame is not None]
    items = " ".join([str(frame.item) for frame in frames])
    annotation: AbstractContextManager[None] = _ANNOTATION(
        node, count=len(calls), items=items, frames=" ".join([str(frame.identity) for frame in frames])
    )
    return annotation


# The most items of a batch that a timeline follows: more lines could not be told apart.
_FOLLOWED: Final = 64


class _Part(NamedTuple):
    kind: DeviceWorkKind
    began: float
    ended: float


class JobTimes:
    """Measures the phases of one job: how long it waited, compiled, was transferred, computed, and was fetched.

    Its methods are called one after the other: on the threads of the device and of the compiler, and the last ones on
    the event loop.

    Args:
        submitted: when it was handed to the thread of the device, in seconds.
    """

    __slots__ = (
        "_back_seconds", "_began", "_compile_began", "_compile_seconds", "_computed", "_host_seconds", "_left_at",
        "_parts", "_placed_at", "_placing_began", "_put", "_submitted", "_taken_at",
    )  # fmt: skip

    def __init__(self, submitted: float = 0.0) -> None:
        self._submitted = submitted
        self._began = self._computed = 0.0
        self._taken_at: float | None = None
        self._host_seconds = (0.0, 0.0)
        self._left_at: float | None = None
        self._back_seconds: float | None = None
        self._parts: list[_Part] = []
        self._compile_began: float | None = None
        self._compile_seconds = 0.0
        self._placing_began = self._placed_at = 0.0
        self._put: list[Any] = []

    def dispatch_begins(self) -> None:
        """Note that the device's thread begins with the job, or goes on with it once its program is compiled."""
        self._began, self._computed = perf_counter(), thread_time()
        if self._taken_at is None:
            self._taken_at = self._began

    def dispatched(self) -> None:
        """Note that the job is enqueued on the device."""
        self._host_seconds = perf_counter() - self._began, thread_time() - self._computed

    def leaves(self) -> None:
        """Note that the job's result is on its way to the event loop; only the first call counts."""
        if self._left_at is None:
            self._left_at = perf_counter()

    def came_back(self) -> None:
        """Note that the event loop has the job's result; only the first call counts."""
        if self._back_seconds is None and self._left_at is not None:
            self._back_seconds = perf_counter() - self._left_at

    def compile_begins(self) -> None:
        """Note that the job begins to wait for the compilation of its program."""
        self._compile_began = perf_counter()

    def compile_ended(self) -> None:
        """Note that the compilation of the job's program has ended, also with an error."""
        if self._compile_began is not None:
            self._compile_seconds += perf_counter() - self._compile_began
            self._compile_began = None

    def place(
        self, executable: "Executable", args: tuple[Any, ...], around: Callable[[int], AbstractContextManager[None]]
    ) -> tuple[Any, ...]:
        """Return what `executable.transferred` returns, and note which arrays are on their way."""
        self._placing_began = perf_counter()
        placed = executable.transferred(args, around)
        self._placed_at = perf_counter()
        if placed is not args:
            before: list[Any] = jax.tree.leaves(args)
            self._put = [
                leaf for leaf, old in zip(jax.tree.leaves(placed), before, strict=True) if leaf is not old
            ]  # fmt: skip
        return placed

    def wait(self, inputs: Iterable[Any], given: Sequence[Any], busy_until: float) -> None:
        """Block until the job's result is ready.

        Args:
            inputs: the arrays that the job reads.
            given: the arrays of its result.
            busy_until: when the computation that was enqueued before it was ready, in seconds of `time.perf_counter`.

        Raises:
            JaxRuntimeError: the computation failed.
        """
        # Work of the host is hidden while the device is busy with an earlier computation: it delays nothing.
        hidden = max(0.0, busy_until - self._began)
        seconds, computed = self._host_seconds
        left = max(0.0, seconds - hidden)
        self._host_seconds = left, computed * left / seconds if seconds else 0.0
        self._submitted = max(self._submitted, busy_until)
        arrived = self._placed_at
        put = [array for array in self._put if not array.is_deleted()]
        self._put = []
        if put:
            began = self._placing_began
            # Arrays that have arrived by now came while the device was busy with another computation. The moment is not
            # known.
            if not are_ready(put):
                with suppress(Exception):  # the program that reads the array fails with the same error
                    wait_until_ready(filter(is_device_array, inputs))
                    began = max(began, perf_counter() if not are_ready(put) else began)
                    wait_until_ready(put)
                arrived = perf_counter()
            self._parts.append(_Part("to device", began, arrived))
        try:
            wait_until_ready(given)
        finally:
            ended = perf_counter()
            # A device runs one computation at a time, in the order in which they were enqueued.
            self._parts.append(_Part("compute", min(max(arrived, busy_until), ended), ended))

    def fetch(self, given: Any) -> Any:
        """Return a pytree of arrays as a pytree of NumPy arrays, and note how long the copy took."""
        began = perf_counter()
        fetched = jax.tree.map(_on_host, given)
        self.fetched(began)
        return fetched

    def fetched(self, began: float) -> None:
        """Note that arrays were copied from a device, from `began` until now."""
        self._parts.append(_Part("from device", began, perf_counter()))

    def tell(self, node: str, device: str, calls: "Sequence[DeviceCall]", rows: int, padding_share: float) -> None:
        """Give the measured times to the profiles, once the job is over; on the event loop.

        Args:
            node: name of the node whose program the job ran.
            device: name of the device that it ran on.
            calls: the calls that it ran for.
            rows: rows of the batch, padding included; 0 for no batch.
            padding_share: share of the elements that was padding, 0 to 1.
        """
        self.compile_ended()
        self.came_back()
        frames = tuple([call.frame.identity for call in calls[:_FOLLOWED] if call.frame is not None])
        for kind, began, ended in self._parts:
            collectors.device_worked(
                DeviceWork(kind, device, node, began, ended, len(calls), rows, padding_share, frames)
            )  # fmt: skip
        compute = sum([part.ended - part.began for part in self._parts if part.kind == "compute"])
        transfer = sum([part.ended - part.began for part in self._parts if part.kind != "compute"])
        way_seconds, ways = max(0.0, (self._taken_at or 0.0) - self._submitted), 1
        if self._back_seconds is not None:
            way_seconds, ways = way_seconds + self._back_seconds, 2
        seconds = OutsideSeconds(self._compile_seconds, transfer, compute, *self._host_seconds, way_seconds, ways)
        for sampler, count in Counter([call.sampler for call in calls]).items():
            if sampler is not None:
                sampler.outside = sampler.outside.plus(seconds.for_items(count))


def _on_host(leaf: Any) -> Any:
    """Return an array as a NumPy array; typed random keys stay as they are, and are fetched in `split`."""
    return leaf if is_random_key(leaf) else np.asarray(leaf)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device had too little memory; JAX has no error type for that."""
    return str(error).startswith("RESOURCE_EXHAUSTED")


class Job:
    """Runs a compiled program for some calls.

    Its methods are called on the threads of the device. When the job is over, `on_over` is called with it on the event
    loop.

    Attributes:
        calls: the calls that the job runs for.
        results: one for each call, once the job has succeeded.
        error: why the job failed; None if it has not.
        times: the times of its phases, if a profile is taken.
        has_run: whether it was enqueued: neither skipped, nor failed while its program was compiled.
    """

    _is_batch = False

    def __init__(
        self, jitted: JittedFunction, device: "EngineDevice", calls: "list[DeviceCall]", on_over: Callable[[Any], None]
    ) -> None:
        self.calls: list[DeviceCall] = calls
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.has_run = False
        self.times: JobTimes | None = None
        self._submitted_at = 0.0
        self._jitted = jitted
        self._device = device
        self._on_over: Callable[[Any], None] | None = on_over  # None once it was called
        self._compiled: Executable | BaseException | None = None  # outcome of the compilation that it has waited for
        self._args: tuple[Any, ...] | None = None
        self._leaves: list[Any] = []  # of its arguments
        self._given: Any = None
        self._origin: Origin | None = None
        self._is_over = False
        self._span: JobSpan | None = None  # if any of the calls is sampled

    def settle(self) -> None:
        """Give each call its result, or an error of its own; on the loop."""
        error = self.take_error()
        if error is not None:
            for index, call in enumerate(self.calls):
                call.fail(copy_of(error) if index else error)
        elif self.results:
            for call, result in zip(self.calls, self.results, strict=True):
                call.finish(result)
        else:
            for call in self.calls:
                call.drop()  # it was skipped: its callers have left

    def take_error(self) -> BaseException | None:
        """Return the job's error and forget it: its traceback refers to the job, so neither would be freed."""
        error, self.error = self.error, None
        return error

    def submit(self) -> None:
        """Hand the job to the device's thread."""
        self._submitted_at = perf_counter()  # also without a profile: to ask whether one is taken would take longer
        self._device.thread.submit(self)

    def begin(self) -> bool:
        """Return whether a caller still waits for it."""
        if not self._is_wanted():
            self._over()
            return False
        if self._span is None:
            self._open_span()
        return True

    def dispatch(self) -> list[Any] | None:
        """Enqueue the program; returns the arrays of its result.

        If the program is not compiled yet, this has it compiled, and returns None: the job is submitted again then.
        """
        if isinstance(self._compiled, BaseException):
            raise self._compiled  # not from a local variable, which its traceback would refer to
        executable, self._compiled = self._compiled, None
        if self._args is None:
            self._times_begin()
            self._args = self.arguments()
        elif self.times is not None:
            self.times.dispatch_begins()
        flat = jax.tree.flatten(self._args)
        self._leaves = flat[0]
        span = self._span
        if executable is None:
            executable = CACHE.find(self._jitted, self._args, flat)
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
        try:
            if _jax_profiles():
                with _named_in_profile(self._jitted.name, self.calls):
                    self._given = self._enqueue(executable, self._args)
            else:
                self._given = self._enqueue(executable, self._args)
        except Exception as error:
            self._explain(error)
            raise
        if self.times is not None:
            self.times.dispatched()
        given = self._given
        arrays: list[Any] = [given] if is_device_array(given) else jax.tree.leaves(given)
        return arrays

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits until the job's arrays are ready, or a queue has to know when they are."""
        return True

    def hand_on(self, arrays: list[Any]) -> None:
        """Give the result to the caller before it is ready, if the caller accepts that.

        Args:
            arrays: what `dispatch` returned.
        """

    def _times_begin(self) -> None:
        """Begin to measure the phases of the job, if a profile is taken."""
        self.times = JobTimes(self._submitted_at) if collectors.running else None
        if self.times is not None:
            self.times.dispatch_begins()
            for call in self.calls[:1]:
                if call.sampler is not None:
                    call.sampler.works_here()

    def inputs(self) -> Iterable[Any]:
        """Return the arrays that it reads."""
        return self._leaves

    def wait(self, arrays: list[Any], busy_until: float) -> None:
        """Block until the arrays that `dispatch` returned are ready.

        Args:
            arrays: what `dispatch` returned.
            busy_until: when what was enqueued before it was ready.

        Raises:
            JaxRuntimeError: it failed.
        """
        if self.times is None:
            wait_until_ready(arrays)
        else:
            self.times.wait(self.inputs(), arrays, busy_until)

    def ready(self) -> None:
        """Give the callers their results."""
        try:
            self.results = self.results_of(self._given)
        except Exception as error:  # noqa: BLE001 - the result has not the expected form: the callers get the error
            self.error = error
        self._over()

    def failed(self, error: BaseException) -> None:
        """Note the error, and have the event loop raise it in the callers."""
        self.error = error
        self._over()

    def claim(self) -> bool:
        """Return whether the job still has to run; from then on its calls cannot be taken back."""
        return True

    @property
    def rows(self) -> int | None:
        """Rows of the batch, padding included; None for one call alone."""
        return None

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the program."""
        raise NotImplementedError

    def results_of(self, given: Any) -> list[Any]:
        """Return the result of each call, from what the program gave."""
        raise NotImplementedError

    def _enqueue(self, executable: "Executable", args: tuple[Any, ...]) -> Any:
        times, span = self.times, self._span
        if times is None and span is None:
            return executable(*args)
        # Arguments are transferred before the program is enqueued, so that the transfer can be timed by itself.
        around = _untold if span is None else span.transfer
        placed = executable.transferred(args, around) if times is None else times.place(executable, args, around)
        given = executable(*placed)
        if span is not None:
            span.dispatched(self.rows)
        return given

    def _place(self, args: tuple[Any, ...], parameters: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the arguments, with each parameter replaced by its copy on the device."""
        if not parameters:
            return args
        placed = self._device.parameters
        placed.placed_since(self._device.thread.restarts)
        return tuple([
            placed.place((self._jitted, index), arg, self._span) if index in parameters else arg
            for index, arg in enumerate(args)
        ])  # fmt: skip

    def _open_span(self) -> None:
        if waits := [call.wait for call in self.calls if call.wait is not None]:
            jitted = self._jitted
            items = len(self.calls) if self._is_batch else None
            self._span = JobSpan(jitted.name, jitted.placement.name, waits, items)

    def padding(self) -> tuple[int, float]:
        """Rows of the batch, with those of padding, and how much of its elements was padding; both 0 for no batch."""
        return 0, 0.0

    def _is_wanted(self) -> bool:
        return not all(call.is_left for call in self.calls)

    def _goes_on(self, compiled: "Executable | BaseException") -> None:
        """Continue with the outcome of the compilation: a second `find` would count a hit beside the miss."""
        if self.times is not None:
            self.times.compile_ended()
        if self._span is not None and not isinstance(compiled, BaseException):
            self._span.dispatching()
        self._compiled = compiled
        self.submit()

    def _explain(self, error: Exception) -> None:
        """Raise an error that says more than JAX's, about NaNs and about arguments that were donated."""
        assert self._args is not None
        # JAX's own `jit` turns this private type into the public one.
        if type(error).__name__ == "InternalFloatingPointError":
            kind = "infinity" if "inf" in error.args[1:] else "NaN"
            raise FloatingPointError(
                f"{self._jitted.name!r} gave a {kind}, which jax_debug_nans or jax_debug_infs refuses"
            ) from error
        if "donated in the same call" in str(error):
            self._explain_shared(error)
        if "has been deleted" not in str(error):  # a call that fails after it has begun has lost what it donates, too
            return
        for position, arg in enumerate(self._args):
            if any(is_device_array(leaf) and leaf.is_deleted() for leaf in jax.tree.leaves(arg)):
                raise DeviceError(
                    f"{self._jitted.name!r}: the memory of argument {self._jitted.parameter(position)!r} was donated "
                    "to an earlier call, and it cannot be read again: pass what that call returned, or do not donate it"
                ) from error

    def _explain_shared(self, error: Exception) -> None:
        """Raise an error that names the two arguments that hold the donated array."""
        assert self._args is not None
        leaves = [(position, leaf) for position, arg in enumerate(self._args) for leaf in jax.tree.leaves(arg)]
        for number, (one, array) in enumerate(leaves):
            for other, same in leaves[number + 1 :]:
                if array is same and is_device_array(array):
                    raise DeviceError(
                        f"{self._jitted.name!r}: arguments {self._jitted.parameter(one)!r} and "
                        f"{self._jitted.parameter(other)!r} hold the same array, and its memory is donated: pass a "
                        "copy as one of them, or do not donate it"
                    ) from error

    def _over(self) -> None:
        if self._is_over:  # the device's thread has died in this method, and reports the job once more
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
        """Report the end of the job to the profiles, then to the queue of the calls; on the event loop."""
        if self.times is not None:
            self.times.tell(self._jitted.name, self._jitted.placement.name, self.calls, *self.padding())
        on_over(self)


def _untold(size_bytes: int) -> AbstractContextManager[None]:
    return nullcontext()


class SingleJob(Job):
    """Runs a program for one call.

    Args:
        jitted: the function that it runs.
        device: the device that it runs on.
        call: the call.
        queue: the queue of the call; the job calls it on the event loop when it is over or its result is handed on.
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
        self._hands_on = call.hands_on

    def _is_wanted(self) -> bool:
        return not self.calls[0].is_left

    def claim(self) -> bool:
        """Return False if the call was taken back; after True it cannot be taken back."""
        return self.calls[0].begin()

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the call."""
        args, self._call_args = self._place(self._call_args, self._parameters), ()
        # The caller goes on before the program has run, and may change a buffer that on a CPU is the argument itself.
        return tuple([owned(arg) for arg in args]) if self._hands_on else args

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits until the job's arrays are ready, or a queue has to know when they are."""
        if not self._hands_on or self.times is not None or self._span is not None:
            return True
        return len(self._queue.replicas) > 1  # which one is free matters

    def hand_on(self, arrays: list[Any]) -> None:
        """Give the result to the caller before it is ready, if the caller accepts that.

        Args:
            arrays: what `dispatch` returned.
        """
        if self._hands_on:
            call, post = self.calls[0], self._device.mailbox.post
            self._origin = Origin(call.label, self.inputs())
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
        # Nearly always there is a shorter way than that of several calls.
        if self._on_over is not None and self.times is None and self._span is None:
            self._device.mailbox.post(self._queue.give, self.calls[0], self._given)
            self._on_over = None
        super().ready()

    def results_of(self, given: Any) -> list[Any]:
        """Return what the program gave."""
        return [given]


class BatchJob(Job):
    """Runs a vectorised program for several calls.

    Args:
        jitted: the function that it runs.
        device: the device that it runs on.
        calls: the calls; the only argument of each is a `BatchItem`, and all are of one group.
        on_over: called on the loop with the job when it is over.
        arguments: how the batch items become the arguments of the program.
        size: rows of the batch, padding included.

    Attributes:
        stacked: the stacked arguments; None before they are stacked.
    """

    _is_batch = True

    def __init__(
        self,
        jitted: JittedFunction,
        device: "EngineDevice",
        calls: "list[DeviceCall]",
        on_over: "Callable[[BatchJob], None]",
        arguments: "Arguments",
        size: int,
    ) -> None:
        super().__init__(jitted, device, calls, on_over)
        self._arguments = arguments
        self._size = size
        self.stacked: Stacked | None = None

    @property
    def rows(self) -> int | None:
        """Rows of the batch, padding included."""
        return self._size

    def arguments(self) -> tuple[Any, ...]:
        """Stack the arguments of the calls."""
        arguments = self._arguments
        items = self._items()
        self.stacked = arguments.stack(items, self._size)
        return self._place(arguments.of_batch(self.stacked, items[0].shared), arguments.parameters)

    def _items(self) -> list[BatchItem]:
        """Return the items to be stacked. If the computation of an item's array has failed, only its call fails."""
        calls = self.calls
        given: list[BatchItem] = [call.args[0] for call in calls]
        if all(item.is_on_host for item in given):  # nearly always
            return given
        items: list[BatchItem] = []
        self.calls = []
        failed: BaseException | None = None
        began = perf_counter()
        for call, item in zip(calls, given, strict=True):
            try:
                items.append(on_host(item))
                self.calls.append(call)
            except Exception as error:  # noqa: BLE001 - whatever the computation of an argument has raised
                failed = ORIGINS.cause_of(error.with_traceback(None), item.arrays)
                self._device.mailbox.post(call.fail, failed)
        if self.times is not None:
            self.times.fetched(began)
        if not items:
            assert failed is not None
            try:
                raise failed
            finally:
                del failed  # it refers to this frame
        return items

    def padding(self) -> tuple[int, float]:
        """Rows of the batch, with those of padding, and how much of its elements was padding."""
        stacked = self.stacked
        return (0, 0.0) if stacked is None else (stacked.size, stacked.padding_share)

    def results_of(self, given: Any) -> list[Any]:
        """Split what the program gave into rows."""
        assert self.stacked is not None
        if self.times is not None:
            given = self.times.fetch(given)
        return split(given, self.stacked, self._arguments.name)
