"""Tables of facts and columns, as text, with rich and as HTML; how quantities are written; records shown as tables."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from .text import MAX_NAME_COLUMNS, pad, printable, shorten, width

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


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
    """Return a number of things, with commas: 1,234."""
    return UNKNOWN if value is None else f"{value:,}"


def of(value: int, limit: int | None) -> str:
    """Return a number of things, with its limit: 3/16."""
    return f"{value:,}/{count(limit)}"


def seconds(value: float | None) -> str:
    """Return a time in seconds, never in a larger unit, so that people can compare the times of a column."""
    return UNKNOWN if value is None else f"{significant(value)} s"


def milliseconds(value_seconds: float | None) -> str:
    """Return a time, given in seconds, in milliseconds."""
    return UNKNOWN if value_seconds is None else f"{significant(value_seconds * 1000)} ms"


def rate(per_second: float | None, noun: str = "") -> str:
    """Return a rate: 12.3/s, 12.3 calls/s."""
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


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile; of a single value, that value three times."""
    from statistics import median, quantiles  # which loads decimals and fractions

    middle = median(values)
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [middle] * 3
    return low, middle, high


class Column(NamedTuple):
    """A column.

    Args:
        title: its heading.
        is_number: whether its cells are numbers, which are aligned to the right.
    """

    title: str
    is_number: bool = True


class Table(NamedTuple):
    """A table to show; all cells are texts.

    Args:
        facts: a label and a value for each line above the table.
        columns: the columns, the most important first: if there is no room, the last columns are left out.
        rows: the rows, with a cell for each column.
        remark: a text below the table; may be empty.
        headings: the heading of each row, such as its graph; empty if rows have no headings.
    """

    facts: tuple[tuple[str, str], ...]
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    remark: str = ""
    headings: tuple[str, ...] = ()


class Rendered(ABC):
    """Base class of records that `str()`, rich and notebooks show as a table; the `repr` is that of a dataclass.

    A record that is shown as a sentence overrides `__str__`.
    """

    @abstractmethod
    def _table(self) -> Table:
        """Return the table to show."""

    def __str__(self) -> str:
        return to_text(self._table())

    def __rich__(self) -> "RenderableType":
        return to_rich(self._table())

    def _repr_html_(self) -> str:
        return to_html(self._table())


def by_graph(graphs: Sequence[str]) -> list[int]:
    """Return an order of rows in which the rows of a graph are together, followed by those of its bodies.

    Args:
        graphs: the graph of each row; for a body, "graph/body".
    """
    first = {graph: number for number, graph in reversed([*enumerate(graphs)])}
    roots = {root: number for number, root in reversed([*enumerate(graph.partition("/")[0] for graph in graphs)])}
    return sorted(
        range(len(graphs)),
        key=lambda row: (roots[graphs[row].partition("/")[0]], "/" in graphs[row], first[graphs[row]]),
    )


# The columns to which long names are shortened, before columns of numbers are left out.
_LEAST_NAME_COLUMNS: Final = 20
_LEAST_COLUMNS: Final = 40
# The width of lines without a terminal: a log or a file has room for all columns of numbers, but sentences are wrapped.
_SENTENCE_COLUMNS: Final = 80
_GAP, _INDENT = "  ", "  "


def _fitted(table: Table, room: int | None) -> Table:
    """Return a table without columns whose cells are all equal, and without columns for which there is no room.

    The first column, and the first column of numbers, always stay.
    """
    if not table.rows:
        return table
    cells = [*zip(*[[printable(cell) for cell in row] for row in table.rows], strict=True)]
    stays = {0, next((at for at, column in enumerate(table.columns) if column.is_number), 0)}
    same = [at for at in range(len(cells)) if at not in stays and len(table.rows) > 1 and len({*cells[at]}) == 1]
    kept, left_out = [at for at in range(len(cells)) if at not in same], list[int]()

    def columns_with(limit: int) -> int:
        """Return the width of the columns that are kept, with names of at most so many columns."""
        sizes = [(table.columns[at].is_number, _columns_of(table.columns[at], cells[at])) for at in kept]
        indent = len(_INDENT) if table.headings else 0
        return indent + _wide([size if is_number else min(size, limit) for is_number, size in sizes])

    limit = MAX_NAME_COLUMNS if room is None or columns_with(MAX_NAME_COLUMNS) <= room else _LEAST_NAME_COLUMNS
    while room is not None and columns_with(limit) > room and (others := [at for at in kept if at not in stays]):
        kept.remove(others[-1])
        left_out.insert(0, others[-1])
    rows = [
        tuple(cells[at][row] if table.columns[at].is_number else shorten(cells[at][row], limit) for at in kept)
        for row in range(len(table.rows))
    ]
    alike = [f"{table.columns[at].title} {cells[at][0]}" for at in same if cells[at][0]]
    without = [table.columns[at].title for at in left_out]
    remarks = [
        table.remark,
        f"the same in all rows: {', '.join(alike)}" if alike else "",
        f"no room for: {', '.join(without)}" if without else "",
    ]
    columns = tuple(table.columns[at] for at in kept)
    return table._replace(columns=columns, rows=tuple(rows), remark="; ".join(filter(None, remarks)))


def _columns_of(column: Column, cells: Sequence[str]) -> int:
    """Return the width of a column: the width of its widest cell, or of the longest word of its heading."""
    words = column.title.split() if column.is_number else [column.title]
    return max(map(width, (*words, *cells)), default=0)


def _wide(sizes: Sequence[int]) -> int:
    return sum(sizes) + len(_GAP) * (len(sizes) - 1)


def lines(table: Table, room: int | None) -> Iterator[tuple[str, int]]:
    """Yield the lines of a table, each with the number of its first characters that are bold.

    Args:
        table: the table.
        room: the width of the terminal, in columns; if it is very narrow, lines are longer. None if there is no
            terminal: then all columns are shown, and sentences are wrapped.
    """
    table = _fitted(table, None if room is None else max(room, _LEAST_COLUMNS))
    room = _SENTENCE_COLUMNS if room is None else max(room, _LEAST_COLUMNS)
    labels = max((width(label) for label, _ in table.facts), default=0)
    for label, value in table.facts:
        first, *others = _wrapped(value, room - labels - len(_GAP))
        yield f"{pad(label, labels)}{_GAP}{first}".rstrip(), len(label)
        yield from (((" " * labels) + _GAP + line, 0) for line in others)
    if table.rows:
        yield "", 0
        yield from _grid(table, room)
    if table.remark:
        yield "", 0
        yield from ((line, 0) for part in table.remark.splitlines() for line in _wrapped(part, room))


def _wrapped(text: str, room: int) -> list[str]:
    return wrap(printable(text), room, break_long_words=False, break_on_hyphens=False) or [""]


def _grid(table: Table, room: int) -> Iterator[tuple[str, int]]:
    indent = _INDENT if table.headings else ""
    sizes = [_columns_of(column, [row[at] for row in table.rows]) for at, column in enumerate(table.columns)]
    words = [column.title.split() if column.is_number else [column.title] for column in table.columns]
    height = max(map(len, words))
    for number in range(height):
        head = [["", *title][max(0, number - height + len(title) + 1)] for title in words]
        yield (line := indent + _line(table, head, sizes)), len(line)
    yield "─" * (len(indent) + _wide(sizes)), 0
    heading = ""
    for number, row in enumerate(table.rows):
        if table.headings and table.headings[number] != heading:
            heading = table.headings[number]
            yield (line := shorten(printable(heading), room)), len(line)
        yield indent + _line(table, row, sizes), 0


def _line(table: Table, cells: Sequence[str], sizes: Sequence[int]) -> str:
    padded = [
        " " * (size - width(cell)) + cell if column.is_number else pad(cell, size)
        for cell, size, column in zip(cells, sizes, table.columns, strict=True)
    ]
    return _GAP.join(padded).rstrip()


def to_text(table: Table) -> str:
    """Return the table as lines that fit into the terminal; without a terminal, with all columns."""
    from shutil import get_terminal_size  # imported here, as `html` below: a program that shows no table needs neither

    room = get_terminal_size((0, 0)).columns or None
    return "\n".join([line.rstrip() for line, _ in lines(table, room)])


def to_rich(table: Table) -> "RenderableType":
    """Return an object for `rich.print`. Names are plain text: brackets in them are no markup."""
    from rich.text import Text

    class Lines:
        def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
            for line, bold in lines(table, options.max_width):
                text = Text(line, no_wrap=True, overflow="ignore")
                text.stylize("bold", 0, bold)
                yield text

    return Lines()


_LEFT, _RIGHT = 'style="text-align:left"', 'style="text-align:right"'


def to_html(table: Table) -> str:
    """Return one HTML element that needs no script and no style sheet; the table style of the page applies."""
    table = _fitted(table, None)
    found = ['<div class="penstock-statistics">', "<table>"]
    found += [
        f"<tr><th {_LEFT}>{_safe(label)}</th><td {_LEFT}>{_safe(value)}</td></tr>" for label, value in table.facts
    ]
    found.append("</table>")
    if table.rows:
        sides = [_RIGHT if column.is_number else _LEFT for column in table.columns]
        found += ["<table>", f"<thead>{_row('th', [column.title for column in table.columns], sides)}</thead>"]
        heading = None
        for number, row in enumerate(table.rows):
            if table.headings and table.headings[number] != heading:
                heading = table.headings[number]
                found.append(f'<tr><th colspan="{len(sides)}" {_LEFT}>{_safe(heading)}</th></tr>')
            found.append(_row("td", row, sides))
        found.append("</table>")
    if table.remark:
        found.append(f"<p>{_safe(table.remark)}</p>")
    return "\n".join([*found, "</div>"])


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    inside = "".join(f"<{tag} {side}>{_safe(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{inside}</tr>"


def _safe(text: str) -> str:
    from html import escape

    return escape(printable(text))


_Figure: TypeAlias = tuple[str, str, float, str]  # `counters.Figure`


def figure_columns(of_rows: Iterable[Sequence[_Figure]]) -> list[str]:
    """Return the headings of the figures that some rows have: the name, and the unit unless it is like "{call}"."""
    return list(dict.fromkeys(_heading(one) for figures in of_rows for one in figures))


def figure_cells(figures: Sequence[_Figure], columns: Sequence[str]) -> list[str]:
    """Return the cells of a row below the headings of figures; figures of several places are added up."""
    found: dict[str, float] = {}
    for one in figures:
        found[_heading(one)] = found.get(_heading(one), 0) + one[2]
    cells = {heading: significant(value) if value % 1 else count(int(value)) for heading, value in found.items()}
    return [cells.get(column, "") for column in columns]


def table_with_figures(
    facts: tuple[tuple[str, str], ...],
    columns: Sequence[Column],
    nodes: Iterable[tuple[str, tuple[str, ...], Sequence[_Figure]]],
    remark: str = "",
) -> "Table":
    """Return a table with a row for each node, and below it a row for each place that has figures of the node.

    Args:
        facts: a label and a value for each line above the table.
        columns: the columns that all nodes have; columns for the figures follow.
        nodes: for each node, its graph, its cells, and its figures.
        remark: a text below the table.
    """
    nodes = list(nodes)
    headings, rows = list[str](), list[tuple[str, ...]]()
    names = figure_columns(figures for _, _, figures in nodes)
    for graph, cells, figures in nodes:
        found = [(*cells, *figure_cells(figures, names))]
        for place in dict.fromkeys(one[3] for one in figures if one[3]):
            there = figure_cells([one for one in figures if one[3] == place], names)
            found.append((f"  on {place}", *[""] * (len(cells) - 1), *there))
        headings += [graph] * len(found)
        rows += found
    return Table(facts, (*columns, *map(Column, names)), tuple(rows), remark, tuple(headings))


def _heading(figure: _Figure) -> str:
    name, unit = figure[:2]
    return name if unit.startswith("{") else f"{name} ({unit})"
