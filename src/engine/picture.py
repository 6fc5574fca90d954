"""What is drawn of a graph: its steps, and what its actors are doing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..telemetry.counters import ActorStatistics
from .control import Control
from .drawing import Drawing, DrawnNode, Edge
from .node import Node
from .tracing.template import Template, reads
from .tracing.tracer import Step, Trace

if TYPE_CHECKING:
    from .planning import Plan
    from .scope import Wiring


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


def running_drawing(plan: "Plan", wiring: "Wiring", elapsed_seconds: float | None) -> Drawing:
    """Return the drawing of a plan at work.

    Args:
        plan: the plan.
        wiring: where its actors are.
        elapsed_seconds: the time that their counters cover; None if nothing is to be said of rates.
    """
    return _with_loads(drawing_of(_kept(plan)), plan, wiring, elapsed_seconds)


def _kept(plan: "Plan") -> "Trace":
    """Return the trace of a plan without what its passes have dropped or merged."""
    steps = tuple(
        replace(step, bodies=tuple(map(_kept, planned.bodies)) if step is planned.head else step.bodies)
        for planned in plan.steps
        for step in planned.chain
    )
    return replace(plan.trace, steps=steps, result=plan.result)


def _with_loads(drawing: Drawing, plan: "Plan", wiring: "Wiring", elapsed_seconds: float | None) -> Drawing:
    wired = wiring.wired(plan)
    actors: dict[str, ActorStatistics] = {}
    together: dict[str, str] = {}  # the further steps of a chain, and the one whose actor runs them
    for unit, actor in () if wired is None else zip(wired.program.units, wired.actors, strict=True):
        if unit.step is not None:
            actors[str(unit.step.head.source)] = actor.statistics()
            together |= {str(step.source): actor.name for step in unit.step.chain[1:]}
    bodies = [body for planned in plan.steps for body in planned.bodies]
    return Drawing(
        drawing.title,
        tuple(
            replace(
                node,
                actors=(actors[node.id],) if node.id in actors else (),
                detail=_joined(node.detail, together, node.id),
            )
            for node in drawing.nodes
        ),
        tuple(
            (owner_id, _with_loads(drawn, body, wiring, elapsed_seconds))
            for (owner_id, drawn), body in zip(drawing.bodies, bodies, strict=True)
        ),
        elapsed_seconds,
    )


def _joined(detail: str, together: Mapping[str, str], node_id: str) -> str:
    return ", ".join(filter(None, [detail, f"with {together[node_id]}" if node_id in together else ""]))
