"""Replacing a node by a fake."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

from ..engine.node import Node
from ..engine.replacement import replaced
from ..engine.stateful import is_stateful, node_of

P = ParamSpec("P")
R = TypeVar("R")


def replace(node: Node[P, R] | Callable[P, R], fake: Callable[P, R], /) -> AbstractContextManager[None]:
    """Run `fake` in place of a node, and of its copies with another policy, inside the `with`.

    Graphs are traced again; a deployment that runs already keeps its plan.

    Args:
        node: the node, or an instance of a stateful node.
        fake: what runs instead, with the same parameters and result.

    Raises:
        TypeError: `node` is no node.
    """
    if is_stateful(node):
        return replaced(node_of(node), fake)
    if not isinstance(node, Node):
        raise TypeError(f"testing.replace takes a node, got {node!r}")
    return replaced(cast(Node[..., Any], node), fake)
