"""Call site: what an executor has to know of the place in a graph where its node is called."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .node import Node
from .tracing.template import Template, builder, reads

if TYPE_CHECKING:
    from .executor import Executor
    from .planning import PlannedStep
    from .program import Program, Unit


@dataclass(frozen=True)
class CallSite:
    """Where a node is called in a graph.

    Attributes:
        node: the node.
        label: its name in the graph, for errors.
        resources: the parameters whose arguments come from resources: the same object for all items, until a reload.
        is_handed_on: whether only nodes with an executor of the same kind read the result. It may then be what is not
            ready yet; everybody else gets a value.
    """

    node: Node[..., Any]
    label: str
    resources: frozenset[str]
    is_handed_on: bool


def call_site_of(program: "Program", unit: "Unit") -> CallSite:
    """Return what the executor of a unit's node has to know."""
    step = unit.step
    assert step is not None
    node = step.head.callee
    assert isinstance(node, Node)
    shared = [name for name, template in _arguments(step, node) if is_known(template, program.plan.resource_sources)]
    return CallSite(node, step.label, frozenset(shared), _is_handed_on(program, unit, node))


def resources_of(unit: "Unit", known: Mapping[int, Any]) -> dict[str, Any]:
    """Return the arguments that come from resources, by parameter.

    Args:
        unit: where the node is called.
        known: the values of resources, by their numbers.
    """
    step = unit.step
    assert step is not None
    node = step.head.callee
    assert isinstance(node, Node)
    return {
        name: value_of(template, known) for name, template in _arguments(step, node) if is_known(template, known.keys())
    }


def is_known(template: Template, sources: Set[int]) -> bool:
    """Return whether a template reads values of these numbers, and nothing else."""
    read = {read.source for read in reads(template)}
    return bool(read) and read <= sources


def value_of(template: Template, known: Mapping[int, Any]) -> Any:
    """Return the value of a template that reads only values that are known."""
    slots = {source: slot for slot, source in enumerate(known)}
    return builder(template, slots)([*known.values()])


def _arguments(step: "PlannedStep", node: Node[..., Any]) -> Iterator[tuple[str, Template]]:
    yield from zip(node.positional, step.head.args, strict=False)
    yield from step.head.kwargs.items()


def _is_handed_on(program: "Program", unit: "Unit", node: Node[..., Any]) -> bool:
    assert unit.step is not None
    kinds = {type(_executor_of(program.units[index].step)) for index in unit.consumers}
    is_result = unit.step.source in {read.source for read in reads(program.plan.result)}
    return kinds == {type(node.executor)} and not is_result


def _executor_of(step: "PlannedStep | None") -> "Executor | None":
    callee = None if step is None else step.head.callee
    return callee.runs_in if isinstance(callee, Node) else None
