"""A graph too large to draw, in numbers."""

from collections import Counter
from collections.abc import Sequence

from ...telemetry.tables.characters import clip, printable
from .layout import Row
from .model import Drawing

_MAX_NAMES = 12
_MAX_NAME_COLUMNS = 44
_MAX_LEVELS = 3  # at each end
_MAX_NAMES_A_LEVEL = 4


def summary(drawing: Drawing, found: Sequence[Row]) -> list[str]:
    """Return lines that say how many nodes a graph has of each name, how deep and wide it is, how it begins and ends.

    The counts add up to the number of nodes; what is left out is counted.
    """
    names: Counter[str] = Counter()
    levels: list[Counter[str]] = []
    edges = 0
    for row in found:
        names[row.node.label] += row.count
        edges += len(row.node.inputs) * row.count
        if row.level == len(levels):
            levels.append(Counter())
        levels[row.level][row.node.label] += row.count
    widest = max(level.total() for level in levels)
    lines = [
        f"too large to draw: {names.total():,} nodes, {edges:,} edges, {len(levels):,} levels, up to {widest:,} wide"
    ]
    if drawing.bodies:
        lines.append(f"not counted: what is inside its control flow ({len(drawing.bodies):,})")
    lines += ["", "  nodes  name"]
    lines += [f"{count:>7,}  {_shown(name)}" for name, count in names.most_common(_MAX_NAMES)]
    rest = names.most_common()[_MAX_NAMES:]
    if rest:
        lines.append(f"{sum(count for _, count in rest):>7,}  of {len(rest):,} other names")
    lines += ["", "  level  nodes"]
    first = range(min(_MAX_LEVELS, len(levels)))
    last = range(max(len(first), len(levels) - _MAX_LEVELS), len(levels))
    lines += [f"{at:>7,}  {_level(levels[at])}" for at in first]
    if last and last[0] > len(first):
        lines.append("      …")
    lines += [f"{at:>7,}  {_level(levels[at])}" for at in last]
    return lines


def _shown(name: str) -> str:
    return clip(printable(name), _MAX_NAME_COLUMNS)


def _level(names: Counter[str]) -> str:
    parts = [
        clip(printable(name), _MAX_NAME_COLUMNS // 2) + (f" ×{count:,}" if count > 1 else "")
        for name, count in names.most_common(_MAX_NAMES_A_LEVEL)
    ]
    rest = names.total() - sum(count for _, count in names.most_common(_MAX_NAMES_A_LEVEL))
    return ", ".join(parts) + (f" and {rest:,} more" if rest else "")
