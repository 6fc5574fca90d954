"""Projection: a planning pass that has programs return only those parts of their results that are read."""

import dataclasses
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from itertools import chain
from typing import Any, Final, TypeAlias, get_origin

from .._errors import Noted
from ..engine.node import Node, is_node
from ..engine.program import Draft, PassReport
from ..engine.tracing.annotations import hint_inside
from ..engine.tracing.template import Access, Read, Values, builder, key, reads, with_reads
from ..engine.tracing.tracer import Step
from .executor import DeviceExecutor
from .fusion import as_arrays

# The way from a value to a part of the value; see `Read`.
Path: TypeAlias = tuple[Access, ...]
_Part: TypeAlias = Callable[[Any], Any]


def projected_node(step: Step, paths: Sequence[Path]) -> "Node[..., Any]":
    """Return the node of a step, with parts of its present result as its result.

    Args:
        step: a call of a device node.
        paths: where the parts are in the present result. The node returns a tuple of the parts, or the only part. The
            first part is the whole result if the node has `out_specs`.
    """
    node = step.callee
    assert is_node(node)
    assert isinstance(node._runs_on, DeviceExecutor)
    executor, policy = node._runs_on, node.policy
    part = _part(paths, node.name)
    identity = tuple([key(Read(0, path)) for path in paths])
    projected = executor.projections.get(identity)
    if projected is None:
        projected = executor.projections[identity] = _projecting(executor, part, len(paths))
    if policy.fallback is not None:
        policy = dataclasses.replace(policy, fallback=_fallback(policy.fallback, part))
    return Node(node.fn, policy, name=node.name, origin=node.origin, bound_to=node.bound_to, runs_on=projected)


def _projecting(executor: DeviceExecutor, part: _Part, count: int) -> DeviceExecutor:
    options, whole = executor.options, executor.fn
    if options.out_specs is not None:
        options = dataclasses.replace(options, out_specs=(options.out_specs, *[None] * (count - 1)))

    @functools.wraps(whole, updated=())
    def fn(*args: Any, **kwargs: Any) -> Any:
        return part(as_arrays(whole(*args, **kwargs)))

    return DeviceExecutor(executor.name, fn, options, executor._passes, executor.samples, executor.members)


def _part(paths: Sequence[Path], name: str) -> _Part:
    """Return a function that takes the wanted parts out of a result."""
    wanted = [Read(0, path) for path in paths]
    readers: list[tuple[Read, Callable[[Values], Any]]] = [(one, builder(one, {0: 0})) for one in wanted]

    def part(value: Any) -> Any:
        values: Values = [value]
        found: list[Any] = []
        for one, read in readers:
            with Noted(f"while taking {one} of the result of node {name!r}"):
                found.append(read(values))
        return tuple(found) if len(found) > 1 else found[0]

    return part


def _fallback(fallback: Callable[[Exception], Any], part: _Part) -> Callable[[Exception], Any]:
    """Return a fallback that returns the same parts of the present fallback's result."""

    async def given(error: Exception) -> Any:
        value = fallback(error)
        return part(await value if inspect.isawaitable(value) else value)

    return given


# If `f` returns a tuple, the item in `g(f(x)[0])` exists already. If `f` returns an array, taking the item is a
# computation: the reader would dispatch it on the event loop, and compile it there the first time. So the program of
# `f` returns the item.

# Attributes of an array that are computed from its elements. The other attributes describe the array.
_COMPUTED: Final = frozenset(["T", "mT", "real", "imag"])


def give_items(draft: Draft) -> tuple[Draft, PassReport]:
    """Have programs of device nodes return the parts of their results that are read and may need a computation."""
    items = _find_items(draft)
    if not items:
        return draft, PassReport("items", 0, 0)

    def replaced(read: Read) -> Read:
        return items[read.source].replaced(read) if read.source in items else read

    steps: list[tuple[Step, ...]] = []
    changes: list[str] = []
    for members in draft.steps:
        first, found = members[0], items.get(members[0].source)
        if found is not None:
            first = replace(first, callee=projected_node(first, found.paths))
            changes += [f"{first.callee.name} gives {Read(0, path)} of its result" for path in found.paths if path]
        steps.append(tuple([step.with_reads(replaced) for step in (first, *members[1:])]))
    given = replace(draft, steps=tuple(steps), result=with_reads(draft.result, replaced))
    return given, PassReport("items", len(changes), 0, tuple(changes))


class _Items:
    """The parts of the result of a device node that are read.

    Args:
        hint: annotation of the result.
        found: all reads of the result.
        with_whole: whether the program has to return the whole result, too.

    Attributes:
        paths: the parts that the program returns: a tuple of parts, or the only part.
        are_computed: whether any part may need a computation.
    """

    def __init__(self, hint: Any, found: Iterable[Read], *, with_whole: bool) -> None:
        self._hint = hint
        given: dict[Hashable, Path] = {_key(()): ()} if with_whole else {}
        for read in found:
            path = self._computed(read)
            given.setdefault(_key(path), path)
        self.paths: Sequence[Path] = tuple(given.values())
        self._positions = {one: position for position, one in enumerate(given)}
        self.are_computed = any(self.paths)

    def replaced(self, read: Read) -> Read:
        """Return a read that finds the same part in the new result of the program."""
        path = self._computed(read)
        there: Path = () if len(self.paths) == 1 else (("item", self._positions[_key(path)]),)
        return Read(read.source, there + read.path[len(path) :], str(read))

    def _computed(self, read: Read) -> Path:
        """Return the beginning of a path, up to the last access that may need a computation."""
        hint, length = self._hint, 0
        for number, access in enumerate(read.path, 1):
            how, what = access
            if not _is_container(hint) and (how == "item" or what in _COMPUTED):
                hint, length = None, number
                continue
            hint = hint_inside(hint, access)
            if hint is None and how == "attribute":
                break  # such as the shape of an array, whose items are numbers
        return read.path[:length]


def _find_items(draft: Draft) -> dict[int, _Items]:
    """Return the parts that programs are to return, by the number of the value."""
    found: defaultdict[int, list[Read]] = defaultdict(list)
    for read in chain(*[step.reads() for members in draft.steps for step in members], reads(draft.result)):
        found[read.source].append(read)
    items: dict[int, _Items] = {}
    for members in draft.steps:
        callee, source = members[0].callee, members[0].source
        executor = callee.runs_on if is_node(callee) else None
        if not isinstance(executor, DeviceExecutor) or not any(read.path for read in found[source]):
            continue
        if is_node(callee) and callee.policy.failover is not None:
            continue  # the failover gives the whole result
        options = executor.options
        if options.batch is not None or executor.runs_many_programs:
            continue  # the results are rows of NumPy, whose items are views
        with_whole = options.donate or options.out_specs is not None  # both options describe the whole result
        one = _Items(callee._result_annotation(), found[source], with_whole=with_whole)
        if one.are_computed:
            items[source] = one
    return items


def _key(path: Path) -> Hashable:
    return key(Read(0, path))


def _is_container(hint: Any) -> bool:
    """Return whether an annotation is a container, whose items exist without a computation."""
    kind: object = get_origin(hint) or hint
    return is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, Mapping | Sequence))
