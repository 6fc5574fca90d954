"""Executor: runs the handlers of nodes that run neither on the loop nor in threads or processes.

The engine knows none by name: floors above it bring their own, with the nodes that they make.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..actors.errand import Carrier
    from .call_site import CallSite
    from .passes import Pass
    from .pools import Pools


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

    @property
    def takes_unready(self) -> bool:
        """Whether arguments may be results of the same kind of executor that are not ready yet."""
        ...

    def check_reload(self, old: Any, new: Any) -> None:
        """Refuse the new value of a resource that an argument of the node comes from.

        Args:
            old: what the resource gave until now.
            new: what it will give; `old` stays if this raises.
        """
        ...

    async def warm_up(
        self, site: "CallSite", pools: "Pools", device_strategy: str, resources: "Mapping[str, Any]"
    ) -> None:
        """Do before the first item what the first item would wait for.

        Args:
            site: where the node is called.
            pools: those of the Engine.
            device_strategy: the execution option of the scope.
            resources: the arguments that come from resources, by parameter.

        Raises:
            PlanError: it cannot be known what the items will be.
        """
        ...

    def carrier(self, site: "CallSite", pools: "Pools", device_strategy: str) -> "Carrier":
        """Return what runs the handler for one item.

        Args:
            site: where the node is called.
            pools: those of the Engine.
            device_strategy: the execution option of the scope.
        """
        ...
