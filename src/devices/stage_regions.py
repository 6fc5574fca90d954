"""Regions across stages: which device stages of a stream become one program, and why other stages do not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import cast

from ..engine.control import Control
from ..engine.node import is_node
from ..engine.planning import eliminate_dead_nodes, make_plan
from ..engine.program import Draft
from ..engine.tracing.template import Read, Template, reads, with_reads
from ..engine.tracing.tracer import Step, Trace
from .executor import DeviceExecutor


def join_stages(draft: Draft) -> tuple[Draft, list[str], list[str]]:
    """Make one stage of device stages that follow each other in a stream, if their bodies become one program.

    Returns:
        The draft; a line for each change; and a line for each pair of stages that stay apart, with the reason.
    """
    ends: dict[int, _Stages] = {}  # by the stream that the last stage gives
    found: list[_Stages] = []
    notes: list[str] = []
    part = 0  # number of the part of the graph; effects cut the graph into parts
    for chain in draft.steps:
        step = chain[0]
        part += step.is_effect
        if not _is_device_stage(step):
            continue
        [stream] = reads(step.args[0])
        before = ends.pop(stream.source, None)
        why = "" if before is None else before.why_apart(draft, step, part)
        if before is None or why:
            if before is not None:
                notes.append(f"{_name(draft, step)} stays apart from {_name(draft, before.steps[-1])} before it: {why}")
            before = _Stages(step, part)
            found.append(before)
        ends[step.source] = before
    changes: list[str] = []
    replaced: dict[int, Step] = {}
    for stages in found:
        *others, last = stages.steps
        if stages.joined is not None:
            args = (last.args[0], *stages.joined.captures)
            replaced |= {step.source: replace(step, is_joined=True) for step in others}
            replaced[last.source] = replace(last, args=args, joined=stages.joined)
            less = f"{len(others)} call{'s' * (len(others) > 1)} of the device less for each value"
            changes.append(f"one program for the stages {stages.program}: {less}")
    steps = tuple([tuple([replaced.get(step.source, step) for step in chain]) for chain in draft.steps])
    return replace(draft, steps=steps), changes, notes


class _Stages:
    """Stages of a stream that follow each other, and run as one stage.

    Attributes:
        steps: the steps of the stages.
        joined: the joint body of the stages; None for one stage alone.
        program: the name of their program.
    """

    def __init__(self, first: Step, part: int) -> None:
        self.steps = [first]
        self.joined: Trace | None = None
        self.program = ""
        self._part = part

    def why_apart(self, draft: Draft, step: Step, part: int) -> str:
        """Add one more stage and return ""; or return the reason why the stage cannot be added."""
        first, one, other = self.steps[0], _control(self.steps[0]), _control(step)
        if one.on_error == "return":
            return "on_error='return' gives the later stage an Outcome"
        if one.limit != other.limit or one.on_error != other.on_error:
            return (
                f"one has concurrency={one.limit} and on_error={one.on_error!r}, the other concurrency={other.limit} "
                f"and on_error={other.on_error!r}"
            )
        if part != self._part:
            return "an effect stands between them"
        at_hand = {*draft.parameter_sources, *(read.source for read in reads(*first.args))}
        if not {read.source for read in reads(*step.args[1:])} <= at_hand:
            return "it waits for more steps: the stages before it run meanwhile"
        stages = [*self.steps, step]
        joined = _composed(draft, stages)
        if joined is None:
            return "it takes a part of a result that the stage before builds of several values"
        plan = make_plan(joined, without=(eliminate_dead_nodes,), resources=draft.resource_sources)
        if len(plan.steps) != 1:
            told = [note for report in plan.reports if report.name == "regions" for note in report.notes]
            return "; ".join(told) or "their nodes differ in device, batch, replicas or prefetch"
        self.steps, self.joined, self.program = stages, joined, plan.steps[0].head.callee.name
        return ""


def _is_device_stage(step: Step) -> bool:
    """Whether a step maps a stream with nothing but device nodes."""
    control = step.callee
    if not isinstance(control, Control) or not control.over_stream or control.inputs > 1:
        return False
    [body] = step.bodies
    callees = [one.callee for one in body.steps]
    return bool(callees) and all(is_node(one) and isinstance(one.runs_on, DeviceExecutor) for one in callees)


def _control(step: Step) -> Control:
    return cast("Control", step.callee)


def _name(draft: Draft, step: Step) -> str:
    return step.bodies[0].name.removeprefix(f"{draft.name}/")


def _composed(draft: Draft, stages: Sequence[Step]) -> Trace | None:
    """Return one body for the bodies of several stages. It has the captured values of the last stage first.

    Returns:
        None if a stage takes a part of a result that the stage before builds of several values.
    """
    last, numbers = stages[-1], count()
    first = next(numbers)
    names, sources, captures = [stages[0].bodies[0].parameters[0]], [first], list[Template]()
    inside: list[dict[int, Template]] = []  # for each stage, the templates of its body's values
    for stage in (last, *stages[:-1]):
        inside.append({})
        for name, source, template in _captured(stage):
            at = captures.index(template) if stage is not last and template in captures else len(captures)
            if at == len(captures):
                names.append(name)
                sources.append(next(numbers))
                captures.append(template)
            inside[-1][source] = Read(sources[1 + at])
    value: Template = Read(first)
    steps: list[Step] = []
    for stage, values in zip(stages, [*inside[1:], inside[0]], strict=True):
        body = stage.bodies[0]
        given = body.parameter_sources[0]
        read = [*(one for step in body.steps for one in step.reads()), *reads(body.result)]
        if not isinstance(value, Read) and any(one.path for one in read if one.source == given):
            return None
        made = {step.source: next(numbers) for step in body.steps}
        values |= {given: value, **{source: Read(number) for source, number in made.items()}}
        steps += [replace(step.with_reads(partial(_moved, values)), source=made[step.source]) for step in body.steps]
        value = with_reads(body.result, partial(_moved, values))
    name = f"{draft.name}/{' → '.join(_name(draft, stage) for stage in stages)}"
    return Trace(name, tuple(names), tuple(sources), tuple(steps), value, tuple(captures))


def _captured(stage: Step) -> Iterator[tuple[str, int, Template]]:
    """Yield name, number in the body, and template of each value that a stage captures."""
    body = stage.bodies[0]
    return zip(body.parameters[1:], body.parameter_sources[1:], stage.args[1:], strict=True)


def _moved(values: Mapping[int, Template], read: Read) -> Template:
    found = values[read.source]
    return Read(found.source, found.path + read.path) if isinstance(found, Read) else found
