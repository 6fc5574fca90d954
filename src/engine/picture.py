"""Draw a traced graph: its parameters, resources, steps and result, and the values that each step reads."""

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from .drawing import Drawing, DrawnEdge, DrawnNode
from .tracing.template import Template, reads
from .tracing.tracer import Step, Trace, order_edges

if TYPE_CHECKING:
    from .program import Plan


def shown(drawing: Drawing, language: Literal["dot", "mermaid", "svg", "text"]) -> str:
    """Return a drawing as text for a terminal, as a picture, or in the language of another program."""
    from ..studio.drawing import to_dot, to_mermaid, to_svg, to_text

    write = {"dot": to_dot, "mermaid": to_mermaid, "svg": to_svg, "text": to_text}[language]
    return write(drawing)


def drawing_of(trace: Trace, title: str | None = None) -> Drawing:
    """Return the drawing of a trace, with the bodies of its control flow."""
    names = dict(zip(trace.parameter_sources, trace.parameters, strict=True))
    inputs = [
        DrawnNode(str(source), name, "stream" if source in trace.streams else "", kind="input")
        for source, name in names.items()
    ]
    # Without the arguments of a resource: these may be credentials, and people share drawings.
    inputs += [DrawnNode(str(at), opening.name, "resource", kind="resource") for opening, at in trace.resources.items()]
    names.update({at: opening.name for opening, at in trace.resources.items()})
    names.update({step.source: step.callee.name for step in trace.steps})
    order = order_edges([(step,) for step in trace.steps])
    steps = [
        DrawnNode(
            str(step.source),
            step.callee.name,
            step.callee._drawn_detail,
            "control" if step.bodies else "node",
            (
                *_inputs(step, names, trace.streams),
                *(DrawnEdge(str(at), "after", is_order=True) for at in sorted(order.get(step.source, ()))),
            ),
        )
        for step in trace.steps
    ]
    result = DrawnNode("result", "result", kind="output", inputs=tuple(_edges("", trace.result, trace.streams)))
    bodies = tuple(
        (str(step.source), drawing_of(body, body.name.removeprefix(f"{trace.name}/")))
        for step in trace.steps
        for body in step.bodies
    )
    return Drawing(title or trace.name, (*inputs, *steps, result), bodies)


def planned_drawing(plan: "Plan") -> tuple[str, Drawing]:
    """Return the drawing of a plan, after its digest; each step of a chain after the first says with whom it runs."""
    drawing = _with_chains(drawing_of(_kept(plan)), plan)
    return blake2b(repr(drawing).encode("utf-8", "replace"), digest_size=8).hexdigest(), drawing


def _kept(plan: "Plan") -> Trace:
    """Return the trace of a plan without the steps that its passes have dropped or merged."""
    steps = tuple(
        replace(step, bodies=tuple(map(_kept, planned.bodies)) if step is planned.head else step.bodies)
        for planned in plan.steps
        for step in planned.chain
    )
    return replace(plan.trace, steps=steps, result=plan.result)


def _with_chains(drawing: Drawing, plan: "Plan") -> Drawing:
    together = {str(step.source): f"with {one.label}" for one in plan.steps for step in one.chain[1:]}
    bodies = [body for planned in plan.steps for body in planned.bodies]
    nodes = [
        replace(node, detail=", ".join(filter(None, (node.detail, together.get(node.id))))) for node in drawing.nodes
    ]
    drawn = [(owner, _with_chains(one, body)) for (owner, one), body in zip(drawing.bodies, bodies, strict=True)]
    return Drawing(drawing.title, tuple(nodes), tuple(drawn))


def _inputs(step: Step, names: dict[int, str], streams: frozenset[int]) -> tuple[DrawnEdge, ...]:
    """Return the values that a step reads; several values are labelled with the parameters that take them."""
    edges = [edge for name, template in _arguments(step) for edge in _edges(name, template, streams)]
    several = len({edge.source_id for edge in edges}) > 1
    # A value with the name of its parameter needs no label.
    return tuple(
        edge if several and edge.label != names[int(edge.source_id)] else replace(edge, label=_path_only(edge.label))
        for edge in edges
    )


def _arguments(step: Step) -> list[tuple[str, Template]]:
    names = step.callee._argument_names()
    # Arguments for *args, and captures of a body, have no name.
    padded = (*names, *[""] * (len(step.args) - len(names)))
    return [*zip(padded, step.args, strict=False), *step.kwargs.items()]


def _edges(name: str, template: Template, streams: frozenset[int]) -> list[DrawnEdge]:
    return [DrawnEdge(str(read.source), str(read) or name, read.source in streams) for read in reads(template)]


def _path_only(label: str) -> str:
    return label if label.startswith((".", "[")) else ""
