"""The self-check: a JAX that computes wrong values is refused before it has computed anything for a user.

JAX 0.10.2 and later compute wrong values on a CPU: a dot that is followed by a reduction, with a constant of equal
elements, gives NaN or garbage. Penstock sets compiler options that avoid this fault (`wrong_fusions`), and the
self-check finds out whether these options work.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from .._errors import DeviceError
from .._public import LateModule
from .jax_import import Device, jit, require_jax
from .wrong_fusions import OPTION, WRONG_JAXLIBS, XLA_FLAG, is_switched_off

if TYPE_CHECKING:
    import jax
    import numpy as np
    import numpy.typing as npt
else:
    jax, np = LateModule("jax"), LateModule("numpy")


Matrix: TypeAlias = "npt.NDArray[np.float32]"

# As in pyproject.toml, in the quotes that a shell needs.
JAX_REQUIREMENT: Final = '"jax>=0.9.2"'
# The last version that computes right values without an option, on Python 3.11 to 3.14.
_RIGHT_JAX: Final = '"jax==0.10.1"'
# The size at which the fault of 0.10.2 was found.
_SIZE: Final = 256


@dataclass(frozen=True, kw_only=True)
class SelfCheckResult:
    """The result of the self-check for one kind of device.

    Attributes:
        platform: the name of the platform: "cpu", "gpu", "tpu".
        kind: the name of the hardware, as JAX gives it.
        passed: whether the device computed right values.
        seconds: how long the check took; most of the time goes into compiling.
        error: the fault and its remedy; None if the device passed.
    """

    platform: str
    kind: str
    passed: bool
    seconds: float
    error: str | None


class SelfCheck:
    """Checks each kind of device once in a process, whichever thread uses such a device first."""

    def __init__(self, compute: "Callable[[Device, Matrix], Matrix] | None" = None) -> None:
        """Make a check that no device has passed yet.

        Args:
            compute: computes `(x @ ones).sum(0)` of a matrix on a device; a test passes a function that is wrong.
        """
        self._compute = compute or _dot_and_reduce
        self._lock = threading.Lock()
        self._results: dict[tuple[str, str], SelfCheckResult] = {}

    def check(self, device: Device) -> SelfCheckResult:
        """Check the kind of a device, if that kind was not checked before. Concurrent callers wait for the same check.

        The check blocks for about 50 ms, to compile: call it in the thread of the device, never on the event loop.
        """
        key = (device.platform, device.device_kind)
        if key not in self._results:
            with self._lock:
                if key not in self._results:
                    self._results[key] = self._run(device)
        return self._results[key]

    def verify(self, device: Device) -> None:
        """Check the kind of a device, as `check` does, and refuse a device that computes wrong values.

        Raises:
            DeviceError: the device computes wrong values; the message says what to install.
        """
        result = self.check(device)
        if result.error is not None:
            raise DeviceError(result.error)

    def _run(self, device: Device) -> SelfCheckResult:
        require_jax()
        # Small whole numbers are exact even if the device rounds the inputs of a product to bfloat16 or TF32.
        matrix = (np.arange(_SIZE * _SIZE, dtype=np.float32).reshape(_SIZE, _SIZE) % 7) - 3
        right = (matrix @ np.ones((_SIZE, _SIZE), np.float32)).sum(0)
        start = time.perf_counter()
        # In a new thread: meshes, tracing and other contexts of JAX belong to the thread that entered them.
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-self-check") as thread:
            found = thread.submit(self._compute, device, matrix).result()
        seconds = time.perf_counter() - start
        wrong = np.flatnonzero(found != right)
        error = None if not wrong.size else _explanation(device, found[wrong[0]], right[wrong[0]])
        return SelfCheckResult(
            platform=device.platform, kind=device.device_kind, passed=error is None, seconds=seconds, error=error
        )


def _dot_and_reduce(device: Device, matrix: "Matrix") -> "Matrix":
    def penstock_self_check(x: "jax.Array") -> "jax.Array":
        return (x @ np.ones((_SIZE, _SIZE), np.float32)).sum(0)  # a constant of the program, not an argument

    placed: jax.Array = jax.device_put(matrix, device)  # pyright: ignore[reportUnknownMemberType]
    return np.asarray(jit(penstock_self_check, device.platform)(placed))


def _explanation(device: Device, found: Any, right: Any) -> str:
    text = (
        f"JAX {jax.__version__} computes wrong values on {device.platform} ({device.device_kind}): a matrix product "
        f"followed by a sum gave {found} where {right} is right, so nothing runs there."
    )
    if device.platform == "cpu" and is_switched_off():
        text += f" Unset {OPTION}: then Penstock avoids the fault of JAX {', '.join(sorted(WRONG_JAXLIBS))}."
    elif device.platform == "cpu":
        text += (
            f" Install a version that computes right values: pip install {_RIGHT_JAX}; or try whether XLA_FLAGS="
            f"{XLA_FLAG} (nothing behind the equals sign), set before Python starts, avoids the fault."
        )
    else:
        text += f" Install another version: pip install {JAX_REQUIREMENT}."
    return text


# One object for the process, because the process shares the devices.
SELF_CHECK: Final = SelfCheck()


def check_device(device: Device) -> SelfCheckResult:
    """Check whether a kind of device computes right values. The first check of a kind compiles, and blocks for 50 ms.

    Args:
        device: the device, as `select` returns it.
    """
    return SELF_CHECK.check(device)
