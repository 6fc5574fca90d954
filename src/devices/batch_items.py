"""Items of batched device nodes: their arguments, and the signatures that say which items can be stacked."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from .device_batch import Buckets, DeviceBatch, PackedBatch, padded_length
from .programs import Configuration, is_device_array, is_random_key
from .untyped_jax import jax

# The kind of an array: its dtype, its shape, and None, WEAK, or the implementation of a typed random key.
Kind: TypeAlias = tuple[Any, tuple[int, ...], Any]
# The form of an item's arguments after padding: for each argument the structure of its pytree, and the kind of each
# array. Signatures are hashable, and items with equal signatures can be stacked.
ItemSignature: TypeAlias = tuple[tuple[Any, tuple[Kind, ...]], ...]
# An array of NumPy or JAX, or one of NumPy's scalars.
Array: TypeAlias = Any

# The most signatures to remember. Where shapes change with every item, remembering signatures saves nothing.
_MOST_KNOWN: Final = 256
_NUMPY: Final[tuple[type[Any], ...]] = (np.ndarray, np.generic)
# A Python number is weakly typed, as JAX says: `x * 2` has the dtype of the array x.
WEAK: Final = "weak"
_OF_PYTHON: Final = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


class BatchItem(NamedTuple):
    """The arguments of one item, ready to be stacked.

    Attributes:
        signature: items with equal signatures can be stacked.
        arrays: the arrays of all arguments, not copied.
        lengths: for each padded argument, its lengths along the padded axes.
        is_on_host: whether all arrays are NumPy's; an array of JAX may not be computed yet.
        size_bytes: the size of the arrays, in bytes.
        shared: the arguments that are not stacked, because they are the same for all items of a batch.
        cost: the item's part of `max_cost` of a batch, or of a row; 0 without such a limit.
        kept: the leaves of shared pytrees. The group of the item has their identities (`id`). A pytree may make its
            leaves anew each time that it is flattened, so the leaves are kept alive while the item waits: otherwise
            another leaf could get the same identity.
    """

    signature: ItemSignature
    arrays: tuple[Array, ...]
    lengths: tuple[tuple[int, ...], ...]
    is_on_host: bool
    size_bytes: int
    shared: tuple[Any, ...] = ()
    cost: float = 0
    kept: tuple[Any, ...] = ()


class BatchItems:
    """Describes the arguments of one node's items, so that like items can be stacked. Runs on the event loop.

    Args:
        node: name of the node, for errors.
        parameters: names of the parameters whose arguments are stacked.
        batch: the axes that are padded, and their lengths; or the rows into which the first axes are packed.

    Attributes:
        node: name of the node.
        parameters: names of the parameters, each with the axes of its arrays that are padded or packed.
        padded: the parameters that have such axes, in the order in which their masks are passed.
        packed: how items share rows; None if each item has a row of its own.
    """

    # Ownership: event loops describe items. Only `_known` changes, and its entries never change.

    def __init__(self, node: str, parameters: Sequence[str], batch: DeviceBatch | PackedBatch) -> None:
        self.node = node
        self.packed = batch if isinstance(batch, PackedBatch) else None
        self._length_buckets: Buckets = batch.lengths if isinstance(batch, PackedBatch) else batch.length_buckets
        pad_axes = dict.fromkeys(parameters, 0) if isinstance(batch, PackedBatch) else batch.pad_axes
        axes = [pad_axes.get(parameter, ()) for parameter in parameters]
        self.parameters = [
            (name, (each,) if isinstance(each, int) else each) for name, each in zip(parameters, axes, strict=True)
        ]
        self.padded = tuple(name for name, each in self.parameters if each)
        # Signatures and sizes of arguments that are all NumPy's, by configuration, dtypes and shapes.
        self._known: dict[tuple[Any, ...], tuple[ItemSignature, int]] = {}

    def item(self, arguments: Sequence[Any], configuration: Configuration, shared: tuple[Any, ...] = ()) -> BatchItem:
        """Return the arguments of an item with their signature, without copying or waiting for arrays.

        Args:
            arguments: one pytree of arrays for each parameter. A Python number counts as an array with the dtype that
                JAX gives to the number.
            configuration: the configuration that the program is compiled under: 64-bit dtypes become 32-bit ones unless
                x64 is on.
            shared: the arguments that are not stacked.

        Raises:
            TypeError: an argument holds a leaf that is neither an array nor a number.
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
        for (parameter, axes), argument in zip(self.parameters, arguments, strict=True):
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
            raise TypeError(
                f"node {self.node!r} has batch=, and the arguments of a call hold no array that could be stacked: pass "
                "an array, or leave out batch="
            )
        is_on_host = {*map(type, arrays)} == {np.ndarray}
        size_bytes = sum([array.nbytes for array in arrays])
        cost = 0 if self.packed is None else self._size_in_row(lengths, signature)
        return BatchItem(tuple(signature), tuple(arrays), tuple(lengths), is_on_host, size_bytes, shared, cost)

    def _size_in_row(self, lengths: list[tuple[int, ...]], signature: list[Any]) -> int:
        """Return the room that an item takes in a row: its length, or 1 for an empty item, so that it has a place.

        Raises:
            ValueError: its arrays have different lengths.
            TypeError: the item has random keys.
        """
        if len({*lengths}) > 1:
            found = ", ".join(f"{name} {length}" for name, (length,) in zip(self.padded, lengths, strict=True))
            raise ValueError(
                f"node {self.node!r}: the arrays of an item share the places of a row, and have different lengths "
                f"({found}): name the arrays that are no sequences in shared="
            )
        if any(besides not in (None, WEAK) for _, kinds in signature for *_, besides in kinds):
            raise TypeError(f"node {self.node!r}: random keys cannot be packed into rows: name them in shared=")
        return max(1, lengths[0][0])

    def _lengths(self, parameter: str, axes: tuple[int, ...], kinds: list[Kind]) -> tuple[int, ...]:
        """Return the lengths of an argument's arrays along its padded axes."""
        what = f"node {self.node!r}, argument {parameter!r}"
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
            made = "padded" if self.packed is None else "packed"
            raise ValueError(
                f"{what}: it is {made}, and its arrays have different lengths {sorted(found)} along axis "
                f"{', '.join(map(str, axes))}: pass them as several arguments"
                if found
                else f"{what}: it is {made}, and holds no array"
            )
        return found.pop()

    def _padded(self, parameter: str, axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        padded = list(shape)
        for axis in axes:
            length = padded_length(shape[axis], self._length_buckets)
            if length is None:
                option, remedy = ("length_buckets", "bucket") if self.packed is None else ("lengths", "length")
                raise ValueError(
                    f"node {self.node!r}, argument {parameter!r}: its length is {shape[axis]} along axis {axis}, and "
                    f"the last of {option}={self._length_buckets} is shorter: shorten it, or add a {remedy}"
                )
            padded[axis] = length
        return tuple(padded)

    def _refusal(self, parameter: str, argument: Any, configuration: Configuration, error: Exception) -> Exception:
        """Return an error that names the leaf of an argument that cannot be stacked."""
        place = parameter
        with suppress(TypeError, ValueError):  # the loop ends at the leaf that is refused
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
                place = parameter + jax.tree_util.keystr(path)
                _dtype(_as_array(leaf, configuration).dtype, configuration)
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(f"node {self.node!r}, argument {place!r}: {error}")


def _besides(leaf: Any) -> Any:
    """Return the third part of the `Kind` of a leaf."""
    if not is_device_array(leaf):
        # In JAX, True and False are not weakly typed.
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
        raise TypeError("a masked array cannot go to a device: pass its data and its mask as two arrays")
    if issubclass(kind, _NUMPY):
        return np.asarray(leaf)
    if is_device_array(leaf):
        return leaf
    if kind in _OF_PYTHON:
        try:
            return np.asarray(leaf, _dtype(np.dtype(_OF_PYTHON[kind]), configuration))
        except OverflowError as error:
            raise ValueError(f"{error}; the number needs 64 bits: set jax_enable_x64, or pass a smaller one") from error
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
