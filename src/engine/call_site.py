"""Call site: what an executor has to know of the place in a graph where its node is called."""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .node import Node
from .tracing.annotations import signature_of
from .tracing.template import Read, Template, builder, reads

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
        constants: by parameter, the arguments that are the same for all items: written in the graph, or a default.
        is_handed_on: whether only nodes with an executor of the same kind read the result. It may then be what is not
            ready yet; everybody else gets a value.
        owned: the parameters whose arguments are results that were handed on and that nobody else reads, not even
            another attempt of this node.
    """

    node: Node[..., Any]
    label: str
    resources: frozenset[str]
    constants: Mapping[str, Any]
    is_handed_on: bool
    owned: frozenset[str]


def call_site_of(program: "Program", unit: "Unit") -> CallSite:
    """Return what the executor of a unit's node has to know."""
    step = unit.step
    assert step is not None
    node = step.head.callee
    assert isinstance(node, Node)
    shared = [name for name, template in _arguments(step, node) if is_known(template, program.plan.resource_sources)]
    return CallSite(
        node, step.label, frozenset(shared), _constants(step, node), _is_handed_on(program, unit, node),
        _owned(program, unit, node),
    )  # fmt: skip


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


def _constants(step: "PlannedStep", node: Node[..., Any]) -> dict[str, Any]:
    given = dict(_arguments(step, node))
    parameters = signature_of(node.fn).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    written = {name: value_of(template, {}) for name, template in given.items() if not any(reads(template))}
    return {**{name: value for name, value in defaults.items() if name not in given}, **written}


def _arguments(step: "PlannedStep", node: Node[..., Any]) -> Iterator[tuple[str, Template]]:
    yield from zip(node.positional, step.head.args, strict=False)
    yield from step.head.kwargs.items()


def _is_handed_on(program: "Program", unit: "Unit", node: Node[..., Any]) -> bool:
    assert unit.step is not None
    policy = node.policy
    if policy.retry is not None or policy.fallback is not None or policy.timeout_seconds is not None:
        return False  # whether an attempt was good, and in time, is known when its result is there
    readers = [_executor_of(program.units[index].step) for index in unit.consumers]
    is_result = unit.step.source in {read.source for read in reads(program.plan.result)}
    kind = type(node.executor)
    return (
        bool(readers)
        and not is_result
        and all(one is not None and type(one) is kind and one.takes_unready for one in readers)
    )


def _owned(program: "Program", unit: "Unit", node: Node[..., Any]) -> frozenset[str]:
    if node.policy.retry is not None or node.policy.fallback is not None:
        return frozenset()
    assert unit.step is not None
    arguments = list(_arguments(unit.step, node))
    read = Counter(one.source for _, template in arguments for one in reads(template))
    makers = {one.step.source: (one, one.step.head.callee) for one in program.units if one.step is not None}
    owned: set[str] = set()
    for name, template in arguments:
        if not isinstance(template, Read) or template.path or read[template.source] != 1:
            continue
        maker, made_by = makers.get(template.source, (None, None))
        if maker is None or not isinstance(made_by, Node) or made_by.runs_in is None:
            continue
        if len(maker.consumers) == 1 and _is_handed_on(program, maker, made_by):
            owned.add(name)
    return frozenset(owned)


def _executor_of(step: "PlannedStep | None") -> "Executor | None":
    callee = None if step is None else step.head.callee
    return callee.runs_in if isinstance(callee, Node) else None
