"""Replace a node by a fake."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, overload

from .. import Resource
from ..extension import as_node, replaced

P = ParamSpec("P")
R = TypeVar("R")


@overload
def replace(node: Resource[P, R], fake: Callable[P, AsyncIterator[R]], /) -> AbstractContextManager[None]: ...
@overload
def replace(  # mypy takes the parameters from `node` only if it is a plain `Callable`, as every node is
    node: Callable[P, R], fake: Callable[P, R] | Callable[P, Coroutine[Any, Any, R]], /
) -> AbstractContextManager[None]: ...
def replace(node: Any, fake: Any, /) -> AbstractContextManager[None]:
    """Call `fake` in place of a node, and of all its copies, inside the `with`.

    Graphs are traced again; a deployment that runs already keeps its plan. The policy of the node applies to the fake:
    limits, timeout, retry and fallback. But the fake of a process node runs in a thread.

    Args:
        node: a node; a method that is a node, taken from its class or from any instance; an instance of a stateful
            node, which scopes then neither make nor enter; or a resource.
        fake: the function to call instead, with the same result, which takes the same arguments. It is an `async def`
            if the function of the node is an `async def`, and may be one if that is a plain `def`. For a node with
            `batch=`, it takes one item. For a resource, it is an async generator function, or an `async def` that
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
