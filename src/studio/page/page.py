"""A page that shows a profile: one file of HTML, which contains its tables, its timeline, its style and its script."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any, Final

from ...telemetry import DepthPoint, DeviceSlice, NodeProfile, Profile, Slice, Timeline, Verdict
from ...telemetry.tables import by_graph, count, duration, milliseconds, rate, seconds
from ...telemetry.text import printable
from ..perfetto import Bar, interval, tracks
from .graph_picture import COLOURS, ProfiledNode, graph_picture, whole_graphs


@dataclass(frozen=True)
class _Column:
    """A column of numbers.

    Args:
        title: its heading.
        about: the meaning of the number.
        value: reads the number of a node.
        text: writes the number.
        is_share: whether it is a share, which is drawn as a bar.
    """

    title: str
    about: str
    value: Callable[[NodeProfile], float | None]
    text: Callable[[float | None], str]
    is_share: bool = False


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _whole(value: float | None) -> str:
    return count(None if value is None else int(value))


_COLUMNS: Final[tuple[_Column, ...]] = (
    _Column("done", "items that it finished", lambda node: node.count, _whole),
    _Column("failed", "items that ended in an error here", lambda node: node.errors, _whole),
    _Column("mean", "time in its handler, waits included", lambda node: node.mean_seconds, milliseconds),
    _Column("p50", "half of its executions took at most this long", lambda node: node.p50_seconds, milliseconds),
    _Column("p90", "90 % of them did", lambda node: node.p90_seconds, milliseconds),
    _Column("p99", "99 % of them did", lambda node: node.p99_seconds, milliseconds),
    _Column("busy", "share of the time of its places", lambda node: node.busy_share, _share, is_share=True),
    _Column(
        "queue wait", "how long an item waited in its inbox", lambda node: node.mean_queue_wait_seconds, milliseconds
    ),
    _Column(
        "occupancy", "share of the time that items waited in its inbox", lambda node: node.occupancy, _share,
        is_share=True,
    ),
    _Column(
        "blocked", "time that finished items waited for room after it, over all", lambda node: node.blocked_seconds,
        seconds,
    ),
    _Column("compile", "share of its busy time", lambda node: node.compile_share, _share),
    _Column("transfer", "share of its busy time", lambda node: node.transfer_share, _share),
    _Column("CPU", "share of its busy time that threads computed for it", lambda node: node.cpu_share, _share),
    _Column("GIL", "share of its busy time that it waited for the GIL", lambda node: node.gil_share, _share),
    _Column("loop", "share of its busy time that it waited for the event loop", lambda node: node.loop_share, _share),
    _Column("hops", "share of its busy time on the way to threads and back", lambda node: node.hop_share, _share),
    _Column(
        "holds GIL", "share of the time that others waited because it had the GIL", lambda node: node.gil_held_share,
        _share,
    ),
)  # fmt: skip
_OF_DEVICES: Final = "compile", "transfer"
_OF_THREADS: Final = "CPU", "GIL", "loop", "hops", "holds GIL"


def _node_table(nodes: Sequence[ProfiledNode]) -> Iterator[str]:
    """Yield the table. If there are several graphs, each heads its nodes; unused columns of devices are left out."""
    ordered = [nodes[at] for at in by_graph([node.profile.graph for node in nodes])]
    has_graphs = len({node.profile.graph for node in nodes}) > 1
    uses_devices = any(node.profile.compile_share or node.profile.transfer_share for node in nodes)
    uses_threads = any(node.profile.cpu_share is not None for node in nodes)
    unused = (*(() if uses_devices else _OF_DEVICES), *(() if uses_threads else _OF_THREADS))
    columns = [column for column in _COLUMNS if column.title not in unused]
    yield '<table id="nodes"><caption class="unseen">What each node did</caption><thead><tr>'
    yield _heading("node", "name of the node", is_number=False)
    for column in columns:
        yield _heading(column.title, column.about)
    yield "</tr></thead>\n"
    for graph, members in groupby(ordered, key=lambda node: node.profile.graph):
        yield "<tbody>\n"
        if has_graphs:
            name = escape(printable(graph))
            yield f'<tr class="heading"><th scope="rowgroup" colspan="{len(columns) + 1}">{name}</th></tr>\n'
        for node in members:
            yield from _row(node, columns)
        yield "</tbody>"
    yield "</table>\n"


def _heading(title: str, about: str, *, is_number: bool = True) -> str:
    kind = ' class="number"' if is_number else ""
    return (
        f'<th scope="col"{kind} aria-sort="none"><button type="button" title="{escape(about)}">{escape(title)}'
        '<span class="arrow" aria-hidden="true"></span></button></th>'
    )


def _row(node: ProfiledNode, columns: Sequence[_Column]) -> Iterator[str]:
    profile = node.profile
    kind, badge = (' class="limits"', ' <span class="badge">limits</span>') if node.limits else ("", "")
    name = escape(printable(profile.node))
    yield f'<tr id="{node.anchor}"{kind}><th scope="row" data-value="{name}">{name}{badge}</th>'
    for column in columns:
        value = column.value(profile)
        text = escape(column.text(value))
        if column.is_share and value is not None:
            text += f'<span class="bar" aria-hidden="true"><i style="width:{min(value, 1):.1%}"></i></span>'
        yield f'<td class="number" data-value="{"" if value is None else f"{value:.9g}"}">{text}</td>'
    yield "</tr>\n"


# The most slices that a page shows: 1.5 MB of data, which it draws within a frame of the screen.
MAX_SLICES: Final = 20_000
MAX_DEVICE_SLICES: Final = 4_000
MAX_POINTS: Final = 20_000
# How many items of a batch a click on the batch shows.
_FRAMES: Final = 32


def _timeline_data(timeline: Timeline, limits: tuple[str | None, str | None]) -> dict[str, Any]:
    """Return the data that the script draws.

    Args:
        timeline: the timeline of the profile.
        limits: the graph and the name of the node that limits.
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
    bars: dict[tuple[str, str], list[Bar[list[Any]]]] = defaultdict(list)
    depths: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for one in slices:
        bars[one.graph, one.node].append((*interval(one), [one.item, one.frame]))
    for point in points:
        depths[point.graph, point.node].append((round(point.at_seconds * 1e9), point.depth))
    begins = {name: min([began for began, _, _ in found]) for name, found in bars.items()}
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
    bars: dict[tuple[str, str], list[Bar[list[Any]]]] = defaultdict(list)
    for one in works:
        track = "compiler" if one.kind == "compile" else one.device
        kind = "transfer" if one.kind in ("to device", "from device") else one.kind
        about = [one.kind, printable(one.node), one.items, one.rows, round(one.padding_share * 100)]
        bars[track, kind].append((*interval(one), [*about, list(one.frames[:_FRAMES])]))
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


def _lanes(bars: Iterable[Bar[list[Any]]]) -> dict[str, Any]:
    """Return the number of lanes, and each slice as a list: lane, time since the last slice, duration and the rest."""
    lanes = tracks(bars)
    found = sorted([(*bar, lane) for lane, track in enumerate(lanes) for bar in track], key=lambda each: each[0])
    slices: list[list[Any]] = []
    before = 0
    for began, ended, rest, lane in found:
        slices.append([lane, began - before, ended - began, *rest])
        before = began
    return {"lanes": len(lanes), "slices": slices}


def _deltas(points: Sequence[tuple[int, int]]) -> list[int]:
    """Return times and depths in turns; each time counts from the time before."""
    found: list[int] = []
    before = 0
    for at, depth in points:
        found += [at - before, depth]
        before = at
    return found


# Whatever the names in a profile contain, the page loads no file and runs no other script.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"
_HELP: Final = (
    "Drag to move, Ctrl and wheel to zoom. With the keyboard: arrows move, + and - zoom, 0 shows all, Escape lets go. "
    "A click on an item shows its whole way."
)


def page_of(profile: Profile) -> Iterator[str]:
    """Yield the text of the page of a profile."""
    verdict = profile.verdict
    limit = verdict.graph, verdict.node
    nodes = [
        ProfiledNode(node, step, f"node-{number}", (node.graph, node.node) == limit)
        for number, (node, step) in enumerate(zip(profile.nodes, profile.steps, strict=True), start=1)
    ]
    graphs = whole_graphs(nodes)
    title = f"Profile of {', '.join(map(printable, graphs))}" if graphs else "Profile"
    yield (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>\n{asset('page.css')}</style>\n</head>\n<body>\n"
    )
    yield from _top(title)
    yield '<main id="main">\n'
    yield from _verdict(verdict, _facts(nodes, verdict, profile.elapsed_seconds))
    yield from _graphs([graph_picture(name, nodes) for name in graphs])
    yield '<section aria-labelledby="nodes-title"><h2 id="nodes-title">Nodes</h2>'
    yield '<div class="scroll" tabindex="0" role="group" aria-label="Table of the nodes">\n'
    yield from _node_table(nodes)
    yield "</div></section>\n"
    yield from _timeline(profile.timeline, limit)
    yield "</main>\n"
    for script in (asset("theme.js") + asset("page.js"), asset("timeline.js")):
        yield f"<script>\n{script}</script>\n"
    yield "</body>\n</html>\n"


def _top(title: str) -> Iterator[str]:
    yield '<a class="skip" href="#main">Skip to the profile</a>\n<header>'
    yield f'<span class="mark">{asset("mark.svg")}Penstock</span><h1>{escape(title)}</h1>'
    yield '<button type="button" id="theme" aria-label="Switch between light and dark">'
    yield '<span aria-hidden="true">◐</span></button></header>\n'


def _verdict(verdict: Verdict, facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    reason, remedy = escape(sentence(verdict.reason)), escape(sentence(verdict.remedy))
    yield f'<section class="verdict{" limits" if verdict.node else ""}" aria-labelledby="verdict-title">'
    yield '<p class="eyebrow">What limits</p>'
    if verdict.node is None:
        yield f'<h2 id="verdict-title">{reason}</h2>'
    else:
        name = escape(printable(verdict.name))
        yield f'<h2 id="verdict-title"><code>{name}</code></h2><p>{reason}</p>'
    if verdict.spent:
        yield f"<p>{escape(sentence(verdict.spent))}</p>"
    gain = f" <i>{escape(sentence(verdict.gain))}</i>" if verdict.gain else ""
    yield f'<p class="remedy"><span>Try</span> {remedy}{gain}</p>'
    yield "<dl>"
    for name, value in facts:
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl></section>\n"


def _facts(nodes: Sequence[ProfiledNode], verdict: Verdict, elapsed_seconds: float) -> Iterator[tuple[str, str]]:
    yield "taken over", duration(elapsed_seconds)
    ends = [node for node in nodes if not node.step.consumers and node.step.around is None]
    if ends:
        end = max(ends, key=lambda node: (node.profile.graph == verdict.graph, node.profile.count)).profile
        name = printable(end.graph)
        yield f"items through {name}", count(end.count)
        yield "throughput", rate(end.count / elapsed_seconds if elapsed_seconds else None)
    yield "nodes", count(len(nodes))
    yield "failed", count(sum([node.profile.errors for node in nodes]))


def _graphs(pictures: Sequence[str]) -> Iterator[str]:
    yield f'<section aria-labelledby="graph-title"><h2 id="graph-title">Graph{"s" if len(pictures) > 1 else ""}</h2>\n'
    if not pictures:
        yield '<p class="note">No node ran while the profile was taken.</p>'
    yield from pictures
    swatches = "".join([f'<i class="wait-{number}"></i>' for number in range(COLOURS)])
    yield '<p class="legend"><span>An edge is as wide as the number of its items.</span><span>Items wait before the '
    yield f'node for <b>0 %</b><span class="scale" aria-hidden="true">{swatches}</span><b>100 %</b> of the time.'
    yield "</span></p></section>\n"


def _timeline(timeline: Timeline, limits: tuple[str | None, str | None]) -> Iterator[str]:
    data = _timeline_data(timeline, limits)
    dropped = ", ".join([f"{number:,} {kind}" for kind, number in data["dropped"].items() if number])
    yield '<section aria-labelledby="timeline-title"><div class="bar-of-tools"><h2 id="timeline-title">Timeline</h2>'
    yield '<div class="tools" role="group" aria-label="Timeline">'
    for action, label, sign in (("in", "Zoom in", "+"), ("out", "Zoom out", "−"), ("all", "Show all", "All")):
        yield f'<button type="button" data-action="{action}" aria-label="{label}" title="{label}">{sign}</button>'
    yield "</div></div>\n"
    if not data["tracks"]:
        yield '<p class="note">Nothing was timed.</p></section>\n'
        return
    yield '<div class="timeline"><canvas id="timeline" tabindex="0" role="img" aria-describedby="timeline-help" '
    yield 'aria-label="When each node and device ran"></canvas><div id="tip" hidden></div></div>\n'
    yield f'<p class="note" id="timeline-help">{escape(_HELP)}'
    yield f" Older ones are not shown: {escape(dropped)}." if dropped else ""
    yield '</p><p class="note" id="chosen" role="status"></p></section>\n'
    yield f'<script type="application/json" id="data">{_embedded(data)}</script>\n'


def _embedded(data: object) -> str:
    """Return JSON that cannot end the script element around it: the characters of HTML are written as escapes."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def sentence(text: str) -> str:
    """Return a text, which may hold names, as a sentence to show."""
    text = printable(text)
    return f"{text[:1].upper()}{text[1:]}."


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return files(__name__.rpartition(".")[0]).joinpath(name).read_text(encoding="utf-8")
