"""The committed results as tables in the documentation: `python -m benchmarks.tables`."""

import json
import re
from pathlib import Path
from typing import Any

from .report import limits, number, spread
from .servers.__main__ import NAMES, NUMBERS, PENSTOCK, PROMISED, REQUESTS, ROWS
from .summary import Interval, Limits
from .workloads.schedulers import COST, SCHEDULERS, SCHEDULING, SHAPES

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
LOOPS = ("asyncio", "uvloop")
BY_HAND = "by hand"

Rows = list[dict[str, Any]]


def value(row: dict[str, Any] | None, *, spread_too: bool = True) -> str:
    """Return the median, the unit and the interval of one row."""
    if row is None:
        return ""
    measured = Interval(**row["value"])
    unit = row["row"]["unit"]
    shown = f"{number(measured.median)}{' ' if unit and unit != '/s' else ''}{unit}"
    return shown if measured.low == measured.high or not spread_too else f"{shown} ({spread(measured)})"


def machine(content: dict[str, Any]) -> str:
    """Return one line about the machine on which the numbers were measured."""
    about = content["machine"]
    kind = "a quick run" if content["quick"] else "a full run"
    return f"{kind} on {about['cores']} cores, {about['implementation']} {about['python']}, {about['system']}"


def own_table(content: dict[str, Any]) -> str:
    """Return a table of all rows, with both loops beside each other."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["workload"] != SCHEDULING.name:  # schedulers have a separate table
            found.setdefault((row["workload"], row["row"]["title"]), {})[row["loop"]] = row
    lines = [f"From {machine(content)}:", "", "| workload | what | asyncio | uvloop | must | aim |"]
    lines.append("|---|---|---|---|---|---|")
    for (workload, title), loops in found.items():
        held = next(iter(loops.values()))["row"]["limits"]
        cells = [workload, title, *(value(loops.get(loop)) for loop in LOOPS)]
        cells += limits(Limits(**held) if held else None)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def schedulers_table(content: dict[str, Any]) -> str:
    """Return a table of all shapes with four schedulers, on asyncio: time over the longest path, and cost of a node."""
    found = {
        row["row"]["subject"]: value(row, spread_too=False)
        for row in content["rows"]
        if row["workload"] == SCHEDULING.name and row["loop"] == LOOPS[0]
    }
    lines = [f"From {machine(content)}:", "", f"| | {' | '.join(SCHEDULERS)} |", "|---" * (1 + len(SCHEDULERS)) + "|"]
    for shape in SHAPES:
        contests = [f"{shape}, {scheduler}" for scheduler in SCHEDULERS]
        cells = [f"{found[contest]}, {found[f'{contest}, {COST}']}" for contest in contests if contest in found]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def peers_table(content: dict[str, Any]) -> str:
    """Return a table of all contenders with four workloads, on asyncio."""
    columns = ("chain", "call", "io", "threads")
    rows: Rows = [row for row in content["rows"] if row["loop"] == LOOPS[0] and row["row"]["title"] != BY_HAND]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["row"]["title"], {})[row["workload"]] = row
    lines = [
        f"From {machine(content)}, asyncio, with {versions(content)}:",
        "",
        f"| | {' | '.join(columns)} |",
        "|---" * 5 + "|",
    ]
    lines += [f"| {name} | {' | '.join(value(by.get(column)) for column in columns)} |" for name, by in found.items()]
    return "\n".join([*lines, *skipped(content)])


def encoders_table(content: dict[str, Any]) -> str:
    """Return a table of all encoders, each with its own number and Penstock's ratio to it."""
    control = Interval(**content["rows"][0]["control"])
    lines = [
        f"From {machine(content)}, with {versions(content)}; the control's interval was {spread(control)}:",
        "",
        "| texts | | alone | Penstock over it | must | aim |",
        "|---|---|---|---|---|---|",
    ]
    over = [row for row in content["rows"] if row["row"]["reference"] is not None]
    ratios = {(row["workload"], row["row"]["reference"]): row for row in over}
    for row in content["rows"]:
        if row["row"]["reference"] is None:
            ratio = ratios.get((row["workload"], row["row"]["subject"]))
            held = ratio and ratio["row"]["limits"]
            must, aim = limits(Limits(**held)) if held else ("", "")
            lines.append(
                f"| {row['workload']} | {row['row']['subject']} | {value(row)} | {value(ratio)} | {must} | {aim} |"
            )
    return "\n".join([*lines, *skipped(content)])


def feeds_table(content: dict[str, Any]) -> str:
    """Return a table of all loaders, each with its own number in each feed and Penstock's ratio to it."""
    lines = [f"From {machine(content)}, with {versions(content)}:", "", "| | alone | Penstock over it | must |"]
    lines.append("|---|---|---|---|")
    for feed in dict.fromkeys(row["workload"] for row in content["rows"]):
        rows: Rows = [row for row in content["rows"] if row["workload"] == feed]
        ratios = {row["row"]["reference"]: row for row in rows if row["row"]["reference"] is not None}
        lines.append(f"| **{feed}**, control {spread(Interval(**rows[0]['control']))} | | | |")
        for row in rows:
            if row["row"]["reference"] is None:
                ratio = ratios.get(row["row"]["subject"])
                held = ratio and ratio["row"]["limits"]
                must = limits(Limits(**held))[0] if held else ""
                lines.append(f"| {row['row']['title']} | {value(row)} | {value(ratio)} | {must} |")
    return "\n".join([*lines, *skipped(content)])


_SERVER_COLUMNS = (
    "one request is", "process", "requests, p99, processor time", "by hand", "requests", "p99", "processor time",
)  # fmt: skip


def servers_table(content: dict[str, Any]) -> str:
    """Return a table of all rows, untuned and tuned, and of the peers on one row."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        side = row["row"]["reference"] and row["row"]["subject"]
        if side is not None:
            found.setdefault((row["workload"], side), {})
    for row in content["rows"]:
        for (workload, _), numbers in found.items():
            if workload == row["workload"]:
                numbers[row["row"]["title"]] = row
    lines = [
        f"From {machine(content)}:",
        "",
        f"| {' | '.join((*_SERVER_COLUMNS, f'requests over {NAMES[PROMISED]}'))} |",
        "|---" * 8 + "|",
    ]
    for (workload, side), numbers in found.items():
        row, tuning = workload.split(", ")
        name = "penstock" if side == PENSTOCK else side
        what = ROWS[row][0] if side == PENSTOCK else f"the same, {NAMES.get(side, f'by {side}')}"
        mine, other = (
            ", ".join(value(numbers[f"{number.name} {by}"], spread_too=False) for number in NUMBERS)
            for by in (f"with {name}", "by hand")
        )
        ratios = [value(numbers[f"{number.name} with {name} over by hand"]) for number in NUMBERS]
        ratios.append(value(numbers.get(f"{REQUESTS.name} with {name} over {NAMES[PROMISED]}")))
        lines.append(f"| {what} | {tuning} | {mine} | {other} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def versions(content: dict[str, Any]) -> str:
    """Return the measured packages with their versions."""
    return ", ".join(f"{peer['peer']} {peer['version']}" for peer in content["peers"] if not peer["skipped"])


def skipped(content: dict[str, Any]) -> list[str]:
    """Return the packages that were not measured, each with the reason."""
    return [f"\nSkipped: {peer['peer']}, {peer['skipped']}" for peer in content["peers"] if peer["skipped"]]


def fill(page: str, name: str, table: str) -> str:
    """Replace the text between a pair of markers."""
    pattern = rf"(<!-- {name}:begin[^\n]*-->\n).*?(<!-- {name}:end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page, flags=re.DOTALL)


FILLED = (
    ("benchmarks", "baseline.json", own_table, "benchmarks.md"),
    ("schedulers", "baseline.json", schedulers_table, "how-to/performance.md"),
    ("devices", "devices.json", own_table, "benchmarks.md"),
    ("encoders", "encoders.json", encoders_table, "benchmarks.md"),
    ("peers", "peers.json", peers_table, "benchmarks.md"),
    ("feeds", "feeds.json", feeds_table, "benchmarks.md"),
    ("servers", "servers.json", servers_table, "how-to/servers.md"),
)


def pages() -> dict[Path, str]:
    """Return the pages with tables, filled from the committed results."""
    found: dict[Path, str] = {}
    for name, file, table, page in FILLED:
        path, results = DOCS / page, HERE / "results" / file
        text = found.get(path) or path.read_text(encoding="utf-8")
        if results.exists():
            text = fill(text, name, table(json.loads(results.read_text(encoding="utf-8"))))
        found[path] = text
    return found


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for _, file, *_ in FILLED:
        if not (HERE / "results" / file).exists():
            print(f"{file} does not exist: its table stays unchanged")


if __name__ == "__main__":
    main()
