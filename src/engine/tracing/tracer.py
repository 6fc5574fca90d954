"""Tracer: runs a graph function once with symbolic values and records what it calls."""

import types
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from ..._errors import GraphTraceError
from ..streams.one_reader import StreamValues
from .annotations import Hint, is_stream_parameter, parameter_of_body
from .driving import drive, located_errors
from .hidden import hidden_ref
from .locations import call_location, definition_location
from .outside import Outside
from .ref import PendingRef, Ref, Unawaited, read_of
from .template import Constant, Read, Template, capture, reads, with_reads

if TYPE_CHECKING:
    from ..control import Control
    from ..node import Node
    from ..resources.opening import Opening

# What a step runs.
Callee: TypeAlias = "Node[..., Any] | Control"

# Deeper than this, a graph that calls itself will not come to an end; Python's own limit comes at about 200.
_MAX_INLINE_DEPTH = 100
# A method's instance is looked at for each of its calls, so not deeply.
_MAX_OBJECTS_OF_CALLEE = 50


@dataclass(frozen=True)
class Step:
    """One recorded call.

    Attributes:
        callee: the node or control-flow construct.
        source: the number of its value.
        args, kwargs: templates of its arguments.
        bodies: traces of the bodies of a control-flow construct.
        location: "file:line" of the call.
    """

    callee: Callee
    source: int
    args: tuple[Template, ...]
    kwargs: Mapping[str, Template]
    bodies: "tuple[Trace, ...]"
    location: str

    def reads(self) -> Iterator[Read]:
        """Yield every read in the arguments, in order."""
        return reads(*self.args, *self.kwargs.values())

    def with_reads(self, replaced: Callable[[Read], Read]) -> "Step":
        """Return the step with other reads in its arguments."""
        args = tuple(with_reads(arg, replaced) for arg in self.args)
        return replace(self, args=args, kwargs={name: with_reads(arg, replaced) for name, arg in self.kwargs.items()})


@dataclass(frozen=True)
class Trace:
    """What a graph does, as recorded.

    Attributes:
        name: name of the graph.
        parameters: names of its parameters; those of a body are followed by the values that it takes from outside.
        parameter_sources: the number of the value of each.
        steps: the calls in the order in which they were made, which is a topological order.
        result: template of the result.
        captures: for a body, templates in the enclosing graph of the values that it takes from outside.
        functions: every function whose body was traced: what its names mean must not change.
        annotations: annotations of the parameters, None where unknown.
        streams: the numbers of the values that are streams.
        gives_stream: whether the result is one.
        resources: what has to be open while it runs, bodies included, with the number of the value of each.
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
        """For a body, the number of each value that it takes from outside, with its template there."""
        first = len(self.parameter_sources) - len(self.captures)
        return zip(self.parameter_sources[first:], self.captures, strict=True)


_active: ContextVar["Tracer | None"] = ContextVar("penstock_tracer", default=None)


# Not None wherever `active()` may be: for who asks so often that a function call counts.
is_tracing = _active.get


def active() -> "Tracer | None":
    """Return the tracer of the graph that is traced here; None outside of graphs."""
    tracer = _active.get()
    # A task that was started while tracing has a copy of that context, and may live on.
    return None if tracer is None or tracer.closed else tracer


class Tracer:
    """Records the calls of one graph, or of one body of a control-flow construct.

    Attributes:
        name: name of the graph or body.
        parent: for a body, the tracer of the graph around it.
        functions: every function whose body was traced.
        pending: what was called and is not awaited yet, with the place of the call.
        streams: which of the values are streams.
        resources: what has to be open while the graph runs, with the number of the value of each.
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
        self._parameter_sources: list[int] = []
        self._captures: dict[Read, int] = {}
        self._sources = 0
        self._depth: int = 0 if parent is None else parent._depth
        self._outside: Outside = Outside() if parent is None else parent._outside
        self._shown: set[str] = set() if parent is None else parent._shown
        self._checked_callees: set[int] = set()

    def parameter(self, name: str, annotation: Hint | None = None, *, is_stream: bool = False) -> Ref:
        """Add a parameter."""
        source = self._new_parameter(name)
        if is_stream:
            self.streams.add(source, name)
        return Ref(self, source, name, annotation=annotation)

    def record(
        self,
        callee: Callee,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        bodies: "tuple[Trace, ...]" = (),
    ) -> Ref | PendingRef:
        """Record a call; returns what stands for its result."""
        location = call_location()
        templates = [self.template(arg, location, callee.name) for arg in args]
        named = {name: self.template(arg, location, callee.name) for name, arg in kwargs.items()} if kwargs else {}
        # What a body takes from outside is read by the step that drives it.
        captured = tuple([template for body in bodies for template in body.captures])
        self.streams.read_by_step(callee, (*templates, *named.values()), captured, location)
        templates += captured
        source = self._new_source()
        if callee.gives_stream:
            self.streams.add(source, callee.name)
        self._steps.append(Step(callee, source, tuple(templates), named, bodies, location))
        ref = Ref(self, source, callee.name, annotation=callee.result_annotation)
        return PendingRef(ref, location, self.pending) if callee.is_async else ref

    def open(self, opening: "Opening") -> PendingRef:
        """Note that a resource has to be open while the outermost graph runs; returns what stands for it.

        It is no step: a frame has it from the beginning. So all of its call sites, those in bodies included, see one.
        """
        outermost = self
        while outermost.parent is not None:
            outermost = outermost.parent
        source = outermost.resources.get(opening)
        if source is None:
            source = outermost.resources[opening] = outermost._new_source()
        ref = Ref(outermost, source, opening.name, annotation=opening.resource.result_annotation)
        return PendingRef(ref, call_location(), self.pending)

    def check_callee(self, fn: object, name: str) -> None:
        """Refuse a function that takes a symbolic value along in its closure or its instance."""
        if id(fn) in self._checked_callees:
            return
        self._checked_callees.add(id(fn))  # a step keeps it, so nothing else takes its id
        if (hidden := hidden_ref(fn, _MAX_OBJECTS_OF_CALLEE)) is not None:
            raise GraphTraceError(
                f"{call_location()}: node {name!r} takes {hidden!r} along in its closure or its instance, where the "
                "tracer cannot see it; pass it as an argument"
            )

    def template(self, value: Any, location: str, reader: str) -> Template:
        """Return the template of an argument or result of `reader`."""
        if type(value) is Ref and value._penstock_tracer is self:
            return read_of(value)
        return capture(value, lambda leaf: self._leaf(leaf, location, reader), self._outside)

    def is_stream(self, value: object) -> bool:
        """Whether a value is symbolic and stands for a stream, of this graph or of one around it."""
        if not isinstance(value, Ref):
            return False
        return not value._penstock_path and value._penstock_source in value._penstock_tracer.streams.sources

    def adopt(self, ref: Ref) -> Read:
        """Return what a Ref reads, in this trace; a body takes values of the graphs around it from outside."""
        owner = ref._penstock_tracer
        if owner is self:
            return read_of(ref)
        around = self.parent
        while around is not None and around is not owner:
            around = around.parent
        if around is None or self.parent is None:
            raise GraphTraceError(
                f"{call_location()}: {ref!r} belongs to another trace, of {owner.name!r}, than the one that is made "
                f"here, of {self.name!r}: it leaked out through a global, an attribute or a cache; pass it as a "
                "parameter, or return it"
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
            fn: the function, for what its names mean.
            start: calls it with a tuple of arguments.
            args: the arguments.

        Returns:
            What it returned.
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
            raise GraphTraceError(
                f"{where}: the result of this call in {self.name!r} is never awaited; write `await` before it"
            )
        self.closed = True
        return Trace(
            self.name,
            tuple(self._parameters),
            tuple(self._parameter_sources),
            tuple(self._steps),
            template,
            tuple(self._captures),
            tuple(self.functions),
            annotations,
            frozenset(self.streams.sources),
            gives_stream,
            self.resources,
        )

    def body(self, name: str, fn: Callable[..., Any]) -> "Trace":
        """Trace the body of a control-flow construct, which takes one value."""
        inner = Tracer(name, parent=self)
        try:
            result = inner.run(fn, lambda args: fn(*args), (inner.parameter(*parameter_of_body(fn)),))
            trace = inner.finish(result, fn)
            if trace.gives_stream:
                raise GraphTraceError(
                    f"{call_location()}: the body {getattr(fn, '__name__', name)!r} gives a stream, and a body gives "
                    "one value for one operand; read the stream inside the body, in an `async def` node"
                )
            return trace
        finally:
            inner.closed = True
            self.functions.extend(inner.functions)

    def awaited(self, call: Unawaited) -> None:
        """Note that a call is awaited, here or in a body."""
        tracer: Tracer | None = self
        while tracer is not None:
            tracer.pending.pop(call, None)
            tracer = tracer.parent

    def shown(self, text: str) -> str:
        """Note the text that somebody was shown of a symbolic value; returns it."""
        self._shown.add(text)
        return text

    def _leaf(self, value: Any, location: str, reader: str) -> Template:
        if isinstance(value, Ref):
            return self.adopt(value)
        if isinstance(value, str):
            self._refuse_shown(value, location, reader)
        elif isinstance(value, Unawaited | types.CoroutineType):
            raise GraphTraceError(
                f"{location}: {value!r} is passed to {reader!r} before it is awaited; write `await` before its call"
            )
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
        """Refuse a result that is annotated as a stream, and is to be awaited: a `map_each` over what is no stream."""
        ref = result._penstock_ref
        step = next((step for step in self._steps if step.source == ref._penstock_source), None)
        remedy = "return the call of an `async def` with `yield`, which gives a stream, or correct the annotation"
        if step is not None and step.callee.name == "map_each":
            items, parameters = step.args[0], dict(zip(self._parameter_sources, self._parameters, strict=True))
            remedy = "ps.map_each gives a stream only for a stream, such as a parameter annotated as AsyncIterator"
            if isinstance(items, Read) and items.source in parameters and not items.path:
                name = parameters[items.source]
                remedy = f"annotate the parameter, `{name}: AsyncIterator[...]`, and ps.map_each over it gives a stream"
        where = self.pending.get(result._penstock_key, location)
        raise GraphTraceError(
            f"{where}: the result of graph {self.name!r} is annotated as a stream, and {result!r} is none; {remedy}"
        )

    def _refuse_shown(self, value: str, location: str, reader: str) -> None:
        for text in self._shown:
            if text in value:
                raise GraphTraceError(
                    f"{location}: text made from {text} by repr() is passed to {reader!r}: it is the text of a "
                    "value that is not known while the graph is traced; format it inside a node"
                )

    def _new_parameter(self, name: str) -> int:
        self._parameters.append(name)
        self._parameter_sources.append(self._new_source())
        return self._parameter_sources[-1]

    def _new_source(self) -> int:
        self._sources += 1
        return self._sources - 1


def endless_recursion(location: str, name: str) -> GraphTraceError:
    """Return the error of a graph that calls itself while it is traced, and comes to no end."""
    return GraphTraceError(
        f"{location}: graph {name!r} calls itself without end while it is traced; use ps.while_loop for a loop whose "
        "length is not known before, and recurse only on constants"
    )


@contextmanager
def _activated(tracer: Tracer) -> Generator[None, None, None]:
    token = _active.set(tracer)
    try:
        yield
    finally:
        _active.reset(token)
