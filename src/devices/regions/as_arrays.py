"""What a node gives inside of a larger program, as it would be between two programs."""

from typing import Any

from ..untyped_jax import jax


def as_arrays(value: Any) -> Any:
    """Return a result as the next program would get it: NumPy's arrays, and numbers, as JAX's, in new containers."""

    def as_array(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf)

    return jax.tree.map(as_array, value)
