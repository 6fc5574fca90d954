"""What is drawn of a trace."""

from .drawing import Drawing, DrawnNode, Edge
from .node import Node
from .template import Template, reads
from .tracer import Step, Trace


def drawing_of(trace: Trace, title: str | None = None) -> Drawing:
    """Return the drawing of a trace, with the bodies of its control flow."""
    inputs = [
        DrawnNode(str(source), name, kind="input")
        for source, name in zip(trace.parameter_sources, trace.parameters, strict=True)
    ]
    steps = [
        DrawnNode(
            str(step.source),
            step.callee.name,
            _detail(step),
            "node" if isinstance(step.callee, Node) else "control",
            tuple(edge for name, template in _named(step) for edge in _edges(name, template)),
        )
        for step in trace.steps
    ]
    result = DrawnNode("result", "result", kind="output", inputs=tuple(_edges("", trace.result)))
    bodies = tuple((str(step.source), drawing_of(body, body.name)) for step in trace.steps for body in step.bodies)
    return Drawing(title or trace.name, (*inputs, *steps, result), bodies)


def _named(step: Step) -> list[tuple[str, Template]]:
    return [*(("", template) for template in step.args), *step.kwargs.items()]


def _edges(name: str, template: Template) -> list[Edge]:
    return [
        Edge(
            str(read.source),
            "".join(f".{what}" if how == "attribute" else f"[{what!r}]" for how, what in read.path) or name,
        )
        for read in reads(template)
    ]


def _detail(step: Step) -> str:
    if not isinstance(step.callee, Node):
        return ""
    policy = step.callee.policy
    words = [
        policy.runs_on if policy.runs_on != "loop" else "",
        f"≤ {policy.concurrency}" if policy.concurrency else "",
        f"{policy.timeout_seconds:g} s" if policy.timeout_seconds else "",
        f"{policy.retry.attempts} attempts" if policy.retry else "",
        "fallback" if policy.fallback else "",
        "stateful" if step.callee.template is not None else "",
        "pure" if policy.pure else "",
        "effectful" if policy.effectful else "",
    ]
    return ", ".join(word for word in words if word)
