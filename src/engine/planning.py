"""Planning: passes turn a trace into a plan. A pass is a pure function from steps to steps, with a report."""

import inspect
import itertools
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeGuard, cast, get_origin

from .._errors import PlanError
from ..telemetry import logs
from .control import Control
from .donation import with_donation
from .node import Node, is_node
from .program import Draft, Pass, PassReport, Plan, PlannedStep, Program, Unit, data_edges
from .tracing.template import Constant, Container, Read, Template, key, reads, with_reads
from .tracing.tracer import Step, Trace, order_edges

# Streams that would wait for each other for ever.
#
# A node with limited places holds one until the stream that it gives has ended, or until it has read the stream that is
# passed to it. If that stream needs a second place of the same node, each frame needs two places at a time, and frames
# with one place each wait for ever. A stream may need a second place in three ways. It is read through, or together
# with, another stream of the node. It is read through a `map_each` whose body calls the node. Or its reader still waits
# for another argument, which the node has to compute, while the open stream holds a place.
#
# Two nodes may hold places for each other in the same way. So all waits of this kind are collected for a graph, and a
# circle of waits is refused.


class _Need(NamedTuple):
    """A node with limited places; a stream needs a place of the node in order to go on.

    Attributes:
        node: the node.
        step: the step that needs the place.
        is_held: whether the place is held until the stream has ended. In a body, the place is held for one value only.
    """

    node: Node[..., object]
    step: Step
    is_held: bool


class _Wait(NamedTuple):
    """A node holds a place while another node, or the same node, is needed.

    Attributes:
        held: the node that holds a place.
        needed: the node that is needed meanwhile.
        step: the step that reads the stream; errors name its line.
    """

    held: Node[..., object]
    needed: Node[..., object]
    step: Step


def check_stream_limits(graph: str, steps: Sequence[Step], *, in_order: bool = False) -> None:
    """Refuse streams that would wait for each other for ever.

    Args:
        graph: the name of the graph.
        steps: the steps of the graph, in a topological order.
        in_order: whether each step waits for all steps before it, and not only for its arguments.

    Raises:
        PlanError: two streams would wait for each other; the message names the line at which they meet.
    """
    found: dict[int, dict[int, _Wait]] = {}  # by the node that holds a place, and by the node that is needed
    for wait in _waits(steps, in_order=in_order):
        held, needed = _key(wait.held), _key(wait.needed)
        found.setdefault(held, {}).setdefault(needed, wait)
        back = _way(found, needed, held)
        if back or held == needed:
            raise PlanError(_message_of_circle(graph, [wait, *back]))


_IN_ORDER: Final = ("sequential", "wave")  # the schedulers that let a step wait for steps that it does not read


def check_splits(program: Program) -> None:
    """Refuse two steps that read one split, if the scheduler or an effect lets one begin only after the other.

    Without such a scheduler, a step that reads the result of the other step is accepted.

    Raises:
        PlanError: there are two such steps; the message names the line of the later step.
    """
    behind: dict[int | None, set[int]] = {}  # for each stream, the splits that its values pass
    readers: dict[int, list[Unit]] = {}  # for each split, the steps that end only when they have read a branch of it
    by_data: dict[int, set[int]] = {unit.index: set() for unit in program.units}
    if program.scheduler not in _IN_ORDER:
        for index, sources in data_edges(program.units).items():
            for source in sources:
                by_data[source].add(index)
    for unit in program.units:
        splits = {split for source in unit.sources for split in behind.get(source, ())}
        callee = None if unit.step is None else unit.step.head.callee
        if isinstance(callee, Control) and callee.kind == "split":
            behind[unit.source] = splits | {unit.index}
        elif unit.source in program.plan.trace.streams and unit.role != "result":
            behind[unit.source] = splits
        else:
            for split in splits:
                readers.setdefault(split, []).append(unit)
                for first, later in itertools.permutations(readers[split], 2):
                    after = _reached(first.index, lambda index: program.units[index].consumers)
                    if later.index in after - _reached(first.index, by_data.__getitem__):
                        raise PlanError(_message_of_split(program, program.units[split], first, later))


def _reached(start: int, following: Callable[[int], Iterable[int]]) -> set[int]:
    """Return the numbers that are reached from `start`; `start` is among them only if a circle leads back to it."""
    found: set[int] = set()
    open_ends = [start]
    while open_ends:
        new = {*following(open_ends.pop())} - found
        found |= new
        open_ends += new
    return found


def _message_of_split(program: Program, split: Unit, first: Unit, later: Unit) -> str:
    where, name, place = ("" if one.step is None else one.step.head.location for one in (split, first, later))
    label, reader = (one.step.label if one.step else "the caller" for one in (first, later))
    cause, remedy = f"scheduler={program.scheduler!r}", "leave out scheduler="
    if program.scheduler not in _IN_ORDER:
        steps = [unit.step.head for unit in program.units[first.index : later.index + 1] if unit.step is not None]
        effect = next(step for step in steps if step.is_effect)
        cause = f"the effect of {effect.callee.name!r} ({effect.location})"
        remedy = 'declare its node effectful="unordered"'
    return (
        f"{place or where}: in graph {program.name!r}, {cause} lets {reader!r} begin only when "
        f"{label!r} ({name}) has ended, but both read branches of one data.split ({where}), which go on together; "
        f"{remedy}, or read the branches in one node"
    )


def _waits(steps: Sequence[Step], *, in_order: bool) -> Iterator[_Wait]:
    """Yield all waits for a place while another place is held, in these steps and in their bodies."""
    behind: dict[int, list[_Need]] = {}  # for each stream, the places that it needs to go on
    earlier: dict[int, Step] = {}
    order = order_edges([(step,) for step in steps])

    def before(step: Step) -> set[int]:
        """Return the steps that must be done before a step begins. A stream is done once it is open."""
        if in_order:
            return {*itertools.takewhile(lambda number: number != step.source, earlier)}
        known = {**earlier, step.source: step}
        return _reached(
            step.source,
            lambda number: earlier.keys() & {*(read.source for read in known[number].reads()), *order.get(number, ())},
        )

    for step in steps:
        sources = {read.source for read in step.reads()} & behind.keys()
        if sources or step.callee.gives_stream:
            needs = [*_own(step), *(need for source in sources for need in behind[source])]
            for need in needs:
                if need.is_held:
                    for node in _needed_meanwhile(need, step, needs, earlier, before):
                        yield _Wait(need.node, node, step)
            if step.callee.gives_stream or (not step.callee.is_async and not is_node(step.callee)):  # a split, too
                behind[step.source] = needs
        for body in step.bodies:
            yield from _waits(body.steps, in_order=in_order)
        earlier[step.source] = step


def _needed_meanwhile(
    held: _Need, reader: Step, needs: list[_Need], earlier: dict[int, Step], before: Callable[[Step], set[int]]
) -> Iterator[Node[..., object]]:
    """Yield the nodes that have to run before the stream for which `held` keeps its place is read to its end."""
    for other in needs:
        # Of two nodes that hold places, the later node waits for the earlier node, which is not a circle. If the two
        # are opened side by side, either may be the later node.
        if other is not held and (
            _key(other.node) == _key(held.node) or not other.is_held or held.step.source in before(other.step)
        ):
            yield other.node
    if held.step is reader:
        return
    meanwhile = before(reader) - before(held.step)
    meanwhile -= {held.step.source, *(other.step.source for other in needs if other.is_held)}
    yield from _limited(earlier[number] for number in sorted(meanwhile))


def _way(found: dict[int, dict[int, _Wait]], start: int, end: int) -> list[_Wait]:
    """Return a chain of waits that leads from one node to another node; empty if there is no such chain."""
    ways: dict[int, list[_Wait]] = {start: []}
    open_ends = [start]
    while open_ends:
        key = open_ends.pop()
        for needed, wait in found.get(key, {}).items():
            if needed not in ways:
                ways[needed] = [*ways[key], wait]
                open_ends.append(needed)
    return ways.get(end, [])


def _own(step: Step) -> Iterator[_Need]:
    if is_node(step.callee):
        if step.callee._shared_places is not None:
            yield _Need(step.callee, step, is_held=True)
        return
    # The frames of a body hold these places one after the other, or at least do not wait for places of each other.
    for node in {_key(node): node for body in step.bodies for node in _limited(body.steps)}.values():
        yield _Need(node, step, is_held=False)


def _limited(steps: Iterable[Step]) -> Iterator[Node[..., object]]:
    for step, _ in _walk(steps):
        if is_node(step.callee) and step.callee._shared_places is not None:
            yield step.callee


def _key(node: Node[..., object]) -> int:
    return id(node.origin) if node.template is None else id(node.template)


def _message_of_circle(graph: str, circle: list[_Wait]) -> str:
    told = " and ".join(
        f"node {wait.held.name!r} holds one of its places for a stream that needs node {wait.needed.name!r} "
        f"({wait.step.location})"
        for wait in circle
    )
    return (
        f"{circle[0].step.location}: in graph {graph!r}, {told}, so calls would wait for each other for ever; for "
        f"{circle[0].held.name!r}, {_remedy(circle[0].held)}"
    )


def _remedy(node: Node[..., object]) -> str:
    if node.template is not None and not node._runs_on._runs_loop:
        return "use another instance at one of the call sites"
    return "leave out its concurrency=, and bound the calls with max_in_flight"


def validate(draft: Draft) -> tuple[Draft, PassReport]:
    """Check that annotated values fit the annotated parameters that take them, and that no streams deadlock.

    Only certain errors are refused: two plain classes of which neither derives from the other.

    Raises:
        PlanError: a value does not fit, or streams would wait for each other; the message names the line.
    """
    check_stream_limits(draft.name, list(_all_steps(draft)))
    _check_order(draft.name, list(_all_steps(draft)))
    _check_durable(draft.name, list(_all_steps(draft)))
    types: dict[int, Any] = dict(zip(draft.parameter_sources, draft.annotations, strict=False))
    classes: dict[Node[..., Any], dict[str, type]] = {}
    checked = 0
    for step in _all_steps(draft):
        if is_node(step.callee) and step.callee._runs_on._is_compiled:
            continue  # the execution converts values, such as a NumPy array where a JAX array is annotated
        if is_node(step.callee):
            node = step.callee
            if node not in classes:
                classes[node] = _annotated_classes(node)
            checked += _check_arguments(draft.name, step, node, classes[node], types)
            _check_failover(draft.name, step, node, classes[node])
        types[step.source] = step.callee._result_annotation()
    return draft, PassReport("validate", checked, checked)


def _check_order(
    graph: str, steps: Iterable[Step], called: dict[int, Step] | None = None, *, is_repeated: bool = True
) -> None:
    """Refuse nodes with ordered=True where items have no order, or where waiting for a turn could never end.

    Args:
        graph: the name of the graph.
        steps: the steps of the graph, or of a body.
        called: the step that calls each node with ordered=True already.
        is_repeated: whether the steps are of a graph or of a `map_each`, which have items in an order.

    Raises:
        PlanError: there is such a node.
    """
    called = {} if called is None else called
    limited: dict[int, str] = {}  # for each stream, a node whose place is held until the stream is read
    for step in steps:
        node = step.callee
        behind = [limited[read.source] for read in step.reads() if read.source in limited]
        if is_node(node) and node.policy.ordered:
            why = ""
            if not is_repeated:
                why = "a body of cond, switch or while_loop has no items that could be in order"
            elif before := called.get(_key(node)):
                why = f"it is called at {before.location} as well; use another instance at one of the call sites"
            elif behind:
                why = (
                    f"it reads a stream of {behind[0]!r}, which holds one of its places until the stream is read, and "
                    "an item with an earlier turn may need the place; leave out its concurrency="
                )
            if why:
                raise PlanError(f"{step.location}: in graph {graph!r}, node {node.name!r} has ordered=True, and {why}")
            called[_key(node)] = step
        if step.callee.gives_stream and is_node(node) and node._shared_places is not None:
            limited[step.source] = node.name
        elif behind:
            limited[step.source] = behind[0]
        for body in step.bodies:
            _check_order(graph, body.steps, called, is_repeated=step.callee.name == "map_each")


def _check_durable(graph: str, steps: Iterable[Step]) -> None:
    """Refuse a second durable loop, and a durable loop that would run several times in a call.

    Raises:
        PlanError: there is such a loop.
    """
    loops = [(step, around) for step, around in _walk(steps) if _is_durable(step)]
    for step, around in loops:
        if around:
            raise PlanError(
                f"{step.location}: in graph {graph!r}, a durable loop is in the body of a {around}, where it would run "
                "several times under one key; leave out durable= here, or make the outer loop durable"
            )
    if len(loops) > 1:
        raise PlanError(
            f"{loops[1][0].location}: graph {graph!r} has a durable loop already, at {loops[0][0].location}; a key "
            "keeps one loop: join the loops, or call them one after the other, with a key for each"
        )


def _is_durable(step: Step) -> bool:
    return isinstance(step.callee, Control) and step.callee.durable is not None


def _walk(steps: Iterable[Step], around: str = "") -> Iterator[tuple[Step, str]]:
    """Yield each step, also in bodies, with the innermost construct that repeats the body; "" without a construct."""
    for step in steps:
        yield step, around
        repeats = step.callee.name if step.callee.name in ("map_each", "while_loop", "fold") else around
        for body in step.bodies:
            yield from _walk(body.steps, repeats)


def eliminate_dead_nodes(draft: Draft) -> tuple[Draft, PassReport]:
    """Leave out the steps that may be left out, if no step reads their value and the graph does not return it."""
    live = {read.source for read in reads(draft.result)}
    kept: list[Step] = []
    dropped: list[str] = []
    for step in reversed(list(_all_steps(draft))):
        reason = "" if step.source in live else _why_unread_is_dropped(step)
        if reason:
            dropped.append(f"dropped {step.callee.name} ({step.location}): its result is not read, and {reason}")
            continue
        kept.append(step)
        live.update(read.source for read in step.reads())
    return _unfused(draft, reversed(kept)), PassReport(
        "dead-node elimination", draft.nodes(), len(kept), tuple(reversed(dropped))
    )


def merge_equal_calls(draft: Draft) -> tuple[Draft, PassReport]:
    """Merge calls of pure nodes with equal arguments; the order of the steps stays."""
    first: dict[Hashable, Step] = {}
    merged: dict[int, int] = {}
    kept: list[Step] = []
    changes: list[str] = []
    for original in _all_steps(draft):
        step = original.with_reads(lambda read: _renumbered(read, merged)) if merged else original
        if is_node(step.callee) and step.callee.policy.pure:
            twin = _first_of(first, step, step.callee)
            if twin is not step:
                merged[step.source] = twin.source
                changes.append(f"merged {step.callee.name} ({step.location}) into the equal call at {twin.location}")
                continue
        kept.append(step)
    result = with_reads(draft.result, lambda read: _renumbered(read, merged))
    return replace(_unfused(draft, kept), result=result), PassReport(
        "common-subexpression elimination", draft.nodes(), len(kept), tuple(changes)
    )


def fuse_inline_chains(draft: Draft) -> tuple[Draft, PassReport]:
    """Let plain functions share one actor, where each function is the only reader of the value before it.

    No chain crosses an effect, since all steps before the effect must have ended when the effect begins.
    """
    readers = Counter(source for step in _all_steps(draft) for source in {read.source for read in step.reads()})
    readers.update(read.source for read in reads(draft.result))
    chains: dict[int, list[Step]] = {}  # by the source of the last step
    order: list[list[Step]] = []
    for step in _all_steps(draft):
        if step.is_effect:
            chains.clear()
        producer = _only_argument(step)
        fused = chains.pop(producer, None) if producer is not None and readers[producer] == 1 else None
        if fused is not None and _is_inline(step):
            fused.append(step)
        else:
            if fused is not None and producer is not None:
                chains[producer] = fused
            fused = [step]
            order.append(fused)
        if _is_inline(step):
            chains[step.source] = fused
    steps = tuple(tuple(chain) for chain in order)
    names = [" → ".join(step.callee.name for step in chain) for chain in steps if len(chain) > 1]
    changes = tuple(f"one actor for {joined}" for joined in names)
    return replace(draft, steps=steps), PassReport("inline chains", draft.nodes(), len(steps), changes)


# Added to the number of a value that stays where it is, this gives the number of the fetched value.
_FETCHED: Final = 1 << 32


def fetch_results(draft: Draft) -> tuple[Draft, PassReport]:
    """Leave a result where it is if a step that runs there reads it; put one `fetch` before other readers."""
    makers = {chain[-1].source: chain[-1] for chain in draft.steps}
    fetches = {source: _fetch(step) for source, step in makers.items()}
    kept: dict[int, Node[..., Any]] = {}
    for step in _all_steps(draft):
        for read in step.reads():
            fetch = fetches.get(read.source)
            if fetch is not None and not read.path and _fetch(step) is fetch:
                kept[read.source] = fetch
    fetched: set[int] = set()

    def moved(here: Node[..., Any] | None, read: Read) -> Read:
        if read.source not in kept or (here is kept[read.source] and not read.path):
            return read
        fetched.add(read.source)
        return replace(read, source=read.source + _FETCHED)

    chains = [tuple([step.with_reads(partial(moved, _fetch(step))) for step in chain]) for chain in draft.steps]
    result = with_reads(draft.result, partial(moved, None))
    steps: list[tuple[Step, ...]] = []
    for chain in chains:
        steps.append(chain)
        if (source := chain[-1].source) in fetched:
            step = Step(kept[source], source + _FETCHED, (Read(source),), {}, (), chain[-1].location)
            steps.append((step,))
    changes = [f"{makers[source].callee.name} ({makers[source].location}) keeps its result there" for source in kept]
    report = PassReport("references", len(chains), len(steps), tuple(changes))
    return replace(draft, steps=tuple(steps), result=result), report


def _fetch(step: Step) -> Node[..., Any] | None:
    """Return the node that fetches the results of a step; None if the results do not stay elsewhere."""
    callee = step.callee
    return callee.runs_on.fetch if is_node(callee) and not callee.gives_stream and not step.bodies else None


ALL: tuple[Pass, ...] = (validate, eliminate_dead_nodes, merge_equal_calls, fuse_inline_chains)


def _first_of(first: dict[Hashable, Step], step: Step, node: Node[..., Any]) -> Step:
    """Return the first step that calls the same node with equal arguments: `step` itself if no earlier step does."""
    keywords = sorted(step.kwargs.items())
    identity = (
        id(node.origin), node._binding, node.policy, tuple([key(arg) for arg in step.args]),
        tuple([(name, key(arg)) for name, arg in keywords]),
    )  # fmt: skip
    try:
        return first.setdefault(identity, step)
    except TypeError:  # an unhashable argument cannot be compared, so the call stays on its own
        return step


def _all_steps(draft: Draft) -> Iterator[Step]:
    return itertools.chain.from_iterable(draft.steps)


def _unfused(draft: Draft, steps: Iterable[Step]) -> Draft:
    return replace(draft, steps=tuple((step,) for step in steps))


def _renumbered(read: Read, sources: Mapping[int, int]) -> Read:
    return Read(sources.get(read.source, read.source), read.path)


def _why_unread_is_dropped(step: Step) -> str:
    """Return why a step may be left out whose value is not read; "" if the step runs in any case."""
    callee = step.callee
    if callee.gives_stream:
        return "a stream that is not read does not begin"
    if is_node(callee):
        return "it is pure" if callee.policy.pure else ""
    runs = _is_durable(step) or any(not _why_unread_is_dropped(inner) for body in step.bodies for inner in body.steps)
    return "" if runs else "so may be all steps in its bodies" if step.bodies else "so may be its streams"


def _is_inline(step: Step) -> bool:
    callee = step.callee
    if step.is_effect or not is_node(callee) or callee.is_async or callee.gives_stream or not callee._is_plain:
        return False
    policy = callee.policy
    own = policy.concurrency, policy.max_bytes, policy.capacity, callee.template
    return callee.origin._replacement is None and all(one is None for one in own)


def _only_argument(step: Step) -> int | None:
    """Return the source of the only argument, if the argument is a whole value; None otherwise."""
    if step.kwargs or len(step.args) != 1:
        return None
    argument = step.args[0]
    return argument.source if isinstance(argument, Read) and not argument.path else None


def _check_failover(graph: str, step: Step, node: Node[..., Any], classes: Mapping[str, type | None]) -> None:
    """Refuse a failover whose annotated parameters or result differ from the annotations of its node."""
    if node.policy.failover is None or node.policy.cache is not None or not step.bodies:
        return
    other = step.bodies[0].steps[-1].callee if step.bodies[0].steps else None
    if not is_node(other) or other._runs_on._is_compiled:
        return
    theirs = {**_annotated_classes(other), "return": _result_class(other)}
    classes = {**classes, "return": _result_class(node)}
    for mine, yours in (*zip(node._positional, other._positional, strict=False), ("return", "return")):
        one, another = classes.get(mine), theirs.get(yours)
        if one is not None and another is not None and not _may_be(another, one):
            what = "returns" if mine == "return" else f"takes {mine!r} as"
            raise PlanError(
                f"{step.location}: in graph {graph!r}, node {node.name!r} {what} {one.__name__}, but its failover "
                f"{other.name!r} has {another.__name__} there; take a failover with the types of the node"
            )


def _result_class(node: Node[..., Any]) -> type | None:
    hint = node._result_annotation()
    return hint if _is_plain_class(hint) else None


def _annotated_classes(node: Node[..., Any]) -> dict[str, type]:
    """Return the annotation of each parameter that is annotated with a plain class."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: hint
        for name, hint in node._hints.items()
        if _is_plain_class(hint) and name in node._parameters and node._parameters[name].kind not in variadic
    }


def _check_arguments(
    graph: str, step: Step, node: Node[..., Any], classes: Mapping[str, type], types: Mapping[int, Any]
) -> int:
    if not classes:
        return 0
    checked = 0
    for name, template in step.named_arguments():
        wanted, given = classes.get(name), _type_of(template, types)
        if wanted is None or not _is_plain_class(given):
            continue
        checked += 1
        if not _may_be(given, wanted):
            raise PlanError(
                f"{step.location}: in graph {graph!r}, parameter {name!r} of node {node.name!r} takes "
                f"{wanted.__name__}, but gets {given.__name__} from {_origin(template)}"
            )
    return checked


def _origin(template: Template) -> str:
    if isinstance(template, Constant):
        return f"the constant {template.value!r:.80}"
    return "the call or parameter before it" if isinstance(template, Read) else "a literal"


def _type_of(template: Template, types: Mapping[int, Any]) -> Any:
    if isinstance(template, Read):
        return types.get(template.source) if not template.path else None
    return template.kind if isinstance(template, Container) else type(cast("object", template.value))


def _is_plain_class(hint: Any) -> TypeGuard[type]:
    # An abstract class, a protocol or a TypedDict also accepts objects of classes that do not derive from it.
    if not isinstance(hint, type) or hint in (object, type(None), Any):
        return False
    return get_origin(hint) is None and not isinstance(hint, ABCMeta) and not hasattr(hint, "__required_keys__")


def _may_be(given: type, wanted: type) -> bool:
    # The numeric tower of PEP 484: an int is accepted for a float, both for a complex.
    return given is wanted or issubclass(given, wanted) or issubclass(wanted, given) or (given, wanted) in _TOWER


_TOWER = ((int, float), (int, complex), (float, complex), (bool, float), (bool, complex))


# The plan.


def make_plan(
    trace: Trace,
    *,
    without: Collection[Pass] = (),
    resources: frozenset[int] = frozenset(),
    fuse: bool = True,
) -> Plan:
    """Run the passes over a trace, and over the traces of its bodies.

    Args:
        trace: the trace.
        without: passes to leave out.
        resources: for a body: the numbers of the resources of the graph around it.
        fuse: the execution option.

    Raises:
        PlanError: the graph cannot work; for instance, the type of a value does not fit the parameter that takes it.
    """
    shared = _resource_sources(trace, resources)
    draft = Draft(
        trace.name, (*trace.parameter_sources, *trace.resources.values()), shared,
        (*trace.annotations, *(opening.resource._result_annotation() for opening in trace.resources)),
        tuple((step,) for step in trace.steps), trace.result, fuse,
    )  # fmt: skip
    reports: list[PassReport] = []
    for run_pass in _all_passes(trace):
        if run_pass in without:
            continue
        draft, report = run_pass(draft)
        reports.append(report)
        if run_pass is eliminate_dead_nodes and report.changes:
            logs.warning(
                "plan.dead_nodes", graph=trace.name, changes=list(report.changes),
                remedy="return the result or pass it on; a node that has to run in any case is not declared pure",
            )  # fmt: skip
    plan_body = partial(make_plan, resources=shared)
    seen = Counter[str]()
    has_effects = any(step.is_effect for step in trace.steps)
    steps: list[PlannedStep] = []
    changes, notes = list[str](), list[str]()  # about states of loops
    for chain in draft.steps:
        label, *further = [_label(step.callee.name, seen) for step in chain]
        bodies = [plan_body(one, without=without, fuse=fuse) for one in chain[0].bodies]
        bodies = with_donation(chain[0], bodies, changes, notes)
        joined = None
        if chain[0].joined is not None:  # the passes have run over its parts
            joined = plan_body(chain[0].joined, without=(*without, eliminate_dead_nodes))
        steps.append(PlannedStep(label, chain, tuple(further), tuple(bodies), joined))
    if changes or notes:
        reports.append(PassReport("donation", len(changes + notes), len(notes), tuple(changes), tuple(notes)))
    plan = Plan(
        trace.name, trace.parameters, trace.parameter_sources, tuple(steps), draft.result, trace.captures, shared,
        tuple(reports), trace, merge_equal_calls not in without,
    )  # fmt: skip
    if has_effects and any(isinstance(step.callee, Control) and step.callee.kind == "split" for step in trace.steps):
        check_splits(plan._program("actors"))
    return plan


def _all_passes(trace: Trace) -> tuple[Pass, ...]:
    stages = [step for one in trace.steps if one.callee.gives_stream for body in one.bodies for step in body.steps]
    callees = [step.callee for step in (*trace.steps, *stages)]
    executions = [callee.runs_on for callee in callees if is_node(callee)]
    brought = dict.fromkeys(one for execution in executions for one in execution._passes)
    if any(execution.fetch is not None for execution in executions):
        brought[fetch_results] = None
    return (*ALL, *brought)


def _resource_sources(trace: Trace, around: frozenset[int]) -> frozenset[int]:
    """Return the numbers of the values that are resources; `around` has the resources of the graph around a body."""
    taken = (source for source, template in trace.captured if {read.source for read in reads(template)} <= around)
    return frozenset([*trace.resources.values(), *taken])


def _label(name: str, seen: Counter[str]) -> str:
    """Return a name that no step before has: fetch, fetch#2, fetch#3."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
