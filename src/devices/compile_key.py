"""What a compiled program is found by: JAX's configuration, and the signature of the arguments."""

import contextlib
import importlib
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, Final, Protocol, TypeAlias, cast

import numpy as np

from .untyped_jax import jax

# The configuration of JAX that a program was compiled under: part of its key, and carried to the compile thread.
#
# Much of it is local to a thread: `with jax.enable_x64(True)` on a device's thread says nothing to the thread that
# compiles. So a configuration is captured where a call is made, and entered where its program is compiled.

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
        """Make it the configuration of this thread, whatever is set here or globally before or meanwhile."""
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
    """Return a function that reads this thread's state, the settings that make it up, and what stands for "not set".

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


# What a program is compiled for: each argument's structure, shapes and dtypes, or its static value.
#
# This is the hot path of every call on a device: signatures are plain tuples, and arrays that are arguments themselves
# take a shorter way than those inside of a pytree.

# Per argument: (shape, dtype, weak_type) of an array, (tree, leaves) of a pytree, (type, value) of a static one.
Signature: TypeAlias = tuple[tuple[Any, ...], ...]
Leaf: TypeAlias = tuple[tuple[int, ...], Any, bool]


class WeakRows(np.ndarray):
    """Numbers of Python as the rows of a batch: their dtype gives way to that of an array, as a number's does."""


_HOST: Final = 1
_DEVICE: Final = 2
_SCALAR: Final = 3
_KEY: Final = 4
_WEAK: Final = 5
_OTHER: Final = 0
_PYTHON_SCALARS: Final = (bool, int, float, complex)


class Names(Protocol):
    """Names a node and its arguments in errors: a `JittedFunction`, or `Arguments`."""

    @property
    def name(self) -> str:
        """Name of the node."""
        ...

    def parameter(self, position: int) -> str:
        """Return the name of an argument."""
        ...


def signature_of(
    args: tuple[Any, ...], static_argnums: tuple[int, ...], configuration: Configuration, names: Names
) -> Signature:
    """Return what a call is compiled for: arguments that `jax.jit` would tell apart have other signatures.

    Where an array lies is not part of it: a program says where its arguments belong, and they are put there.

    Args:
        args: arrays of JAX or NumPy, Python scalars, pytrees of those, `jax.ShapeDtypeStruct`s in their place.
        static_argnums: positions of the hashable arguments that a program is compiled for.
        configuration: the current one: dtypes depend on it.
        names: how to name an argument in an error.

    Raises:
        TypeError: an argument is neither an array nor static, or is static and not hashable.
    """
    dtypes = configuration.dtypes
    parts: list[tuple[Any, ...]] = []
    for position, arg in enumerate(args):
        if position in static_argnums:
            parts.append(static_part(arg, names, position))
            continue
        kind = _kinds.get(arg.__class__)
        if kind is _DEVICE:
            parts.append((arg.shape, arg.dtype, arg.weak_type))
        elif (kind is _HOST or kind is _WEAK) and (dtype := dtypes.get(arg.dtype)) is not None:
            parts.append((arg.shape, dtype, kind is _WEAK))
        else:
            leaves, tree = jax.tree.flatten(arg)
            described = tuple([_leaf(leaf, configuration, position, names) for leaf in leaves])
            # A leaf that is the argument itself has no structure to speak of.
            parts.append(described[0] if len(leaves) == 1 and leaves[0] is arg else (tree, described))
    return tuple(parts)


def types_of(leaves: list[Any]) -> list[Any] | None:
    """Return what is equal for leaves of two calls only if their signatures are, to compare; None if that is not known.

    It is cheap to make, and to compare where arrays have the very same types, as those that one program gives.

    Args:
        leaves: of the arguments of a function without static ones.
    """
    types: list[Any] = []
    for leaf in leaves:
        kind = _kinds.get(leaf.__class__)
        if kind is _DEVICE or kind is _KEY:
            types.append(leaf.aval)
        elif kind is _HOST:
            types.append((leaf.shape, leaf.dtype))
        elif kind is _SCALAR:
            types.append(leaf.__class__)
        else:
            return None
    return types


def static_part(value: object, names: Names, position: int) -> tuple[Any, ...]:
    """Return the signature of a static value: with its type, as 1, 1.0 and True are equal, but not the same.

    Raises:
        TypeError: it is not hashable.
    """
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{_place(names, position)} is static, and a {type(value).__name__} is not hashable: pass a hashable "
            "value, such as a tuple instead of a list, or take it out of static=(...) and pass an array"
        ) from error
    return type(value), value


def is_device_array(leaf: object) -> bool:
    """Tell whether a leaf is a `jax.Array` (its metaclass would take a microsecond)."""
    kind = _kinds.get(leaf.__class__)
    if kind is None:
        kind = _kind(leaf.__class__)
    return kind is _DEVICE or kind is _KEY


def not_on_device(leaves: Iterable[Any]) -> list[Any]:
    """Return those of some leaves that are no `jax.Array`s."""
    return [leaf for leaf in leaves if _kinds.get(leaf.__class__) is not _DEVICE and not is_device_array(leaf)]


def is_random_key(leaf: object) -> bool:
    """Tell whether a leaf is an array of typed random keys, as of `jax.random.key`."""
    return is_device_array(leaf) and _kinds[type(leaf)] is _KEY


def _leaf(leaf: Any, configuration: Configuration, position: int, names: Names) -> Leaf:
    dtypes = configuration.dtypes
    leaf_type: type[Any] = leaf.__class__
    kind = _kinds.get(leaf_type)
    if kind is None:
        kind = _kind(leaf_type)
    if kind is _DEVICE:
        return leaf.shape, leaf.dtype, leaf.weak_type
    try:
        if kind is _HOST or kind is _WEAK:
            dtype = dtypes.get(leaf.dtype)
            if dtype is None:
                dtype = dtypes[leaf.dtype] = configuration.type_of(np.zeros((), leaf.dtype)).dtype
            return leaf.shape, dtype, kind is _WEAK
        if kind is _KEY:
            return leaf.shape, leaf.dtype, False
        if kind is _SCALAR:
            known = dtypes.get(leaf_type)
            if known is None:
                aval = configuration.type_of(leaf_type())
                known = dtypes[leaf_type] = ((), aval.dtype, aval.weak_type)
            return known
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True), leaf.weak_type
        aval = jax.typeof(leaf)
    except TypeError as error:
        what = f"an array of {leaf.dtype}" if kind is _HOST else f"a {leaf_type.__name__}"
        raise TypeError(
            f"{_place(names, position)} is {what}, which JAX cannot compute with. If it is a choice that the function "
            f"is compiled for, say static=({names.parameter(position)!r},); else pass arrays of numbers."
        ) from error
    return aval.shape, aval.dtype, aval.weak_type


def _place(names: Names, position: int) -> str:
    return f"node {names.name!r}: {names.parameter(position)}"


def _kind(leaf_type: type) -> int:
    if issubclass(leaf_type, jax.Array):
        kind = _DEVICE if hasattr(leaf_type, "weak_type") else _KEY  # of typed random keys
    elif leaf_type is np.ndarray or issubclass(leaf_type, np.generic):
        kind = _HOST
    elif leaf_type is WeakRows:
        kind = _WEAK
    elif leaf_type in _PYTHON_SCALARS:
        kind = _SCALAR
    else:
        return _OTHER  # not remembered: there is no end to them
    _kinds[leaf_type] = kind
    return kind


_kinds: dict[type, int] = {}
