"""The graph of a profile as a picture: the width of edges shows how many items flow, the colour how long they wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import sqrt
from typing import Final

from ...engine import Drawing, DrawnEdge, DrawnNode
from ...telemetry import NodeProfile, StepSnapshot
from ...telemetry.tables import milliseconds
from ...telemetry.text import printable
from ..drawing import BoxMark, EdgeMark, Marks, to_figure

_LEAST_EDGE, _MOST_EDGE = 2.0, 12.0  # pixels
_IN, _OUT = "\0in", "\0out"  # no node can have these names
# The number of colours of an edge; the first one stands for no waiting.
COLOURS: Final = 5


@dataclass(frozen=True, slots=True)
class ProfiledNode:
    """A node in the picture.

    Attributes:
        profile: the profile of the node.
        step: its last snapshot, for the nodes that wait for its value, and for the place of its graph.
        anchor: the id of its row in the table.
        limits: whether it is the node that limits.
    """

    profile: NodeProfile
    step: StepSnapshot
    anchor: str
    limits: bool


def graph_picture(name: str, nodes: Sequence[ProfiledNode]) -> str:
    """Return a figure of one graph, with the bodies of its control flow as boxes inside of it.

    Args:
        name: the name of the graph.
        nodes: all nodes of the profile; nodes of one graph in topological order.
    """
    marks = Marks({}, {})
    shown = escape(printable(name))
    picture = to_figure(_drawing_of(name, nodes, marks), marks)
    scrolled = f'<div class="scroll" tabindex="0" role="group" aria-label="The graph {shown}">'
    return f'<figure class="graph"><figcaption>{shown}</figcaption>{scrolled}\n{picture}</div></figure>'


def _drawing_of(graph: str, nodes: Sequence[ProfiledNode], marks: Marks) -> Drawing:
    """Return the drawing of a graph, and add the marks of its boxes and edges."""
    own = {node.profile.node: node for node in nodes if node.profile.graph == graph}
    order = list(own)
    readers = {name: [one for one in node.step.consumers if one not in node.step.behind] for name, node in own.items()}
    bodies = {node.profile.graph: around for node in nodes if (around := node.step.around) and around.graph == graph}
    for body, around in bodies.items():  # a body comes after the last of its sources
        order.insert(max([order.index(source) + 1 for source in around.sources if source in order], default=0), body)
        readers[body] = list(around.consumers)
        for source in around.sources:
            readers.setdefault(source, []).append(body)
    sources: dict[str, dict[str, None]] = {name: {} for name in (*order, _OUT)}
    for number, name in enumerate(order):
        # A name that is not in the profile is not a node, or its node has done nothing.
        for reader in [one for one in readers[name] if one in order[number + 1 :]] or [_OUT]:
            sources[reader][name] = None
    _mark_edges({name: tuple(found) or (_IN,) for name, found in sources.items()}, own, marks)
    drawn = [DrawnNode(_IN, "in", kind="input")]
    for name, found in sources.items():
        inputs = tuple([DrawnEdge(_id(source, own)) for source in (found or (_IN,))])
        if name in own:
            profile = own[name].profile
            busy = "" if profile.busy_share is None else f", {profile.busy_share:.0%} busy"
            drawn.append(DrawnNode(_id(name, own), name, milliseconds(profile.mean_seconds) + busy, inputs=inputs))
            marks.boxes[own[name].anchor] = BoxMark("limits" if own[name].limits else "", _about(profile))
        elif name is _OUT:
            drawn.append(DrawnNode(_OUT, "out", kind="output", inputs=inputs))
        else:
            drawn.append(DrawnNode(name, name.removeprefix(f"{graph}/"), kind="control", inputs=inputs))
    return Drawing(graph, tuple(drawn), tuple([(body, _drawing_of(body, nodes, marks)) for body in bodies]))


def _id(name: str, own: Mapping[str, ProfiledNode]) -> str:
    return own[name].anchor if name in own else name


def _mark_edges(sources: Mapping[str, Sequence[str]], own: Mapping[str, ProfiledNode], marks: Marks) -> None:
    """Mark each edge with the number of items that a node took, or that the source of a body gave."""
    flows: dict[tuple[str, str], int] = {}
    for reader, found in sources.items():
        for source in found:
            taken = own[reader].profile.count + own[reader].profile.errors if reader in own else None
            flows[source, reader] = (own[source].profile.count if source in own else 0) if taken is None else taken
    most = max(flows.values(), default=0)
    for (source, name), flow in flows.items():
        colour, about = 0, f"{flow:,} items"
        if name in own:
            profile = own[name].profile
            colour = round(min(profile.occupancy, 1.0) * (COLOURS - 1))
            about += f"; items wait for {profile.occupancy:.0%} of the time"
            if profile.mean_queue_wait_seconds is not None:
                about += f", each {milliseconds(profile.mean_queue_wait_seconds)} on average"
        across = _LEAST_EDGE + (_MOST_EDGE - _LEAST_EDGE) * sqrt(flow / most if most else 0.0)
        marks.edges[_id(source, own), _id(name, own)] = EdgeMark(f"wait-{colour}", across, about)


def _about(profile: NodeProfile) -> str:
    busy = "" if profile.busy_share is None else f", busy for {profile.busy_share:.0%} of the time of its places"
    return f"{profile.node}: {profile.count:,} items{busy}"


def whole_graphs(nodes: Sequence[ProfiledNode]) -> list[str]:
    """Return the graphs that are not bodies of other graphs."""
    graphs = {node.profile.graph: node.step.around for node in nodes}
    return [graph for graph, around in graphs.items() if around is None or around.graph not in graphs]
