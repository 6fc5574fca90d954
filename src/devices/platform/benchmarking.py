"""How fast a device computes and transfers, in a few seconds."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ...actors.accepted import POSITIVE, check
from ..jax_types import Device, jit, put
from .inventory import AUTO
from .measurements import Benchmark, Operation, Timed, Unit, summarise
from .selection import select
from .self_check import self_check

if TYPE_CHECKING:
    import jax
    import numpy as np
    import numpy.typing as npt

# Medians and quartiles hardly move after so many runs.
_MOST_RUNS: Final = 50
# A size is left out if one run of it is expected to take more than this share of the time, so that ten or more rounds
# over five operations at four or five sizes fit in, most of which are short.
_LARGEST_RUN_SHARE: Final = 0.005
_MATRIX_SIZES: Final = (256, 512, 1024, 2048, 4096, 8192)
_VECTOR_SIZES: Final = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True)
class _Case:
    """An operation at one size, ready to be timed as often as there is time."""

    operation: Operation
    shape: tuple[int, ...]
    work: int
    unit: Unit
    prepare: Callable[[], Any]
    run: Callable[[Any], object]
    seconds: list[float] = field(default_factory=list[float])

    def once(self) -> float:
        value = self.prepare()
        start = time.perf_counter()
        self.run(value)
        return time.perf_counter() - start


def benchmark(device: str | Device = AUTO, *, seconds: float = 5.0) -> Benchmark:
    """Measure how fast a device multiplies matrices, computes elementwise, reduces, and transfers.

    Every operation runs at several sizes, as large as the time allows. They take turns, so that a noisy moment of the
    machine falls on all of them; what is given are medians and quartiles. It blocks: not for the event loop.

    Args:
        device: what to measure, as `select` takes it.
        seconds: about how long it may take, compiling included; every operation runs at least once, however short that
            is, and the sizes get larger with it.

    Raises:
        DeviceError: there is no such device, or it computes wrong values.
        MissingExtraError: JAX is not installed.
        OptionsError: `seconds` is not a positive number.
    """
    check("seconds", seconds, POSITIVE, "benchmark(")
    chosen = select(device)
    self_check().verify(chosen)
    import jax

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
        measurements=summarise([Timed(c.operation, c.shape, c.work, c.unit, c.seconds) for c in cases]),
    )


def _cases(device: Device, longest_seconds: float) -> Iterator[_Case]:
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


def _matmul(device: Device, size: int) -> _Case:
    def multiply(x: "jax.Array") -> "jax.Array":
        return x @ x

    return _computation("matmul", device, (size, size), 2 * size**3, "FLOP", multiply)


def _elementwise(device: Device, size: int) -> _Case:
    def scale(x: "jax.Array") -> "jax.Array":
        return x * 2 + 1

    return _computation("elementwise", device, (size,), 2 * _FLOAT_BYTES * size, "B", scale)


def _reduction(device: Device, size: int) -> _Case:
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
) -> _Case:
    kept: list[jax.Array] = []

    def argument() -> "jax.Array":
        # Made at the first run: a size that is left out must not take its memory.
        if not kept:
            import numpy as np

            kept.append(put(np.full(shape, 0.5, np.float32), device))
        return kept[0]

    compiled = jit(function, device.platform)
    return _Case(operation, shape, work, unit, argument, lambda x: compiled(x).block_until_ready())


def _to_device(device: Device, size: int) -> _Case:
    kept: list[npt.NDArray[np.float32]] = []

    def argument() -> "npt.NDArray[np.float32]":
        if not kept:
            kept.append(_unaligned(size))
        return kept[0]

    return _Case(
        "host to device",
        (size,),
        _FLOAT_BYTES * size,
        "B",
        argument,
        lambda x: put(x, device).block_until_ready(),
    )


def _to_host(device: Device, size: int) -> _Case:
    import numpy as np

    kept: list[npt.NDArray[np.float32]] = []

    def argument() -> "jax.Array":
        if not kept:
            kept.append(_unaligned(size))
        # A new array each time: one of JAX keeps the copy that the host has made of it.
        return put(kept[0], device).block_until_ready()

    def copy(x: "jax.Array") -> object:
        # On CPU the array is seen in place, and what a program pays is the copy that makes it its own.
        return np.array(x) if device.platform == "cpu" else np.asarray(x)

    return _Case("device to host", (size,), _FLOAT_BYTES * size, "B", argument, copy)


def _unaligned(size: int) -> "npt.NDArray[np.float32]":
    """Return a vector that does not begin at a multiple of 64 bytes: such a one JAX on CPU uses in place, uncopied."""
    import numpy as np

    raw = np.full(size + 32, 0.5, np.float32)
    return next(raw[offset : offset + size] for offset in (0, 1) if raw[offset:].ctypes.data % 64)
