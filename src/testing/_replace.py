"""Replace a node by a fake."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, overload

from .. import Node, Resource
from ..extension import as_node, replaced

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
        node: a node; a method that is a node, taken from its class or from any instance; an instance of a stateful
            node, which scopes then neither make nor enter; or a resource.
        fake: the function to call instead, with the same parameters and result. It is an `async def` if the function of
            the node is an `async def`. For a resource, it is an async generator function, or an `async def` that
            returns the value.

    Returns:
        A context manager.

    Raises:
        TypeError: `node` is not a node.
    """
    found = as_node(node)
    if found is None:
        raise TypeError(f"testing.replace takes a node, an instance of a stateful one, or a resource, got {node!r}")
    return replaced(found, fake)
