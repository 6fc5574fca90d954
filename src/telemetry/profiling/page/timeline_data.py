"""The timeline of a profile as data for the script of a page: the newest of it, in few bytes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from ...tables.characters import printable
from ..timelines.timeline import DepthPoint, DeviceSlice, Slice, Timeline
from ..timelines.tracks import tracks

# What a page shows: 1.5 MB of data at most, which it draws within a frame of the screen.
MAX_SLICES: Final = 20_000
MAX_DEVICE_SLICES: Final = 4_000
MAX_POINTS: Final = 20_000
# Items of a batch that a click on it shows.
_FRAMES: Final = 32


class _Bar(NamedTuple):
    """A slice; times are whole nanoseconds."""

    began: int
    ended: int
    rest: list[Any]


def timeline_data(timeline: Timeline, limits: tuple[str | None, str | None]) -> dict[str, Any]:
    """Return what the script draws.

    Args:
        timeline: what happened.
        limits: graph and node of what limits.
    """
    slices, works, points = timeline.slices, timeline.device_slices, timeline.depths
    newest = sorted(slices, key=lambda one: one.ended_seconds)[-MAX_SLICES:]
    newest_works = sorted(works, key=lambda one: one.ended_seconds)[-MAX_DEVICE_SLICES:]
    newest_points = points[-MAX_POINTS:]
    return {
        "tracks": [*_node_tracks(newest, newest_points, limits), *_device_tracks(newest_works)],
        "dropped": {
            "slices": len(slices) - len(newest) + timeline.dropped,
            "device slices": len(works) - len(newest_works) + timeline.dropped_device_slices,
            "depths": len(points) - len(newest_points) + timeline.dropped_depths,
        },
    }


def _node_tracks(
    slices: Sequence[Slice], points: Sequence[DepthPoint], limits: tuple[str | None, str | None]
) -> list[dict[str, Any]]:
    bars: dict[tuple[str, str], list[_Bar]] = defaultdict(list)
    depths: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for one in slices:
        bars[one.graph, one.node].append(_Bar(*_interval(one), [one.item, one.frame]))
    for point in points:
        depths[point.graph, point.node].append((round(point.at_seconds * 1e9), point.depth))
    begins = {name: min([bar.began for bar in found]) for name, found in bars.items()}
    graphs = {graph: number for number, (graph, _) in enumerate(sorted(begins, key=begins.__getitem__))}
    names = sorted(begins, key=lambda name: (graphs[name[0]], begins[name]))
    return [
        {
            "kind": "node",
            "group": printable(graph),
            "name": printable(node),
            "limits": (graph, node) == limits,
            **_lanes(bars[graph, node]),
            "depths": _deltas(depths[graph, node]),
        }
        for graph, node in names
    ]


def _device_tracks(works: Iterable[DeviceSlice]) -> list[dict[str, Any]]:
    bars: dict[tuple[str, str], list[_Bar]] = defaultdict(list)
    for one in works:
        track = "compiler" if one.kind == "compile" else one.device
        kind = "transfer" if one.kind in ("to device", "from device") else one.kind
        about = [one.kind, printable(one.node), one.items, one.rows, round(one.padding_share * 100)]
        bars[track, kind].append(_Bar(*_interval(one), [*about, list(one.frames[:_FRAMES])]))
    return [
        {
            "kind": kind,
            "group": "devices",
            "name": printable(f"{device} transfers" if kind == "transfer" else device),
            "limits": False,
            **_lanes(bars[device, kind]),
            "depths": [],
        }
        for device, kind in sorted(bars)
    ]


def _interval(one: Slice | DeviceSlice) -> tuple[int, int]:
    began, ended = round(one.began_seconds * 1e9), round(one.ended_seconds * 1e9)
    return began, max(ended, began + 1)


def _lanes(bars: Iterable[_Bar]) -> dict[str, Any]:
    """Return the number of lanes, and each slice as lane, time since the last one began, duration and the rest."""
    lanes = tracks(bars)
    found = sorted([(bar, lane) for lane, track in enumerate(lanes) for bar in track], key=lambda each: each[0].began)
    slices: list[list[Any]] = []
    before = 0
    for bar, lane in found:
        slices.append([lane, bar.began - before, bar.ended - bar.began, *bar.rest])
        before = bar.began
    return {"lanes": len(lanes), "slices": slices}


def _deltas(points: Sequence[tuple[int, int]]) -> list[int]:
    """Return times, each since the last one, and depths by turns."""
    found: list[int] = []
    before = 0
    for at, depth in points:
        found += [at - before, depth]
        before = at
    return found
