"""The decorator `node`, nodes of functions that take a batch, and `apply`: a node of one line."""

import ast
import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import (
    Any,
    Final,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    TypeVarTuple,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    overload,
)
from weakref import WeakValueDictionary

from ..actors.accepted import NAME, check, optional, refuse_beside, refuse_unknown
from ..actors.batching import BATCH, Batch, results_of
from ..actors.loop_host import StreamActor, owns_loop
from ..actors.policy import Cache, Effectful, Hedge, Policy, Retry
from ..actors.stream_buffer import DEFAULT_CAPACITY
from ..actors.supervision import RestartMode
from ..telemetry.text import MAX_NAME_COLUMNS, printable, shorten
from .executions import InBatches
from .graph import Graph
from .node import RUNS_ON, Node, RunsOn, as_execution
from .stateful import is_stateful, make_stateful
from .tracing.annotations import hints_of, signature_of, unwrapped
from .tracing.ref import PendingRef, Ref, closure_values, refuse_leak
from .tracing.source import locate
from .tracing.tracer import active


def batched_node(
    fn: Callable[..., Any], batch: Batch, policy: Policy, name: str | None, runs_on: RunsOn
) -> Node[..., Any]:
    """Make a node that takes one item, of a function that takes a list of items.

    Args:
        fn: the function; it returns a list with one result or exception per item.
        batch: how items are gathered.
        policy: the policy of the node.
        runs_on: how the function runs.
        name: the name of the node; by default the name of the function.

    Raises:
        TypeError: the function cannot be a batched node.
    """
    label = name or str(getattr(fn, "__name__", type(fn).__name__))
    if isinstance(fn, type):
        raise TypeError(
            f"@node(batch=...) on class {label!r}: batch= is for functions and methods; a class may own its loop"
        )
    if type(batch) is not Batch:
        raise TypeError(
            f"node {label!r} takes a list, which is not padded: {type(batch).__name__} is for device_node, which "
            "stacks arrays; use penstock.Batch here"
        )
    if batch.max_size == "auto":
        raise TypeError(f'node {label!r} has Batch("auto"), which is only for device nodes: pass a number of items')
    _check_takes_a_list(fn, label)
    execution = as_execution(runs_on)
    if not execution._takes_batches:
        raise TypeError(f"node {label!r} has batch=, which does not apply to runs_on={execution.name!r}; leave out one")
    Node(fn, policy, name=label, runs_on=execution)  # refuses options that do not fit

    # `concurrency` counts batches, so the batcher obeys it. Items that wait for a batch need no place of the node. The
    # inbox of the node holds a whole batch: else the last items of a batch would wait for room until the first are
    # taken.
    capacity = policy.capacity or max(DEFAULT_CAPACITY, batch.max_size)
    one_item: Any = _of_one_item(fn, label)
    one_item._penstock_of_list = fn  # the function that another process calls
    gathered = InBatches(execution, fn, batch, policy.concurrency)
    return Node(one_item, replace(policy, concurrency=None, capacity=capacity), name=label, runs_on=gathered)


def _check_takes_a_list(fn: Callable[..., Any], name: str) -> None:
    """Refuse a function that needs arguments besides the list; a method may need its instance as well."""
    try:
        parameters = signature_of(fn).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return
    needed = [one for one in parameters.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    scope = getattr(fn, "__qualname__", "").rpartition(".")[0]
    is_method = bool(scope) and not scope.endswith("<locals>")
    if not parameters or len(needed) > 1 + is_method:
        raise TypeError(
            f"node {name!r} has batch=, so its function takes one list of items, and it takes "
            f"({', '.join(parameters)}): make a tuple of the values of one item, such as "
            "the value of a resource; for values that all items share, make the node a method of an object"
        )


def _of_one_item(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that handles one item as a batch of one item; graphs read its signature and annotations."""

    @functools.wraps(fn)
    async def handle(*args: Any) -> Any:
        results = fn(*args[:-1], [args[-1]])
        if inspect.isawaitable(results):
            results = await results
        [result] = results_of(results, 1, name)
        if isinstance(result, BaseException):
            raise result
        return result

    del handle.__wrapped__  # `inspect.signature` would follow `__wrapped__` to the parameters of the batch
    with suppress(TypeError, ValueError):  # some builtins have no signature
        signature, hints = signature_of(fn), hints_of(fn)
        *before, items = signature.parameters.values()
        annotations = {items.name: _item_of(hints.get(items.name)), "return": _result_of(hints.get("return"))}
        handle.__annotations__ = {key: hint for key, hint in annotations.items() if hint is not None}
        item = items.replace(kind=inspect.Parameter.POSITIONAL_ONLY, annotation=annotations[items.name])
        before = [one.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for one in before]
        made: Any = handle
        made.__signature__ = signature.replace(parameters=[*before, item], return_annotation=annotations["return"])
    return handle


def _item_of(hint: Any) -> Any:
    """Return T of list[T]; None if unknown."""
    members = get_args(hint)
    return members[0] if len(members) == 1 else None


def _result_of(hint: Any) -> Any:
    """Return U of list[U | Exception]; None if unknown."""
    member = _item_of(hint)
    if get_origin(member) not in (Union, types.UnionType):
        return member
    members: tuple[Any, ...] = get_args(member)
    left: list[Any] = [one for one in members if not (isinstance(one, type) and issubclass(one, BaseException))]
    return left[0] if len(left) == 1 else None


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")
Owner = TypeVar("Owner")
Ts = TypeVarTuple("Ts")


class _Decorator(Protocol):
    @overload
    def __call__(self, cls: type[T], /) -> type[T]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Node[P, R]: ...


class _FailoverDecorator(Protocol[P, R]):
    @overload
    def __call__(self, cls: type[T], /) -> type[T]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Node[P, R]: ...


class _BatchDecorator(Protocol):
    # The function takes a list and returns a list; a caller of the node passes one item and gets one result. With Any
    # in place of `object`, mypy would call the overloads that take a node ambiguous.
    @overload
    def __call__(
        self, fn: Callable[[list[T]], Awaitable[Sequence[U | Exception]]], /
    ) -> Node[[T], Coroutine[object, object, U]]: ...
    @overload
    def __call__(
        self, fn: Callable[[list[T]], Sequence[U | Exception]], /
    ) -> Node[[T], Coroutine[object, object, U]]: ...
    @overload
    def __call__(
        self, fn: Callable[[Owner, list[T]], Awaitable[Sequence[U | Exception]]], /
    ) -> Node[[Owner, T], Coroutine[object, object, U]]: ...
    @overload
    def __call__(
        self, fn: Callable[[Owner, list[T]], Sequence[U | Exception]], /
    ) -> Node[[Owner, T], Coroutine[object, object, U]]: ...


class _BatchedOptions(TypedDict, total=False):
    """The options of a node with `batch=`."""

    name: str | None
    concurrency: int | None
    capacity: int | None
    max_bytes: int | None
    runs_on: RunsOn
    timeout_seconds: float | None
    retry: Retry | None
    fallback: Callable[[Exception], Any] | None
    pure: bool
    effectful: Effectful
    model: str | None
    cache: Cache | None
    stateless: bool


class _NodeOptions(_BatchedOptions, total=False):
    """The options of a node, without `batch` and `failover`."""

    inbox_capacity: int | None
    restart: RestartMode
    restart_on: tuple[type[Exception], ...]
    shutdown_seconds: float | None
    ordered: bool
    hedge: Hedge | None
    discard: Callable[[Any], object] | None


_DEFAULTS: Final[dict[str, Any]] = {
    **{field.name: field.default for field in fields(Policy)}, "name": None, "runs_on": "loop", "batch": None,
}  # fmt: skip


@overload
def node(cls: type[T], /) -> type[T]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
@overload
def node(fn: Callable[P, R], /) -> Node[P, R]: ...
@overload
def node(**options: Unpack[_NodeOptions]) -> _Decorator: ...
@overload
def node(*, failover: Callable[P, R], **options: Unpack[_NodeOptions]) -> _FailoverDecorator[P, R]: ...
@overload
def node(
    *, batch: Batch, failover: Callable[..., Any] | None = None, **options: Unpack[_BatchedOptions]
) -> _BatchDecorator: ...
def node(
    fn: Any = None,
    /,
    *,
    batch: Batch | None = None,
    failover: Callable[..., Any] | None = None,
    **options: Unpack[_NodeOptions],
) -> Any:
    """Make a node of a function, an async function, or a class whose instances are called.

    Args:
        fn: the function or class, when used without parentheses.
        name: the name of the node in drawings, traces and errors; default: the name of the function.
        concurrency: how many items the node handles at a time, per Engine. Default: as many as come for an `async def`,
            within `max_workers`; the size of the pool for a thread or process node; 1 for a plain `def` and for a
            stateful node; an actor that owns its loop takes all items in its inbox. With `batch`: how many batches are
            handled at a time; default 1.
        capacity: how many items the inbox of the node holds in a pipeline. The default is the largest of 16,
            `concurrency` and the size of a batch. For a node that gives a stream: how many values the stream holds; 16
            by default.
        inbox_capacity: for a `StreamActor`: how many items the inbox holds; 16 by default.
        max_bytes: how many bytes the inbox holds, counted for values that know their size (`nbytes`, `bytes`, `str`).
        runs_on: where a plain `def` runs: "loop", "thread" or "process"; or a `penstock.extension.Execution`, which may
            take other functions as well. A class whose `__call__` is a plain `def` may also say "process": each worker
            process makes its own instance for each run, stream or deployment, enters it with `__enter__`, and leaves it
            with `__exit__`. Use this for objects that are slow to make, and not for state: a worker that dies or is
            killed takes its instance along.
        timeout_seconds: how long one attempt may take, in seconds; in a worker process, from its beginning there.
        retry: which failures are worth another attempt.
        fallback: a function of the exception, called once after the last attempt has failed; its result becomes the
            result of the node.
        batch: gathers items of many requests and handles them together: the function takes a list and returns a list
            (or tuple) with one result or exception per item, while callers pass one item.
        pure: states that equal arguments give equal results and that a call has no effect. Then equal calls in a graph
            are merged, and a call whose result is not read is left out.
        effectful: states that the node is called for its effect. With True, effects keep the order of the source: a
            call begins after all steps before it have ended, and the steps after the call begin after it has ended.
            "unordered" leaves the order open, for nodes that only emit events, or whose effects may overlap.
        restart: for a class: the exits after which a new instance replaces the old one: "permanent" after all exits,
            "transient" after crashes, "temporary" never.
        restart_on: for a class: the exceptions of `__call__` after which the instance is broken, which counts as a
            crash. Any other exception only fails its item.
        shutdown_seconds: for an actor that owns its loop: for how many seconds the loop may go on when its scope ends
            and no more work comes, before it is cancelled. 5 by default; 0 cancels it at once.
        model: the name of the model that the node calls, if the call takes nearly all time of the node. Then spans have
            the attributes that OpenTelemetry defines for model calls, with the tokens in `usage` of the result.
        ordered: for a class: the instance takes the items of `engine.stream(calls)`, or of a `map_each`, in input
            order, even after nodes where items overtake each other. An item that ends before it reaches the node gives
            up its turn.
        failover: another node, with the same parameters and result, which takes over after the last attempt has failed.
            The failover is a branch of the graph, with its own policy and places. A `fallback` gets the error of the
            failover then. A node that gives a stream is taken over only before its first value.
        hedge: begins a second attempt beside a slow attempt; for a stream, beside an attempt whose first value is slow;
            see `penstock.Hedge`. Not for classes, batches and effectful nodes.
        cache: keeps results for equal calls; see `penstock.Cache`. Not for classes, streams and effectful nodes.
        stateless: states that the node keeps no state between two items or values that `checkpoint=` has to save; for a
            node with `batch=`, that results up to rounding are enough.
        discard: a function of a result, such as `httpx.Response.aclose`, called once for each result that no step has
            begun to read and no caller has got: the result of a hedge that lost, or of an item that ended between two
            nodes. An awaitable that it returns is awaited. The function keeps a place of the node until it has ended;
            its error is logged. Results that a cache keeps are never discarded. Not for batches and streams.

    Returns:
        A `Node`; a class stays a class, and calls of its instances become steps.

    Raises:
        OptionsError: an option is unknown, or does not accept its value.
        TypeError: the function cannot be a node with these options, such as an `async def` with runs_on="thread"; or
            the function is passed together with options.
    """
    given: dict[str, Any] = {**options, "batch": batch, "failover": failover}
    refuse_unknown(given, _DEFAULTS, "@ps.node")
    refuse_beside(fn, [option for option in given if given[option] is not _DEFAULTS[option]], "ps.node")
    name, runs_on = given.pop("name", None), given.pop("runs_on", "loop")
    check("name", name, optional(NAME))
    check("batch", given.pop("batch"), BATCH)
    check("runs_on", runs_on, RUNS_ON)
    policy = Policy(**given)

    def decorate(target: Any) -> Any:
        if isinstance(target, Node):
            raise TypeError(f"{target.name!r} is a node already; use {target.name}.with_policy(...) for a copy")
        if isinstance(target, Graph):
            raise TypeError(
                f"{target.name!r} is a graph already; another graph calls it directly, and policies belong to its nodes"
            )
        if is_stateful(target) and not isinstance(target, type):
            raise TypeError(f"{target!r} is an instance of a node already: @ps.node goes on its class")
        label = name or getattr(target, "__name__", target)
        kind = cast("type[Any]", target) if isinstance(target, type) else None
        if policy.shutdown_seconds is not None and (kind is None or not owns_loop(kind)):
            raise TypeError(
                f"node {label!r} does not own its loop, so shutdown_seconds= does not apply; it is for classes derived "
                "from ps.Actor or ps.StreamActor"
            )
        if policy.inbox_capacity is not None and (kind is None or StreamActor not in kind.__mro__):
            raise TypeError(
                f"node {label!r} has inbox_capacity=, which is for classes derived from ps.StreamActor; write "
                "capacity=, which bounds the inbox, or the stream of a node that gives a stream"
            )
        if policy.ordered and not _may_be_ordered(target):
            raise TypeError(
                f"node {label!r} has ordered=True, which is for state that has to see items in input order: a class "
                "whose __call__ returns one result"
            )
        if batch is not None and callable(target):
            return batched_node(target, batch, policy, name, runs_on)
        if kind is not None:
            return make_stateful(kind, policy, name, runs_on)
        if not callable(target):
            raise TypeError(f"@node needs a function or a class, got {target!r}")
        return Node(target, policy, name=name, runs_on=runs_on)

    return decorate if fn is None else decorate(fn)


def _may_be_ordered(target: object) -> bool:
    if not isinstance(target, type) or owns_loop(target):
        return False
    call = next((vars(base)["__call__"] for base in target.__mro__ if "__call__" in vars(base)), None)
    return call is None or not inspect.isasyncgenfunction(inspect.unwrap(call))


def apply(fn: Callable[[Unpack[Ts]], R], /, *args: *Ts) -> R:
    """Call a function of one line in a graph, as a step: `ps.apply(lambda a, b: f"Judge {a} against {b}", a, b)`.

    The step runs the function on the event loop, so the function should be short; an `async def` is awaited. The name
    of the step is the source of the lambda, shortened in the middle, or the name of the function. For a policy, make
    the function a node.

    Args:
        fn: the function, most often a lambda. Pass results of other steps as arguments: a lambda cannot see such values
            from outside.
        *args: the arguments: results of other steps, or values.

    Returns:
        The result of the function. Outside of a graph, the function is simply called.

    Raises:
        TypeError: `fn` is not a function.
        GraphTraceError: the function uses a result of another step that is not an argument.
    """
    if isinstance(fn, Node | Graph | Ref | PendingRef) or is_stateful(fn) or not callable(fn):
        remedy = (
            "call it directly"
            if isinstance(fn, Node | Graph) or is_stateful(fn)
            else ("for a method, write ps.apply(lambda value: value.method(), value)")
        )
        raise TypeError(f"ps.apply takes a function first, got {fn!r}: {remedy}")
    if active() is not None:
        return cast("R", _node_of_one_line(fn)(*args))
    for arg in args:
        if isinstance(arg, Ref | PendingRef):
            refuse_leak("function", _name_of(fn), arg)
    return fn(*args)


# The node of each place in the source, by the id of its code. A graph may be traced again, and its nodes stay the same:
# the trace holds them. A node keeps its function alive, so the id belongs to this code as long as the node is here.
_of_one_line: WeakValueDictionary[int, Node[..., Any]] = WeakValueDictionary()


def _node_of_one_line(fn: Callable[..., Any]) -> Node[..., Any]:
    fn = _with_values_of_now(fn)
    inner = unwrapped(fn)
    inner = getattr(inner, "__func__", inner)
    place = id(getattr(inner, "__code__", inner))
    known = _of_one_line.get(place)
    if known is None:
        known = _of_one_line[place] = Node(fn, Policy(), name=_name_of(inner))
    same_values = known.fn is fn or _values_of(known.fn) == _values_of(fn)
    return known if same_values else Node(fn, known.policy, name=known.name, origin=known)


def _with_values_of_now(fn: Any) -> Any:
    """Return a lambda with a copy of its closure: a loop in the graph may later change a variable in the closure."""
    if not isinstance(fn, types.FunctionType) or fn.__name__ != "<lambda>" or not fn.__closure__:
        return fn
    cells = tuple([types.CellType(cell.cell_contents) if cell != types.CellType() else cell for cell in fn.__closure__])
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


def _values_of(fn: Any) -> object:
    """Return the ids of the objects in closure and defaults, which tell functions with the same code apart."""
    if not isinstance(fn, types.FunctionType):
        return id(fn)
    values = (*closure_values(fn), *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    return [id(value) for value in values]


def _name_of(fn: Any) -> str:
    name = str(getattr(fn, "__name__", type(fn).__name__))
    if name != "<lambda>":
        return name
    found = locate(fn)
    text = found and ast.get_source_segment("".join(found.lines), found.node)
    return shorten(printable(text), MAX_NAME_COLUMNS) if text else "lambda"
