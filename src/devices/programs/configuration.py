"""The configuration of JAX that a program was compiled under: part of its key, and carried to the compile thread.

Much of it is local to a thread: `with jax.enable_x64(True)` on a device's thread says nothing to the thread that
compiles. So a configuration is captured where a call is made, and entered where its program is compiled.
"""

import contextlib
import importlib
from collections.abc import Callable, Generator, Hashable
from typing import Any, Final, cast

from ..untyped_jax import jax

# Most programs know one configuration, tests of numerics a handful. One that is forgotten is compiled for again.
_MAX_KNOWN: Final = 256


class Configuration:
    """All of JAX's configuration that changes what a function compiles to; equal ones are the same object.

    Attributes:
        state: what tells it from others.
        values: name to value of every option, for explanations.
        dtypes: what each dtype of NumPy becomes as an argument: float64 is float32 unless x64 is on.
    """

    __slots__ = ("_carried", "dtypes", "state", "values")

    def __init__(self, state: Hashable) -> None:
        self.state = state
        self.values: dict[str, Any] = dict(jax.config.values)
        self.dtypes: dict[Any, Any] = {}
        self._carried = [(setting, setting.value) for setting in _SETTINGS]

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Make it this thread's configuration, whatever has been set here or globally meanwhile, or will be."""
        restore: list[tuple[Any, Any]] = []
        try:
            for setting, value in self._carried:
                if value is None and setting.value is None:
                    continue  # a context, as that of a mesh: to JAX a None that was set is not the same as none
                # Also where it is the same already: that may be the global one, which another thread can change.
                restore.append((setting, setting.swap_local(value)))
                _tell(setting, value)
            yield
        finally:
            for setting, before in reversed(restore):
                setting.set_local(before)
                _tell(setting, None if before is _UNSET else before)

    def type_of(self, value: Any) -> Any:
        """Return JAX's type of a value under this configuration, whatever has been set meanwhile."""
        with self.entered():
            return jax.typeof(value)

    def changes_since(self, earlier: "Configuration") -> dict[str, tuple[Any, Any]]:
        """Return the options that differ: before and after by name; `mesh or axis` stands for what has no name."""
        changed = {
            name: (earlier.values.get(name), value)
            for name, value in self.values.items()
            if name in earlier.values and earlier.values[name] != value  # parts of JAX bring options when first used
        }
        return changed or {"mesh or axis environment": ("one", "another")}


def current() -> Configuration:
    """Return the configuration of this thread. Costs half a microsecond."""
    while True:
        state = _state()
        known = _known.get(state)
        if known is not None:
            return known
        made = Configuration(state)
        if _state() != state:  # another thread has changed an option, perhaps before all were read
            continue
        if len(_known) >= _MAX_KNOWN:
            _known.pop(next(iter(_known)), None)
        return _known.setdefault(state, made)


def _tell(setting: Any, value: Any) -> None:
    """Do what JAX's own context managers do besides setting a value."""
    hook = getattr(setting, "_update_thread_local_hook", None)
    if hook is not None:
        hook(value)


def _public_state() -> Hashable:
    return tuple((name, str(value)) for name, value in jax.config.values.items())


def _private_parts() -> tuple[Callable[[], Hashable], list[Any], Any]:
    """Return what reads the state of this thread, every setting that it is made of, and what stands for none.

    JAX has no public name for what its own `jit` is keyed on, so this asks the private one (0.1 us), and where a
    release moves it, falls back on the public options (16 us). The private one lacks what JAX checks per call and not
    per program (NaNs and infinities), and what only its compiler reads.
    """
    try:
        config: Any = importlib.import_module("jax._src.config")
        trace_context: Callable[[], Hashable] = config.trace_context
        trace_context()
        setting_type: Any = config.config_ext.Config
        settings = [value for value in cast("dict[str, Any]", vars(config)).values() if isinstance(value, setting_type)]
        nans, infs = config.debug_nans, config.debug_infs
        optimization, memory = config.optimization_level, config.memory_fitting_level
    except (ImportError, AttributeError):
        return _public_state, [], None

    def state() -> Hashable:
        return trace_context(), nans.value, infs.value, optimization.value, memory.value

    return state, settings, config.config_ext.unset


_state, _SETTINGS, _UNSET = _private_parts()
_known: dict[Hashable, Configuration] = {}
