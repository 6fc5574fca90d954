"""Donation: choose the step in the body of a loop that may overwrite the state of the iteration before."""

from collections.abc import Set
from dataclasses import replace
from typing import Any

from .._errors import PlanError
from .control import Control
from .program import Plan, PlannedStep
from .tracing.template import SCALARS, Constant, Container, Read, Template
from .tracing.tracer import Step

# An iteration of a `fold` or a `while_loop` gets the state that the iteration before has made. Nothing needs that state
# once the next state exists. So the last step that reads the state may compute in its memory: the program has that step
# wait for all other readers. Every array of the state must be new, from an execution that keeps no reference to its
# results; other executions may still hold their results. The first state belongs to a caller, so the execution copies
# that state.


def with_donation(loop: Step, bodies: list[Plan], changes: list[str], notes: list[str]) -> list[Plan]:
    """Let a step in the body of a loop overwrite the state, if its node has `donate=True`; return the bodies.

    Args:
        loop: any step.
        bodies: the plans of its bodies.
        changes: gets a line if a step overwrites the state.
        notes: gets a line if a step with `donate=True` does not overwrite the state.

    Raises:
        PlanError: the loop would need the state again after a failure.
    """
    if not isinstance(loop.callee, Control) or loop.callee.kind not in ("fold", "while_loop"):
        return bodies
    body = bodies[-1]
    state = body.parameter_sources[0]
    readers = [step for step in body.steps if state in {read.source for read in step.head.reads()}]
    for step in reversed(readers):
        node: Any = step.head.callee  # nodes import graphs, and graphs import plans, so this file cannot import nodes
        if not getattr(node, "runs_on", None) or not node.runs_on._overwrites:
            continue
        if reason := _reason(body, Read(state), step, readers):
            notes.append(f"{step.label} in {body.name} does not overwrite the state: {reason}")
            break
        again = "on_error=" if loop.callee.on_error == "skip" else "" if node.policy.retry is None else "retry="
        if again:
            raise PlanError(
                f"{step.head.location}: node {node.name!r} has donate=True, so it overwrites the state of a "
                f"{loop.callee.kind}, and {again} would need that after a failure; leave out one of both"
            )
        changes.append(f"{step.label} in {body.name} writes the next state over the one before")
        return [*bodies[:-1], replace(body, overwrites=step)]
    return bodies


def _reason(body: Plan, state: Read, step: PlannedStep, readers: list[PlannedStep]) -> str:
    """Return why a step cannot overwrite the state; empty if it can."""
    arguments = [*step.head.args, *step.head.kwargs.values()]
    if state not in arguments or sum(read.source == state.source for read in step.head.reads()) > 1:
        return "it takes a part of it, or takes it twice"
    if readers[-1] is not step:
        return f"{readers[-1].label} reads it later"
    streams = [one.label for one in readers if one.head.callee.gives_stream]
    if streams:
        return f"the stream of {streams[0]} may read it later"
    return "" if _is_new(body.result, body, set()) else "the next state is not made by device nodes alone"


def _is_new(made: Template, plan: Plan, new: Set[int]) -> bool:
    """Whether only its readers hold the arrays of a value. `new` has the parameters with such values."""
    if isinstance(made, Container):
        return all(_is_new(child, plan, new) for child in made.children)
    if isinstance(made, Constant):
        return type(made.value) in SCALARS
    maker = next((step for step in plan.steps if step.source == made.source), None)
    if maker is None:
        return made.source in new
    callee: Any = maker.head.callee
    if getattr(callee, "runs_on", None):
        policy = callee.policy
        return bool(callee.runs_on._is_compiled and policy.fallback is None and policy.failover is None)
    if callee.name not in ("cond", "switch"):
        return False
    is_new = _is_new(maker.head.args[1], plan, new)  # the operand
    return all(_is_new(body.result, body, {body.parameter_sources[0]} if is_new else set()) for body in maker.bodies)
