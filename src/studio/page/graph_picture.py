"""The graph of a profile as a picture: edges as wide as what flows through them, and coloured by how long it waits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import sqrt
from typing import Final

from ...telemetry import BodyPlace, NodeProfile, StepSnapshot
from ...telemetry.tables import milliseconds
from ...telemetry.text import clip, printable, width
from ..layered import Layers, PlacedLayers, place

# Larger graphs are not drawn: their edges cannot be followed by eye.
MAX_NODES: Final = 150
_MAX_SEGMENTS: Final = 3_000

_LABEL_WIDTH, _DETAIL_WIDTH = 8.0, 6.6  # pixels that a character takes at most, in the fonts of the page
_LEAST_WIDTH, _PADDING, _HEIGHT = 112.0, 14.0, 64.0
_END_SIZE = 12.0  # of the dots at which items come in and go out
_LEVEL_GAP = 68.0
_LEAST_EDGE, _MOST_EDGE = 2.0, 12.0
_MARGIN = 16.0
_TITLE = 40.0  # above the picture of a body
_MAX_COLUMNS = 28
# The number of colours of an edge; the first one stands for no waiting.
COLOURS: Final = 5


@dataclass(frozen=True, slots=True)
class ProfiledNode:
    """A node in the picture.

    Attributes:
        profile: its profile.
        step: the nodes that wait for its value, and the place of its graph.
        anchor: id of its row in the table.
        limits: whether it is the one that limits.
    """

    profile: NodeProfile
    step: StepSnapshot
    anchor: str
    limits: bool


class _Body:
    """The body of control flow: a box in the picture of the graph around it, with a picture in it.

    Attributes:
        name: its name in that graph.
        around: its place in that graph.
        graph: the boxes in it.
        placed: where those boxes are; None if there are too many to draw.
    """

    def __init__(self, name: str, around: BodyPlace, nodes: Sequence[ProfiledNode]) -> None:
        self.name = name
        self.around = around
        self.graph = graph = _Graph(name, nodes)
        self.placed = None if graph.is_too_large else graph.placed()

    @property
    def label(self) -> str:
        """The text above it."""
        return clip(printable(self.name.removeprefix(f"{self.around.graph}/")), _MAX_COLUMNS)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height, with its frame."""
        label = width(self.label) * _LABEL_WIDTH
        if self.placed is None:
            return max(_LEAST_WIDTH, label) + 2 * _PADDING, _HEIGHT
        return max(self.placed.height, label) + 2 * _PADDING, self.placed.width + _TITLE + _PADDING


class _Graph:
    """Boxes of a picture: where items come in, nodes and bodies in topological order, where they go out.

    Args:
        name: of the graph.
        nodes: all nodes of the profile.
    """

    def __init__(self, name: str, nodes: Sequence[ProfiledNode]) -> None:
        self.boxes: list[ProfiledNode | _Body] = [node for node in nodes if node.profile.graph == name]
        self.count = len(self.boxes)
        inside = {node.profile.graph: around for node in nodes if (around := node.step.around) and around.graph == name}
        for body, around in inside.items():  # behind the last of its sources
            index = self._index()
            first = max([index[source] for source in around.sources if source in index], default=0)
            self.boxes.insert(first, _Body(body, around, nodes))
        index = self._index()
        bodies = [box for box in self.boxes if isinstance(box, _Body)]
        self.last = len(self.boxes) + 1
        sources: list[list[int]] = [[] for _ in range(len(self.boxes) + 2)]
        for number, box in enumerate(self.boxes, start=1):
            following = [*_readers(box), *[body.name for body in bodies if _name(box) in body.around.sources]]
            # A name that is not in the profile is not a node, or its node has done nothing.
            readers = dict.fromkeys(index[name] for name in following if index.get(name, 0) > number)
            for reader in readers or [self.last]:
                sources[reader].append(number)
        for number in range(1, self.last):
            sources[number] = sources[number] or [0]
        self.layers = Layers.of(sources)

    def _index(self) -> dict[str, int]:
        return {_name(box): number for number, box in enumerate(self.boxes, start=1)}

    @property
    def is_too_large(self) -> bool:
        """Whether it has too many nodes or edges to be read as a picture."""
        return self.count > MAX_NODES or self.layers.segments > _MAX_SEGMENTS

    def placed(self) -> PlacedLayers:
        """Return where the boxes are: from top to bottom, so all sizes and places are turned around when drawn."""
        end = (_END_SIZE, _END_SIZE)
        sizes = [end, *[_size(box) for box in self.boxes], end]
        return place(self.layers, [(high, wide) for wide, high in sizes], _LEVEL_GAP)

    def flow(self, source: int, target: int) -> int:
        """Return how many items went through an edge: those that a node took, or that the source of a body gave."""
        reader = None if target == self.last else self.boxes[target - 1]
        if isinstance(reader, ProfiledNode):
            return reader.profile.count + reader.profile.errors
        giver = self.boxes[source - 1] if source else None
        return giver.profile.count if isinstance(giver, ProfiledNode) else 0


def _name(box: ProfiledNode | _Body) -> str:
    return box.name if isinstance(box, _Body) else box.profile.node


def _called(box: ProfiledNode | _Body) -> str:
    return box.label if isinstance(box, _Body) else box.profile.node


def _readers(box: ProfiledNode | _Body) -> Sequence[str]:
    """Return the names of the boxes that read a box directly."""
    if isinstance(box, _Body):
        return box.around.consumers
    return [name for name in box.step.consumers if name not in box.step.behind]


def _size(box: ProfiledNode | _Body) -> tuple[float, float]:
    return box.size if isinstance(box, _Body) else (_width(box), _HEIGHT)


def graph_picture(name: str, nodes: Sequence[ProfiledNode]) -> str:
    """Return a figure of one graph, with the bodies of its control flow as boxes inside of it.

    Args:
        name: of the graph.
        nodes: all nodes of the profile; those of one graph in topological order.
    """
    graph = _Graph(name, nodes)
    caption = f"<figcaption>{escape(printable(name))}</figcaption>"
    if graph.is_too_large:
        return f'<figure class="graph">{caption}<p class="note">{graph.count:,} nodes: too many to draw.</p></figure>'
    placed = graph.placed()
    wide, high = placed.height + 2 * _MARGIN, placed.width + 2 * _MARGIN
    scrolled = f'<div class="scroll" tabindex="0" role="group" aria-label="The graph {escape(printable(name))}">'
    return "\n".join([
        f'<figure class="graph">{caption}{scrolled}',
        f'<svg width="{wide:.0f}" height="{high:.0f}" viewBox="{-_MARGIN:.0f} {-_MARGIN:.0f} {wide:.0f} {high:.0f}">',
        *_drawn(graph, placed),
        "</svg></div></figure>",
    ])  # fmt: skip


def _drawn(graph: _Graph, placed: PlacedLayers) -> Iterator[str]:
    most = max([graph.flow(route.source, route.target) for route in placed.routes], default=0)
    yield from _edges(graph, placed, most)
    yield from _ends(placed, graph.last)
    for number, box in enumerate(graph.boxes, start=1):
        if isinstance(box, _Body):
            yield from _framed(box, placed, number)
        else:
            yield _box(box, placed, number)


def _framed(body: _Body, placed: PlacedLayers, number: int) -> Iterator[str]:
    box = placed.boxes[number]
    yield f'<g class="body" transform="translate({box.top:.1f} {box.left:.1f})">'
    yield f'<rect width="{box.height:.1f}" height="{box.width:.1f}" rx="10"/>'
    yield f'<text class="detail" x="{_PADDING:.0f}" y="18">{escape(body.label)}</text>'
    if body.placed is None:
        yield f'<text class="detail" x="{_PADDING:.0f}" y="42">{body.graph.count:,} nodes</text>'
    else:
        yield f'<g transform="translate({_PADDING:.1f} {_TITLE:.1f})">'
        yield from _drawn(body.graph, body.placed)
        yield "</g>"
    yield "</g>"


def _edges(graph: _Graph, placed: PlacedLayers, most: int) -> list[str]:
    found: list[str] = []
    for route in placed.routes:
        flow = graph.flow(route.source, route.target)
        across = _LEAST_EDGE + (_MOST_EDGE - _LEAST_EDGE) * sqrt(flow / most if most else 0.0)
        colour, about = 0, "out"
        if route.target != graph.last:
            box = graph.boxes[route.target - 1]
            about = _called(box)
            if isinstance(box, ProfiledNode):
                reader = box.profile
                colour = round(min(reader.occupancy, 1.0) * (COLOURS - 1))
                about += f": items wait for {reader.occupancy:.0%} of the time"
                if reader.mean_queue_wait_seconds is not None:
                    about += f", each {milliseconds(reader.mean_queue_wait_seconds)} on average"
        source = "in" if not route.source else _called(graph.boxes[route.source - 1])
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


def _ends(placed: PlacedLayers, last: int) -> list[str]:
    found: list[str] = []
    for number, label, dx in ((0, "in", -1), (last, "out", 1)):
        box = placed.boxes[number]
        x, y = box.top + _END_SIZE / 2, box.left + _END_SIZE / 2
        found.append(f'<circle class="end" cx="{x:.1f}" cy="{y:.1f}" r="{_END_SIZE / 2}"/>')
        found.append(f'<text class="end" x="{x + dx:.1f}" y="{y - 12:.1f}" text-anchor="middle">{label}</text>')
    return found


def _box(node: ProfiledNode, placed: PlacedLayers, number: int) -> str:
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


def _width(node: ProfiledNode) -> float:
    label, detail, busy = _texts(node.profile)
    inside = max(width(label) * _LABEL_WIDTH, (width(detail) + width(busy) + 3) * _DETAIL_WIDTH)
    return max(_LEAST_WIDTH, inside + 2 * _PADDING)


def _texts(profile: NodeProfile) -> tuple[str, str, str]:
    busy = "" if profile.busy_share is None else f"{profile.busy_share:.0%}"
    return clip(printable(profile.node), _MAX_COLUMNS), milliseconds(profile.mean_seconds), busy


def _about(profile: NodeProfile) -> str:
    busy = "" if profile.busy_share is None else f", busy for {profile.busy_share:.0%} of the time of its places"
    return printable(f"{profile.node}: {profile.count:,} items{busy}")


def whole_graphs(nodes: Sequence[ProfiledNode]) -> list[str]:
    """Return the graphs that are not bodies of other graphs."""
    graphs = {node.profile.graph: node.step.around for node in nodes}
    return [graph for graph, around in graphs.items() if around is None or around.graph not in graphs]
