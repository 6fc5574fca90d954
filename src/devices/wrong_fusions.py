"""Some versions of JAX compute wrong values on CPU, in new fusions. Penstock compiles without these fusions.

A matrix product that is followed by a sum, with a constant of equal elements, gives NaN or garbage (public reports: jax
issues 39103, 39257 and 40412). An empty value of JAX's option for these fusions leaves them out. Every program that
Penstock compiles for a CPU gets the option. If Penstock starts JAX's backends, all other programs of the process get
the option, too, through `XLA_FLAGS`. With any other version of JAX, Penstock changes nothing.
"""

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from .._errors import DeviceError
from ..telemetry import logs

# The versions of jaxlib, the compiler, that compute wrong values. Each was tried; 0.10.1 and earlier ones are right.
WRONG_JAXLIBS: Final = {"0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"}
# Read from the environment once: "0" leaves JAX as it is.
OPTION: Final = "PENSTOCK_AVOID_WRONG_FUSIONS"
XLA_OPTION: Final = "xla_cpu_experimental_ynn_fusion_type"
XLA_FLAG: Final = f"--{XLA_OPTION}="


@cache
def is_switched_off() -> bool:
    """Return whether the user wants JAX with these fusions.

    Raises:
        DeviceError: the environment variable has another value than 0 or 1.
    """
    value = os.environ.get(OPTION, "1")
    if value not in ("0", "1"):
        raise DeviceError(f"{OPTION}={value!r} in the environment: write 1, or 0 to leave JAX as it is")
    return value == "0"


def is_avoided() -> bool:
    """Return whether the JAX that is loaded has these fusions, and Penstock compiles without them."""
    jaxlib: Any = importlib.import_module("jaxlib.version")
    return jaxlib.__version__ in WRONG_JAXLIBS and not is_switched_off()


def compiler_options(platform: str) -> dict[str, str] | None:
    """Return the options with which Penstock compiles its own programs on a platform; None for JAX's defaults."""
    return {XLA_OPTION: ""} if platform == "cpu" and is_avoided() else None


_backends_started = False  # with the flag, or with a warning that they were started without it


@contextmanager
def starting_without_wrong_fusions() -> Generator[None]:
    """Leave the fusions out of every program of the process, if JAX's backends start inside of this context.

    XLA reads `XLA_FLAGS` once, when the first backend starts. A flag that is set later has no effect in this process,
    and aborts a child process whose jaxlib does not know it. Only one thread at a time may be inside.
    """
    global _backends_started  # noqa: PLW0603 - one for the process, as the backends are
    given = os.environ.get("XLA_FLAGS")
    flags = given or ""
    if _backends_started or not is_avoided() or _has_flag(flags):
        yield
        return
    if _have_started() or (flags.strip() and not flags.lstrip().startswith("-")):  # no "-": a file with the flags
        _backends_started = True
        _warn()
        yield
        return
    # The flag comes after the flags of the user, because XLA takes the last of two equal flags.
    os.environ["XLA_FLAGS"] = flags = f"{flags} {XLA_FLAG}".lstrip()
    try:
        yield
        _backends_started = True
    finally:
        if os.environ.get("XLA_FLAGS") == flags:
            if given is None:
                del os.environ["XLA_FLAGS"]
            else:
                os.environ["XLA_FLAGS"] = given


def _has_flag(flags: str) -> bool:
    """Return whether the user has left the fusions out: the last of equal flags counts."""
    return [flag for flag in flags.split() if flag.startswith(XLA_FLAG)][-1:] == [XLA_FLAG]


def _have_started() -> bool:
    """Return whether backends run. JAX has no public name for this; all affected versions have this private name."""
    bridge: Any = importlib.import_module("jax._src.xla_bridge")
    return bool(bridge.backends_are_initialized())


def _warn() -> None:
    jaxlib: Any = importlib.import_module("jaxlib.version")
    logs.warning(
        "jax.may_compute_wrong_values",
        jaxlib=jaxlib.__version__,
        programs="those of jax.jit and jax.numpy on CPU, outside of device nodes and device actors, such as a matrix "
        "product that is summed",
        remedy=f"use Penstock's devices before JAX's, as with penstock.devices.select(), or start Python with "
        f"XLA_FLAGS={XLA_FLAG} (nothing behind the equals sign)",
        page="docs/how-to/devices.md",
    )
