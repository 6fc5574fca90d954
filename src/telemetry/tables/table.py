"""Tables: a few facts, columns, cells, quantities as people read them; as text and as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .characters import clip, pad, printable, width

UNKNOWN = "-"


def significant(value: float) -> str:
    """Return a number with about three digits: 1,234 and 12.3 and 0.123."""
    if value and abs(value) < 0.0005:
        return "<0.001"
    for least, decimals in ((99.95, 0), (9.995, 1), (0.9995, 2)):
        if abs(value) >= least:
            return f"{value:,.{decimals}f}"
    return f"{value:.3f}" if value else "0"


def count(value: int | None) -> str:
    """Return a number of things."""
    return UNKNOWN if value is None else f"{value:,}"


def of(value: int, limit: int | None) -> str:
    """Return how much of a limit is used: 3/16."""
    return f"{value:,}/{count(limit)}"


def seconds(value: float | None) -> str:
    """Return a time in seconds, whatever its size, so that those of a column can be compared."""
    return UNKNOWN if value is None else f"{significant(value)} s"


def milliseconds(value_seconds: float | None) -> str:
    """Return a time, given in seconds, in milliseconds."""
    return UNKNOWN if value_seconds is None else f"{significant(value_seconds * 1000)} ms"


def rate(per_second: float | None, noun: str = "") -> str:
    """Return how many of something there are in a second: 12.3/s, 12.3 calls/s."""
    return UNKNOWN if per_second is None else f"{significant(per_second)}{noun and ' ' + noun}/s"


def duration(value_seconds: float | None) -> str:
    """Return a time of any size in its two largest units: 12.3 s, 4 min 10 s, 3 d 4 h."""
    if value_seconds is None or value_seconds < 60:
        return seconds(value_seconds)
    minutes, whole_seconds = divmod(int(value_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole_seconds} s"


def scaled(value: float | None, unit: str) -> str:
    """Return a large quantity with a decimal prefix: 12.3 GB, 1.23 TFLOP/s."""
    if value is None:
        return UNKNOWN
    for least, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * least:
            return f"{significant(value / least)} {prefix}{unit}"
    return f"{significant(value)} {unit}"


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


_LEFT, _RIGHT = 'style="text-align:left"', 'style="text-align:right"'


def to_html(table: Table) -> str:
    """Return one element that needs no script or style from elsewhere; the page's own style of tables applies."""
    lines = ['<div class="penstock-statistics">', "<table>"]
    lines += [
        f"<tr><th {_LEFT}>{_safe(label)}</th><td {_LEFT}>{_safe(value)}</td></tr>" for label, value in table.facts
    ]
    lines.append("</table>")
    if table.rows:
        sides = [_RIGHT if column.is_number else _LEFT for column in table.columns]
        lines += [
            "<table>",
            f"<thead>{_row('th', [column.title for column in table.columns], sides)}</thead>",
            "<tbody>",
        ]
        lines += [_row("td", row, sides) for row in table.rows]
        lines += ["</tbody>", "</table>"]
    if table.remark:
        lines.append(f"<p>{_safe(table.remark)}</p>")
    return "\n".join([*lines, "</div>"])


def _row(tag: str, cells: "list[str] | tuple[str, ...]", sides: list[str]) -> str:
    inside = "".join(f"<{tag} {side}>{_safe(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{inside}</tr>"


def _safe(text: str) -> str:
    return escape(printable(text))
