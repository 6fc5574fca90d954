"""A page that shows a profile: one file of HTML, with its style, its script and its data in it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Final

from ...tables.characters import printable
from ...tables.quantities import count, duration, rate
from ..timelines.timeline import Timeline
from ..verdicts.limits.limit import Verdict
from .graph_picture import COLOURS, DrawnNode, by_graph, graph_picture
from .node_table import node_table
from .timeline_data import timeline_data

# Whatever a name in the profile says: nothing is loaded from anywhere, and no other script runs.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"
_HELP: Final = (
    "Drag to move, Ctrl and wheel to zoom. With the keyboard: arrows move, + and - zoom, 0 shows all, Escape lets go. "
    "A click on an item shows its whole way."
)


@dataclass(frozen=True)
class Shown:
    """What a page shows.

    Attributes:
        nodes: those of the profile, in topological order.
        verdict: what limits.
        timeline: when it happened.
        elapsed_seconds: how long the profile was taken.
    """

    nodes: Sequence[DrawnNode]
    verdict: Verdict
    timeline: Timeline
    elapsed_seconds: float


def page(shown: Shown) -> Iterator[str]:
    """Yield the text of the page."""
    graphs = by_graph(shown.nodes)
    title = f"Profile of {', '.join(map(printable, graphs))}" if graphs else "Profile"
    yield (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
    )
    yield from _top(title)
    yield '<main id="main">\n'
    yield from _verdict(shown)
    yield from _graphs(shown, [graph_picture(name, found) for name, found in graphs.items()])
    yield '<section aria-labelledby="nodes-title"><h2 id="nodes-title">Nodes</h2>'
    yield '<div class="scroll" tabindex="0" role="group" aria-label="Table of the nodes">\n'
    yield from node_table(shown.nodes)
    yield "</div></section>\n"
    yield from _timeline(shown)
    yield "</main>\n<script>\n" + _asset("page.js") + "</script>\n<script>\n" + _asset("timeline.js") + "</script>\n"
    yield "</body>\n</html>\n"


def _top(title: str) -> Iterator[str]:
    yield '<a class="skip" href="#main">Skip to the profile</a>\n<header>'
    yield f'<span class="mark">{_asset("mark.svg")}Penstock</span><h1>{escape(title)}</h1>'
    yield '<button type="button" id="theme" aria-label="Switch between light and dark">'
    yield '<span aria-hidden="true">◐</span></button></header>\n'


def _verdict(shown: Shown) -> Iterator[str]:
    verdict = shown.verdict
    reason, remedy = escape(_sentence(verdict.reason)), escape(_sentence(verdict.remedy))
    yield f'<section class="verdict{" limits" if verdict.node else ""}" aria-labelledby="verdict-title">'
    yield '<p class="eyebrow">What limits</p>'
    if verdict.node is None:
        yield f'<h2 id="verdict-title">{reason}</h2>'
    else:
        yield f'<h2 id="verdict-title"><code>{escape(printable(verdict.node))}</code></h2><p>{reason}</p>'
    gain = f" <i>{escape(_sentence(verdict.gain))}</i>" if verdict.gain else ""
    yield f'<p class="remedy"><span>Try</span> {remedy}{gain}</p>'
    yield "<dl>"
    for name, value in _facts(shown):
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl></section>\n"


def _facts(shown: Shown) -> Iterator[tuple[str, str]]:
    yield "taken over", duration(shown.elapsed_seconds)
    ends = [node for node in shown.nodes if not node.readers]
    if ends:
        end = max(ends, key=lambda node: (node.profile.graph == shown.verdict.graph, node.profile.count)).profile
        name = printable(end.graph)
        yield f"items through {name}", count(end.count)
        yield "throughput", rate(end.count / shown.elapsed_seconds if shown.elapsed_seconds else None)
    yield "nodes", count(len(shown.nodes))
    yield "failed", count(sum([node.profile.errors for node in shown.nodes]))


def _graphs(shown: Shown, pictures: Sequence[str]) -> Iterator[str]:
    yield f'<section aria-labelledby="graph-title"><h2 id="graph-title">Graph{"s" if len(pictures) > 1 else ""}</h2>\n'
    if not pictures:
        yield '<p class="note">No node ran while the profile was taken.</p>'
    yield from pictures
    swatches = "".join([f'<i class="wait-{number}"></i>' for number in range(COLOURS)])
    yield '<p class="legend"><span>An edge is as wide as the number of its items.</span><span>Items wait before the '
    yield f'node for <b>0 %</b><span class="scale" aria-hidden="true">{swatches}</span><b>100 %</b> of the time.'
    yield "</span></p></section>\n"


def _timeline(shown: Shown) -> Iterator[str]:
    verdict = shown.verdict
    data = timeline_data(shown.timeline, (verdict.graph, verdict.node))
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
    """Return JSON that no script of a page can be left by: HTML's characters are written as escapes."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _sentence(text: str) -> str:
    text = printable(text)
    return f"{text[:1].upper()}{text[1:]}."


def _asset(name: str) -> str:
    return files(__name__.rpartition(".")[0]).joinpath(name).read_text(encoding="utf-8")
