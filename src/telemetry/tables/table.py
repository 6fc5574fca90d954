"""A table with a few facts above it: what all renderings have in common."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Args:
        title: its heading.
        is_number: whether its cells are numbers, which stand to the right.
    """

    title: str
    is_number: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """What is shown; every cell is the text that a reader sees.

    Args:
        facts: a label and a value for each line above the table.
        columns: the columns.
        rows: a cell for each column.
        remark: what is said below the table; empty if nothing.
    """

    facts: tuple[tuple[str, str], ...]
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    remark: str = ""
