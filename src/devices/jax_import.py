"""The one place that loads JAX, and says what to install where it is missing.

Modules of this folder are imported with `penstock`, which must not load JAX. So they name its types under
`TYPE_CHECKING`, and a function that needs it says `require_jax()` and then `import jax`.
"""

import importlib
import os
import sys
import threading

from .._errors import DeviceError, MissingExtraError
from .jax_types import all_devices, asked_platforms
from .wrong_fusions import StartOfBackends

# The environment belongs to the process: one thread at a time changes it and puts it back.
_starting = threading.Lock()
_start = StartOfBackends()

_is_started = False
_stayed_in_parent = False


def require_jax() -> None:
    """Load JAX, or say how to get it.

    The first call takes about half a second, and is not for the event loop.

    Raises:
        MissingExtraError: JAX is not installed.
    """
    try:
        importlib.import_module("jax")
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):  # of a JAX that is there and broken, its own words say more
            raise
        raise MissingExtraError(
            f'penstock.devices needs JAX, and there is no module named {error.name!r}: pip install "penstock[jax]"',
            name=error.name,
        ) from error


def start_backends() -> None:
    """Load JAX and let it look for devices, which starts its backends. The environment stays as it is.

    While it is imported, JAX sets variables of its own, for the log level of its C++ part and for TPUs. Its backends
    read them when they start; after that they would only confuse child processes, so they are taken back. The same
    goes for the flag that has JAX compute right values on a CPU.

    Raises:
        MissingExtraError: JAX is not installed.
        DeviceError: JAX cannot start the platform that the environment or the configuration asks for, or had started
            before this process was forked.
    """
    if _stayed_in_parent:
        raise DeviceError(
            "JAX had started before this process was forked: its threads stayed in the parent, and a computation here "
            "would wait for them for ever. Start JAX in the forked processes alone: make no array, and call no device, "
            "before they are forked (under `gunicorn --preload`, while modules are imported). Or have them spawned: "
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
        with _start.with_flag():
            all_devices()
    except (RuntimeError, AssertionError) as error:  # without a GPU, JAX_PLATFORMS=cuda fails an assertion of JAX
        asked = asked_platforms()
        wish = f" (JAX_PLATFORMS, or jax_platforms of its configuration, says {asked!r})" if asked else ""
        raise DeviceError(
            f"JAX cannot start its backend{wish}: {str(error) or 'no such platform is here'}. Unset JAX_PLATFORMS to "
            "take what there is, or install the JAX that is made for this accelerator."
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
    global _stayed_in_parent, _starting  # noqa: PLW0603 - as above
    _starting = threading.Lock()  # a thread of the parent may have held it
    # Whoever makes an array starts JAX as well. Its public interface does not tell: asking it for a device starts it.
    bridge = sys.modules.get("jax._src.xla_bridge")
    _stayed_in_parent |= _is_started or (bridge is not None and bridge.backends_are_initialized())


os.register_at_fork(after_in_child=_look_what_stayed)
