"""Control flow on values: `cond`, `switch`, `while_loop`, `map_each` and `fold`."""

import functools
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Literal, TypeVar, cast, overload

from .._errors import GraphTraceError, IterationLimitError
from ..actors.accepted import NAME, check, one_of, optional, whole
from ..actors.stream_buffer import close_stream
from ..telemetry import logs
from .tracing.annotations import result_hint
from .tracing.ref import Ref, Unawaited, call_location
from .tracing.tracer import Trace, active

# Outside of a trace, these functions are plain Python. While a graph is traced, a call of one becomes a single step
# whose bodies are traced as graphs of their own: an iteration never enters an inbox of the outer graph.

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")

# An agent's loop or a search rarely passes a hundred turns; a loop that never ends is reported before it costs much.
DEFAULT_MAX_ITERATIONS = 10_000
# The same as DEFAULT_WORKERS: how many items an `async def` node handles at a time in a stream.
DEFAULT_MAP_CONCURRENCY = 32

Kind = Literal["cond", "switch", "while_loop", "map_each", "fold"]
OnError = Literal["raise", "skip"]


_ARGUMENTS: dict[Kind, tuple[str, ...]] = {
    "cond": ("predicate", "operand"),
    "switch": ("index", "operand"),
    "while_loop": ("initial",),
    "map_each": ("items",),
    "fold": ("stream", "initial"),
}


@dataclass(frozen=True)
class Control:
    """A control-flow step.

    Attributes:
        kind: the construct.
        limit: the most iterations of a `while_loop`, or the most items in flight of a `map_each`.
        result_of: a body whose result annotation is also that of the step; None if there is none.
        over_stream: whether it is a `map_each` over a stream, which gives a stream.
        on_error: what a `fold` does with a value that failed.
    """

    kind: Kind
    limit: int = 0
    result_of: Callable[..., Any] | None = None
    over_stream: bool = False
    on_error: OnError = "raise"

    @property
    def name(self) -> str:
        """The name of the step, for drawings and errors."""
        return self.kind

    @property
    def is_async(self) -> bool:
        """Whether a call of it is awaited: always, unless it gives a stream."""
        return not self.over_stream

    @property
    def gives_stream(self) -> bool:
        """Whether its value is a stream."""
        return self.over_stream

    @property
    def _reads_streams(self) -> bool:
        """Whether its argument may be a stream."""
        return self.over_stream or self.kind == "fold"

    def _argument_names(self) -> tuple[str, ...]:
        """Return the names of the arguments, without the values that its bodies capture."""
        return _ARGUMENTS[self.kind]

    @property
    def _drawn_detail(self) -> str:
        """A word for drawings of the graph."""
        return "stream" if self.over_stream else "skips failures" if self.on_error == "skip" else ""

    def _result_annotation(self) -> Any:
        """Return the annotation of the result, taken from one body: all bodies of a step return the same type."""
        return None if self.result_of is None else result_hint(self.result_of)


def cond(
    predicate: bool,
    then: Callable[[T], Awaitable[U]],
    otherwise: Callable[[T], Awaitable[U]],
    operand: T,
    /,
) -> Awaitable[U]:
    """Run one of two bodies.

    Args:
        predicate: the value that decides; its truth is tested when the graph runs, not while it is traced.
        then: a node, graph or function of the operand, run if the predicate is true.
        otherwise: a node, graph or function of the operand, run if it is false.
        operand: the argument of the body that runs.

    Returns:
        The result of the body that ran.

    Raises:
        TypeError: a body is no function, but e.g. a call of one.
    """
    _check_bodies("cond(predicate, then, otherwise, operand)", then=then, otherwise=otherwise)
    tracer = active()
    if tracer is None:
        return _await(then if predicate else otherwise, operand)
    return cast(
        "Awaitable[U]",
        _record(Control("cond", result_of=then), (predicate, operand), (("then", then), ("otherwise", otherwise))),
    )


def switch(index: int, branches: tuple[Callable[[T], Awaitable[U]], ...], operand: T, /) -> Awaitable[U]:
    """Run one of several bodies, by number.

    Args:
        index: the number of the branch, from 0.
        branches: nodes, graphs or functions of the operand.
        operand: the argument of the branch that runs.

    Returns:
        The result of the body that ran.

    Raises:
        IndexError: there is no branch with that number; negative numbers do not count from the end.
        TypeError: `branches` is no tuple of functions.
        ValueError: `branches` is empty.
    """
    if not isinstance(cast("object", branches), tuple | list):
        raise _misuse(f"ps.switch takes a tuple of branches, then the operand, got {_shown(branches)}")
    if not branches:
        raise ValueError("ps.switch needs at least one branch")
    for number, branch in enumerate(branches):
        _check_bodies("switch(index, branches, operand)", **{f"branches[{number}]": branch})
    tracer = active()
    if tracer is None:
        return _await(branches[checked_branch(index, len(branches))], operand)
    named = tuple((f"branch {number}", branch) for number, branch in enumerate(branches))
    return cast("Awaitable[U]", _record(Control("switch", result_of=branches[0]), (index, operand), named))


def while_loop(
    predicate: Callable[[T], Awaitable[bool] | bool],
    body: Callable[[T], Awaitable[T]],
    initial: T,
    /,
    *,
    max_iterations: int = DEFAULT_MAX_ITERATIONS,
) -> Awaitable[T]:
    """Run a body as long as a predicate of its value is true.

    Args:
        predicate: a node, graph or function of the value; tested before each iteration.
        body: a node, graph or function of the value; it returns the next value.
        initial: the first value.
        max_iterations: how often the body may run.

    Returns:
        The first value for which the predicate is false.

    Raises:
        IterationLimitError: the predicate is still true after `max_iterations`.
        OptionsError: `max_iterations` is no whole number of at least 0.
        TypeError: `predicate` or `body` is no function, but e.g. a call of one.
    """
    check("max_iterations", max_iterations, whole(0), "while_loop(")
    _check_bodies("while_loop(predicate, body, initial)", predicate=predicate, body=body)
    tracer = active()
    if tracer is None:
        return _loop(predicate, body, initial, max_iterations)
    bodies = ("while", predicate), ("body", body)
    return cast("Awaitable[T]", _record(Control("while_loop", max_iterations, body), (initial,), bodies))


@overload
def map_each(
    fn: Callable[[T], Awaitable[U]], items: AsyncIterable[T], /, *, concurrency: int = ..., name: str | None = ...
) -> AsyncIterator[U]: ...
@overload
def map_each(
    fn: Callable[[T], U], items: AsyncIterable[T], /, *, concurrency: int = ..., name: str | None = ...
) -> AsyncIterator[U]: ...
@overload
def map_each(
    fn: Callable[[T], Awaitable[U]], items: Iterable[T], /, *, concurrency: int = ..., name: str | None = ...
) -> Awaitable[list[U]]: ...
@overload
def map_each(
    fn: Callable[[T], U], items: Iterable[T], /, *, concurrency: int = ..., name: str | None = ...
) -> Awaitable[list[U]]: ...
def map_each(
    fn: Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    /,
    *,
    concurrency: int = DEFAULT_MAP_CONCURRENCY,
    name: str | None = None,
) -> Awaitable[list[Any]] | AsyncIterator[Any]:
    """Run a body for each item of a list, or of a stream.

    Args:
        fn: a node, graph or function of one item.
        items: a list or another iterable, or a stream, which is asked for the next item when there is room for it.
        concurrency: the most items in flight at a time; an item of a stream counts until its result is read.
        name: the name of the body in drawings, statistics, metrics, spans and profiles; by default the name of `fn`.

    Returns:
        The results, in the order of the items: for a list, an awaitable list; for a stream, a stream.

    Raises:
        OptionsError: `concurrency` is no whole number of at least 1, or `name` is empty or no text.
        TypeError: `fn` is no function, but e.g. a call of one; or `items` is not iterable, or a dict.
    """
    check("concurrency", concurrency, whole(1), "map_each(")
    check("name", name, optional(NAME), "map_each(")
    _check_bodies("map_each(fn, items)", fn=fn)
    if not isinstance(items, Ref | AsyncIterable):
        check_items(items)
    tracer = active()
    if tracer is None:
        return _map_stream(fn, items) if isinstance(items, AsyncIterable) else _map(fn, items)
    control = Control("map_each", concurrency, over_stream=tracer.is_stream(items))
    return cast("Awaitable[list[Any]] | AsyncIterator[Any]", _record(control, (items,), ((name or _name_of(fn), fn),)))


@overload
def fold(
    fn: Callable[[S, T], Awaitable[S]],
    stream: AsyncIterable[T],
    initial: S,
    /,
    *,
    on_error: OnError = ...,
    name: str | None = ...,
) -> Awaitable[S]: ...
@overload
def fold(
    fn: Callable[[S, T], S],
    stream: AsyncIterable[T],
    initial: S,
    /,
    *,
    on_error: OnError = ...,
    name: str | None = ...,
) -> Awaitable[S]: ...
def fold(
    fn: Callable[[Any, Any], Any],
    stream: AsyncIterable[Any],
    initial: Any,
    /,
    *,
    on_error: OnError = "raise",
    name: str | None = None,
) -> Awaitable[Any]:
    """Fold a stream into one value, in constant memory: a sum, a histogram, one step of a fit over all data.

    One value of the stream after the other is folded. So beside the state there are the value that is folded, and those
    that the stream holds in advance (`capacity=` of the node that gives it).

    Args:
        fn: node, graph or function of the state and one value; it returns the next state. What a device node returns
            stays on its device until the next call.
        stream: the values; a list is folded by a node of your own, in one call.
        initial: the state before the first value, and the result if there are none.
        on_error: "skip" leaves out a value whose `fn` failed, and goes on with the state before it; it is logged, and
            counted as failed in the statistics of this step. An error of the stream itself is always raised.
        name: what the body is called in drawings, statistics, metrics, spans and profiles; by default as `fn` is.

    Returns:
        The last state.

    Raises:
        OptionsError: `on_error` is neither "raise" nor "skip", or `name` is empty or no text.
        TypeError: `fn` is no function, but e.g. a call of one; `stream` is none.
    """
    check("on_error", on_error, one_of(OnError), "fold(")
    check("name", name, optional(NAME), "fold(")
    _check_bodies("fold(fn, stream, initial)", fn=fn)
    tracer = active()
    if not (hasattr(stream, "__aiter__") if tracer is None else tracer.is_stream(stream)):
        remedy = "a parameter of a graph is one if it is annotated as AsyncIterator"
        raise _misuse(f"ps.fold(fn, stream, initial) takes a stream, got {_shown(stream)}: {remedy}")
    if tracer is None:
        return _fold(fn, stream, initial, on_error)
    control = Control("fold", result_of=fn, on_error=on_error)
    return cast("Awaitable[Any]", _record(control, (stream, initial), ((name or _name_of(fn), fn),), takes=2))


def _name_of(fn: Callable[..., Any]) -> str:
    """Return the name of the body: that of its node, graph or function; "each" for a lambda."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "name", None) or getattr(fn, "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else "each"


def check_items(items: Any) -> None:
    """Check that `map_each` can take `items` one by one; a dict is refused, because it is ambiguous.

    Raises:
        TypeError: it cannot; while a graph is traced, a GraphTraceError.
    """
    if isinstance(items, Iterable) and not isinstance(items, Mapping | Unawaited):
        return
    remedy = "it takes a list, another iterable, or a stream"
    if isinstance(items, Mapping):
        remedy = "of a dict it could mean keys, values or both: pass list(d) or list(d.items())"
    elif isinstance(items, Unawaited):
        remedy = "write `await` before its call"
    elif isinstance(items, AsyncIterable):
        remedy = "it is a stream, but the graph was not told: annotate its parameter as AsyncIterator"
    elif hasattr(items, "__getitem__"):
        return  # iterable by the old protocol, without __iter__
    elif callable(items):
        remedy = "the function comes first, ps.map_each(fn, items)"
    raise _misuse(f"ps.map_each cannot take the items of {_shown(items)}: {remedy}")


def checked_branch(index: int, count: int) -> int:
    """Return the number of a branch.

    Raises:
        IndexError: there is no branch with that number.
    """
    if not 0 <= index < count:
        raise IndexError(f"ps.switch has branches 0 to {count - 1}, got {index}")
    return index


def iteration_limit(limit: int) -> IterationLimitError:
    """Return the error of a loop whose predicate is still true after `limit` iterations."""
    return IterationLimitError(
        f"ps.while_loop ran its body {limit} times and the predicate is still true; raise max_iterations= if it is "
        "meant to run longer"
    )


def _check_bodies(construct: str, **bodies: Any) -> None:
    for name, body in bodies.items():
        if callable(body) and not isinstance(body, Ref | Unawaited | Awaitable):
            continue
        takes = "the state and one value" if construct.startswith("fold") else "one value"
        remedy = f"it takes a node, a graph or a function of {takes}, known while the graph is traced"
        if isinstance(body, Unawaited | CoroutineType):
            remedy = "pass the function itself, without calling it"
        elif construct.startswith("map_each"):
            remedy = "the function comes first, then the items"
        elif construct.startswith("fold"):
            remedy = "the function comes first, then the stream"
        if isinstance(body, CoroutineType):
            body.close()
        raise _misuse(f"ps.{construct} got {name}={_shown(body)}: {remedy}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _misuse(message: str) -> Exception:
    return TypeError(message) if active() is None else GraphTraceError(f"{call_location()}: {message}")


def _record(
    control: Control, args: tuple[Any, ...], bodies: tuple[tuple[str, Callable[..., Any]], ...], *, takes: int = 1
) -> Any:
    tracer = active()
    assert tracer is not None
    traces: list[Trace] = [tracer.body(name, fn, takes) for name, fn in bodies]
    return tracer.record(control, args, {}, tuple(traces))


async def _await(fn: Callable[..., Any], *values: Any) -> Any:
    result = fn(*values)
    if isinstance(result, Awaitable):
        result = await cast("Awaitable[Any]", result)  # type: ignore[redundant-cast]
    return result


async def _loop(predicate: Callable[[Any], Any], body: Callable[[Any], Any], value: Any, limit: int) -> Any:
    for _ in range(limit):
        if not await _await(predicate, value):
            return value
        value = await _await(body, value)
    if await _await(predicate, value):
        raise iteration_limit(limit)
    return value


async def _map(fn: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    return [await _await(fn, item) for item in items]


async def _map_stream(fn: Callable[[Any], Any], items: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    iterator = aiter(items)
    try:
        async for item in iterator:
            yield await _await(fn, item)
    finally:
        await close_stream(iterator)


async def _fold(fn: Callable[[Any, Any], Any], stream: AsyncIterable[Any], state: Any, on_error: OnError) -> Any:
    iterator = aiter(stream)
    try:
        async for value in iterator:
            try:
                state = await _await(fn, state, value)
            except Exception as error:
                if on_error == "raise":
                    raise
                logs.warning("fold.value_skipped", error=repr(error))
        return state
    finally:
        await close_stream(iterator)
