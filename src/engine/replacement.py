"""Replacing a node by a fake for a test; every trace made before is out of date then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .node import Node

_epoch = 0


def epoch() -> int:
    """Return a number that changes with every replacement."""
    return _epoch


@contextmanager
def replaced(node: Node[..., Any], fake: Callable[..., Any]) -> Iterator[None]:
    """Have `fake` run in place of a node, and of its copies with another policy, for a time."""
    global _epoch  # noqa: PLW0603 - the one number that all traces compare with
    origin = node.origin
    before = origin.replacement
    origin.replacement = fake
    _epoch += 1
    try:
        yield
    finally:
        origin.replacement = before
        _epoch += 1
