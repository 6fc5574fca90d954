"""The names of a function's parameters, for messages."""

import inspect
from collections.abc import Callable
from typing import Any


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters; none where they are not known."""
    try:
        return tuple(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return ()
