"""A graph as a picture for notebooks and pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from ...engine import Drawing
from ...telemetry.text import clip, printable, width
from ..layered import Layers, Route, place
from .layout import Row, innermost_first, rows
from .text import summary

MAX_ROWS = 150  # larger drawings are summarised: their edges cannot be followed by eye
_MAX_LIVE_ROWS = 400  # a page can be searched
_MAX_SEGMENTS = 3_000
_MAX_ELEMENTS = 5_000
_LABEL_WIDTH, _DETAIL_WIDTH = 7.9, 6.3  # the width of the widest character in the fonts below, in pixels
_PADDING = 16.0
_MAX_LABEL_COLUMNS, _MAX_DETAIL_COLUMNS, _MAX_LOAD_COLUMNS = 36, 44, 64
_LINE_HEIGHT = 16.0  # of the lines under a label, in pixels

# Colours are solid, so that the picture is legible on any page; they follow the reader's colour scheme.
_STYLE = """
.penstock text{font:500 13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#1d2433}
.penstock text.detail{font:11px system-ui,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#5d6880}
.penstock text.title{font:600 14px system-ui,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif}
.penstock .page{fill:#ffffff;stroke:#e3e7ef}
.penstock .node{fill:#f5f7fb;stroke:#c3ccdc}
.penstock .input{fill:#e6f0ff;stroke:#8fb6f2}
.penstock .resource{fill:#f5edfc;stroke:#c09be0}
.penstock .control{fill:#fff7e6;stroke:#e8bd66}
.penstock .output{fill:#e5f6ec;stroke:#84c9a0}
.penstock .body{fill:#ffffff;stroke:#e8bd66;stroke-dasharray:4 3}
.penstock .edge{fill:none;stroke:#97a3b8;stroke-width:1.4}
.penstock .order{stroke-width:.6}
.penstock .tip{fill:#97a3b8}
@media (prefers-color-scheme:dark){
.penstock text{fill:#e4e9f2}
.penstock text.detail{fill:#9aa6bd}
.penstock .page{fill:#12161d;stroke:#2a313d}
.penstock .node{fill:#1e2530;stroke:#465268}
.penstock .input{fill:#16294a;stroke:#3f6fb8}
.penstock .resource{fill:#2b1c3a;stroke:#7b569c}
.penstock .control{fill:#33280f;stroke:#94742c}
.penstock .output{fill:#12321f;stroke:#3b8659}
.penstock .body{fill:#12161d;stroke:#94742c}
.penstock .edge{stroke:#66738a}
.penstock .tip{fill:#66738a}
}
""".strip()


@dataclass(frozen=True, slots=True)
class BoxMark:
    """A mark of a box, which leads to the element of the page with the id of its node.

    Attributes:
        badge: the text of a badge on the box, which is also a class of the box; empty for no badge.
        about: a sentence that is shown while the mouse is over the box.
        has_room: whether the box leaves free the room that `Marks.room` gives.
    """

    badge: str
    about: str
    has_room: bool = False


@dataclass(frozen=True, slots=True)
class EdgeMark:
    """A mark of an edge.

    Attributes:
        style: a further class of the edge and of its tip.
        width: its width, in pixels.
        about: a text that is shown beside the names of its ends while the mouse is over the edge.
    """

    style: str
    width: float
    about: str


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a picture: of boxes, by the id of the node, and of edges, by the ids of the nodes at its ends.

    `room` is the least width of a box that has room, and the height under its label that is left free, in pixels.
    """

    boxes: dict[str, BoxMark]
    edges: dict[tuple[str, str], EdgeMark]
    room: tuple[float, float] = (0.0, 0.0)


class _Part:
    """A drawn graph: SVG elements with the origin at its top left corner, and its size in pixels."""

    def __init__(self, elements: list[str], width: float, height: float) -> None:
        self.elements = elements
        self.width = width
        self.height = height


def to_svg(drawing: Drawing) -> str:
    """Return a self-contained SVG picture, layered from top to bottom, for light and dark pages.

    Siblings that look alike are folded as in `to_text`, bodies of control flow are drawn inside their node, and a
    graph of more than 150 boxes is summarised in words.

    Args:
        drawing: The graph.

    Returns:
        One `<svg>` element that needs no script, font or style from elsewhere.

    Raises:
        ValueError: An edge or a body names an unknown node, two nodes share an id, or the edges form a cycle.
    """
    whole = _whole(drawing)
    return framed(drawing.title, whole.elements, whole.width, whole.height)


def to_figure(drawing: Drawing, marks: Marks) -> str:
    """Return a picture with marks, for a page that has a style for its classes. Nothing is folded."""
    whole = _whole(drawing, marks)
    wide, high = f"{whole.width + 2 * _PADDING:.0f}", f"{whole.height + 2 * _PADDING:.0f}"
    size = f'width="{wide}" height="{high}" viewBox="{-_PADDING:.0f} {-_PADDING:.0f} {wide} {high}"'
    return "\n".join([f"<svg {size}>", *whole.elements, "</svg>"])


def _whole(drawing: Drawing, marks: Marks | None = None) -> _Part:
    parts: dict[int, _Part] = {}
    for each in innermost_first(drawing):
        found = rows(each, is_folded=marks is None)
        most = _MAX_LIVE_ROWS if marks and marks.room[1] else MAX_ROWS
        if len(found) > most or _layers(found).segments > _MAX_SEGMENTS:
            parts[id(each)] = _words(summary(each, found))
            continue
        bodies = {
            owner_id: _side_by_side([(body, parts.get(id(body))) for body in owned])
            for owner_id, owned in each.bodies_of().items()
        }
        parts[id(each)] = _graph(found, bodies, marks or Marks({}, {}))
    return parts[id(drawing)]


def framed(title: str, elements: list[str], wide_inside: float, high_inside: float) -> str:
    """Return SVG elements as one picture under a title.

    Args:
        title: the title of the picture.
        elements: the elements in the picture, with the origin at their top left corner.
        wide_inside: the width of all elements together, in pixels.
        high_inside: the height of all elements together, in pixels.
    """
    page = _framed(title, _Part(elements, wide_inside, high_inside), "page")
    wide, high = f"{page.width + 2:.0f}", f"{page.height + 2:.0f}"
    size = f'width="{wide}" height="{high}" viewBox="-1 -1 {wide} {high}" style="max-width:100%;height:auto"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" class="penstock" role="img" {size}>',
        f"<title>{escape(printable(title))}</title>",
        f"<style>{_STYLE}</style>",
        *page.elements,
        "</svg>",
    ])  # fmt: skip


def _words(lines: list[str]) -> _Part:
    elements = [
        f'<text x="0" y="{18 * nth + 13}" xml:space="preserve">{escape(line)}</text>' for nth, line in enumerate(lines)
    ]
    return _Part(elements, max(map(width, lines), default=0) * _LABEL_WIDTH, 18.0 * len(lines))


def _side_by_side(bodies: list[tuple[Drawing, _Part | None]]) -> list[_Part]:
    shown = [
        (body.title, part if part and len(part.elements) <= _MAX_ELEMENTS else _words([body.size()]))
        for body, part in bodies
    ]
    highest = max(part.height for _, part in shown)
    return [_framed(title, _Part(part.elements, part.width, highest), "body") for title, part in shown]


def _framed(title: str, inside: _Part, style: Literal["page", "body"]) -> _Part:
    title = clip(printable(title), _MAX_DETAIL_COLUMNS)
    wide = max(inside.width, width(title) * _LABEL_WIDTH) + 2 * _PADDING
    high = inside.height + 3 * _PADDING + 10
    css = "title" if style == "page" else "detail"
    elements = [
        f'<rect class="{style}" width="{wide:.1f}" height="{high:.1f}" rx="10"/>',
        f'<text class="{css}" x="{_PADDING:.0f}" y="{_PADDING + 8:.0f}">{escape(title)}</text>',
        f'<g transform="translate({(wide - inside.width) / 2:.1f} {2 * _PADDING + 8:.1f})">',
        *inside.elements,
        "</g>",
    ]
    return _Part(elements, wide, high)


def _graph(found: Sequence[Row], bodies: dict[str, list[_Part]], marks: Marks) -> _Part:
    with_room = {node for node, mark in marks.boxes.items() if mark.has_room}
    rooms = [marks.room if row.node.id in with_room else (0.0, 0.0) for row in found]
    sizes = [_size(row, bodies.get(row.node.id, []), room) for row, room in zip(found, rooms, strict=True)]
    placement = place(_layers(found), sizes)
    elements: list[str] = []
    for route in placement.routes:
        elements += _edge(found, route, marks)
    for row, box, room in zip(found, placement.boxes, rooms, strict=True):
        mark, place_ = marks.boxes.get(row.node.id), f'transform="translate({box.left:.1f} {box.top:.1f})"'
        drawn = _box(row, box.width, box.height, bodies.get(row.node.id, []), room[1])
        if mark is None:
            elements += [f"<g {place_}>", *drawn, "</g>"]
            continue
        css = f"box {mark.badge}" if mark.badge else "box"
        elements.append(
            f'<a class="{css}" href="#{row.node.id}" {place_}><title>{escape(printable(mark.about))}</title>'
        )
        elements += drawn
        if mark.badge:
            elements.append(f'<rect class="badge" x="{box.width - 58:.1f}" y="-9" width="50" height="18" rx="9"/>')
            elements.append(f'<text class="badge" x="{box.width - 33:.1f}" y="4">{escape(mark.badge)}</text>')
        elements.append("</a>")
    return _Part(elements, placement.width, placement.height)


def _layers(found: Sequence[Row]) -> Layers:
    return Layers([row.level for row in found], [[read.source for read in row.reads] for row in found])


def _texts(row: Row) -> tuple[str, list[str]]:
    """Return the label of a box, and the lines under it."""
    times = f" ×{row.count:,}" if row.count > 1 else ""
    detail = clip(printable(row.node.detail), _MAX_DETAIL_COLUMNS)
    load = clip(", ".join(filter(None, row.load)), _MAX_LOAD_COLUMNS)
    return clip(printable(row.node.label), _MAX_LABEL_COLUMNS) + times, [line for line in (detail, load) if line]


def _size(row: Row, bodies: Sequence[_Part], room: tuple[float, float]) -> tuple[float, float]:
    label, details = _texts(row)
    below = max(map(width, details), default=0) * _DETAIL_WIDTH
    wide = max(max(width(label) * _LABEL_WIDTH, below, 28.0) + 2 * _PADDING, room[0])
    high = 34.0 + _LINE_HEIGHT * len(details) + room[1]
    if bodies:
        inside = sum(body.width for body in bodies) + _PADDING * (len(bodies) - 1)
        wide = max(wide, inside + 2 * _PADDING)
        high += max(body.height for body in bodies) + _PADDING
    return wide, high


def _box(row: Row, wide: float, high: float, bodies: Sequence[_Part], room: float) -> list[str]:
    label, details = _texts(row)
    kind = row.node.kind
    round_ = high / 2 if kind in ("input", "output") else 8
    shape = f'class="{kind}" width="{wide:.1f}" height="{high:.1f}" rx="{round_:.0f}"'
    elements = [f'<rect {shape} transform="translate({5 * nth} {5 * nth})"/>' for nth in (2, 1) if row.count > 1]
    elements.append(f"<rect {shape}/>")
    elements.append(f'<text x="{wide / 2:.1f}" y="22" text-anchor="middle">{escape(label)}</text>')
    for nth, detail in enumerate(details):
        y = 39 + _LINE_HEIGHT * nth
        elements.append(
            f'<text class="detail" x="{wide / 2:.1f}" y="{y:.0f}" text-anchor="middle">{escape(detail)}</text>'
        )
    if bodies:
        left = (wide - sum(body.width for body in bodies) - _PADDING * (len(bodies) - 1)) / 2
        top = 34.0 + _LINE_HEIGHT * len(details) + room
        for body in bodies:
            elements += [f'<g transform="translate({left:.1f} {top:.1f})">', *body.elements, "</g>"]
            left += body.width + _PADDING
    return elements


def _edge(found: Sequence[Row], route: Route, marks: Marks) -> list[str]:
    source, target = found[route.source], found[route.target]
    (x, y), *rest = route.points
    path = [f"M{x:.1f} {y:.1f}"]
    for nth, (to_x, to_y) in enumerate(rest):
        if nth == len(rest) - 1:
            to_y -= 6
        half = (y + to_y) / 2
        straight = nth % 2 == 0 or abs(to_x - x) < 0.5
        bend = (
            f"L{to_x:.1f} {to_y:.1f}"
            if straight
            else f"C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y:.1f}"
        )
        path.append(bend)
        x, y = to_x, to_y
    read = next(read for read in target.reads if read.source == route.source)
    remark = ", ".join(filter(None, map(printable, read.labels)))
    mark = marks.edges.get((source.node.id, target.node.id), EdgeMark("order" if read.is_order else "", 0.0, ""))
    about = f"{printable(source.name)} → {printable(target.name)}" + (f" ({remark})" if remark else "")
    about += f": {mark.about}" if mark.about else ""
    across = f' stroke-width="{mark.width:.1f}"' if mark.width else ""
    css = f" {mark.style}" if mark.style else ""
    return [
        f'<path class="edge{css}"{across} d="{"".join(path)}"><title>{escape(about)}</title></path>',
        f'<path class="tip{css}" d="M{x:.1f} {y + 6:.1f}l-4.5 -8h9z"/>',
    ]
