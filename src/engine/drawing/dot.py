"""A graph in the language of Graphviz."""

from collections.abc import Iterator

from .characters import printable
from .layout import topological
from .model import Drawing, DrawnNode

_STYLES = {
    "input": 'shape=box, style="rounded,filled", fillcolor="#e3f1fb", color="#4a90c2"',
    "node": 'shape=box, style="rounded,filled", fillcolor="#f4f5f8", color="#8a93a6"',
    "control": 'shape=hexagon, style="filled", fillcolor="#fdf1dc", color="#c58f2e"',
    "output": 'shape=box, style="rounded,filled", fillcolor="#e2f5ea", color="#3f9a68"',
}


def to_dot(drawing: Drawing) -> str:
    """Return a Graphviz digraph: every node and edge, bodies of control flow as clusters that dotted arrows point to.

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
    clusters = nodes = 0
    # What is still to be written, last first: a drawing to open, with the name of its driver, or the end of one.
    stack: list[tuple[Drawing, str] | str] = [(drawing, "")]
    depth = 1
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            depth -= 1
            lines.append(_indent(depth) + "}")
            lines.append(_indent(depth) + top)
            continue
        current, driver = top
        order = topological(current)
        if driver:
            clusters += 1
            lines.append(f"{_indent(depth)}subgraph cluster_{clusters} {{")
            depth += 1
            lines.append(f'{_indent(depth)}graph [label={_quoted(current.title)}, style="rounded,dashed"];')
            if order:
                entry = f"{driver} -> n{nodes} [lhead=cluster_{clusters}, style=dotted];"
            else:
                entry = ""
            stack.append(entry)
        names = {node.id: f"n{nodes + at}" for at, node in enumerate(order)}
        nodes += len(order)
        lines.extend(_indent(depth) + line for line in _statements(order, names))
        stack.extend((body, names[owner_id]) for owner_id, body in reversed(current.bodies))
    return "\n".join([*lines, "}"])


def _indent(depth: int) -> str:
    return "    " * min(depth, 8)


def _statements(order: list[DrawnNode], names: dict[str, str]) -> Iterator[str]:
    for node in order:
        detail = "\\n" + _escape(node.detail) if node.detail else ""
        yield f'{names[node.id]} [label="{_escape(node.label)}{detail}", {_STYLES[node.kind]}];'
    for node in order:
        for edge in node.inputs:
            label = f" [label={_quoted(edge.label)}]" if edge.label else ""
            yield f"{names[edge.source_id]} -> {names[node.id]}{label};"


def _quoted(text: str) -> str:
    return f'"{_escape(text)}"'


def _escape(text: str) -> str:
    return printable(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
