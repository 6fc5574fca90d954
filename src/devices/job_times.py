"""How long the phases of a job take, measured while a profile is taken."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..telemetry.profiling import collectors
from ..telemetry.profiling.collectors import Collector
from ..telemetry.profiling.durations import OutsideSeconds
from ..telemetry.profiling.records import DeviceSlice, DeviceWorkKind
from .programs import Executable, are_ready, is_device_array, is_random_key, wait_until_ready
from .untyped_jax import jax

if TYPE_CHECKING:
    from ..actors.frame import Frame
    from ..actors.sampler import ExecutionSampler
    from .arguments import Stacked
    from .compiling import JittedFunction

_ANNOTATION: Final[Any] = jax.profiler.TraceAnnotation
# The most items of a batch that are named in a profile of JAX: a longer list would not be read.
_NAMED: Final = 64
jax_profiles: Final[Callable[[], bool]] = _ANNOTATION.is_enabled  # whether JAX takes a profile


def named_in_jax_profile(node: str, frames: "Sequence[Frame | None]") -> AbstractContextManager[None]:
    """Return an annotation for a profile of JAX: the node, and its items by index and by number in the timeline."""
    named = [frame for frame in frames[:_NAMED] if frame is not None]
    items = " ".join([str(frame.item) for frame in named])
    annotation: AbstractContextManager[None] = _ANNOTATION(
        node, count=len(frames), items=items, frames=" ".join([str(frame.identity) for frame in named])
    )
    return annotation


# The most items of a batch that a timeline follows: more lines could not be told apart.
_FOLLOWED: Final = 64


class _Part(NamedTuple):
    kind: DeviceWorkKind
    began: float
    ended: float


@dataclass(slots=True)
class JobTimes:
    """Measures the phases of one job: waiting, compiling, transferring, computing, and fetching the result.

    The methods are called one after the other: on the threads of the device and of the compiler, and the last methods
    on the event loop.

    Args:
        submitted: when the job was handed to the thread of the device, in seconds of `time.perf_counter`.
    """

    submitted: float = 0.0
    _began: float = 0.0
    _computed: float = 0.0
    _taken_at: float | None = None
    _host_seconds: tuple[float, float] = (0.0, 0.0)
    _left_at: float | None = None
    _back_seconds: float | None = None
    _parts: list[_Part] = field(default_factory=list[_Part])
    _compile_began: float = 0.0
    _compile_seconds: float = 0.0
    _placing_began: float = 0.0
    _placed_at: float = 0.0
    _put: list[Any] = field(default_factory=list[Any])

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
        self._compile_seconds = perf_counter() - self._compile_began

    def place(
        self, executable: Executable, args: tuple[Any, ...], around: Callable[[int], AbstractContextManager[None]]
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
            busy_until: when the computation before this one was ready, in seconds of `time.perf_counter`.

        Raises:
            JaxRuntimeError: the computation failed.
        """
        # While the device is busy with an earlier computation, work of the host is hidden: it delays nothing.
        hidden = max(0.0, busy_until - self._began)
        seconds, computed = self._host_seconds
        left = max(0.0, seconds - hidden)
        self._host_seconds = left, computed * left / seconds if seconds else 0.0
        self.submitted = max(self.submitted, busy_until)
        arrived = self._placed_at
        put = [array for array in self._put if not array.is_deleted()]
        self._put = []
        if put:
            began = self._placing_began
            # Arrays that have arrived by now came while the device was busy with another computation. When they came is
            # not known.
            if not are_ready(put):
                with suppress(RuntimeError, ValueError):  # the program that reads the array fails with the same error
                    wait_until_ready(filter(is_device_array, inputs))
                    began = max(began, perf_counter() if not are_ready(put) else began)
                    wait_until_ready(put)
                arrived = perf_counter()
            self._parts.append(_Part("to device", began, arrived))
        try:
            wait_until_ready(given)
        finally:
            ended = perf_counter()
            # A device runs one computation at a time, in the order in which computations were enqueued.
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

    def tell(
        self,
        jitted: "JittedFunction",
        stacked: "Stacked | None",
        frames: "Sequence[Frame | None]",
        samplers: "Sequence[ExecutionSampler | None]",
    ) -> None:
        """Give the measured times to the profiles, once the job is over; on the event loop.

        Args:
            jitted: the function that the job ran.
            stacked: the stacked arguments of a batch; None for another job.
            frames: the frame of each call of the job; None for a call that does not come from a node.
            samplers: the sampler of each call, which measures the node.
        """
        self.came_back()
        rows, padding_share = (0, 0.0) if stacked is None else (stacked.size, stacked.padding_share)
        node, device = jitted.name, jitted.placement.name
        followed = tuple([frame.identity for frame in frames[:_FOLLOWED] if frame is not None])
        for kind, began, ended in self._parts:
            work = DeviceSlice(kind, device, node, began, ended, len(frames), rows, padding_share, followed)
            collectors.report(Collector.device_worked, work)
        compute = sum([part.ended - part.began for part in self._parts if part.kind == "compute"])
        transfer = sum([part.ended - part.began for part in self._parts if part.kind != "compute"])
        way_seconds, ways = max(0.0, (self._taken_at or 0.0) - self.submitted), 1
        if self._back_seconds is not None:
            way_seconds, ways = way_seconds + self._back_seconds, 2
        seconds = OutsideSeconds(self._compile_seconds, transfer, compute, *self._host_seconds, way_seconds, ways)
        for sampler, count in Counter(samplers).items():
            if sampler is not None:
                sampler.outside = sampler.outside.plus(seconds.for_items(count))


def _on_host(leaf: Any) -> Any:
    """Return an array as a NumPy array; typed random keys stay as they are, and are fetched in `split`."""
    return leaf if is_random_key(leaf) else np.asarray(leaf)
