"""A graph as text: what `print(graph)` shows."""

from collections.abc import Sequence

from ...telemetry.tables.characters import clip, pad, printable, width
from .layout import Row, rows
from .model import Drawing, innermost_first
from .rails import rails
from .summary import summary

MAX_COLUMNS = 100
MAX_ROWS = 60  # about what fits on one screen; of more, a summary says more than a picture
_MAX_LINES = 2 * MAX_ROWS  # with the bodies of control flow; above it they are counted instead of drawn
_MAX_RAIL_COLUMNS = 40
_MAX_NAME_COLUMNS = 44
_MAX_READS_COLUMNS = 60

_Bodies = dict[str, list[tuple[Drawing, list[str]]]]


def to_text(drawing: Drawing) -> str:
    """Draw a graph for a terminal of 100 columns.

    One line a node, sources first, with rails for the values between them; siblings that look alike are folded
    (`fetch ×32`), joins name what they read, bodies of control flow stand under their node. In a running graph, the
    load of a node stands beside its name. A graph of more than 60 such lines is summarised: how many nodes of each
    name, how deep, how wide, its first and last levels.

    Args:
        drawing: The graph.

    Returns:
        Lines without trailing white space, joined by newlines.

    Raises:
        ValueError: An edge or a body names an unknown node, two nodes share an id, or the edges form a cycle.
    """
    blocks: dict[int, list[str]] = {}
    for each in innermost_first(drawing):
        found = rows(each)
        if len(found) > MAX_ROWS:
            blocks[id(each)] = summary(each, found)
            continue
        bodies: _Bodies = {
            owner_id: [(body, blocks.get(id(body), [body.size()])) for body in owned]
            for owner_id, owned in each.bodies_of().items()
        }
        lines = _in_one_line(found) if each is not drawing and not bodies else []
        lines = lines or _picture(found, bodies)
        if bodies and len(lines) > _MAX_LINES:
            counted = {owner_id: [(body, [body.size()]) for body, _ in owned] for owner_id, owned in bodies.items()}
            lines = _picture(found, counted)
        blocks[id(each)] = lines or ["no nodes"]
    return "\n".join([clip(printable(drawing.title), MAX_COLUMNS), "", *blocks[id(drawing)]])


def _in_one_line(found: Sequence[Row]) -> list[str]:
    """Return `a → b → c` for a body that is a plain chain without details, nothing for any other."""
    for index, row in enumerate(found):
        sources = [read.source for read in row.reads]
        if row.node.detail or row.load or row.count > 1 or sources != ([index - 1] if index else []) or _paths(row):
            return []
    line = " → ".join(_name(row) for row in found)
    return [line] if width(line) <= MAX_COLUMNS // 2 else []


def _picture(found: Sequence[Row], bodies: _Bodies) -> list[str]:
    beside, below = rails(found)
    rail_columns = max(map(len, beside), default=0)
    railed = rail_columns <= _MAX_RAIL_COLUMNS
    if not railed:
        beside, below, rail_columns = ["•"] * len(found), [""] * len(found), 1
    names = [_name(row) for row in found]
    name_columns = max(map(width, names), default=0)
    loads = _loads(found)
    lines: list[str] = []
    for row, name, load, rail, rail_below in zip(found, names, loads, beside, below, strict=True):
        at_a_glance = railed and sum(read.count for read in row.reads) <= 1 and not _paths(row)
        remarks = [load, "" if at_a_glance else _reads(row, found), printable(row.node.detail)]
        line = f"{pad(rail, rail_columns)}  {pad(name, name_columns)}   {'   '.join(filter(None, remarks))}"
        lines.append(clip(line.rstrip(), MAX_COLUMNS))
        margin = pad(rail_below, rail_columns) + "    "
        lines.extend(clip((margin + inner).rstrip(), MAX_COLUMNS) for inner in _body_lines(bodies.get(row.node.id, [])))
    return lines


def _loads(found: Sequence[Row]) -> list[str]:
    """Return the loads, with each number in a column of its own; nothing for a graph that does not run."""
    words = [() if row.load is None else row.load.words() for row in found]
    columns = [max(map(width, column)) for column in zip(*filter(None, words), strict=True)]
    room = sum(columns) + 2 * max(0, sum(1 for column in columns if column) - 1)
    return [
        pad("  ".join(pad(word, column) for word, column in zip(row, columns, strict=False) if column), room)
        for row in words
    ]


def _body_lines(owned: list[tuple[Drawing, list[str]]]) -> list[str]:
    titles = [clip(printable(body.title), _MAX_NAME_COLUMNS) + ":" for body, _ in owned]
    short = [title for title, (_, block) in zip(titles, owned, strict=True) if len(block) == 1]
    short_columns = max(map(width, short), default=0)
    lines: list[str] = []
    for title, (_, block) in zip(titles, owned, strict=True):
        lines.extend([f"{pad(title, short_columns)} {block[0]}"] if len(block) == 1 else [title, *block])
    return lines


def _name(row: Row) -> str:
    return clip(printable(row.name), _MAX_NAME_COLUMNS) + (f" ×{row.count:,}" if row.count > 1 else "")


def _paths(row: Row) -> list[str]:
    return [label for read in row.reads for label in read.labels if label.startswith((".", "["))]


def _reads(row: Row, found: Sequence[Row]) -> str:
    parts: list[str] = []
    used = 0
    for nth, read in enumerate(row.reads):
        path = read.labels[0] if len(read.labels) == 1 and read.labels[0].startswith((".", "[")) else ""
        part = clip(printable(found[read.source].name + path), _MAX_NAME_COLUMNS)
        part += f" ×{read.count:,}" if read.count > 1 else ""
        used += width(part) + 2
        if parts and used > _MAX_READS_COLUMNS:
            parts.append(f"… {len(row.reads) - nth} more")
            break
        parts.append(part)
    return "← " + ", ".join(parts) if parts else ""
