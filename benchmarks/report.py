"""The measured numbers, as a table on the terminal and as JSON."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .harness import Measured
from .summary import Interval, Limits

COLUMNS = ("workload", "what", "loop", "measured", "95 % interval", "control", "must", "aim", "met")


def cells(measured: Measured) -> tuple[str, ...]:
    """Return one line of the table, in the order of `COLUMNS`."""
    row = measured.row
    return (
        measured.workload,
        row.title,
        measured.loop,
        f"{number(measured.value.median)}{' ' if row.unit else ''}{row.unit}",
        spread(measured.value),
        spread(measured.control),
        *limits(row.limits),
        measured.verdict,
    )


def number(value: float) -> str:
    """Return a number with three significant digits, never in exponent notation."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(value: Interval | None) -> str:
    return "" if value is None else f"{number(value.low)} – {number(value.high)}"


def of_ratio(value: Interval) -> tuple[str, str]:
    """Return the cells of a ratio: its median, and its interval."""
    return f"{value.median:.3f}", f"{value.low:.3f} – {value.high:.3f}"


def limits(held: Limits | None) -> tuple[str, str]:
    """Return the limit that must be kept, and the aim, as the table shows them."""
    if held is None:
        return "", ""
    sign = "≥" if held.at_least else "≤"
    must, aim = ("" if limit is None else f"{sign} {limit:g}" for limit in (held.must, held.aim))
    return must, aim


def print_table(title: str, columns: Sequence[str], lines: Iterable[tuple[str, ...]]) -> None:
    """Print a table with rich if it is installed, otherwise in plain columns."""
    lines = list(lines)
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        _print_plain(title, [tuple(columns), *lines])
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in {"workload", "what", "loop", "met"} else "right")
    for line in lines:
        table.add_row(*line, style="bold red" if line[-1] == "missed" else None)
    # Without a terminal rich would fold everything into 80 columns.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _print_plain(title: str, lines: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    print(title)
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def machine() -> dict[str, Any]:
    """Describe this machine; ratios can be compared between machines, times cannot."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def write_json(path: Path, rows: Sequence[Measured], *, quick: bool, extra: dict[str, Any] | None = None) -> None:
    """Write all measured rows; `picture.py` and the docs read the file."""
    content = {"machine": machine(), "quick": quick, "rows": [asdict(row) for row in rows], **(extra or {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
