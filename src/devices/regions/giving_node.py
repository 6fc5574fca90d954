"""Giving node: a device node whose program gives what is read of its result."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...engine.node import Node
from ...engine.tracing.template import Access, Read, Values, builder, key
from ...engine.tracing.tracer import Step
from ..device_executor import DeviceExecutor
from ..device_programs import DevicePrograms
from .as_arrays import as_arrays

# From a value to something in it, as of `Read`.
Path: TypeAlias = tuple[Access, ...]
_Part: TypeAlias = Callable[[Any], Any]


def giving_node(step: Step, paths: Sequence[Path]) -> "Node[..., Any]":
    """Return the node that a step calls with another result.

    Args:
        step: a call of a device node.
        paths: where in the present result that is: a tuple of all of them; of one, that itself. The first is the whole
            if the node has `out_specs`.
    """
    node = step.callee
    assert isinstance(node, Node)
    assert isinstance(node.executor, DeviceExecutor)
    programs, policy = node.executor.programs, node.policy
    part = _part(paths, node.name)
    identity = tuple([key(Read(0, path)) for path in paths])
    giving = programs.giving.get(identity)
    if giving is None:
        giving = programs.giving[identity] = _giving(programs, part, len(paths))
    if policy.fallback is not None:
        policy = dataclasses.replace(policy, fallback=_fallback(policy.fallback, part))
    return Node(
        node.fn, policy, name=node.name, origin=node.origin, bound_to=node.bound_to, executor=DeviceExecutor(giving)
    )  # fmt: skip


def _giving(programs: DevicePrograms, part: _Part, count: int) -> DevicePrograms:
    options, whole = programs.options, programs.fn
    if options.out_specs is not None:
        options = dataclasses.replace(options, out_specs=(options.out_specs, *[None] * (count - 1)))

    @functools.wraps(whole, updated=())
    def fn(*args: Any, **kwargs: Any) -> Any:
        return part(as_arrays(whole(*args, **kwargs)))

    return DevicePrograms(programs.name, fn, options, programs.samples, programs.members)


def _part(paths: Sequence[Path], name: str) -> _Part:
    """Return what takes out of a result what is to be given."""
    wanted = [Read(0, path) for path in paths]
    readers: list[tuple[Read, Callable[[Values], Any]]] = [(one, builder(one, {0: 0})) for one in wanted]

    def part(value: Any) -> Any:
        values: Values = [value]
        found: list[Any] = []
        for one, read in readers:
            try:
                found.append(read(values))
            except Exception as error:  # whatever has no such item raises
                error.add_note(f"while taking {one} of the result of node {name!r}")
                raise
        return tuple(found) if len(found) > 1 else found[0]

    return part


def _fallback(fallback: Callable[[Exception], Any], part: _Part) -> Callable[[Exception], Any]:
    """Return a fallback whose result is read as that of the program."""

    async def given(error: Exception) -> Any:
        value = fallback(error)
        return part(await value if inspect.isawaitable(value) else value)

    return given
