"""Plan: a graph after the passes; and its program, laid out for frames: slots, countdowns, readers.

A step waits for the steps that it reads, and for effects before it in the source. A scheduler only adds edges.
"sequential" lets each step wait for the step before it, "wave" each level for the whole level before; "actors" and
"parallel" add no edges and differ in how scopes bound their inboxes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

from ..actors.execution import INLINE
from ..actors.frame import Part
from ..actors.node_actor import NodeActor
from ..telemetry.text import printable
from .options import ChosenScheduler
from .tracing.template import Constant, Read, Template, Values, arguments_builder, builder, keywords_builder, reads
from .tracing.tracer import Step, Trace, order_edges

if TYPE_CHECKING:
    from ..saving.durable import Durable
    from .drawing import Drawing


@dataclass(frozen=True)
class Draft:
    """A graph between two passes.

    Attributes:
        name: the name of the graph.
        parameter_sources: the numbers of the values that frames begin with: parameters and resources.
        resource_sources: the numbers of the values that are resources; in a body, also resources of the graph around
            it.
        annotations: the annotations of `parameter_sources`; None where unknown.
        steps: chains of steps in topological order; all steps of a chain share an actor.
        result: the template of the result.
        fuse: the execution option.
    """

    name: str
    parameter_sources: tuple[int, ...]
    resource_sources: frozenset[int]
    annotations: tuple[Any, ...]
    steps: tuple[tuple[Step, ...], ...]
    result: Template
    fuse: bool = True

    def nodes(self) -> int:
        """Return the number of steps."""
        return sum(len(chain) for chain in self.steps)


@dataclass(frozen=True)
class PassReport:
    """The report of one pass.

    Attributes:
        name: the name of the pass.
        before: how many steps there were before the pass; for fusion, how many actors; for items, how many items would
            be taken on the event loop.
        after: the same number after the pass.
        changes: a line for each change.
        notes: a line for each change that a reader could expect but that the pass did not make, with the reason.
    """

    name: str
    before: int
    after: int
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the lines of the report in `print(plan)`."""
        changed = "nothing to change" if not self.changes else f"{self.before} → {self.after}"
        if self.name == "validate":
            changed = f"{self.before} argument types checked"
        lines = [f"  {self.name}: {changed}"]
        for told in (self.changes, self.notes):
            lines.extend(f"    {printable(line)}" for line in told[:20])
            if len(told) > 20:
                lines.append(f"    and {len(told) - 20} more")
        return lines


# The passes whose changes in bodies `print(plan)` shows.
_SHOWN_OF_BODIES: Final = ("regions", "items")
Pass: TypeAlias = Callable[[Draft], tuple[Draft, PassReport]]


@dataclass(frozen=True)
class PlannedStep:
    """One actor of a plan: a step, or a chain of inline steps.

    Attributes:
        label: the name of the first step, unique in the plan: "fetch", "fetch#2".
        chain: the steps that the actor runs one after the other; nearly always one step.
        tail_labels: the labels of the further steps of the chain.
        bodies: the plans of the bodies of a control-flow step.
        joined: for the last of several stages of a stream that run as one: the plan of the joint body of the stages.
    """

    label: str
    chain: tuple[Step, ...]
    tail_labels: tuple[str, ...]
    bodies: tuple["Plan", ...]
    joined: "Plan | None" = None

    @property
    def run_bodies(self) -> tuple["Plan", ...]:
        """The plans of the bodies that run; without the bodies of stages that run as a part of another stage."""
        joined = () if self.joined is None else (self.joined,)
        return joined if joined or self.head.is_joined else self.bodies

    @property
    def head(self) -> Step:
        """The first step of the chain, which takes the arguments."""
        return self.chain[0]

    @property
    def source(self) -> int:
        """The number of the value that the last step of the chain produces."""
        return self.chain[-1].source


@dataclass(frozen=True, eq=False)
class Plan:
    """A graph as it will run; made by `engine.plan`. `print(plan)` shows it.

    Attributes:
        name: the name of the graph.
        parameters: the names of its parameters.
        parameter_sources: the numbers of the values of the parameters.
        steps: the steps, in topological order.
        result: the template of the result.
        captures: for a body: the values that the body takes from the enclosing graph.
        resource_sources: the numbers of the values that are resources; in a body, also of resources that the body takes
            from the enclosing graph.
        reports: the report of each pass.
        trace: the recorded steps, before the passes.
        keeps_results: whether nodes with `cache=` keep their results; False with `reuse_plans=False`.
        overwrites: for the body of a loop: the step that may overwrite the state, its first parameter; or None.
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
    keeps_results: bool = True
    overwrites: PlannedStep | None = None

    @cached_property
    def _kept_by_engines(self) -> WeakKeyDictionary[object, object]:
        """The actors that each Engine keeps for this plan; they are freed with the plan or with the Engine."""
        return WeakKeyDictionary()

    @cached_property
    def _drawn(self) -> "tuple[str, Drawing]":
        """The digest and the drawing of the planned graph."""
        from .picture import planned_drawing

        return planned_drawing(self)

    @cached_property
    def _programs_with_resources(self) -> "WeakKeyDictionary[object, dict[ChosenScheduler, Program]]":
        """For the resources of each Engine, the programs whose frames have these resources."""
        return WeakKeyDictionary()

    @cached_property
    def _programs(self) -> "dict[ChosenScheduler, Program]":
        return {}

    def _program(self, scheduler: ChosenScheduler) -> "Program":
        """Return the program of this plan for a scheduler; made once."""
        if scheduler not in self._programs:
            self._programs[scheduler] = Program(self, scheduler)
        return self._programs[scheduler]

    @property
    def _gives_stream(self) -> bool:
        """Whether the result is a stream of values."""
        return self.trace.gives_stream

    @cached_property
    def _durable(self) -> "Durable | None":
        """The `Durable` of the durable loop of the graph; None without a durable loop."""
        for planned in self.steps:
            # Only `Control` has `durable`; importing it here would be a circle.
            found: Durable | None = getattr(planned.head.callee, "durable", None)
            for durable in (found, *(body._durable for body in planned.bodies)):
                if durable is not None:
                    return durable
        return None

    @cached_property
    def _has_streams(self) -> bool:
        """Whether any value of the graph is a stream, which goes on beside the steps of a frame."""
        sources = {*self.parameter_sources, *(step.source for step in self.steps)}
        return not self.trace.streams.isdisjoint(sources)

    @property
    def scheduler_reason(self) -> str:
        """A sentence that says which scheduler "auto" selects, and why."""
        return (
            'auto: "parallel" for one call (run), where each node fires as soon as its inputs are there; '
            '"actors" for many (stream, deploy), which overlap in a pipeline'
        )

    @property
    def _all_bodies(self) -> "Iterator[Plan]":
        """The plans of all bodies that run, also of bodies inside of bodies."""
        for step in self.steps:
            for body in step.run_bodies:
                yield body
                yield from body._all_bodies

    @property
    def _chains(self) -> list[tuple[Step, ...]]:
        return [step.chain for step in self.steps]

    def _lines(self) -> list[str]:
        """Return the lines that `print(plan)` shows below the drawing."""
        size = f"{len(self.steps)} actor{'' if len(self.steps) == 1 else 's'}"
        lines = [f"plan of {printable(self.name)}: {size}"]
        lines += [line for report in self.reports for line in report.lines()]
        for body in self._all_bodies:
            told = [line for report in body.reports if report.name in _SHOWN_OF_BODIES for line in report.lines()[1:]]
            lines += [f"  in {printable(body.name)}:", *told] if told else []
        if waits := _waits_for_effects(self._chains):
            lines += ["  order of effects:", *(f"    {printable(line)}" for line in waits)]
        return [*lines, f"  {self.scheduler_reason}"]

    def __str__(self) -> str:
        from .picture import drawing_of, shown

        return "\n".join([shown(drawing_of(self.trace), "text"), "", *self._lines()])

    def _repr_html_(self) -> str:
        from html import escape

        from .picture import drawing_of, shown

        lines = "\n".join(self._lines())
        return shown(drawing_of(self.trace), "svg") + f"<pre>{escape(lines)}</pre>"


@dataclass
class Unit:
    """One step in a program, or a unit that the program adds.

    Attributes:
        index: the number of the unit; larger than the numbers of its inputs.
        step: the step; None for a unit that the program adds.
        role: "step"; "barrier", between two waves; "input", which opens a stream that was passed as an argument; or
            "result", which hands the stream that a graph returns to its reader.
        source: the number of the value that the unit produces; for an input, the number of its parameter.
        sources: the numbers of the values that the unit reads.
        slot: the slot of the only argument; -1 if there are several arguments, or only a part of a value is passed.
        args_of, kwargs_of: functions that build the arguments from the values of a frame.
        out: the slot of the value.
        reads: the slots that the unit releases when it is done.
        streams: the slots of the streams that the unit reads.
        consumers: the units that wait for this unit.
        countdown: how many units this unit waits for.
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
        name: the name of the graph.
        plan: the plan.
        scheduler: the scheduler.
        units: the steps, and the units that the program adds, such as barriers.
        is_line: whether each step has one input and one reader, so that frames need no counters.
        blank: the initial contents of the slots of a new frame, without its parameters.
        countdown: for each unit, how many units it waits for.
        readers: for each slot, how many readers it has.
        sinks: how many units have no consumers.
        slots: for each value, by its number, its slot in a frame.
        resources: the resources that frames have from the beginning, in the slots after the parameters.
        is_filled: whether `blank` has all these resources, so that new frames get them.
        result: builds the result of the graph from the values of a frame.
        result_parts: the parts of values that `result` reads.
    """

    def __init__(self, plan: Plan, scheduler: ChosenScheduler) -> None:
        self.name = plan.name
        self.plan = plan
        self.scheduler: ChosenScheduler = scheduler
        self.units = _units(plan)
        edges = data_edges(self.units)
        unit_of = {unit.source: unit.index for unit in self.units}
        for source, waits in order_edges(plan._chains).items():
            edges[unit_of[source]] |= {unit_of[one] for one in waits}
        if plan.overwrites is not None:
            last, state = unit_of[plan.overwrites.source], plan.parameter_sources[0]
            edges[last] |= {unit.index for unit in self.units[:last] if state in unit.sources}
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
        self.is_filled = not self.resources
        self.blank: tuple[Any, ...] = (None,) * (len(self.readers) - len(plan.parameter_sources))
        self.countdown = [unit.countdown for unit in self.units]
        self.sinks = sum(not unit.consumers for unit in self.units)
        # A program with one end and no unit with two inputs also has one beginning. A graph with streams is not a line,
        # because a stream goes on beside the steps.
        self.is_line = (
            self.sinks == 1
            and not plan._has_streams
            and all(unit.countdown <= 1 and not unit.reads for unit in self.units)
        )
        self.entries = tuple(unit.index for unit in self.units if not unit.countdown)
        # A stream is handed to its reader by the "result" unit, long before the frame ends, so no result is built here.
        result = Constant(None) if plan._gives_stream else plan.result
        self.result: Callable[[Values], Any] = builder(result, self.slots)
        self.result_parts = self.parts(reads(result))

    def parts(self, read: Iterable[Read]) -> tuple[Part, ...]:
        """Return the slots that reads read, and the ways from the values there to the parts that are read."""
        return tuple((self.slots[one.source], one.path) for one in read)

    def fill(self, resources: Iterable[Any]) -> None:
        """Give these resources to all frames that begin from now on."""
        values = tuple(resources)
        self.blank = (*values, *self.blank[len(values) :])
        self.is_filled = True

    def empty(self) -> None:
        """Forget the resources, so that this program does not keep them alive."""
        self.blank = (None,) * len(self.blank)
        self.is_filled = False

    def _lay_out(self) -> None:
        """Give each value a slot.

        A step that is the only reader of a slot writes its own value into that slot. So a chain needs one slot in all,
        and its steps release no slots.
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
            self._new_slot(source, 0)  # never released: a frame has its resources to its end
        for unit in self.units:
            if unit.step is not None:
                self._place(unit, unit.step, counts)
            elif unit.role == "input":
                self._place_input(unit, counts)
            elif unit.role == "result":
                unit.slot = unit.out = self.slots[unit.sources[0]]
                unit.reads = (unit.out,)
            else:
                unit.out = self._new_slot(-1 - unit.index, 1)  # a barrier has no value: its slot is released at once
                unit.reads = (unit.out,)

    def _place_input(self, unit: Unit, counts: dict[int, int]) -> None:
        """Let an "input" unit replace the argument by a reader of the stream, in the same slot."""
        assert unit.source is not None
        unit.slot = unit.out = self.slots[unit.source]
        if not counts[unit.source]:  # no step reads the stream: the unit releases its slot, which closes the stream
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
        if taken_over is None:
            slot = self._new_slot(step.source, count or 1)
        else:
            slot = self.slots[step.source] = self.slots[taken_over]
            self.readers[slot] = count or 1
        if not count:  # no step reads the value: this unit itself releases it at once
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


def data_edges(units: list[Unit]) -> dict[int, set[int]]:
    """Return for each unit the units whose values it reads."""
    producer = {unit.source: unit.index for unit in units}
    return {unit.index: {producer[source] for source in unit.sources if source in producer} for unit in units}


def _waits_for_effects(chains: Sequence[Sequence[Step]]) -> list[str]:
    """Return lines that say how many steps wait because effects are ordered."""
    edges = order_edges(chains)
    lines: list[str] = []
    for effect in (chain[0] for chain in chains if chain[0].is_effect):
        named = f"{effect.callee.name} ({effect.location})"
        before = len(edges.get(effect.source, ()))
        after = sum(effect.source in waits for waits in edges.values())
        if before:
            lines.append(f"{named} waits for {before} step{'s' * (before > 1)}")
        if after:
            lines.append(f"{after} step{'s wait' if after > 1 else ' waits'} for {named}")
    return lines


def _add_barriers(units: list[Unit], edges: dict[int, set[int]]) -> None:
    """Put a barrier between every two levels: an additional unit, since edges between all steps would be quadratic."""
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
        program: the program, which all its frames share.
        actors: the actors, one for each unit of the program.
        entries: the actors in which a frame begins, because they wait for no other actor.
    """

    program: Program
    actors: tuple[NodeActor, ...]
    entries: tuple[NodeActor, ...]

    @cached_property
    def chain(self) -> NodeActor | None:
        """The only actor of a graph that consists of one chain of plain functions; None for any other graph."""
        actor = self.actors[0] if len(self.actors) == 1 else None
        return actor if actor is not None and actor.mode == INLINE and actor.ends_line else None
