"""Hosted graphs: which graphs a deployment makes resident, and the actors of each."""

from collections.abc import Iterator
from typing import Any

from .._errors import PlanError
from .graph import Graph
from .scope import Scope
from .streams.call_kinds import gives_one_value, gives_stream
from .wiring import Wired


class HostedGraphs:
    """The graphs of one deployment. It keeps the plans that it began with, whatever is rebound meanwhile.

    Attributes:
        names: their names.
        wired: the actors of each graph whose calls give one value; empty before `prepare`.
        wired_streams: those of the graphs whose calls give streams.
    """

    def __init__(self, graphs: tuple[Graph[..., Any], ...]) -> None:
        self.names = ", ".join(graph.name for graph in graphs)
        self.wired: dict[Graph[..., Any], Wired] = {}
        self.wired_streams: dict[Graph[..., Any], Wired] = {}
        self._graphs = graphs

    async def prepare(self, scope: Scope) -> None:
        """Make the actors, and enter the stateful nodes.

        Raises:
            Exception: a graph cannot be traced, or a stateful node did not start.
        """
        for graph in self._graphs:
            plan = graph._planned()
            (self.wired_streams if plan._gives_stream else self.wired)[graph] = await scope.prepare(plan)

    def one_value(self, graph: Graph[..., Any], verb: str) -> Wired:
        """Return the actors of a graph whose calls give one value.

        Raises:
            PlanError: it is not part of this deployment, or gives streams.
        """
        if graph in self.wired_streams:
            raise gives_stream(graph, verb)
        if graph not in self.wired:
            raise self._not_deployed(graph)
        return self.wired[graph]

    def values(self, graph: Graph[..., Any]) -> Wired:
        """Return the actors of a graph whose calls give streams.

        Raises:
            PlanError: it is not part of this deployment, or gives one value.
        """
        if graph in self.wired:
            raise gives_one_value(graph, "service")
        if graph not in self.wired_streams:
            raise self._not_deployed(graph)
        return self.wired_streams[graph]

    def find(self, graph: Graph[..., Any]) -> Wired | None:
        """Return the actors of a graph; None if there are none yet."""
        return self.wired.get(graph) or self.wired_streams.get(graph)

    def __iter__(self) -> Iterator[Wired]:
        """Yield the actors of every graph."""
        yield from self.wired.values()
        yield from self.wired_streams.values()

    def _not_deployed(self, graph: Graph[..., Any]) -> PlanError:
        return PlanError(
            f"graph {graph.name!r} is not part of this deployment of {self.names}; deploy them together: "
            f"engine.deploy({self.names}, {graph.name})"
        )
