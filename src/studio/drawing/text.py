"""A graph as text: what `print(graph)` shows."""

from collections import Counter
from collections.abc import Sequence

from ...engine import Drawing
from ...telemetry.text import clip, pad, printable, width
from .layout import Row, innermost_first, rows

_GLYPHS = {"input": "○", "resource": "□", "node": "●", "control": "◆", "output": "◎"}


def rails(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return, for each row, the rails on its line, and the rails that run on below it.

    A rail starts under the node that makes a value and ends at the last reader of the value. On the line of a node,
    `├`, `┤` and `┼` mark a value that the node and later nodes read; `╰`, `╯` and `┴` mark a value whose last reader
    the node is; `│` is a value that only passes by. Thin rails, `┆` and `╌`, lead to nodes that only wait.
    """
    columns: list[int | None] = []
    unread = [len(row.readers) for row in rows]
    needed = Counter(each.source for row in rows for each in row.reads if not each.is_order)  # readers of each row
    lines: list[str] = []
    below: list[str] = []
    dead_end: int | None = None  # the column of a node without readers on the line above; a node below looks like one
    for index, row in enumerate(rows):
        held = {source: at for at, source in enumerate(columns) if source is not None}
        read = sorted(held[each.source] for each in row.reads)
        values = {held[each.source] for each in row.reads if not each.is_order}
        for each in row.reads:
            unread[each.source] -= 1
            needed[each.source] -= not each.is_order
        ended = [at for at in read if unread[_occupant(columns, at)] == 0]
        place = ended[0] if ended else _free_column(columns, read[0] if read else -1, dead_end)
        columns.extend([None] * (place + 1 - len(columns)))
        thin = {at for source, at in held.items() if not needed[source] and at not in values}
        lines.append(_line(columns, read, values, set(ended), thin, place, _GLYPHS[row.node.kind]))
        for at in ended:
            columns[at] = None
        columns[place] = index if row.readers else None
        dead_end = None if row.readers else place
        while columns and columns[-1] is None:
            columns.pop()
        below.append(" ".join(" " if source is None else "│" if needed[source] else "┆" for source in columns))
    return lines, below


def _occupant(columns: list[int | None], at: int) -> int:
    source = columns[at]
    assert source is not None
    return source


def _free_column(columns: list[int | None], right_of: int, dead_end: int | None) -> int:
    for at in range(right_of + 1, len(columns)):
        if columns[at] is None and at != dead_end:
            return at
    return len(columns) + (len(columns) == dead_end)


def _line(
    columns: list[int | None],
    read: list[int],
    values: set[int],
    ended: set[int],
    thin: set[int],
    place: int,
    glyph: str,
) -> str:
    """Return the rails of a row, which reads `values` and waits for the other columns in `read`."""
    left, right = min([*read, place]), max([*read, place])
    first, last = min([*values, place]), max([*values, place])
    reading = set(read)
    cells: list[str] = []
    for at, source in enumerate(columns):
        if at == place:
            cell = glyph
        elif at in reading:
            at_edge = 0 if at == left else 2 if at == right else 1
            cell = ("╰┴╯" if at in ended else "├┼┤")[at_edge]
        elif source is not None:
            cell = "┆" if at in thin else "│"
        else:
            cell = ("─" if first < at < last else "╌") if left < at < right else " "
        cells.append(cell)
        cells.append(("─" if first <= at < last else "╌") if left <= at < right else " ")
    return "".join(cells).rstrip()


_MAX_NAMES = 12
_MAX_NAME_COLUMNS = 44
_MAX_LEVELS = 3  # at each end
_MAX_NAMES_A_LEVEL = 4


def summary(drawing: Drawing, found: Sequence[Row]) -> list[str]:
    """Return lines with the number of nodes by name, the depth and width of the graph, and its first and last levels.

    The counts add up to the number of all nodes: nodes that are left out are counted as well.
    """
    names: Counter[str] = Counter()
    levels: list[Counter[str]] = []
    edges = 0
    for row in found:
        names[row.node.label] += row.count
        edges += len(row.node.inputs) * row.count
        if row.level == len(levels):
            levels.append(Counter())
        levels[row.level][row.node.label] += row.count
    widest = max(level.total() for level in levels)
    lines = [
        f"too large to draw: {names.total():,} nodes, {edges:,} edges, {len(levels):,} levels, up to {widest:,} wide"
    ]
    if drawing.bodies:
        lines.append(f"not counted: what is inside its control flow ({len(drawing.bodies):,})")
    lines += ["", "  nodes  name"]
    lines += [f"{count:>7,}  {_shown(name)}" for name, count in names.most_common(_MAX_NAMES)]
    rest = names.most_common()[_MAX_NAMES:]
    if rest:
        lines.append(f"{sum(count for _, count in rest):>7,}  of {len(rest):,} other names")
    lines += ["", "  level  nodes"]
    first = range(min(_MAX_LEVELS, len(levels)))
    last = range(max(len(first), len(levels) - _MAX_LEVELS), len(levels))
    lines += [f"{at:>7,}  {_level(levels[at])}" for at in first]
    if last and last[0] > len(first):
        lines.append("      …")
    lines += [f"{at:>7,}  {_level(levels[at])}" for at in last]
    return lines


def _shown(name: str) -> str:
    return clip(printable(name), _MAX_NAME_COLUMNS)


def _level(names: Counter[str]) -> str:
    parts = [
        clip(printable(name), _MAX_NAME_COLUMNS // 2) + (f" ×{count:,}" if count > 1 else "")
        for name, count in names.most_common(_MAX_NAMES_A_LEVEL)
    ]
    rest = names.total() - sum(count for _, count in names.most_common(_MAX_NAMES_A_LEVEL))
    return ", ".join(parts) + (f" and {rest:,} more" if rest else "")


MAX_COLUMNS = 100
MAX_ROWS = 60  # about one screen; a summary of a larger graph says more than a picture
_MAX_LINES = 2 * MAX_ROWS  # including the bodies of control flow; if there are more lines, bodies are not drawn
_MAX_RAIL_COLUMNS = 40
_MAX_READS_COLUMNS = 60

_Bodies = dict[str, list[tuple[Drawing, list[str]]]]


def to_text(drawing: Drawing) -> str:
    """Draw a graph for a terminal of 100 columns.

    Each node has one line, sources first, with rails for the values between nodes. Siblings that look alike are folded
    (`fetch ×32`), joins name the nodes that they read, and bodies of control flow stand under their node. In a running
    graph, the load of a node stands beside its name. A graph of more than 60 such lines is summarised: the number of
    nodes by name, its depth, its width, and its first and last levels.

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
    """Return the line `a → b → c` for a body that is a plain chain without details; an empty list for other bodies."""
    for index, row in enumerate(found):
        sources = [read.source for read in row.reads]
        if row.node.detail or row.load or row.count > 1 or sources != ([index - 1] if index else []) or _paths(row):
            return []
        if any(read.is_order for read in row.reads):
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
        reads = "" if at_a_glance else _reads(row, found)
        remarks = [load, reads, _waits(row, found), printable(row.node.detail)]
        line = f"{pad(rail, rail_columns)}  {pad(name, name_columns)}   {'   '.join(filter(None, remarks))}"
        lines.append(clip(line.rstrip(), MAX_COLUMNS))
        margin = pad(rail_below, rail_columns) + "    "
        lines.extend(clip((margin + inner).rstrip(), MAX_COLUMNS) for inner in _body_lines(bodies.get(row.node.id, [])))
    return lines


def _loads(found: Sequence[Row]) -> list[str]:
    """Return the load of each row, with each number in a column of its own; empty texts if the graph does not run."""
    words = [row.load for row in found]
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
    reads = [read for read in row.reads if not read.is_order]
    for nth, read in enumerate(reads):
        path = read.labels[0] if len(read.labels) == 1 and read.labels[0].startswith((".", "[")) else ""
        part = clip(printable(found[read.source].name + path), _MAX_NAME_COLUMNS)
        part += f" ×{read.count:,}" if read.count > 1 else ""
        used += width(part) + 2
        if parts and used > _MAX_READS_COLUMNS:
            parts.append(f"… {len(reads) - nth} more")
            break
        parts.append(part)
    return "← " + ", ".join(parts) if parts else ""


def _waits(row: Row, found: Sequence[Row]) -> str:
    names = [printable(found[read.source].name) for read in row.reads if read.is_order]
    return clip(f"after {', '.join(names)}", _MAX_NAME_COLUMNS) if names else ""
