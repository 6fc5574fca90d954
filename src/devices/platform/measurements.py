"""What a benchmark of a device has measured, and how it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal, TypeAlias

from ...telemetry.tables.quantities import milliseconds, scaled
from ...telemetry.tables.rendered import Rendered
from ...telemetry.tables.table import Column, Table

Operation: TypeAlias = Literal["matmul", "elementwise", "reduction", "host to device", "device to host"]
Unit: TypeAlias = Literal["FLOP", "B"]

# What an operation is limited by: those of one resource share a peak.
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
        shape: of its input.
        work: what one run does, in `unit`.
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
        device: what JAX calls the device.
        platform: name of its platform.
        kind: name of its hardware.
        jax_version: the JAX that was measured.
        seconds: how long the benchmark took, compiling included.
        measurements: what was measured, by operation and size.
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
            remark="From and to are the quartiles. The peak is the best rate seen here: for arithmetic, for memory "
            "(elementwise and reduction), and for transfers in each direction.",
        )


@dataclass(frozen=True)
class Timed:
    """The times of one operation at one size."""

    operation: Operation
    shape: tuple[int, ...]
    work: int
    unit: Unit
    seconds: Sequence[float]


def summarise(timed: Sequence[Timed]) -> tuple[Measurement, ...]:
    """Return medians, quartiles, rates and shares of the peak of what was timed."""
    peaks: dict[str, float] = {}
    for one in timed:
        resource = RESOURCES[one.operation]
        peaks[resource] = max(peaks.get(resource, 0), one.work / median(one.seconds))
    return tuple(_measurement(one, peaks[RESOURCES[one.operation]]) for one in timed)


def _measurement(timed: Timed, peak: float) -> Measurement:
    middle = median(timed.seconds)
    low, _, high = quantiles(timed.seconds, n=4, method="inclusive") if len(timed.seconds) > 1 else [middle] * 3
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
