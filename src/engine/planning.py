"""Plan: what a graph will do, after the passes; immutable and printable."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

from ..telemetry import logs
from ..telemetry.text import printable
from . import passes
from .node import Node
from .options import ChosenScheduler
from .passes import Draft, PassReport, check_stream_limits
from .program import Program
from .tracing.template import Template, reads
from .tracing.tracer import Step, Trace


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
    bodies: "tuple[Plan, ...]"

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
    def _programs_with_resources(self) -> WeakKeyDictionary[object, dict[ChosenScheduler, Program]]:
        """The programs whose frames have the resources of an Engine, by those."""
        return WeakKeyDictionary()

    @cached_property
    def _programs(self) -> dict[ChosenScheduler, Program]:
        return {}

    def _program(self, scheduler: ChosenScheduler) -> Program:
        """Return what frames of this plan need to run under a scheduler; made once.

        Raises:
            PlanError: under this one streams would wait for each other.
        """
        if scheduler not in self._programs:
            if scheduler in ("sequential", "wave"):
                check_stream_limits(self.name, (one for step in self.steps for one in step.chain), in_order=True)
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


def make_plan(
    trace: Trace,
    *,
    run_passes: tuple[passes.Pass, ...] | None = None,
    without: Collection[passes.Pass] = (),
    resources: frozenset[int] = frozenset(),
) -> Plan:
    """Run the passes over a trace.

    Args:
        trace: what was recorded.
        run_passes: which; by default all of them, and those that the executors of its nodes bring.
        without: passes that are left out.
        resources: of a body, the numbers of the resources of the graph around it.

    Raises:
        PlanError: the graph cannot work, e.g. a value's type does not fit the parameter it is passed to.
    """
    shared = _resource_sources(trace, resources)
    draft = Draft(
        trace.name,
        (*trace.parameter_sources, *trace.resources.values()),
        shared,
        (*trace.annotations, *(opening.resource.result_annotation() for opening in trace.resources)),
        tuple((step,) for step in trace.steps),
        trace.result,
    )
    reports: list[PassReport] = []
    for run_pass in _all_passes(trace) if run_passes is None else run_passes:
        if run_pass in without:
            continue
        draft, report = run_pass(draft)
        reports.append(report)
        if run_pass is passes.eliminate_dead_nodes and report.changes:
            logs.warning(
                "plan.dead_nodes", graph=trace.name, changes=list(report.changes),
                remedy="return or pass on the result; a node that is called for its effect is declared effectful=True",
            )  # fmt: skip
    labels = _Labels()
    steps = tuple(
        PlannedStep(
            label,
            chain,
            tuple(labels.next(step.callee.name) for step in chain[1:]),
            tuple(
                make_plan(body, run_passes=run_passes, without=without, resources=shared) for body in chain[0].bodies
            ),
        )
        for chain in draft.steps
        for label in [labels.next(chain[0].callee.name)]
    )
    return Plan(
        trace.name,
        trace.parameters,
        trace.parameter_sources,
        steps,
        draft.result,
        trace.captures,
        shared,
        tuple(reports),
        trace,
    )


def _all_passes(trace: Trace) -> tuple[passes.Pass, ...]:
    callees = (step.callee for step in trace.steps)
    executors = (callee.runs_in for callee in callees if isinstance(callee, Node))
    brought = dict.fromkeys(one for executor in executors if executor is not None for one in executor.passes)
    return (*passes.ALL, *brought)


def _resource_sources(trace: Trace, around: frozenset[int]) -> frozenset[int]:
    """Return the numbers of the values that are resources, given those of the graph around a body."""
    taken = (source for source, template in trace.captured if {read.source for read in reads(template)} <= around)
    return frozenset([*trace.resources.values(), *taken])


class _Labels:
    """Makes the names of steps unique: fetch, fetch#2, fetch#3."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, name: str) -> str:
        self._seen[name] += 1
        count = self._seen[name]
        return name if count == 1 else f"{name}#{count}"
