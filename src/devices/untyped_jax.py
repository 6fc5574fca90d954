"""What needs JAX when it is imported: `Array`, and JAX without its annotations.

Those of pytrees, tracing and transfers are unknown in part, and say nothing here.
"""

from typing import Any, TypeAlias

import numpy.typing as npt

from .jax_import import require_jax

require_jax()

import jax as _jax  # noqa: E402 - the line before says what to install where there is none

jax: Any = _jax

Array: TypeAlias = _jax.Array | npt.NDArray[Any]
"""An array of JAX or NumPy, as the annotation of a parameter: device nodes take both.

A device node returns a `jax.Array`, or, from a batch, a row of NumPy that is used like one. The first use of this name
loads JAX.
"""
