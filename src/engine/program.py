"""Plan: what a graph will do, after the passes; and its program, laid out for frames: slots, countdowns, readers.

A scheduler is nothing but additional edges. "sequential" lets each step wait for the one before, "wave" each level for
the whole level before; "actors" and "parallel" add none and differ in how scopes bound their inboxes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from ..actors.node_actor import INLINE, NodeActor
from ..telemetry.text import printable
from .options import ChosenScheduler
from .tracing.template import Read, Template, Values, arguments_builder, builder, keywords_builder, reads
from .tracing.tracer import Step, Trace


@dataclass(frozen=True)
class Draft:
    """A graph between two passes.

    Attributes:
        name: name of the graph.
        parameter_sources: the numbers of the values that frames begin with: of parameters and resources.
        resource_sources: the numbers of the values that are resources; in a body, also of those of the graph around it.
        annotations: annotations of these; None where unknown.
        steps: chains of steps in topological order; a chain of more than one shares an actor.
        result: template of the result.
    """

    name: str
    parameter_sources: tuple[int, ...]
    resource_sources: frozenset[int]
    annotations: tuple[Any, ...]
    steps: tuple[tuple[Step, ...], ...]
    result: Template

    def nodes(self) -> int:
        """Return the number of steps."""
        return sum(len(chain) for chain in self.steps)


@dataclass(frozen=True)
class PassReport:
    """What one pass did.

    Attributes:
        name: the pass.
        before: steps before it; for fusion, actors; for items, those that would be taken on the event loop.
        after: the same after it.
        changes: a line for each change.
        notes: what it did not change although one could expect it, and why.
    """

    name: str
    before: int
    after: int
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


Pass: TypeAlias = Callable[[Draft], tuple[Draft, PassReport]]


@dataclass(frozen=True)
class PlannedStep:
    """One actor of a plan: a step, or a chain of inline steps.

    Attributes:
        label: its name, unique in the plan: "fetch", "fetch#2".
        chain: the steps that it runs one after the other; nearly always one.
        tail_labels: the labels of the chain's further steps.
        bodies: the plans of the bodies of a control-flow step.
    """

    label: str
    chain: tuple[Step, ...]
    tail_labels: tuple[str, ...]
    bodies: tuple["Plan", ...]

    @property
    def head(self) -> Step:
        """The step that takes the arguments."""
        return self.chain[0]

    @property
    def source(self) -> int:
        """The number of the value that it produces."""
        return self.chain[-1].source


@dataclass(frozen=True, eq=False)
class Plan:
    """A graph as it will run. `print(plan)` shows it.

    Attributes:
        name: name of the graph.
        parameters: names of its parameters.
        parameter_sources: the numbers of their values.
        steps: in topological order.
        result: template of the result.
        captures: for a body, what it takes from the enclosing graph.
        resource_sources: the numbers of the values that are resources; in a body, also of those that it takes from
            outside.
        reports: what each pass changed.
        trace: what was recorded.
    """

    name: str
    parameters: tuple[str, ...]
    parameter_sources: tuple[int, ...]
    steps: tuple[PlannedStep, ...]
    result: Template
    captures: tuple[Template, ...]
    resource_sources: frozenset[int]
    reports: tuple[PassReport, ...]
    trace: Trace

    @cached_property
    def _kept_by_engines(self) -> WeakKeyDictionary[object, object]:
        """What each Engine keeps for this plan; it ends with whichever of the two goes first."""
        return WeakKeyDictionary()

    @cached_property
    def _programs_with_resources(self) -> "WeakKeyDictionary[object, dict[ChosenScheduler, Program]]":
        """The programs whose frames have the resources of an Engine, by those."""
        return WeakKeyDictionary()

    @cached_property
    def _programs(self) -> "dict[ChosenScheduler, Program]":
        return {}

    def _program(self, scheduler: ChosenScheduler) -> "Program":
        """Return what frames of this plan need to run under a scheduler; made once."""
        if scheduler not in self._programs:
            self._programs[scheduler] = Program(self, scheduler)
        return self._programs[scheduler]

    @property
    def _gives_stream(self) -> bool:
        """Whether the result is a stream of values."""
        return self.trace.gives_stream

    @cached_property
    def _has_streams(self) -> bool:
        """Whether a frame has streams that go on beside its steps."""
        sources = {*self.parameter_sources, *(step.source for step in self.steps)}
        return not self.trace.streams.isdisjoint(sources)

    @property
    def scheduler_reason(self) -> str:
        """Why scheduler="auto" chooses what it chooses."""
        return (
            'auto: "parallel" for one call (run), where each node fires as soon as its inputs are there; '
            '"actors" for many (stream, deploy), which overlap in a pipeline'
        )

    def __str__(self) -> str:
        from .drawing import to_text
        from .picture import drawing_of

        lines = [to_text(drawing_of(self.trace)), "", f"plan of {printable(self.name)}: {len(self.steps)} actors"]
        for report in self.reports:
            changed = "nothing to change" if not report.changes else f"{report.before} → {report.after}"
            if report.name == "validate":
                changed = f"{report.before} argument types checked"
            lines.append(f"  {report.name}: {changed}")
            for told in (report.changes, report.notes):
                lines.extend(f"    {printable(line)}" for line in told[:20])
                if len(told) > 20:
                    lines.append(f"    and {len(told) - 20} more")
        lines.append(f"  {self.scheduler_reason}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from ..telemetry.tables import Table, to_html
        from .drawing import to_svg
        from .picture import drawing_of

        facts = [("plan", f"{self.name}: {len(self.steps)} actors")]
        for report in self.reports:
            facts.append((report.name, f"{report.before} → {report.after}" if report.changes else "nothing to change"))
            facts += [("", line) for line in (*report.changes[:20], *report.notes[:20])]
        facts.append(("scheduler", self.scheduler_reason))
        return to_svg(drawing_of(self.trace)) + to_html(Table(tuple(facts)))


@dataclass
class Unit:
    """Where one step stands in the program.

    Attributes:
        index: its number; inputs have smaller ones.
        step: the step; None for what a program adds.
        role: "step", the "barrier" between two waves, the opening of a stream that came as an "input", or the handing
            over of the "result" that is a stream.
        slot: the slot of the only argument, -1 if there are more or it is only part of a value.
        args_of, kwargs_of: builders of the arguments.
        out: the slot of its value.
        reads: slots that it gives up when it is done.
        streams: slots of the streams that it reads.
        consumers: units that wait for it.
        countdown: units that it waits for.
    """

    index: int
    step: PlannedStep | None
    role: Literal["step", "barrier", "input", "result"] = "step"
    source: int | None = None
    sources: tuple[int, ...] = ()
    slot: int = -1
    args_of: Callable[[Values], tuple[Any, ...]] = field(default=lambda values: ())
    kwargs_of: Callable[[Values], dict[str, Any]] | None = None
    out: int = 0
    reads: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()
    consumers: list[int] = field(default_factory=list[int])
    countdown: int = 0


class Program:
    """A plan laid out for frames under one scheduler.

    Attributes:
        name: name of the graph.
        plan: the plan.
        scheduler: the scheduler.
        units: the steps, and the barriers of a scheduler.
        is_line: whether each step has one input and one reader, so that frames have nothing to count.
        blank: the slots that a new frame has beside its parameters.
        countdown: for each unit, how many it waits for.
        readers: for each slot, how many readers it has.
        sinks: units that nobody waits for.
        slots: for each value, by its number, where frames have it.
        resources: what its frames have from the beginning, in slots after those of the parameters.
        is_filled: whether new frames get them.
    """

    def __init__(self, plan: Plan, scheduler: ChosenScheduler) -> None:
        self.name = plan.name
        self.plan = plan
        self.scheduler: ChosenScheduler = scheduler
        self.units = _units(plan)
        edges = _data_edges(self.units)
        if scheduler == "sequential":
            for index in range(1, len(self.units)):
                edges[index].add(index - 1)
        elif scheduler == "wave":
            _add_barriers(self.units, edges)
        for index, inputs in edges.items():
            self.units[index].countdown = len(inputs)
            for source in sorted(inputs):
                self.units[source].consumers.append(index)
        self.slots: dict[int, int] = {}
        self.readers: list[int] = []
        self._lay_out()
        self.resources = tuple(plan.trace.resources)
        self.is_filled = False
        self.blank: tuple[Any, ...] = (None,) * (len(self.readers) - len(plan.parameter_sources))
        self.countdown = [unit.countdown for unit in self.units]
        self.sinks = sum(not unit.consumers for unit in self.units)
        # One end and nowhere two inputs: then there is one beginning, too. A stream goes on beside the steps.
        self.is_line = (
            self.sinks == 1
            and not plan._has_streams
            and all(unit.countdown <= 1 and not unit.reads for unit in self.units)
        )
        self.entries = tuple(unit.index for unit in self.units if not unit.countdown)
        # A result that is a stream is handed over by its unit, long before the frame ends.
        self.result: Callable[[Values], Any] = _nothing if plan._gives_stream else builder(plan.result, self.slots)

    def fill(self, resources: Iterable[Any]) -> None:
        """Have the frames that begin from now on see these resources."""
        values = tuple(resources)
        self.blank = (*values, *self.blank[len(values) :])
        self.is_filled = True

    def empty(self) -> None:
        """Let the resources go."""
        self.blank = (None,) * len(self.blank)
        self.is_filled = False

    def _lay_out(self) -> None:
        """Give every value a slot.

        A step that is the only reader of a slot writes its own value there, so a chain needs one slot and gives up
        nothing on its way.
        """
        plan = self.plan
        counts: dict[int, int] = defaultdict(int)
        for unit in self.units:
            for source in unit.sources:
                counts[source] += 1
        if not plan._gives_stream:
            for source in {read.source for read in reads(plan.result)}:
                counts[source] += 1
        for source in plan.parameter_sources:
            self._new_slot(source, counts[source])
        for source in plan.trace.resources.values():
            self._new_slot(source, 0)  # nobody gives it up: a frame has it to its end
        for unit in self.units:
            if unit.step is not None:
                self._place(unit, unit.step, counts)
            elif unit.role == "input":
                self._place_input(unit, counts)
            elif unit.role == "result":
                unit.slot = unit.out = self.slots[unit.sources[0]]
                unit.reads = (unit.out,)
            else:
                unit.out = self._new_slot(-1 - unit.index, 1)  # a barrier's value is nothing, given up at once
                unit.reads = (unit.out,)

    def _place_input(self, unit: Unit, counts: dict[int, int]) -> None:
        """Put the reader of a stream that came as an argument where the argument was."""
        assert unit.source is not None
        unit.slot = unit.out = self.slots[unit.source]
        if not counts[unit.source]:  # nobody reads it: it is closed at once
            self.readers[unit.slot] = 1
            unit.reads = (unit.slot,)

    def _place(self, unit: Unit, step: PlannedStep, counts: dict[int, int]) -> None:
        sources = unit.sources
        head = step.head
        unit.streams = tuple(self.slots[source] for source in sources if source in self.plan.trace.streams)
        only = head.args[0] if len(head.args) == 1 and not head.kwargs else None
        if isinstance(only, Read) and not only.path:
            unit.slot = self.slots[only.source]
        unit.args_of = arguments_builder(head.args, self.slots)
        unit.kwargs_of = keywords_builder(head.kwargs, self.slots)
        taken_over = next((source for source in sources if counts[source] == 1), None)
        given_up = [self.slots[source] for source in sources if source != taken_over]
        count = counts[step.source]
        if not count:  # nobody reads its value: it gives it up itself, at once
            count = 1
            unit.out = -1
        if taken_over is None:
            slot = self._new_slot(step.source, count)
        else:
            slot = self.slots[step.source] = self.slots[taken_over]
            self.readers[slot] = count
        if unit.out == -1:
            given_up.append(slot)
        unit.out = slot
        unit.reads = tuple(given_up)

    def _new_slot(self, source: int, count: int) -> int:
        self.slots[source] = len(self.readers)
        self.readers.append(count)
        return self.slots[source]


def _units(plan: Plan) -> list[Unit]:
    """Return the units of a plan, in topological order."""
    units: list[Unit] = []
    resources = frozenset(plan.trace.resources.values())
    for source in plan.parameter_sources:
        if source in plan.trace.streams:
            units.append(Unit(len(units), None, "input", source))
    for step in plan.steps:
        sources = tuple(dict.fromkeys(read.source for read in step.head.reads() if read.source not in resources))
        units.append(Unit(len(units), step, "step", step.source, sources))
    if plan._gives_stream:
        sources = tuple(read.source for read in reads(plan.result))
        units.append(Unit(len(units), None, "result", None, sources))
    return units


def _data_edges(units: list[Unit]) -> dict[int, set[int]]:
    """Return for each unit those whose values it reads."""
    producer = {unit.source: unit.index for unit in units}
    return {unit.index: {producer[source] for source in unit.sources if source in producer} for unit in units}


def _nothing(values: Values) -> None:
    return None


def _add_barriers(units: list[Unit], edges: dict[int, set[int]]) -> None:
    """Put a barrier between every two levels: one unit each, because edges between whole levels would be quadratic."""
    levels: list[list[int]] = []
    level_of: dict[int, int] = {}
    for index in range(len(units)):
        level_of[index] = 1 + max((level_of[source] for source in edges[index]), default=-1)
        if level_of[index] == len(levels):
            levels.append([])
        levels[level_of[index]].append(index)
    for before, after in pairwise(levels):
        barrier = Unit(len(units), None, "barrier")
        units.append(barrier)
        edges[barrier.index] = set(before)
        for index in after:
            edges[index] = {barrier.index}


@dataclass(frozen=True)
class Wired:
    """The actors of one program in one scope.

    Attributes:
        program: what its frames have in common.
        actors: one for each unit.
        entries: the actors that wait for nothing.
    """

    program: Program
    actors: tuple[NodeActor, ...]
    entries: tuple[NodeActor, ...]

    @cached_property
    def chain(self) -> NodeActor | None:
        """The chain of plain functions that the whole graph is; None if it is more than that."""
        actor = self.actors[0] if len(self.actors) == 1 else None
        return actor if actor is not None and actor.mode == INLINE and actor.ends_line else None

    @cached_property
    def only_entry(self) -> NodeActor | None:
        """The actor in which every frame begins; None if there are several, or none."""
        return self.entries[0] if len(self.entries) == 1 else None
