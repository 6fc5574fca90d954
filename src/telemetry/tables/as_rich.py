"""A table for rich, which is only imported here: whoever asks for it has it."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from .characters import printable
from .table import Table


def to_rich(table: Table) -> RenderableType:
    """Return what `rich.print` shows. Names are text, whatever they look like, and no markup."""
    facts = RichTable.grid(padding=(0, 2, 0, 0))
    for label, value in table.facts:
        facts.add_row(Text(label, "bold"), _text(value))
    parts: list[RenderableType] = [facts]
    if table.rows:
        parts.append(_grid(table))
    if table.remark:
        parts.append(Text(table.remark, "dim"))
    return Group(*parts)


def _grid(table: Table) -> RichTable:
    grid = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in table.columns:
        if column.is_number:
            # A word a line, so that the table fits into 80 columns.
            grid.add_column("\n".join(column.title.split()), justify="right", no_wrap=True)
        else:
            grid.add_column(column.title, overflow="fold")
    for row in table.rows:
        grid.add_row(*map(_text, row))
    return grid


def _text(cell: str) -> Text:
    return Text(printable(cell))
