"""`Array`, and JAX without its annotations. Importing this module loads JAX.

JAX's annotations of pytrees, tracing and transfers are incomplete, so type checkers see `jax` as Any here.
"""

from typing import Any, TypeAlias

import numpy.typing as npt

from .jax_import import require_jax

require_jax()

import jax as _jax  # noqa: E402 - the line before says what to install where there is none

jax: Any = _jax

Array: TypeAlias = _jax.Array | npt.NDArray[Any]
"""An array of JAX or NumPy, as the annotation of a parameter: device nodes take both.

A device node returns a `jax.Array`. With `batch=`, it returns a row of NumPy, which is used in the same way. The first
use of this name loads JAX.
"""
