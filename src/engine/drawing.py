"""Drawing: a graph reduced to names and edges, so that code that draws does not depend on tracing or running."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..telemetry.counters import ActorStatistics

Kind: TypeAlias = Literal["input", "resource", "node", "control", "output"]


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """One edge into a node: a value that the node reads, or another node that it waits for.

    Args:
        source_id: The `id` of the node that produces the value.
        label: The name of the parameter that takes the value, or the part that is read, such as `.text` or `[0]`.
        is_stream: Whether the value is a stream.
        is_order: Whether no value is read: one of the two nodes is an effect, and effects keep the order of the source.
    """

    source_id: str
    label: str = ""
    is_stream: bool = False
    is_order: bool = False


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """One call site.

    Args:
        id: Unique within its `Drawing`; never shown.
        label: The name that is shown; need not be unique.
        detail: Policy and placement in a few words, e.g. `thread, 3 attempts`.
        kind: A parameter of the graph ("input"), a resource, an ordinary node, control flow with bodies ("control"), or
            the result of the graph ("output").
        inputs: The values that the node reads, in the order of its parameters, and then the nodes that it waits for.
        actors: The counters of the node's actor, in a graph that runs.
    """

    id: str
    label: str
    detail: str = ""
    kind: Kind = "node"
    inputs: tuple[DrawnEdge, ...] = ()
    actors: tuple[ActorStatistics, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawing:
    """A graph to draw.

    Args:
        title: Name of the graph, or the role of a body (`then`, `otherwise`, `body`, `while`).
        nodes: In the order of the program; any topological or other order is accepted.
        bodies: The sub-graphs of control-flow nodes as `(id of the node that drives it, sub-graph)`.
        elapsed_seconds: The time that the counters of its actors cover; None to show no rates.
    """

    title: str
    nodes: tuple[DrawnNode, ...]
    bodies: tuple[tuple[str, "Drawing"], ...] = ()
    elapsed_seconds: float | None = None

    def bodies_of(self) -> dict[str, list["Drawing"]]:
        """Return the bodies by the `id` of the node that drives them, in the order given."""
        found: dict[str, list[Drawing]] = {}
        for owner_id, body in self.bodies:
            found.setdefault(owner_id, []).append(body)
        return found

    def size(self) -> str:
        """Return a note to show in place of this drawing: how many nodes and bodies it has."""
        inside = f", bodies: {len(self.bodies):,}" if self.bodies else ""
        return f"not shown (nodes: {len(self.nodes):,}{inside})"
