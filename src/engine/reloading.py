"""Reloading a resource of a deployment: all calls that are admitted later get the new value."""

import asyncio
from contextlib import AsyncExitStack
from contextvars import Context
from typing import Any, TypeAlias

from .._errors import EngineClosedError, EngineLoopError, Noted, PlanError
from ..actors.frame import Frame
from ..actors.tasks import ContextTask, start_task, uninterrupted
from ..telemetry import logs
from .deployment import Deployment
from .nesting import departed
from .node import is_node
from .open_resources import Entry, Opening
from .program import Plan
from .resource import Resource
from .scope import Runtime
from .tracing.template import is_known, value_of

_Known: TypeAlias = dict[int, Any]  # the values of a graph that come from a resource, by their value numbers


async def reload(deployment: Deployment, resource: object) -> None:
    """Open a resource anew, once for each tuple of arguments in the deployment, and swap the values.

    Raises:
        PlanError: the deployment does not use the resource.
        EngineClosedError: the deployment is not ready, or was stopped meanwhile.
        Exception: the resource could not be opened, or a node refuses its new value; the old values stay in place.
    """
    openings = _openings(deployment, resource)
    runtime = deployment.runtime
    # One reload of a resource at a time. A second reload waits, and then opens the resource once more: the file that
    # the resource reads, for example, may have changed after the first reload began.
    lock = runtime.reloads.setdefault(openings[0].resource, asyncio.Lock())
    async with lock:
        entries = [await _entry(deployment, opening) for opening in openings]
        async with AsyncExitStack() as undo:
            undo.push_async_callback(lambda: uninterrupted(_discard(entries)))
            for entry in entries:
                await _open_next(deployment, entry)
            for entry in entries:
                _check_wanted(deployment, entry)
                _check_fits(entry)
            undo.pop_all()
        _swap(runtime, entries)


def _openings(deployment: Deployment, resource: object) -> list[Opening]:
    if deployment.scope is None or deployment.state != "ready":
        raise deployment.stopped_error()
    if asyncio.get_running_loop() is not deployment.scope.loop:
        raise EngineLoopError("this deployment runs on another event loop than this code; call it from there")
    if not isinstance(resource, Resource):
        raise TypeError(f"service.reload takes a resource, got {resource!r}")
    name: str = resource.name
    used = dict.fromkeys(opening for wired in deployment.wired.values() for opening in wired.program.resources)
    openings = [opening for opening in used if opening.resource is resource]
    if not openings:
        names = ", ".join(dict.fromkeys(opening.name for opening in used)) or "none"
        raise PlanError(f"resource {name!r} is not used by this deployment of {deployment.names}; it uses: {names}")
    return openings


async def _entry(deployment: Deployment, opening: Opening) -> Entry:
    entries = deployment.runtime.resources.entries
    while opening not in entries:  # the resource ended by itself, and the call that reopened it has left meanwhile
        await deployment.reopen(opening)
    entry = entries[opening]
    _check_wanted(deployment, entry)
    return entry


def _check_wanted(deployment: Deployment, entry: Entry) -> None:
    """Refuse the reload if the deployment was stopped meanwhile, or if the present value is being closed."""
    if deployment.state != "ready":
        raise deployment.stopped_error()
    if entry.ending:
        raise EngineClosedError(f"resource {entry.opening.name!r} is not reloaded: its Engine is being closed")


def _check_fits(entry: Entry) -> None:
    """Ask the executors of the nodes that use a resource whether they accept its new value."""
    assert entry.candidate is not None
    if not entry.context_task.was_opened:
        return  # the resource has ended by itself and is being reopened: there is no value to compare with
    values = entry.context_task.value, entry.candidate.value
    for program in entry.programs:
        _check_plan(program.plan, entry.opening, ({}, {}), values)


def _check_plan(plan: Plan, opening: Opening, around: tuple[_Known, _Known], values: tuple[Any, Any]) -> None:
    """Ask the executors of the nodes of a graph, and of the nodes of its bodies.

    Args:
        plan: the plan of the graph.
        opening: the opening of the resource.
        around: for a body: the captured values that come from the resource, once with the present value of the
            resource, and once with the new value.
        values: the present value of the resource, and the new value.
    """
    old, new = around
    if opening in plan.trace.resources:
        source = plan.trace.resources[opening]
        old, new = {**old, source: values[0]}, {**new, source: values[1]}
    for step in plan.steps:
        callee = step.head.callee
        if is_node(callee):
            with Noted(f"resource {opening.name!r} was not reloaded: node {step.label!r} uses it"):
                for read in step.head.reads():
                    if read.source in old:
                        callee.runs_on._check_reload(value_of(read, old), value_of(read, new))
        for body in step.bodies:
            taken = [(source, template) for source, template in body.trace.captured if is_known(template, old.keys())]
            inside = tuple([{source: value_of(one, known) for source, one in taken} for known in (old, new)])
            _check_plan(body, opening, (inside[0], inside[1]), values)


async def _open_next(deployment: Deployment, entry: Entry) -> None:
    resources = deployment.runtime.resources
    context_task = entry.candidate = resources.new_context_task(entry.opening)
    await context_task.settled()
    _check_wanted(deployment, entry)
    if not context_task.is_open:
        raise resources.failure(entry.opening, context_task, deployment.names)


async def _discard(entries: list[Entry]) -> None:
    """Close the values that were opened for a reload that failed, the last opened first."""
    for entry in reversed(entries):
        context_task = entry.candidate
        if context_task is None:
            continue
        was_open = context_task.is_open
        error = await context_task.ended()
        entry.candidate = None  # after the wait: the code that closes the resource waits for its candidate
        if was_open and error is not None:
            logs.warning("resource.not_closed", resource=entry.opening.name, error=error)


def _swap(runtime: Runtime, entries: list[Entry]) -> None:
    replaced: list[ContextTask[Any]] = []
    for entry in entries:
        context_task, entry.candidate = entry.candidate, None
        assert context_task is not None
        replaced.append(runtime.resources.swap(entry, context_task))
    programs = {program for entry in entries for program in entry.programs}
    frames = [frame for frame in runtime.frames_in_flight() if frame.layout in programs]
    work = _retire(runtime, entries[0].opening.name, replaced, frames)
    task = start_task(asyncio.get_running_loop(), work, name="penstock-resource-retires", context=Context())
    for entry in entries:
        entry.retiring.add(task)
        task.add_done_callback(entry.retiring.discard)


async def _retire(runtime: Runtime, name: str, replaced: list[ContextTask[Any]], frames: list[Frame]) -> None:
    """Close the replaced values, the last opened first, once the calls that began with them have ended."""
    await departed(frames)
    frames.clear()
    await runtime.threads_returned()
    for context_task in sorted(replaced, key=lambda context_task: context_task.number, reverse=True):
        error = await context_task.ended()
        if error is not None:
            logs.warning("resource.not_closed", resource=name, error=error)
