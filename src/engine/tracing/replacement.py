"""Replacing a node by a fake for a test; every trace made before is out of date then."""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ..node import Node

_epoch = 0


def epoch() -> int:
    """Return a number that changes with every replacement."""
    return _epoch


def outdate_traces() -> None:
    """Have every graph traced, planned and wired again at its next call."""
    global _epoch  # noqa: PLW0603 - the one number that all traces compare with
    _epoch += 1


@contextmanager
def replaced(node: Node[..., Any], fake: Callable[..., Any]) -> Generator[None, None, None]:
    """Have `fake` run in place of a node, and of its copies with another policy, for a time."""
    origin = node.origin
    before = origin.replacement
    # A method's fake is bound like the method; one for an instance's does not ask which instance it is.
    _replace(origin, fake if node.bound_to is None else _without_self(fake))
    try:
        yield
    finally:
        _replace(origin, before)


def _replace(origin: Node[..., Any], fake: Callable[..., Any] | None) -> None:
    origin.replacement = fake
    outdate_traces()


def _without_self(fake: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fake)
    def call(_self: object, *args: Any, **kwargs: Any) -> Any:
        return fake(*args, **kwargs)

    return call
