"""Running graphs: `run` for one call, `stream` for many, `deploy` for servers, `plan` to look at what will happen."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar, Unpack, overload

from .._public import LateModule as _LateModule
from .._public import public as _public
from ..actors.supervision import RestartMode, Strategy
from ..actors.threads import ProcessPoolStatistics, ThreadPoolStatistics
from ..telemetry.counters import ActorState, ActorStatistics, CacheStatistics, ChannelStatistics, ProgramMemory
from .admission import AdmissionStatistics, KeyStatistics
from .call_stream import Stream
from .checkpoint import Checkpoint
from .control import Outcome
from .engine import Engine, EngineStatistics
from .engine import default_engine as _default_engine
from .events import Event, Value
from .graph import Call, Graph, GraphStatistics
from .graph import as_graph as _as_graph
from .node import RunsOn
from .one_call_stream import EventStream
from .options import CallOptions, OnFinished, Scheduler
from .options import resolve as _resolve
from .program import Plan
from .statistics import Bottleneck, StreamStatistics

__all__ = [
    "ActorState", "ActorStatistics", "AdmissionStatistics", "Bottleneck", "CacheStatistics", "CallOptions",
    "ChannelStatistics", "DetachedStream", "Drawing", "DrawnEdge", "DrawnNode", "Engine", "EngineStatistics", "Event",
    "EventStream", "GraphStatistics", "KeyStatistics", "MemoryReport", "Missed", "NodeMemory", "OnFinished", "Outcome",
    "Plan", "ProcessPoolStatistics", "ProgramMemory", "RestartMode", "RunsOn", "Scheduler", "Service", "ServiceState",
    "ServiceStatistics", "StoredSnapshot", "Strategy", "Stream", "StreamStatistics", "ThreadPoolStatistics", "Value",
    "deploy", "memory", "plan", "run", "stream", "tuned_for_serving",
]  # fmt: skip

if TYPE_CHECKING:
    from .. import engine as _engine
    from ..saving.snapshots import StoredSnapshot
    from .deployment import ServiceState
    from .detached import DetachedStream, Missed
    from .drawing import Drawing, DrawnEdge, DrawnNode
    from .footprint import MemoryReport, NodeMemory
    from .service import Service, ServiceStatistics
    from .tuning import tuned_for_serving
else:
    _engine = _LateModule(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Tag = TypeVar("Tag")
E = TypeVar("E")


async def run(
    call: Call[R] | Graph[[], R],
    /,
    *more: Never,
    durable_key: str | None = None,
    answer: object = ...,
    on_finished: OnFinished = "again",
    checkpoint: Checkpoint | None = None,
    **options: Unpack[CallOptions],
) -> R:
    """Run one call of a graph and return its result.

    Args:
        call: the call, `search(url)`; a graph without parameters may be passed itself.
        *more: nothing; arguments of the graph are part of the call.
        durable_key: for a graph with a durable loop (`ps.while_loop(..., durable=...)`), the key that the loop is kept
            under. A call that did not give its result, since its process died, or with an error, goes on when the key
            is run again, with the same arguments. After its result, the key begins a new loop.
        answer: the answer to the question that the key waits with, after `Interrupted`; or an `Answer`, which is to one
            question and no other. By default there is none.
        on_finished: what to do if the key has its result already: "again" begins a new loop, "return" returns the
            result, and "raise" raises `KeyFinished`. The last two refuse other arguments, so a request that is sent
            twice does nothing twice.
        checkpoint: where the state of its `ps.fold` is saved, from which the next run goes on.
        **options: `scheduler`, `timeout_seconds`, `max_workers`, `reuse_plans`, `device_strategy` and others; see
            `ExecutionOptions`.

    Returns:
        The result of the graph.

    Raises:
        Exception: the error of the node that failed first, with a note that names graph, node, item and attempt.
        TimeoutError: the call did not finish within `timeout_seconds`.
        GraphTraceError: the graph does something that a trace cannot represent.
        PlanError: the graph returns a stream of values: read it with `engine.stream(call)`.
        OptionsError: an option is unknown or does not apply; a graph with a durable loop has no key, or one without has
            one. Of these, `OtherArguments`: the key is that of a call with other arguments. `StaleAnswer`: it does not
            wait for this answer. `KeyFinished`: it has its result, which is not wanted, or could not be stored.
        Interrupted: a node has asked a question (`ps.interrupt`); with its answer, the same key goes on.
        KeyInUse: the key is under way elsewhere.
        NotStorable: an argument, the answer, a question or a state of the loop cannot be stored.
    """
    return await _default_engine().run(
        call, *more, durable_key=durable_key, answer=answer, on_finished=on_finished, checkpoint=checkpoint, **options
    )


@overload
def stream(  # type: ignore[overload-overlap]
    call: Call[AsyncIterator[R]],
    /,
    *,
    events: type[E],
    capacity: int | None = None,
    progress: bool = False,
    durable_key: str | None = ...,
    answer: object = ...,
    on_finished: OnFinished = ...,
    checkpoint: Checkpoint | None = None,
    **options: Unpack[CallOptions],
) -> Stream[Event[E] | Value[R]]: ...
@overload
def stream(
    call: Call[R],
    /,
    *,
    events: type[E],
    capacity: int | None = None,
    progress: bool = False,
    durable_key: str | None = ...,
    answer: object = ...,
    on_finished: OnFinished = ...,
    **options: Unpack[CallOptions],
) -> EventStream[E, R]: ...
@overload
def stream(
    call: Call[AsyncIterator[R]],
    /,
    *,
    progress: bool = False,
    durable_key: str | None = ...,
    answer: object = ...,
    on_finished: OnFinished = ...,
    checkpoint: Checkpoint | None = None,
    **options: Unpack[CallOptions],
) -> Stream[R]: ...
@overload
def stream(
    calls: Iterable[Call[R, Tag]] | AsyncIterable[Call[R, Tag]],
    /,
    *,
    progress: bool = False,
    **options: Unpack[CallOptions],
) -> Stream[R, Tag]: ...
def stream(
    calls: Any,
    /,
    *,
    events: type[Any] | None = None,
    capacity: int | None = None,
    progress: bool = False,
    durable_key: str | None = None,
    answer: object = ...,
    on_finished: OnFinished = "again",
    checkpoint: Checkpoint | None = None,
    **options: Unpack[CallOptions],
) -> Stream[Any]:
    """Run many calls as a pipeline and yield their results in input order; or yield the values of one streaming call.

    Args:
        calls: the calls, from any iterable or async iterable; the stream asks it for the next call when there is room
            for one. Or a single call of a graph that returns an `AsyncIterator`. The code of a plain iterable sees the
            context variables of the caller, but may run outside of any task, where `asyncio.current_task()` is None;
            an async iterable is iterated in a task of its own.
        events: for a single call, also of a graph that returns one value: the class of the events to read, which nodes
            hand out with `penstock.emit`; `object` for all. The stream is an `EventStream` then, of `Event` objects,
            and for a graph that returns an `AsyncIterator` a stream of `Event` and `Value` objects.
        capacity: the most events that wait for their reader; a node that emits one more waits for room. 16 by default.
        progress: whether a bar on standard error shows the rate, the errors, the node that limits and, if `calls` has
            a length as a list has, the time that is left. Nothing is shown if standard error is not a terminal.
        durable_key: for a single call of a graph with a durable loop, the key that it is kept under; see `run`.
        answer: the answer to the question that the key waits with.
        on_finished: what to do if the key has its result already; see `run`.
        checkpoint: of a single call: where it is saved as it goes, and goes on from.
        **options: `scheduler`, `timeout_seconds`, `max_workers`, `reuse_plans`, `device_strategy`; for many calls
            also `max_in_flight`, `ordered`, `order_by`, `on_error`, `trace_items`.

    Returns:
        A `Stream`, an async iterator and async context manager.

    Raises:
        TypeError: the argument is neither a call nor an iterable of calls.
        PlanError: the single call is one of a graph that returns one value: use `engine.run`. Or something in the
            graph cannot be saved with `checkpoint=`.
        OptionsError: an option is unknown or does not apply.
        EngineLoopError: no event loop is running.
        MissingExtraError: there is progress to show, and rich is not installed.
    """
    made: Any = _default_engine()  # as Any, because checkers do not pass on several overloads at once
    result: Stream[Any] = made.stream(
        calls, events=events, capacity=capacity, progress=progress, durable_key=durable_key, answer=answer,
        on_finished=on_finished, checkpoint=checkpoint, **options,
    )  # fmt: skip
    return result


@overload
def deploy(
    graph: Graph[P, R],
    /,
    *,
    strategy: Strategy = ...,
    max_restarts: int = ...,
    within_seconds: float = ...,
    warmup: bool = ...,
    key: Callable[P, Hashable] | None = ...,
    weights: Mapping[Any, float] | None = ...,
    max_in_flight_per_key: int | None = ...,
    max_queue_per_key: int | None = ...,
    **options: Unpack[CallOptions],
) -> "_engine.Service[P, R]": ...
@overload
def deploy(
    graph: Graph[P, R],
    second: Graph[..., object],
    /,
    *more: Graph[..., object],
    strategy: Strategy = ...,
    max_restarts: int = ...,
    within_seconds: float = ...,
    warmup: bool = ...,
    key: Callable[[Call[Any]], Hashable] | None = ...,
    weights: Mapping[Any, float] | None = ...,
    max_in_flight_per_key: int | None = ...,
    max_queue_per_key: int | None = ...,
    **options: Unpack[CallOptions],
) -> "_engine.Service[P, R]": ...
def deploy(
    graph: Graph[P, R],
    /,
    *more: Graph[..., object],
    strategy: Strategy = "one_for_one",
    max_restarts: int = 3,
    within_seconds: float = 5.0,
    warmup: bool = False,
    key: Callable[..., Hashable] | None = None,
    weights: Mapping[Any, float] | None = None,
    max_in_flight_per_key: int | None = None,
    max_queue_per_key: int | None = None,
    **options: Unpack[CallOptions],
) -> "_engine.Service[P, R]":
    """Make graphs resident, so that many callers share their actors, limits and stateful nodes.

    Args:
        graph: the graph that `await service(...)` calls.
        *more: further graphs, which `service.run(call)` calls; all graphs share the instances of stateful nodes.
        strategy: when a stateful node crashes, which of the others are restarted with it: none ("one_for_one"), all
            ("one_for_all"), or those that were started after it ("rest_for_one").
        max_restarts: how many restarts there may be within `within_seconds`; one more ends the deployment with
            `DeploymentFailed`.
        within_seconds: the length of the window in which restarts are counted, in seconds.
        warmup: whether the deployment compiles the programs of its device nodes before it is ready, for the
            `sample_input=` of each.
        key: returns whose call it is, such as the tenant; it has the parameters of the graph, and with several graphs
            it is given the `Call`. The places are then shared fairly between the keys that want them: by the time for
            which their calls hold them, so a stream counts for as long as it is open. Within a key, calls of higher
            priority come first. When the queue is full, a call of the key that is furthest over its share gives way:
            the newest that waits there is refused in the place of the one that comes. Actors see the key in `Work.key`.
        weights: the weights of keys; a key with weight 2 has twice the share of one without, whose weight is 1.
        max_in_flight_per_key: how many places one key may hold at a time; None for all.
        max_queue_per_key: how many calls of one key may wait; further ones are refused. None without a limit.
        **options: `max_in_flight`, `max_queue`, `max_workers`, `scheduler`, `timeout_seconds`, `reuse_plans`,
            `device_strategy`.

    Returns:
        A `Service`, an async context manager.

    Raises:
        TypeError: an argument is not a graph.
        OptionsError: an option is unknown, does not apply, or does not accept its value.
        EngineLoopError: no event loop is running.
    """
    return _default_engine().deploy(
        graph, *more, strategy=strategy, max_restarts=max_restarts, within_seconds=within_seconds, warmup=warmup,
        key=key, weights=weights, max_in_flight_per_key=max_in_flight_per_key, max_queue_per_key=max_queue_per_key,
        **options,
    )  # fmt: skip


def plan(graph: Graph[..., object], /) -> Plan:
    """Return the plan of a graph: its steps after the planning passes, and what each pass changed.

    No event loop is needed. `print(engine.plan(graph))` shows the plan.

    Args:
        graph: the graph, not a call of it.

    Returns:
        The `Plan`.

    Raises:
        TypeError: the argument is not a graph.
        GraphTraceError: the graph does something that a trace cannot represent.
        PlanError: the type of a value does not fit the parameter that takes it.
    """
    return _as_graph(graph, "engine.plan")._planned(_resolve("Engine", {}, {}))


async def memory(
    what: Call[object] | Graph[[], object] | Plan, /, *, items: int | None = None, **options: Unpack[CallOptions]
) -> "_engine.MemoryReport":
    """Run a call once and report how much memory it takes; or how much the device nodes of a plan will take.

    For each device node the report has the bytes of arguments, outputs and temporaries of its programs, as XLA says;
    for each node the bytes of an item, of a result and of its full inbox in a pipeline; and the most that was in flight
    at a time. Measuring takes time, so it is not for production. Programs are compiled off the loop.

    Args:
        what: a call, which runs once; or a plan (`engine.plan(graph)`), which does not run: its device nodes with
            `sample_input=` are compiled.
        items: for a call that gives a stream, how many values are read; all by default.
        **options: those of `run`.

    Returns:
        A `MemoryReport`; `str()` shows it as a table.

    Raises:
        Exception: the error of the call, or of a function while it was traced.
        OptionsError: an option is unknown or does not apply.
    """
    return await _default_engine().memory(what, items=items, **options)


if not TYPE_CHECKING:
    __getattr__, __dir__ = _public(
        __name__,
        {
            "DetachedStream": ".detached",
            "Drawing": ".drawing",
            "DrawnEdge": ".drawing",
            "DrawnNode": ".drawing",
            "MemoryReport": ".footprint",
            "Missed": ".detached",
            "NodeMemory": ".footprint",
            "Service": ".service",
            "ServiceState": ".deployment",
            "ServiceStatistics": ".service",
            "StoredSnapshot": "..saving.snapshots",
            "tuned_for_serving": ".tuning",
        },
    )
