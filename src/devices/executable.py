"""Compiled programs: the key that finds one, and the call of one on its device's thread; resharding is one of them."""

import contextlib
import importlib
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from operator import is_
from typing import Any, Final, Protocol, TypeAlias, cast

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from .jax_import import Device
from .shardings import REPLICATED, mesh_name, spec_text
from .untyped_jax import jax
from .wrong_fusions import compiler_options

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
        """Return the options that differ, with the values before and after; `mesh or axis` stands for unnamed ones."""
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
    """Return the signature that a call is compiled for: arguments that `jax.jit` would tell apart have different ones.

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


# Enqueue order: what spans several devices is enqueued on all of them before anything else is.
#
# A program with collectives waits on each of its devices for the others. Were two of them enqueued in different orders
# on two devices, they would wait for each other for ever. What runs on one device only waits for nothing, and may
# overtake.
#
# The devices of a CPU are threads of one pool, which is as large as the machine has cores. A program with collectives
# holds one for each of its devices until all have come, so two of them may have some each, and wait for ever: after 40
# seconds XLA aborts the process. So there one of them is in flight at a time, whatever its devices are.

Locks: TypeAlias = tuple[threading.Lock, ...]


class EnqueueOrder:
    """Locks of the process's devices; meshes may overlap in any way, and threads may be of any event loop."""

    def __init__(self) -> None:
        # Of what the last program gives that has to be alone: one array, and all of them while they are in use.
        self._alone: Any = None
        self._given: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, int], threading.Lock] = {}

    def locks(self, devices: "Iterable[Device]") -> Locks:
        """Return the locks to hold while a program is enqueued on these devices; none for a single one."""
        # All take them in one order, or two threads would each have what the other one needs.
        keys = sorted({(device.platform, device.id) for device in devices})
        if len(keys) < 2:
            return ()
        if keys[0][0] == "cpu":
            keys = [("cpu", 0)]
        with self._lock:
            return tuple([self._locks.setdefault(key, threading.Lock()) for key in keys])

    def wait_for_last(self, read: Any = None) -> None:
        """Block until the last program that has to be alone has ended; while the locks are held.

        Args:
            read: an array. What reads the result of that program begins after it anyway, and does not wait here.
        """
        if self._alone is None or (read is not None and any(one() is read for one in self._given)):
            return
        try:
            self._alone.block_until_ready()
        except Exception:  # noqa: BLE001 - it was donated since, or has failed, which its own callers are told
            pass

    def begun_alone(self, given: Any) -> None:
        """Note what a program gives that has to be alone; while the locks are held."""
        arrays: list[Any] = jax.tree.leaves(given)
        self._alone = min(arrays, key=_size_bytes, default=None)  # it stays in memory
        self._given = [*map(weakref.ref, arrays)]


def _size_bytes(array: Any) -> int:
    return int(array.nbytes)


@contextmanager
def holding(locks: Locks) -> Generator[None]:
    """Hold locks of `EnqueueOrder.locks`; never while others are held."""
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


# One for the process, as the devices are.
ENQUEUE_ORDER: Final = EnqueueOrder()


_COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|send|recv)(-start)?\(")


def has_collectives(compiled: Any) -> bool:
    """Return whether the devices of a program wait for each other."""
    return _COLLECTIVE.search(compiled.as_text()) is not None


# Resharding: moves an array from one device or mesh to another, without waiting until it is computed.
#
# `jax.device_put` between meshes is right, and waits for the array on the calling thread where the parts do not happen
# to be the same (measured with JAX 0.10.1 on CPU; a compiled program does not wait). So the array is first laid out as
# it has to be on the devices where it is, by a compiled identity, and then each part is copied to the device that takes
# it.


def reshard(array: Any, target: Sharding) -> Any:
    """Return an array moved to another device or sharding, without waiting until it is computed.

    Args:
        array: a `jax.Array`.
        target: the sharding to give it.
    """
    devices = _devices(array.sharding), _devices(target)
    with holding(ENQUEUE_ORDER.locks(devices[0] | devices[1])):
        if isinstance(array.sharding, NamedSharding) and len(devices[0]) > 1:
            array = _ready_to_copy(array, array.sharding, target)
        return jax.device_put(array, target)


def _ready_to_copy(array: Any, source: NamedSharding, target: Sharding) -> Any:
    """Return an array of a mesh laid out so that each part of `target` is one of its parts, or whole on one device."""
    there = _devices(target)
    if isinstance(target, NamedSharding) and len(there) == len(_devices(source)):
        mesh, wanted = cast("Mesh", source.mesh), cast("Mesh", target.mesh)
        devices, shape = cast("Any", mesh.devices), cast("Any", wanted.devices).shape
        same_parts = Mesh(devices.reshape(shape), wanted.axis_names, wanted.axis_types)
        return _lay_out(array, NamedSharding(same_parts, target.spec))
    whole: Any = _lay_out(array, NamedSharding(source.mesh, REPLICATED))
    copies: list[Any] = whole.addressable_shards
    return next((copy for copy in copies if copy.device in there), copies[0]).data


def _lay_out(array: Any, sharding: NamedSharding) -> Any:
    if next(iter(_devices(sharding))).platform != "cpu":
        return _laid_out(sharding)(array)
    ENQUEUE_ORDER.wait_for_last(array)
    given = _laid_out(sharding)(array)
    ENQUEUE_ORDER.begun_alone(given)
    return given


# One program per layout and shape. Sixty-four layouts are more than a process has, and each is small.
@lru_cache(maxsize=64)
def _laid_out(sharding: NamedSharding) -> Any:
    device = next(iter(_devices(sharding)))
    return jax.jit(_identity, out_shardings=sharding, compiler_options=compiler_options(device.platform))


def _identity(array: Any) -> Any:
    return array


def describe(sharding: Sharding) -> str:
    """Return where an array lies: "cpu:0", or "mesh(data=4) P('data', None)"."""
    if isinstance(sharding, NamedSharding) and len(_devices(sharding)) > 1:
        return f"{mesh_name(cast('Mesh', sharding.mesh))} {spec_text(sharding.spec)}"
    devices = sorted(_devices(sharding), key=lambda device: (device.platform, device.id))
    return ", ".join([f"{device.platform}:{device.id}" for device in devices])


def _devices(sharding: Sharding) -> set[Device]:
    return cast("set[Device]", cast("Any", sharding).device_set)


class Executable:
    """A compiled program for one signature; made by `CompileCache`, called on one device's thread.

    Attributes:
        hits: how often it was found in the cache.
        is_held: whether it is there.
        transfers: how often an argument lay elsewhere and was moved for a call, by its name and the shardings that it
            had and got.
        used: when it was found last, as a number that grows.
    """

    __slots__ = (
        "__weakref__", "_compiled", "_is_alone", "_is_flat", "_locks", "_names", "_shardings", "_static_argnums",
        "_usual", "hits", "is_held", "transfers", "used",
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
        """Wrap what XLA has made.

        Args:
            compiled: JAX's compiled object.
            names: of each leaf of the arguments.
            shardings: where each of them belongs.
            static_argnums: positions of the arguments that are compiled in.
            is_flat: each of the others is an array, none a pytree.
            locks: to hold while it is enqueued.
            is_alone: whether it begins when no other program that has to be alone is in flight.
        """
        self._compiled = compiled
        self._is_flat = is_flat
        self._is_alone = is_alone
        self._locks = locks
        self._names = names
        self._shardings = shardings
        self._static_argnums = static_argnums
        self._usual: list[Any] = list(shardings)  # as the arrays of the last call spelled them; None for one of NumPy
        self.is_held = False
        self.hits = 0
        self.transfers: Counter[tuple[str, Any, Any]] = Counter()
        self.used = 0

    def __call__(self, *args: Any) -> Any:
        """Dispatch a call, and return before it has been computed.

        Arguments of NumPy and Python go to the device with the call. A `jax.Array` that lies elsewhere is moved.

        Args:
            *args: all arguments, static ones included, with the signature that this was found for.

        Returns:
            The function's result, of arrays that may not be ready yet.
        """
        if self._static_argnums:
            args = tuple([arg for position, arg in enumerate(args) if position not in self._static_argnums])
        leaves = args if self._is_flat else jax.tree.leaves(args)
        where = [getattr(leaf, "sharding", None) for leaf in leaves]
        if not all(map(is_, where, self._usual)):  # to compare two takes microseconds; they are nearly always the same
            moved = self._moved(args)
            if moved is args:
                self._usual = where
            args = moved
        if not self._locks:
            return self._compiled(*args)
        with holding(self._locks):
            if not self._is_alone:
                return self._compiled(*args)
            ENQUEUE_ORDER.wait_for_last()
            given = self._compiled(*args)
            ENQUEUE_ORDER.begun_alone(given)
            return given

    def transferred(
        self, args: tuple[Any, ...], around: Callable[[int], AbstractContextManager[None]]
    ) -> tuple[Any, ...]:
        """Return the arguments of a call, with the arrays on the device that the call would have to transfer.

        Args:
            args: as of a call.
            around: opened around the transfer, with the number of bytes; not opened if there is nothing to transfer.
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
            # On a CPU it may be used in place: a caller that does not wait for the result has given a copy (`owned`).
            return jax.device_put(leaf, sharding)
        self.transfers[self._names[index], leaf.sharding, sharding] += 1
        return reshard(leaf, sharding)

    def _moved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with every array where it belongs."""
        leaves, tree = jax.tree.flatten(args)
        away = [index for index, leaf in enumerate(leaves) if is_device_array(leaf) and not self._lies(index, leaf)]
        if not away:
            return args
        for index in away:
            leaves[index] = self._transferred(index, leaves[index])
        moved: tuple[Any, ...] = jax.tree.unflatten(tree, leaves)
        return moved

    def _lies(self, index: int, leaf: Any) -> bool:
        """Tell whether an array lies as the program expects it; equal shardings may be spelled differently."""
        where, sharding = leaf.sharding, self._shardings[index]
        return where is self._usual[index] or where == sharding or where.is_equivalent_to(sharding, leaf.ndim)

    @property
    def memory(self) -> Any:
        """What XLA says that a call takes on each device: `argument_size_in_bytes` and so on; None if it does not."""
        return self._compiled.memory_analysis()

    @property
    def cost(self) -> dict[str, float]:
        """What XLA says that a call costs: "flops", "bytes accessed"; empty where its backend does not tell."""
        analysis: dict[str, float] | None = self._compiled.cost_analysis()
        return analysis or {}
