"""Control flow on values: `cond`, `switch`, `while_loop`, `map_each` and `fold`."""

import asyncio
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from types import CoroutineType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Required, TypedDict, Unpack, cast, overload

from typing_extensions import TypeVar

from .._errors import GraphTraceError, IterationLimitError, OptionsError
from .._public import LateModule
from ..actors.accepted import NAME, check, instance, one_of, optional, whole
from ..actors.tasks import close_stream
from ..telemetry import logs
from .tracing.annotations import result_hint, unwrapped
from .tracing.ref import Ref, Unawaited, call_location
from .tracing.tracer import Trace, active

if TYPE_CHECKING:
    from ..saving import durable as saving
else:
    saving = LateModule("penstock.saving.durable")

# Outside of a trace, these functions are plain Python. While a graph is traced, a call becomes a single step, whose
# bodies are traced as graphs of their own: an iteration never enters an inbox of the outer graph.

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)
Tag_co = TypeVar("Tag_co", covariant=True, default=Any)

# An agent's loop or a search rarely passes a hundred turns; a loop that never ends is reported before it costs much.
DEFAULT_MAX_ITERATIONS = 10_000
# The same as DEFAULT_WORKERS: how many items an `async def` node handles at a time in a stream.
DEFAULT_MAP_CONCURRENCY = 32

# How `map_each` handles the error of an item.
OnError = Literal["raise", "skip", "return"]
FoldOnError = Literal["raise", "skip"]
Kind = Literal["cond", "switch", "while_loop", "map_each", "split", "branch", "fold"]


_ARGUMENTS: dict[Kind, tuple[str, ...]] = {
    "cond": ("predicate", "operand"),
    "switch": ("index", "operand"),
    "while_loop": ("initial",),
    "map_each": ("items",),
    "split": ("values",),
    "branch": ("split",),
    "fold": ("stream", "initial"),
}


@dataclass(frozen=True)
class Outcome(Generic[T_co, Tag_co]):
    """The outcome of one item of a stream or of `map_each`: a result or an error.

    Attributes:
        index: the index of the item in the input, from 0.
        value: the result; None if the item failed.
        error: the error; None if the item did not fail.
        tag: the tag that `penstock.tagged` has given to the call; None without a tag. Comparisons and pickles leave the
            tag out.
    """

    index: int
    value: T_co | None
    error: Exception | None
    _tag: ClassVar[Any] = None  # not a field, so that snapshots do not store the tag

    @property
    def tag(self) -> Tag_co:
        """The tag that `penstock.tagged` has given to the call; None without a tag."""
        return cast(Tag_co, self._tag)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tag, which is often a message of a queue that cannot be pickled."""
        return {**self.__dict__, "_tag": None}


@dataclass(frozen=True)
class Control:
    """A control-flow step.

    Attributes:
        kind: the construct.
        limit: for a `while_loop`, the most iterations; for a `map_each`, the most items in flight; for a `split`, the
            number of streams; for a "branch", its number among these streams.
        result_of: a body whose result annotation also holds for the step; None without such a body.
        over_stream: whether the step is a `map_each` over a stream, which gives a stream.
        ahead: how many values the stream of a `map_each`, or each stream of a `split`, holds; 0 for the default.
        inputs: how many lists or streams a `map_each` takes in step; 2 for a `fold`: its stream and its first state.
        on_error: how a `map_each` handles the error of an item, or a `fold` the error of a value.
        durable: where a `while_loop` keeps its state; None if the loop is not durable.
    """

    kind: Kind
    limit: int = 0
    result_of: Callable[..., Any] | None = None
    over_stream: bool = False
    ahead: int = 0
    inputs: int = 1
    on_error: OnError = "raise"
    durable: "saving.Durable | None" = None

    @property
    def name(self) -> str:
        """The name of the step, for drawings and errors."""
        return self.kind

    @property
    def is_async(self) -> bool:
        """Control flow is awaited, unless it gives streams."""
        return not self.over_stream and self.kind not in ("split", "branch")

    @property
    def gives_stream(self) -> bool:
        """Whether the value of the step is a stream."""
        return self.over_stream or self.kind == "branch"

    @property
    def _reads_streams(self) -> bool:
        """Whether an argument of the step may be a stream."""
        return self.over_stream or self.kind in ("split", "fold")

    def _argument_names(self) -> tuple[str, ...]:
        """Return the names of the arguments, without the values that the bodies capture."""
        return _ARGUMENTS[self.kind] + tuple(f"items {number}" for number in range(2, self.inputs + 1))

    @property
    def _is_effect(self) -> bool:
        """Control flow has no effect of its own, but its bodies may have one."""
        return False

    @property
    def _drawn_detail(self) -> str:
        """A word for drawings of the graph."""
        if self.kind == "split":
            return f"{self.limit} streams, {self.ahead} ahead"
        if self.durable is not None:
            return "durable"
        return "stream" if self.gives_stream else "skips failures" if self.on_error == "skip" else ""

    def _result_annotation(self) -> Any:
        """Return the annotation of the result, from any body: all bodies of a step return the same type."""
        return None if self.result_of is None else result_hint(self.result_of)


@overload
def cond(
    predicate: bool, then: Callable[[T], Awaitable[U]], otherwise: Callable[[T], Awaitable[U]], operand: T, /
) -> Awaitable[U]: ...
@overload
def cond(
    predicate: bool, then: Callable[[T], Awaitable[U] | U], otherwise: Callable[[T], Awaitable[U] | U], operand: T, /
) -> Awaitable[U]: ...
def cond(predicate: bool, then: Callable[[T], Any], otherwise: Callable[[T], Any], operand: T, /) -> Awaitable[Any]:
    """Run one of two bodies.

    Args:
        predicate: the value that decides; its truth is tested when the graph runs, not while the graph is traced.
        then: a node, graph or function of the operand, run if the predicate is true.
        otherwise: a node, graph or function of the operand, run if the predicate is false.
        operand: the argument of the body that runs.

    Returns:
        The result of the body that ran.

    Raises:
        TypeError: a body is not a function, but, for example, a call of a function.
    """
    _check_bodies("cond(predicate, then, otherwise, operand)", then=then, otherwise=otherwise)
    tracer = active()
    if tracer is None:
        return _await(then if predicate else otherwise, operand)
    return cast(
        "Awaitable[Any]",
        _record(Control("cond", result_of=then), (predicate, operand), (("then", then), ("otherwise", otherwise))),
    )


@overload
def switch(index: int, branches: tuple[Callable[[T], Awaitable[U]], ...], operand: T, /) -> Awaitable[U]: ...
@overload
def switch(index: int, branches: tuple[Callable[[T], Awaitable[U] | U], ...], operand: T, /) -> Awaitable[U]: ...
def switch(index: int, branches: tuple[Callable[[T], Any], ...], operand: T, /) -> Awaitable[Any]:
    """Run one of several bodies, by number.

    Args:
        index: the number of the branch, from 0.
        branches: nodes, graphs or functions of the operand.
        operand: the argument of the branch that runs.

    Returns:
        The result of the body that ran.

    Raises:
        IndexError: there is no branch with that number; negative numbers do not count from the end.
        TypeError: `branches` is not a tuple of functions.
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
    return cast("Awaitable[Any]", _record(Control("switch", result_of=branches[0]), (index, operand), named))


def while_loop(
    predicate: Callable[[T], Awaitable[bool] | bool],
    body: Callable[[T], Awaitable[T] | T],
    initial: T,
    /,
    *,
    max_iterations: int = DEFAULT_MAX_ITERATIONS,
    durable: "saving.Durable | None" = None,
) -> Awaitable[T]:
    """Run a body as long as a predicate of its value is true.

    With `durable=`, the value is stored after each iteration, under the key of the call (`durable_key=` of
    `engine.run`). If the call ends without a result, a later call with the same key goes on from the stored value, also
    in another process. Steps before the loop run again, and so does the interrupted iteration, but no earlier
    iteration.

    Args:
        predicate: a node, graph or function of the value; tested before each iteration.
        body: a node, graph or function of the value; it returns the next value.
        initial: the first value.
        max_iterations: how often the body may run; iterations in earlier processes count.
        durable: where the value is stored; None to store nothing. A graph has at most one durable loop, not inside of a
            `map_each`, a `fold` or another loop.

    Returns:
        The first value for which the predicate is false.

    Raises:
        IterationLimitError: the predicate is still true after `max_iterations`.
        OptionsError: `max_iterations` is not a whole number of at least 0; `durable` is not a `Durable`, or is given
            without an engine.
        TypeError: `predicate` or `body` is not a function, but, for example, a call of a function.
    """
    check("max_iterations", max_iterations, whole(0), "while_loop(")
    _check_bodies("while_loop(predicate, body, initial)", predicate=predicate, body=body)
    if durable is not None:
        check("durable", durable, instance(saving.Durable, "a Durable, such as Durable('loops.db')"), "while_loop(")
    tracer = active()
    if tracer is None:
        if durable is not None:
            raise OptionsError(
                "while_loop(durable=...) keeps its value under the key of a call: run the graph in an engine, "
                "engine.run(graph(...), durable_key=...)"
            )
        return _loop(predicate, body, initial, max_iterations)
    bodies = ("while", predicate), ("body", body)
    control = Control("while_loop", max_iterations, body, durable=durable)
    return cast("Awaitable[T]", _record(control, (initial,), bodies))


class _RaiseOrSkip(TypedDict, total=False):
    """The options of `map_each` with which it returns results."""

    concurrency: int
    name: str | None
    on_error: Literal["raise", "skip"]


class _Return(TypedDict, total=False):
    """The options of `map_each` with which it returns outcomes."""

    concurrency: int
    name: str | None
    on_error: Required[Literal["return"]]


class _OfFold(TypedDict, total=False):
    """The options of `fold`."""

    on_error: FoldOnError
    name: str | None


@overload
def map_each(
    fn: Callable[[T], Awaitable[U]], items: AsyncIterable[T], /, **options: Unpack[_RaiseOrSkip]
) -> AsyncIterator[U]: ...
@overload
def map_each(fn: Callable[[T], U], items: AsyncIterable[T], /, **options: Unpack[_RaiseOrSkip]) -> AsyncIterator[U]: ...
@overload
def map_each(
    fn: Callable[[T], Awaitable[U]], items: Iterable[T], /, **options: Unpack[_RaiseOrSkip]
) -> Awaitable[list[U]]: ...
@overload
def map_each(fn: Callable[[T], U], items: Iterable[T], /, **options: Unpack[_RaiseOrSkip]) -> Awaitable[list[U]]: ...
@overload
def map_each(
    fn: Callable[..., Awaitable[U]], items: AsyncIterable[Any], second: AsyncIterable[Any], /,
    *more: AsyncIterable[Any], **options: Unpack[_RaiseOrSkip],
) -> AsyncIterator[U]: ...  # fmt: skip
@overload
def map_each(
    fn: Callable[..., U], items: AsyncIterable[Any], second: AsyncIterable[Any], /, *more: AsyncIterable[Any],
    **options: Unpack[_RaiseOrSkip],
) -> AsyncIterator[U]: ...  # fmt: skip
@overload
def map_each(
    fn: Callable[..., Awaitable[U]], items: Iterable[Any], second: Iterable[Any], /, *more: Iterable[Any],
    **options: Unpack[_RaiseOrSkip],
) -> Awaitable[list[U]]: ...  # fmt: skip
@overload
def map_each(
    fn: Callable[..., U], items: Iterable[Any], second: Iterable[Any], /, *more: Iterable[Any],
    **options: Unpack[_RaiseOrSkip],
) -> Awaitable[list[U]]: ...  # fmt: skip
@overload
def map_each(
    fn: Callable[[T], Awaitable[U]], items: AsyncIterable[T], /, **options: Unpack[_Return]
) -> AsyncIterator[Outcome[U]]: ...
@overload
def map_each(
    fn: Callable[[T], U], items: AsyncIterable[T], /, **options: Unpack[_Return]
) -> AsyncIterator[Outcome[U]]: ...
@overload
def map_each(
    fn: Callable[[T], Awaitable[U]], items: Iterable[T], /, **options: Unpack[_Return]
) -> Awaitable[list[Outcome[U]]]: ...
@overload
def map_each(
    fn: Callable[[T], U], items: Iterable[T], /, **options: Unpack[_Return]
) -> Awaitable[list[Outcome[U]]]: ...
@overload
def map_each(
    fn: Callable[..., Awaitable[U]], items: AsyncIterable[Any], second: AsyncIterable[Any], /,
    *more: AsyncIterable[Any], **options: Unpack[_Return],
) -> AsyncIterator[Outcome[U]]: ...  # fmt: skip
@overload
def map_each(
    fn: Callable[..., U], items: AsyncIterable[Any], second: AsyncIterable[Any], /, *more: AsyncIterable[Any],
    **options: Unpack[_Return],
) -> AsyncIterator[Outcome[U]]: ...  # fmt: skip
@overload
def map_each(
    fn: Callable[..., Awaitable[U]], items: Iterable[Any], second: Iterable[Any], /, *more: Iterable[Any],
    **options: Unpack[_Return],
) -> Awaitable[list[Outcome[U]]]: ...  # fmt: skip
@overload
def map_each(
    fn: Callable[..., U], items: Iterable[Any], second: Iterable[Any], /, *more: Iterable[Any],
    **options: Unpack[_Return],
) -> Awaitable[list[Outcome[U]]]: ...  # fmt: skip
def map_each(
    fn: Callable[..., Any],
    items: Any,
    /,
    *more: Any,
    concurrency: int = DEFAULT_MAP_CONCURRENCY,
    name: str | None = None,
    on_error: OnError = "raise",
) -> Awaitable[list[Any]] | AsyncIterator[Any]:
    """Run a body for each item of a list or of a stream; or for the items of several lists or streams, as `zip` does.

    Args:
        fn: a node, graph or function of one item. For several lists or streams, it takes one item of each.
        items: the items; a stream is read as the step has room.
        *more: further lists, or further streams. Lists must have the same length. Streams end with the shortest stream,
            and are all closed then.
        concurrency: the most items in flight at a time; an item of a stream counts until its result is taken. If the
            body is one device node without `batch=`, at most 16 items begin, because its device holds 16 calls.
        name: the name of the body in drawings, statistics, metrics, spans and profiles; None for the name of `fn`.
        on_error: "raise" ends this step with the error of an item, in its turn. "skip" leaves the item out, and logs
            its error. "return" makes each result an `engine.Outcome`, which has the result or the error. Both "skip"
            and "return" count the item as `failed` of this step. An error of the stream itself is always raised, and so
            is an exception that is not an `Exception`.

    Returns:
        The results, in the order of the items: for a list, an awaitable list; for a stream, a stream.

    Raises:
        OptionsError: `concurrency` is not a whole number of at least 1, `name` is empty or not a string, or `on_error`
            is not one of its values.
        TypeError: `fn` is not a function, but, for example, a call of a function; or `items` is not iterable, or is a
            dict.
        ValueError: lists have different lengths; raised before the first item runs.
    """
    check("concurrency", concurrency, whole(1), "map_each(")
    check("name", name, optional(NAME), "map_each(")
    check("on_error", on_error, one_of(OnError), "map_each(")
    _check_bodies("map_each(fn, items)", fn=fn)
    inputs = items, *more
    for one in inputs:
        if not isinstance(one, Ref | AsyncIterable):
            check_items(one)
    tracer = active()
    are_streams = [isinstance(one, AsyncIterable) if tracer is None else tracer.is_stream(one) for one in inputs]
    if any(are_streams) and not all(are_streams):
        raise _misuse("ps.map_each takes several lists or several streams in step, not both together; read a list in a "
                      "node that yields its items, which makes a stream of it")  # fmt: skip
    if tracer is None:
        return _map_streams(fn, inputs, on_error) if are_streams[0] else _map_lists(fn, inputs, on_error)
    control = Control("map_each", concurrency, over_stream=are_streams[0], inputs=len(inputs), on_error=on_error)
    bodies = ((name or _name_of(fn), fn),)
    return cast("Awaitable[list[Any]] | AsyncIterator[Any]", _record(control, inputs, bodies))


def mapped_ahead(fn: Callable[[Any], Any], values: AsyncIterator[Any], name: str, ahead: int) -> AsyncIterator[Any]:
    """Run a body for each value of a stream, one at a time, and hold up to `ahead` results for the reader."""
    tracer = active()
    if tracer is None:
        return _map_streams(fn, (values,), "raise")
    if not tracer.is_stream(values):
        raise _misuse(f"{name} takes a stream, got {_shown(values)}")
    control = Control("map_each", 1, over_stream=True, ahead=ahead)
    return cast("AsyncIterator[Any]", _record(control, (values,), ((name, fn),)))


def split_stream(values: AsyncIterator[T], count: int, ahead: int) -> tuple[AsyncIterator[T], ...]:
    """Give the values of a stream to several readers.

    Args:
        values: the stream.
        count: how many streams to return.
        ahead: how many values each stream holds while other streams wait for more values; ignored outside of a graph,
            where nothing bounds the number.
    """
    tracer = active()
    if tracer is None:
        shared = _Shared(aiter(values), count)
        return tuple(shared.branch(number) for number in range(count))
    if not tracer.is_stream(values):
        raise _misuse(f"a split takes a stream, got {_shown(values)}")
    branches = tracer.record(Control("split", count, ahead=ahead), (values,), {})
    return tuple(cast("AsyncIterator[T]", tracer.record(Control("branch", at), (branches,), {})) for at in range(count))


class _Shared(Generic[T]):
    """The values of one iterator, for several readers that go on at their own pace."""

    def __init__(self, values: AsyncIterator[T], count: int) -> None:
        self._values = values
        self._open = count
        self._held: list[deque[T]] = [deque() for _ in range(count)]
        self._asking = asyncio.Lock()

    async def branch(self, number: int) -> AsyncGenerator[T, None]:
        """Yield the values to one reader."""
        held = self._held[number]
        try:
            while True:
                async with self._asking:
                    if not held:
                        try:
                            value = await anext(self._values)
                        except StopAsyncIteration:
                            return
                        for other in self._held:
                            other.append(value)
                yield held.popleft()
        finally:
            self._open -= 1
            if not self._open:
                await close_stream(self._values)


@overload
def fold(
    fn: Callable[[S, T], Awaitable[S]], stream: AsyncIterable[T], initial: S, /, **options: Unpack[_OfFold]
) -> Awaitable[S]: ...
@overload
def fold(
    fn: Callable[[S, T], S], stream: AsyncIterable[T], initial: S, /, **options: Unpack[_OfFold]
) -> Awaitable[S]: ...
def fold(
    fn: Callable[[Any, Any], Any],
    stream: AsyncIterable[Any],
    initial: Any,
    /,
    *,
    on_error: FoldOnError = "raise",
    name: str | None = None,
) -> Awaitable[Any]:
    """Fold a stream into one value, in constant memory: a sum, a histogram, one step of a fit over all data.

    Values are folded one after the other. So memory holds the state, one value, and the values that the stream holds
    ahead (`capacity=` of the node that gives the stream).

    Args:
        fn: a node, graph or function of the state and one value; it returns the next state. The state of a device node
            stays on its device until the next call.
        stream: the values; to fold a list, write a node.
        initial: the state before the first value, and the result if the stream is empty.
        on_error: "skip" leaves out a value for which `fn` failed, and goes on with the state before that value; the
            error is logged, and counted as `failed` of this step. An error of the stream itself is always raised.
        name: the name of the body in drawings, statistics, metrics, spans and profiles; None for the name of `fn`.

    Returns:
        The last state.

    Raises:
        OptionsError: `on_error` is neither "raise" nor "skip", or `name` is empty or not a string.
        TypeError: `fn` is not a function, but, for example, a call of a function; or `stream` is not a stream.
    """
    check("on_error", on_error, one_of(FoldOnError), "fold(")
    check("name", name, optional(NAME), "fold(")
    _check_bodies("fold(fn, stream, initial)", fn=fn)
    tracer = active()
    if not (hasattr(stream, "__aiter__") if tracer is None else tracer.is_stream(stream)):
        remedy = "a parameter of a graph is one if it is annotated as AsyncIterator"
        raise _misuse(f"ps.fold(fn, stream, initial) takes a stream, got {_shown(stream)}: {remedy}")
    if tracer is None:
        return _fold(fn, stream, initial, on_error)
    control = Control("fold", result_of=fn, inputs=2, on_error=on_error)
    return cast("Awaitable[Any]", _record(control, (stream, initial), ((name or _name_of(fn), fn),)))


def _name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a body: the name of its node, graph or function; "each" for a lambda."""
    fn = unwrapped(fn)
    name = getattr(fn, "name", None) or getattr(fn, "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else "each"


def check_items(items: Any) -> None:
    """Check that `map_each` can take `items` one by one; a dict is refused, because it is ambiguous.

    Raises:
        TypeError: `items` cannot be taken one by one; while a graph is traced, this is a GraphTraceError.
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
        remedy = "it takes a node, a graph or a function, known while the graph is traced"
        if isinstance(body, Unawaited | CoroutineType):
            remedy = "pass the function itself, without calling it"
        if isinstance(body, CoroutineType):
            body.close()
        raise _misuse(f"ps.{construct} got {name}={_shown(body)}: {remedy}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _misuse(message: str) -> Exception:
    return TypeError(message) if active() is None else GraphTraceError(f"{call_location()}: {message}")


def _record(control: Control, args: tuple[Any, ...], bodies: tuple[tuple[str, Callable[..., Any]], ...]) -> Any:
    tracer = active()
    assert tracer is not None
    traces: list[Trace] = [tracer.body(name, fn, control.inputs) for name, fn in bodies]
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


def in_step(lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the items of several lists that belong together.

    Raises:
        ValueError: the lists have different lengths.
    """
    columns = [list(one) for one in lists]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(str(len(column)) for column in columns)
        raise ValueError(f"ps.map_each takes lists of one length in step, got {lengths} items")
    return list(zip(*columns, strict=True))


async def _map_lists(fn: Callable[..., Any], lists: Sequence[Any], on_error: OnError) -> list[Any]:
    results: list[Any] = []
    for index, items in enumerate(in_step(lists)):
        results += await _mapped(fn, items, index, on_error, "map_each.item_skipped")
    return results


async def _map_streams(fn: Callable[..., Any], streams: Sequence[Any], on_error: OnError) -> AsyncGenerator[Any, None]:
    iterators = [aiter(stream) for stream in streams]
    index = 0
    try:
        while True:
            try:
                items = [await anext(iterator) for iterator in iterators]
            except StopAsyncIteration:
                return
            for result in await _mapped(fn, items, index, on_error, "map_each.item_skipped"):
                yield result
            index += 1
    finally:
        for iterator in iterators:
            await close_stream(iterator)


async def _mapped(fn: Callable[..., Any], items: Sequence[Any], index: int, on_error: OnError, event: str) -> list[Any]:
    """Return the result of one item in a list; an empty list if the item is skipped."""
    try:
        value = await _await(fn, *items)
    except Exception as error:
        if on_error == "raise":
            raise
        return failed_item(index, error, on_error, event)
    return [Outcome(index, value, None)] if on_error == "return" else [value]


def failed_item(index: int, error: Exception, on_error: OnError, event: str = "map_each.item_skipped") -> list[Any]:
    """Return the results of an item that failed: an empty list, or a list of its outcome. `event` is for the log."""
    if on_error == "return":
        return [Outcome(index, None, error)]
    logs.warning(event, item=index, error=error)
    return []


async def _fold(fn: Callable[[Any, Any], Any], stream: AsyncIterable[Any], state: Any, on_error: FoldOnError) -> Any:
    iterator = aiter(stream)
    index = 0
    try:
        async for value in iterator:
            states = await _mapped(fn, (state, value), index, on_error, "fold.value_skipped")
            state = states[0] if states else state
            index += 1
        return state
    finally:
        await close_stream(iterator)
