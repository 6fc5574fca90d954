"""Regions: a planning pass that makes one program of adjacent device nodes."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

from .._errors import Noted
from ..actors.policy import Policy
from ..engine.node import Node, is_node
from ..engine.program import Draft, PassReport
from ..engine.tracing.template import (
    Constant,
    Container,
    Read,
    Template,
    Values,
    arguments_builder,
    is_known,
    key,
    reads,
)
from ..engine.tracing.tracer import Step
from .arguments import Arguments
from .device_batch import DeviceBatch, PackedBatch
from .executor import DeviceExecutor, Samples
from .stage_regions import join_stages
from .untyped_jax import jax
from .whole_arrays import ChunkedExecutor, RowAxes

_SCALARS: Final[tuple[type[Any], ...]] = (bool, int, float, complex, type(None))


@dataclass
class RegionCall:
    """One call inside of a region.

    Attributes:
        step: the call.
        fn: the function of the node.
        executor: the executor of the node.
        arguments: puts the arguments in the order of the parameters.
        templates: templates of the arguments, one for each parameter.
        axes: the axes of the rows in each argument, if the node runs in chunks.
    """

    step: Step
    fn: Callable[..., Any]
    executor: DeviceExecutor
    arguments: Arguments
    templates: tuple[Template, ...]
    axes: tuple[Any, ...]

    @property
    def identity(self) -> Hashable:
        """A key: members of equal regions have equal keys."""
        return self.step.callee.name, self.step.location, self.fn, tuple(map(key, self.templates))


class Inputs:
    """The values that a region takes from outside. Equal values are taken once.

    Inside of the region, the values of members are numbered from 0, and values from outside from -1 downwards.

    Attributes:
        templates: templates of the values, with the numbers that they have outside.
        names: names of the parameters.
        static: the parameters that are static.
        axes: for each parameter the axes of the rows, if the region runs in chunks.
    """

    def __init__(self, members: Sequence[RegionCall]) -> None:
        self.templates: list[Template] = []
        self.names: list[str] = []
        self.static: list[str] = []
        self.axes: list[Any] = []
        self._is_shared: list[bool] = []
        self._members = {member.step.source: index for index, member in enumerate(members)}
        self._found: dict[Hashable, int] = {}

    @property
    def shared(self) -> tuple[str, ...]:
        """The parameters that every member with such a parameter names in `shared=`."""
        return tuple(itertools.compress(self.names, self._is_shared))

    def have_rows(self, resource_sources: Set[int]) -> bool:
        """Return whether any value has a row for each call of a batch, given the numbers of resources."""
        return any(
            name not in (*self.static, *self.shared) and not is_known(template, resource_sources)
            for name, template in zip(self.names, self.templates, strict=True)
        )

    def localised(self, member: RegionCall) -> tuple[Template, ...]:
        """Return the templates of a member's arguments, with the numbers that the values have inside."""
        return tuple([self._inside(member, position, template) for position, template in enumerate(member.templates)])

    def _inside(self, member: RegionCall, position: int, template: Template, *, is_part: bool = False) -> Template:
        if any(read.source in self._members for read in reads(template)):
            if isinstance(template, Read):
                return Read(self._members[template.source], template.path)
            assert isinstance(template, Container)
            children = [self._inside(member, position, child, is_part=True) for child in template.children]
            return dataclasses.replace(template, children=tuple(children))
        arguments = member.arguments
        name, is_static = arguments.names[position], not is_part and position in arguments.static
        # Numbers become a part of the program, as if they were written in the function.
        if isinstance(template, Constant) and (is_static or type(template.value) in _SCALARS):
            return template
        is_shared = not is_part and name in member.executor.options.shared
        axes = None if is_part else member.axes[position]
        try:
            index = self._found.setdefault((key(template), is_static, axes), len(self.templates))
        except TypeError:  # unhashable, so the value cannot be compared with other values
            index = len(self.templates)
        if index == len(self.templates):
            self.templates.append(template)
            self.names.append(self._free(name))
            self.static += [self.names[-1]] * is_static
            self.axes.append(axes)
            self._is_shared.append(is_shared)
        self._is_shared[index] &= is_shared  # an argument that has rows for one member has rows for all members
        return Read(-1 - index)

    def _free(self, name: str) -> str:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        return next(one for one in itertools.chain([name], numbered) if one not in self.names)


def as_arrays(value: Any) -> Any:
    """Return a result as the next program would get it: arrays of NumPy and numbers become arrays of JAX."""

    def as_array(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf)

    return jax.tree.map(as_array, value)


# Graphs that are traced again, or share a part, have equal regions. The programs of equal regions are compiled once.
_known: "WeakValueDictionary[Hashable, Node[..., Any]]" = WeakValueDictionary()


def static_templates(step: Step) -> tuple[Template, ...]:
    """Return the templates of the static arguments of a call of a device node."""
    if not _executor(step).options.static:
        return ()
    member = _member(step)
    return tuple([member.templates[position] for position in member.arguments.static])


def region_node(
    steps: Sequence[Step], resource_sources: Set[int]
) -> "tuple[Node[..., Any], tuple[Template, ...]] | None":
    """Make one node of several.

    Args:
        steps: calls of pure device nodes with equal options, in topological order. The last step gives the result, and
            no step outside reads any other.
        resource_sources: the numbers of resources.

    Returns:
        The node, and the templates of its arguments. None if the nodes are batched, and no argument would have a row
        for each call. A number that is written in the graph has rows for a single node, but is a part of the program
        of a region.
    """
    members = [_member(step) for step in steps]
    inputs = Inputs(members)
    for member in members:
        member.templates = inputs.localised(member)
    executors = [_executor(step) for step in steps]
    if executors[0].options.batch is not None and not inputs.have_rows(resource_sources):
        return None
    name = _joined(step.callee.name for step in steps)
    identity = (name, *executors, *[member.identity for member in members])
    try:
        node = _known.get(identity)
        if node is None:
            node = _known[identity] = _make(steps, name, executors, members, inputs)
    except TypeError:  # unhashable, as a pytree's structure can be
        node = _make(steps, name, executors, members, inputs)
    return node, tuple(inputs.templates)


def _executor(step: Step) -> DeviceExecutor:
    callee = step.callee
    assert is_node(callee)
    assert isinstance(callee._runs_on, DeviceExecutor)
    return callee._runs_on


def _member(step: Step) -> RegionCall:
    executor = _executor(step)
    rows = executor.rows if isinstance(executor, ChunkedExecutor) else None
    fn, arguments = executor.fn if rows is None else rows.fn, executor.arguments(frozenset())
    bound = arguments.bind(step.args, dict(step.kwargs))
    # A parameter without an argument has its default.
    templates = tuple([one if isinstance(one, Constant | Read | Container) else Constant(one) for one in bound])
    axes = (None,) * len(templates) if rows is None else tuple(rows.in_axes)
    return RegionCall(step, fn, executor, arguments, templates, axes)


def _make(
    steps: Sequence[Step], name: str, executors: Sequence[DeviceExecutor], members: Sequence[RegionCall], inputs: Inputs
) -> "Node[..., Any]":
    options = dataclasses.replace(
        executors[0].options,
        static=tuple(inputs.static),
        shared=inputs.shared,
        sample_input=(),
        donate=executors[-1].options.donate,
    )
    fn = _composed(members, inputs.names)
    names = tuple([step.callee.name for step in steps])
    samples, passes, last = _samples(members, inputs), executors[0]._passes, executors[-1]
    region = DeviceExecutor(name, fn, options, passes, samples, names, executors[0].find_size)
    if isinstance(last, ChunkedExecutor):
        rows = last.rows.joined(fn, region.arguments(frozenset()), inputs.axes, f"{name}(")
        region = ChunkedExecutor(name, rows, options, passes, last.batch_size, samples=samples, members=names)
    for one in executors:
        one.regions.add(region)
    stateless = all(is_node(step.callee) and step.callee.policy.stateless for step in steps)
    return Node(region.fn, Policy(pure=True, stateless=stateless), name=name, runs_on=region)


def _samples(members: Sequence[RegionCall], inputs: Inputs) -> Samples:
    """Return a function that makes samples of a region from those of its members."""
    constants = {-1 - index: one.value for index, one in enumerate(inputs.templates) if isinstance(one, Constant)}
    passed = {-1 - index: name for index, name in enumerate(inputs.names)}

    def samples(resources: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        known = {source: resources[name] for source, name in passed.items() if name in resources}
        wanted = [source for source in passed if source not in known]
        most = max([len(member.executor.options.sample_input) for member in members], default=0)
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


def _sample_of(member: RegionCall, number: int, known: Mapping[int, Any]) -> dict[int, Any]:
    """Return the values from outside in a sample of a member, by their numbers."""
    given = member.executor.options.sample_input
    if not given:
        return {}
    outside = {
        name: template.source
        for name, template in zip(member.arguments.names, member.templates, strict=True)
        if isinstance(template, Read) and template.source < 0
    }
    own = {name: known[source] for name, source in outside.items() if source in known}
    merged = member.executor.arguments(frozenset(own)).merge(given[min(number, len(given) - 1)], own)
    return {outside[name]: value for name, value in zip(member.arguments.names, merged, strict=True) if name in outside}


def _composed(members: Sequence[RegionCall], names: Sequence[str]) -> Callable[..., Any]:
    """Return a function that calls the members one after the other."""
    count_of_members = len(members)
    slots = {index: index for index in range(count_of_members)}
    slots.update({-1 - index: count_of_members + index for index in range(len(names))})
    calls = [(member, arguments_builder(member.templates, slots)) for member in members]

    def region(*inputs: Any) -> Any:
        values: Values = [*[None] * count_of_members, *inputs]
        for index, (member, arguments) in enumerate(calls):
            with Noted(f"in node {member.step.callee.name!r}, called at {member.step.location}"):
                values[index] = as_arrays(member.arguments.call(member.fn, arguments(values)))
        return values[count_of_members - 1]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    region.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return region


def _joined(names: Iterable[str]) -> str:
    """Return the names of nodes in their order: "a → b ×3 → c"."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return " → ".join(name if length == 1 else f"{name} ×{length}" for name, length in runs)


# The most nodes of one region. The time to compile grows with the nodes, and the first result waits for the whole
# compilation. To compile 50 nodes took 1.5 to 3.7 times as long as one node alone (sin, three elementwise operations, a
# dot product, a layer of a network; JAX 0.10.1 on two idle CPU cores, 30-70 ms), 200 nodes 3.3 to 8.4 times as long. A
# larger region could save at most one call of the device in 50.
MAX_NODES: Final = 50

_PLAIN: Final = Policy(pure=True)
_Chain: TypeAlias = tuple[Step, ...]


def fuse_regions(draft: Draft) -> tuple[Draft, PassReport]:
    """Make one device node of adjacent pure nodes that run on the same device, if no other step reads between them.

    No region goes across an ordered effect.

    One value leaves a region: that of its last step. All readers of the other values are inside. So no path leaves a
    region and comes back, and fusing makes no cycle. If a region waits for a step that a node does not wait for, the
    node is left out of the region, because it may run meanwhile.
    """
    if not draft.fuse:
        count = len(draft.steps)
        return draft, PassReport(
            "regions", count, count, notes=("each device node is a program of its own: fuse=False",)
        )
    survey = _Survey(draft)
    steps: list[_Chain] = []
    changes: list[str] = []
    for index, chain in enumerate(draft.steps):
        region = survey.region_of[index]
        if region is None or region.made is None:
            steps.append(chain)
        elif index == region.members[0]:  # the last step of the region: all values that the region reads exist by then
            (node, arguments), last = region.made, chain[0]
            steps.append((Step(node, last.source, arguments, {}, (), last.location),))
            less = len(region.members) - 1
            changes.append(f"one program for {node.name}: {less} call{'s' * (less > 1)} of the device less")
    joined, more, apart = join_stages(replace(draft, steps=tuple(steps)))
    after = len(steps) - sum(chain[0].is_joined for chain in joined.steps)
    report = PassReport("regions", len(draft.steps), after, (*changes, *more), (*survey.notes(), *apart))
    return joined, report


@dataclass
class _Region:
    """Steps that become one program.

    Attributes:
        kind: a key that the steps have in common.
        waits_for: the steps that every member waits for, as the bits of a number.
        members: indexes of the steps, the last one first.
        made: the node of the region, and the templates of its arguments; None if the steps stay apart.
    """

    kind: Hashable
    waits_for: int
    members: list[int] = field(default_factory=list[int])
    made: "tuple[Node[..., Any], tuple[Template, ...]] | None" = None


class _Survey:
    """Finds the regions of a draft, in time that is linear in its steps.

    Attributes:
        region_of: the region of each step; None for a step that is not fused.
    """

    def __init__(self, draft: Draft) -> None:
        self._chains = draft.steps
        self._makers = {chain[-1].source: chain[-1] for chain in draft.steps}
        self._alone: dict[str, None] = {}
        parts = itertools.accumulate(chain[0].is_effect for chain in draft.steps)  # effects cut the graph into parts
        kinds = map(self._kind, draft.steps)
        self._kinds = [None if kind is None else (part, kind) for part, kind in zip(parts, kinds, strict=True)]
        self._waits_for = self._find_waits()
        self.region_of: list[_Region | None] = [None] * len(draft.steps)
        self._find_regions({read.source for read in reads(draft.result)})
        self._make_nodes(draft.resource_sources)

    def notes(self) -> tuple[str, ...]:
        """Return a line for each device node that was not fused, with the reason."""
        return tuple(self._alone)

    def _kind(self, chain: _Chain) -> Hashable | None:
        """Return a key that all steps of a region have in common; None if the step joins no region."""
        callee = chain[0].callee
        executor = callee.runs_on if is_node(callee) else None
        if not is_node(callee) or not isinstance(executor, DeviceExecutor):
            return None
        reason = _reason_to_stay_alone(callee, executor)
        if reason is None and isinstance(executor, ChunkedExecutor) and not self._fits_chunks(chain[0], executor):
            reason = "the rows of its chunks are not along one axis that is known"
        if reason is not None:
            self._alone[f"{callee.name} stays a program of its own: {reason}"] = None
            return None
        options = executor.options
        chunk = executor.batch_size if isinstance(executor, ChunkedExecutor) else None
        return options.device, options.batch, options.replicas, options.prefetch, chunk

    def _rows_of(self, template: Template) -> RowAxes | None:
        """Return the axes of the rows, if a template is the whole result of a node that runs in chunks; else None."""
        maker = self._makers.get(template.source) if isinstance(template, Read) else None
        executor = maker.callee.runs_on if maker is not None and is_node(maker.callee) else None
        return executor.rows if isinstance(executor, ChunkedExecutor) else None

    def _fits_chunks(self, step: Step, executor: ChunkedExecutor) -> bool:
        """Whether one program could take the chunks of all arguments together with those of other nodes."""
        return all(
            executor.rows.joins(position, template, None)
            or ((rows := self._rows_of(template)) is not None and executor.rows.joins(position, template, rows))
            for position, template in enumerate(_member(step).templates)
        )

    def _not_by_chunks(self, step: Step) -> Iterable[int]:
        """Return the values that a step takes whole, or in other chunks than those in which they were made."""
        executor = _executor(step)
        if not isinstance(executor, ChunkedExecutor):
            return
        for position, template in enumerate(_member(step).templates):
            rows = self._rows_of(template)
            if rows is None or not executor.rows.joins(position, template, rows):
                yield from (read.source for read in reads(template))

    def _find_waits(self) -> list[int]:
        """Return for each step the set of earlier steps that cannot be in its region, as the bits of a number.

        A device computes one program after the other, so a step that waits only for other nodes of the same kind gains
        nothing by beginning early.
        """
        waits: list[int] = []
        # By value: kind, bits that it waits for, its own bit.
        produced: dict[int, tuple[Hashable | None, int, int]] = {}
        for index, chain in enumerate(self._chains):
            if chain[0].is_effect:
                produced.clear()  # all steps behind an effect wait for all steps before it
            kind, mask = self._kinds[index], 0
            for read in _reads(chain):
                if read in produced:
                    other, further, bit = produced[read]
                    mask |= further if kind is not None and kind == other else further | bit
            waits.append(mask)
            if not chain[0].is_effect:
                produced[chain[-1].source] = kind, mask, 1 << index
        return waits

    def _find_regions(self, result: set[int]) -> None:
        escapes = _Region(None, 0)
        into = dict.fromkeys(result, escapes)  # for each value the region that holds all readers of the value
        for index in reversed(range(len(self._chains))):
            chain, kind = self._chains[index], self._kinds[index]
            region = into.get(chain[-1].source, escapes)
            if kind is None:
                region = escapes
            else:
                region = self._joined(region, index, kind)
                region.members.append(index)
                self.region_of[index] = region
            for source in _reads(chain):
                if into.setdefault(source, region) is not region:
                    into[source] = escapes
            if kind is not None:  # a part of a program cannot compute a value that it is compiled for
                into.update((read.source, escapes) for read in reads(*static_templates(chain[0])))
                into.update((source, escapes) for source in self._not_by_chunks(chain[0]))

    def _make_nodes(self, resource_sources: Set[int]) -> None:
        for region in {id(one): one for one in self.region_of if one is not None}.values():
            steps = [self._chains[member][0] for member in reversed(region.members)]
            region.made = region_node(steps, resource_sources) if len(steps) > 1 else None
            if len(steps) > 1 and region.made is None:
                name = _joined(step.callee.name for step in steps)
                self._alone[f"{name} is not one program: no argument would have a row for each call"] = None

    def _joined(self, region: _Region, index: int, kind: Hashable) -> _Region:
        """Return the region of the readers if a step can join it, else a new one."""
        waits_for = self._waits_for[index]
        if region.kind != kind or len(region.members) >= MAX_NODES:
            return _Region(kind, waits_for)
        name, last = self._chains[index][0].callee.name, self._chains[region.members[0]][0].callee.name
        if _executor(self._chains[index][0]).options.donate:  # the region's result may not fit the donated memory
            self._alone[f"{name} is not in one program with {last} behind it: it overwrites, by donate=True"] = None
            return _Region(kind, waits_for)
        if region.waits_for != waits_for:
            self._alone[f"{name} is not in one program with {last}, which waits for more: it runs meanwhile"] = None
            return _Region(kind, waits_for)
        return region


def _reads(chain: _Chain) -> Iterable[int]:
    return {read.source for step in chain for read in step.reads()}


def _reason_to_stay_alone(node: Node[..., object], executor: DeviceExecutor) -> str | None:
    options, batch = executor.options, executor.options.batch
    reasons = {
        "it is declared pure=False": not options.pure,
        "it is declared fuse=False": not options.fuse,
        "it has a concurrency, timeout, retry or fallback of its own": replace(node.policy, stateless=False) != _PLAIN,
        "it says by in_specs or out_specs how its values are split": (options.in_specs, options.out_specs)
        != (None,) * 2,
        "it has pad_axes, and its masks belong to its own arguments": isinstance(batch, DeviceBatch) and batch.pad_axes,
        "it has rows of several items, and its segments belong to its own arguments": isinstance(batch, PackedBatch),
        "its batches are limited by what its own arguments cost": batch is not None and batch.cost is not None,
        "it is a method": node.bound_to is not None,
        "it splits the rows of its chunks over a mesh": isinstance(executor, ChunkedExecutor) and executor.is_split,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
