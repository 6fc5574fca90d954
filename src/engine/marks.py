"""The way of marks through a plan: which steps they pass, what has state there, and which plans are refused."""

import functools
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from .._errors import PlanError
from .control import Control
from .instances import instance_key, stateful_nodes
from .node import Node, is_node
from .program import Plan, PlannedStep
from .tracing.template import reads
from .tracing.tracer import Step

# A mark is put into the stream of the source, between two records, and passes each step up to the reader of the stream.
# What has state on the way is asked for it when all values before the mark have left the step and none behind it has
# entered. So all states together are those of one moment of the stream: Flink's aligned snapshots (Carbone et al.,
# "Lightweight Asynchronous Snapshots for Distributed Dataflows", 2015).


@dataclass
class Stop:
    """A step that marks pass.

    Attributes:
        name: the label of the step, or the parameter that the source is.
        is_source: whether the marks begin here.
        keeps_iterator: whether what the step makes for the call, an iterator or a fold, has `state` and `restore`.
        nodes: the nodes of classes that have state here, also those in bodies, by the names of their states.
        mixed: of a source before a mix: the name of the mix, and which of its sources this is.
        settings: the settings that decide what comes out, for the fingerprint.
    """

    name: str
    is_source: bool = False
    keeps_iterator: bool = False
    nodes: dict[str, Node[..., Any]] = field(default_factory=dict["str", "Node[..., Any]"])
    mixed: tuple[str, int] | None = None
    settings: dict[str, Any] = field(default_factory=dict["str", Any])


@dataclass(frozen=True)
class Way:
    """The steps that marks pass, by name, and what the steps before and behind do not matter for.

    Attributes:
        graph: the name of the graph.
        stops: the steps, by the number of the value that they give, or, of a parameter, that it is.
        parameters: the parameters that are sources.
    """

    graph: str
    stops: Mapping[int, Stop]
    parameters: tuple[str, ...]

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be the same where a cut is gone on from, without what the source itself knows."""
        stops = self.stops.values()
        return {
            "graph": self.graph,
            "nodes": {stop.name: stop.settings for stop in stops},
            "order": [stop.name for stop in stops],
            "states": sorted(name for stop in stops for name in stop.nodes),
        }


def way_of(plan: Plan, *, has_state_behind: bool) -> Way:
    """Return the way of the marks through a plan.

    Args:
        plan: the plan of a graph that gives a stream, or that has a `fold`.
        has_state_behind: whether the reader has state, too.

    Raises:
        PlanError: what comes after a restart would not be what comes without one; the message says how to change that.
    """
    return _Surveyor(plan).way(has_state_behind=has_state_behind)


def has_state(value: object) -> bool:
    """Whether an object, or the instances of a class, can tell and take its state, without waiting."""
    methods = [getattr(value, name, None) for name in ("state", "restore")]
    return all(callable(one) and not inspect.iscoroutinefunction(one) for one in methods)


class _Surveyor:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps = {step.source: step for step in plan.steps}
        self._streams = {
            *plan.trace.streams,
            *(step.source for step in plan.steps if _kind(step) == "split"),
        }
        self._parameters = dict(zip(plan.parameter_sources, plan.parameters, strict=True))
        self._stops: dict[int, Stop] = {}
        self._calls = Counter(instance_key(node) for node in stateful_nodes(plan))
        self._state_behind = False

    def way(self, *, has_state_behind: bool) -> Way:
        self._state_behind = has_state_behind
        plan = self._plan
        if plan._gives_stream:
            [end] = {read.source for read in reads(plan.result)}
        else:
            folds = [step.source for step in plan.steps if _kind(step) == "fold"]
            if len(folds) != 1:
                raise PlanError(
                    f"graph {plan.name!r} has {len(folds)} ps.fold, and checkpoint= of engine.run is for graphs with "
                    "one: a graph that returns a stream is read with engine.stream(call, checkpoint=)"
                )
            [end] = folds
        self._follow(end)
        self._check_branches()
        in_order = dict(reversed(self._stops.items()))
        return Way(plan.name, in_order, tuple(self._parameters[one] for one in in_order if one in self._parameters))

    def _follow(self, number: int) -> None:
        """Note the step that gives a value, and those before it."""
        if number not in self._steps:
            self._stops[number] = Stop(self._argument(number), is_source=True, keeps_iterator=True)
            return
        step = self._steps[number]
        self._stops[number] = stop = self._stop(step)
        inputs = self._inputs(step)
        if not inputs or _iterator_class(step, "mixes"):
            stop.is_source = True
            self._check_source(step, stop)
            for place, one in enumerate(inputs):
                self._note_mixed(step.label, place, one)
        else:
            self._follow(inputs[0] if len(inputs) == 1 else self._joined(step, inputs))

    def _argument(self, number: int) -> str:
        """Return the name of a parameter, which no step has."""
        name = self._parameters[number]
        return f"{name} (argument)" if any(step.label == name for step in self._plan.steps) else name

    def _inputs(self, step: PlannedStep) -> list[int]:
        return list(dict.fromkeys(read.source for read in step.head.reads() if read.source in self._streams))

    def _joined(self, step: PlannedStep, inputs: list[int]) -> int:
        """Note the branches that a step reads together; returns the number of the split that all come from."""
        splits = {self._branch(step, number) for number in inputs}
        while len(splits) > 1 and None not in splits:
            inner = max(cast("set[int]", splits))  # one inside of a branch of another was made after it
            self._stops[inner] = self._stop(self._steps[inner])
            splits = splits - {inner} | {self._branch(step, *self._inputs(self._steps[inner]))}
        may_join = _kind(step) == "map_each" or _iterator_class(step, "takes_turns")
        if len(splits) != 1 or None in splits or not may_join:
            raise self._refused(
                step,
                "it reads several streams, and marks of checkpoint= can be told apart only where these are the "
                "branches of one data.split, with one value for each value on every branch, read in step with "
                "ps.map_each(fn, a, b) or data.merged('turns'). Make one stream of several sources with data.mix",
            )
        [split] = splits
        assert split is not None
        return split

    def _branch(self, join: PlannedStep, number: int) -> int | None:
        """Note the steps of one branch before a join; returns the number of its split; None if it does not fit."""
        while number in self._steps:
            step = self._steps[number]
            if _kind(step) == "split":
                return number
            self._stops[number] = self._stop(step)
            inputs = self._inputs(step)
            is_one_to_one = (
                _kind(step) == "branch"
                or (_kind(step) == "map_each" and _control(step).on_error != "skip")
                or _iterator_class(step, "is_one_to_one")
            )
            if not inputs or not is_one_to_one:
                return None
            number = inputs[0] if len(inputs) == 1 else self._joined(step, inputs)
        return None

    def _check_branches(self) -> None:
        for step in self._plan.steps:
            if _kind(step) == "branch" and step.source not in self._stops and self._inputs(step)[0] in self._stops:
                raise self._refused(
                    step,
                    "a branch of this split does not lead to the result, so a mark of checkpoint= does not come back "
                    "from there; join the branches with ps.map_each(fn, a, b)",
                )

    # What has state.

    def _stop(self, step: PlannedStep) -> Stop:
        stop = Stop(step.label)
        callee = step.head.callee
        if is_node(callee):
            stop.settings = _settings(callee)
            if _iterator_class(step, "state"):
                stop.keeps_iterator = True
            elif _iterator_class(step, "__anext__"):
                raise self._refused(
                    step,
                    "it gives values in the order in which they arrive, which is another one after a restart; say "
                    "data.merged('turns'), or data.mix",
                )
            elif callee.template is None and self._inputs(step) and not callee.policy.stateless:
                raise self._refused(
                    step,
                    "it is a generator function that reads a stream, and may keep something between two values that "
                    "nothing can store; say stateless=True if it does not, or make it a class with state() and "
                    "restore(state)",
                )
            self._check_node(step.head, callee, step.label, stop, needs_order=False)
        else:
            control = _control(step)
            stop.keeps_iterator = control.kind == "fold"
            overlap = control.kind == "map_each" and control.limit > 1
            for body in step.bodies:
                stop.settings.setdefault("bodies", []).append(self._body(body, step.label, stop, overlap=overlap))
        self._check_batches(step, stop)
        return stop

    def _body(self, body: Plan, path: str, stop: Stop, *, overlap: bool, is_nested: bool = False) -> list[Any]:
        names: list[Any] = []
        for step in body.steps:
            for one, label in zip(step.chain, (step.label, *step.tail_labels), strict=True):
                names.append(label)
                is_overlapping = overlap or (not is_node(one.callee) and _control(step).limit > 1)
                inside = [
                    self._body(inner, f"{path}/{label}", stop, overlap=is_overlapping, is_nested=True)
                    for inner in step.bodies
                ]
                if not is_node(one.callee):
                    names += inside  # those of a node, its failover for instance, are its own affair
                    continue
                given = {other.source for whole in body.steps for other in whole.chain}
                is_behind = is_nested or any(read.source in given for read in one.reads())
                self._check_node(one, one.callee, f"{path}/{label}", stop, needs_order=overlap and is_behind)
        return names

    def _check_node(self, step: Step, node: Node[..., Any], name: str, stop: Stop, *, needs_order: bool) -> None:
        policy = node.policy
        if node.template is None or node.origin._replacement is not None or policy.stateless:
            return
        kind = type(node.template)
        why = ""
        if node.make_loop is not None:
            why = (
                "it is a class that owns its loop, which may hold work that no mark can see; write a class with "
                "__call__, or say stateless=True if it keeps nothing between two items"
            )
        elif not has_state(kind):
            why = (
                f"class {kind.__name__} keeps state that would be lost: give it state(), which returns what is to be "
                "stored, and restore(state), each a plain `def`; or say @ps.node(stateless=True) if it keeps nothing "
                "between two items"
            )
        elif policy.runs_on == "process":
            why = "its instances are in worker processes, one in each, and none has seen all items; run it in a thread"
        elif policy.restart_on:
            why = "a crash replaces its instance, and a fresh one would be stored as the old one; leave out restart_on="
        elif self._calls[instance_key(node)] > 1:
            why = "one instance is called at several places, and a mark is at one of them; use an instance for each"
        elif needs_order and not policy.ordered:
            why = (
                "it has state, and in this map_each items overtake each other before they come to it; say "
                "@ps.node(ordered=True) or, inside of cond, switch, while_loop and failover=, "
                "ps.map_each(..., concurrency=1); or give it a map_each of its own"
            )
        if why:
            raise self._refused_at(step, node.name, why)
        stop.nodes[name] = node

    def _check_source(self, step: PlannedStep, stop: Stop) -> None:
        if not stop.keeps_iterator and not stop.nodes:
            raise self._refused(
                step,
                "it is the source of the stream, and would begin at its first record again; take data.order, or a "
                "class with state() and restore(state)",
            )
        if step.bodies:
            raise self._refused(step, "a failover of the source has records of its own; leave out failover=")

    def _note_mixed(self, mix: str, place: int, number: int) -> None:
        """Note a source of a mix, which goes on by the number of records that the mix has taken from it."""
        while number in self._steps:
            step = self._steps[number]
            inputs = self._inputs(step)
            if not inputs and _iterator_class(step, "after"):
                self._stops[number] = Stop(step.label, mixed=(mix, place))
                return
            is_one_to_one = _iterator_class(step, "is_one_to_one") or (
                _kind(step) == "map_each" and _control(step).on_error != "skip" and not self._stop(step).nodes
            )
            if len(inputs) != 1 or not is_one_to_one:
                raise self._refused(
                    step,
                    "it stands before data.mix, which goes on by the number of records that it has taken from each "
                    "data.order: only data.read and ps.map_each without state may stand in between; put it behind",
                )
            [number] = inputs
        self._stops[number] = Stop(self._argument(number), mixed=(mix, place))

    def _check_batches(self, step: PlannedStep, stop: Stop) -> None:
        """Refuse batches of what happens to be there before state; the way is followed from its end."""
        self._state_behind |= bool(stop.nodes) or _kind(step) == "fold"
        if not self._state_behind:
            return
        for node, one in _nodes(step):
            if is_batched(node) and not node.policy.stateless:
                raise self._refused_at(
                    one,
                    node.name,
                    "batch= makes batches of what is there, whose results differ in rounding from run to run, and "
                    "there is state behind it; say stateless=True if results up to rounding will do, or make batches "
                    "with data.batched",
                )

    def _refused(self, step: PlannedStep, why: str) -> PlanError:
        return self._refused_at(step.head, step.head.callee.name, why)

    def _refused_at(self, step: Step, name: str, why: str) -> PlanError:
        return PlanError(
            f"{step.location}: in graph {self._plan.name!r}, {name!r} cannot be used with checkpoint=: {why}"
        )


def is_batched(node: Node[..., Any]) -> bool:
    """Whether a node gathers items of many calls."""
    is_of_a_function = node.make_loop is not None and node.template is None
    return is_of_a_function or getattr(node.executor, "batch", None) is not None


def _nodes(step: PlannedStep) -> Iterator[tuple[Node[..., Any], Step]]:
    for one in step.chain:
        if is_node(one.callee):
            yield one.callee, one
    for body in step.bodies:
        for inner in body.steps:
            yield from _nodes(inner)


def _kind(step: PlannedStep) -> str:
    callee = step.head.callee
    return callee.kind if isinstance(callee, Control) else ""


def _control(step: PlannedStep) -> Control:
    assert isinstance(step.head.callee, Control)
    return step.head.callee


def _iterator_class(step: PlannedStep, attribute: str) -> Any:
    """Return an attribute of the class of iterators that a step makes, such as a stage of data; None without one."""
    callee = step.head.callee
    fn: Any = callee.fn if is_node(callee) else None
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, attribute, None) if inspect.isclass(fn) else None


def _settings(node: Node[..., Any]) -> dict[str, Any]:
    """Return the settings of a stage: those that are numbers or text."""
    keywords: Mapping[str, Any] = getattr(node.fn, "keywords", {})  # of a partial
    return {name: value for name, value in keywords.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(one) for one in value)  # pyright: ignore[reportUnknownVariableType]
    return value is None or isinstance(value, bool | int | float | str)
