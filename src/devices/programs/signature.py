"""What a program is compiled for: each argument's structure, shapes and dtypes, or its static value.

This is the hot path of every call on a device: signatures are plain tuples, and arrays that are arguments themselves
take a shorter way than those inside of a pytree.
"""

from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from ..untyped_jax import jax
from .configuration import Configuration

# Per argument: (shape, dtype, weak_type) of an array, (tree, leaves) of a pytree, (type, value) of a static one.
Signature: TypeAlias = tuple[tuple[Any, ...], ...]
Leaf: TypeAlias = tuple[tuple[int, ...], Any, bool]


class WeakRows(np.ndarray):
    """Numbers of Python as the rows of a batch: as such a number's, their dtype gives way to that of an array."""


_HOST: Final = 1
_DEVICE: Final = 2
_SCALAR: Final = 3
_KEY: Final = 4
_WEAK: Final = 5
_OTHER: Final = 0
_PYTHON_SCALARS: Final = (bool, int, float, complex)


class Names(Protocol):
    """What an error says of a node and its arguments."""

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
    """Return what a call's arguments are compiled for, as `jax.jit` would tell them apart.

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


def static_part(value: object, names: Names, position: int) -> tuple[Any, ...]:
    """Return what tells a static value from others: with its type, as 1, 1.0 and True are equal, and not the same.

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
    kind = _kinds.get(type(leaf))
    return (_kind(type(leaf)) if kind is None else kind) in (_DEVICE, _KEY)


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
