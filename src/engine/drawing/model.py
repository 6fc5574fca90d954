"""What is drawn: a graph reduced to names and edges, so that drawing knows nothing of tracing or running."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...telemetry.tables.table import count, of, rate


@dataclass(frozen=True, slots=True)
class Places:
    """Items in flight, and how many may be.

    Args:
        key: what tells these places from others; nodes that share them have the same.
        in_flight: places taken.
        limit: how many there are; None if unlimited.
    """

    key: int
    in_flight: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """The numbers of one node, or of several that are drawn as one.

    Args:
        places: its places.
        depth: items in its inbox.
        capacity: how many the inbox may hold; None if unbounded.
        completed: items that it finished with a result.
        failed: items that ended in an error.
        per_second: items that ended in it each second, on average; None if unknown.
        state: why it handles nothing, in a word; empty if it runs.
    """

    places: frozenset[Places]
    depth: int
    capacity: int | None
    completed: int
    failed: int
    per_second: float | None
    state: str = ""

    def __add__(self, other: "Load") -> "Load":
        """Return the load of both; places that they share count once."""
        unbounded = self.capacity is None or other.capacity is None
        unknown = self.per_second is None or other.per_second is None
        return Load(
            self.places | other.places,
            self.depth + other.depth,
            None if unbounded else (self.capacity or 0) + (other.capacity or 0),
            self.completed + other.completed,
            self.failed + other.failed,
            None if unknown else (self.per_second or 0.0) + (other.per_second or 0.0),
            self.state or other.state,
        )

    def words(self) -> tuple[str, ...]:
        """Return what is shown, a word or two for each number; empty where there is nothing to say."""
        limits = [places.limit for places in self.places]
        in_flight = sum(places.in_flight for places in self.places)
        limit = None if None in limits else sum(limit or 0 for limit in limits)
        return (
            self.state,
            f"inbox {count(self.depth) if self.capacity is None else of(self.depth, self.capacity)}",
            f"in flight {count(in_flight) if limit is None else of(in_flight, limit)}",
            f"{count(self.completed)} done",
            f"{count(self.failed)} failed" if self.failed else "",
            "" if self.per_second is None else rate(self.per_second),
        )


MAX_DEPTH = 6  # of bodies in bodies: deeper ones would start at the right margin
Kind: TypeAlias = Literal["input", "resource", "node", "control", "output"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One value that a node reads.

    Args:
        source_id: The `id` of the node that produces the value.
        label: What is read or where it goes, e.g. a parameter name, or a path such as `.text` or `[0]`.
        is_stream: It is a stream of values.
    """

    source_id: str
    label: str = ""
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """One call site.

    Args:
        id: Unique within its `Drawing`; never shown.
        label: What a person calls it; need not be unique.
        detail: Policy and placement in a few words, e.g. `thread, 3 attempts`.
        kind: Parameter of the graph, what is open while it runs, ordinary node, control flow (with bodies), or result
            of the graph.
        inputs: The values it reads, in the order of its parameters.
        load: What it is doing, in a graph that runs.
    """

    id: str
    label: str
    detail: str = ""
    kind: Kind = "node"
    inputs: tuple[Edge, ...] = ()
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """A graph to draw.

    Args:
        title: Name of the graph, or the role of a body (`then`, `otherwise`, `body`, `while`).
        nodes: In the order of the program; any topological or other order is accepted.
        bodies: The sub-graphs of control-flow nodes as `(id of the node that drives it, sub-graph)`.
    """

    title: str
    nodes: tuple[DrawnNode, ...]
    bodies: tuple[tuple[str, "Drawing"], ...] = ()

    def bodies_of(self) -> dict[str, list["Drawing"]]:
        """Return the bodies under the `id` of the node that drives them, in the order given."""
        found: dict[str, list[Drawing]] = {}
        for owner_id, body in self.bodies:
            found.setdefault(owner_id, []).append(body)
        return found

    def size(self) -> str:
        """Return in words how much a reader does not see where this drawing is left out."""
        inside = f", bodies: {len(self.bodies):,}" if self.bodies else ""
        return f"not shown (nodes: {len(self.nodes):,}{inside})"


def innermost_first(drawing: Drawing) -> Iterator[Drawing]:
    """Yield every distinct drawing within `drawing`, each after all of its bodies, and `drawing` itself last.

    Bodies nested deeper than `MAX_DEPTH` are left out.
    """
    entered: set[int] = set()
    stack = [(drawing, 0, False)]
    while stack:
        current, depth, bodies_done = stack.pop()
        if bodies_done:
            yield current
        elif id(current) not in entered:
            entered.add(id(current))
            stack.append((current, depth, True))
            if depth < MAX_DEPTH:
                stack.extend((body, depth + 1, False) for _, body in reversed(current.bodies))
