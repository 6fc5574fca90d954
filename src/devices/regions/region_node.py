"""Region node: one device node that does what several did."""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from weakref import WeakValueDictionary

from ...actors.policy import Policy
from ...engine.node import Node
from ...engine.tracing.template import Constant, Container, Read, Template, Values, arguments_builder, reads
from ...engine.tracing.tracer import Step
from ..device_executor import DeviceExecutor
from ..device_node import DeviceNode
from ..device_programs import DevicePrograms, Samples
from .as_arrays import as_arrays
from .contraction import Contraction
from .region_members import Inputs, Member

# Graphs that are traced again, or have the same part, have the same regions, and their programs need no compiling.
_known: "WeakValueDictionary[Hashable, DeviceNode[..., Any]]" = WeakValueDictionary()


def static_templates(step: Step) -> tuple[Template, ...]:
    """Return the templates of what a call of a device node is compiled for."""
    if not _programs(step).options.static:
        return ()
    member = _member(step)
    return tuple([member.templates[position] for position in member.static])


def region_node(steps: Sequence[Step]) -> "tuple[DeviceNode[..., Any], tuple[Template, ...]]":
    """Make one node of several.

    Args:
        steps: calls of pure device nodes with equal options, in topological order; the last one gives the result, and
            no other is read outside.

    Returns:
        The node, and the templates of its arguments.
    """
    members = _with_contractions([_member(step) for step in steps])
    inputs = Inputs(members)
    for member in members:
        member.templates = inputs.localised(member)
    programs = [_programs(step) for step in steps]
    name = _joined(step.callee.name for step in steps)
    identity = (name, *[one.log for one in programs], *[member.identity for member in members])
    try:
        node = _known.get(identity)
        if node is None:
            node = _known[identity] = _make(steps, name, programs, members, inputs)
    except TypeError:  # unhashable, as a pytree's structure can be
        node = _make(steps, name, programs, members, inputs)
    return node, tuple(inputs.templates)


def _programs(step: Step) -> DevicePrograms:
    callee = step.callee
    assert isinstance(callee, Node)
    assert isinstance(callee.executor, DeviceExecutor)
    return callee.executor.programs


def _member(step: Step) -> Member:
    programs = _programs(step)
    fn, arguments = programs.fn, programs.arguments(frozenset())
    bound = arguments.bind(step.args, dict(step.kwargs))
    # What is not passed has its default.
    templates = tuple([one if isinstance(one, Constant | Read | Container) else Constant(one) for one in bound])
    return Member(
        step.source, step.callee.name, step.location, fn, lambda values: arguments.call(fn, values), programs,
        arguments.names, arguments.static, templates,
    )  # fmt: skip


def _with_contractions(members: list[Member]) -> list[Member]:
    """Return the members with each einsum that only another one reads as a part of that."""
    readers = Counter(read.source for member in members for read in reads(*member.templates))
    open_ones: dict[int, Member] = {}
    absorbed: set[int] = set()
    for member in members:
        if not isinstance(member.fn, Contraction):
            continue
        inner = [_whole(template, open_ones) for template in member.templates]
        inner = [one if one is not None and readers[one.source] == 1 else None for one in inner]
        if any(inner):
            absorbed.update(one.source for one in inner if one is not None)
            _absorb(member, member.fn, inner)
        open_ones[member.source] = member
    return [member for member in members if member.source not in absorbed]


def _whole(template: Template, members: dict[int, Member]) -> Member | None:
    return members.get(template.source) if isinstance(template, Read) and not template.path else None


def _absorb(member: Member, contraction: Contraction, inner: Sequence[Member | None]) -> None:
    names: list[str] = []
    templates: list[Template] = []
    for name, template, one in zip(member.names, member.templates, inner, strict=True):
        names += [name] if one is None else one.names
        templates += [template] if one is None else one.templates
    merged = contraction.absorbing([
        one.fn if one is not None and isinstance(one.fn, Contraction) else None for one in inner
    ])  # fmt: skip
    member.fn, member.call = merged, lambda values: merged(*values)
    member.name = _joined([*[one.name for one in inner if one is not None], member.name])
    member.names, member.templates = tuple(names), tuple(templates)


def _make(
    steps: Sequence[Step], name: str, programs: Sequence[DevicePrograms], members: Sequence[Member], inputs: Inputs
) -> "DeviceNode[..., Any]":
    options = dataclasses.replace(
        programs[0].options, static=tuple(inputs.static), shared=tuple(inputs.shared), sample_input=()
    )
    fn = _composed(members, inputs.names)
    names = tuple([step.callee.name for step in steps])
    own = DevicePrograms(name, fn, options, _samples(members, inputs), names)
    for one in programs:
        one.share(own)
    return DeviceNode(fn, Policy(pure=True), name=name, executor=DeviceExecutor(own))


def _samples(members: Sequence[Member], inputs: Inputs) -> Samples:
    """Return what puts samples of a region together out of those of its members."""
    constants = {-1 - index: one.value for index, one in enumerate(inputs.templates) if isinstance(one, Constant)}
    passed = {-1 - index: name for index, name in enumerate(inputs.names)}

    def samples(resources: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        known = {source: resources[name] for source, name in passed.items() if name in resources}
        wanted = [source for source in passed if source not in known]
        most = max([len(member.programs.options.sample_input) for member in members], default=0)
        found: list[tuple[Any, ...]] = []
        for number in range(most):
            values = dict(constants)
            for member in members:
                values.update(_sample_of(member, number, known))
            if any(source not in values for source in wanted):
                return ()
            found.append(tuple([values[source] for source in wanted]))
        return tuple(found)

    return samples


def _sample_of(member: Member, number: int, known: Mapping[int, Any]) -> dict[int, Any]:
    """Return what a sample of a member says of the values from outside that it takes."""
    given = member.programs.options.sample_input
    if not given:
        return {}
    outside = {
        name: template.source
        for name, template in zip(member.names, member.templates, strict=True)
        if isinstance(template, Read) and template.source < 0
    }
    own = {name: known[source] for name, source in outside.items() if source in known}
    merged = member.programs.arguments(frozenset(own)).merge(given[min(number, len(given) - 1)], own)
    return {outside[name]: value for name, value in zip(member.names, merged, strict=True) if name in outside}


def _composed(members: Sequence[Member], names: Sequence[str]) -> Callable[..., Any]:
    """Return the function that does what the members do one after the other."""
    count_of_members = len(members)
    slots = {index: index for index in range(count_of_members)}
    slots.update({-1 - index: count_of_members + index for index in range(len(names))})
    calls = [(member, arguments_builder(member.templates, slots)) for member in members]

    def region(*inputs: Any) -> Any:
        values: Values = [*[None] * count_of_members, *inputs]
        for index, (member, arguments) in enumerate(calls):
            try:
                values[index] = as_arrays(member.call(arguments(values)))
            except Exception as error:  # whatever the function raises
                error.add_note(f"in node {member.name!r}, called at {member.location}")
                raise
        return values[count_of_members - 1]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    region.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return region


def _joined(names: Iterable[str]) -> str:
    """Return the names of nodes in their order: "a → b ×3 → c"."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return " → ".join(name if length == 1 else f"{name} ×{length}" for name, length in runs)
