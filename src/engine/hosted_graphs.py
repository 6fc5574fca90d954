"""Hosted graphs: which graphs a deployment makes resident, and the actors of each."""

from collections.abc import Collection, Iterator
from typing import Any

from .._errors import PlanError
from .graph import Graph
from .program import Program
from .resources.opening import Opening
from .scope import Scope
from .streams.call_kinds import gives_one_value, gives_stream
from .warming import warm_up
from .wiring import Wired


class HostedGraphs:
    """The graphs of one deployment. It keeps the plans that it began with, whatever is rebound meanwhile.

    Attributes:
        names: their names.
        ready: the actors of each graph whose calls give one value, and can begin at once; empty before `prepare`.
    """

    def __init__(self, graphs: tuple[Graph[..., Any], ...]) -> None:
        self.names = ", ".join(graph.name for graph in graphs)
        self.ready: dict[Graph[..., Any], Wired] = {}
        self._wired: dict[Graph[..., Any], Wired] = {}
        self._lost: set[Graph[..., Any]] = set()
        self._graphs = graphs

    async def prepare(self, scope: Scope, *, warms_up: bool) -> None:
        """Make the actors, and enter the stateful nodes.

        Args:
            scope: where they run.
            warms_up: whether nothing is left to the first call that can be done now.

        Raises:
            Exception: a graph cannot be traced, or a stateful node did not start.
        """
        for graph in self._graphs:
            plan = graph._planned(is_cached=scope.options.enable_caching)
            wired = self._wired[graph] = await scope.prepare(plan)
            if warms_up:
                await warm_up(wired.program, scope.engine.pools, scope.options.device_strategy)
            if wired.program.resources and not wired.program.is_filled:  # one has ended while nodes were started
                self._lost.add(graph)
            elif not wired.program.plan._gives_stream:
                self.ready[graph] = wired

    def one_value(self, graph: Graph[..., Any], verb: str) -> Wired:
        """Return the actors of a graph whose calls give one value.

        Raises:
            PlanError: it is not part of this deployment, or gives streams.
        """
        wired = self._deployed(graph)
        if wired.program.plan._gives_stream:
            raise gives_stream(graph, verb)
        return wired

    def values(self, graph: Graph[..., Any]) -> Wired:
        """Return the actors of a graph whose calls give streams.

        Raises:
            PlanError: it is not part of this deployment, or gives one value.
        """
        wired = self._deployed(graph)
        if not wired.program.plan._gives_stream:
            raise gives_one_value(graph, "service")
        return wired

    def lost(self, programs: Collection[Program]) -> None:
        """Resources of these programs have ended by themselves: `restore` has to come before the next call."""
        for graph, wired in self._wired.items():
            if wired.program in programs:
                self._lost.add(graph)
                self.ready.pop(graph, None)

    def that_uses(self, opening: Opening) -> Graph[..., Any]:
        """Return one of the graphs that use a resource."""
        return next(graph for graph, wired in self._wired.items() if opening in wired.program.resources)

    def is_complete(self, graph: Graph[..., Any]) -> bool:
        """Whether no resource of a graph is lost."""
        return graph not in self._lost

    async def restore(self, graph: Graph[..., Any], scope: Scope) -> None:
        """Open the resources of a graph again that have ended by themselves.

        Raises:
            Exception: what an opening raised; the next call tries again.
        """
        wired, resources, caller = self._wired[graph], scope.engine.resources, object()
        try:
            # For the caller first: the scope may have ended meanwhile, and would never let go what it got then.
            await resources.hold(wired.program, caller)
            if scope.is_open and resources.hold_nowait(wired.program, scope):
                self._lost.discard(graph)
                if not wired.program.plan._gives_stream:
                    self.ready[graph] = wired
        finally:
            await resources.release(caller)

    def find(self, graph: Graph[..., Any]) -> Wired | None:
        """Return the actors of a graph; None if there are none yet."""
        return self._wired.get(graph)

    def __iter__(self) -> Iterator[Wired]:
        """Yield the actors of every graph."""
        return iter(self._wired.values())

    def _deployed(self, graph: Graph[..., Any]) -> Wired:
        if graph not in self._wired:
            raise self._not_deployed(graph)
        return self._wired[graph]

    def _not_deployed(self, graph: Graph[..., Any]) -> PlanError:
        return PlanError(
            f"graph {graph.name!r} is not part of this deployment of {self.names}; deploy them together: "
            f"engine.deploy({self.names}, {graph.name})"
        )
