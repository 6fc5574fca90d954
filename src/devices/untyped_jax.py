"""JAX without its annotations: those of pytrees, tracing and transfers are unknown in part, and say nothing here."""

from typing import Any

import jax as _jax

jax: Any = _jax
