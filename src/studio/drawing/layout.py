"""Order, levels and folding: the part of a drawing that text and SVG share."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ...engine import ActorStatistics, Drawing, DrawnEdge, DrawnNode
from ...telemetry.tables import count, of, rate

_INDEX = re.compile(r"\[\d+\]")
MAX_DEPTH = 6  # of bodies in bodies: deeper bodies would start at the right margin


@dataclass(frozen=True, slots=True)
class RowEdges:
    """The edges from one row to another.

    Attributes:
        source: the row where the edges begin.
        count: how many nodes of this row have such an edge.
        labels: the labels of the edges.
        is_order: whether the edges only stand for an order: the nodes are waited for, but their values are not read.
    """

    source: int
    count: int
    labels: tuple[str, ...]
    is_order: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A node, or several equal nodes that were folded into one.

    Attributes:
        node: the node, or the first of several equal nodes.
        name: its name, unique among the rows of a drawing.
        count: how many nodes the row stands for.
        level: the length of the longest path from a row without sources.
        reads: the edges from the rows that it reads.
        readers: the numbers of the rows that read it.
        load: the load of its nodes in words; see `load_words`.
    """

    node: DrawnNode
    name: str
    count: int
    level: int
    reads: tuple[RowEdges, ...]
    readers: tuple[int, ...]
    load: tuple[str, ...]


def load_words(actors: Sequence[ActorStatistics], elapsed_seconds: float | None) -> tuple[str, ...]:
    """Return the load of actors that are drawn as one node: a word or two for each number, an empty text without it.

    Args:
        actors: the counters of the actors.
        elapsed_seconds: the time that the counters cover; None to show no rate.
    """
    if not actors:
        return ()
    now = ActorStatistics.total(actors)
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


def topological(drawing: Drawing) -> list[DrawnNode]:
    """Return the nodes with each source before its readers; nodes that need not move keep the order of the program.

    Raises:
        ValueError: Two nodes share an id, an edge or a body names an unknown node, or the edges form a cycle.
    """
    nodes = drawing.nodes
    position = {node.id: index for index, node in enumerate(nodes)}
    if len(position) < len(nodes):
        twice = Counter(node.id for node in nodes).most_common(1)[0][0]
        raise ValueError(f"two nodes of {drawing.title!r} have the id {twice!r}")
    for owner_id, body in drawing.bodies:
        if owner_id not in position:
            raise ValueError(f"the body {body.title!r} of {drawing.title!r} belongs to an unknown node {owner_id!r}")
    missing = [0] * len(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for edge in node.inputs:
            if edge.source_id not in position:
                raise ValueError(f"{node.id!r} of {drawing.title!r} reads an unknown node {edge.source_id!r}")
            readers[position[edge.source_id]].append(index)
            missing[index] += 1
    ready = [index for index, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[DrawnNode] = []
    while ready:
        index = heappop(ready)
        order.append(nodes[index])
        for reader in readers[index]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    if len(order) < len(nodes):
        raise ValueError(f"the edges of {drawing.title!r} form a cycle")
    return order


def rows(drawing: Drawing, *, is_folded: bool = True) -> list[Row]:
    """Return the rows of a drawing: its nodes in topological order, with repeated siblings folded, unless told not to.

    Lanes are folded into one if they look alike, start from the same sources and end in the same readers: `fetch ->
    parse` thirty-two times is two rows. A lane is a chain in which each value has one reader and each later node one
    source. Lanes may read different items of a list, which a folded row shows as `[…]`. Nothing else is folded, so all
    nodes of a row could be exchanged for each other in the graph.
    """
    order = topological(drawing)
    position = {node.id: index for index, node in enumerate(order)}
    sources = [list(dict.fromkeys(position[edge.source_id] for edge in node.inputs)) for node in order]
    readers: list[list[int]] = [[] for _ in order]
    for index, found in enumerate(sources):
        for source in found:
            readers[source].append(index)
    owners = {position[owner_id] for owner_id, _ in drawing.bodies}

    stands_for = list(range(len(order)))  # index of a node -> index of the node that represents it
    count = [1] * len(order)
    seen: dict[object, list[int]] = {}
    for lane in _lanes(sources, readers):
        if not is_folded or owners.intersection(lane):
            continue
        head, tail = order[lane[0]], lane[-1]
        looks = tuple((order[at].kind, order[at].label, order[at].detail) for at in lane)
        starts = tuple((edge.source_id, _any_index(edge)) for edge in head.inputs)
        inside = tuple(tuple(_any_index(edge) for edge in order[at].inputs) for at in lane[1:])
        first = seen.setdefault((starts, looks, inside, tuple(readers[tail])), lane)
        if first is not lane:
            for at, representative in zip(lane, first, strict=True):
                stands_for[at] = representative
                count[representative] += 1
    return _fold(order, sources, stands_for, count, drawing.elapsed_seconds)


def _any_index(edge: DrawnEdge) -> str:
    return _INDEX.sub("[…]", edge.label)


def _lanes(sources: list[list[int]], readers: list[list[int]]) -> list[list[int]]:
    lanes: list[list[int]] = []
    lane_of: list[list[int]] = []
    for index, found in enumerate(sources):
        if len(found) == 1 and len(readers[found[0]]) == 1:
            lane = lane_of[found[0]]
            lane.append(index)
        else:
            lane = [index]
            lanes.append(lane)
        lane_of.append(lane)
    return lanes


def _fold(
    order: list[DrawnNode],
    sources: list[list[int]],
    stands_for: list[int],
    count: list[int],
    elapsed_seconds: float | None,
) -> list[Row]:
    kept = [index for index in range(len(order)) if stands_for[index] == index]
    row_of = {index: row for row, index in enumerate(kept)}
    row_of_id = {node.id: row_of[stands_for[index]] for index, node in enumerate(order)}
    readers: list[list[int]] = [[] for _ in kept]
    reads: list[tuple[RowEdges, ...]] = []
    levels: list[int] = []
    for row, index in enumerate(kept):
        times = Counter(row_of[stands_for[source]] for source in sources[index])
        labels: dict[int, dict[str, None]] = {source: {} for source in times}
        are_read = {row_of_id[edge.source_id] for edge in order[index].inputs if not edge.is_order}
        for edge in order[index].inputs:
            labels[row_of_id[edge.source_id]][_any_index(edge) if count[index] > 1 else edge.label] = None
        for source in times:
            readers[source].append(row)
        reads.append(tuple([RowEdges(at, times[at], tuple(labels[at]), at not in are_read) for at in times]))
        levels.append(1 + max((levels[source] for source in times), default=-1))
    names = _unique_names([order[index].label for index in kept])
    actors: list[list[ActorStatistics]] = [[] for _ in kept]
    for index, node in enumerate(order):
        actors[row_of[stands_for[index]]] += node.actors
    return [
        Row(
            order[index], names[row], count[index], levels[row], reads[row], tuple(readers[row]),
            load_words(actors[row], elapsed_seconds),
        )
        for row, index in enumerate(kept)
    ]  # fmt: skip


def _unique_names(labels: list[str]) -> list[str]:
    seen: Counter[str] = Counter()
    names: list[str] = []
    for label in labels:
        seen[label] += 1
        names.append(label if seen[label] == 1 else f"{label}#{seen[label]}")
    return names


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
