"""What is drawn of a graph: its steps, and what its actors are doing."""

from dataclasses import replace
from typing import TYPE_CHECKING

from .control import Control
from .drawing import Drawing, DrawnNode, Edge
from .node import Node
from .tracing.template import Template, reads
from .tracing.tracer import Step, Trace

if TYPE_CHECKING:
    pass


_ARGUMENTS = {
    "cond": ("predicate", "operand"),
    "switch": ("index", "operand"),
    "while_loop": ("initial",),
    "map_each": ("items",),
}


def drawing_of(trace: Trace, title: str | None = None) -> Drawing:
    """Return the drawing of a trace, with the bodies of its control flow."""
    names = dict(zip(trace.parameter_sources, trace.parameters, strict=True))
    inputs = [
        DrawnNode(str(source), name, "stream" if source in trace.streams else "", kind="input")
        for source, name in names.items()
    ]
    # Not its arguments: what is drawn is shown around, and they may be credentials.
    inputs += [DrawnNode(str(at), opening.name, "resource", kind="resource") for opening, at in trace.resources.items()]
    names.update({at: opening.name for opening, at in trace.resources.items()})
    names.update({step.source: step.callee.name for step in trace.steps})
    steps = [
        DrawnNode(
            str(step.source),
            step.callee.name,
            _detail(step.callee),
            "node" if isinstance(step.callee, Node) else "control",
            _inputs(step, names, trace.streams),
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


def _inputs(step: Step, names: dict[int, str], streams: frozenset[int]) -> tuple[Edge, ...]:
    """Return what a step reads; where that is more than one value, with the parameters that they go to."""
    edges = [edge for name, template in _arguments(step) for edge in _edges(name, template, streams)]
    several = len({edge.source_id for edge in edges}) > 1
    # A value that is called like its parameter says it already.
    return tuple(
        edge if several and edge.label != names[int(edge.source_id)] else replace(edge, label=_path_only(edge.label))
        for edge in edges
    )


def _arguments(step: Step) -> list[tuple[str, Template]]:
    names = _ARGUMENTS[step.callee.kind] if isinstance(step.callee, Control) else step.callee._positional
    padded = (*names, *[""] * (len(step.args) - len(names)))  # what *args takes, or a body from outside
    return [*zip(padded, step.args, strict=False), *step.kwargs.items()]


def _edges(name: str, template: Template, streams: frozenset[int]) -> list[Edge]:
    return [Edge(str(read.source), str(read) or name, read.source in streams) for read in reads(template)]


def _path_only(label: str) -> str:
    return label if label.startswith((".", "[")) else ""


def _detail(callee: Node[..., object] | Control) -> str:
    if isinstance(callee, Control):
        return "stream" if callee.over_stream else ""
    policy = callee.policy
    words = [
        "stream" if callee.gives_stream else "",
        policy.runs_on if policy.runs_on != "loop" else "",
        callee.executor.label if callee.executor is not None else "",
        "own loop" if callee.make_loop else "stateful" if callee.template is not None else "",
        f"{policy.concurrency} at once" if policy.concurrency else "",
        f"{policy.retry.attempts} attempts" if policy.retry else "",
        f"{policy.timeout_seconds:g} s" if policy.timeout_seconds else "",
        "fallback" if policy.fallback else "",
        "pure" if policy.pure else "",
        "effectful" if policy.effectful else "",
        "replaced" if callee.origin.replacement is not None else "",
    ]
    return ", ".join(word for word in words if word)
