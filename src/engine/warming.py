"""Warming up: what executors can do before the first item, instead of while it waits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .call_site import call_site_of, is_known, resources_of, value_of
from .node import Node

if TYPE_CHECKING:
    from .planning import Plan
    from .pools import Pools
    from .program import Program


async def warm_up(program: "Program", pools: "Pools", device_strategy: str) -> None:
    """Have every executor of a program's nodes, bodies of control flow included, do what it can do now.

    Raises:
        PlanError: an executor does not know what to do.
    """
    known = dict(zip(program.plan.trace.resources.values(), program.blank, strict=False))
    await _warm_up(program, pools, device_strategy, known)


async def _warm_up(program: "Program", pools: "Pools", device_strategy: str, known: Mapping[int, Any]) -> None:
    for unit in program.units:
        if unit.step is None:
            continue
        callee = unit.step.head.callee
        if isinstance(callee, Node) and callee.runs_in is not None:
            site, resources = call_site_of(program, unit), resources_of(unit, known)
            await callee.runs_in.warm_up(site, pools, device_strategy, resources)
        for body in unit.step.bodies:
            await _warm_up(body._program("parallel"), pools, device_strategy, _inside(body, known))


def _inside(body: "Plan", known: Mapping[int, Any]) -> dict[int, Any]:
    """Return the resources that a body takes from outside, by the numbers that they have in it."""
    return {
        source: value_of(template, known)
        for source, template in body.trace.captured
        if is_known(template, known.keys())
    }
