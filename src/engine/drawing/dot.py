"""A graph in the language of Graphviz."""

from collections.abc import Iterator

from ...telemetry.tables.characters import printable
from .model import Drawing
from .outline import Block, outline

_STYLES = {
    "input": 'shape=box, style="rounded,filled", fillcolor="#e3f1fb", color="#4a90c2"',
    "resource": 'shape=cylinder, style=filled, fillcolor="#f3eafa", color="#8e62b5"',
    "node": 'shape=box, style="rounded,filled", fillcolor="#f4f5f8", color="#8a93a6"',
    "control": 'shape=hexagon, style=filled, fillcolor="#fdf1dc", color="#c58f2e"',
    "output": 'shape=box, style="rounded,filled", fillcolor="#e2f5ea", color="#3f9a68"',
}


def to_dot(drawing: Drawing) -> str:
    """Return a Graphviz digraph: nodes, edges (bold for streams), bodies of control flow as dotted clusters.

    Args:
        drawing: The graph.

    Returns:
        The source, e.g. for `dot -Tsvg`.

    Raises:
        ValueError: An edge or a body names an unknown node, two nodes share an id, or the edges form a cycle.
    """
    lines = [
        f"digraph {_quoted(drawing.title)} {{",
        f'    graph [label={_quoted(drawing.title)}, labelloc=t, compound=true, fontname="Helvetica"];',
        '    node [fontname="Helvetica", fontsize=11];',
        '    edge [fontname="Helvetica", fontsize=9, color="#8a93a6"];',
    ]
    for event, block in outline(drawing):
        around = block.indent[4:]
        if event == "open":
            if block.driver:
                lines.append(f"{around}subgraph cluster_{block.number} {{")
                lines.append(f'{block.indent}graph [label={_quoted(block.drawing.title)}, style="rounded,dashed"];')
            lines.extend(block.indent + line for line in _dot_statements(block))
        elif block.driver:
            lines.append(around + "}")
            for first in block.nodes[
                :1
            ]:  # Graphviz draws an edge to a cluster as one to a node in it, cut at its border
                entry = f"[lhead=cluster_{block.number}, style=dotted]"
                lines.append(f"{around}{block.driver} -> {block.names[first.id]} {entry};")
    return "\n".join([*lines, "}"])


def _dot_statements(block: Block) -> Iterator[str]:
    for node in block.nodes:
        detail = "\\n" + _escape_for_dot(node.detail) if node.detail else ""
        yield f'{block.names[node.id]} [label="{_escape_for_dot(node.label)}{detail}", {_STYLES[node.kind]}];'
    for node in block.nodes:
        for edge in node.inputs:
            attributes = [f"label={_quoted(edge.label)}"] if edge.label else []
            attributes += ["style=bold"] if edge.is_stream else []
            shown = f" [{', '.join(attributes)}]" if attributes else ""
            yield f"{block.names[edge.source_id]} -> {block.names[node.id]}{shown};"


def _quoted(text: str) -> str:
    return f'"{_escape_for_dot(text)}"'


def _escape_for_dot(text: str) -> str:
    return printable(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
