"""What is drawn of a graph that runs: the steps that its plan has kept, with what their actors are doing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..actors.node_actor import NodeActor
from .drawing import Drawing, Load, Places
from .picture import drawing_of

if TYPE_CHECKING:
    from .planning import Plan
    from .tracing.tracer import Trace
    from .wiring import Wiring


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
    loads: dict[str, Load] = {}
    together: dict[str, str] = {}  # the further steps of a chain, and the one whose actor runs them
    for unit, actor in () if wired is None else zip(wired.program.units, wired.actors, strict=True):
        if unit.step is not None:
            loads[str(unit.step.head.source)] = _load(actor, elapsed_seconds)
            together |= {str(step.source): actor.name for step in unit.step.chain[1:]}
    bodies = [body for planned in plan.steps for body in planned.bodies]
    return Drawing(
        drawing.title,
        tuple(
            replace(node, load=loads.get(node.id), detail=_joined(node.detail, together, node.id))
            for node in drawing.nodes
        ),
        tuple(
            (owner_id, _with_loads(drawn, body, wiring, elapsed_seconds))
            for (owner_id, drawn), body in zip(drawing.bodies, bodies, strict=True)
        ),
    )


def _joined(detail: str, together: Mapping[str, str], node_id: str) -> str:
    return ", ".join(filter(None, [detail, f"with {together[node_id]}" if node_id in together else ""]))


def _load(actor: NodeActor, elapsed_seconds: float | None) -> Load:
    now = actor.statistics()
    return Load(
        frozenset([Places(id(actor.places), now.in_flight, now.concurrency)]),
        now.inbox.depth,
        now.inbox.capacity,
        now.completed,
        now.failed,
        (now.completed + now.failed) / elapsed_seconds if elapsed_seconds else None,
        "" if now.state in (None, "running") else now.state,
    )
