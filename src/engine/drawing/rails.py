"""Rails beside the lines of a graph, one per value that is still to be read, as `git log --graph` draws commits."""

from collections.abc import Sequence

from .layout import Row

_GLYPHS = {"input": "○", "resource": "□", "node": "●", "control": "◆", "output": "◎"}


def rails(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return, for every row, the rails on its line, and the rails that run on below it.

    A rail starts under the node that makes a value and ends at its last reader. On a node's line, `├`, `┤` and `┼`
    mark a value that it reads and others will read, `╰`, `╯` and `┴` one that it reads last, and a `│` in the
    middle of its line is a value that only passes by.
    """
    columns: list[int | None] = []
    unread = [len(row.readers) for row in rows]
    lines: list[str] = []
    below: list[str] = []
    dead_end: int | None = None  # a column whose node on the line above has no reader: nothing may seem to follow it
    for index, row in enumerate(rows):
        held = {source: at for at, source in enumerate(columns) if source is not None}
        read = sorted(held[each.source] for each in row.reads)
        for each in row.reads:
            unread[each.source] -= 1
        ended = [at for at in read if unread[_occupant(columns, at)] == 0]
        place = ended[0] if ended else _free_column(columns, read[0] if read else -1, dead_end)
        columns.extend([None] * (place + 1 - len(columns)))
        lines.append(_line(columns, read, set(ended), place, _GLYPHS[row.node.kind]))
        for at in ended:
            columns[at] = None
        columns[place] = index if row.readers else None
        dead_end = None if row.readers else place
        while columns and columns[-1] is None:
            columns.pop()
        below.append(" ".join(" " if source is None else "│" for source in columns))
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


def _line(columns: list[int | None], read: list[int], ended: set[int], place: int, glyph: str) -> str:
    left, right = min([*read, place]), max([*read, place])
    reading = set(read)
    cells: list[str] = []
    for at, source in enumerate(columns):
        if at == place:
            cell = glyph
        elif at in reading:
            at_edge = 0 if at == left else 2 if at == right else 1
            cell = ("╰┴╯" if at in ended else "├┼┤")[at_edge]
        elif source is not None:
            cell = "│"
        else:
            cell = "─" if left < at < right else " "
        cells.append(cell)
        cells.append("─" if left <= at < right else " ")
    return "".join(cells).rstrip()
