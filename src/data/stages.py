"""Stages, which read one stream and return another, as in `stream >> stage`; most become one step of the graph."""

import asyncio
import contextlib
import functools
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from .. import Node, Ref, map_each, node
from .._errors import DataError, Noted, plain_error
from ..actors.accepted import FUNCTION, POSITIVE, SWITCH, OptionRule, check, one_of, optional, whole
from ..actors.tasks import start_task
from ..extension import Execution, Packer, StageIterator, StageRole, has_value, noted, split_stream, stage_node
from .batches import Array, Unlike, collate, joined, part_of, size_of
from .records import Record, Records, Source

T = TypeVar("T")
U = TypeVar("U")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
Fn = TypeVar("Fn", bound=Callable[[Any], Any])
Fn_co = TypeVar("Fn_co", bound=Callable[[Any], Any], covariant=True)


class _Applied:
    def __init__(self, apply: Callable[[Any], Any]) -> None:
        self._apply = apply


class Stage(_Applied, Generic[In_contra, Out_co]):
    """A function from stream to stream: `stream >> stage` and `stage(stream)` are the same.

    In a graph a stage becomes one or more steps. Outside of a graph it reads an async iterator, as plain Python does.
    """

    def __call__(self, stream: In_contra) -> Out_co:
        """Return the stream that comes of another one."""
        return cast("Out_co", self._apply(stream))

    __rrshift__ = __call__


class PassThroughStage(_Applied):
    """A stage that passes on the values of a stream as they are: all or some, in this or another order."""

    def __call__(self, stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """Return the stream that comes of another one."""
        return cast("AsyncIterator[T]", self._apply(stream))

    __rrshift__ = __call__


class _Lambda(Protocol):
    """Tells pyright that the parameter of a lambda is Any. No function is one, so a named one keeps its own type."""

    is_lambda: Any

    def __call__(self, value: Any, /) -> Any: ...


class FilteringStage(_Applied, Generic[Fn_co]):
    """The stage that keeps the values of a stream that a function chooses."""

    def __call__(self: "FilteringStage[Callable[[T], Any]]", stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """Return the stream that comes of another one."""
        return cast("AsyncIterator[T]", self._apply(stream))

    __rrshift__ = __call__


class BatchingStage(_Applied, Generic[Fn_co]):
    """The stage that makes batches with a function of a list of values, or of the values of records."""

    @overload
    def __call__(
        self: "BatchingStage[Callable[[list[T]], U]]", stream: AsyncIterator[Record[T]]
    ) -> AsyncIterator[U]: ...
    @overload
    def __call__(self: "BatchingStage[Callable[[list[T]], U]]", stream: AsyncIterator[T]) -> AsyncIterator[U]: ...
    @overload
    def __call__(self: "BatchingStage[type[U]]", stream: AsyncIterator[Any]) -> AsyncIterator[U]: ...
    def __call__(self, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Return the stream of batches."""
        return cast("AsyncIterator[Any]", self._apply(stream))

    __rrshift__ = __call__


class Reading(StageIterator[U], Generic[T, U]):
    """One stream in a stage, with the state of the stage."""

    def __init__(self, values: AsyncIterator[T]) -> None:
        super().__init__(values)
        [self._values] = cast("list[AsyncIterator[T]]", self.streams)


class _Holding(Reading[T, U]):
    """Attributes: held: the values that the stage has read and not passed on."""

    held: Any

    def place_again(self, place: Callable[[Any], Any]) -> None:
        """Have a function put the restored values on a device."""
        self.held = type(self.held)(map(place, self.held))


def stored(held: Sequence[Any]) -> Any:
    """Return values as a state. Records become columns of numbers, which take less time and room than objects."""
    if not held or any(type(one) is not Record for one in held):
        return list(held)
    records = cast("Sequence[Record[Any]]", held)
    columns = {name: np.array([getattr(one, name) for one in records], np.uint64) for name in _COLUMNS}
    values = None if all(one.value is None for one in records) else [one.value for one in records]
    return {**columns, "values": values}


def unstored(state: Any) -> list[Any]:
    """Return the values of a state that `stored` has made."""
    values: list[Any]
    if not hasattr(state, "keys"):
        values = state
        return values
    columns = [cast("Array", state[name]).tolist() for name in _COLUMNS]
    values = state["values"] or [None] * len(columns[0])
    return [Record(*row) for row in zip(*columns, values, strict=True)]


_COLUMNS = ("epoch", "position", "index", "seed")


# Reading records.


class ReadStage(_Applied, Generic[U]):
    """The stage that reads the values of records, one by one or a batch at once."""

    @overload
    def __call__(self, stream: AsyncIterator[Record[Any]]) -> AsyncIterator[Record[U]]: ...
    @overload
    def __call__(self, stream: AsyncIterator[Records[Any]]) -> AsyncIterator[Records[Any]]: ...
    def __call__(self, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Return the records with their values."""
        return cast("AsyncIterator[Any]", self._apply(stream))

    __rrshift__ = __call__


class _Read(Reading[Any, Any]):
    """Reads on the event loop: for data in memory, an item of a `map_each` would cost more than the value."""

    role = StageRole("one_to_one")

    def __init__(self, values: AsyncIterator[Any], source: Source[Any]) -> None:
        super().__init__(values)
        self._source = source

    async def __anext__(self) -> Any:
        return _value_of(await anext(self._values), self._source)


_RUNS_ON: Final = OptionRule(
    "'thread', 'loop', or workers, such as those of penstock.cluster.ray",
    lambda value: isinstance(value, Execution) or value in ("thread", "loop"),
)


def read(
    source: Source[U], /, *, runs_on: Literal["thread", "loop"] | Execution = "thread", concurrency: int = 1
) -> ReadStage[U]:
    """Read the value of each record from a source. For `Records`, read the batch of values, `source[records.index]`.

    Args:
        source: the source that `data.order` got. The source may be a value of the graph.
        runs_on: "thread" keeps the event loop free while files are read; "loop" is for data in memory. With workers,
            such as those of `penstock.cluster.ray`, other machines read and decode, and the records stay in order. A
            source that is not a value of the graph travels to each worker once, and may have up to 1 MB.
        concurrency: how many records are read at a time, over all workers. More than one needs a source that several
            threads may read: a dataset that seeks in one open file would give wrong records.

    Returns:
        A stage that fills in the values of records, in the same order.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("runs_on", runs_on, _RUNS_ON, "data.read(")
    check("concurrency", concurrency, whole(1), "data.read(")
    given: Any = source
    is_ref = isinstance(given, Ref)
    is_on_loop = runs_on == "loop"
    settings: dict[str, Any] = {} if is_ref else {"source": source}
    elsewhere: Any = node(
        name="read", runs_on="thread" if is_on_loop else runs_on, concurrency=concurrency, stateless=True
    )
    reader: Node[..., Any] = (
        stage_node("read", _Read, **settings) if is_on_loop else elsewhere(functools.partial(_value_of, **settings))
    )
    reads: Callable[[Any], Any] = (lambda one: reader(one, source=given)) if is_ref else reader
    return ReadStage(reads if is_on_loop else lambda records: map_each(reads, records, name="read"))  # pyright: ignore[reportUnknownLambdaType]


def _value_of(record: "Record[Any] | Records[Any]", source: Source[Any]) -> "Record[Any] | Records[Any]":
    try:
        index: Any = record.index  # of `Records`, an array, for a source that takes arrays
        return record.with_value(source[index])
    except Exception as error:
        if isinstance(record, Records):
            what = f"the {len(record)} records at positions {record.position.tolist()}"
            note = f"while data.read read {what}; order(batch=) is for a source that takes arrays of indexes"
        else:
            place = f"position {record.position} of epoch {record.epoch}, index {record.index} of {len(source):,}"
            note = f"while data.read read the record at {place}"
        own = noted(error, note)
        if isinstance(error, StopIteration | StopAsyncIteration):
            raise plain_error(own, "the source of data.read") from own
        if own is error:
            raise
        raise own from own.__cause__


# Batches.


class _Batched(_Holding[Any, Any]):
    """Attributes: held: the values, or records, of the batch that is being made."""

    role = StageRole(calls=("collate",), holds_values=True, may_change=("size",))

    def __init__(
        self, values: AsyncIterator[Any], size: int, drop_remainder: bool, collate: Callable[[list[Any]], Any]
    ) -> None:
        super().__init__(values)
        self._size = size
        self._drop_remainder = drop_remainder
        self._collate = collate
        self.held: list[Any] = []

    def state(self) -> Any:
        """Return the values of the batch that is being made."""
        return stored(self.held)

    def restore(self, state: Any) -> None:
        """Go on with a batch."""
        self.held = unstored(state)

    async def __anext__(self) -> Any:
        held, size = self.held, self._size
        async for value in self._values:
            held.append(value)
            if len(held) >= size:
                break
        else:
            if not held or self._drop_remainder:
                raise StopAsyncIteration
        self.held = []
        return _collated(held, self._collate)


def _collated(held: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    values = values_of(held)
    try:
        return collate(values)
    except Unlike as error:
        raise DataError(f"data.batched: {_place_of(held[error.item], error.item)}: {error.reason}") from None
    except Exception as error:
        first, last = _place_of(held[0], 0), _place_of(held[-1], len(held) - 1)
        own = noted(error, f"while data.batched collated {first} to {last}")
        if isinstance(error, StopIteration | StopAsyncIteration):
            raise plain_error(own, "collate=") from own
        if own is error:
            raise
        raise own from own.__cause__


def values_of(held: list[Any]) -> list[Any]:
    """Return the values of records; values that are no records are returned unchanged."""
    return [cast("Record[Any]", one).value if type(one) is Record else one for one in held]  # type: ignore[redundant-cast]


def _place_of(value: Any, item: int) -> str:
    if type(value) is Record:
        return f"the record at position {value.position} of epoch {value.epoch} (index {value.index})"
    return f"value {item} of the batch"


@overload
def batched(size: int, /, *, drop_remainder: bool = ...) -> BatchingStage[Callable[[list[Any]], Any]]: ...
@overload
def batched(size: int, /, *, drop_remainder: bool = ..., collate: Fn | _Lambda) -> BatchingStage[Fn]: ...
def batched(size: int, /, *, drop_remainder: bool = False, collate: Any = collate) -> BatchingStage[Any]:
    """Make batches of values. If the stream has records, the batches have the values of the records.

    Args:
        size: how many values a batch has.
        drop_remainder: leave out the last batch if it is smaller.
        collate: makes a batch from a list of values, on the event loop; by default `data.collate`.

    Returns:
        A stage. Its stream raises the errors of `collate`. `data.collate` raises a `DataError` that names the record
        and the leaf where values are not alike.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("size", size, whole(1), "data.batched(")
    check("drop_remainder", drop_remainder, SWITCH, "data.batched(")
    check("collate", collate, FUNCTION, "data.batched(")
    return BatchingStage(stage_node("batched", _Batched, size=size, drop_remainder=drop_remainder, collate=collate))


class _Unbatched(Reading[Any, Any]):
    """Attributes: batch: the present batch; next: the index of its next value."""

    role = StageRole(holds_values=True)

    def __init__(self, values: AsyncIterator[Any]) -> None:
        super().__init__(values)
        self.batch: Any = None
        self._size = 0
        self.next = 0

    def state(self) -> Any:
        """Return the present batch, if values of it are left."""
        return None if self.next == self._size else {"batch": self.batch, "next": self.next}

    def restore(self, state: Any) -> None:
        """Go on with a batch."""
        if state is not None:
            self.batch, self.next = state["batch"], state["next"]
            self._size = size_of(self.batch)

    async def __anext__(self) -> Any:
        while self.next == self._size:
            self.batch = await anext(self._values)
            with _DIVIDING:
                self._size, self.next = size_of(self.batch), 0
        self.next += 1
        with _DIVIDING:
            return part_of(self.batch, self.next - 1)


_DIVIDING: Final = Noted("while a batch was divided")


def unbatched() -> Stage[AsyncIterator[Any], AsyncIterator[Any]]:
    """Yield the values of batches one by one. Arrays are views of rows of the batch instead of copies."""
    return Stage(stage_node("unbatched", _Unbatched))


class _Rebatched(_Holding[Any, Any]):
    """Attributes: held: batches whose values were not passed on yet; count: the number of these values."""

    role = StageRole(holds_values=True, may_change=("size",))

    def __init__(self, values: AsyncIterator[Any], size: int, drop_remainder: bool) -> None:
        super().__init__(values)
        self._size = size
        self._drop_remainder = drop_remainder
        self.held: deque[Any] = deque()
        self.count = 0

    def state(self) -> Any:
        """Return the batches whose values were not passed on yet."""
        return list(self.held)

    def restore(self, state: Any) -> None:
        """Go on with batches."""
        self.held, self.count = deque(state), sum(map(size_of, state))

    async def __anext__(self) -> Any:
        while self.count < self._size:
            try:
                batch = await anext(self._values)
            except StopAsyncIteration:
                if not self.count or self._drop_remainder:
                    raise
                break
            self.held.append(batch)
            with _DIVIDING:
                self.count += size_of(batch)
        with _DIVIDING:
            return self._take(min(self._size, self.count))

    def _take(self, size: int) -> Any:
        self.count -= size
        parts: list[Any] = []
        while size:
            batch = self.held.popleft()
            here = size_of(batch)
            if here > size:
                self.held.appendleft(part_of(batch, slice(size, None)))
                batch, here = part_of(batch, slice(0, size)), size
            parts.append(batch)
            size -= here
        return parts[0] if len(parts) == 1 else joined(parts)


def rebatched(size: int, /, *, drop_remainder: bool = False) -> PassThroughStage:
    """Make batches of one size from batches of any size.

    Args:
        size: how many values a batch has.
        drop_remainder: leave out the last batch if it is smaller.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("size", size, whole(1), "data.rebatched(")
    check("drop_remainder", drop_remainder, SWITCH, "data.rebatched(")
    return PassThroughStage(stage_node("rebatched", _Rebatched, size=size, drop_remainder=drop_remainder))


# Rows of one length, made of sequences of different lengths.


class Packed(NamedTuple):
    """A row of sequences, one after the other, with the segment ids and positions that attention needs.

    Attributes:
        tokens: [length], of the type of the sequences; the padding is 0.
        segment_ids: int32 [length]: 1 for the first sequence, 2 for the next, 0 for padding.
        positions: int32 [length]: the place of each token in its sequence, from 0.
    """

    tokens: npt.NDArray[Any]
    segment_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]


class _Packing(Reading[Any, Packed]):
    """Packs the sequences of one stream.

    Attributes:
        packer: the rows that wait for further sequences.
        done: the rows that are finished.
        rest: the remainder of the sequence that is being put into rows.
        dtype: the type of all tokens.
    """

    role = StageRole(holds_values=True)

    def __init__(self, values: AsyncIterator[Any], length: int, look_ahead: int) -> None:
        super().__init__(values)
        self._length = length
        self._places = np.arange(length, dtype=np.int32)
        self.packer: Packer[npt.NDArray[Any]] = Packer(length, look_ahead)
        self.done: list[list[npt.NDArray[Any]]] = []
        self.rest: npt.NDArray[Any] | None = None
        self.dtype: np.dtype[Any] | None = None
        self._count = 0

    def state(self) -> Any:
        """Return the rows that wait, the finished rows, and the remainder of a sequence."""
        rows = [list(row) for row in self.packer.rows]
        done = list(self.done)
        return {"rows": rows, "done": done, "rest": self.rest, "dtype": self.dtype, "count": self._count}

    def restore(self, state: Any) -> None:
        """Go on with rows."""
        self.packer.rows = [(left, items) for left, items in state["rows"]]
        self.done, self.rest = state["done"], state["rest"]
        self.dtype, self._count = state["dtype"], state["count"]

    async def __anext__(self) -> Packed:
        done = self.done
        while not done:
            if self.rest is None:
                try:
                    self.rest = self._tokens(await anext(self._values))
                except StopAsyncIteration:
                    done += self.packer.take()
                    if not done:
                        raise
                    break
            tokens, length = self.rest, self._length
            self.rest = tokens[length:] if len(tokens) > length else None
            if len(tokens):
                done += self.packer.add(tokens[:length], min(len(tokens), length))
        return self._made(done.pop(0))

    def _tokens(self, value: Any) -> npt.NDArray[Any]:
        [held] = values_of([value])
        with Noted("while data.packed made an array of a sequence"):
            tokens: npt.NDArray[Any] = np.asarray(held)
        if self.dtype is None and tokens.ndim == 1 and tokens.size:
            self.dtype = tokens.dtype
        if tokens.ndim != 1 or (tokens.size and tokens.dtype != self.dtype):
            raise DataError(
                f"data.packed: {_place_of(value, self._count)}: a sequence is an array of one axis and of one type, "
                f"got {tokens.dtype}{list(tokens.shape)}{f', and before it {self.dtype}' if self.dtype else ''}"
            )
        self._count += 1
        return tokens

    def _made(self, row: list[npt.NDArray[Any]]) -> Packed:
        packed = Packed(
            np.zeros(self._length, self.dtype), np.zeros(self._length, np.int32), np.zeros(self._length, np.int32)
        )
        start = 0
        for number, tokens in enumerate(row, 1):
            end = start + len(tokens)
            packed.tokens[start:end] = tokens
            packed.segment_ids[start:end] = number
            packed.positions[start:end] = self._places[: end - start]
            start = end
        return packed


def packed(length: int, /, *, look_ahead: int = 16) -> Stage[AsyncIterator[Any], AsyncIterator[Packed]]:
    """Put sequences into rows of one length, with little padding; `>> data.batched(8)` stacks the rows.

    Sequences are arrays of one axis, or lists of numbers, or records of these. A sequence that is longer than a row is
    cut into pieces, each of which counts as a sequence. An empty sequence is left out.

    Args:
        length: how many tokens a row has.
        look_ahead: how many rows wait for sequences that still fit. More rows leave less padding and take more memory.

    Returns:
        A stage. Its stream raises a `DataError` that names the record if a value is not such a sequence.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("length", length, whole(1), "data.packed(")
    check("look_ahead", look_ahead, whole(1), "data.packed(")
    return Stage(stage_node("packed", _Packing, length=length, look_ahead=look_ahead))


# Stages that pass values on unchanged: some of them, earlier, or in another order.


class _Filtered(Reading[T, T]):
    role = StageRole(calls=("fn",))

    def __init__(self, values: AsyncIterator[T], fn: Callable[[T], Any]) -> None:
        super().__init__(values)
        self._fn = fn

    async def __anext__(self) -> T:
        async for value in self._values:
            with _CHOOSING:
                keeps = self._fn(value)
                if inspect.isawaitable(keeps):
                    keeps = await keeps
                if keeps:
                    return value
        raise StopAsyncIteration


_CHOOSING: Final = Noted("while data.filtered asked its function about a value")


def filtered(fn: Fn | _Lambda, /) -> FilteringStage[Fn]:
    """Keep the values for which a function returns a true value.

    Args:
        fn: a function of one value (of a record, if the stream has records), plain or async. It runs on the event loop,
            for one value at a time.

    Raises:
        OptionsError: `fn` is not a function.
    """
    check("fn", fn, FUNCTION, "data.filtered(")
    return FilteringStage(stage_node("filtered", _Filtered, fn=fn))


class _Prefetched(Reading[T, T]):
    role = StageRole("one_to_one", may_be_absent=True)

    async def __anext__(self) -> T:
        return await anext(self._values)


def prefetched(count: int, /) -> PassThroughStage:
    """Keep up to `count` values ready before the reader asks for them. Without this stage, each step keeps 16.

    Raises:
        OptionsError: `count` is not a whole number of at least 1.
    """
    check("count", count, whole(1), "data.prefetched(")
    return PassThroughStage(stage_node("prefetched", _Prefetched, capacity=count))


class _Shuffled(_Holding[T, T]):
    """Attributes: held: the values to choose from; given: how many values were given, which numbers the random bits."""

    role = StageRole(holds_values=True)

    def __init__(self, values: AsyncIterator[T], buffer: int, seed: int) -> None:
        super().__init__(values)
        self._buffer = buffer
        self._seed = seed
        self.held: list[T] = []
        self.given = 0

    def state(self) -> Any:
        """Return the values to choose from."""
        return {"held": stored(self.held), "given": self.given}

    def restore(self, state: Any) -> None:
        """Go on with values."""
        self.held, self.given = unstored(state["held"]), state["given"]

    async def __anext__(self) -> T:
        held = self.held
        if len(held) < self._buffer:
            async for value in self._values:
                held.append(value)
                if len(held) == self._buffer:
                    break
        if not held:
            raise StopAsyncIteration
        chosen = _chance(self._seed, self.given) % len(held)
        self.given += 1
        held[chosen], held[-1] = held[-1], held[chosen]
        return held.pop()


def _chance(seed: int, count: int) -> int:
    """Return 64 random bits from splitmix64 (Steele, Lea and Flood, 2014), whose state is a counter."""
    word = (seed * 0xD1342543DE82EF95 + (count + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


_WORD = (1 << 64) - 1


def shuffled(buffer: int, /, seed: int) -> PassThroughStage:
    """Shuffle the values of a stream in a buffer: each value is chosen at random among the next `buffer` values.

    This stage is for streams without an index. If the source has an index, `data.order(source, shuffle_seed=)` shuffles
    the whole source, and takes no memory.

    Args:
        buffer: how many values the stage holds, to choose from.
        seed: the seed; the same seed gives the same order.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("buffer", buffer, whole(1), "data.shuffled(")
    check("seed", seed, whole(0), "data.shuffled(")
    return PassThroughStage(stage_node("shuffled", _Shuffled, buffer=buffer, seed=seed))


# Several streams.


class SplitStage(_Applied):
    """The stage that gives the values of a stream to several readers."""

    def __call__(self, stream: AsyncIterator[T]) -> tuple[AsyncIterator[T], ...]:
        """Return the streams."""
        return cast("tuple[AsyncIterator[T], ...]", self._apply(stream))

    __rrshift__ = __call__


def split(count: int, /, *, ahead: int = 16) -> SplitStage:
    """Give all values of a stream to each of several readers: `a, b = stream >> data.split(2)`.

    A reader that has left, or a branch without a reader, does not hold back the other readers.

    Args:
        count: how many readers there are.
        ahead: how many values the slowest reader may be behind the fastest reader. Readers that would need a larger
            distance, such as a node that reads one branch to its end and then the other, fail with a `DataError`.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("count", count, whole(2), "data.split(")
    check("ahead", ahead, whole(1), "data.split(")
    return SplitStage(lambda stream: split_stream(stream, count, ahead))


class _RoundRobin(StageIterator[T]):
    """Attributes: open: the streams that have not ended, the next one first."""

    # No state is kept: at a barrier all streams have given the same number of values, so the first stream is next.
    role = StageRole("in_turns")

    def __init__(self, *streams: AsyncIterator[T]) -> None:
        super().__init__(*streams)
        self.open: deque[AsyncIterator[T]] = deque(self.streams)

    async def __anext__(self) -> T:
        while self.open:
            try:
                value = await anext(self.open[0])
            except StopAsyncIteration:
                self.open.popleft()
            else:
                self.open.rotate(-1)
                return value
        raise StopAsyncIteration


class _AsTheyCome(StageIterator[T]):
    """Attributes: open: the streams that have not ended, each with the task that awaits its next value, or None."""

    role = StageRole("arrival")

    def __init__(self, *streams: AsyncIterator[T]) -> None:
        super().__init__(*streams)
        self.open: dict[AsyncIterator[T], asyncio.Task[T] | None] = dict.fromkeys(self.streams)

    async def __anext__(self) -> T:
        while self.open:
            for stream, task in list(self.open.items()):
                if has_value(stream) if task is None else task.done():
                    del self.open[stream]
                    try:
                        value: T = await anext(stream) if task is None else task.result()  # the value is there already
                    except StopAsyncIteration:
                        continue
                    self.open[stream] = None  # at the end of the dict, so that each stream gets its turn
                    return value
            for stream, task in self.open.items():
                if task is None:
                    self.open[stream] = start_task(asyncio.get_running_loop(), _next(stream), name="penstock-merged")
            if self.open:
                asked = [task for task in self.open.values() if task is not None]
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        asked = [task for task in self.open.values() if task is not None]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await super().aclose()


async def _next(stream: AsyncIterator[T]) -> T:
    return await anext(stream)


class MergedStage(_Applied):
    """The stage that merges several streams into one."""

    def __call__(self, streams: tuple[AsyncIterator[T], ...]) -> AsyncIterator[T]:
        """Return the stream that has the values of all streams."""
        return cast("AsyncIterator[T]", self._apply(streams))

    __rrshift__ = __call__


def merged(how: Literal["round_robin", "arrival"] = "round_robin", /) -> MergedStage:
    """Merge several streams into one: `(a, b) >> data.merged("round_robin")`.

    Args:
        how: "round_robin" takes one value of each stream in turn, always in the same order, and leaves out streams that
            have ended. "arrival" takes the values as they come.

    Raises:
        OptionsError: `how` has another value.
    """
    check("how", how, one_of(Literal["round_robin", "arrival"]), "data.merged(")
    node = stage_node("merged", _RoundRobin if how == "round_robin" else _AsTheyCome)
    return MergedStage(lambda streams: node(*streams))


class _Mixed(StageIterator[T]):
    """Mixes streams.

    Attributes:
        open: the numbers of the streams that have not ended.
        ended: the numbers of the streams that had ended before a restart. A stream may have more epochs since then, so
            each is asked once more.
        given: how many values were given.
        taken: how many values came from each stream.
    """

    role = StageRole("mix")

    def __init__(
        self, *streams: AsyncIterator[T], weights: tuple[float, ...], seed: int, until: str, count: int | None
    ) -> None:
        super().__init__(*streams)
        self._seed = seed
        self._until = until
        self._count = count
        self._weights = weights
        self.open: list[int] = [*range(len(streams))]
        self.ended: list[int] = []
        self._first: dict[int, T] = {}  # first values of streams that gained epochs, by the number of the stream
        self.given = 0
        self.taken = [0] * len(streams)

    def state(self) -> Any:
        """Return how many values were taken from each stream, and which streams have not ended."""
        return {"given": self.given, "taken": list(self.taken), "open": list(self.open)}

    def restore(self, state: Any) -> None:
        """Continue behind the values that were taken from each stream."""
        self.given, self.taken = state["given"], state["taken"]
        self.ended = [number for number in self.open if number not in state["open"]]
        self.open = state["open"]

    async def __anext__(self) -> T:
        if self.ended:
            await self._ask_again()
        while self.open and self.given != self._count:
            number = self._chosen()
            try:
                value = self._first.pop(number) if number in self._first else await anext(self.streams[number])
            except StopAsyncIteration:
                if self._until == "first":
                    break
                self.open.remove(number)
            else:
                self.given += 1
                self.taken[number] += 1
                return value
        raise StopAsyncIteration

    async def _ask_again(self) -> None:
        """Open the streams that had ended, and have more epochs now."""
        asked, self.ended = self.ended, []
        for number in asked:
            with contextlib.suppress(StopAsyncIteration):
                self._first[number] = await anext(self.streams[number])
                self.open.append(number)
        self.open.sort()

    def _chosen(self) -> int:
        """Return the number of the next stream. It depends on the seed, and on how many values were given."""
        point = _chance(self._seed, self.given) / 2**64 * sum(self._weights[number] for number in self.open)
        for number in self.open:
            point -= self._weights[number]
            if point < 0:
                return number
        return self.open[-1]  # the sum was rounded


def mix(
    weighted: Sequence[tuple[AsyncIterator[T], float]],
    /,
    seed: int,
    *,
    until: Literal["first", "all"] = "first",
    count: int | None = None,
) -> AsyncIterator[T]:
    """Mix several streams into one, each with its share: `data.mix([(code, 0.7), (text, 0.3)], seed=1)`.

    The seed decides which stream is next, so the mix is the same every time. A stream cannot begin again. To repeat a
    small source, order it without an end: `data.order(source, epochs=None)`.

    Args:
        weighted: streams, each with a number that is proportional to its share.
        seed: the seed, a whole number.
        until: "first" ends the mix when the stream whose turn it is has ended. "all" continues with the other streams.
        count: the most values that the mix gives; None for no limit.

    Returns:
        A stream.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    streams, weights = [stream for stream, _ in weighted], tuple(weight for _, weight in weighted)
    check("seed", seed, whole(0), "data.mix(")
    check("until", until, one_of(Literal["first", "all"]), "data.mix(")
    check("count", count, optional(whole(0)), "data.mix(")
    for weight in weights:
        check("weight", weight, POSITIVE, "data.mix(")
    mixed = stage_node("mix", _Mixed, weights=weights, seed=seed, until=until, count=count)
    return cast("AsyncIterator[T]", mixed(*streams))
