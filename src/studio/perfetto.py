"""A timeline as a trace that Perfetto and Chrome open: JSON of the "Trace Event Format".

Every graph is a process of the trace, and every node a thread of this process, or several threads if its executions
overlap. All devices are one process. An item is a flow: an arrow from each of its slices to the next.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from ..telemetry import DepthPoint, DeviceSlice, Slice, Timeline

Event: TypeAlias = dict[str, Any]

# The names of the tracks of devices.
_OF_DEVICE: Final = {
    "compute": "{}", "to device": "{}, transfers to it", "from device": "{}, transfers from it", "compile": "compiler",
}  # fmt: skip


T = TypeVar("T")
# When a bar of a track begins and ends, and the rest of it; whole nanoseconds, so that no bars overlap by rounding.
Bar: TypeAlias = tuple[int, int, T]


def tracks(bars: Iterable[Bar[T]]) -> list[list[Bar[T]]]:
    """Put bars on as few tracks as they need, each bar on the first free track.

    Returns:
        The bars of each track, in the order in which they began.
    """
    found: list[list[Bar[T]]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for bar in sorted(bars, key=lambda bar: bar[:2]):
        began, ended, _ = bar
        while busy and busy[0][0] <= began:
            heappush(free, heappop(busy)[1])
        if not free:
            heappush(free, len(found))
            found.append([])
        number = heappop(free)
        found[number].append(bar)
        heappush(busy, (ended, number))
    return found


class _Shown(NamedTuple):
    """The content of a bar: a slice of the trace."""

    name: str
    category: str
    arguments: dict[str, Any]
    frames: tuple[int, ...]


class _Stop(NamedTuple):
    """A place where an item was, for the arrow to its next place."""

    began: int
    pid: int
    tid: int


def trace(timeline: Timeline, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a trace.

    Args:
        timeline: the timeline.
        facts: facts about the trace itself, for its "otherData".
    """
    yield '{"displayTimeUnit": "ms", "otherData": '
    yield json.dumps(facts)
    yield ', "traceEvents": [\n'
    separator = ""
    for event in _events(timeline):
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


def _events(timeline: Timeline) -> Iterator[Event]:
    stops: dict[int, list[_Stop]] = defaultdict(list)
    nodes: dict[str, dict[str, list[Bar[_Shown]]]] = defaultdict(lambda: defaultdict(list))
    for one in timeline.slices:
        nodes[one.graph][one.node].append(_bar_of(one))
    points = timeline.depths
    for point in points:
        nodes[point.graph][point.node]  # a graph of which only depths are known is a process, too
    pids = {graph: pid for pid, graph in enumerate(nodes, start=1)}
    for graph, bars in nodes.items():
        yield from _process(pids[graph], graph, bars, stops)
    devices: dict[str, list[Bar[_Shown]]] = defaultdict(list)
    for work in timeline.device_slices:
        devices[_OF_DEVICE[work.kind].format(work.device)].append(_bar_of_device(work))
    if devices:
        yield from _process(len(pids) + 1, "devices", {name: devices[name] for name in sorted(devices)}, stops)
    yield from _flows(stops)
    for point in points:
        yield _counter(pids[point.graph], point)


def _bar_of(one: Slice) -> Bar[_Shown]:
    arguments = {key: value for key, value in (("item", one.item), ("frame", one.frame)) if value is not None}
    frames = () if one.frame is None else (one.frame,)
    return *interval(one), _Shown(one.node, "node", arguments, frames)


def _bar_of_device(one: DeviceSlice) -> Bar[_Shown]:
    arguments: dict[str, Any] = {"kind": one.kind, "device": one.device, "nodes": one.node.split(" → ")}
    if one.items:
        arguments |= {"items": one.items}
    if one.rows:
        arguments |= {"rows": one.rows, "padding": f"{one.padding_share:.0%}"}
    if one.kind != "compute":  # arrows lead to computations; arrows to transfers would cross them
        return *interval(one), _Shown(one.node, one.kind, arguments, ())
    return *interval(one), _Shown(one.node, one.kind, arguments | {"frames": list(one.frames)}, one.frames)


def interval(one: Slice | DeviceSlice) -> tuple[int, int]:
    """Return when a bar begins and ends, in nanoseconds."""
    began, ended = round(one.began_seconds * 1e9), round(one.ended_seconds * 1e9)
    return began, max(ended, began + 1)  # a slice without length is invisible, and no arrow can end at it


def _process(
    pid: int, name: str, bars: Mapping[str, Iterable[Bar[_Shown]]], stops: dict[int, list[_Stop]]
) -> Iterator[Event]:
    """Yield the threads of a process, and add the places of items to `stops`."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    tid = 0
    for track_name, found in bars.items():
        for number, track in enumerate(tracks(found), start=1):
            tid += 1
            title = track_name if number == 1 else f"{track_name} ({number})"
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": title}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            for began, ended, shown in track:
                yield {
                    "ph": "X", "pid": pid, "tid": tid, "name": shown.name, "cat": shown.category,
                    "ts": _microseconds(began), "dur": _microseconds(ended - began), "args": shown.arguments,
                }  # fmt: skip
                for frame in shown.frames:
                    if shown.category == "node" or frame in stops:  # no arrow to an item whose nodes were dropped
                        stops[frame].append(_Stop(began, pid, tid))


def _flows(stops: Mapping[int, list[_Stop]]) -> Iterator[Event]:
    """Yield the arrows between the slices of each item: an event at the beginning of a slice belongs to the slice."""
    for frame, found in stops.items():
        if len(found) < 2:
            continue
        found.sort()
        for number, stop in enumerate(found):
            event: Event = {
                "ph": "t", "id": frame, "name": "item", "cat": "item", "pid": stop.pid, "tid": stop.tid,
                "ts": _microseconds(stop.began), "bp": "e",
            }  # fmt: skip
            yield event | {"ph": "s" if not number else "f" if number == len(found) - 1 else "t"}


def _counter(pid: int, point: DepthPoint) -> Event:
    at = _microseconds(round(point.at_seconds * 1e9))
    return {"ph": "C", "pid": pid, "name": f"inbox of {point.node}", "ts": at, "args": {"items": point.depth}}


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000
