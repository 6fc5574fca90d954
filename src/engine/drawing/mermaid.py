"""A graph as a Mermaid flowchart, for Markdown."""

import json
from collections.abc import Iterator

from ...telemetry.tables.characters import printable
from .model import Drawing
from .outline import Block, outline

_SHAPES = {
    "input": ('(["', '"])'),
    "resource": ('[("', '")]'),
    "node": ('("', '")'),
    "control": ('{{"', '"}}'),
    "output": ('(["', '"])'),
}
_SAFE = frozenset(" _.,:()=+/?!…×")


def to_mermaid(drawing: Drawing) -> str:
    """Return a Mermaid flowchart: nodes, edges (thick for streams), bodies of control flow as subgraphs.

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
            arrow = "==>" if edge.is_stream else "-->"
            yield f"{block.names[edge.source_id]} {arrow}{label} {block.names[node.id]}"


def _escape_for_mermaid(text: str) -> str:
    """Return `text` with all that Mermaid, its Markdown or HTML could take for syntax as `#code;`."""
    return "".join(c if c.isalnum() or c in _SAFE else f"#{ord(c)};" for c in printable(text)) or " "
