"""Layered placement of boxes after Sugiyama, Tagawa and Toda (1981): levels, few crossings, straight edges.

The level of a box is the longest path to it from a source. An edge over several levels passes through a bend in each
level, so that it runs between boxes and not behind them. Barycenter sweeps order each level. Coordinates minimise the
squared horizontal length of the edges, level by level. With a fixed order, this is isotonic regression (pool adjacent
violators).
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_GAP = 28.0  # pixels between boxes of a level
_BEND_GAP = 14.0  # pixels around an edge that passes between boxes
_LEVEL_GAP = 44.0  # pixels between levels
_ORDER_SWEEPS = 12
_SETTLE_SWEEPS = 12  # towards the neighbours on one side, which spreads the boxes out
_STRAIGHTEN_SWEEPS = 41  # towards the neighbours on both sides; odd, so that the last sweep runs downwards
_PORT_GAP = 16.0
_PULL = (1.0, 2.0, 8.0)  # the weight of an edge with no, one or two bends at its ends, after Gansner et al. (1993)


@dataclass(frozen=True, slots=True)
class Box:
    """A placed box: its top left corner and size in pixels."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Route:
    """An edge: the boxes at its ends, and the points that it passes; within each pair of points it runs vertically."""

    source: int
    target: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """Boxes in the order in which they were given, routes, and the size of the whole in pixels."""

    boxes: list[Box]
    routes: list[Route]
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Layers:
    """A graph to place: boxes in levels.

    Args:
        levels: the level of each box; every source of a box is on a lower level.
        sources: for each box, the boxes from which an edge leads to it.
    """

    levels: Sequence[int]
    sources: Sequence[Sequence[int]]

    @property
    def segments(self) -> int:
        """The number of pieces that the edges are cut into at the levels: the size of the problem `place` solves."""
        return sum(
            [level - self.levels[source] for level, found in zip(self.levels, self.sources, strict=True)
             for source in found]
        )  # fmt: skip


def place(layers: Layers, sizes: Sequence[tuple[float, float]]) -> PlacedLayers:
    """Place boxes of the given widths and heights (pixels) so that edges run downwards."""
    count = len(layers.levels)
    level = [*layers.levels]
    widths = [width for width, _ in sizes]
    above: list[list[int]] = [[] for _ in sizes]
    below: list[list[int]] = [[] for _ in sizes]
    paths: list[list[int]] = []
    for index, found in enumerate(layers.sources):
        for source in found:
            path = [source]
            for bend_level in range(level[source] + 1, level[index]):
                path.append(len(level))
                level.append(bend_level)
                widths.append(0.0)
                above.append([])
                below.append([])
            path.append(index)
            for upper, lower in pairwise(path):
                below[upper].append(lower)
                above[lower].append(upper)
            paths.append(path)
    levels = _ordered(level, above, below)
    x = _coordinates(levels, above, below, widths, count)

    heights = [max((sizes[at][1] for at in found if at < count), default=0.0) for found in levels]
    tops = [0.0]
    for height in heights:
        tops.append(tops[-1] + height + _LEVEL_GAP)
    left = min((at - width / 2 for at, width in zip(x, widths, strict=True)), default=0.0)
    right = max((at + width / 2 for at, width in zip(x, widths, strict=True)), default=0.0)
    boxes = [
        Box(x[at] - width / 2 - left, tops[level[at]] + (heights[level[at]] - height) / 2, width, height)
        for at, (width, height) in enumerate(sizes)
    ]
    leave = _ports(below, x, widths)
    arrive = _ports(above, x, widths)
    routes: list[Route] = []
    for path in paths:
        source, target = path[0], path[-1]
        points = [(leave[source, path[1]] - left, boxes[source].top + boxes[source].height)]
        points.append((points[0][0], tops[level[source]] + heights[level[source]]))
        for bend in path[1:-1]:
            points.append((x[bend] - left, tops[level[bend]]))
            points.append((x[bend] - left, tops[level[bend]] + heights[level[bend]]))
        points.append((arrive[target, path[-2]] - left, tops[level[target]]))
        points.append((points[-1][0], boxes[target].top))
        routes.append(Route(source, target, tuple(points)))
    return PlacedLayers(boxes, routes, right - left, tops[-1] - _LEVEL_GAP if levels else 0.0)


def _ordered(level: list[int], above: list[list[int]], below: list[list[int]]) -> list[list[int]]:
    levels: list[list[int]] = [[] for _ in range(max(level, default=-1) + 1)]
    for vertex, at in enumerate(level):
        levels[at].append(vertex)
    position = [0] * len(level)
    for found in levels:
        for at, vertex in enumerate(found):
            position[vertex] = at
    best, fewest = [list(found) for found in levels], _crossings(levels, below, position)
    for sweep in range(_ORDER_SWEEPS):
        downwards = sweep % 2 == 0
        neighbours = above if downwards else below
        for found in levels if downwards else reversed(levels):
            centres = {v: _mean([position[n] for n in neighbours[v]], position[v]) for v in found}
            found.sort(key=centres.__getitem__)
            for at, vertex in enumerate(found):
                position[vertex] = at
        crossings = _crossings(levels, below, position)
        if crossings < fewest:
            best, fewest = [list(found) for found in levels], crossings
    return best


def _mean(values: list[int], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(levels: list[list[int]], below: list[list[int]], position: list[int]) -> int:
    total = 0
    for found in levels:
        ends: list[int] = []
        for vertex in found:
            targets = sorted(position[n] for n in below[vertex])
            total += sum(len(ends) - bisect_right(ends, target) for target in targets)
            for target in targets:
                insort(ends, target)
    return total


def _coordinates(
    levels: list[list[int]], above: list[list[int]], below: list[list[int]], widths: list[float], bends_from: int
) -> list[float]:
    x = [0.0] * len(widths)
    for found in levels:
        offset = 0.0
        for left, right in pairwise(found):
            offset += _distance(left, right, widths, bends_from)
            x[right] = offset
        for vertex in found:
            x[vertex] -= offset / 2
    for sweep in range(_SETTLE_SWEEPS + _STRAIGHTEN_SWEEPS):
        both = sweep >= _SETTLE_SWEEPS
        for found in levels if sweep % 2 == 0 else reversed(levels):
            wishes: list[tuple[float, float]] = []
            for vertex in found:
                near = above[vertex] + below[vertex] if both else (above if sweep % 2 == 0 else below)[vertex]
                pull = [_PULL[(vertex >= bends_from) + (n >= bends_from)] for n in near]
                total = sum(pull)
                wish = sum(p * x[n] for p, n in zip(pull, near, strict=True)) / total if near else x[vertex]
                wishes.append((wish, total or 0.05))
            gaps = [_distance(a, b, widths, bends_from) for a, b in pairwise(found)]
            for vertex, at in zip(found, _apart(wishes, gaps), strict=True):
                x[vertex] = at
    return x


def _distance(left: int, right: int, widths: list[float], bends_from: int) -> float:
    gap = _GAP if left < bends_from and right < bends_from else _BEND_GAP
    return widths[left] / 2 + widths[right] / 2 + gap


def _apart(wishes: list[tuple[float, float]], gaps: list[float]) -> list[float]:
    """Return places at least `gaps` apart with the least weighted sum of squared distances to the wishes."""
    offsets = [0.0]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    pools: list[tuple[float, float, int]] = []  # place, weight and number of boxes that touch each other
    for (wish, weight), offset in zip(wishes, offsets, strict=False):
        place_, total, count = wish - offset, weight, 1
        while pools and pools[-1][0] > place_:
            other, other_weight, other_count = pools.pop()
            place_ = (place_ * total + other * other_weight) / (total + other_weight)
            total, count = total + other_weight, count + other_count
        pools.append((place_, total, count))
    flat = [place_ for place_, _, count in pools for _ in range(count)]
    return [place_ + offset for place_, offset in zip(flat, offsets, strict=False)]


def _ports(neighbours: list[list[int]], x: list[float], widths: list[float]) -> dict[tuple[int, int], float]:
    """Return where along a box each of its edges begins or ends: in the order of the other ends, so that none cross."""
    ports: dict[tuple[int, int], float] = {}
    for vertex, found in enumerate(neighbours):
        room = min(_PORT_GAP, max(widths[vertex] - 2 * _PORT_GAP, 0.0) / max(len(found) - 1, 1))
        for nth, other in enumerate(sorted(found, key=lambda n: x[n])):
            ports[vertex, other] = x[vertex] + room * (nth - (len(found) - 1) / 2)
    return ports
