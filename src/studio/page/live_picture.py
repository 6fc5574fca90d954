"""The drawing of a running graph for the live page: boxes with room for figures, bodies that open and close."""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from ...engine import Drawing, DrawnNode
from ..drawing import BoxMark, EdgeMark, Marks, in_parts, to_figure

# A graph with more steps begins with all bodies closed. A drawing with more boxes is drawn in parts, which are bodies,
# too.
_MOST_OPEN: Final = 150
_NO_WORD: Final = re.compile("[^0-9A-Za-z]")


def live_picture(graph: str, drawing: Drawing, known: Collection[str], closed: str | None) -> dict[str, Any]:
    """Return the picture of a graph, and the anchors by which the page finds its steps.

    Args:
        graph: the key of the graph on the page.
        drawing: the drawing of the graph.
        known: the keys of the steps that have figures; boxes of other steps have no room for figures.
        closed: the boxes whose bodies are not shown, with commas between them; None to choose by the size.

    Returns:
        `svg`, the picture; `boxes`, the key of a step by the anchor of its box; `roomy`, the anchors of boxes with room
        for figures; `edges`, pairs of keys, of which the n-th has the class "edge-n"; `owners`, the keys of all steps
        inside, by the anchor of a box with bodies; and `closed`, the anchors of closed boxes with bodies.
    """
    picture = _Picture(graph, known, set() if closed is None else set(closed.split(",")))
    if closed is None and _size(drawing) > _MOST_OPEN:
        picture.closed = None
    shown = picture.drawn(drawing, "")
    return {
        "svg": to_figure(shown, picture.marks), "boxes": picture.boxes, "edges": picture.edges,
        "roomy": [anchor for anchor, mark in picture.marks.boxes.items() if mark.has_room],
        "owners": picture.owners, "closed": [one for one in picture.owners if picture.is_closed(one)],
    }  # fmt: skip


def _size(drawing: Drawing) -> int:
    return len(drawing.nodes) + sum([_size(body) for _, body in drawing.bodies])


class _Picture:
    """Gives each box an anchor: the place of its step, without characters that have a meaning in HTML."""

    def __init__(self, graph: str, known: Collection[str], closed: set[str] | None) -> None:
        self.graph = graph
        self.known = known
        self.closed = closed  # None: all boxes are closed
        self.marks = Marks({}, {}, room=(196.0, 84.0))
        self.boxes: dict[str, str] = {}
        self.edges: list[tuple[str, str]] = []
        self.owners: dict[str, list[str]] = {}

    def is_closed(self, anchor: str) -> bool:
        return self.closed is None or anchor in self.closed

    def drawn(self, drawing: Drawing, path: str) -> Drawing:
        """Return the drawing with ids that are unique among all bodies."""
        drawing, parts = in_parts(drawing) if len(drawing.nodes) > _MOST_OPEN else (drawing, frozenset[str]())
        anchors = {node.id: "b" + _NO_WORD.sub("-", f"{path}{node.id}") for node in drawing.nodes}
        places = {node.id: f"{self.graph} {path}{node.id}" for node in drawing.nodes}
        owners = drawing.bodies_of()
        part_of = {node.id: part for part in parts for node in owners[part][0].nodes}
        self.owners |= {anchors[owner]: [] for owner in owners}
        above = f"{self.graph} {path}"
        for key in self.known:
            step, _, deeper = key.removeprefix(above).partition(".")
            owner = part_of.get(step, step if deeper else None)
            if key.startswith(above) and owner in owners:
                self.owners[anchors[owner]].append(key)
        nodes = [self._node(node, anchors, places, node.id in parts) for node in drawing.nodes]
        bodies = [
            (anchors[owner], self.drawn(body, path if owner in parts else f"{path}{owner}.{number}."))
            for owner, found in owners.items()
            if not self.is_closed(anchors[owner])
            for number, body in enumerate(found)
        ]
        return replace(drawing, nodes=tuple(nodes), bodies=tuple(bodies))

    def _node(self, node: DrawnNode, anchors: dict[str, str], places: dict[str, str], is_part: bool) -> DrawnNode:
        own = anchors[node.id]
        is_step = node.kind in ("node", "control")
        if is_step:
            has_room = places[node.id] in self.known or bool(self.is_closed(own) and self.owners.get(own))
            self.marks.boxes[own] = BoxMark("", ", ".join(filter(None, (node.label, node.detail))), has_room)
            self.boxes[own] = places[node.id]
        for source in dict.fromkeys(edge.source_id for edge in node.inputs):
            order = all(edge.is_order for edge in node.inputs if edge.source_id == source)
            style = f"edge-{len(self.edges)}{' order' if order else ''}"
            self.marks.edges[anchors[source], own] = EdgeMark(style, 0.0 if order else 1.4, "")
            self.edges.append((places[source], places[node.id]))
        inputs = tuple([replace(edge, source_id=anchors[edge.source_id]) for edge in node.inputs])
        chain = [words for words in node.detail.split(", ") if words.startswith("with ")]  # fused with other nodes
        return replace(node, id=own, detail=", ".join(chain) if is_step and not is_part else node.detail, inputs=inputs)
