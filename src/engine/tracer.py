"""Tracer: runs a graph function once with symbolic values and records what it calls."""

import functools
import inspect
import types
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from .._errors import GraphTraceError
from .ref import PendingRef, Ref, call_location, read_of
from .template import Container, Read, Template, capture, reads

# Deeper than this, a graph that calls itself will not come to an end.
_MAX_INLINE_DEPTH = 200


class Callee(Protocol):
    """What a step runs: a node, or a control-flow construct."""

    @property
    def name(self) -> str:
        """Name of the step, before it is made unique."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether the call has to be awaited."""
        ...

    def result_annotation(self) -> Any:
        """Annotation of the result, with any coroutine taken off; None if unknown."""
        ...


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
    """

    name: str
    parameters: tuple[str, ...]
    parameter_sources: tuple[int, ...]
    steps: tuple[Step, ...]
    result: Template
    captures: tuple[Template, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    annotations: tuple[Any, ...] = ()


_active: ContextVar["Tracer | None"] = ContextVar("penstock_tracer", default=None)
active: Callable[[], "Tracer | None"] = _active.get


@dataclass(eq=False)
class Tracer:
    """Records the calls of one graph, or of one body of a control-flow construct."""

    name: str
    parent: "Tracer | None" = None
    functions: list[Callable[..., Any]] = field(default_factory=list)
    pending: dict[int, str] = field(default_factory=dict)
    _steps: list[Step] = field(default_factory=list)
    _parameters: list[str] = field(default_factory=list)
    _parameter_sources: list[int] = field(default_factory=list)
    _captures: dict[Read, int] = field(default_factory=dict)
    _shared: set[int] = field(default_factory=set)
    _sources: int = 0
    _depth: int = 0

    def parameter(self, name: str, annotation: Callable[[], Any] | None = None) -> Ref:
        """Add a parameter."""
        return Ref(self, self._new_parameter(name), name, annotation=annotation)

    def record(
        self,
        callee: Callee,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        bodies: "tuple[Trace, ...]" = (),
    ) -> Ref | PendingRef:
        """Record a call; returns what stands for its result."""
        location = call_location()
        ref = Ref(self, self._new_source(), callee.name, annotation=callee.result_annotation)
        # What a body takes from outside is read by the step that drives it.
        captured = [template for body in bodies for template in body.captures]
        self._steps.append(
            Step(
                callee,
                ref._penstock_source,
                (*[self.template(arg, location, callee.name) for arg in args], *captured),
                {name: self.template(arg, location, callee.name) for name, arg in kwargs.items()},
                bodies,
                location,
            )
        )
        return PendingRef(ref, self.pending) if callee.is_async else ref

    def template(self, value: Any, location: str, name: str) -> Template:
        """Return the template of an argument or result of `name`."""

        def leaf(found: Any) -> Template | None:
            if isinstance(found, Ref):
                return self.adopt(found)
            if isinstance(found, PendingRef):
                raise GraphTraceError(
                    f"{location}: {found!r} is passed to {name!r} before it is awaited; write `await` before its call"
                )
            return None

        template = capture(value, leaf, frozenset(self._shared))
        hidden = next((_hidden_ref(constant) for constant in _constants(template)), None)
        if hidden is not None:
            raise GraphTraceError(
                f"{location}: {hidden!r} is hidden in an object of type {type(value).__name__} that is passed to "
                f"{name!r}, where the tracer cannot see it; pass it as an argument of its own, or in a list, tuple, "
                "dict or dataclass"
            )
        return template

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
                f"{call_location()}: {ref!r} belongs to another graph ({owner.name!r}) than the one that is traced "
                f"here ({self.name!r}): it leaked out of its graph through a global, an attribute or a cache; pass it "
                "as a parameter"
            )
        outer = self.parent.adopt(ref)
        whole = Read(outer.source)
        if whole not in self._captures:
            name = ref._penstock_label.partition(".")[0].partition("[")[0]
            self._captures[whole] = self._new_parameter(name)
        return Read(self._captures[whole], outer.path)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a graph function, or the body of a control-flow construct, inside this trace; returns its result."""
        self.functions.append(fn)
        self._shared.update(_named_objects(fn))
        self._depth += 1
        try:
            if self._depth > _MAX_INLINE_DEPTH:
                raise GraphTraceError(
                    f"{call_location()}: graph {self.name!r} calls itself without end while it is traced; "
                    "use ps.while_loop for a loop whose length is not known before"
                )
            with _activated(self):
                return _finished(fn(*args, **kwargs), fn)
        finally:
            self._depth -= 1

    def finish(self, result: Any, annotations: tuple[Any, ...] = ()) -> Trace:
        """Close the trace."""
        location = call_location()
        template = self.template(result, location, f"the result of {self.name}")
        for where in self.pending.values():
            raise GraphTraceError(f"{where}: the result of this call in graph {self.name!r} is never awaited")
        return Trace(
            self.name,
            tuple(self._parameters),
            tuple(self._parameter_sources),
            tuple(self._steps),
            template,
            tuple(self._captures),
            tuple(self.functions),
            annotations,
        )

    def body(self, name: str, fn: Callable[..., Any]) -> "Trace":
        """Trace the body of a control-flow construct, which takes one value."""
        inner = Tracer(name, parent=self)
        result = inner.run(fn, (inner.parameter("value"),), {})
        self.functions.extend(inner.functions)
        return inner.finish(result)

    def _new_parameter(self, name: str) -> int:
        self._parameters.append(name)
        self._parameter_sources.append(self._new_source())
        return self._parameter_sources[-1]

    def _new_source(self) -> int:
        self._sources += 1
        return self._sources - 1


@contextmanager
def _activated(tracer: Tracer) -> Iterator[None]:
    token = _active.set(tracer)
    try:
        yield
    finally:
        _active.reset(token)


def _finished(value: Any, fn: Callable[..., Any]) -> Any:
    """Run a coroutine of the graph to its end, which is one step: all that a graph may await is ready at once."""
    if isinstance(value, PendingRef):
        value = value.__await__()
    elif isinstance(value, Coroutine):
        pass
    elif hasattr(value, "__await__") and not isinstance(value, Ref):
        value = value.__await__()
    else:
        return value
    try:
        foreign = value.send(None)
    except StopIteration as stop:
        return stop.value
    location = _suspended_at(value)
    value.close()
    if hasattr(foreign, "cancel"):
        foreign.cancel()
    raise GraphTraceError(
        f"{location}: graph {getattr(fn, '__name__', fn)!r} awaits something that is neither a node nor a graph "
        f"({type(foreign).__name__}); put it into a node (`@ps.node`) and await that"
    )


def _suspended_at(coroutine: Any) -> str:
    frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
    return call_location() if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _named_objects(fn: Callable[..., Any]) -> set[int]:
    """Return the identities of what the globals, the closure and the defaults of a function name."""
    function = inspect.unwrap(fn)
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        return set()
    found = {id(function.__globals__[name]) for name in function.__code__.co_names if name in function.__globals__}
    for cell in function.__closure__ or ():
        try:
            found.add(id(cell.cell_contents))
        except ValueError:  # a variable that is assigned later
            continue
    return found | {id(value) for value in function.__defaults__ or ()}


def _constants(template: Template) -> Iterator[Any]:
    if isinstance(template, Container):
        for child in template.children:
            yield from _constants(child)
    elif not isinstance(template, Read):
        yield template.value


def _hidden_ref(value: Any, depth: int = 4) -> Ref | PendingRef | None:
    """Look for a symbolic value where a template cannot see it: in attributes, sets, partials, closures, bound methods."""
    if isinstance(value, Ref | PendingRef):
        return value
    if depth == 0 or isinstance(value, type | types.ModuleType | int | float | str | bytes | None):
        return None
    inside: list[Any] = []
    if isinstance(value, functools.partial):
        inside += [*value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        inside += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inside += value.__defaults__ or ()
    elif isinstance(value, types.MethodType):
        inside.append(value.__self__)
    elif isinstance(value, types.GeneratorType):
        inside += value.gi_frame.f_locals.values() if value.gi_frame is not None else ()
    elif isinstance(value, list | tuple | set | frozenset | dict):
        inside += value.values() if isinstance(value, dict) else value
    elif type(value).__module__ not in ("builtins", "numpy"):
        inside += getattr(value, "__dict__", {}).values()
        for name in getattr(type(value), "__slots__", ()) if isinstance(getattr(type(value), "__slots__", ()), tuple) else ():
            inside.append(getattr(value, name, None))
    # The members of a large container are not Refs in practice; a bound keeps tracing linear.
    return next((found for item in inside[:1000] if (found := _hidden_ref(item, depth - 1)) is not None), None)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
