"""Evidence: what a verdict is based on, the critical path included."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..tables.characters import printable
from ..tables.table import milliseconds
from .loop_watch import WindowSum
from .sums import Name, NodeSum, Sums

# Critical path: of the nodes of a graph, those one after the other that take longest.
#
# What runs beside them takes no time of the whole, so durations are not added up over all nodes: the critical path
# method of project planning (Kelley and Walker, 1959), with the mean time of each node.


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


@dataclass(frozen=True)
class ReaderSum:
    """Who reads streams of one name, over all of them.

    Attributes:
        name: what is read.
        open_seconds: how long they were open.
        waited_seconds: how long their readers waited for items.
        window: what their items did; None if nobody looked, or they have no places.
    """

    name: str
    open_seconds: float
    waited_seconds: float
    window: WindowSum | None = None

    @property
    def busy_share(self) -> float:
        """How much of the time the reader did something else than to wait."""
        return max(0.0, 1 - self.waited_seconds / self.open_seconds) if self.open_seconds else 0.0


@dataclass(frozen=True)
class Evidence:
    """What a verdict is based on.

    Attributes:
        sums: what the nodes did.
        elapsed_seconds: how long the profile was taken.
        loop_cpu_seconds: how much of that the thread of the event loop ran; None if unknown.
        readers: who read streams.
        loop_late_share: for how much of the time something held the event loop, as far as somebody looked.
        loop_delay_seconds: how long a handler waited for its turn on the loop, once what it awaited was there.
        disturbed: nodes during whose executions others began or ended, so that they do not hold the event loop.
        covered_seconds: for nodes on devices, how long they had at least one item.
    """

    sums: Sums
    elapsed_seconds: float
    loop_cpu_seconds: float | None = None
    readers: tuple[ReaderSum, ...] = ()
    loop_late_share: float = 0.0
    loop_delay_seconds: float = 0.0
    disturbed: frozenset[Name] = frozenset()
    covered_seconds: Mapping[Name, float] = field(default_factory=dict[Name, float])
