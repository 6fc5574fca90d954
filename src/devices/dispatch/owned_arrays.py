"""Owned arrays: copies of arrays that a caller may write to, for what is used after the call has returned."""

from typing import Any

import numpy as np

from ..untyped_jax import jax


def owned(value: Any) -> Any:
    """Return a pytree whose arrays of NumPy nobody else writes to: on a CPU, they would be used in place."""
    return jax.tree.map(_copy, value)


def _copy(leaf: Any) -> Any:
    return np.array(leaf) if issubclass(type(leaf), np.ndarray) else leaf
