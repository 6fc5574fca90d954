"""Graph: an async function that is traced once; and Call: a graph with its arguments, which an engine runs."""

import functools
import inspect
import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, ParamSpec, Protocol, Self, TypeVar, cast, overload
from weakref import WeakSet

from .._errors import GraphTraceError, OptionsError, PlanError
from .._public import LateModule
from ..actors.accepted import NAME, check, one_of
from ..actors.loop_host import StreamActor
from ..actors.threads import ThreadPool
from ..telemetry.text import printable
from .control import Control, Tag_co, map_each
from .node import Node, callee_name, global_name, is_async, refuse_pickle
from .open_resources import run_eagerly
from .options import DEFAULTS, ExecutionOptions, OnFinished
from .planning import make_plan, merge_equal_calls
from .program import Pass, Plan
from .stateful import is_stateful, node_of
from .tracing.annotations import annotation_text, hint_of, hints_of, is_stream_parameter, signature_of, unwrapped
from .tracing.ref import PendingRef, Ref, Unawaited, call_location, definition_location, is_users, refuse_leak
from .tracing.references import References, resolve_references
from .tracing.source_check import check_source
from .tracing.tracer import Trace, Tracer, active, endless_recursion, is_tracing

if TYPE_CHECKING:
    from .. import engine as _engine
    from ..saving.durable import DurableCall
    from . import picture
else:
    _engine = LateModule(__package__)
    picture = LateModule(f"{__package__}.picture")

# Counts how often a node was replaced or restored. A trace made under another number is outdated.
_epoch = 0


_REFS = frozenset({Ref, PendingRef})
_REPLACED = "testing.replace has replaced or restored a node"


def epoch() -> int:
    """Return the number of replacements so far; a trace is outdated if this has changed since."""
    return _epoch


def outdate_traces() -> None:
    """Have each graph traced, planned and wired again at its next call."""
    global _epoch  # noqa: PLW0603 - the one number that all traces compare with
    _epoch += 1


@contextmanager
def replaced(node: Node[..., Any], fake: Callable[..., Any]) -> Generator[None, None, None]:
    """Within the `with`, call `fake` in place of a node and of all its copies. Graphs are traced again.

    Args:
        node: the node.
        fake: the function to call instead, with the same parameters and result.
    """
    origin = node.origin
    before = origin._replacement
    if is_async(origin.fn) and not is_async(fake):
        fake = _awaited(fake, origin.name)
    # The fake of a method is bound as the method is, so it takes `self`. The fake of a bound method has no `self`.
    _replace(origin, fake if node.bound_to is None else _without_self(fake))
    try:
        yield
    finally:
        _replace(origin, before)


def _replace(origin: Node[..., Any], fake: Callable[..., Any] | None) -> None:
    origin._replacement = fake
    outdate_traces()


def _awaited(fake: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(fake)
    async def call(*args: Any, **kwargs: Any) -> Any:
        made = fake(*args, **kwargs)
        if not inspect.isawaitable(made):
            raise TypeError(
                f"the fake of node {name!r} returned {made!r}, and the node is an `async def`: make its fake "
                "an `async def`, too"
            )
        return await made

    return call


def _without_self(fake: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fake)
    def call(_self: object, *args: Any, **kwargs: Any) -> Any:
        return fake(*args, **kwargs)

    return call


P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
Rest = ParamSpec("Rest")
Tag = TypeVar("Tag")


class Call(Unawaited, Generic[R_co, Tag_co]):
    """A graph with its arguments, not started; `engine.run`, `engine.stream` and a service run it.

    `await call` runs the graph without an engine, step by step as plain Python; the policies of its nodes (retry,
    timeout, limits) do not apply then. A call pickles with its arguments; its graph pickles by module and name.

    Attributes:
        graph: the graph.
        arguments: the arguments, in the order of the parameters of the graph.
        tag: the object that `penstock.tagged` has given to the call; None without a tag.
    """

    __slots__ = ("arguments", "graph")

    # Set by `telemetry.continued` and `tagged`. Defaults in the class, not slots, since few calls have them.
    _trace_headers: Mapping[str, str] | None = None
    tag: Tag_co = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

    def __init__(self, graph: "Graph[..., R_co]", arguments: tuple[Any, ...]) -> None:
        self.graph = graph
        self.arguments = arguments

    def __await__(self) -> Generator[Any, Any, R_co]:
        tracer = active()
        if tracer is None:
            return run_eagerly(self.graph._start(self.arguments)).__await__()
        tracer.awaited(self)
        return cast(Generator[Any, Any, R_co], _inlined(tracer, self))

    def _continued(self, headers: Mapping[str, str]) -> "Call[R_co, Tag_co]":
        """Return the same call with the headers of the trace that it continues."""
        return _MarkedCall(self.graph, self.arguments, headers, self.tag)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the call: the graph by module and name, and the arguments."""
        if self._trace_headers is None:
            return Call, (self.graph, self.arguments)
        return _MarkedCall, (self.graph, self.arguments, self._trace_headers)

    def __repr__(self) -> str:
        # Names the remedy: before Python 3.14, asyncio.run(search("x")) refuses a call with an error that shows this.
        return f"<Call of graph {printable(self.graph.name)}, which `await engine.run(call)` runs>"


class _MarkedCall(Call[R_co, Tag_co]):
    """A call with the headers of a trace, with a tag, or with both."""

    __slots__ = ("_trace_headers", "tag")

    def __init__(self, graph: "Graph[..., R_co]", arguments: tuple[Any, ...], headers: Any, tag: Any = None) -> None:
        super().__init__(graph, arguments)
        self._trace_headers = headers
        self.tag = tag


def tagged(call: Call[R, Any], tag: Tag) -> Call[R, Tag]:
    """Return a call with a tag: an object that comes back with the outcome, such as the message that the call handles.

    A stream of calls gives the tag back as `outcome.tag`, in whatever way and order its calls end. `order_by=` finds
    the tag as `call.tag`. No node sees the tag: it is not an argument, and it is neither compared nor pickled.

    Args:
        call: a call of a graph, not yet started; an earlier tag is replaced.
        tag: any object. It is kept until the outcome of the call is read.

    Returns:
        The call to pass to the stream; `telemetry.continued` accepts this call as well.

    Raises:
        TypeError: the first argument is not a call.
    """
    one = as_call(call, "ps.tagged")
    return _MarkedCall(one.graph, one.arguments, one._trace_headers, tag)


@dataclass(frozen=True)
class GraphStatistics:
    """A snapshot of the cost of tracing and planning a graph. A graph inside another graph is traced with that graph.

    Attributes:
        traces: how often the function of the graph was traced.
        reasons: why the function was traced again, the last hundred times, newest last: the name that was rebound.
        trace_seconds: the time that tracing has taken, over all traces that succeeded.
        plan_seconds: the time that planning has taken, over all plans that succeeded.
        hits: how often a verb used the trace and the plan again: counted at each `engine.run`, and for each graph of a
            stream or a deployment when the stream or deployment begins.
    """

    traces: int
    reasons: tuple[str, ...]
    trace_seconds: float
    plan_seconds: float
    hits: int


# More reasons than a person reads; a bound is needed where a graph reads a name that changes with each call.
_MAX_REASONS = 100


class Graph(Generic[P, R_co]):
    """An async function that calls nodes and is traced once; made by `penstock.graph`.

    Calling a graph gives a `Call`. `a >> b` builds a chain, in which `b` takes the result of `a`. A graph that another
    graph awaits becomes part of it. A graph pickles by module and name, as a function does.

    Attributes:
        fn: the function itself.
        name: the name of the function.
    """

    # The nodes and graphs of a chain; empty for a graph with a function of the user.
    _parts: tuple[Any, ...] = ()

    def __init__(self, fn: Callable[P, Coroutine[Any, Any, R_co]]) -> None:
        self.fn = fn
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        functools.update_wrapper(self, fn, updated=())
        self._signature = signature_of(fn)
        _refuse_variadic(fn, self.name, self._signature)
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        self._positional = len(kinds) - kinds.count(inspect.Parameter.KEYWORD_ONLY)
        self._arity = len(kinds) if self._positional == len(kinds) else -1
        self._trace: Trace | None = None
        self._plans: dict[bool, Plan] = {}  # by the execution option `fuse`
        self._references = References()
        self._epoch = -1
        self._traces = self._hits = 0
        self._reasons: deque[str] = deque(maxlen=_MAX_REASONS)
        self._trace_seconds = self._plan_seconds = 0.0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call[R_co]:
        """Return a `Call` with these arguments, without starting it."""
        # A hot path: called once for each item of a stream.
        if is_tracing() is not None and (tracer := active()) is not None:
            call = Call(self, self._bound(args, kwargs))
            tracer.pending[call] = call_location()
            return call
        return Call(self, self._arguments(args, kwargs))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments in the order of the parameters, for a call outside of a trace. All must be values."""
        arguments = args if len(args) == self._arity and not kwargs else self._bound(args, kwargs)
        for arg in arguments:
            if type(arg) in _REFS:
                refuse_leak("graph", self.name, arg)
        return arguments

    @overload
    def __rshift__(self: "Graph[P, A]", following: Callable[[A], Awaitable[B]]) -> "Graph[P, B]": ...
    @overload
    def __rshift__(self: "Graph[P, A]", following: Callable[[A], B]) -> "Graph[P, B]": ...
    def __rshift__(self, following: Any) -> Any:
        """Build a chain: the result of this graph is the only argument of `following`."""
        return chain(self, following)

    @overload
    def __rrshift__(  # type: ignore[misc]
        self: Callable[[AsyncIterator[A]], "Call[B]"], before: AsyncIterator[A]
    ) -> "Call[B]": ...
    @overload
    def __rrshift__(self: Callable[[A], "Call[B]"], before: AsyncIterator[A]) -> AsyncIterator[B]: ...
    @overload
    def __rrshift__(self: Callable[[A], "Call[B]"], before: Callable[Rest, Awaitable[A]]) -> "Graph[Rest, B]": ...
    @overload
    def __rrshift__(self: Callable[[A], "Call[B]"], before: Callable[Rest, A]) -> "Graph[Rest, B]": ...
    def __rrshift__(self, before: Any) -> Any:
        """Read a stream, as a whole or value by value; or build a chain that begins with a stateful node."""
        return chain(before, self)

    def _start(self, arguments: tuple[Any, ...]) -> Coroutine[Any, Any, R_co]:
        """Call the function; `arguments` are in the order of its parameters, with keyword-only parameters."""
        fn: Callable[..., Coroutine[Any, Any, R_co]] = self.fn
        if self._arity >= 0:
            return fn(*arguments)
        names = list(self._signature.parameters)[self._positional :]
        return fn(*arguments[: self._positional], **dict(zip(names, arguments[self._positional :], strict=True)))

    def _present_trace(self) -> Trace:
        """Return the trace of the graph. Trace the graph again if a name that its function uses was rebound.

        Raises:
            GraphTraceError: the function does something that a trace cannot represent.
        """
        if self._trace is None or self._epoch != epoch() or self._references.changed():
            reason = ""
            if self._trace is not None:
                reason = _REPLACED if self._epoch != epoch() else self._references.what_changed()
            self._trace, self._references = self._traced(reason)
            self._epoch = epoch()
        return self._trace

    def _planned(self, options: ExecutionOptions = DEFAULTS) -> Plan:
        """Return the plan of the present trace. All callers with the same `fuse` share the plan.

        With `reuse_plans=False`, the caller gets a new trace and plan for itself.
        """
        if not options.reuse_plans:
            trace = self._traced("reuse_plans=False")[0]
            return self._made_plan(trace, without=(merge_equal_calls,), fuse=options.fuse)
        trace = self._present_trace()
        plan = self._plans.get(options.fuse)
        if plan is not None and plan.trace is trace:
            self._hits += 1
        else:
            plan = self._plans[options.fuse] = self._made_plan(trace, fuse=options.fuse)
        return plan

    def _made_plan(self, trace: Trace, without: tuple[Pass, ...] = (), *, fuse: bool) -> Plan:
        began = perf_counter()
        plan = make_plan(trace, without=without, fuse=fuse)
        self._plan_seconds += perf_counter() - began
        return plan

    def statistics(self) -> GraphStatistics:
        """Return how often and why the graph was traced, how long tracing took, and how often a trace was reused."""
        return GraphStatistics(self._traces, tuple(self._reasons), self._trace_seconds, self._plan_seconds, self._hits)

    def _traced(self, reason: str) -> tuple[Trace, References]:
        """Trace the function; return the trace, and the global names that the function has used.

        Args:
            reason: why the function is traced again, for statistics; empty for the first trace.
        """
        began = perf_counter()
        tracer = Tracer(self.name)
        parameters = [
            tracer.parameter(name, hint_of(self.fn, name), is_stream=is_stream_parameter(self.fn, name))
            for name in self._signature.parameters
        ]
        try:
            result = tracer.run(self.fn, self._start, tuple(parameters))
            hints = hints_of(self.fn)
            trace = tracer.finish(result, self.fn, tuple(hints.get(name) for name in self._signature.parameters))
        except RecursionError:
            raise endless_recursion(definition_location(self.fn), self.name) from None
        finally:
            tracer.closed = True
        functions = dict.fromkeys(trace.functions)
        for fn in functions:
            _check(fn, is_body=fn is not self.fn, is_traced=True)  # `@graph` has checked its own function
        references = resolve_references(functions, is_tracked=is_tracked)
        self._trace_seconds += perf_counter() - began
        self._traces += 1
        if reason:
            self._reasons.append(reason)
        return trace, references

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            message = f"graph {self.name!r} is called wrongly: {error}; its parameters are {self._signature}"
            if active() is None:
                raise TypeError(message) from None
            raise GraphTraceError(f"{call_location()}: {message}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def drawing(self) -> "_engine.Drawing":
        """Return the graph as names and edges, for code that draws the graph itself."""
        return picture.drawing_of(self._present_trace())

    def to_mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart, for Markdown."""
        return picture.shown(self.drawing(), "mermaid")

    def to_dot(self) -> str:
        """Return the graph in Graphviz's language."""
        return picture.shown(self.drawing(), "dot")

    def __str__(self) -> str:
        return picture.shown(self.drawing(), "text")

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the graph by module and name, like a function. Pickle a chain without a name by its parts."""
        name = global_name(self, self.fn)
        if name is None and self._parts:
            return _chained, self._parts
        return name or refuse_pickle(f"graph {self.name!r}", self.fn)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # like a function

    def __repr__(self) -> str:
        return f"<Graph {printable(self.name)}>"

    def _repr_svg_(self) -> str:
        return picture.shown(self.drawing(), "svg")


class _Decorator(Protocol):
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Graph[P, R]: ...


@overload
def graph(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Graph[P, R]: ...
@overload
def graph(fn: StreamActor[A, B], /) -> "Graph[[A], AsyncIterator[B]]": ...
@overload
def graph(fn: Node[P, R], /) -> Graph[P, R]: ...
@overload
def graph() -> _Decorator: ...
def graph(fn: Any = None, /) -> Any:
    """Make a graph of an `async def` that calls nodes; or of one node, which becomes the only step of the graph.

    `graph(fetch)` has the name and the parameters of the node `fetch`, so the verbs run the node alone:
    `engine.run(graph(fetch)("x.org"))`, `engine.deploy(graph(fetch))`. The graph of a node is made and traced once. An
    instance of a class that is a node is accepted, too.

    A graph cannot be a method. If a graph needs an object, define the graph in a function or method that has the
    object: `def build(config: Config) -> Graph[[str], Answer]`.

    Args:
        fn: the function, when used without parentheses; or a node.

    Returns:
        A `Graph`; calling it gives a `Call`.

    Raises:
        GraphTraceError: the source has a statement that a trace cannot represent, such as `try` or
            `asyncio.gather`; the message names the file, the line and the remedy.
    """
    if fn is None:
        return graph
    if isinstance(fn, Node):
        node = cast("Node[..., Any]", fn)
        if node._alone is None:
            node._alone = _chained(node)
        return cast("Graph[..., Any]", node._alone)
    if is_stateful(fn) and not isinstance(fn, type):
        return _chained(fn)
    if not inspect.iscoroutinefunction(fn):
        remedy = "write `async def`"
        if inspect.isasyncgenfunction(fn):
            remedy = "a graph has no `yield`: write a node that yields (an async generator) and return a call of it"
        elif isinstance(fn, Graph):
            remedy = "this is a graph already"
        elif is_stateful(fn):
            remedy = f"make an instance of the class first, {_graph_of(fn)}"
        where = definition_location(cast("object", fn))
        raise GraphTraceError(f"{where}: @graph needs an `async def`, got {fn!r}; {remedy}")
    _refuse_method(fn)
    _check(fn, is_body=False, is_traced=False)
    return Graph(fn)


def _refuse_method(fn: Callable[..., Any]) -> None:
    """Refuse a method: a graph has one trace, and a method would need a trace for each instance."""
    around, _, name = getattr(fn, "__qualname__", "").rpartition(".")
    if around and not around.endswith("<locals>") and next(iter(signature_of(fn).parameters), "") in _RECEIVERS:
        raise GraphTraceError(
            f"{definition_location(fn)}: graph {name!r} is a method of {around}; a graph is traced once, not for each "
            f"instance: write `def build_{name}(...)`, a function or method that takes the objects of the graph, "
            "and define the graph inside it. Nodes may be methods"
        )


def chain(*parts: Any) -> Any:
    """Build a graph in which each part takes the result of the part before; a stream as first part is read."""
    if isinstance(parts[0], AsyncIterator | Ref):
        return _read_by(*parts)
    for part in parts:
        if not isinstance(part, Node | Graph) and not is_stateful(part):
            made_of = f"is made of nodes and graphs, not of {part!r}"
            raise TypeError(f"a chain (a >> b) {made_of}: make a node of the function, ps.node(...)")
    return _chained(*parts)


def _chained(*parts: Any) -> Graph[..., Any]:
    """Build a graph of nodes and graphs, each of which takes the result of the part before."""
    first, last = [part.fn if isinstance(part, Node | Graph) else part for part in (parts[0], parts[-1])]
    try:
        signature = signature_of(first)
    except (TypeError, ValueError):
        raise GraphTraceError(
            f"the parameters of {callee_name(parts[0])!r} are not known, as for some builtin functions: call it in an "
            "`async def` with @ps.graph"
        ) from None

    async def run_chain(*args: Any, **kwargs: Any) -> Any:
        value = await settled(parts[0](*args, **kwargs))
        for part in parts[1:]:
            value = await settled(part(value))
        return value

    if isinstance(parts[0], Node):
        own = parts[0].runs_on._made
        signature = signature.replace(parameters=[one for one in signature.parameters.values() if one.name not in own])
    run_chain.__name__ = run_chain.__qualname__ = "_to_".join(map(callee_name, parts))
    run_chain.__module__ = first.__module__
    _refuse_variadic(first, run_chain.__name__, signature)
    run_chain.__signature__ = signature  # type: ignore[attr-defined]
    run_chain.__annotations__ = _annotations_of(first, last, signature.parameters)
    made: Graph[..., Any] = Graph(run_chain)
    made._parts = parts
    return made


def _annotations_of(first: Callable[..., Any], last: Callable[..., Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the known annotations of these parameters of one function, and of the result of another function.

    An annotation that cannot be resolved stays a text, which still shows whether the parameter is a stream.
    """
    hints, result = hints_of(first), hints_of(last).get("return")
    found = {name: hints.get(name) or annotation_text(first, name) for name in names}
    return {name: hint for name, hint in {**found, "return": result}.items() if hint is not None}


Node._make_chain = chain


def _read_by(stream: Any, following: Any) -> Any:
    """Return `following(stream)` if its first parameter is a stream; else call `following` for each value."""
    called: Any = node_of(following) if is_stateful(following) else following
    name = next(iter(signature_of(called.fn).parameters), "")
    if is_stream_parameter(called.fn, name):
        return following(stream)
    return cast("Any", map_each(following, stream))


def is_tracked(value: object) -> bool:
    """Whether a call of `value` in a graph becomes a step: a node, a graph, a stateful node, control flow."""
    return isinstance(value, Node | Graph | Control) or is_stateful(value)


def is_graph(value: object) -> bool:
    """Whether `value` is a graph. The source check gets this function as an argument: it cannot import this file."""
    return isinstance(value, Graph)


_RECEIVERS = ("self", "cls")

# The code of the functions that were checked, and the functions that call one that may become a node until the trace.
_checked: WeakSet[types.CodeType] = WeakSet()
_calls_unknown: WeakSet[types.FunctionType] = WeakSet()


def _check(fn: Callable[..., Any], *, is_body: bool, is_traced: bool) -> None:
    """Check the source of a graph, or of a body of control flow, for statements that a trace cannot represent.

    Functions of libraries are not checked. A body is checked once.
    """
    fn = unwrapped(fn)
    function = fn.__func__ if isinstance(fn, types.MethodType) else fn
    if not isinstance(function, types.FunctionType) or not is_users(function.__code__.co_filename):
        return
    if not is_traced or function in _calls_unknown or function.__code__ not in _checked:
        if check_source(fn, is_body=is_body, is_traced=is_traced, is_node=is_tracked, is_graph=is_graph):
            _calls_unknown.add(function)
        else:
            _checked.add(function.__code__)


async def settled(value: Any) -> Any:
    """Return the value that a call of a node or graph gives; await it if needed."""
    return await value if hasattr(value, "__await__") and not isinstance(value, Ref) else value


def _inlined(tracer: Tracer, call: Call[Any]) -> Generator[Any, Any, Any]:
    yield from ()  # makes this a generator, which __await__ must return; it never suspends
    return tracer.run(call.graph.fn, call.graph._start, call.arguments)


def _refuse_variadic(fn: Callable[..., Any], name: str, signature: inspect.Signature) -> None:
    kinds = inspect.Parameter
    for parameter in signature.parameters.values():
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            raise GraphTraceError(
                f"{definition_location(fn)}: parameter {parameter} of graph {name!r}: the number of values "
                "must be known when the graph is traced; take a list"
            )


def as_graph(graph: Any, verb: str) -> Graph[..., Any]:
    """Return the graph that was passed to a verb.

    Raises:
        TypeError: the argument is not a graph.
    """
    if isinstance(graph, Graph):
        return graph  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of Graph[..., Any]
    remedy = "make one with @ps.graph"
    if isinstance(graph, Call):
        called: Call[Any] = graph  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of Call[Any]
        remedy = f"pass the graph without calling it, {verb}({called.graph.name})"
    elif isinstance(graph, Node) or is_stateful(graph):
        remedy = f"ps.graph(node) makes a graph of one node, {verb}({_graph_of(graph)})"
    raise TypeError(f"{verb} takes a graph, got {graph!r}: {remedy}")


def _graph_of(node: Any) -> str:
    """Return code that makes the graph of one node, or of the node that gave a coroutine, for a message."""
    if isinstance(node, type):
        return f"ps.graph({node.__name__}(...))"
    if is_stateful(node):
        return "ps.graph(instance)"
    owner, _, name = str(getattr(node, "__qualname__", callee_name(node))).rpartition(".")
    if owner and not owner.endswith("<locals>"):  # the name of the variable with the instance is not known
        name = "instance" if name == "__call__" else f"instance.{name}"
    return f"ps.graph({'node' if name == '<lambda>' else name})"


def as_call(call: Any, verb: str, more: tuple[object, ...] = ()) -> Call[Any]:
    """Return the call that was passed to a verb. A graph without parameters stands for its only call.

    Args:
        call: the first argument of the verb.
        verb: the name of the verb, for the message.
        more: further arguments of the verb, which are refused.

    Raises:
        TypeError: the argument is neither a call nor a graph without parameters, or there are further arguments.
    """
    if isinstance(call, Call):
        if more:
            many = f"{verb.partition('.')[0]}.stream and service.map take many calls"
            raise TypeError(f"{verb} takes one call, got {1 + len(more)} arguments: {many}")
        return call  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of Call[Any]
    if isinstance(call, Graph):
        with suppress(TypeError):
            if not more:
                return cast("Graph[[], Any]", call)()
        raise TypeError(f"graph {call.name!r} has parameters: pass a call, {verb}({call.name}(...))")
    takes, what = f"{verb} takes a call of a graph", repr(call)
    remedy = "a node that is called outside of a graph has run already, and ps.graph(node)(...) makes a call of it"
    if inspect.iscoroutine(call) or inspect.isasyncgen(call):
        what, to_use = "an async generator", verb.replace(".run", ".stream")
        if inspect.iscoroutine(call):
            call.close()
            what, to_use = "a coroutine", verb
        what += f" of {call.__qualname__.rpartition('<locals>.')[2].removesuffix('.__call__')!r}"
        made = f"{to_use}({_graph_of(call)}(...))"
        remedy = f"if this is a node, ps.graph(node) makes a graph of it, {made}; otherwise call it in a node"
    elif isinstance(call, Node) or is_stateful(call):
        remedy = f"ps.graph(node) makes a graph of one node, {verb}({_graph_of(call)}(...))"
    else:
        takes += ", such as search(url)"
    raise TypeError(f"{takes}, got {what}: {remedy}")


class DurableKey(NamedTuple):
    """The options of a call about the key of a durable loop: `durable_key=`, `answer=` and `on_finished=`."""

    key: str | None = None
    answer: object = ...
    on_finished: OnFinished = "again"

    @property
    def is_given(self) -> bool:
        """Whether one of the options is given."""
        return self.key is not None or self.answer is not ... or self.on_finished != "again"


NO_KEY: Final = DurableKey()


def one_value(
    graph: Graph[..., Any],
    options: ExecutionOptions,
    verb: str = "engine.stream of many calls",
    asked: DurableKey = NO_KEY,
) -> Plan:
    """Return the plan of a graph whose calls give one value each.

    Raises:
        PlanError: the calls of the graph give streams.
        OptionsError: the graph has a durable loop, and the call has no key; or the call has a key without such a loop.
    """
    plan = graph._planned(options)
    if plan._gives_stream:
        raise gives_stream(graph, verb)
    check_key(plan, verb, asked)
    return plan


def durable_call(
    plan: Plan, call: Call[Any], asked: DurableKey, threads: Callable[[], ThreadPool], options: ExecutionOptions
) -> "DurableCall":
    """Return the object that keeps the durable loop of a call, whose key was checked.

    Raises:
        OptionsError: `on_finished` does not accept its value; or it is "return", and the call gives a stream.
    """
    from ..saving.durable import DurableCall

    key, answer, on_finished = asked
    check("on_finished", on_finished, one_of(OnFinished))
    if on_finished == "return" and plan._gives_stream:
        raise OptionsError(
            f"on_finished='return' is for one result, and graph {plan.name!r} gives a stream, whose values are not "
            "kept: use 'raise'"
        )

    durable = options.durable or plan._durable
    assert durable is not None
    assert key is not None
    arguments = dict(zip(call.graph._signature.parameters, call.arguments, strict=True))
    seconds = options.timeout_seconds
    return DurableCall(durable, plan.name, arguments, key, answer, threads, seconds, on_finished)


def refuse_key(asked: DurableKey, verb: str) -> None:
    """Refuse `durable_key=`, `answer=` and `on_finished=` of a stream of many calls.

    Raises:
        OptionsError: one of these options is given.
    """
    if asked.is_given:
        raise OptionsError(
            f"{verb} takes durable_key= and answer= for one call, not for many: use {verb.partition('.')[0]}.run; to "
            "run the calls of a key in order, give the stream order_by=; to share places by key, give key= to "
            "engine.deploy, and use the stream of that service"
        )


def check_key(plan: Plan, verb: str, asked: DurableKey = NO_KEY) -> None:
    """Check that a call has a key if, and only if, its graph has a durable loop.

    Raises:
        OptionsError: only one of the two is there, or an option is given without a key.
    """
    if plan._durable is None:
        if asked.is_given:
            raise OptionsError(
                f"{verb} takes durable_key= and answer= for a graph with a durable loop, and graph {plan.name!r} has "
                "no such loop: write ps.while_loop(..., durable=ps.Durable(...))"
            )
    elif asked.key is None:
        many = "a stream of many calls takes no key; " if verb.endswith("many calls") else ""
        raise OptionsError(
            f"graph {plan.name!r} has a durable loop, which is kept under a key: {many}give a key to each call, "
            f"run({plan.name}(...), durable_key=...)"
        )
    else:
        check("durable_key", asked.key, NAME, f"{verb}(")


def gives_one_value(graph: Graph[..., Any], owner: str) -> PlanError:
    """Return the error for a call that gives one value, where a stream of values is needed."""
    return PlanError(
        f"{owner}.stream takes an iterable of calls, or one call of a graph that returns an AsyncIterator; graph "
        f"{graph.name!r} returns one value: for one call, use {owner}.run, or {owner}.stream(call, events=...) to read "
        "the events that its nodes emit"
    )


def gives_stream(graph: Graph[..., Any], verb: str) -> PlanError:
    """Return the error for a call that gives a stream, where one value is needed."""
    owner = verb.partition(".")[0]
    return PlanError(
        f"graph {graph.name!r} returns a stream of values, and {verb} takes calls that give one value; read it with "
        f"`async with {owner}.stream({graph.name}(...)) as values`"
    )
