"""Arguments of device nodes: bound, described as what a program is compiled for, stacked for a batch, and split."""

import contextlib
import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from .._errors import DeviceError
from ..actors.packing import in_order
from ..engine.tracing.annotations import signature_of as parameters_of
from ..telemetry import logs
from .device_batch import Buckets, DeviceBatch, PackedBatch, padded_length
from .untyped_jax import jax

# The configuration of JAX that a program was compiled under: part of its key, and carried to the compile thread.
#
# Much of it is local to a thread: `with jax.enable_x64(True)` on a device's thread has no effect on the thread that
# compiles. So the thread of a call captures the configuration, and the compile thread enters it.

# Most processes use one configuration, tests of numerics a handful. If one that was forgotten comes back, its programs
# are compiled again.
_MAX_KNOWN: Final = 256


class Configuration:
    """The options of JAX on which a compiled program depends. Equal configurations are the same object.

    Attributes:
        state: a hashable value; two configurations with equal states are the same.
        checks: the values of the options that JAX's C++ code does not compare when it looks a call up.
        values: the value of every option by its name, for explanations.
        dtypes: the dtype that JAX gives to an argument of each dtype of NumPy: float64 becomes float32 unless x64 is
            on.
    """

    __slots__ = ("_carried", "checks", "dtypes", "state", "values")

    def __init__(self, state: Hashable) -> None:
        self.state = state
        self.checks = None if checks is None else checks()
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
                    continue  # such as the mesh in use: JAX tells a None that was set from no value
                # Set it even if it is equal now: the present value may be the global one, which another thread can
                # change.
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
    """Refuse a call from a thread that has a setting of 64 bits of its own, which the thread of a device would not see.

    Raises:
        DeviceError: the thread is inside of `with jax.enable_x64(...)`, and the process has another setting.
    """
    own = own_x64()
    if own is not UNSET and own != _X64.get_global():
        raise DeviceError(
            f"{node!r} was called inside of `with jax.enable_x64({own})`, which holds for the thread of the caller, "
            "and is compiled and run on others: set it for the process, before the first call, by "
            f'jax.config.update("jax_enable_x64", {own})'
        )


def current() -> Configuration:
    """Return the configuration of the calling thread; this takes a microsecond."""
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


class _PrivateParts(NamedTuple):
    """What JAX has no public name for.

    Attributes:
        state: returns the state of the calling thread.
        checks: returns the part of it that JAX's C++ code does not compare.
        settings: all settings that a thread can have for itself.
        unset: JAX's value for "not set".
        x64: the setting of 64 bits.
    """

    state: Callable[[], Hashable]
    checks: Callable[[], Hashable] | None
    settings: list[Any]
    unset: Any
    x64: Any


def _private_parts() -> _PrivateParts:
    """Return what JAX has no public name for; without it, the public options are read, which takes 16 us for 0.1.

    The private key of `jit` lacks the options that JAX checks at each call (NaNs and infinities) and those that only
    its compiler reads: `state` adds them.
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
        _ = x64.get_local(), x64.get_global()  # there they are
    except (ImportError, AttributeError):
        return _PrivateParts(_public_state, None, [], None, None)

    def checks() -> Hashable:
        return nans.value, infs.value, optimization.value, memory.value

    def state() -> Hashable:
        return trace_context(), checks()

    return _PrivateParts(state, checks, settings, unset, x64)


_state, checks, _SETTINGS, UNSET, _X64 = _private_parts()
# Returns the setting of 64 bits that the calling thread has for itself, or `UNSET`; in a thirtieth of a microsecond.
own_x64: Final[Callable[[], Any]] = (lambda: None) if _X64 is None else _X64.get_local
_known: dict[Hashable, Configuration] = {}
_last: Configuration | None = None  # which `current` returned last


# Signatures: a program is compiled for the structure, shapes and dtypes of each argument, or for its static value.
#
# Every call on a device makes one, so they are plain tuples, and an array that is an argument itself takes a shorter
# way than one inside of a pytree.

# Per argument: (shape, dtype, weak_type) of an array, (tree, leaves) of a pytree, (type, value) of a static one.
Signature: TypeAlias = tuple[tuple[Any, ...], ...]
Leaf: TypeAlias = tuple[tuple[int, ...], Any, bool]


class WeakRows(np.ndarray):
    """Rows of a batch that are Python numbers: their dtype gives way to that of an array, as a number's does."""


_HOST: Final = 1
_DEVICE: Final = 2
_SCALAR: Final = 3
_KEY: Final = 4
_WEAK: Final = 5
_OTHER: Final = 0
_PYTHON_SCALARS: Final = (bool, int, float, complex)
_PLAIN: Final = {np.ndarray, *_PYTHON_SCALARS}


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

    The device of an array is not part of it: a program knows where its arguments belong, and a call moves them there.

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
    """Return types of leaves that are equal for two calls only if the signatures are equal; None if that is not known.

    They are cheap to make, and cheap to compare if arrays have identical type objects, as the results of one program
    do.

    Args:
        leaves: the leaves of the arguments of a function that has no static ones.
    """
    try:
        return [_type_readers[leaf.__class__](leaf) for leaf in leaves]
    except KeyError:
        return None


def static_part(value: object, names: Names, position: int) -> tuple[Any, ...]:
    """Return the signature of a static value. It has the type, because 1, 1.0 and True are equal, but not the same.

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
    """Return whether a leaf is a `jax.Array`; `isinstance` would take a microsecond."""
    kind = _kinds.get(leaf.__class__)
    if kind is None:
        kind = _kind(leaf.__class__)
    return kind is _DEVICE or kind is _KEY


def are_arrays(values: Iterable[Any]) -> bool:
    """Return whether values are arrays of JAX or NumPy, or numbers, and so their own leaves."""
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
            f"is compiled for, write static=({names.parameter(position)!r},); otherwise pass arrays of numbers."
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
        return _OTHER  # not remembered: their number has no bound
    _kinds[leaf_type] = kind
    if kind in _READERS:
        _type_readers[leaf_type] = _READERS[kind]
    return kind


_kinds: dict[type, int] = {}
# For `types_of`: what reads the type of a leaf of each class.
_type_readers: dict[type, Callable[[Any], Any]] = {}
_READERS: Final[dict[int, Callable[[Any], Any]]] = {
    _DEVICE: attrgetter("aval"), _KEY: attrgetter("aval"), _HOST: attrgetter("shape", "dtype"), _SCALAR: type,
}  # fmt: skip


# Stacking: arrays of several items become one array each, with a row per item; results become rows again.
#
# All of it happens on the host, in NumPy: 27 rows of 256 float32 take 13 us to stack there, and 228 us with jax.numpy.
# Only `on_host` and `split` may wait for a device, because they read arrays that may not be computed yet: the thread of
# the device calls them.

_PASSED_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TAKEN_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def mask_parameters(signature: inspect.Signature, padded: Iterable[str], node: str) -> dict[str, str]:
    """Find the parameters that take the masks.

    The mask of `tokens` is `tokens_mask`, or `mask` if no other parameter is padded.

    Args:
        signature: the signature of the function.
        padded: names of the padded parameters, the keys of `DeviceBatch(pad_axes=...)`.
        node: its name, for errors.

    Returns:
        For each padded parameter the name of the one that takes its mask, in the order of the padded ones.

    Raises:
        TypeError: a padded name is not a parameter, or the function has no parameter for its mask.
    """
    names = list(padded)
    parameters = signature.parameters
    found: dict[str, str] = {}
    for name in names:
        if name not in parameters or parameters[name].kind not in _PASSED_BY_POSITION:
            raise TypeError(
                f"node {node!r} has pad_axes={{{name!r}: ...}}, but no such parameter; it has {', '.join(parameters)}"
            )
        wanted = [f"{name}_mask", *(["mask"] if len(names) == 1 else [])]
        mask = next((one for one in wanted if one in parameters and one not in names), None)
        if mask is None:
            raise TypeError(
                f"node {node!r} pads {name!r}, so it has to tell padding from elements: add the parameter "
                f"{' or '.join(f'{one}=None' for one in wanted)}, an array of bool, True where an element is real"
            )
        found[name] = mask
    for mask in found.values():
        _check_mask(parameters[mask], node)
    _check_order(signature, set(found.values()), node)
    return found


def row_parameters(signature: inspect.Signature, node: str) -> tuple[str, ...]:
    """Return the parameters that say which elements of a row belong together: `segments`, and `positions` if it is one.

    Raises:
        TypeError: the function does not take `segments`, or takes one of the two in another way.
    """
    parameters = signature.parameters
    found = tuple(name for name in ("segments", "positions") if name in parameters)
    if "segments" not in found:
        raise TypeError(
            f"node {node!r} has batch=PackedBatch(...), so it has to tell the items of a row apart: add the parameter "
            "segments=None, an array of int32 [rows, length], 0 where a row is padding"
        )
    for name in found:
        _check_mask(parameters[name], node)
    _check_order(signature, {*found}, node)
    return found


def _check_mask(mask: inspect.Parameter, node: str) -> None:
    if mask.default is not None or mask.kind not in _TAKEN_BY_KEYWORD:
        raise TypeError(
            f"node {node!r}: the parameter {mask.name!r} is passed by keyword in a batch and left out otherwise: make "
            f"it {mask.name}=None"
        )


def _check_order(signature: inspect.Signature, masks: set[str], node: str) -> None:
    first: str | None = None
    for name, parameter in signature.parameters.items():
        if name in masks:
            first = first or name
        elif first is not None and parameter.kind in (*_PASSED_BY_POSITION, inspect.Parameter.VAR_POSITIONAL):
            raise TypeError(f"node {node!r}: move the parameter {first!r} behind {name!r}, which callers pass")


# An array: its dtype, its shape, and its kind: None, WEAK, or the implementation of a typed random key.
Kind: TypeAlias = tuple[Any, tuple[int, ...], Any]
# The form of an item's arguments after padding: for each of them the structure of its pytree, and the kind of each
# array. It is hashable, and items with equal forms can be stacked.
ItemSignature: TypeAlias = tuple[tuple[Any, tuple[Kind, ...]], ...]
# An array of NumPy or JAX, or one of NumPy's scalars.
Array: TypeAlias = Any

# The most signatures to remember: where shapes change with every item, remembering them saves nothing.
_MOST_KNOWN: Final = 256
# A warning names an array whose copies take more than this in one batch: copying so much takes 20 ms, and as much
# memory on the device.
_MOST_REPEATED_BYTES: Final = 64 << 20
_NUMPY: Final[tuple[type[Any], ...]] = (np.ndarray, np.generic)
# The dtype of a number of Python gives way to that of an array: `x * 2` has the dtype of x. JAX calls that weak.
WEAK: Final = "weak"
_OF_PYTHON: Final = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


class BatchItem(NamedTuple):
    """The arguments of one item, ready to be stacked.

    Attributes:
        signature: items with equal signatures can be stacked.
        arrays: the arrays of all arguments, not copied.
        lengths: for each padded argument, its lengths along the padded axes.
        is_on_host: whether all of them are NumPy's; an array of JAX may not be computed yet.
        size_bytes: the size of the arrays.
        shared: the arguments that are not stacked, but are the same for all items of a batch.
        cost: its part of the `max_cost` of a batch, or of a row; 0 without such a limit.
        kept: the leaves of shared pytrees. Their identities are in the group of the item, and a pytree may make them
            anew each time that it is flattened, so they are kept while the item waits: no other leaf gets an identity.
    """

    signature: ItemSignature
    arrays: tuple[Array, ...]
    lengths: tuple[tuple[int, ...], ...]
    is_on_host: bool
    size_bytes: int
    shared: tuple[Any, ...] = ()
    cost: float = 0
    kept: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Stacked:
    """The arguments of a batch.

    Its buffers are new. Once they have been passed to JAX, which on a CPU may use them in place, no code may write to
    them again, or use them for another batch.

    Attributes:
        arguments: one pytree for each parameter; its arrays have one row per item, and rows of padding.
        masks: for each padded parameter an array of bool, with the padded lengths as the shape of a row; of packed rows
            their segments and positions.
        count: number of items.
        size: number of rows, with those of padding.
        real_elements: elements of the items' arrays.
        elements: elements of the arguments' arrays.
        parts: for each item of packed rows, the index of its part of a result; None if each item has a row of its own.
        tokens: elements along the packed axis, of all rows; 0 without packed rows.
        item_tokens: those of the items.
    """

    arguments: tuple[Any, ...]
    masks: tuple[Array, ...]
    count: int
    size: int
    real_elements: int
    elements: int
    parts: list[Any] | None = None
    tokens: int = 0
    item_tokens: int = 0

    @property
    def padding_share(self) -> float:
        """Share of the elements that are padding, of rows or of lengths: 0 to 1."""
        return 1 - self.real_elements / self.elements if self.elements else 0.0


class Stacker:
    """Stacks the arguments of one node's items.

    Args:
        node: its name, for errors.
        parameters: names of the parameters whose arguments are stacked.
        batch: which axes are padded, and to which lengths; or into which rows the first axes are packed.

    Attributes:
        axes: for each of the parameters the axes of its arrays that are padded, or packed.
        padded: those of the parameters that have such axes, in their order; masks have it too.
        packed: how items share rows; None if each has a row of its own.
    """

    def __init__(self, node: str, parameters: Sequence[str], batch: DeviceBatch | PackedBatch) -> None:
        self._node = node
        self.packed = batch if isinstance(batch, PackedBatch) else None
        self._length_buckets: Buckets = batch.lengths if isinstance(batch, PackedBatch) else batch.length_buckets
        pad_axes = dict.fromkeys(parameters, 0) if isinstance(batch, PackedBatch) else batch.pad_axes
        axes = [pad_axes.get(parameter, ()) for parameter in parameters]
        self._parameters = [
            (name, (each,) if isinstance(each, int) else each) for name, each in zip(parameters, axes, strict=True)
        ]
        self.axes = tuple(each for _, each in self._parameters)
        self.padded = tuple(name for name, each in self._parameters if each)
        # Signatures and sizes of arguments that are NumPy's, by configuration, dtypes and shapes.
        self._known: dict[tuple[Any, ...], tuple[ItemSignature, int]] = {}
        self._told_of: set[str] = set()

    def item(self, arguments: Sequence[Any], configuration: Configuration, shared: tuple[Any, ...] = ()) -> BatchItem:
        """Return the arguments of an item with their signature, without copying or waiting for arrays.

        Args:
            arguments: one pytree of arrays for each parameter. A Python number in it counts as an array of JAX's dtype
                for it.
            configuration: the one that the program is compiled under: 64-bit dtypes become 32-bit ones unless x64 is
                on.
            shared: the arguments that are not stacked.

        Raises:
            TypeError: an argument holds something that is not an array.
            ValueError: an array is too long or has too few axes, or a number is too large.
        """
        # The common case first: arrays and scalars of NumPy without padding. Every item pays for it.
        if self.padded:
            return self._looked_at(arguments, configuration, shared)
        parts: list[Any] = [configuration]
        for array in arguments:
            if type(array) is not np.ndarray and not isinstance(array, np.generic):
                return self._looked_at(arguments, configuration, shared)
            parts += [array.dtype, array.shape]  # pyright: ignore[reportUnknownMemberType]
        key = tuple(parts)
        known = self._known.get(key)
        if known is not None:
            return BatchItem(known[0], tuple(arguments), (), True, known[1], shared)
        item = self._looked_at(arguments, configuration, shared)
        if len(self._known) < _MOST_KNOWN:
            self._known[key] = item.signature, item.size_bytes
        return item

    def _looked_at(self, arguments: Sequence[Any], configuration: Configuration, shared: tuple[Any, ...]) -> BatchItem:
        signature: list[Any] = []
        arrays: list[Array] = []
        lengths: list[tuple[int, ...]] = []
        for (parameter, axes), argument in zip(self._parameters, arguments, strict=True):
            try:
                leaves, structure = jax.tree.flatten(argument)
                found = [leaf if type(leaf) is np.ndarray else _as_array(leaf, configuration) for leaf in leaves]
                besides = [None if type(leaf) is np.ndarray else _besides(leaf) for leaf in leaves]
                kinds = [
                    (_dtype(array.dtype, configuration), array.shape, what)
                    for array, what in zip(found, besides, strict=True)
                ]
            except (TypeError, ValueError) as error:
                raise self._refusal(parameter, argument, configuration, error) from error
            if axes:
                lengths.append(self._lengths(parameter, axes, kinds))
                kinds = [(dtype, self._padded(parameter, axes, shape), besides) for dtype, shape, besides in kinds]
            signature.append((structure, tuple(kinds)))
            arrays += found
        if not arrays:
            raise TypeError(f"node {self._node!r} has batch=, and its arguments hold no array that could be stacked")
        is_on_host = {*map(type, arrays)} == {np.ndarray}
        size_bytes = sum([array.nbytes for array in arrays])
        cost = 0 if self.packed is None else self._size_in_row(lengths, signature)
        return BatchItem(tuple(signature), tuple(arrays), tuple(lengths), is_on_host, size_bytes, shared, cost)

    def _size_in_row(self, lengths: list[tuple[int, ...]], signature: list[Any]) -> int:
        """Return the room that an item takes in a row: its length, and at least 1, so that an empty one has a place.

        Raises:
            ValueError: its arrays have different lengths.
            TypeError: it has random keys.
        """
        if len({*lengths}) > 1:
            found = ", ".join(f"{name} {length}" for name, (length,) in zip(self.padded, lengths, strict=True))
            raise ValueError(
                f"node {self._node!r}: the arrays of an item share the places of a row, and have different lengths "
                f"({found}): name those that are no sequences in shared="
            )
        if any(besides not in (None, WEAK) for _, kinds in signature for *_, besides in kinds):
            raise TypeError(f"node {self._node!r}: random keys cannot be packed into rows: name them in shared=")
        return max(1, lengths[0][0])

    def stack(self, items: Sequence[BatchItem], size: int) -> Stacked:
        """Stack items with equal signatures; copies of the last row pad the batch, zeros pad arrays to their lengths.

        A copy of a row gives no NaN that the row itself does not give.

        Args:
            items: at least one, with their arrays `on_host`.
            size: rows to make, at least as many as items; of packed ones as many as hold them.
        """
        if self.packed is not None:
            return self._stack_packed(items, size, self.packed)
        columns = zip(*[item.arrays for item in items], strict=True)
        return self.stack_columns(items[0].signature, columns, [item.lengths for item in items], size)

    def stack_columns(
        self,
        signature: ItemSignature,
        columns: Iterator[tuple[Array, ...]],
        all_lengths: Sequence[tuple[tuple[int, ...], ...]],
        size: int,
    ) -> Stacked:
        """Stack items with this signature, given array by array, as `stack` does.

        Args:
            signature: theirs.
            columns: for each array of an item, that of all items.
            all_lengths: for each item, the lengths of its padded arguments.
            size: rows to make.
        """
        count = len(all_lengths)
        assert count <= size
        arguments: list[Any] = []
        masks: list[Array] = []
        real_elements = elements = 0
        for (parameter, axes), (structure, kinds) in zip(self._parameters, signature, strict=True):
            stacked: list[Array] = []
            for (dtype, shape, besides), rows in zip(kinds, columns, strict=False):
                if len(rows) * rows[0].nbytes > _MOST_REPEATED_BYTES and parameter not in self._told_of:
                    self._warn_of_repeated(parameter, rows)
                make = _column_of_lengths if axes else _column
                if besides is None:
                    column = make(rows, dtype, shape, size)
                elif besides is WEAK:
                    column = make(rows, dtype, shape, size).view(WeakRows)
                else:
                    of_key = rows[0].shape[len(shape) :]  # behind the axes of the array of keys
                    column = KeyRows(make(rows, rows[0].dtype, shape + of_key, size), besides)
                stacked.append(column)
                elements += size * math.prod(shape)
                real = [math.prod(row.shape[: len(shape)]) for row in rows] if axes else [count * math.prod(shape)]
                real_elements += sum(real)
            if axes:
                lengths = [each[len(masks)] for each in all_lengths]
                masks.append(_mask(lengths, [kinds[0][1][axis] for axis in axes], size))
            arguments.append(structure.unflatten(stacked))
        return Stacked(tuple(arguments), tuple(masks), count, size, real_elements, elements)

    def _stack_packed(self, items: Sequence[BatchItem], size: int, packed: PackedBatch) -> Stacked:
        length = _row_length(items[0])
        segments, positions = np.zeros((size, length), np.int32), np.zeros((size, length), np.int32)
        counted = np.arange(length, dtype=np.int32)
        places: list[tuple[int, slice]] = []
        parts: list[Any] = []
        for row, members in enumerate(self.rows_of(items, packed)):
            start = 0
            for number, item in enumerate(members):
                (count,) = item.lengths[0]
                place = row, slice(start, start + count)
                segments[place] = number + 1
                positions[place] = counted[:count]
                places.append(place)
                # With the ellipsis, a number is an array, as in `_rows`.
                parts.append((row, number, ...) if packed.results == "items" else place)
                start += int(item.cost)
        columns = zip(*[item.arrays for item in items], strict=True)
        arguments: list[Any] = []
        real_elements = elements = 0
        for structure, kinds in items[0].signature:
            stacked: list[Array] = []
            for (dtype, shape, besides), arrays in zip(kinds, columns, strict=False):
                column = np.zeros((size, *shape), dtype)
                for place, array in zip(places, arrays, strict=True):
                    column[place] = array
                stacked.append(column.view(WeakRows) if besides is WEAK else column)
                elements += column.size
                real_elements += sum([array.size for array in arrays])
            arguments.append(structure.unflatten(stacked))
        return Stacked(
            tuple(arguments), (segments, positions), len(items), size, real_elements, elements,
            parts, segments.size, sum([item.lengths[0][0] for item in items]),
        )  # fmt: skip

    def rows_of(self, items: Sequence[BatchItem], packed: PackedBatch) -> list[list[BatchItem]]:
        """Return items of one group row by row."""
        return in_order(items, _cost, _row_length(items[0]), packed.items_per_row)

    def check_packed(self, result: Iterable[Array], shape: tuple[int, int]) -> None:
        """Check the arrays of a result for packed rows.

        Args:
            result: the arrays.
            shape: of the segments.

        Raises:
            ValueError: an array does not have an entry for each item, or each token, of each row.
        """
        assert self.packed is not None
        wanted = (shape[0], self.packed.items_per_row) if self.packed.results == "items" else shape
        for array in result:
            found: tuple[int, ...] = getattr(array, "shape", ())  # a number of Python has none
            if found[:2] != wanted:
                raise ValueError(
                    f"node {self._node!r} has PackedBatch(results={self.packed.results!r}), so each array of its "
                    f"result begins with the axes [rows, {self.packed.results}], here {[*wanted]}, and one has the "
                    f"shape {[*found]}"
                )

    def describe(self, item: BatchItem) -> str:
        """Return a padded item as text, for an error: "tokens int32[128], scale float32[]; 516 bytes"."""
        texts: list[str] = []
        size = 0
        for (parameter, _), (_, kinds) in zip(self._parameters, item.signature, strict=True):
            for dtype, shape, _ in kinds:
                texts.append(f"{parameter} {dtype}[{','.join(map(str, shape))}]")
                size += math.prod(shape) * dtype.itemsize
        return f"{', '.join(texts)}; {size:,} bytes"

    def _warn_of_repeated(self, parameter: str, rows: tuple[Array, ...]) -> None:
        """Warn, once for a parameter, if copies of one array take much memory in a column."""
        _, count = Counter([(row.ctypes.data, row.shape, row.strides) for row in rows]).most_common(1)[0]
        size_bytes = count * rows[0].nbytes
        if count > 1 and size_bytes > _MOST_REPEATED_BYTES:
            self._told_of.add(parameter)
            logs.warning(
                "batch.repeats_one_array",
                node=self._node,
                argument=parameter,
                rows=count,
                size_bytes=size_bytes,
                remedy=f"say @device_node(shared=({parameter!r},)), which passes it once for all rows",
            )

    def _lengths(self, parameter: str, axes: tuple[int, ...], kinds: list[Kind]) -> tuple[int, ...]:
        """Return the lengths of an argument's arrays along its padded axes."""
        what = f"node {self._node!r}, argument {parameter!r}"
        for _, shape, _ in kinds:
            if self.packed is not None and not shape:
                raise ValueError(
                    f"{what}: a sequence is an array with a first axis, and this is a number: name the parameter in "
                    "shared=, or in static=, if all calls of a batch pass the same"
                )
            if max(axes) >= len(shape):
                raise ValueError(f"{what}: pad_axes= names axis {max(axes)}, and an array has the shape {shape}")
        found = {tuple([shape[axis] for axis in axes]) for _, shape, _ in kinds}
        if len(found) != 1:
            raise ValueError(
                f"{what}: it is {self._made}, and its arrays have different lengths {sorted(found)} along axis "
                f"{', '.join(map(str, axes))}: pass them as several arguments"
                if found
                else f"{what}: it is {self._made}, and holds no array"
            )
        return found.pop()

    @property
    def _made(self) -> str:
        return "padded" if self.packed is None else "packed"

    def _padded(self, parameter: str, axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        padded = list(shape)
        for axis in axes:
            length = padded_length(shape[axis], self._length_buckets)
            if length is None:
                option, remedy = ("length_buckets", "bucket") if self.packed is None else ("lengths", "length")
                raise ValueError(
                    f"node {self._node!r}, argument {parameter!r}: its length is {shape[axis]} along axis {axis}, and "
                    f"the last of {option}={self._length_buckets} is shorter: shorten it, or add a {remedy}"
                )
            padded[axis] = length
        return tuple(padded)

    def _refusal(self, parameter: str, argument: Any, configuration: Configuration, error: Exception) -> Exception:
        """Return an error that names the place in an argument that cannot be stacked."""
        place = parameter
        with suppress(TypeError, ValueError):  # it ends at the leaf that is refused, whose place this is
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
                place = parameter + jax.tree_util.keystr(path)
                _dtype(_as_array(leaf, configuration).dtype, configuration)
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(f"node {self._node!r}, argument {place!r}: {error}")


def on_host(item: BatchItem) -> BatchItem:
    """Return an item whose arrays are all NumPy arrays; this blocks until a device has computed them.

    Raises:
        Exception: the computation of an array has failed with it.
    """
    if item.is_on_host:
        return item
    return item._replace(arrays=tuple(map(_fetched, item.arrays)), is_on_host=True)


def split(result: Any, stacked: Stacked, node: str) -> list[Any]:
    """Split the result of a batch into the results of its items; this blocks until it is computed.

    Args:
        result: a pytree of arrays with one row per row of the arguments.
        stacked: the arguments.
        node: name of the node, for errors.

    Returns:
        One pytree for each item. Its arrays are read-only views of the batch's, which they keep alive.

    Raises:
        ValueError: an array of the result does not have one row for each row of the arguments.
    """
    leaves, structure = jax.tree.flatten(result)
    columns: list[list[Array]] = []
    for leaf in leaves:
        array = _fetched(leaf)
        if array.shape[:1] != (stacked.size,):
            raise ValueError(
                f"node {node!r} has batch=, and an array of its result has the shape {array.shape}; the first axis is "
                f"that of the batch, of {stacked.size} items"
            )
        if array.flags.writeable:
            array = array.view()
            array.flags.writeable = False
        parts = stacked.parts
        rows = _rows(array, stacked.count) if parts is None else [array[part] for part in parts]
        if is_random_key(leaf):
            kind = jax.random.key_impl(leaf)
            rows = [jax.random.wrap_key_data(row, impl=kind) for row in rows]
        columns.append(rows)
    if not columns:
        return [result] * stacked.count
    if leaves[0] is result:
        return columns[0]
    return [structure.unflatten(row) for row in zip(*columns, strict=True)]


def _cost(item: BatchItem) -> float:
    return item.cost


def _row_length(item: BatchItem) -> int:
    """Return the length of the rows that an item goes into: that of its arrays, as its signature has them."""
    (_, ((_, shape, _), *_)), *_ = item.signature
    return shape[0]


def _rows(array: Array, count: int) -> list[Array]:
    # Without the ellipsis, the rows of a vector would be scalars of NumPy, and not arrays as without a batch.
    return list(array[:count]) if array.ndim > 1 else [array[row, ...] for row in range(count)]


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Typed random keys of several items: NumPy stacks the numbers that they are made of.

    It is a pytree of one array. `of` is a part of its structure, so a program is compiled for one implementation of
    keys.

    Attributes:
        words: the numbers, with one axis more than the keys.
        of: the implementation of the keys.
    """

    words: Array
    of: Any

    def keys(self) -> Array:
        """Return the keys; called while a program is traced."""
        return jax.random.wrap_key_data(self.words, impl=self.of)


jax.tree_util.register_dataclass(KeyRows, data_fields=["words"], meta_fields=["of"])


def unwrapped(argument: Any) -> Any:
    """Return an argument of a batch as its function takes it: with keys in the place of `KeyRows`."""

    def is_keys(node: object) -> bool:
        return isinstance(node, KeyRows)

    def keys(leaf: object) -> object:
        return leaf.keys() if isinstance(leaf, KeyRows) else leaf

    return jax.tree.map(keys, argument, is_leaf=is_keys)


def _fetched(array: Array) -> Array:
    """Wait until an array is computed, and return it as a NumPy array."""
    return np.asarray(jax.random.key_data(array) if is_random_key(array) else array)


def _besides(leaf: Any) -> Any:
    """Return the third part of the `Kind` of a leaf."""
    if not is_device_array(leaf):
        # JAX gives True and False no weak dtype.
        return WEAK if leaf.__class__ in _OF_PYTHON and leaf.__class__ is not bool else None
    if is_random_key(leaf):
        return jax.random.key_impl(leaf)
    return WEAK if leaf.weak_type else None


def _as_array(leaf: Any, configuration: Configuration) -> Array:
    """Return an array as it is, and a number as an array.

    Raises:
        TypeError: the leaf is neither an array nor a number.
        ValueError: the number is too large.
    """
    kind: type[Any] = leaf.__class__
    if issubclass(kind, np.ma.MaskedArray):
        raise TypeError("a masked array has no place on a device: pass its data and its mask as two arrays")
    if issubclass(kind, _NUMPY):
        return np.asarray(leaf)
    if is_device_array(leaf):
        return leaf
    if kind in _OF_PYTHON:
        try:
            return np.asarray(leaf, _dtype(np.dtype(_OF_PYTHON[kind]), configuration))
        except OverflowError as error:
            raise ValueError(f"{error}; it would need 64 bits, which jax_enable_x64 gives") from error
    raise TypeError(f"{kind.__name__} is not an array or a number: convert it to an array first, or name it in static=")


def _dtype(dtype: Any, configuration: Configuration) -> Any:
    """Return the dtype that JAX gives to an argument of this dtype.

    Raises:
        TypeError: JAX does not compute with this dtype.
    """
    dtypes = configuration.dtypes
    found = dtypes.get(dtype)
    if found is None:
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            return dtype
        try:
            found = dtypes[dtype] = configuration.type_of(np.zeros((), dtype)).dtype
        except TypeError as error:
            raise TypeError(
                f"an array of {dtype} cannot be stacked for a device: convert it to an array of numbers first"
            ) from error
    return found


def _column(rows: tuple[Array, ...], dtype: Any, shape: tuple[int, ...], size: int) -> Array:
    column = np.empty((size, *shape), dtype)
    # By an array of their own dtype, as NumPy refuses a scalar that is too large for a column of 32 bits, for all rows.
    column[: len(rows)] = rows if shape else np.array(rows)
    column[len(rows) :] = column[len(rows) - 1]
    return column


def _column_of_lengths(rows: tuple[Array, ...], dtype: Any, shape: tuple[int, ...], size: int) -> Array:
    column = np.zeros((size, *shape), dtype)
    for index, row in enumerate(rows):
        real: Any = (index, *map(slice, row.shape))
        column[real] = row
    column[len(rows) :] = column[len(rows) - 1]
    return column


def _mask(lengths: list[tuple[int, ...]], padded: list[int], size: int) -> Array:
    """Return the mask of the real elements: a row for each row of the batch, with the padded lengths."""
    by_axis = np.array(lengths + [lengths[-1]] * (size - len(lengths))).T
    masks: list[Array] = []
    for axis, (real, length) in enumerate(zip(by_axis, padded, strict=True)):
        along = [1] * len(padded)
        along[axis] = length
        masks.append((np.arange(length) < real[:, None]).reshape(size, *along))
    return reduce(np.logical_and, masks)


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a function; an empty tuple if they are not known."""
    try:
        return tuple(parameters_of(fn).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return ()


_UNSUPPORTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Arguments:
    """Puts the arguments of a call in the order of the parameters, and has those of a batched node stacked.

    Args:
        name: name of the node, for errors.
        fn: its function.
        static: parameters whose values the program is compiled for.
        resources: parameters whose arguments come from resources.
        shared: other parameters whose arguments are the same for all calls of a batch.
        batch: how calls run together; None for one by one.

    Attributes:
        name: name of the node.
        names: the parameters that callers pass.
        masks: the parameters that take the masks of padded ones, or the segments and positions of packed rows.
        masked: for each of `masks` a parameter whose argument has the same rows.
        shared: positions of the arguments that are the same for all calls of a batch, those of resources and static
            ones included.
        stacked: positions of the others.
        parameters: positions of those that come from resources, and are arrays.
        static: positions of those that are static.

    Raises:
        TypeError: the function has `*args` or `**kwargs`, or an option names a parameter that it does not have.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        static: tuple[str, ...],
        resources: frozenset[str],
        shared: frozenset[str],
        batch: DeviceBatch | PackedBatch | None,
    ) -> None:
        self.name = name
        self._signature = parameters_of(fn)
        found = self._signature.parameters
        _check_names(name, found, static=static, shared=shared, resources=resources)
        _check_shared(name, shared, static, batch)
        self.masks: tuple[str, ...] = ()
        if isinstance(batch, PackedBatch):
            self.masks = row_parameters(self._signature, name)
        elif batch is not None:
            self.masks = tuple(mask_parameters(self._signature, batch.pad_axes, name).values())
        self.names = tuple(one for one in found if one not in self.masks)
        self.static = tuple(i for i, one in enumerate(self.names) if one in static)
        self.parameters = tuple(i for i, one in enumerate(self.names) if one in resources and one not in static)
        self.shared = tuple(i for i, one in enumerate(self.names) if one in shared or one in resources or one in static)
        self.stacked = tuple(i for i in range(len(self.names)) if i not in self.shared)
        self._looks_at_all = self.shared == self.parameters  # those are on the device when the program begins
        self._shared_of, self._stacked_of = _picker(self.shared), _picker(self.stacked)
        self._by_keyword = tuple(
            i for i, one in enumerate(self.names) if found[one].kind is inspect.Parameter.KEYWORD_ONLY
        )
        self._last: _LastItem | None = None
        self.stacker = None
        self.masked: tuple[str, ...] = ()
        if batch is not None:
            if self.names and {*self.names} <= {*static, *shared}:
                raise TypeError(
                    f"device node {name!r} has batch=, and all of its parameters are named in shared= or static=: "
                    "leave out the one that differs from call to call"
                )
            self.stacker = Stacker(name, [self.names[i] for i in self.stacked], batch)
            self.masked = self.stacker.padded
            if isinstance(batch, PackedBatch):
                self.masked = self.masked[:1] * len(self.masks)
        self._cost = None if batch is None or batch.cost is None else batch._cost_of

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return one argument for each parameter, in their order."""
        if len(args) == len(self.names) and not kwargs:
            return args
        bound = self._signature.bind(*args, **kwargs)
        for name in self.masks:
            if name in bound.arguments:
                raise TypeError(f"node {self.name!r}: its batch makes the argument {name!r}, so leave it out")
        bound.apply_defaults()
        return tuple([bound.arguments[name] for name in self.names])

    def merge(self, sample: tuple[Any, ...], resources: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return one argument for each parameter: those of a sample, and those that come from resources.

        Raises:
            TypeError: the sample has too many arguments, or too few.
        """
        bound = self._signature.bind_partial(**resources)
        rest = [name for name in self.names if name not in bound.arguments]
        bound.arguments.update(zip(rest, sample, strict=False))
        bound.apply_defaults()
        missing = [name for name in self.names if name not in bound.arguments]
        if missing or len(sample) > len(rest):
            raise TypeError(
                f"a sample of device node {self.name!r} has {len(sample)} arguments, and the parameters that do not "
                f"come from resources are {', '.join(rest)}"
            )
        return tuple([bound.arguments[name] for name in self.names])

    def item(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Hashable, int]:
        """Return the arguments of one call of a batched node as `stack` takes them, their group, and their size.

        Calls of one group may run together. Nearly always an item is like the last one. To see that takes less than to
        look at it closely; then its arguments stay as they are, and its group has their signature.

        Returns:
            The arguments themselves, or a `BatchItem`; the group; and the size of what is stacked, in bytes.

        Raises:
            TypeError: an argument cannot be stacked.
            ValueError: an argument is too long.
        """
        last = self._last
        if last is not None:
            for position, version in last.versions:
                if id(values[position]) != version:
                    break
            else:
                for position, kind, dtype, shape in last.kinds:
                    array = values[position]
                    if type(array) is not kind or array.dtype is not dtype or array.shape != shape:
                        break
                else:
                    return values, last.group, last.size_bytes
        item, group = self.looked_at(values)
        return item, group, item.size_bytes

    def looked_at(self, values: tuple[Any, ...]) -> tuple[BatchItem, tuple[Any, ...]]:
        """Return the arguments of one call of a batched node with all that is known of them, and their group.

        Raises:
            TypeError: an argument cannot be stacked.
            ValueError: an argument is too long.
        """
        assert self.stacker is not None
        arrays, shared = self._stacked_of(values), self._shared_of(values)
        item = self.stacker.item(arrays, current(), shared)
        if self._cost is not None:
            item = item._replace(cost=self._cost(arrays, self.name))
        # A batch has one version of each shared argument. Versions are compared by identity.
        versions = [*map(id, shared)]
        if len(self.shared) > len(self.parameters):
            kept: list[Any] = []
            versions = [self._version(i, value, kept) for i, value in zip(self.shared, shared, strict=True)]
            if kept:
                item = item._replace(kept=tuple(kept))
        elif not self.stacker.padded and self._cost is None and all(map(_is_of_any_configuration, arrays)):
            kinds: list[tuple[int, Any, Any, tuple[int, ...]]] = [
                (i, array.__class__, array.dtype, array.shape) for i, array in zip(self.stacked, arrays, strict=True)
            ]
            known = [*zip(self.shared, versions, strict=True)]
            self._last = _LastItem(kinds, known, item.size_bytes, (item.signature, *versions))
        return item, (item.signature, *versions)

    def as_item(self, args: tuple[Any, ...], group: Hashable) -> BatchItem:
        """Return what `item` gave, with its group, as a `BatchItem`."""
        if isinstance(args, BatchItem):
            return args
        signature, *_ = cast("tuple[Any, ...]", group)
        return BatchItem(signature, self._stacked_of(args), (), True, 0, self._shared_of(args))

    def stack(self, given: Sequence[tuple[Any, ...]], group: Hashable, size: int) -> tuple[tuple[Any, ...], Stacked]:
        """Stack items of one group, as `item` gave them, whose arrays are on the host, to so many rows.

        Returns:
            The arguments of the vectorised program, which are stacked ones, shared ones, and masks; and the stacked
            ones with their sizes.
        """
        assert self.stacker is not None
        if {*map(type, given)} == {tuple}:  # nearly always
            columns, (signature, *_) = tuple(zip(*given, strict=True)), cast("tuple[Any, ...]", group)
            of_arrays = iter(self._stacked_of(columns))
            stacked = self.stacker.stack_columns(signature, of_arrays, [()] * len(given), size)
            shared = self._shared_of(given[0])
        else:
            items = [self.as_item(args, group) for args in given]
            stacked, shared = self.stacker.stack(items, size), items[0].shared
        args: list[Any] = [None] * len(self.names)
        for position, argument in zip(self.stacked, stacked.arguments, strict=True):
            args[position] = argument
        for position, argument in zip(self.shared, shared, strict=True):
            args[position] = argument
        return (*args, *stacked.masks[: len(self.masks)]), stacked  # not each function has positions

    def _version(self, position: int, value: Any, kept: list[Any]) -> Any:
        """Return the part of a group that stands for a shared argument, and add to `kept` what must not be freed."""
        if position in self.static:
            return static_part(value, self, position)
        if position in self.parameters:
            return id(value)
        # A list or dictionary may be a new one for each call, of the same arrays.
        leaves, structure = jax.tree.flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:
            kept += leaves
        return (structure, *map(id, leaves))

    def parameter(self, position: int) -> str:
        """Return the name of a parameter."""
        return self.names[position]

    def positions(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the positions of parameters."""
        return tuple(sorted(self.names.index(name) for name in names))

    def on_host_of(self, values: tuple[Any, ...]) -> tuple[int, bool]:
        """Return how many bytes of the arguments are not on a device yet, and whether all are plain."""
        size_bytes, is_plain = on_host_of(jax.tree.leaves(self._stacked_of(values)))
        return size_bytes, is_plain and self._looks_at_all

    def call(self, fn: Callable[..., Any], values: tuple[Any, ...], masks: tuple[Any, ...] = ()) -> Any:
        """Call the function with arguments in the order of the parameters."""
        if not self._by_keyword and not masks:
            return fn(*values)
        by_name = dict(zip(self.masks, masks, strict=False))
        by_name.update({self.names[i]: values[i] for i in self._by_keyword})
        return fn(*[value for i, value in enumerate(values) if i not in self._by_keyword], **by_name)


class _LastItem(NamedTuple):
    """What the last item was like, and so the next one as well, as a rule. It holds no array."""

    kinds: list[tuple[int, Any, Any, tuple[int, ...]]]  # position, type, dtype and shape of each that is stacked
    versions: list[tuple[int, int]]  # position and identity of each of the others
    size_bytes: int
    group: tuple[Any, ...]


def _is_of_any_configuration(array: Any) -> bool:
    """Return whether it is NumPy's, of a dtype that JAX takes as it is; one of 64 bits may become one of 32."""
    kind: type[Any] = array.__class__
    return (kind is np.ndarray or issubclass(kind, np.generic)) and array.dtype.itemsize <= 4


def _picker(positions: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the values at these positions; it is called for each item of a batch."""
    # `itemgetter` of one position gives no tuple; of a slice it does, in half the time of a function of Python.
    first = positions[0] if positions else 0
    picker = itemgetter(*positions) if len(positions) > 1 else itemgetter(slice(first, first + len(positions)))
    return cast("Callable[[tuple[Any, ...]], tuple[Any, ...]]", picker)


def on_host_of(leaves: Iterable[Any]) -> tuple[int, bool]:
    """Return how many bytes of some arrays have to be transferred to a device, and whether all are plain.

    Plain are those that JAX's C++ code tells apart as `signature_of` does: it takes an array of a class that is derived
    from NumPy's for one of NumPy's.
    """
    on_host = not_on_device(leaves)
    if not on_host:
        return 0, True
    return sum([getattr(leaf, "nbytes", 0) for leaf in on_host]), _PLAIN.issuperset(map(type, on_host))


def _check_shared(
    name: str, shared: frozenset[str], static: tuple[str, ...], batch: DeviceBatch | PackedBatch | None
) -> None:
    padded = batch.pad_axes if isinstance(batch, DeviceBatch) else ()
    for option, others in (("static", static), ("batch=DeviceBatch(pad_axes=...)", padded)):
        for one in shared & {*others}:
            raise TypeError(
                f"device node {name!r}: {one!r} is in shared= and in {option}: an argument that all calls of a batch "
                "share is neither compiled in nor padded, so name it in one of them"
            )


def holds_array(value: object) -> bool:
    """Return whether a pytree holds an array, and not numbers only."""
    return any(isinstance(leaf, np.ndarray) or is_device_array(leaf) for leaf in jax.tree.leaves(value))


def _check_names(name: str, found: "dict[str, inspect.Parameter] | Any", **options: Iterable[str]) -> None:
    for one in found.values():
        if one.kind in _UNSUPPORTED:
            raise TypeError(
                f"device node {name!r}: the parameter {one} has no place in a program; give each one a name"
            )
    for option, names in options.items():
        for one in names:
            if one not in found:
                raise TypeError(
                    f"device node {name!r}: {option}={one!r} is no parameter of it; it has {', '.join(found)}"
                )
