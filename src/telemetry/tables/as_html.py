"""A table for notebooks."""

from html import escape

from .characters import printable
from .table import Table

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
