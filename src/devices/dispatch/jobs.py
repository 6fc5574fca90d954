"""Jobs: one call, or a batch of calls, on its way through the dispatch thread; its times, and its errors."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..._errors import DeviceError
from ...actors.frame import blame
from ...telemetry.profiling import collectors
from ...telemetry.profiling.durations import DeviceSeconds
from ...telemetry.profiling.records import DeviceWork, DeviceWorkKind
from ...telemetry.spans import JobSpan
from .. import jax_profile
from ..jax_types import are_ready, is_ready, wait_until_ready
from ..programs.compile_cache import twin_of
from ..programs.signature import is_device_array, is_random_key
from ..untyped_jax import jax
from .device_queue import DeviceCall, owned

if TYPE_CHECKING:
    from ...actors.threads import LoopMailbox
    from ..programs.compile_cache import CompileCache
    from ..programs.compiling import Program
    from ..programs.executable import Executable
    from .dispatch_thread import DispatchThread
    from .parameters import PlacedParameters


# Items of a batch that a timeline follows: more lines than these nobody can tell apart.
_FOLLOWED: Final = 64


class _Part(NamedTuple):
    kind: DeviceWorkKind
    began: float
    ended: float


class JobTimes:
    """What the time of one job went into.

    Its methods are called on the threads of the device and of the compiler, one after the other.
    """

    __slots__ = ("_compile_began", "_compile_seconds", "_parts", "_placed_at", "_placing_began", "_put")

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._compile_began: float | None = None
        self._compile_seconds = 0.0
        self._placing_began = self._placed_at = 0.0
        self._put: list[Any] = []

    def compile_begins(self) -> None:
        """It waits for its program."""
        self._compile_began = perf_counter()

    def compile_ended(self) -> None:
        """It has its program, or will never have one."""
        if self._compile_began is not None:
            self._compile_seconds += perf_counter() - self._compile_began
            self._compile_began = None

    def place(
        self, executable: "Executable", args: tuple[Any, ...], around: Callable[[int], AbstractContextManager[None]]
    ) -> tuple[Any, ...]:
        """Return what `executable.transferred` does, and note what is on its way from now on."""
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
        """Block until what the job gives is ready.

        Args:
            inputs: what it reads.
            given: what it gives.
            busy_until: when what was enqueued before it was ready, in seconds.

        Raises:
            JaxRuntimeError: it failed.
        """
        arrived = self._placed_at
        put = [array for array in self._put if not array.is_deleted()]
        self._put = []
        if put:
            began = self._placing_began
            # What is there by now has come while the device was busy with something else, nobody knows when.
            if not are_ready(put):
                with suppress(Exception):  # whoever reads it fails with that, too, if anybody does
                    wait_until_ready(filter(is_device_array, inputs))
                    began = max(began, perf_counter() if not are_ready(put) else began)
                    wait_until_ready(put)
                arrived = perf_counter()
            self._parts.append(_Part("to device", began, arrived))
        try:
            wait_until_ready(given)
        finally:
            ended = perf_counter()
            # A device computes one thing at a time, in the order in which they were enqueued.
            self._parts.append(_Part("compute", min(max(arrived, busy_until), ended), ended))

    def fetch(self, given: Any) -> Any:
        """Return a pytree of arrays as one of NumPy's."""
        began = perf_counter()
        fetched = jax.tree.map(_on_host, given)
        self.fetched(began)
        return fetched

    def fetched(self, began: float) -> None:
        """Arrays have come from a device, since this moment."""
        self._parts.append(_Part("from device", began, perf_counter()))

    def tell(self, node: str, device: str, calls: "Sequence[DeviceCall]", rows: int, padding_share: float) -> None:
        """Tell the profiles, once the job is over; on the loop.

        Args:
            node: whose program it was.
            device: where it ran.
            calls: whom it was for.
            rows: of the batch, with those of padding; 0 for no batch.
            padding_share: how much of the elements was padding.
        """
        self.compile_ended()
        frames = tuple([call.frame.identity for call in calls[:_FOLLOWED] if call.frame is not None])
        for kind, began, ended in self._parts:
            collectors.device_worked(
                DeviceWork(kind, device, node, began, ended, len(calls), rows, padding_share, frames)
            )  # fmt: skip
        compute = sum([part.ended - part.began for part in self._parts if part.kind == "compute"])
        transfer = sum([part.ended - part.began for part in self._parts if part.kind != "compute"])
        seconds = DeviceSeconds(self._compile_seconds, transfer, compute)
        for sampler, count in Counter([call.sampler for call in calls]).items():
            if sampler is not None:
                sampler.device = sampler.device.plus(seconds.for_items(count))


def _on_host(leaf: Any) -> Any:
    """Return an array as one of NumPy; typed random keys have no such, and are fetched where they are taken apart."""
    return leaf if is_random_key(leaf) else np.asarray(leaf)


# Failed arrays: which computation an asynchronous error comes from.
#
# A result that is handed on before it is ready may turn out to be an error later, and then each computation that reads
# it fails with that error, too: on any device, and perhaps before the first one is known to have failed. The error
# belongs to the first.


class Origin:
    """A computation whose result is handed on before it is ready.

    Args:
        label: of the node in its graph; None for what is no node.
        inputs: the arrays that it reads.
    """

    __slots__ = ("_error", "_inputs", "_label")

    def __init__(self, label: str | None, inputs: Iterable[Any]) -> None:
        self._label = label
        self._inputs = tuple(inputs)
        self._error: BaseException | None = None

    def over(self, error: BaseException | None) -> None:
        """It has ended, well or with an error; it lets go of what it has read."""
        if error is not None:
            self._error = self._blamed(twin_of(error).with_traceback(None))  # a traceback would hold the arrays
        self._inputs = ()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error of the first computation that failed, where this one has failed with `error`."""
        inputs = self._inputs  # before the error: `over` sets that first
        if self._error is not None:
            return twin_of(self._error)
        return self._blamed(ORIGINS.cause_of(error, inputs))

    def taken_over(self, error: BaseException) -> None:
        """Note with an error that the result of this computation cannot be asked any more whether it is the cause."""
        error.add_note(f"it computed in the memory of the result of node {self._label!r}, which may be what has failed")

    def _blamed(self, error: BaseException) -> BaseException:
        if self._label is not None:
            blame(error, self._label)
        return error


class Origins:
    """Which computation arrays come from that were handed on, for as long as anybody holds them; for all devices."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[weakref.ref[Any], Origin]] = {}  # arrays are not hashable

    def add(self, arrays: Iterable[Any], origin: Origin) -> None:
        """Note that these are results of a computation."""
        for array in arrays:
            self._origins[id(array)] = (weakref.ref(array, self._forget(id(array))), origin)

    def cause_of(self, error: BaseException, inputs: Iterable[Any]) -> BaseException:
        """Return the error of the first computation that failed; `error` itself if none of the inputs did.

        Args:
            error: of a computation.
            inputs: what it read.
        """
        for array in inputs if self._origins else ():
            origin = self._origin_of(array)
            if origin is None:
                continue
            if array.is_deleted():
                origin.taken_over(error)
            elif (failure := _failure_of(array)) is not None:
                return origin.cause_of(failure)
        return error

    def _origin_of(self, array: Any) -> Origin | None:
        found = self._origins.get(id(array))
        return found[1] if found is not None and found[0]() is array else None

    def _forget(self, key: int) -> "Callable[[weakref.ref[Any]], None]":
        def forget(gone: "weakref.ref[Any]") -> None:
            if self._origins.get(key, (None,))[0] is gone:  # another array may have its place in memory by now
                self._origins.pop(key, None)

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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device had too little memory; JAX has no type of its own for that."""
    return str(error).startswith("RESOURCE_EXHAUSTED")


@dataclass(frozen=True)
class Route:
    """What the jobs of one device and event loop have in common.

    Attributes:
        thread: where they are dispatched; one whose program has to be compiled first comes back to it.
        cache: where executables are.
        mailbox: brings outcomes to the loop.
        parameters: what lies on the device for good.
    """

    thread: "DispatchThread"
    cache: "CompileCache"
    mailbox: "LoopMailbox"
    parameters: "PlacedParameters"


class Job:
    """Runs a compiled program for some calls.

    Its methods are called on the threads of the device. When it is over, `on_over` is called on the loop with the job.

    Attributes:
        calls: whom it is for.
        results: one for each call, once it has ended well.
        error: why it failed.
        times: what its time went into, if a profile is taken.
        has_run: whether the device has seen it: it was not skipped, and its program was compiled.
    """

    _is_batch = False

    def __init__(
        self, program: "Program", route: Route, calls: list[DeviceCall], on_over: Callable[[Any], None]
    ) -> None:
        self.calls = calls
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.has_run = False
        self.times: JobTimes | None = None
        self._program = program
        self._route = route
        self._on_over = on_over
        self._compiled: Executable | BaseException | None = None  # what came of a compilation that it has waited for
        self._args: tuple[Any, ...] | None = None
        self._given: Any = None
        self._origin: Origin | None = None
        self._is_over = False
        self._span: JobSpan | None = None  # if any of the calls is sampled

    def settle(self) -> None:
        """Give each call its result, or an error of its own; on the loop."""
        error = self.take_error()
        if error is not None:
            for index, call in enumerate(self.calls):
                call.fail(twin_of(error) if index else error)
        elif self.results:
            for call, result in zip(self.calls, self.results, strict=True):
                call.finish(result)
        else:
            for call in self.calls:
                call.drop()  # it was skipped: nobody waits

    def take_error(self) -> BaseException | None:
        """Return why it failed, and let go of that: its traceback refers to the job."""
        error, self.error = self.error, None
        return error

    def submit(self) -> None:
        """Have it run."""
        self._route.thread.submit(self)

    def begin(self) -> bool:
        """Return whether anybody still wants it."""
        if not self._is_wanted():
            self._over()
            return False
        if self._span is None:
            self._open_span()
        return True

    def dispatch(self) -> list[Any] | None:
        """Enqueue the program, or have it compiled first; returns what it will give."""
        if isinstance(self._compiled, BaseException):
            raise self._compiled  # not from a local variable, which its traceback would refer to
        executable, self._compiled = self._compiled, None
        if self._args is None:
            self.times = JobTimes() if collectors.is_taken() else None
            self._args = self.arguments()
        span = self._span
        if executable is None:
            executable = self._route.cache.find(self._program, self._args)
        if executable is None:
            if self.times is not None:
                self.times.compile_begins()
            trace = None if span is None else span.context
            self._route.cache.compile(self._program, self._args, self._goes_on, trace, self._is_wanted)
            return None
        if not self.claim():
            self._over()
            return None
        self.has_run = True
        try:
            if jax_profile.is_taken():
                with jax_profile.dispatching(self._program.name, self.calls):
                    self._given = self._enqueue(executable, self._args)
            else:
                self._given = self._enqueue(executable, self._args)
        except Exception as error:
            self._explain(error)
            raise
        arrays: list[Any] = jax.tree.leaves(self._given)
        self.dispatched(self._given, arrays)
        return arrays

    def inputs(self) -> Iterable[Any]:
        """The arrays that it reads."""
        arrays: list[Any] = jax.tree.leaves(self._args)
        return arrays

    def wait(self, arrays: list[Any], busy_until: float) -> None:
        """Block until these are ready, which it gives.

        Args:
            arrays: what it gives.
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
        except Exception as error:  # noqa: BLE001 - what the function gives is not what it should: its callers learn it
            self.error = error
        self._over()

    def failed(self, error: BaseException) -> None:
        """Tell the callers."""
        self.error = error
        self._over()

    def claim(self) -> bool:
        """Return whether it is still to run, immediately before it does."""
        return True

    @property
    def rows(self) -> int | None:
        """Rows of the batch, padding included; None for one call alone."""
        return None

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the program."""
        raise NotImplementedError

    def dispatched(self, given: Any, arrays: list[Any]) -> None:
        """The program is enqueued, and will give this, which is made of these arrays."""

    def results_of(self, given: Any) -> list[Any]:
        """Return the result of each call, from what the program gave."""
        raise NotImplementedError

    def _enqueue(self, executable: "Executable", args: tuple[Any, ...]) -> Any:
        times, span = self.times, self._span
        if times is None and span is None:
            return executable(*args)
        # What is transferred is transferred first, so that it can be told how long that takes.
        around = _untold if span is None else span.transfer
        placed = executable.transferred(args, around) if times is None else times.place(executable, args, around)
        given = executable(*placed)
        if span is not None:
            span.dispatched(self.rows)
        return given

    def _place(self, args: tuple[Any, ...], parameters: tuple[int, ...]) -> tuple[Any, ...]:
        """Return arguments with those that are parameters as they lie on the device."""
        if not parameters:
            return args
        placed = self._route.parameters
        placed.placed_since(self._route.thread.restarts)
        return tuple([
            placed.place((self._program, index), arg, self._span) if index in parameters else arg
            for index, arg in enumerate(args)
        ])  # fmt: skip

    def _open_span(self) -> None:
        if waits := [call.wait for call in self.calls if call.wait is not None]:
            program = self._program
            items = len(self.calls) if self._is_batch else None
            self._span = JobSpan(program.name, program.placement.name, waits, items)

    def padding(self) -> tuple[int, float]:
        """Rows of the batch, with those of padding, and how much of its elements was padding; both 0 for no batch."""
        return 0, 0.0

    def _is_wanted(self) -> bool:
        return not all(call.is_left for call in self.calls)

    def _goes_on(self, compiled: "Executable | BaseException") -> None:
        """Go on with what came of the compilation: to look for it again would count a hit, beside the miss."""
        if self.times is not None:
            self.times.compile_ended()
        if self._span is not None and not isinstance(compiled, BaseException):
            self._span.dispatching()
        self._compiled = compiled
        self.submit()

    def _explain(self, error: Exception) -> None:
        """Say more than JAX does about NaNs, and about an argument that an earlier call has donated."""
        assert self._args is not None
        # JAX's own `jit` turns this private type into the public one.
        if type(error).__name__ == "InternalFloatingPointError":
            kind = "infinity" if "inf" in error.args[1:] else "NaN"
            raise FloatingPointError(
                f"{self._program.name!r} gave a {kind}, which jax_debug_nans or jax_debug_infs refuses"
            ) from error
        if "donated in the same call" in str(error):
            self._explain_shared(error)
        if "has been deleted" not in str(error):  # a call that fails after it has begun has lost what it donates, too
            return
        for position, arg in enumerate(self._args):
            if any(is_device_array(leaf) and leaf.is_deleted() for leaf in jax.tree.leaves(arg)):
                raise DeviceError(
                    f"{self._program.name!r}: the memory of argument {self._program.parameter(position)!r} was donated "
                    "to an earlier call, and it cannot be read again: pass what that call returned, or do not donate it"
                ) from error

    def _explain_shared(self, error: Exception) -> None:
        """Say which argument is the same array as one that is donated."""
        assert self._args is not None
        leaves = [(position, leaf) for position, arg in enumerate(self._args) for leaf in jax.tree.leaves(arg)]
        for number, (one, array) in enumerate(leaves):
            for other, same in leaves[number + 1 :]:
                if array is same and is_device_array(array):
                    raise DeviceError(
                        f"{self._program.name!r}: arguments {self._program.parameter(one)!r} and "
                        f"{self._program.parameter(other)!r} hold the same array, and its memory is donated: pass a "
                        "copy as one of them, or do not donate it"
                    ) from error

    def _over(self) -> None:
        if self._is_over:  # the thread has died in it
            return
        self._is_over = True
        if self._origin is not None:
            self._origin.over(self.error)
        if self._span is not None:
            self._span.end(self.error, has_run=self.has_run)
        self._args = self._given = self._compiled = None
        on_over, self._on_over = self._on_over, _nothing
        self._route.mailbox.post(self._ended, on_over)

    def _ended(self, on_over: Callable[[Any], None]) -> None:
        """Tell the profiles before anybody else; on the loop."""
        if self.times is not None:
            self.times.tell(self._program.name, self._program.placement.name, self.calls, *self.padding())
        on_over(self)


def _untold(size_bytes: int) -> AbstractContextManager[None]:
    return nullcontext()


def _nothing(job: Job) -> None:
    """Was told already."""


class SingleJob(Job):
    """Runs a program for one call.

    Args:
        program: it.
        route: its way.
        call: the call.
        on_over: called on the loop when it is over.
        parameters: positions of the arguments that are parameters.
    """

    def __init__(
        self,
        program: "Program",
        route: Route,
        call: DeviceCall,
        on_over: "Callable[[Job], None]",
        parameters: tuple[int, ...] = (),
    ) -> None:
        super().__init__(program, route, [call], on_over)
        self._call_args = call.args
        self._parameters = parameters
        self._hands_on = call.hands_on

    def _is_wanted(self) -> bool:
        return not self.calls[0].is_left

    def claim(self) -> bool:
        """Return False if the call was taken back; from now on it cannot be."""
        return self.calls[0].begin()

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the call."""
        args, self._call_args = self._place(self._call_args, self._parameters), ()
        # The caller goes on before the program has run, and may change a buffer that on a CPU is the argument itself.
        return owned(args) if self._hands_on else args

    def dispatched(self, given: Any, arrays: list[Any]) -> None:
        """Hand the result on, if the caller is content with that."""
        if self._hands_on:
            self._origin = Origin(self.calls[0].label, self.inputs())
            ORIGINS.add(arrays, self._origin)
            self._route.mailbox.post(self.calls[0].hand_on, given)

    def results_of(self, given: Any) -> list[Any]:
        """Return what the program gave."""
        return [given]
