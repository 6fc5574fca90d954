"""Tracer: runs a graph function once with symbolic values, and records its calls and the reader of each stream."""

import asyncio
import types
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from inspect import unwrap
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from ..._errors import GraphTraceError, PlanError
from ...actors.current import codes_of
from .annotations import Hint, is_stream_parameter, parameters_of_body
from .ref import (
    PendingRef,
    Ref,
    Unawaited,
    call_location,
    closure_values,
    definition_location,
    hidden_ref,
    is_generated,
    is_users,
    reachable,
    read_of,
)
from .template import Constant, Container, Read, Template, capture, reads, with_reads

if TYPE_CHECKING:
    from ..open_resources import Opening


class StreamValues:
    """The streams of one trace, and the reader of each.

    Attributes:
        sources: the names of the streams, by the numbers of their values.
    """

    def __init__(self) -> None:
        self.sources: dict[int, str] = {}
        self._readers: dict[int, str] = {}

    def read_by_step(
        self, callee: "Callee", args: tuple[Template, ...], captured: tuple[Template, ...], location: str
    ) -> None:
        """Note the streams that a step reads.

        Args:
            callee: the node or the construct that the step calls.
            args: the arguments of the call.
            captured: the values that the bodies of a control-flow step capture.
            location: "file:line" of the call.

        Raises:
            GraphTraceError: a stream has a reader already, or cannot be read by this step.
        """
        if not self.sources:
            return
        for read in reads(*captured):
            if read.source in self.sources:
                raise GraphTraceError(
                    f"{location}: the body of {callee.name} takes {self._named(read)} from outside, and would read "
                    "the stream again for each item; read it in a node before, and pass on the result of that node"
                )
        for read in reads(*args):
            if read.source not in self.sources:
                continue
            if not callee._reads_streams:
                raise GraphTraceError(
                    f"{location}: {self._named(read)} is passed to {callee.name!r}, which cannot read it: only an "
                    "`async def`, an async generator, ps.map_each and ps.fold can read a stream; read it in one of "
                    "these, and pass on the result"
                )
            self._read(read, location, repr(callee.name))

    def result(self, template: Template, location: str) -> bool:
        """Note the result of the graph; return whether it is a stream.

        Raises:
            GraphTraceError: a stream is returned inside of another value, or was read already.
        """
        found = [read for read in reads(template) if read.source in self.sources]
        for read in found:
            if isinstance(template, Container):
                raise GraphTraceError(
                    f"{location}: {self._named(read)} is returned inside a {template.kind.__name__}; return the "
                    "stream alone, with the other results as its first values"
                )
            self._read(read, location, "the result")
        return bool(found)

    def _read(self, read: Read, location: str, reader: str) -> None:
        if read.path:
            raise GraphTraceError(
                f"{location}: an attribute or item of {self._named(read)} is passed to {reader}; in a graph, a stream "
                "has no attributes and no items: read it in a node, or use ps.map_each(node, stream)"
            )
        before = self._readers.get(read.source)
        if before is not None:
            raise GraphTraceError(
                f"{location}: {self._named(read)} is read by {reader} and was read before by {before}; a stream has "
                "one reader: call the node once for each reader, or read the stream in one node that serves both"
            )
        self._readers[read.source] = f"{reader} ({location})"

    def _named(self, read: Read) -> str:
        return f"stream {self.sources[read.source]!r}"


# Objects outside of a graph, in contrast to objects that its body makes for each call.
#
# A list written in the body of a graph is a new list for each item, as in plain Python. A list that a global or a
# closure names is the same list for all items, and a node that appends to it must append to this list.

# How many objects the search examines: configuration is smaller. Objects deep inside of a very large global may be
# missed; then their lists are copied for each item.
_MAX_OBJECTS = 100_000
_PLAIN = (type, int, float, complex, str, bytes, range, type(None))


class Outside:
    """The set of objects that can be reached from the names in traced functions.

    The search runs at the first `in`, since most graphs never need it.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[..., object]] = []
        self._codes: set[types.CodeType] = set()
        self._found: set[int] | None = None

    def add(self, fn: Callable[..., object]) -> None:
        """Add the objects that can be reached from the names in a function."""
        if fn not in self._functions:
            self._functions.append(fn)
            self._found = None

    def __contains__(self, value: object) -> bool:
        if self._found is None:
            self._found = self._search()
        return id(value) in self._found

    def _search(self) -> set[int]:
        roots = [function for fn in self._functions if (function := _function_of(fn)) is not None]
        found = [list(codes_of(function.__code__)) for function in roots]
        codes = {code for _, *inner in found for code in inner}
        names = {name for each in found for code in each for name in code.co_names}
        instances: list[object] = [fn.__self__ for fn in self._functions if isinstance(fn, types.MethodType)]

        def search() -> list[object]:
            # The closure of a function that the body of a graph defines holds objects of that body, so the closure is
            # left out.
            named = [one for root in roots for one in _named(root, with_closure=root.__code__ not in codes)]
            return [*reachable(instances + named, lambda one: _inside(one, names), _MAX_OBJECTS, _PLAIN)]

        found_objects = search()
        # A plain function that the graph calls defines bodies as well, which nothing outside can name. A graph outside
        # is named, and has its function behind `__wrapped__`.
        named = [getattr(one, "__dict__", {}).get("__wrapped__", one) for one in found_objects]
        reached = {one.__code__ for one in named if isinstance(one, types.FunctionType)}
        made = {code for one in reached if is_users(one.co_filename) for code in codes_of(one)} - reached - codes
        if made := made & {function.__code__ for function in roots[1:]}:
            codes |= made
            found_objects = search()
        return set(map(id, found_objects))


def _function_of(fn: object) -> types.FunctionType | None:
    fn = unwrap(fn) if callable(fn) else fn
    fn = fn.__func__ if isinstance(fn, types.MethodType) else fn
    return fn if isinstance(fn, types.FunctionType) else None


def _named(function: types.FunctionType, *, with_closure: bool) -> Iterator[object]:
    for name in {name for code in codes_of(function.__code__) for name in code.co_names}:
        if name in function.__globals__:
            yield function.__globals__[name]
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if with_closure:
        yield from closure_values(function)


def _inside(value: object, names: set[str]) -> Iterable[object]:
    if isinstance(value, dict):
        return list(cast("dict[object, object]", value).values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(cast("Iterable[object]", value))
    if isinstance(value, types.FunctionType):
        return _named(value, with_closure=True)
    # For an object or a module: only the attributes whose names the functions use.
    found: list[Mapping[str, object]] = [vars(cls) for cls in type(value).__mro__]
    if hasattr(value, "__dict__"):
        found.append(vars(value))
    named = [namespace[name] for namespace in found for name in names & namespace.keys()]
    slots = [one for one in named if isinstance(one, types.MemberDescriptorType)]
    return [*named, *(getattr(value, slot.__name__, None) for slot in slots if not isinstance(value, type))]


def drive(value: Any, fn: Callable[..., Any]) -> Any:
    """Run the coroutine of a graph function or of a body to its end; return its result.

    Args:
        value: the result of calling the function: a coroutine, a call that is not awaited yet, or a value.
        fn: the function, for errors.

    Raises:
        GraphTraceError: the coroutine awaits an object that is neither a node nor a graph.
    """
    running: Any = value
    if not isinstance(value, types.CoroutineType):
        if isinstance(value, Ref) or not hasattr(value, "__await__"):
            return value
        running = value.__await__()
    try:
        foreign = running.send(None)
    except StopIteration as stop:
        return stop.value
    location, awaited = _suspended_at(running)
    running.close()
    if asyncio.isfuture(foreign):
        foreign._asyncio_future_blocking = False  # as an event loop does, so that other tasks can await the future
    raise GraphTraceError(
        f"{location}: graph {name_of(fn)!r} awaits {awaited}, which is neither a node nor a graph; put it into a node "
        "(`@ps.node`) and await that"
    )


@contextmanager
def located_errors(fn: Callable[..., Any]) -> Generator[None, None, None]:
    """Turn exceptions that are raised inside into a `GraphTraceError` that names the line of the graph and the remedy.

    A library that gets a `Ref` raises an error that names neither the line nor the remedy.

    Args:
        fn: the function that is traced.

    Raises:
        GraphTraceError: another exception was raised, which is the `__cause__`.
    """
    try:
        yield
    except (GraphTraceError, PlanError, RecursionError):  # the graph names an endless recursion: see `Graph._traced`
        raise
    except Exception as error:
        location = _raised_at(error, definition_location(fn))
        raise GraphTraceError(
            f"{location}: tracing graph {name_of(fn)!r} raised {type(error).__name__}: {error}; its body runs once, "
            "with a Ref for each value that is not known yet: put code that needs the value itself, or may fail, into "
            "a node (`@ps.node`), or into a step of one line: ps.apply(lambda value: ..., value)"
        ) from error


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a traced function."""
    return str(getattr(fn, "__name__", repr(fn)))


def _suspended_at(running: object) -> tuple[str, str]:
    """Return the innermost line of user code that waits, and the name of the object that it waits for."""
    location, awaited = call_location(), "something"
    while running is not None:
        frame: types.FrameType | None = getattr(running, "cr_frame", None) or getattr(running, "gi_frame", None)
        if frame is None or not is_users(frame.f_code.co_filename):
            return location, _name_of(running)
        location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        running = getattr(running, "cr_await", None) or getattr(running, "gi_yieldfrom", None)
    return location, awaited


def _name_of(running: object) -> str:
    name = getattr(running, "__qualname__", None) or type(running).__name__
    return f"{name}()" if isinstance(running, types.CoroutineType | types.GeneratorType) else str(name)


def _raised_at(error: BaseException, location: str) -> str:
    """Return the line of user code that led to an exception, or else `location`."""
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_users(filename) and not is_generated(traceback.tb_frame):
            location = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return location


class Callee(Protocol):
    """The object that a step calls: a node, or a construct of control flow."""

    @property
    def name(self) -> str:
        """The name of the step."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether a call of the object is awaited."""
        ...

    @property
    def gives_stream(self) -> bool:
        """Whether a call of the object gives a stream of values."""
        ...

    @property
    def _reads_streams(self) -> bool:
        """Whether the arguments may be streams."""
        ...

    @property
    def _is_effect(self) -> bool:
        """Whether calls of the object keep their place in the order of the source."""
        ...

    @property
    def _drawn_detail(self) -> str:
        """A line for drawings of the graph."""
        ...

    def _argument_names(self) -> tuple[str, ...]:
        """Return the names of the parameters that take positional arguments, without `*args`."""
        ...

    def _result_annotation(self) -> Any:
        """Return the annotation of the result; None if unknown."""
        ...


# A graph that calls itself deeper than this will not end; Python's own limit is reached at a depth of about 200.
_MAX_INLINE_DEPTH = 100
# The instance of a method is searched for symbolic values at each call, so the search is short.
_MAX_OBJECTS_OF_CALLEE = 50


@dataclass(frozen=True)
class Step:
    """One recorded call.

    Attributes:
        callee: the node or control-flow construct.
        source: the number of the value that the step gives.
        args, kwargs: templates of the arguments.
        bodies: traces of the bodies of a control-flow construct, or of bodies that may run in the place of a node.
        location: "file:line" of the call.
        captured: for a node: the values that its bodies capture. For control flow, these are among the arguments.
        is_effect: whether the step is an ordered effect: its callee is an effect, or a step in its bodies is one.
        joined: for the last of several stages of a stream that run as one: the joint body of all these stages.
        is_joined: whether the step is a stage that runs as a part of a later stage.
    """

    callee: Callee
    source: int
    args: tuple[Template, ...]
    kwargs: Mapping[str, Template]
    bodies: "tuple[Trace, ...]"
    location: str
    captured: tuple[Template, ...] = ()
    is_effect: bool = False
    joined: "Trace | None" = None
    is_joined: bool = False

    def reads(self) -> Iterator[Read]:
        """Yield every read in the arguments, in order."""
        return reads(*self.args, *self.kwargs.values(), *self.captured)

    def named_arguments(self) -> Iterator[tuple[str, Template]]:
        """Yield the name of the parameter and the template of each argument; without the arguments for `*args`."""
        yield from zip(self.callee._argument_names(), self.args, strict=False)
        yield from self.kwargs.items()

    def with_reads(self, replaced: Callable[[Read], Template]) -> "Step":
        """Return the step with the reads in its arguments replaced."""
        args = tuple(with_reads(arg, replaced) for arg in self.args)
        kwargs = {name: with_reads(arg, replaced) for name, arg in self.kwargs.items()}
        captured = tuple(with_reads(one, replaced) for one in self.captured)
        return replace(self, args=args, kwargs=kwargs, captured=captured)


@dataclass(frozen=True)
class Trace:
    """The recorded calls of a graph, or of a body of control flow.

    Attributes:
        name: the name of the graph.
        parameters: the names of the parameters; in a body, followed by the names of the captured values.
        parameter_sources: the numbers of the values of the parameters.
        steps: the calls in the order in which they were made, which is a topological order. If one call is an effect,
            each awaited call stands at the place where it is awaited.
        result: the template of the result.
        captures: for a body: templates, in the enclosing graph, of the values that it captures.
        functions: all functions whose bodies were traced; if a name in such a function is rebound, the trace is
            outdated.
        annotations: the annotations of the parameters; None where unknown.
        streams: the numbers of the values that are streams.
        gives_stream: whether the result is a stream.
        resources: the resources that the graph and its bodies use, with the numbers of their values.
    """

    name: str
    parameters: tuple[str, ...]
    parameter_sources: tuple[int, ...]
    steps: tuple[Step, ...]
    result: Template
    captures: tuple[Template, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    annotations: tuple[Any, ...] = ()
    streams: frozenset[int] = frozenset()
    gives_stream: bool = False
    resources: "Mapping[Opening, int]" = field(default_factory=dict["Opening", int])

    @property
    def captured(self) -> "Iterable[tuple[int, Template]]":
        """For a body: the number of each captured value, with the template of the value in the enclosing graph."""
        first = len(self.parameter_sources) - len(self.captures)
        return zip(self.parameter_sources[first:], self.captures, strict=True)


# The order of effects.
#
# An ordered effect begins after all steps before it have ended, and all steps after it begin after it has ended. A step
# that gives a stream has ended when the stream is open; a step that reads a stream, when it has read the stream.


def order_edges(chains: Sequence[Sequence[Step]]) -> dict[int, set[int]]:
    """Return for each step the steps that it waits for without reading them, reduced to the last steps.

    Args:
        chains: the steps in the order of the source; steps that share an actor form one chain. An effect is always a
            chain of its own.

    Returns:
        The numbers of the values of the steps. A step that already waits through another step is left out. Without an
        ordered effect, the result is empty.
    """
    edges: dict[int, set[int]] = {}
    if not any(chain[0].is_effect for chain in chains):
        return edges
    effect: int | None = None
    since: set[int] = set()  # the last effect, and the steps after it, which all wait for it
    ends: set[int] = set()  # the steps among these for which no later step waits
    for chain in chains:
        number, read = chain[-1].source, {read.source for read in chain[0].reads()}
        if chain[0].is_effect:
            waits = ends - read
            effect, since, ends = number, {number}, {number}
        else:
            waits = set[int]() if effect is None or read & since else {effect}
            since.add(number)
            ends = ends - read - waits | {number}
        if waits:
            edges[number] = waits
    return edges


_active: ContextVar["Tracer | None"] = ContextVar("penstock_tracer", default=None)


# For hot paths: if this returns None, so does `active()`. This costs less, since it is not a Python function.
is_tracing = _active.get


def active() -> "Tracer | None":
    """Return the tracer of the graph that is being traced here; None outside of a trace."""
    tracer = _active.get()
    # A task that was started while tracing has a copy of the context, and may outlive the trace.
    return None if tracer is None or tracer.closed else tracer


class Tracer:
    """Records the calls of one graph, or of one body of a control-flow construct.

    Attributes:
        name: the name of the graph or body.
        parent: for a body, the tracer of the graph around it.
        functions: all functions whose bodies were traced.
        pending: the calls that are not awaited yet, each with "file:line" of the call.
        streams: the streams among the values, and their readers.
        resources: the resources that the graph and its bodies use, with the numbers of their values.
        closed: whether the trace is finished.
    """

    def __init__(self, name: str, parent: "Tracer | None" = None) -> None:
        self.name = name
        self.parent = parent
        self.functions: list[Callable[..., Any]] = []
        self.pending: dict[object, str] = {}
        self.closed = False
        self.streams = StreamValues()
        self.resources: dict[Opening, int] = {}
        self._steps: list[Step] = []
        self._parameters: list[str] = []
        self.parameter_sources: list[int] = []
        self._captures: dict[Read, int] = {}
        self._sources = 0
        self._body_names: Counter[str] = Counter()
        self._depth: int = 0 if parent is None else parent._depth
        self._outside: Outside = Outside() if parent is None else parent._outside
        self._shown: set[str] = set() if parent is None else parent._shown
        self._checked_callees: set[int] = set()
        self._places: dict[int, int] = {}  # for each step, its place in the order of the source
        self._instead_of: Hashable = None

    def parameter(self, name: str, annotation: Hint | None = None, *, is_stream: bool = False) -> Ref:
        """Add a parameter; return the symbolic value that stands for it."""
        source = self._new_parameter(name)
        if is_stream:
            self.streams.sources[source] = name
        return Ref(self, source, name, annotation=annotation)

    def record(
        self,
        callee: Callee,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        bodies: "tuple[Trace, ...]" = (),
        *,
        is_node: bool = False,
    ) -> Ref | PendingRef:
        """Record a call; return the symbolic value that stands for its result.

        Args:
            callee: the object that is called.
            args: the arguments.
            kwargs: the keyword arguments.
            bodies: the traces of the bodies.
            is_node: whether the callee is a node: its arguments stay apart from the values that its bodies capture.
        """
        location = call_location()
        templates = [self.template(arg, location, callee.name) for arg in args]
        named = {name: self.template(arg, location, callee.name) for name, arg in kwargs.items()} if kwargs else {}
        # The step reads the values that its bodies capture, and passes them on.
        captured = tuple([template for body in bodies for template in body.captures])
        self.streams.read_by_step(callee, (*templates, *named.values()), captured, location)
        if not is_node:
            templates += captured
        source = self._new_source()
        if callee.gives_stream:
            self.streams.sources[source] = callee.name
        beside = captured if is_node else ()
        is_effect = callee._is_effect
        for body in bodies:
            is_effect = is_effect or any(step.is_effect for step in body.steps)
        self._steps.append(Step(callee, source, tuple(templates), named, bodies, location, beside, is_effect=is_effect))
        ref = Ref(self, source, callee.name, annotation=callee._result_annotation)
        if callee.is_async:
            return PendingRef(ref, location, self.pending)
        self._places[source] = len(self._places)
        return ref

    def begins(self, source: int) -> None:
        """Note that the place of a step is here, where it is awaited.

        Raises:
            GraphTraceError: an effect is awaited in a body, and was called outside of the body.
        """
        self._places[source] = len(self._places)
        if is_tracing() is not self:
            for step in self._steps:
                if step.source == source and step.is_effect:
                    raise GraphTraceError(
                        f"{call_location()}: {step.callee.name!r} is called outside of this body and awaited inside, "
                        "so its effect would happen even if the body does not run; call it where it is awaited"
                    )

    def open(self, opening: "Opening") -> PendingRef:
        """Note that the outermost graph uses a resource; return the symbolic value that stands for it.

        A resource is not a step: a frame has it from the beginning. So all call sites of the resource, also in bodies,
        see the same value.
        """
        *_, outermost = self._lineage()
        source = outermost.resources.get(opening)
        if source is None:
            source = outermost.resources[opening] = outermost._new_source()
        ref = Ref(outermost, source, opening.name, annotation=opening.resource._result_annotation)
        return PendingRef(ref, call_location(), self.pending)

    def check_callee(self, fn: object, name: str) -> None:
        """Refuse a function with a symbolic value in its closure or its instance."""
        if id(fn) in self._checked_callees:
            return
        self._checked_callees.add(id(fn))  # the step keeps the function alive, so its id stays unique
        if (hidden := hidden_ref(fn, _MAX_OBJECTS_OF_CALLEE)) is not None:
            raise GraphTraceError(
                f"{call_location()}: node {name!r} has {hidden!r} in its closure or its instance, where the tracer "
                "cannot see it; pass it as an argument"
            )

    def template(self, value: Any, location: str, reader: str) -> Template:
        """Return the template of an argument or result of `reader`."""
        if type(value) is Ref and value._penstock_tracer is self:
            return read_of(value)
        return capture(value, lambda leaf: self._leaf(leaf, location, reader), self._outside)

    def is_stream(self, value: object) -> bool:
        """Whether a value is symbolic and stands for a stream, of this graph or of a graph around it."""
        if not isinstance(value, Ref):
            return False
        return not value._penstock_path and value._penstock_source in value._penstock_tracer.streams.sources

    def adopt(self, ref: Ref) -> Read:
        """Return the read that a Ref stands for in this trace; a body captures the values of graphs around it."""
        owner = ref._penstock_tracer
        if owner is self:
            return read_of(ref)
        if self.parent is None or owner not in self._lineage():
            raise GraphTraceError(
                f"{call_location()}: {ref!r} belongs to the trace of {owner.name!r}, and is used in the trace of "
                f"{self.name!r}: it leaked out through a global, an attribute or a cache; pass it as a parameter, or "
                "return it"
            )
        outer = self.parent.adopt(ref)
        whole = Read(outer.source)
        if whole not in self._captures:
            name = ref._penstock_label.partition(".")[0].partition("[")[0]
            self._captures[whole] = self._new_parameter(name)
        return Read(self._captures[whole], outer.path)

    def run(self, fn: Callable[..., Any], start: Callable[[tuple[Any, ...]], Any], args: tuple[Any, ...]) -> Any:
        """Run a graph function, or the body of a control-flow construct, inside this trace.

        Args:
            fn: the function, whose global names are looked up.
            start: calls the function with a tuple of arguments.
            args: the arguments.

        Returns:
            The result of the function.
        """
        self.functions.append(fn)
        self._outside.add(fn)
        self._depth += 1
        try:
            if self._depth > _MAX_INLINE_DEPTH:
                raise endless_recursion(call_location(), self.name)
            with located_errors(fn), _activated(self):
                return drive(start(args), fn)
        finally:
            self._depth -= 1

    def finish(self, result: Any, fn: Callable[..., Any], annotations: tuple[Any, ...] = ()) -> Trace:
        """Close the trace of `fn`, which returned `result`."""
        location = definition_location(fn)
        if isinstance(result, PendingRef) and is_stream_parameter(fn, "return"):
            self._refuse_no_stream(result, location)
        with located_errors(fn):
            template = self.template(result, location, f"the result of {self.name}")
        gives_stream = self.streams.result(template, location)
        for where in self.pending.values():
            never = f"the result of this call in {self.name!r} is never awaited"
            raise GraphTraceError(f"{where}: {never}; write `await` before it")
        self.closed = True
        if any(step.is_effect for step in self._steps):
            self._steps.sort(key=lambda step: self._places[step.source])
        return Trace(
            self.name, tuple(self._parameters), tuple(self.parameter_sources),
            tuple(self._steps), template, tuple(self._captures), tuple(self.functions), annotations,
            frozenset(self.streams.sources), gives_stream, self.resources,
        )  # fmt: skip

    def body(self, name: str, fn: Callable[..., Any], count: int = 1) -> "Trace":
        """Trace the body of a control-flow construct, which takes one value, or `count`.

        The trace is named after the graph and the body, and its name is unique: "search/quote", "search/quote#2".
        """
        with self._inner(name) as inner:
            parameters = tuple([inner.parameter(name, hint) for name, hint in parameters_of_body(fn, count)])
            result = inner.run(fn, lambda args: fn(*args), parameters)
            trace = inner.finish(result, fn)
            if trace.gives_stream:
                raise GraphTraceError(
                    f"{call_location()}: the body {getattr(fn, '__name__', name)!r} gives a stream, but a body must "
                    "give one value for one operand; read the stream inside the body, in an `async def` node"
                )
            return trace

    def instead(self, name: str, callee: Callable[..., Any], call: Callable[[], Any], of: Hashable = None) -> "Trace":
        """Trace a callee that may run in the place of a node, as a body that captures the arguments of the node.

        Args:
            name: the name of the body.
            callee: the node, graph or function that may run.
            call: calls `callee` with the arguments of the node.
            of: identifies the node, for `stands_in_for` inside of this trace.
        """
        fn = getattr(callee, "fn", callee)
        with self._inner(name) as inner:
            inner._instead_of = of
            with _activated(inner):
                result = drive(call(), fn)
            return inner.finish(result, fn)

    def stands_in_for(self, node: Hashable) -> bool:
        """Whether this trace, or a trace around it, is of a callee that may run in the place of the node."""
        return any(one._instead_of == node for one in self._lineage())

    def _lineage(self) -> "Iterator[Tracer]":
        tracer: Tracer | None = self
        while tracer is not None:
            yield tracer
            tracer = tracer.parent

    @contextmanager
    def _inner(self, name: str) -> "Generator[Tracer, None, None]":
        self._body_names[name] += 1
        number = self._body_names[name]
        inner = Tracer(f"{self.name}/{name}" + (f"#{number}" if number > 1 else ""), parent=self)
        try:
            yield inner
        finally:
            inner.closed = True
            self.functions.extend(inner.functions)

    def awaited(self, call: Unawaited) -> None:
        """Note that a call is awaited; the call may have been made in a graph around this body."""
        for one in self._lineage():
            one.pending.pop(call, None)

    def shown(self, text: str) -> str:
        """Note the `repr()` of a symbolic value, so that text made from it is refused later; return the text."""
        self._shown.add(text)
        return text

    def _leaf(self, value: Any, location: str, reader: str) -> Template:
        if isinstance(value, Ref):
            return self.adopt(value)
        if isinstance(value, str):
            self._refuse_shown(value, location, reader)
        elif isinstance(value, Unawaited | types.CoroutineType):
            passed = f"{value!r} is passed to {reader!r} before it is awaited"
            raise GraphTraceError(f"{location}: {passed}; write `await` before its call")
        elif isinstance(value, Iterator | AsyncIterator) and value not in self._outside:
            kind = type(cast("object", value)).__name__
            remedy = "make a list of it" if isinstance(value, Iterator) else "make its function a node, and call that"
            raise GraphTraceError(
                f"{location}: {kind} object is passed to {reader!r}: it would be used up by the first item; {remedy}"
            )
        elif (hidden := hidden_ref(cast("object", value))) is not None:
            kind = type(cast("object", value)).__name__
            raise GraphTraceError(
                f"{location}: {hidden!r} is hidden in an object of type {kind} that is passed to "
                f"{reader!r}, where the tracer cannot see it or would find it only for the first item; pass it as an "
                "argument of its own, or in a list, tuple, dict or dataclass made in the graph"
            )
        return Constant(value)

    def _refuse_no_stream(self, result: PendingRef, location: str) -> NoReturn:
        """Refuse a result that is annotated as a stream but has to be awaited, such as a `map_each` over a list."""
        where = self.pending.get(result._penstock_key, location)
        raise GraphTraceError(
            f"{where}: the result of graph {self.name!r} is annotated as a stream, but {result!r} is not a stream; "
            "return the call of an `async def` with `yield`, or ps.map_each over a stream, such as a parameter that is "
            "annotated as AsyncIterator; or correct the annotation"
        )

    def _refuse_shown(self, value: str, location: str, reader: str) -> None:
        for text in self._shown:
            if text in value:
                raise GraphTraceError(
                    f"{location}: text made from {text} by repr() is passed to {reader!r}: it is the text of a "
                    "value that is not known while the graph is traced; format it inside a node, or in a step of one "
                    'line: ps.apply(lambda value: f"{value!r}", value)'
                )

    def _new_parameter(self, name: str) -> int:
        self._parameters.append(name)
        self.parameter_sources.append(self._new_source())
        return self.parameter_sources[-1]

    def _new_source(self) -> int:
        self._sources += 1
        return self._sources - 1


def endless_recursion(location: str, name: str) -> GraphTraceError:
    """Return the error of a graph that calls itself without end while it is traced."""
    return GraphTraceError(
        f"{location}: graph {name!r} calls itself without end while it is traced; use ps.while_loop for a loop whose "
        "length is not known in advance, and recurse only on constants"
    )


@contextmanager
def _activated(tracer: Tracer) -> Generator[None, None, None]:
    token = _active.set(tracer)
    try:
        yield
    finally:
        _active.reset(token)
