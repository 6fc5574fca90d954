"""The graph of a profile as a picture: edges as wide as what flows through them, and coloured by how long it waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import sqrt
from typing import Final

from ...layered import Layers, Placement, place
from ...tables.characters import clip, printable, width
from ...tables.table import milliseconds
from ..node_profile import NodeProfile

# Larger graphs are not drawn: nobody follows their edges.
MAX_NODES: Final = 150
_MAX_SEGMENTS: Final = 3_000

_LABEL_WIDTH, _DETAIL_WIDTH = 8.0, 6.6  # pixels that a character takes at most, in the fonts of the page
_LEAST_WIDTH, _PADDING, _HEIGHT = 112.0, 14.0, 64.0
_END_SIZE = 12.0  # of the dots at which items come in and go out
_LEVEL_GAP = 68.0
_LEAST_EDGE, _MOST_EDGE = 2.0, 12.0
_MARGIN = 16.0
_MAX_COLUMNS = 28
# An edge has one of so many colours, the first where nothing waits.
COLOURS: Final = 5


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A node in the picture.

    Attributes:
        profile: what it did.
        readers: names of the nodes of its graph that wait for its value.
        anchor: id of its row in the table.
        limits: whether it is the one that limits.
    """

    profile: NodeProfile
    readers: tuple[str, ...]
    anchor: str
    limits: bool


class _Graph:
    """Boxes of a picture: where items come in, the nodes in topological order, where they go out."""

    def __init__(self, nodes: Sequence[DrawnNode]) -> None:
        self.nodes = nodes
        index = {node.profile.node: number for number, node in enumerate(nodes, start=1)}
        self.last = len(nodes) + 1
        sources: list[list[int]] = [[] for _ in range(len(nodes) + 2)]
        for number, node in enumerate(nodes, start=1):
            # What is not in the profile is no node, or has done nothing.
            for reader in [index[name] for name in node.readers if index.get(name, 0) > number] or [self.last]:
                sources[reader].append(number)
        for number in range(1, self.last):
            sources[number] = sources[number] or [0]
        self.layers = Layers.of(sources)

    def sizes(self) -> list[tuple[float, float]]:
        """Return width and height of each box."""
        end = (_END_SIZE, _END_SIZE)
        return [end, *[(_width(node), _HEIGHT) for node in self.nodes], end]

    def flow(self, source: int, target: int) -> int:
        """Return how many items went through an edge."""
        node = self.nodes[(source if target == self.last else target) - 1].profile
        return node.count if target == self.last else node.count + node.errors


def graph_picture(name: str, nodes: Sequence[DrawnNode]) -> str:
    """Return a figure of one graph, whose nodes are in topological order.

    Args:
        name: of the graph.
        nodes: its nodes.
    """
    graph = _Graph(nodes)
    caption = f"<figcaption>{escape(printable(name))}</figcaption>"
    if len(nodes) > MAX_NODES or graph.layers.segments > _MAX_SEGMENTS:
        return f'<figure class="graph">{caption}<p class="note">{len(nodes):,} nodes: too many to draw.</p></figure>'
    # It is placed from top to bottom, and drawn from left to right: all sizes and places are turned around.
    placed = place(graph.layers, [(high, wide) for wide, high in graph.sizes()], _LEVEL_GAP)
    wide, high = placed.height + 2 * _MARGIN, placed.width + 2 * _MARGIN
    most = max([graph.flow(route.source, route.target) for route in placed.routes], default=0)
    scrolled = f'<div class="scroll" tabindex="0" role="group" aria-label="The graph {escape(printable(name))}">'
    return "\n".join([
        f'<figure class="graph">{caption}{scrolled}',
        f'<svg width="{wide:.0f}" height="{high:.0f}" viewBox="{-_MARGIN:.0f} {-_MARGIN:.0f} {wide:.0f} {high:.0f}">',
        *_edges(graph, placed, most),
        *_ends(placed, graph.last),
        *[_box(node, placed, number) for number, node in enumerate(nodes, start=1)],
        "</svg></div></figure>",
    ])  # fmt: skip


def _edges(graph: _Graph, placed: Placement, most: int) -> list[str]:
    found: list[str] = []
    for route in placed.routes:
        flow = graph.flow(route.source, route.target)
        across = _LEAST_EDGE + (_MOST_EDGE - _LEAST_EDGE) * sqrt(flow / most if most else 0.0)
        colour, about = 0, "out"
        if route.target != graph.last:
            reader = graph.nodes[route.target - 1].profile
            colour = round(min(reader.occupancy, 1.0) * (COLOURS - 1))
            about = f"{reader.node}: items wait for {reader.occupancy:.0%} of the time"
            if reader.mean_queue_wait_seconds is not None:
                about += f", each {milliseconds(reader.mean_queue_wait_seconds)} on average"
        source = "in" if not route.source else graph.nodes[route.source - 1].profile.node
        title = f"{source} → {about}; {flow:,} items"
        found.append(
            f'<path class="edge wait-{colour}" stroke-width="{across:.1f}" d="{_path(route.points)}">'
            f"<title>{escape(printable(title))}</title></path>"
        )
    return found


def _path(points: Sequence[tuple[float, float]]) -> str:
    (y, x), *rest = points
    path = [f"M{x:.1f} {y:.1f}"]
    for number, (to_y, to_x) in enumerate(rest):
        half = (x + to_x) / 2
        is_straight = number % 2 == 0 or abs(to_y - y) < 0.5
        curve = f"C{half:.1f} {y:.1f} {half:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        path.append(f"L{to_x:.1f} {to_y:.1f}" if is_straight else curve)
        x, y = to_x, to_y
    return "".join(path)


def _ends(placed: Placement, last: int) -> list[str]:
    found: list[str] = []
    for number, label, dx in ((0, "in", -1), (last, "out", 1)):
        box = placed.boxes[number]
        x, y = box.top + _END_SIZE / 2, box.left + _END_SIZE / 2
        found.append(f'<circle class="end" cx="{x:.1f}" cy="{y:.1f}" r="{_END_SIZE / 2}"/>')
        found.append(f'<text class="end" x="{x + dx:.1f}" y="{y - 12:.1f}" text-anchor="middle">{label}</text>')
    return found


def _box(node: DrawnNode, placed: Placement, number: int) -> str:
    box, profile = placed.boxes[number], node.profile
    wide = box.height
    label, detail, busy = _texts(profile)
    kind = "box limits" if node.limits else "box"
    bar = wide - 2 * _PADDING
    filled = bar * min(profile.busy_share or 0.0, 1.0)
    badge = (
        f'<g class="badge"><rect x="{wide - 58:.1f}" y="-9" width="50" height="18" rx="9"/>'
        f'<text x="{wide - 33:.1f}" y="4" text-anchor="middle">limits</text></g>'
        if node.limits
        else ""
    )
    return (
        f'<a class="{kind}" href="#{node.anchor}" transform="translate({box.top:.1f} {box.left:.1f})">'
        f"<title>{escape(_about(profile))}</title>"
        f'<rect class="card" width="{wide:.1f}" height="{_HEIGHT:.0f}" rx="10"/>'
        f'<text class="name" x="{_PADDING:.0f}" y="24">{escape(label)}</text>'
        f'<text class="detail" x="{_PADDING:.0f}" y="42">{escape(detail)}</text>'
        f'<text class="detail busy" x="{wide - _PADDING:.1f}" y="42" text-anchor="end">{escape(busy)}</text>'
        f'<rect class="track" x="{_PADDING:.0f}" y="50" width="{bar:.1f}" height="4" rx="2"/>'
        f'<rect class="fill" x="{_PADDING:.0f}" y="50" width="{filled:.1f}" height="4" rx="2"/>{badge}</a>'
    )


def _width(node: DrawnNode) -> float:
    label, detail, busy = _texts(node.profile)
    inside = max(width(label) * _LABEL_WIDTH, (width(detail) + width(busy) + 3) * _DETAIL_WIDTH)
    return max(_LEAST_WIDTH, inside + 2 * _PADDING)


def _texts(profile: NodeProfile) -> tuple[str, str, str]:
    busy = "" if profile.busy_share is None else f"{profile.busy_share:.0%}"
    return clip(printable(profile.node), _MAX_COLUMNS), milliseconds(profile.mean_seconds), busy


def _about(profile: NodeProfile) -> str:
    busy = "" if profile.busy_share is None else f", busy for {profile.busy_share:.0%} of the time of its places"
    return printable(f"{profile.node}: {profile.count:,} items{busy}")


def by_graph(nodes: Sequence[DrawnNode]) -> Mapping[str, list[DrawnNode]]:
    """Return the nodes of each graph, in their order."""
    found: dict[str, list[DrawnNode]] = {}
    for node in nodes:
        found.setdefault(node.profile.graph, []).append(node)
    return found
