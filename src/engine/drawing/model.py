"""Drawing: a graph reduced to names and edges, so that code that draws knows nothing of tracing or running."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...telemetry.counters import ActorStatistics, total
from ...telemetry.tables import count, of, rate


def load_words(actors: Sequence[ActorStatistics], elapsed_seconds: float | None) -> tuple[str, ...]:
    """Return the load of actors that are drawn as one node: a word or two for each number, empty without one.

    Args:
        actors: the counters of the actors.
        elapsed_seconds: the time that the counters cover; None to show no rate.
    """
    if not actors:
        return ()
    now = total(actors)
    inbox = now.inbox
    return (
        "" if now.state in (None, "running") else now.state,
        f"inbox {count(inbox.depth) if inbox.capacity is None else of(inbox.depth, inbox.capacity)}",
        f"in flight {count(now.in_flight) if now.concurrency is None else of(now.in_flight, now.concurrency)}",
        f"{count(now.completed)} done",
        f"{count(now.failed)} failed" if now.failed else "",
        f"{count(now.failed_over)} failed over" if now.failed_over else "",
        f"{count(now.hedges_won)} of {count(now.hedged)} hedges won" if now.hedged else "",
        f"{count(now.cache.hits)} hits" if now.cache is not None else "",
        rate((now.completed + now.failed) / elapsed_seconds) if elapsed_seconds else "",
    )


MAX_DEPTH = 6  # of bodies in bodies: deeper ones would start at the right margin
Kind: TypeAlias = Literal["input", "resource", "node", "control", "output"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One value that a node reads.

    Args:
        source_id: The `id` of the node that produces the value.
        label: The name of the parameter that takes the value, or the part that is read, such as `.text` or `[0]`.
        is_stream: Whether the value is a stream.
    """

    source_id: str
    label: str = ""
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """One call site.

    Args:
        id: Unique within its `Drawing`; never shown.
        label: The name that is shown; need not be unique.
        detail: Policy and placement in a few words, e.g. `thread, 3 attempts`.
        kind: A parameter of the graph ("input"), a resource, an ordinary node, control flow with bodies ("control"), or
            the result of the graph ("output").
        inputs: The values that it reads, in the order of its parameters.
        actors: The counters of its actor, in a graph that runs.
    """

    id: str
    label: str
    detail: str = ""
    kind: Kind = "node"
    inputs: tuple[Edge, ...] = ()
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


def innermost_first(drawing: Drawing) -> Iterator[Drawing]:
    """Yield each distinct body after all bodies inside it, and `drawing` itself last.

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
