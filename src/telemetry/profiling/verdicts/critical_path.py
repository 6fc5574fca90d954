"""Critical path: of the nodes of a graph, those one after the other that take longest.

What runs beside them takes no time of the whole, so durations are not added up over all nodes: the critical path
method of project planning (Kelley and Walker, 1959), with the mean time of each node.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ...tables.characters import printable
from ...tables.quantities import milliseconds
from ..sums import Name, NodeSum


@dataclass(frozen=True)
class CriticalPath:
    """What one run of a graph takes, where nothing waits. `str()` says it in one line.

    Attributes:
        graph: name of the graph, or of the body of control flow.
        nodes: the names of the nodes that take longest, of those that run one after the other.
        seconds: what they take together in one run, on average.
    """

    graph: str
    nodes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return printable(f"{' → '.join(self.nodes)}: {milliseconds(self.seconds)} of each run of {self.graph}")


def critical_paths(nodes: dict[Name, NodeSum]) -> dict[str, CriticalPath]:
    """Return the path of each graph of which something ran."""
    found: dict[Name, CriticalPath] = {}
    longest: dict[str, CriticalPath] = {}
    for name in _consumers_first(nodes):
        graph, node = name
        following = (found[graph, reader] for reader in nodes[name].reading.consumers if (graph, reader) in found)
        rest = max(following, key=_seconds, default=CriticalPath(graph, (), 0.0))
        found[name] = CriticalPath(graph, (node, *rest.nodes), rest.seconds + nodes[name].mean_seconds)
        longest[graph] = max(longest.get(graph, rest), found[name], key=_seconds)
    return longest


def _seconds(path: CriticalPath) -> float:
    return path.seconds


def _consumers_first(nodes: dict[Name, NodeSum]) -> Iterable[Name]:
    order: dict[Name, None] = {}
    for first in nodes:
        stack = [(first, False)]
        while stack:
            name, is_done = stack.pop()
            if is_done:
                order[name] = None
            elif name in nodes and name not in order:
                stack.append((name, True))
                stack += [((name[0], reader), False) for reader in nodes[name].reading.consumers]
    return order
