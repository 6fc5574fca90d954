"""JAX as Penstock uses it: JAX is imported and started at the first use, and its untyped parts get types here."""

import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeGuard, TypeVar, cast

from .._errors import DeviceError, MissingExtraError
from .._public import LateModule
from .wrong_fusions import compiler_options, starting_without_wrong_fusions

if TYPE_CHECKING:
    import jax
else:
    jax = LateModule("jax")

P = ParamSpec("P")
R = TypeVar("R")


class Device(Protocol):
    """The part of `jax.Device` that Penstock uses."""

    @property
    def id(self) -> int:
        """Number of the device, unique in its platform over all processes."""
        ...

    @property
    def platform(self) -> str:
        """Name of its platform: "cpu", "gpu", "tpu"."""
        ...

    @property
    def device_kind(self) -> str:
        """Name of its hardware."""
        ...

    @property
    def process_index(self) -> int:
        """Number of the process that the device belongs to; 0 unless `jax.distributed` is in use."""
        ...

    def memory_stats(self) -> dict[str, int] | None:
        """Return the counters of the device's allocator, in bytes; None if the allocator has no counters."""
        ...


def all_devices(platform: str | None = None) -> list[Device]:
    """Return the devices of a platform, including those of other processes; without a name, of the default platform.

    Raises:
        RuntimeError: there is no such platform.
    """
    return cast("list[Device]", jax.devices(platform))  # pyright: ignore[reportUnknownMemberType]


def jit(function: Callable[P, R], platform: str) -> Callable[P, R]:
    """Return a function that JAX compiles at its first call, with the options of device nodes.

    The options switch off fusions that JAX is known to compile to wrong values.

    Args:
        function: takes and returns arrays, of any shapes.
        platform: name of the platform that runs the function, such as "cpu".

    Returns:
        The function, compiled anew for each combination of shapes and types.
    """
    jitted = jax.jit(function, compiler_options=compiler_options(platform))  # pyright: ignore[reportUnknownMemberType]
    return cast("Callable[P, R]", jitted)


def local_devices(platform: str | None = None) -> list[Device]:
    """Return the devices of a platform that belong to this process; without a name, of the default platform.

    Raises:
        RuntimeError: there is no such platform.
    """
    return cast("list[Device]", jax.local_devices(backend=platform))  # pyright: ignore[reportUnknownMemberType]


def platforms() -> list[str]:
    """Return the names of the platforms that have started, the default one first."""
    import jax.extend.backend

    names = list(jax.extend.backend.backends())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    default: str = local_devices()[0].platform
    return sorted(names, key=lambda name: local_devices(name)[0].platform != default)


def is_device(value: object) -> TypeGuard[Device]:
    """Whether a value is a device of JAX."""
    return isinstance(value, jax.Device)  # pyright: ignore[reportUnknownMemberType]


# Modules of this folder are imported with `penstock`, which must not import JAX. So they import JAX's types under
# `TYPE_CHECKING`, and a function that needs JAX calls `require_jax()` first and then imports JAX.

# Starting JAX changes the environment of the process and restores it, so only one thread at a time may do that.
_starting = threading.Lock()

_is_started = False
_stayed_in_parent = False


def require_jax() -> None:
    """Import JAX, or raise an error that says how to install it.

    The first call takes about half a second: do not make it on the event loop.

    Raises:
        MissingExtraError: JAX is not installed.
    """
    try:
        importlib.import_module("jax")
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):  # JAX is installed but broken, and its own error says more
            raise
        raise MissingExtraError(
            f'penstock.devices needs JAX, and there is no module named {error.name!r}: pip install "penstock[jax]"',
            name=error.name,
        ) from error


def start_backends() -> None:
    """Import JAX and have it look for devices, which starts its backends. The environment variables do not change.

    While JAX is imported, it sets variables for the log level of its C++ part and for TPUs. Its backends read these
    variables when they start. After that, the variables would only confuse child processes, so they are restored. The
    same is done for the flag that makes JAX compute right values on a CPU.

    Raises:
        MissingExtraError: JAX is not installed.
        DeviceError: JAX cannot start the platform that the environment or the configuration asks for, or JAX had
            started before this process was forked.
    """
    if _stayed_in_parent:
        raise DeviceError(
            "JAX had started before this process was forked: its threads stayed in the parent, and a computation here "
            "would wait for them for ever. Start JAX in the forked processes alone: make no array, and call no device, "
            "before they are forked (under `gunicorn --preload`, while modules are imported). Or spawn the processes: "
            'gunicorn without --preload, multiprocessing.get_context("spawn").'
        )
    with _starting:
        _start_backends()


def _start_backends() -> None:
    global _is_started  # noqa: PLW0603 - one for the process, as JAX is
    loaded_before = "jax" in sys.modules
    before = dict(os.environ)
    require_jax()
    set_by_jax = {} if loaded_before else {key: value for key, value in os.environ.items() if before.get(key) != value}
    _is_started = True
    try:
        with starting_without_wrong_fusions():
            all_devices()
    except (RuntimeError, AssertionError) as error:  # without a GPU, JAX_PLATFORMS=cuda fails an assertion of JAX
        asked = cast("str | None", getattr(jax.config, "jax_platforms", None))
        wish = f" (JAX_PLATFORMS, or jax_platforms of its configuration, says {asked!r})" if asked else ""
        raise DeviceError(
            f"JAX cannot start its backend{wish}: {str(error) or 'no such platform is here'}. Unset JAX_PLATFORMS to "
            "use a platform that is here, or install the JAX that is made for this accelerator."
        ) from error
    finally:
        for key, value in set_by_jax.items():
            if os.environ.get(key) != value:
                continue
            if key in before:
                os.environ[key] = before[key]
            else:
                del os.environ[key]


def _look_what_stayed() -> None:
    global _stayed_in_parent, _starting  # noqa: PLW0603 - one for the process, as JAX is
    _starting = threading.Lock()  # a thread of the parent may have held it
    # Code that makes an array starts JAX, too. No public function tells whether JAX has started: each would start it.
    bridge = sys.modules.get("jax._src.xla_bridge")
    _stayed_in_parent |= _is_started or (bridge is not None and bridge.backends_are_initialized())


os.register_at_fork(after_in_child=_look_what_stayed)


def persistent_compile_cache(folder: str | Path, *, min_compile_seconds: float = 0.0, min_bytes: int = 0) -> None:
    """Keep compiled programs in a folder, for this process and later ones. This changes the configuration of JAX.

    A program that takes 400 ms to compile takes 14 ms to read. Processes may share a folder. A process finds the
    programs that were compiled by the same JAX for the same kind of device, and adds its own.

    Args:
        folder: the folder; made if it does not exist. JAX never removes a file from it.
        min_compile_seconds: programs that compile in less time, in seconds, are not kept.
        min_bytes: smaller programs are not kept.

    Raises:
        MissingExtraError: JAX is not installed.
        OSError: the folder cannot be made.
    """
    require_jax()
    from jax.experimental.compilation_cache import compilation_cache

    jax: Any = sys.modules["jax"]  # whose `config` is unknown in part
    path = Path(folder).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_compile_seconds)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", min_bytes)
    # JAX looks for the folder once, at the first compilation of the process, which may have happened already.
    compilation_cache.reset_cache()
