"""Pictures of the numbers of peers and schedulers, for light and dark pages: `python -m benchmarks.picture`.

The SVG is written by hand, since panels of bars need no plotting library. For peers, two ratios are on a logarithmic
scale, where 1 is hand-written asyncio. Two shares are on a linear scale, where 1 is the limit of the hardware. The time
of a call under each scheduler is also on a linear scale, where 1 is the longest path through its graph.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from .workloads.schedulers import SCHEDULING

HERE = Path(__file__).parent
ASSETS = HERE.parent / "docs" / "assets"
LOOP = "asyncio"
OURS = ("Penstock", "parallel", "actors")  # with the default schedulers of calls and of pipelines
BY_HAND = "by hand"

WIDTH = 960
PANEL_WIDTH = 480
LABEL_WIDTH = 160
BAR_WIDTH = 230
ROW = 21
HEAD = 58
GAP = 18
FONT = "system-ui, sans-serif"


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of one version of the picture."""

    text: str
    faint: str
    ours: str
    peer: str
    by_hand: str


THEMES = {
    "light": Theme(text="#1f2933", faint="#7b8794", ours="#0b7285", peer="#c3ccd5", by_hand="#868e96"),
    "dark": Theme(text="#e4e7eb", faint="#9aa5b1", ours="#3bc9db", peer="#52606d", by_hand="#adb5bd"),
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One workload: its title, the meaning of its numbers, and the scale of its bars."""

    workload: str
    title: str
    meaning: str
    logarithmic: bool = False
    longest: float = 1.05  # the number of the longest bar on a linear scale


PANELS = (
    Panel(
        workload="chain",
        title="Ten stages that do nothing",
        meaning="time over asyncio.Queue stages, log scale; shorter is better",
        logarithmic=True,
    ),
    Panel(
        workload="call",
        title="One call: fan-out of 32 and join",
        meaning="time over asyncio.gather, log scale; shorter is better",
        logarithmic=True,
    ),
    Panel(
        workload="io",
        title="2,000 waits of 5 ms, 64 in flight",
        meaning="share of the ideal; longer is better",
    ),
    Panel(
        workload="threads",
        title="1 ms without the GIL on two threads",
        meaning="share of two bare threads; longer is better",
    ),
)


Bars = list[tuple[str, float]]


def of_peers(rows: Sequence[dict[str, Any]]) -> list[tuple[Panel, Bars]]:
    """Return a panel for each workload that peers have run."""
    return [(panel, bars(rows, panel)) for panel in PANELS]


def of_schedulers(rows: Sequence[dict[str, Any]]) -> list[tuple[Panel, Bars]]:
    """Return a panel for each shape of a graph."""
    shapes: dict[str, Bars] = {}
    for row in rows:
        if row["workload"] == SCHEDULING.name and row["loop"] == LOOP and not row["row"]["unit"]:
            shape, scheduler = row["row"]["subject"].rsplit(", ", 1)
            shapes.setdefault(shape, []).append((scheduler, row["value"]["median"]))
    meaning = "time of a call over that of its longest path; shorter is better"
    longest = max(value for found in shapes.values() for _, value in found)  # so that all panels have one scale
    return [
        (Panel(workload=SCHEDULING.name, title=shape, meaning=meaning, longest=longest), found)
        for shape, found in shapes.items()
    ]


def bars(rows: Sequence[dict[str, Any]], panel: Panel) -> Bars:
    """Return names and medians of a panel, best first; the number by hand is the median of all runs by hand."""
    found = [row for row in rows if row["workload"] == panel.workload and row["loop"] == LOOP]
    values = {row["row"]["title"]: row["value"]["median"] for row in found if row["row"]["title"] != BY_HAND}
    by_hand = sorted(row["value"]["median"] for row in found if row["row"]["title"] == BY_HAND)
    values[BY_HAND] = by_hand[len(by_hand) // 2] if by_hand else 1.0
    return sorted(values.items(), key=lambda bar: bar[1], reverse=not panel.logarithmic)


def scale(panel: Panel, entries: Bars) -> Callable[[float], float]:
    """Return the function from a number to the length of its bar."""
    if not panel.logarithmic:
        return lambda value: min(value, panel.longest) / panel.longest * BAR_WIDTH
    values = [value for _, value in entries]
    low = math.floor(math.log10(min(values)))
    high = max(math.log10(max(values)), low + 1)
    return lambda value: (math.log10(value) - low) / (high - low) * BAR_WIDTH


def drawn(panel: Panel, entries: Bars, left: float, top: float, theme: Theme) -> list[str]:
    """Return the elements of one panel."""
    length = scale(panel, entries)
    start = left + LABEL_WIDTH
    lines = [
        text(left + 8, top + 20, panel.title, theme.text, size=15, weight=600),
        text(left + 8, top + 39, panel.meaning, theme.faint, size=12),
    ]
    bottom = top + HEAD + len(entries) * ROW
    one = start + length(1.0)
    lines.append(
        f'<line x1="{one:.1f}" y1="{top + HEAD - 6:.1f}" x2="{one:.1f}" y2="{bottom:.1f}" '
        f'stroke="{theme.faint}" stroke-dasharray="3 3"/>'
    )
    for index, (name, value) in enumerate(entries):
        y = top + HEAD + index * ROW
        ours = name.startswith(OURS)
        colour = theme.ours if ours else theme.by_hand if name == BY_HAND else theme.peer
        bar = max(length(value), 1.5)
        weight = 600 if ours else 400
        lines += [
            text(start - 8, y + 11.5, name, theme.text, size=12, weight=weight, anchor="end"),
            f'<rect x="{start:.1f}" y="{y:.1f}" width="{bar:.1f}" height="{ROW - 6}" rx="2" fill="{colour}"/>',
            text(start + bar + 6, y + 11.5, shown(value), theme.text, size=12, weight=weight),
        ]
    return lines


def shown(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def text(x: float, y: float, content: str, colour: str, *, size: int, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(content)}</text>'
    )


def picture(panels: Sequence[tuple[Panel, Bars]], title: str, theme: Theme) -> str:
    """Return the whole SVG, in rows of two panels."""
    elements: list[str] = []
    top = 0.0
    for first in range(0, len(panels), 2):
        pair = panels[first : first + 2]
        for column, (panel, entries) in enumerate(pair):
            elements += drawn(panel, entries, column * PANEL_WIDTH, top, theme)
        top += HEAD + max(len(entries) for _, entries in pair) * ROW + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" role="img" font-family="{FONT}">',
            f"<title>{escape(title)}</title>",
            *elements,
            "</svg>",
            "",
        ]
    )


PICTURES = (
    ("benchmarks", "peers", of_peers, "Penstock and its peers beside hand-written asyncio, measured in one run each"),
    ("schedulers", "baseline", of_schedulers, "One call of six graphs under each scheduler"),
)


def pictures() -> dict[Path, str]:
    """Return the pictures of the documentation, drawn from the committed results."""
    found: dict[Path, str] = {}
    for name, results, panels_of, title in PICTURES:
        rows = json.loads((HERE / "results" / f"{results}.json").read_text(encoding="utf-8"))["rows"]
        for kind, theme in THEMES.items():
            found[ASSETS / f"{name}-{kind}.svg"] = picture(panels_of(rows), title, theme)
    return found


def main() -> None:
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
