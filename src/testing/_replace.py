"""Replacing a node by a fake."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast, overload

from ..engine.graph import replaced
from ..engine.node import Node
from ..engine.resource import Resource
from ..engine.stateful import is_stateful, node_of

P = ParamSpec("P")
R = TypeVar("R")


@overload
def replace(node: Resource[P, R], fake: Callable[P, AsyncIterator[R]], /) -> AbstractContextManager[None]: ...
@overload
def replace(node: Node[P, R] | Callable[P, R], fake: Callable[P, R], /) -> AbstractContextManager[None]: ...
def replace(node: Any, fake: Any, /) -> AbstractContextManager[None]:
    """Call `fake` in place of a node, and of all its copies, inside the `with`.

    Graphs are traced again; a deployment that runs already keeps its plan. The policy of the node applies to the fake:
    limits, timeout, retry and fallback. But the fake of a process node runs in a thread.

    Args:
        node: the node; a method that is a node, taken from its class or from any instance; an instance of a stateful
            node, which scopes then neither make nor enter; or a resource.
        fake: the function to call instead, with the same parameters and result; an `async def` if the node is one. For
            a resource, an async generator function, or an `async def` that returns the value.

    Returns:
        A context manager.

    Raises:
        TypeError: `node` is not a node.
    """
    if isinstance(node, Node):
        return replaced(cast(Node[..., Any], node), fake)
    if is_stateful(node) and not isinstance(node, type):
        return replaced(node_of(node), fake)
    raise TypeError(f"testing.replace takes a node, an instance of a stateful one, or a resource, got {node!r}")
