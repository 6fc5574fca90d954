"""A graph as a Mermaid flowchart for Markdown, and in the language of Graphviz."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...engine import Drawing, DrawnNode
from ...telemetry.text import printable
from .layout import topological


@dataclass(frozen=True, slots=True)
class Block:
    """A graph or a body in an outline.

    Attributes:
        number: its number in the outline; 0 for the graph itself.
        depth: how many graphs are around it; 0 for the graph itself.
        drawing: the drawing of the graph or body.
        nodes: its nodes, in topological order.
        names: the names of its nodes by id (`n0`, `n1`, ...), unique in the whole outline.
        driver: for a body, the name of the control-flow node that drives it; otherwise empty.
    """

    number: int
    depth: int
    drawing: Drawing
    nodes: list[DrawnNode]
    names: dict[str, str]
    driver: str

    @property
    def indent(self) -> str:
        """The blanks before its lines; bodies nested deeper than seven are not indented further."""
        return "    " * min(self.depth + 1, 8)


def outline(drawing: Drawing) -> Iterator[tuple[Literal["open", "close"], Block]]:
    """Yield where each block opens and, after all of its bodies, closes.

    Raises:
        ValueError: An edge or a body names an unknown node, two nodes share an id, or the edges form a cycle.
    """
    blocks = named = 0
    stack: list[tuple[Drawing, str, int] | Block] = [(drawing, "", 0)]
    while stack:
        top = stack.pop()
        if isinstance(top, Block):
            yield "close", top
            continue
        current, driver, depth = top
        order = topological(current)
        names = {node.id: f"n{named + at}" for at, node in enumerate(order)}
        named += len(order)
        block = Block(blocks, depth, current, order, names, driver)
        blocks += 1
        yield "open", block
        stack.append(block)
        stack.extend((body, names[owner_id], depth + 1) for owner_id, body in reversed(current.bodies))


_SHAPES = {
    "input": ('(["', '"])'),
    "resource": ('[("', '")]'),
    "node": ('("', '")'),
    "control": ('{{"', '"}}'),
    "output": ('(["', '"])'),
}
_SAFE = frozenset(" _.,:()=+/?!…×")


def to_mermaid(drawing: Drawing) -> str:
    """Return a Mermaid flowchart: nodes, edges (thick for streams, dotted for order), bodies as subgraphs.

    Args:
        drawing: The graph.

    Returns:
        A document that begins with the title, ready for a Markdown block marked `mermaid`.

    Raises:
        ValueError: An edge or a body names an unknown node, two nodes share an id, or the edges form a cycle.
    """
    lines = ["---", f"title: {json.dumps(printable(drawing.title), ensure_ascii=False)}", "---", "flowchart TD"]
    for event, block in outline(drawing):
        around = block.indent[4:]
        if event == "open":
            if block.driver:
                lines.append(f'{around}subgraph g{block.number}["{_escape_for_mermaid(block.drawing.title)}"]')
            lines.extend(block.indent + line for line in _mermaid_statements(block))
        elif block.driver:
            lines += [around + "end", f"{around}{block.driver} -.-> g{block.number}"]
    return "\n".join(lines)


def _mermaid_statements(block: Block) -> Iterator[str]:
    for node in block.nodes:
        opening, closing = _SHAPES[node.kind]
        detail = f"<br/><small>{_escape_for_mermaid(node.detail)}</small>" if node.detail else ""
        yield f"{block.names[node.id]}{opening}{_escape_for_mermaid(node.label)}{detail}{closing}"
    for node in block.nodes:
        for edge in node.inputs:
            label = f'|"{_escape_for_mermaid(edge.label)}"|' if edge.label else ""
            arrow = "-.->" if edge.is_order else "==>" if edge.is_stream else "-->"
            yield f"{block.names[edge.source_id]} {arrow}{label} {block.names[node.id]}"


def _escape_for_mermaid(text: str) -> str:
    """Return `text` with each character that Mermaid, Markdown or HTML could take for syntax written as `#code;`."""
    return "".join(c if c.isalnum() or c in _SAFE else f"#{ord(c)};" for c in printable(text)) or " "


_STYLES = {
    "input": 'shape=box, style="rounded,filled", fillcolor="#e3f1fb", color="#4a90c2"',
    "resource": 'shape=cylinder, style=filled, fillcolor="#f3eafa", color="#8e62b5"',
    "node": 'shape=box, style="rounded,filled", fillcolor="#f4f5f8", color="#8a93a6"',
    "control": 'shape=hexagon, style=filled, fillcolor="#fdf1dc", color="#c58f2e"',
    "output": 'shape=box, style="rounded,filled", fillcolor="#e2f5ea", color="#3f9a68"',
}


def to_dot(drawing: Drawing) -> str:
    """Return a Graphviz digraph: nodes, edges (bold for streams, thin for order), bodies of control flow as clusters.

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
            # Graphviz draws an edge to a cluster as an edge to a node in it that is cut at the border of the cluster.
            for first in block.nodes[:1]:
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
            attributes += ["style=bold"] if edge.is_stream else ["penwidth=0.4"] if edge.is_order else []
            shown = f" [{', '.join(attributes)}]" if attributes else ""
            yield f"{block.names[edge.source_id]} -> {block.names[node.id]}{shown};"


def _quoted(text: str) -> str:
    return f'"{_escape_for_dot(text)}"'


def _escape_for_dot(text: str) -> str:
    return printable(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
