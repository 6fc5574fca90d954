"""Same parameters: told by what they are made of, where a graph makes them anew for each call."""

from typing import Any

import numpy as np

from ..untyped_jax import jax


class SameParameters:
    """Recognises the parameters of one argument, which are told apart as objects from there on.

    `f([weights["a"], weights["b"]], x)` makes a list for each call, and `f(weights[0], x)` a view of an array.
    """

    def __init__(self) -> None:
        self._last: Any = None
        self._leaves: list[Any] = []
        self._structure: Any = None

    def of(self, value: Any) -> Any:
        """Return the object that was given before for the same arrays in the same structure; else this one."""
        if value is self._last:
            return value
        leaves, structure = jax.tree.flatten(value)
        if self._structure is not None and structure == self._structure and all(map(_is_same, leaves, self._leaves)):
            return self._last
        self._last, self._leaves, self._structure = value, leaves, structure
        return value


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not np.ndarray or type(other) is not np.ndarray:
        return False
    if one.base is None or one.base is not other.base or one.dtype != other.dtype:
        return False
    return (one.ctypes.data, one.shape, one.strides) == (other.ctypes.data, other.shape, other.strides)
