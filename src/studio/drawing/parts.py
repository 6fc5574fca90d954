"""A large flat graph as fewer boxes: steps in a row, and steps side by side, become the body of one box."""

from dataclasses import replace
from typing import Final

from ...engine import Drawing, DrawnNode
from ...telemetry.text import clip
from .layout import topological

# The most steps of a box, unless a graph would then have too many boxes.
_MOST_STEPS: Final = 20
_LABEL_COLUMNS: Final = 14


def in_parts(drawing: Drawing, few: int = 40) -> tuple[Drawing, frozenset[str]]:
    """Return a drawing of few boxes, each a step or several steps, which are the body of the box.

    Two boxes are joined if they follow each other, with no other edge between, or if they have the same sources and
    the same readers. So only edges inside a box are lost, and no cycle of edges arises.

    Args:
        drawing: the graph; its own bodies stay as they are.
        few: boxes are joined until at most so many are left, or until none can be joined.

    Returns:
        The drawing, and the ids of the boxes that stand for several steps.
    """
    joined = _Joined(drawing, max(_MOST_STEPS, len(drawing.nodes) // few))
    before = 0
    while few < len(joined.steps) != before:
        before = len(joined.steps)
        joined.in_a_row()
        joined.side_by_side()
    return joined.drawing()


class _Joined:
    """The boxes of a drawing, each known by its first step."""

    def __init__(self, drawing: Drawing, most: int) -> None:
        self._whole = drawing
        self._most = most
        order = topological(drawing)
        self.steps = {node.id: [node] for node in order}
        self._sources = {node.id: {edge.source_id for edge in node.inputs} for node in order}
        self._readers: dict[str, set[str]] = {node.id: set() for node in order}
        for node in order:
            for source in self._sources[node.id]:
                self._readers[source].add(node.id)

    def in_a_row(self) -> None:
        """Join each box with the box before, if this is its only source, and has no other reader."""
        for box in list(self.steps):
            sources = self._sources[box]
            if len(sources) == 1 and self._readers[source := next(iter(sources))] == {box} and self._fit(source, box):
                self._readers[source] = self._readers.pop(box)
                for reader in self._readers[source]:
                    self._sources[reader] = self._sources[reader] - {box} | {source}
                self._join(source, box)

    def side_by_side(self) -> None:
        """Join each box with an earlier one that has the same sources and readers."""
        open_boxes: dict[tuple[frozenset[str], frozenset[str]], str] = {}
        for box in list(self.steps):
            ends = frozenset(self._sources[box]), frozenset(self._readers[box])
            first = open_boxes.get(ends)
            if first is None or not self._fit(first, box):
                open_boxes[ends] = box
                continue
            for source in self._sources[box]:
                self._readers[source].discard(box)
            for reader in self._readers.pop(box):
                self._sources[reader].discard(box)
            self._join(first, box)

    def _fit(self, first: str, box: str) -> bool:
        both = self.steps[first] + self.steps[box]
        return len(both) <= self._most and all(node.kind in ("node", "control") for node in both)

    def _join(self, first: str, box: str) -> None:
        self.steps[first] += self.steps.pop(box)
        del self._sources[box]

    def drawing(self) -> tuple[Drawing, frozenset[str]]:
        """Return the drawing of the boxes, and the ids of boxes with several steps."""
        ids = {first: f"{len(steps)} from {first}" if len(steps) > 1 else first for first, steps in self.steps.items()}
        box_of = {node.id: ids[first] for first, steps in self.steps.items() for node in steps}
        bodies_of = self._whole.bodies_of()
        nodes: list[DrawnNode] = []
        bodies: list[tuple[str, Drawing]] = []
        for first, steps in self.steps.items():
            own = ids[first]
            edges = [replace(edge, source_id=box_of[edge.source_id]) for node in steps for edge in node.inputs]
            into = tuple([edge for edge in edges if edge.source_id != own])
            held = [(node.id, body) for node in steps for body in bodies_of.get(node.id, [])]
            if len(steps) == 1:
                nodes.append(replace(steps[0], inputs=into))
                bodies += held
                continue
            size = f"{len(steps)} steps"
            inside = [
                replace(node, inputs=tuple([edge for edge in node.inputs if box_of[edge.source_id] == own]))
                for node in steps
            ]
            nodes.append(DrawnNode(own, _label([node.label for node in steps]), size, inputs=into))
            bodies.append((own, Drawing(size, tuple(inside), tuple(held))))
        return replace(self._whole, nodes=tuple(nodes), bodies=tuple(bodies)), frozenset(ids.values()) - ids.keys()


def _label(labels: list[str]) -> str:
    if len(set(labels)) == 1:
        return f"{clip(labels[0], _LABEL_COLUMNS)} ×{len(labels)}"
    return f"{clip(labels[0], _LABEL_COLUMNS)} … {clip(labels[-1], _LABEL_COLUMNS)}"
