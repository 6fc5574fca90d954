"""The path of barriers through a plan: the steps that they pass, the states on it, and the plans that are refused."""

import dataclasses
import functools
import re
import types
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from .._errors import PlanError
from .control import Control
from .instances import instance_key, stateful_nodes
from .node import Node, is_node
from .program import Plan, PlannedStep
from .stages import StageIterator, StageRole, has_state, role_of
from .tracing.annotations import unwrapped
from .tracing.template import reads
from .tracing.tracer import Step

# A barrier is put into the stream of the source, between two records, and passes each step up to the reader of the
# stream. The state of a step is taken when all values before the barrier have left the step and no value behind the
# barrier has entered. So all states together belong to one moment of the stream: Flink's aligned snapshots
# (Carbone et al., "Lightweight Asynchronous Snapshots for Distributed Dataflows", 2015).


@dataclass
class CheckpointStep:
    """A step that barriers pass.

    Attributes:
        name: the label of the step, or the name of the parameter that is the source.
        is_source: whether the barriers begin here.
        keeps_iterator: whether the object that the step makes for the call, such as an iterator or a fold, has `state`
            and `restore`.
        holders: the objects with state here, by the names of the states: nodes of classes, also in bodies; other
            objects that are called here, or whose methods are called; and `places`.
        places: the function of `data.to_device`, which places batches.
        placed: the step whose function places the values that come here; None without such a step.
        mixed: for a source before a mix: the name of the mix, and the number of this source in the mix.
        is_between: whether the step is a `map_each` between such a source and the mix, with an item for each record.
        settings: the settings that decide which values come out, for the fingerprint.
        role: the role of the stage; the default role for a step that is not a stage.
        joined: the stages before this step that run as a part of it.
    """

    name: str
    is_source: bool = False
    keeps_iterator: bool = False
    holders: dict[str, Any] = field(default_factory=dict[str, Any])
    places: Any = None
    placed: "CheckpointStep | None" = None
    mixed: tuple[str, int] | None = None
    is_between: bool = False
    settings: dict[str, Any] = field(default_factory=dict["str", Any])
    role: StageRole = StageIterator.role
    joined: tuple["CheckpointStep", ...] = ()

    @property
    def called(self) -> list[str]:
        """The names of the states of the objects that are called here."""
        return [name for name, one in self.holders.items() if one is not self.places]

    @property
    def place_name(self) -> str:
        """The name of the state of the function that places batches."""
        return f"{self.name}/place"

    @property
    def gives_records(self) -> bool:
        """Whether the step is a source: the source of the call, or a source before its mix."""
        return self.is_source or (self.mixed is not None and not self.is_between)


@dataclass(frozen=True)
class CheckpointPath:
    """The steps that barriers pass. Other steps may change between two runs.

    Attributes:
        graph: the name of the graph.
        stops: the steps, by the number of the value that a step gives; a parameter, by the number of its value.
        parameters: the parameters that are sources.
        placed: the step that places the values that come to the end; None without such a step.
    """

    graph: str
    stops: Mapping[int, CheckpointStep]
    parameters: tuple[str, ...]
    placed: CheckpointStep | None

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that must be the same after a restart, without the fingerprints of the sources."""
        stops = [stop for stop in self.stops.values() if not stop.is_between]
        return {
            "graph": self.graph,
            "nodes": {stop.name: stop.settings for stop in stops},
            "order": [stop.name for stop in stops],
            "states": sorted(name for stop in stops for name in stop.called),
            "optional": [stop.name for stop in stops if stop.role.may_be_absent],
        }

    @property
    def sizes(self) -> set[str]:
        """The paths, in a fingerprint, of the settings that may differ with `on_mismatch="resize"`."""
        return {f"nodes.{stop.name}.{setting}" for stop in self.stops.values() for setting in stop.role.may_change}


def checkpoint_path(plan: Plan, *, has_state_behind: bool) -> CheckpointPath:
    """Return the path of the barriers through a plan.

    Args:
        plan: the plan of a graph that gives a stream, or that has a `fold`.
        has_state_behind: whether the reader has state, too.

    Raises:
        PlanError: the values after a restart would differ from the values without a restart; the message says how to
            change the graph.
    """
    return _PathBuilder(plan).path(has_state_behind=has_state_behind)


class _Around(NamedTuple):
    """Facts around a step in a body: whether items overlap, steps come before it, and a cache may skip it."""

    overlap: bool = False
    is_behind: bool = False
    is_cached: bool = False


def _user_code(node: Node[..., Any]) -> dict[str, Any]:
    """Return all user functions that a step calls, by the option that gave them; "" is the function of the node.

    Bodies of control flow and a failover are not among them: they have nodes of their own. Nor is a source, which has
    its own `state()`.
    """
    policy = node.policy
    fn: Any = node.fn
    settings, is_stage = _settings(fn), issubclass(_iterator_class(fn) or object, StageIterator)
    is_function = not is_stage and node.template is None and node.origin._replacement is None
    batch = node._runs_on._batch
    return {
        "": node if is_function else None,
        **{name: settings.get(name) for name in role_of(fn).calls},
        "fallback": policy.fallback,
        "wait": getattr(policy.retry, "wait", None),
        "key": getattr(policy.cache, "key", None) or getattr(node.template, "_penstock_key", None),  # or of a RateLimit
        "size": getattr(policy.cache, "size", None),
        "cost": getattr(batch, "cost", None),
    }


def _holders(called: Any) -> Iterator[Any]:
    """Yield the objects with state that a call of `called` would change, as far as this can be seen.

    An instance of a Python class has state, also as the owner of a method, unless its class is a frozen dataclass. The
    variables that a function closes over are not examined. Of extension types, objects of JAX have no state; iterators
    and random generators have state. Among arguments and fields that are only passed along, iterators, random
    generators and objects with `state()` count.
    """
    if is_node(called):
        if called.policy.stateless or called._runs_on._is_compiled:  # a compiled function keeps nothing
            return
        called = called.fn if called.bound_to is not None else getattr(called.fn, "_penstock_of_list", called.fn)
    owner: Any = getattr(called, "__self__", None)
    owner = called if owner is None or isinstance(owner, types.ModuleType) else owner
    cls = cast("Any", type(owner))
    parts: list[Any] = []
    if isinstance(called, tuple | list | dict):
        parts = list(cast("Any", called.values() if isinstance(called, dict) else called))[:_MOST_PARTS]
    elif isinstance(called, functools.partial):
        parts = [called.func, *called.args, *called.keywords.values()]
    elif getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
        parts = [getattr(owner, one.name, None) for one in dataclasses.fields(cls)]
    elif not isinstance(owner, type) and not _is_stateless(cls):
        yield owner
    for part in parts:
        is_random = f"{type(part).__module__}.".startswith(("numpy.random.", "random."))
        if callable(part) or isinstance(part, tuple | list | dict | Iterator) or is_random or has_state(part):
            yield from _holders(part)


# A longer list holds data, not functions.
_MOST_PARTS: Final = 100


def _key_of(holder: Any) -> Any:
    return instance_key(holder) if is_node(holder) else id(holder)


def _is_stateless(cls: type[Any]) -> bool:
    package = cls.__module__.partition(".")[0]
    policy = getattr(cls.__call__, "_penstock_policy", None)  # of a stateful node
    if package in ("jax", "jaxlib") or (policy is not None and policy.stateless):
        return True
    is_python = any(isinstance(one, types.FunctionType) for base in cls.__mro__ for one in vars(base).values())
    return not (is_python or hasattr(cls, "__next__") or cls.__module__.startswith("numpy.random"))


class _PathBuilder:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps = {step.source: step for step in plan.steps}
        self._streams = {*plan.trace.streams, *(step.source for step in plan.steps if _kind(step) == "split")}
        self._parameters = dict(zip(plan.parameter_sources, plan.parameters, strict=True))
        self._stops: dict[int, CheckpointStep] = {}
        # How often each object with state is called, anywhere in the plan.
        self._calls = Counter(map(_key_of, stateful_nodes(plan)))
        for node in (node for step in plan.steps for node, _ in _nodes(step)):
            self._calls.update(_key_of(holder) for called in _user_code(node).values() for holder in _holders(called))
        self._state_behind = False

    def path(self, *, has_state_behind: bool) -> CheckpointPath:
        self._state_behind = has_state_behind
        plan = self._plan
        if plan._gives_stream:
            [end] = {read.source for read in reads(plan.result)}
        else:
            folds = [step.source for step in plan.steps if _kind(step) == "fold"]
            if len(folds) != 1:
                raise PlanError(
                    f"graph {plan.name!r} has {len(folds)} ps.fold, and checkpoint= of engine.run is for graphs with "
                    "one fold: to read a graph that returns a stream, write engine.stream(call, checkpoint=)"
                )
            [end] = folds
        self._follow(end)
        self._check_branches()
        in_order = dict(reversed(self._stops.items()))
        for number, stop in in_order.items():
            stop.placed = self._placed(number)
            stop.joined = self._joined_stages(number)
        sources = tuple(self._parameters[one] for one in in_order if one in self._parameters)
        last = self._stops[end]
        return CheckpointPath(plan.name, in_order, sources, last if last.places is not None else last.placed)

    def _joined_stages(self, number: int) -> tuple[CheckpointStep, ...]:
        step = self._steps.get(number)
        if step is None or not (step.joined or step.head.is_joined):
            return ()
        [before] = self._inputs(step)
        is_joined = before in self._steps and self._steps[before].head.is_joined
        return (*self._joined_stages(before), self._stops[before]) if is_joined else ()

    def _follow(self, number: int) -> None:
        """Note the step that gives a value, and the steps before it."""
        if number not in self._steps:
            self._stops[number] = CheckpointStep(self._argument(number), is_source=True, keeps_iterator=True)
            return
        step = self._steps[number]
        self._stops[number] = stop = self._stop(step)
        inputs = self._inputs(step)
        if not inputs or _role(step).gives == "mix":
            stop.is_source = True
            if not stop.keeps_iterator and step.label not in stop.holders:
                raise self._refused(
                    step,
                    "it is the source of the stream, and would begin at its first record again after a restart; take "
                    "data.order, or a class with state() and restore(state)",
                )
            if step.bodies:
                raise self._refused(step, "a failover of the source has records of its own; leave out failover=")
            for place, one in enumerate(inputs):
                self._note_mixed(step.label, place, one)
        else:
            self._follow(inputs[0] if len(inputs) == 1 else self._joined(step, inputs))

    def _argument(self, number: int) -> str:
        """Return a name for a parameter that differs from the labels of all steps."""
        name = self._parameters[number]
        return f"{name} (argument)" if any(step.label == name for step in self._plan.steps) else name

    def _inputs(self, step: PlannedStep) -> list[int]:
        return list(dict.fromkeys(read.source for read in step.head.reads() if read.source in self._streams))

    def _joined(self, step: PlannedStep, inputs: list[int]) -> int:
        """Note the branches that a step reads together. Returns the number of the split that all branches come from."""
        splits = {self._branch(step, number) for number in inputs}
        while len(splits) > 1 and None not in splits:
            inner = max(cast("set[int]", splits))  # a split inside a branch of another split comes after that split
            self._stops[inner] = self._stop(self._steps[inner])
            splits = splits - {inner} | {self._branch(step, *self._inputs(self._steps[inner]))}
        may_join = _kind(step) == "map_each" or _role(step).gives == "in_turns"
        if len(splits) != 1 or None in splits or not may_join:
            raise self._refused(
                step,
                "it reads several streams. With checkpoint=, these must be the branches of one data.split, with "
                "one value for each value on every branch, read in step with ps.map_each(fn, a, b) or "
                "data.merged('round_robin'). To make one stream of several sources, write data.mix",
            )
        [split] = splits
        assert split is not None
        return split

    def _branch(self, join: PlannedStep, number: int) -> int | None:
        """Note the steps of one branch before a join. Returns the number of its split; None if one does not fit."""
        while number in self._steps:
            step = self._steps[number]
            if _kind(step) == "split":
                return number
            self._stops[number] = self._stop(step)
            inputs = self._inputs(step)
            is_one_to_one = (
                _kind(step) == "branch"
                or (_kind(step) == "map_each" and _control(step).on_error != "skip")
                or _role(step).gives == "one_to_one"
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
                    "a branch of this split does not lead to the result, so the barriers of checkpoint= do not come "
                    "back from that branch; join the branches with ps.map_each(fn, a, b)",
                )

    def _placed(self, number: int) -> CheckpointStep | None:
        """Return the last step that places batches, among the steps before the step that gives a value."""
        for one in self._inputs(self._steps[number]) if number in self._steps else ():
            stop = self._stops.get(one)
            found = stop if stop is not None and stop.places is not None else self._placed(one)
            if found is not None:
                return found
        return None

    # Objects with state.

    def _stop(self, step: PlannedStep) -> CheckpointStep:
        stop = CheckpointStep(step.label, role=_role(step))
        callee = step.head.callee
        if is_node(callee):
            stop.settings = {name: value for name, value in _settings(callee.fn).items() if _is_plain(value)}
            self._check_node(step.head, callee, step.label, stop, _Around())
            kind = _iterator_class(callee.fn)
            if kind is not None and hasattr(kind, "state") and _role(step).gives != "arrival":
                stop.keeps_iterator = True
            elif kind is not None:
                raise self._refused(
                    step,
                    "it gives values in the order in which they arrive, and this order changes after a restart; write "
                    "data.merged('round_robin'), or data.mix",
                )
            elif (
                callee.template is None
                and self._inputs(step)
                and not (callee.policy.stateless or step.label in stop.holders)
            ):
                raise self._refused(
                    step,
                    "it is a generator function that reads a stream, and may keep something between two values that "
                    "nothing can store; say stateless=True if it does not, or make it a class with state() and "
                    "restore(state)",
                )
        else:
            control = _control(step)
            stop.keeps_iterator = control.kind in ("fold", "map_each")  # both count items from 0, across restarts
            around = _Around(overlap=control.kind == "map_each" and control.limit > 1)
            for body in step.bodies:
                stop.settings.setdefault("bodies", []).append(self._body(body, step.label, stop, around))
            functions = [node.fn for node, _ in _nodes(step)]
            stop.places = next((fn for fn in functions if role_of(fn).gives == "placed"), None)
            if stop.places is not None:
                stop.holders[stop.place_name] = stop.places
        self._check_batches(step, stop)
        return stop

    def _body(self, body: Plan, path: str, stop: CheckpointStep, around: _Around) -> list[Any]:
        names: list[Any] = []
        for step in body.steps:
            for one, label in zip(step.chain, (step.label, *step.tail_labels), strict=True):
                names.append(label)
                callee = one.callee
                nested = _Around(
                    around.overlap or (not is_node(callee) and _control(step).limit > 1),
                    is_behind=True,
                    is_cached=around.is_cached or (is_node(callee) and callee.policy.cache is not None),
                )
                inside = [self._body(inner, f"{path}/{label}", stop, nested) for inner in step.bodies]
                if not is_node(callee):
                    names += inside  # the bodies of a node, such as its failover, are not part of the names
                    continue
                given = {other.source for whole in body.steps for other in whole.chain}
                is_behind = around.is_behind or any(read.source in given for read in one.reads())
                self._check_node(one, callee, f"{path}/{label}", stop, around._replace(is_behind=is_behind))
        return names

    def _check_node(self, step: Step, node: Node[..., Any], name: str, stop: CheckpointStep, around: _Around) -> None:
        """Note the objects with state where a step calls a node, or refuse the plan."""
        found = [
            (name + (f"/{option}" if option else "") + (f"#{number}" if number > 1 else ""), option, holder)
            for option, called in _user_code(node).items()
            for number, holder in enumerate(_holders(called), 1)
        ]
        if node.template is not None and node.origin._replacement is None and not node.policy.stateless:
            found.append((name, "", node))
        for place, option, holder in found:
            why = self._why_not(node, option, holder, around)
            if why:
                raise self._refused_at(step, node.name, why)
            stop.holders[place] = holder

    def _why_not(self, node: Node[..., Any], option: str, holder: Any, around: _Around) -> str:
        """Return why the state of an object cannot be saved; "" if it can."""
        policy, is_instance = node.policy, holder is node
        kind = cast("Any", type(node.template if is_instance else holder))
        if is_instance and node._runs_on._runs_loop:
            return (
                "it is an actor that owns its loop, which may hold work that no barrier can see; write a class with "
                "__call__, or say stateless=True if it keeps nothing between two items"
            )
        if not has_state(kind if is_instance else holder):
            remedy = f"{option}=ps.node(stateless=True)(...)" if option else "@ps.node(stateless=True)"
            return (
                f"an object of class {kind.__qualname__} is called {f'as {option}=' if option else 'by this node'}, "
                "and the state that it keeps between two calls would be lost: give the class state(), which returns "
                f"the state to store, and restore(state), each a plain `def`; or write a function; or write {remedy} "
                "if the object keeps no state between two calls"
            )
        if not (node.runs_on._is_here or option or node.runs_on._runs_loop):
            return "it has state, and none of its copies in worker processes sees all items; run it in a thread"
        if is_instance and policy.restart_on:
            return "a crash replaces it, and the fresh instance would be stored as the old one; leave out restart_on="
        if around.is_cached or (policy.cache is not None and option != "key"):
            return (
                "it has state, and the results of cache= are lost in a restart, so it would then see other calls; "
                "leave out cache="
            )
        return self._why_not_here(node, option, holder, around)

    def _why_not_here(self, node: Node[..., Any], option: str, holder: Any, around: _Around) -> str:
        policy = node.policy
        takes_turns = holder is node or node._shared_places == 1 or (node._is_plain and not (option or node.is_async))
        if self._calls[_key_of(holder)] > 1:  # the computation of a cache is a body, and counts too
            return "one instance is called at several places, and a barrier is at one of them; use an instance for each"
        if policy.hedge is not None and not option:
            return "it has state, and hedge= decides by the time whether it is called once or twice; leave out hedge="
        if around.overlap and not policy.ordered and (around.is_behind or not takes_turns):
            return (
                "it has state, and in this map_each items overtake each other before they come to it, or in it; give "
                "it a map_each of its own, or make it a class with @ps.node(ordered=True); or, which helps inside of "
                "cond, switch, while_loop and failover=, too, say ps.map_each(..., concurrency=1)"
            )
        return ""

    def _note_mixed(self, mix: str, place: int, number: int) -> None:
        """Note a source of a mix; it goes on at the number of records that the mix has taken from it."""
        while number in self._steps:
            step = self._steps[number]
            inputs = self._inputs(step)
            if not inputs and hasattr(_iterator_class(_called(step)), "state"):
                self._stops[number] = CheckpointStep(step.label, mixed=(mix, place))
                return
            is_one_to_one = _role(step).gives == "one_to_one" or (
                _kind(step) == "map_each" and _control(step).on_error != "skip" and not self._stop(step).called
            )
            if len(inputs) != 1 or not is_one_to_one:
                raise self._refused(
                    step,
                    "it stands before data.mix, which goes on at the number of records that it has taken from each "
                    "data.order: only data.read and ps.map_each without state may stand between a data.order and "
                    "data.mix; put this step behind data.mix",
                )
            if _kind(step) == "map_each":
                self._stops[number] = CheckpointStep(step.label, mixed=(mix, place), is_between=True)
            [number] = inputs
        self._stops[number] = CheckpointStep(self._argument(number), mixed=(mix, place))

    def _check_batches(self, step: PlannedStep, stop: CheckpointStep) -> None:
        """Refuse `batch=` before a step with state. Steps are visited from the end of the path."""
        self._state_behind |= bool(stop.called) or _kind(step) == "fold"
        if not self._state_behind:
            return
        for node, one in _nodes(step):
            if node._runs_on._batch is not None and not node.policy.stateless:
                raise self._refused_at(
                    one,
                    node.name,
                    "batch= makes batches of the items that happen to wait, so results differ in rounding from run to "
                    "run, and a step behind it has state; say stateless=True if results up to rounding will do, or "
                    "make batches with data.batched",
                )

    def _refused(self, step: PlannedStep, why: str) -> PlanError:
        return self._refused_at(step.head, step.head.callee.name, why)

    def _refused_at(self, step: Step, name: str, why: str) -> PlanError:
        return PlanError(
            f"{step.location}: in graph {self._plan.name!r}, {name!r} cannot be used with checkpoint=: {why}"
        )


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
    return cast("Control", step.head.callee)


def _called(step: PlannedStep) -> Any:
    return step.head.callee.fn if is_node(step.head.callee) else None


def _role(step: PlannedStep) -> StageRole:
    return role_of(_called(step))


def _iterator_class(fn: Any) -> type[AsyncIterator[Any]] | None:
    """Return the class of the iterators that a node makes, such as a stage of data; None for a function."""
    fn = unwrapped(fn)
    return cast("type[Any]", fn) if isinstance(fn, type) and issubclass(fn, AsyncIterator) else None


def _settings(fn: Any) -> Mapping[str, Any]:
    """Return the settings of a stage."""
    return fn.keywords if isinstance(fn, functools.partial) else {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(one) for one in value)  # pyright: ignore[reportUnknownVariableType]
    return value is None or isinstance(value, bool | int | float | str)


def nodes_of(labels: "Sequence[str | list[Any]]") -> list[Any]:
    """Return the names of the nodes of bodies, also of nodes that planning has joined into one program."""
    names: list[Any] = []
    for label in labels:
        if isinstance(label, list):
            names.append(nodes_of(label))
            continue
        for name in re.sub(r"#\d+$", "", label).split(" → "):
            one, _, times = name.partition(" ×")
            names += [one] * int(times or 1)
    return sorted(names, key=repr)
