"""Executor: runs the handlers of nodes that run neither on the loop nor in threads or processes.

The engine knows none by name: floors above it bring their own, with the nodes that they make.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..actors.node_actor import Body
    from .node import Node
    from .passes import Pass
    from .pools import Pools


@dataclass(frozen=True)
class CallSite:
    """Where a node is called in a graph.

    Attributes:
        node: the node.
        label: its name in the graph, for errors.
        resources: the parameters whose arguments come from resources: the same object for all items, until a reload.
        is_handed_on: whether only nodes with an executor of the same kind read the result. It may then be what is not
            ready yet; everybody else gets a value.
    """

    node: "Node[..., Any]"
    label: str
    resources: frozenset[str]
    is_handed_on: bool


class Executor(Protocol):
    """Where the handler of a node runs."""

    @property
    def label(self) -> str:
        """What a drawing of the graph says of it."""
        ...

    @property
    def passes(self) -> "tuple[Pass, ...]":
        """Planning passes over graphs that have such nodes; the same objects for all executors of a kind."""
        ...

    def check_reload(self, old: Any, new: Any) -> None:
        """Refuse the new value of a resource that an argument of the node comes from.

        Args:
            old: what the resource gave until now.
            new: what it will give; `old` stays if this raises.
        """
        ...

    def body(self, site: CallSite, pools: "Pools") -> "Body":
        """Return what runs the handler for one item, for scopes of the Engine that has these pools."""
        ...
