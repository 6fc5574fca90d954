"""How fast a device computes and transfers, measured in a few seconds."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from .._errors import DeviceError
from .._public import LateModule
from ..actors.accepted import POSITIVE, check
from ..devices import Device, check_device, jit, select
from ..telemetry.tables import Column, Rendered, Table, milliseconds, quartiles, scaled

if TYPE_CHECKING:
    import jax
    import numpy as np
    import numpy.typing as npt
else:
    jax, np = LateModule("jax"), LateModule("numpy")


Operation: TypeAlias = Literal["matmul", "elementwise", "reduction", "host to device", "device to host"]
Unit: TypeAlias = Literal["FLOP", "B"]

# The resource that limits each operation; operations of one resource share a peak.
RESOURCES: dict[Operation, str] = {
    "matmul": "arithmetic",
    "elementwise": "memory",
    "reduction": "memory",
    "host to device": "host to device",
    "device to host": "device to host",
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """An operation at one size.

    Attributes:
        operation: "matmul" of square float32 matrices, at the device's default precision; "elementwise" `x * 2 + 1` and
            "reduction" to a sum, of float32 vectors; transfers "host to device" and "device to host".
        shape: shape of its input.
        work: how much one run does, in `unit`.
        unit: "FLOP" (an addition and a multiplication are two), or "B" for bytes read and written.
        runs: how often it was measured.
        median_seconds: time of a run, from the call until the result is there.
        low_seconds: a quarter of the runs took at most this.
        high_seconds: three quarters of the runs took at most this.
        rate: work in a second, at the median.
        peak_share: that rate as a share of the best one that this benchmark saw for the same resource: arithmetic,
            memory, or transfers in one direction. From 0 to 1.
    """

    operation: Operation
    shape: tuple[int, ...]
    work: int
    unit: Unit
    runs: int
    median_seconds: float
    low_seconds: float
    high_seconds: float
    rate: float
    peak_share: float


@dataclass(frozen=True, kw_only=True)
class Benchmark(Rendered):
    """How fast a device is. `str()` shows it as a table.

    Attributes:
        device: JAX's name of the device.
        platform: name of its platform.
        kind: name of its hardware.
        jax_version: version of JAX.
        seconds: how long the benchmark took, with compilation.
        measurements: one for each operation and size, in this order.
    """

    device: str
    platform: str
    kind: str
    jax_version: str
    seconds: float
    measurements: tuple[Measurement, ...]

    def _table(self) -> Table:
        columns = ("operation", "shape", "median", "from", "to", "runs", "rate", "of peak")
        return Table(
            facts=(("device", f"{self.device} ({self.kind})"), ("JAX", self.jax_version)),
            columns=tuple(Column(title, is_number=index > 1) for index, title in enumerate(columns)),
            rows=tuple(
                (
                    one.operation,
                    " × ".join(f"{length:,}" for length in one.shape),
                    milliseconds(one.median_seconds),
                    milliseconds(one.low_seconds),
                    milliseconds(one.high_seconds),
                    str(one.runs),
                    scaled(one.rate, f"{one.unit}/s"),
                    f"{one.peak_share:.0%}",
                )
                for one in self.measurements
            ),
            remark="From and to are the quartiles; the peak is the best rate seen here: for arithmetic, for memory "
            "(elementwise and reduction), and for transfers in each direction",
        )


@dataclass(frozen=True)
class Case:
    """An operation at one size, ready to be timed as often as there is time."""

    operation: Operation
    shape: tuple[int, ...]
    work: int
    unit: Unit
    prepare: Callable[[], Any]
    run: Callable[[Any], object]
    seconds: list[float] = field(default_factory=list[float])

    def once(self) -> float:
        """Return how long one run takes."""
        value = self.prepare()
        start = time.perf_counter()
        self.run(value)
        return time.perf_counter() - start


def summarise(timed: Sequence[Case]) -> tuple[Measurement, ...]:
    """Return medians, quartiles, rates and shares of the peak of operations that were timed."""
    peaks: dict[str, float] = {}
    for one in timed:
        resource = RESOURCES[one.operation]
        peaks[resource] = max(peaks.get(resource, 0), one.work / median(one.seconds))
    return tuple(_measurement(one, peaks[RESOURCES[one.operation]]) for one in timed)


def _measurement(timed: Case, peak: float) -> Measurement:
    low, middle, high = quartiles(timed.seconds)
    return Measurement(
        operation=timed.operation,
        shape=timed.shape,
        work=timed.work,
        unit=timed.unit,
        runs=len(timed.seconds),
        median_seconds=middle,
        low_seconds=low,
        high_seconds=high,
        rate=timed.work / middle,
        peak_share=timed.work / middle / peak,
    )


# Medians and quartiles hardly move after so many runs.
_MOST_RUNS: Final = 50
# A size is left out if one run of it is expected to take more than this share of the time, so that ten or more rounds
# over five operations at four or five sizes fit in, most of which are short.
_LARGEST_RUN_SHARE: Final = 0.005
_MATRIX_SIZES: Final = (256, 512, 1024, 2048, 4096, 8192)
_VECTOR_SIZES: Final = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_FLOAT_BYTES: Final = 4


def benchmark(device: str | Device = "auto", *, seconds: float = 5.0) -> Benchmark:
    """Measure how fast a device multiplies matrices, computes elementwise, reduces, and transfers.

    Every operation runs at several sizes, as large as the time allows. They take turns, so that a noisy moment of the
    machine affects all of them; the result has medians and quartiles. The function blocks its thread, so do not call it
    on an event loop.

    Args:
        device: the device to measure, as `select` takes it.
        seconds: about how long it may take, with compilation. More time allows larger sizes; every operation runs at
            least once in any case.

    Raises:
        DeviceError: there is no such device, or it computes wrong values.
        MissingExtraError: JAX is not installed.
        OptionsError: `seconds` is not a positive number.
    """
    check("seconds", seconds, POSITIVE, "benchmark(")
    chosen = select(device)
    if (error := check_device(chosen).error) is not None:
        raise DeviceError(error)
    began = time.perf_counter()
    cases = list(_cases(chosen, seconds * _LARGEST_RUN_SHARE))
    for run in range(_MOST_RUNS):
        for case in cases:
            if run >= 1 and time.perf_counter() > began + seconds:
                break
            case.seconds.append(case.once())
    return Benchmark(
        device=str(chosen),
        platform=chosen.platform,
        kind=chosen.device_kind,
        jax_version=jax.__version__,
        seconds=time.perf_counter() - began,
        measurements=summarise(cases),
    )


def _cases(device: Device, longest_seconds: float) -> Iterator[Case]:
    """Yield every operation at growing sizes, compiled, as long as one run stays short."""
    for make, sizes in (
        (_matmul, _MATRIX_SIZES),
        (_elementwise, _VECTOR_SIZES),
        (_reduction, _VECTOR_SIZES),
        (_to_device, _VECTOR_SIZES),
        (_to_host, _VECTOR_SIZES),
    ):
        before: tuple[int, float] | None = None
        for size in sizes:
            case = make(device, size)
            if before is not None and before[1] * case.work / before[0] > longest_seconds:
                break
            case.once()  # compiles, and touches the memory
            before = (case.work, min(case.once() for _ in range(3)))
            yield case


def _matmul(device: Device, size: int) -> Case:
    def multiply(x: "jax.Array") -> "jax.Array":
        return x @ x

    return _computation("matmul", device, (size, size), 2 * size**3, "FLOP", multiply)


def _elementwise(device: Device, size: int) -> Case:
    def scale(x: "jax.Array") -> "jax.Array":
        return x * 2 + 1

    return _computation("elementwise", device, (size,), 2 * _FLOAT_BYTES * size, "B", scale)


def _reduction(device: Device, size: int) -> Case:
    def add_up(x: "jax.Array") -> "jax.Array":
        return x.sum()

    return _computation("reduction", device, (size,), _FLOAT_BYTES * size, "B", add_up)


def _computation(
    operation: Operation,
    device: Device,
    shape: tuple[int, ...],
    work: int,
    unit: Unit,
    function: "Callable[[jax.Array], jax.Array]",
) -> Case:
    @cache  # made at the first run: a size that is left out must not take its memory
    def argument() -> "jax.Array":
        return _put(np.full(shape, 0.5, np.float32), device)

    compiled = jit(function, device.platform)
    return Case(operation, shape, work, unit, argument, lambda x: compiled(x).block_until_ready())


def _to_device(device: Device, size: int) -> Case:
    def put(x: "npt.NDArray[np.float32]") -> object:
        return _put(x, device).block_until_ready()

    return Case("host to device", (size,), _FLOAT_BYTES * size, "B", cache(partial(_unaligned, size)), put)


def _to_host(device: Device, size: int) -> Case:
    vector = cache(partial(_unaligned, size))

    def argument() -> "jax.Array":
        # A new array each time, because an array of JAX keeps the copy that the host has made of it.
        return _put(vector(), device).block_until_ready()

    def copy(x: "jax.Array") -> object:
        # On a CPU, `asarray` reads the array in place; the cost for a program is that of a copy of its own.
        return np.array(x) if device.platform == "cpu" else np.asarray(x)

    return Case("device to host", (size,), _FLOAT_BYTES * size, "B", argument, copy)


def _put(value: "npt.NDArray[np.float32]", device: Device) -> "jax.Array":
    """Return a value as an array on a device; the transfer may still be under way."""
    return cast("jax.Array", jax.device_put(value, device))  # pyright: ignore[reportUnknownMemberType]


def _unaligned(size: int) -> "npt.NDArray[np.float32]":
    """Return a vector that does not begin at a multiple of 64 bytes: JAX on a CPU would not copy an aligned one."""
    raw = np.full(size + 32, 0.5, np.float32)
    return next(raw[offset : offset + size] for offset in (0, 1) if raw[offset:].ctypes.data % 64)
