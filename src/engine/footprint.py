"""The memory of a graph: its compiled programs, its inboxes, and its values in flight, measured on a call."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakSet

from .._errors import PlanError
from ..actors.execution import GENERAL, Bound
from ..actors.frame import Frame
from ..actors.node_actor import Invoke, NodeActor
from ..actors.stream_buffer import DEFAULT_CAPACITY, StreamBuffer
from ..actors.worker import Worker
from ..telemetry.counters import ProgramMemory
from ..telemetry.tables import UNKNOWN, Column, Rendered, Table, by_graph, count, scaled
from .call import RunningCall
from .call_scopes import OwnScope
from .graph import NO_KEY, Call
from .node import Node, is_node
from .one_call_stream import StreamingCall, ValuesStream
from .options import ExecutionOptions
from .program import Plan, Wired
from .scope import Runtime, Scope
from .sizes import is_reader, size_of, sizes_of
from .stages import StageIterator
from .tracing.annotations import unwrapped
from .wiring import executor_of, inbox_capacity, warm_up_node


@dataclass(frozen=True)
class NodeMemory:
    """How much memory one node takes, in bytes.

    Attributes:
        graph: the name of the graph of the node, or of its body of control flow.
        node: the name of the node, as in drawings.
        programs: for a device node, the programs that the call used; for a plan, all programs of the node.
        item_bytes: the largest size of the arguments of one item; None if there was no item.
        result_bytes: the largest size of a result, or of one value of a stream; None if there was no result.
        inbox_bytes: the size of a full inbox in a pipeline, or of a full stream: `max_bytes`, or `inbox_items` of the
            largest items. None if unknown, and in bodies of control flow, whose items wait in the step around them.
        inbox_items: how many items the inbox, or the stream, has room for.
    """

    graph: str
    node: str
    programs: tuple[ProgramMemory, ...] = ()
    item_bytes: int | None = None
    result_bytes: int | None = None
    inbox_bytes: int | None = None
    inbox_items: int | None = None


@dataclass(frozen=True)
class MemoryReport(Rendered):
    """How much memory a graph takes. `str()` shows it as a table.

    Arrays, bytes and text count, also inside lists, tuples, dictionaries and dataclasses; other objects count nothing.

    Attributes:
        graph: the name of the graph.
        nodes: the nodes, in the order of the plan.
        in_flight_bytes: the most bytes that the values of the call took at a time, with values that streams and stages
            held, and results that waited for their turn; None for a plan, which runs nothing.
        in_flight_device_bytes: how many of these bytes were in arrays of JAX.
        without_sample: for a plan, the device nodes without `sample_input=`, whose memory is unknown.
    """

    graph: str
    nodes: tuple[NodeMemory, ...]
    in_flight_bytes: int | None = None
    in_flight_device_bytes: int | None = None
    without_sample: tuple[str, ...] = ()

    def _table(self) -> Table:
        facts = [("graph", self.graph)]
        if self.in_flight_bytes is not None:
            there = f", {_shown(self.in_flight_device_bytes)} of it on devices" if self.in_flight_device_bytes else ""
            facts.append(("in flight", _shown(self.in_flight_bytes) + there))
        if self.without_sample:
            facts.append(("no sample_input=", ", ".join(self.without_sample)))
        titles = ("arguments", "outputs", "temporaries", "programs", "item", "result", "inbox", "inbox items")
        ordered = [self.nodes[at] for at in by_graph([node.graph for node in self.nodes])]
        return Table(
            facts=tuple(facts),
            columns=(Column("node", is_number=False), *map(Column, titles)),
            rows=tuple(map(_row, ordered)),
            remark="Arguments, outputs and temporaries are of the largest program of a device node; item, result and "
            "inbox are of the largest values that were seen",
            headings=tuple(node.graph for node in ordered),
        )


def _row(node: NodeMemory) -> tuple[str, ...]:
    largest = max(node.programs, key=lambda program: program.total_bytes, default=None)
    cells = [UNKNOWN] * 3
    if largest is not None:
        cells = [_shown(size) for size in (largest.argument_bytes, largest.output_bytes, largest.temporary_bytes)]
    return (
        node.node,
        *cells,
        count(len(node.programs)) if node.programs else UNKNOWN,
        _shown(node.item_bytes),
        _shown(node.result_bytes),
        _shown(node.inbox_bytes),
        count(node.inbox_items),
    )


def _shown(size: int | None) -> str:
    return scaled(size, "B")


async def memory_of_call(
    runtime: Runtime,
    call: Call[Any],
    options: ExecutionOptions,
    run: Callable[[Callable[[Scope], None]], Any],
    items: int | None,
) -> MemoryReport:
    """Run a call once, and return its memory.

    Args:
        runtime: the inside of the Engine.
        call: the call.
        options: the options of the call.
        run: runs a call that gives one value; calls its argument with the scope before the call begins.
        items: how many values of a stream are read; None for all.
    """
    plan = call.graph._planned(options)
    steps = [(one.name, step) for one in (plan, *plan._all_bodies) for step in one.steps]
    before = {
        program.program: program.calls
        for _, step in steps
        if (executor := executor_of(step)) is not None
        for program in await asyncio.to_thread(executor._programs)
    }
    watch = _Watch()
    if plan._gives_stream:
        start = partial(StreamingCall, _WatchedScope(runtime, options, watch), call, options)
        async with ValuesStream[Any](start) as values:
            number = 0
            async for _ in values:
                watch.look(None)
                number += 1
                if number == items:
                    break
    else:
        await run(watch.begin)
    nodes: list[NodeMemory] = []
    for graph, step in steps:
        if not is_node(step.head.callee):
            continue
        programs: list[ProgramMemory] = []
        if (executor := executor_of(step)) is not None:
            found = await asyncio.to_thread(executor._programs)
            programs = [one for one in found if one.calls != before.get(one.program)]
        nodes.append(watch.node(graph, step.label, step.head.callee, programs, is_in_body=graph != plan.name))
    return MemoryReport(call.graph.name, tuple(nodes), watch.most_bytes, watch.most_device_bytes)


async def memory_of_plan(runtime: Runtime, plan: Plan, options: ExecutionOptions) -> MemoryReport:
    """Compile the programs for the samples of a plan's device nodes, and return their memory; nothing runs."""
    scope = Scope(runtime, options, "parallel", is_one_call=True)
    unknown: list[str] = []
    nodes: list[NodeMemory] = []
    try:
        await scope.prepare(plan)
        for one in filter(None, map(scope.wiring.wired, (plan, *plan._all_bodies))):
            known = dict(zip(one.program.plan.trace.resources.values(), one.program.blank, strict=False))
            for unit in one.program.units:
                executor = executor_of(unit.step)
                if unit.step is None or executor is None:
                    continue
                try:
                    await warm_up_node(one.program, unit, executor, runtime.pools, options.device_strategy, known)
                except PlanError:  # the node has no samples
                    unknown.append(unit.step.label)
                programs = await asyncio.to_thread(executor._programs)
                nodes.append(NodeMemory(one.program.name, unit.step.label, tuple(programs)))
    finally:
        await scope.close()
    return MemoryReport(plan.name, tuple(nodes), without_sample=tuple(unknown))


class _WatchedScope(OwnScope):
    """The scope of one call that gives a stream."""

    def __init__(self, runtime: Runtime, options: ExecutionOptions, watch: "_Watch") -> None:
        super().__init__(runtime, options, NO_KEY)
        self._watch = watch

    async def admit(self, call: Call[Any], frame: RunningCall) -> tuple[Scope, Wired, int]:
        """Watch the actors of the scope."""
        scope, wired, number = await super().admit(call, frame)
        self._watch.begin(scope)
        return scope, wired, number


class _Seen:
    """The largest sizes that were seen of a node."""

    item_bytes: int | None = None
    result_bytes: int | None = None

    def gave(self, value: Any) -> None:
        """Note the size of a result."""
        self.result_bytes = max(self.result_bytes or 0, size_of(value))


class _Watch:
    """Measures the values of a call whenever a step has ended."""

    def __init__(self) -> None:
        self.most_bytes = self.most_device_bytes = 0
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._frames: WeakSet[Frame] = WeakSet()
        self._buffers: list[StreamBuffer[Any]] = []
        self._stages: WeakSet[StageIterator[Any]] = WeakSet()
        self._bounds: list[Bound] = []
        self._asked = self._next_look = 0

    def begin(self, scope: Scope) -> None:
        """Measure the arguments and results of the actors of a scope from now on."""
        self._bounds = [actor.bound for actor in scope.wiring.actors()]
        for actor in scope.wiring.actors():
            seen = self._seen.setdefault((actor.graph, actor.name), _Seen())
            # The general way to run a step; no step goes to a device before a worker has it.
            actor.mode, actor.begin = GENERAL, None
            actor.invoke = partial(self._invoke, actor.invoke, seen)
            kind = unwrapped(actor.fn)
            if isinstance(kind, type) and issubclass(kind, StageIterator):
                actor.fn = partial(self._stage, actor.fn)

    def _stage(self, make: Callable[..., Any], *args: Any) -> Any:
        stage = make(*args)
        self._stages.add(stage)
        return stage

    async def _invoke(self, inner: Invoke, seen: _Seen, worker: Worker, actor: NodeActor, frame: Frame) -> Any:
        seen.item_bytes = max(seen.item_bytes or 0, size_of(actor.arguments(frame.values)))
        self._frames.add(frame)
        value: Any = await inner(worker, actor, frame)
        given: list[Any] = value if isinstance(cast("object", value), list) else [value]
        readers = [one for one in given if is_reader(one)]
        for reader in readers:
            reader.buffer.held = _Held(partial(self._gave, seen), reader.buffer.held)
            self._buffers.append(reader.buffer)
        if not readers:
            seen.gave(value)
        self.look(value)
        return value

    def _gave(self, seen: _Seen, value: Any) -> None:
        seen.gave(value)
        self.look(value)

    def look(self, value: Any) -> None:
        """Add up all values that are alive now, and `value`. The longer the call runs, the more rarely this is done."""
        self._asked += 1
        if self._asked < self._next_look:
            return
        self._next_look = self._asked + max(1, self._asked // 16 - 20)
        self._buffers = [one for one in self._buffers if one.held or not (one.ended or one.abandoned)]
        there = [value, *(held for one in self._buffers for held in one.held)]
        for frame in list(self._frames):  # a frame that has ended may wait for its turn
            there += frame.values if frame.state == "running" else [frame.result]
        sizes = [
            sizes_of(there),
            (sum(bound.held_bytes() for bound in self._bounds), 0),
            *(stage.held_bytes() for stage in list(self._stages)),
        ]
        size, on_device = (sum(column) for column in zip(*sizes, strict=True))
        self.most_bytes = max(self.most_bytes, size)
        self.most_device_bytes = max(self.most_device_bytes, on_device)

    def node(
        self, graph: str, label: str, node: Node[..., Any], programs: list[ProgramMemory], *, is_in_body: bool
    ) -> NodeMemory:
        """Return the memory of a node."""
        seen, policy = self._seen.get((graph, label), _Seen()), node.policy
        if is_in_body and not node.gives_stream:
            return NodeMemory(graph, label, tuple(programs), seen.item_bytes, seen.result_bytes)
        places = (policy.capacity or DEFAULT_CAPACITY) if node.gives_stream else inbox_capacity(policy)
        size = seen.result_bytes if node.gives_stream else seen.item_bytes
        held = None if size is None else size * places
        if held is not None and policy.max_bytes is not None:
            held = max(min(held, policy.max_bytes), size or 0)  # an item that is larger than max_bytes enters alone
        return NodeMemory(graph, label, tuple(programs), seen.item_bytes, seen.result_bytes, held, places)


class _Held(deque[Any]):
    """The values that a stream holds; calls a function with each new value."""

    def __init__(self, on_value: Callable[[Any], None], values: Iterable[Any]) -> None:
        super().__init__(values)
        self._on_value = on_value

    def append(self, value: Any, /) -> None:
        """Add a value, and call the function with it."""
        super().append(value)
        self._on_value(value)
