"""A graph as a Mermaid flowchart, for Markdown."""

import json
from collections.abc import Iterator

from .characters import printable
from .layout import topological
from .model import Drawing, DrawnNode

_SHAPES = {"input": ('(["', '"])'), "node": ('("', '")'), "control": ('{{"', '"}}'), "output": ('(["', '"])')}
_SAFE = frozenset(" _.,:()=+/?!…×")


def to_mermaid(drawing: Drawing) -> str:
    """Return a Mermaid flowchart: every node and edge, bodies of control flow as subgraphs that dotted arrows name.

    Args:
        drawing: The graph.

    Returns:
        A document that begins with the title, ready for a Markdown block marked `mermaid`.

    Raises:
        ValueError: An edge or a body names an unknown node, two nodes share an id, or the edges form a cycle.
    """
    lines = ["---", f"title: {json.dumps(printable(drawing.title), ensure_ascii=False)}", "---", "flowchart TD"]
    graphs = nodes = 0
    # What is still to be written, last first: a drawing to open, with the name of its driver, or a line to repeat.
    stack: list[tuple[Drawing, str] | str] = [(drawing, "")]
    depth = 1
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            depth -= 1
            lines.append(_indent(depth) + "end")
            lines.append(_indent(depth) + top)
            continue
        current, driver = top
        if driver:
            graphs += 1
            lines.append(f'{_indent(depth)}subgraph g{graphs}["{_escape(current.title)}"]')
            stack.append(f"{driver} -.-> g{graphs}")
            depth += 1
        order = topological(current)
        names = {node.id: f"n{nodes + at}" for at, node in enumerate(order)}
        nodes += len(order)
        lines.extend(_indent(depth) + line for line in _statements(order, names))
        stack.extend((body, names[owner_id]) for owner_id, body in reversed(current.bodies))
    return "\n".join(lines)


def _indent(depth: int) -> str:
    return "    " * min(depth, 8)  # deeper than anyone reads, and a thousand bodies would be mostly blanks


def _statements(order: list[DrawnNode], names: dict[str, str]) -> Iterator[str]:
    for node in order:
        opening, closing = _SHAPES[node.kind]
        detail = f"<br/><small>{_escape(node.detail)}</small>" if node.detail else ""
        yield f"{names[node.id]}{opening}{_escape(node.label)}{detail}{closing}"
    for node in order:
        for edge in node.inputs:
            label = f'|"{_escape(edge.label)}"|' if edge.label else ""
            yield f"{names[edge.source_id]} -->{label} {names[node.id]}"


def _escape(text: str) -> str:
    """Return `text` with all that Mermaid, its Markdown or HTML could take for syntax as `#code;`."""
    return "".join(c if c.isalnum() or c in _SAFE else f"#{ord(c)};" for c in printable(text)) or " "
