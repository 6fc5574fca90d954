"""A table as plain text."""

from collections.abc import Sequence

from .characters import clip, pad, printable, width
from .table import Table

# Ten columns of numbers beside two names of this length fit into 140 columns; names are rarely so long.
MAX_CELL_COLUMNS = 32
_GAP = "  "


def to_text(table: Table) -> str:
    """Return lines without trailing white space, joined by newlines."""
    labels = max((width(label) for label, _ in table.facts), default=0)
    blocks = ["\n".join(f"{pad(label, labels)}{_GAP}{printable(value)}" for label, value in table.facts)]
    if table.rows:
        blocks.append("\n".join(_lines(table)))
    if table.remark:
        blocks.append(table.remark)
    return "\n\n".join(blocks)


def _lines(table: Table) -> list[str]:
    cells = [[column.title for column in table.columns]]
    cells += [[clip(printable(cell), MAX_CELL_COLUMNS) for cell in row] for row in table.rows]
    columns = [max(map(width, column)) for column in zip(*cells, strict=True)]
    head, *rows = [_line(table, row, columns) for row in cells]
    return [head, "─" * (sum(columns) + len(_GAP) * (len(columns) - 1)), *rows]


def _line(table: Table, cells: Sequence[str], columns: Sequence[int]) -> str:
    padded = [
        " " * (room - width(cell)) + cell if column.is_number else pad(cell, room)
        for cell, room, column in zip(cells, columns, table.columns, strict=True)
    ]
    return _GAP.join(padded).rstrip()
