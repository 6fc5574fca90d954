"""Compiled programs: their signatures, and how a program is called and waited for."""

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, is_
from typing import Any, Final, Protocol, TypeAlias, cast

import numpy as np

from .._errors import DeviceError
from .enqueue_order import ENQUEUE_ORDER, Locks, holding, reshard
from .untyped_jax import jax

# The configuration of JAX that a program was compiled under. It is part of the program's key, and is carried to the
# compile thread.
#
# Many options are local to a thread: `with jax.enable_x64(True)` on a device's thread has no effect on the compile
# thread. So the thread of a call captures the configuration, and the compile thread enters it.

# Most processes use one configuration, tests of numerics a handful. If a forgotten configuration comes back, its
# programs are compiled again.
_MAX_KNOWN: Final = 256


class Configuration:
    """The options of JAX on which a compiled program depends. Equal configurations are the same object.

    Attributes:
        state: a hashable value; two configurations with equal states are the same.
        values: the value of every option by its name, for explanations of recompilations.
        dtypes: for each dtype of NumPy, the dtype that JAX gives to such an argument: float64 becomes float32 unless
            x64 is on.
    """

    __slots__ = ("_carried", "dtypes", "state", "values")

    def __init__(self, state: Hashable) -> None:
        self.state = state
        self.values: dict[str, Any] = dict(jax.config.values)
        self.dtypes: dict[Any, Any] = {}
        self._carried = [(setting, setting.value) for setting in _SETTINGS]

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Use this configuration on the calling thread, whatever other code sets for the thread or the process."""
        restore: list[tuple[Any, Any]] = []
        try:
            for setting, value in self._carried:
                if value is None and setting.value is None:
                    continue  # JAX tells a None that was set from a value that was not set, as for the mesh in use
                # Set the value even if it is equal now: the present value may be global, so that another thread can
                # change it.
                restore.append((setting, setting.swap_local(value)))
                _tell(setting, value)
            yield
        finally:
            for setting, before in reversed(restore):
                setting.set_local(before)
                _tell(setting, None if before is UNSET else before)

    def type_of(self, value: Any) -> Any:
        """Return JAX's type of a value under this configuration, even if the thread has another one now."""
        with self.entered():
            return jax.typeof(value)

    def changes_since(self, earlier: "Configuration") -> dict[str, tuple[Any, Any]]:
        """Return the options that differ, with their values before and after.

        If no option with a name differs, there is one entry for the mesh or axis environment.
        """
        changed = {
            name: (earlier.values.get(name), value)
            for name, value in self.values.items()
            if name in earlier.values and earlier.values[name] != value  # parts of JAX add options when first used
        }
        return changed or {"mesh or axis environment": ("one", "another")}


def refuse_own_x64(node: str) -> None:
    """Refuse a call from a thread that has its own setting of 64 bits, because a device's thread would not see that.

    Raises:
        DeviceError: the thread is inside of `with jax.enable_x64(...)`, and the process has another setting.
    """
    own = own_x64()
    if own is not UNSET and own != _X64.get_global():
        raise DeviceError(
            f"{node!r} was called inside of `with jax.enable_x64({own})`. That setting holds for the caller's thread "
            "alone, and the node is compiled and run on other threads. Set the option for the process, before the "
            f'first call: jax.config.update("jax_enable_x64", {own})'
        )


def current() -> Configuration:
    """Return the configuration of the calling thread. This takes a microsecond."""
    global _last  # noqa: PLW0603 - one assignment, so that threads do not disturb each other
    while True:
        state = _state()
        last = _last
        if last is not None and state == last.state:  # costs less than the hash of 40 options
            return last
        known = _known.get(state)
        if known is not None:
            _last = known
            return known
        made = Configuration(state)
        if _state() != state:  # another thread changed an option, perhaps while the options were read
            continue
        if len(_known) >= _MAX_KNOWN:
            _known.pop(next(iter(_known)), None)
        return _known.setdefault(state, made)


def _tell(setting: Any, value: Any) -> None:
    """Call the hook that JAX's own context managers call after they have set a value."""
    hook = getattr(setting, "_update_thread_local_hook", None)
    if hook is not None:
        hook(value)


def _public_state() -> Hashable:
    return tuple((name, str(value)) for name, value in jax.config.values.items())


def _private_parts() -> tuple[Callable[[], Hashable], list[Any], Any, Any]:
    """Return the parts of JAX's configuration that have no public name.

    They are a function that returns the configuration of the calling thread as a hashable value, all settings that a
    thread can have for itself, JAX's value for "not set", and the setting of 64 bits.

    Where this version of JAX does not have them, the public options are read. That takes 16 us instead of 0.1.

    The private key of `jit` lacks the options that JAX checks at each call (NaNs and infinities), and the options that
    only the compiler reads. `state` adds both.
    """
    try:
        config: Any = importlib.import_module("jax._src.config")
        trace_context: Callable[[], Hashable] = config.trace_context
        trace_context()
        setting_type: Any = config.config_ext.Config
        settings = [value for value in cast("dict[str, Any]", vars(config)).values() if isinstance(value, setting_type)]
        nans, infs = config.debug_nans, config.debug_infs
        optimization, memory = config.optimization_level, config.memory_fitting_level
        x64, unset = config.enable_x64, config.config_ext.unset
        _ = x64.get_local(), x64.get_global()  # both exist in this version of JAX
    except (ImportError, AttributeError):
        return _public_state, [], None, None

    def state() -> Hashable:
        return trace_context(), nans.value, infs.value, optimization.value, memory.value

    return state, settings, unset, x64


_state, _SETTINGS, UNSET, _X64 = _private_parts()
# Returns the calling thread's own setting of 64 bits, or `UNSET`. This takes a thirtieth of a microsecond.
own_x64: Final[Callable[[], Any]] = (lambda: None) if _X64 is None else _X64.get_local
_known: dict[Hashable, Configuration] = {}
_last: Configuration | None = None  # the configuration that `current` returned last


# Signatures: a program is compiled for the structure, shapes and dtypes of each argument, or for its static value.
#
# Every call on a device makes a signature, so signatures are plain tuples. An array that is an argument takes less code
# than an array inside of a pytree.

# Per argument: (shape, dtype, weak_type) of an array, (tree, leaves) of a pytree, (type, value) of a static one.
Signature: TypeAlias = tuple[tuple[Any, ...], ...]
Leaf: TypeAlias = tuple[tuple[int, ...], Any, bool]


class WeakRows(np.ndarray):
    """Rows of a batch that were Python numbers. They are weakly typed: an array that meets them keeps its dtype."""


_HOST: Final = 1
_DEVICE: Final = 2
_SCALAR: Final = 3
_KEY: Final = 4
_WEAK: Final = 5
_OTHER: Final = 0
_PYTHON_SCALARS: Final = (bool, int, float, complex)


class Names(Protocol):
    """An object that names a node and its arguments in errors: a `JittedFunction` or `Arguments`."""

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
    """Return the signature of a call. Arguments that `jax.jit` would tell apart have different signatures.

    The device of an array is not part of the signature: a program knows on which device its arguments belong, and a
    call moves them there.

    Args:
        args: arrays of JAX or NumPy, Python scalars, pytrees of these, or `jax.ShapeDtypeStruct`s in place of arrays.
        static_argnums: positions of the hashable arguments that a program is compiled for.
        configuration: the current configuration, which decides about dtypes.
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
            # If the argument is itself a leaf, the signature leaves out the structure.
            parts.append(described[0] if len(leaves) == 1 and leaves[0] is arg else (tree, described))
    return tuple(parts)


def types_of(leaves: list[Any]) -> list[Any] | None:
    """Return the types of leaves, or None for a leaf of an unknown class. If equal, the signatures are equal, too.

    The types are cheap to make. They are cheap to compare if arrays share type objects, as the results of one program
    do.

    Args:
        leaves: the leaves of the arguments of a function that has no static parameters.
    """
    try:
        return [_type_readers[leaf.__class__](leaf) for leaf in leaves]
    except KeyError:
        return None


def static_part(value: object, names: Names, position: int) -> tuple[Any, ...]:
    """Return the signature of a static value. The type is part of it, because 1, 1.0 and True are equal.

    Raises:
        TypeError: the value is not hashable.
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
    """Return whether a leaf is a `jax.Array`. `isinstance` would take a microsecond."""
    kind = _kinds.get(leaf.__class__) or _kind(leaf.__class__)
    return kind is _DEVICE or kind is _KEY


def are_arrays(values: Iterable[Any]) -> bool:
    """Return whether all values are arrays of JAX or NumPy, or numbers, so that each is a leaf."""
    return {*map(type, values)} <= _kinds.keys()


def not_on_device(leaves: Iterable[Any]) -> list[Any]:
    """Return the leaves that are not `jax.Array`s."""
    return [leaf for leaf in leaves if _kinds.get(leaf.__class__) is not _DEVICE and not is_device_array(leaf)]


def is_random_key(leaf: object) -> bool:
    """Return whether a leaf is an array of typed random keys, as `jax.random.key` makes them."""
    return is_device_array(leaf) and _kinds[type(leaf)] is _KEY


def _leaf(leaf: Any, configuration: Configuration, position: int, names: Names) -> Leaf:
    dtypes = configuration.dtypes
    leaf_type: type[Any] = leaf.__class__
    kind = _kinds.get(leaf_type) or _kind(leaf_type)
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
            f"is compiled for, write static=({names.parameter(position)!r},); otherwise pass arrays of numbers."
        ) from error
    return aval.shape, aval.dtype, aval.weak_type


def on_host_of(leaves: Iterable[Any]) -> int:
    """Return how many bytes of some leaves have to be transferred to a device."""
    size_bytes = 0
    for leaf in leaves:  # a hot path: without calls, where possible
        leaf_type = leaf.__class__
        kind = _kinds.get(leaf_type) or _kind(leaf_type)
        if kind is not _DEVICE and kind is not _KEY:
            size_bytes += getattr(leaf, "nbytes", 0)
    return size_bytes


def holds_array(value: object) -> bool:
    """Return whether a pytree holds at least one array."""
    return any(isinstance(leaf, np.ndarray) or is_device_array(leaf) for leaf in jax.tree.leaves(value))


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
        return _OTHER  # not remembered, because the number of such classes has no bound
    _kinds[leaf_type] = kind
    if kind in _READERS:
        _type_readers[leaf_type] = _READERS[kind]
    return kind


_kinds: dict[type, int] = {}
# For `types_of`: the function that reads the type of a leaf, by the leaf's class.
_type_readers: dict[type, Callable[[Any], Any]] = {}
_READERS: Final[dict[int, Callable[[Any], Any]]] = {
    _DEVICE: attrgetter("aval"), _KEY: attrgetter("aval"), _HOST: attrgetter("shape", "dtype"), _SCALAR: type,
}  # fmt: skip


# Results: arrays that may not be computed yet.


def is_ready(array: Any) -> bool:
    """Return whether the computation of an array has ended, also with an error."""
    if not hasattr(array, "is_ready"):  # arrays of typed random keys lack this method
        array = jax.random.key_data(array)
    return bool(array.is_ready())


def are_ready(arrays: Iterable[Any]) -> bool:
    """Return whether the computations of arrays have ended, also with an error; a donated array counts as ended."""
    for array in arrays:
        try:
            if not (array.is_deleted() or is_ready(array)):
                return False
        except (RuntimeError, ValueError):
            if not array.is_deleted():  # else it was donated after the check above
                raise
    return True


def wait_until_ready(arrays: Iterable[Any]) -> None:
    """Block until the computations of arrays have ended. Arrays that were donated are skipped.

    Raises:
        JaxRuntimeError: a computation failed.
    """
    # A donated array would cost an exception below, and a training step donates nearly all results of the step before.
    arrays = [array for array in arrays if not array.is_deleted()]
    try:
        if len(arrays) == 1:
            arrays[0].block_until_ready()
        else:
            jax.block_until_ready(arrays)  # in one call, which releases the interpreter only once
    except (RuntimeError, ValueError):
        if not any(array.is_deleted() for array in arrays):
            raise
    else:
        return
    for array in arrays:
        try:
            array.block_until_ready()
        except (RuntimeError, ValueError):
            if not array.is_deleted():
                raise


def _in_python(compiled: Any, params: Any) -> Callable[..., Any]:
    """Return a function that calls a program without JAX's C++ code."""

    def call(*args: Any) -> Any:
        result, *_ = compiled.call(params, *args)
        return result

    return call


def _callable(compiled: Any) -> Any:
    """Return a function that calls a program."""
    params = getattr(compiled, "_params", None)  # a private name of JAX
    if params is not None and (jax.config.jax_debug_nans or jax.config.jax_debug_infs):
        return _in_python(compiled, params)  # the C++ code would check the first result only
    return compiled


class Executable:
    """A compiled program for one signature; made by `CompileCache`, called on one device's thread.

    Attributes:
        hits: how often the program was found in the cache.
        is_held: whether the cache holds the program.
        transfers: how often an argument was moved for a call, by its name and its shardings before and after.
        used: when the program was last found, as a number that grows with each use of the cache.
    """

    __slots__ = (
        "__weakref__", "_call", "_compiled", "_is_alone", "_is_flat", "_locks", "_names", "_shardings",
        "_static_argnums", "_where", "hits", "is_held", "transfers", "used",
    )  # fmt: skip

    def __init__(
        self,
        compiled: Any,
        names: tuple[str, ...],
        shardings: tuple[Any, ...],
        static_argnums: tuple[int, ...],
        is_flat: bool,
        locks: Locks,
        *,
        is_alone: bool,
    ) -> None:
        """Wrap a program that XLA has compiled.

        Args:
            compiled: JAX's compiled object. The calling thread has entered its configuration.
            names: the name of each leaf of the arguments.
            shardings: the sharding that each leaf needs.
            static_argnums: positions of the arguments whose values are compiled into the program.
            is_flat: whether each of the other arguments is an array, and none a pytree.
            locks: the locks to hold while a call is enqueued.
            is_alone: whether the program has to run alone: a call begins when no other such program is in flight.
        """
        self._compiled = compiled
        self._call = _callable(compiled)
        self._is_flat = is_flat
        self._is_alone = is_alone
        self._locks = locks
        self._names = names
        self._shardings = shardings
        self._static_argnums = static_argnums
        self._where: list[Any] = list(shardings)  # of the last call's arrays, as written there; None for NumPy's
        self.is_held = False
        self.hits = 0
        self.transfers: Counter[tuple[str, Any, Any]] = Counter()
        self.used = 0

    def __call__(self, *args: Any) -> Any:
        """Enqueue a call with these arguments; see `enqueue`."""
        return self.enqueue(args)

    def enqueue(self, args: tuple[Any, ...], leaves: Sequence[Any] | None = None) -> Any:
        """Enqueue a call, and return before its result is computed.

        Arguments of NumPy and Python go to the device with the call. A `jax.Array` on another device is moved.

        Args:
            args: all arguments, static ones included, with the signature of this program.
            leaves: the leaves of these arguments, if the caller knows them.

        Returns:
            The function's result, whose arrays may not be ready yet.
        """
        if self._static_argnums:
            args = tuple([arg for position, arg in enumerate(args) if position not in self._static_argnums])
            leaves = None
        known: Sequence[Any] = args if self._is_flat else jax.tree.leaves(args) if leaves is None else leaves
        where = [getattr(leaf, "sharding", None) for leaf in known]
        if not all(map(is_, where, self._where)):  # nearly always the same objects; to compare them takes microseconds
            moved = self._moved(args)
            if moved is args:
                self._where = where
            args = moved
        return self.call(args)

    def call(self, args: tuple[Any, ...]) -> Any:
        """Enqueue a call whose arguments are on the right devices already."""
        if not self._locks:
            return self._call(*args)
        with holding(self._locks):
            if not self._is_alone:
                return self._call(*args)
            ENQUEUE_ORDER.wait_for_last()
            given = self._call(*args)
            ENQUEUE_ORDER.begun_alone(given)
            return given

    def transferred(
        self, args: tuple[Any, ...], around: Callable[[int], AbstractContextManager[None]]
    ) -> tuple[Any, ...]:
        """Transfer the arrays that are not on the program's devices, and return the arguments of the call.

        Args:
            args: the arguments of a call.
            around: returns a context to transfer in, given the number of bytes; not called if there is nothing to
                transfer.
        """
        dynamic = [position for position in range(len(args)) if position not in self._static_argnums]
        leaves, tree = jax.tree.flatten([args[position] for position in dynamic])
        away = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, np.ndarray) or (is_device_array(leaf) and not self._lies(index, leaf))
        ]
        if not away:
            return args
        with around(sum(leaves[index].nbytes for index in away)):
            for index in away:
                leaves[index] = self._transferred(index, leaves[index])
        placed = dict(zip(dynamic, jax.tree.unflatten(tree, leaves), strict=True))
        return tuple([placed.get(position, arg) for position, arg in enumerate(args)])

    def _transferred(self, index: int, leaf: Any) -> Any:
        sharding = self._shardings[index]
        if isinstance(leaf, np.ndarray):
            # On a CPU the array may be used in place: a caller that does not wait for the result gave a copy (`owned`).
            return jax.device_put(leaf, sharding)
        self.transfers[self._names[index], leaf.sharding, sharding] += 1
        return reshard(leaf, sharding)

    def _moved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Move the arrays that are on other devices to the program's devices, and return the arguments."""
        leaves, tree = jax.tree.flatten(args)
        away = [index for index, leaf in enumerate(leaves) if is_device_array(leaf) and not self._lies(index, leaf)]
        if not away:
            return args
        for index in away:
            leaves[index] = self._transferred(index, leaves[index])
        moved: tuple[Any, ...] = jax.tree.unflatten(tree, leaves)
        return moved

    def _lies(self, index: int, leaf: Any) -> bool:
        """Return whether an array has the sharding that the program needs, or an equivalent one."""
        where, sharding = leaf.sharding, self._shardings[index]
        return where is self._where[index] or where == sharding or where.is_equivalent_to(sharding, leaf.ndim)

    @property
    def memory(self) -> Any:
        """The memory that a call takes on each device, as XLA's `argument_size_in_bytes` and so on; None if unknown."""
        return self._compiled.memory_analysis()
