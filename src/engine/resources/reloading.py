"""Reloading a resource: the next frames see a new one, and the old is closed after its last frame."""

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeAlias

from ..._errors import EngineClosedError, EngineLoopError, PlanError
from ...actors.frame import Frame
from ...actors.keeper import Keeper
from ...actors.started_tasks import start_task
from ...actors.uninterrupted import uninterrupted
from ...telemetry import logs
from ..call_site import is_known, value_of
from ..node import Node
from .departures import departed
from .opening import Opening
from .registry import Entry
from .resource import Resource

if TYPE_CHECKING:
    from ..deployment import Deployment
    from ..planning import Plan
    from ..runtime import Runtime

_Known: TypeAlias = dict[int, Any]  # what is of a resource in a graph, by the number of the value


async def reload(deployment: "Deployment", resource: object) -> None:
    """Open a resource anew for every distinct arguments that a deployment uses it with, and swap.

    Raises:
        PlanError: the deployment does not use it.
        EngineClosedError: the deployment is not ready, or was stopped meanwhile.
        Exception: what an opening raised; the old ones stay in place then.
    """
    openings = _openings(deployment, resource)
    runtime = deployment.runtime
    # One reload of a resource at a time: a later one opens again, since it may have been asked for after a change.
    lock = runtime.reloads.setdefault(openings[0].resource, asyncio.Lock())
    async with lock:
        entries = [await _entry(deployment, opening) for opening in openings]
        try:
            for entry in entries:
                await _open_next(deployment, entry)
            for entry in entries:
                _check_wanted(deployment, entry)
                _check_fits(entry)
        except BaseException:
            await uninterrupted(_discard(entries))
            raise
        _swap(runtime, entries)


def _openings(deployment: "Deployment", resource: object) -> list[Opening]:
    if deployment.scope is None or deployment.state != "ready":
        raise deployment.stopped_error()
    if asyncio.get_running_loop() is not deployment.scope.loop:
        raise EngineLoopError("this deployment runs on another event loop than this code; call it from there")
    if not isinstance(resource, Resource):
        raise TypeError(f"service.reload takes a resource, got {resource!r}")
    name: str = resource.name
    used = dict.fromkeys(opening for wired in deployment.graphs for opening in wired.program.resources)
    openings = [opening for opening in used if opening.resource is resource]
    if not openings:
        names = ", ".join(dict.fromkeys(opening.name for opening in used)) or "none"
        raise PlanError(f"resource {name!r} is not used by this deployment of {deployment.names}; it uses: {names}")
    return openings


async def _entry(deployment: "Deployment", opening: Opening) -> Entry:
    entries = deployment.runtime.resources.entries
    while opening not in entries:  # it was lost, and a call that opened it again has given up
        await deployment.reopen(opening)
    entry = entries[opening]
    _check_wanted(deployment, entry)
    return entry


def _check_wanted(deployment: "Deployment", entry: Entry) -> None:
    """Refuse to go on when the deployment was stopped meanwhile, or what is to be replaced is being closed."""
    if deployment.state != "ready":
        raise deployment.stopped_error()
    if entry.ending:
        raise EngineClosedError(f"resource {entry.opening.name!r} is not reloaded: its Engine is being closed")


def _check_fits(entry: Entry) -> None:
    """Ask the executors of the nodes that use a resource whether its new value is one for them."""
    assert entry.candidate is not None
    if not entry.keeper.was_opened:
        return  # it was lost, and is only being opened again: there is nothing to compare with
    values = entry.keeper.value, entry.candidate.value
    for program in entry.programs:
        _check_plan(program.plan, entry.opening, ({}, {}), values)


def _check_plan(plan: "Plan", opening: Opening, around: tuple[_Known, _Known], values: tuple[Any, Any]) -> None:
    """Ask the executors of a graph's nodes, and of those of its bodies.

    Args:
        plan: of the graph.
        opening: of the resource.
        around: for a body, what it takes of the present value, and of the new one.
        values: the present one, and the new one.
    """
    old, new = around
    if opening in plan.trace.resources:
        source = plan.trace.resources[opening]
        old, new = {**old, source: values[0]}, {**new, source: values[1]}
    for step in plan.steps:
        callee = step.head.callee
        if isinstance(callee, Node) and callee.runs_in:
            try:
                for read in step.head.reads():
                    if read.source in old:
                        callee.runs_in.check_reload(value_of(read, old), value_of(read, new))
            except Exception as error:
                error.add_note(f"resource {opening.name!r} was not reloaded: node {step.label!r} uses it")
                raise
        for body in step.bodies:
            taken = [(source, template) for source, template in body.trace.captured if is_known(template, old.keys())]
            inside = tuple([{source: value_of(one, known) for source, one in taken} for known in (old, new)])
            _check_plan(body, opening, (inside[0], inside[1]), values)


async def _open_next(deployment: "Deployment", entry: Entry) -> None:
    resources = deployment.runtime.resources
    keeper = entry.candidate = resources.new_keeper(entry.opening)
    await keeper.settled()
    _check_wanted(deployment, entry)
    if not keeper.is_open:
        raise resources.failure(entry.opening, keeper, deployment.names)


async def _discard(entries: list[Entry]) -> None:
    """Close what was opened for a reload that failed, the last opened first."""
    for entry in reversed(entries):
        keeper = entry.candidate
        if keeper is None:
            continue
        was_open = keeper.is_open
        error = await keeper.ended()
        entry.candidate = None  # not before: what ends the resource waits for it
        if was_open and error is not None:
            logs.warning("resource.not_closed", resource=entry.opening.name, error=repr(error))


def _swap(runtime: "Runtime", entries: list[Entry]) -> None:
    replaced: list[Keeper[Any]] = []
    for entry in entries:
        keeper, entry.candidate = entry.candidate, None
        assert keeper is not None
        replaced.append(runtime.resources.swap(entry, keeper))
    programs = {program for entry in entries for program in entry.programs}
    frames = [frame for frame in runtime.frames_in_flight() if frame.layout in programs]
    work = _retire(runtime, entries[0].opening.name, replaced, frames)
    task = start_task(asyncio.get_running_loop(), work, name="penstock-resource-retires", context=Context())
    for entry in entries:
        entry.retiring.add(task)
        task.add_done_callback(entry.retiring.discard)


async def _retire(runtime: "Runtime", name: str, replaced: list[Keeper[Any]], frames: list[Frame]) -> None:
    """Close what was replaced, the last opened first, once nothing can use it any more."""
    await departed(frames)
    frames.clear()
    await runtime.threads_returned()
    for keeper in sorted(replaced, key=lambda keeper: keeper.number, reverse=True):
        error = await keeper.ended()
        if error is not None:
            logs.warning("resource.not_closed", resource=name, error=repr(error))
