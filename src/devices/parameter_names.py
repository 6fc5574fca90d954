"""The names of a function's parameters, for messages."""

from collections.abc import Callable
from typing import Any

from ..engine.tracing.annotations import signature_of


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters; none where they are not known."""
    try:
        return tuple(signature_of(fn).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return ()
