"""Stages, which read a stream and give another one, as in `stream >> stage`; most become one step of the graph."""

import asyncio
import contextlib
import functools
import inspect
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from .._errors import DataError, add_note
from ..actors.accepted import FUNCTION, POSITIVE, SWITCH, check, one_of, optional, whole
from ..actors.packing import Packer
from ..actors.policy import Policy
from ..actors.stream_buffer import DEFAULT_CAPACITY, Reader, close_stream, plain_error
from ..actors.tasks import start_task
from ..engine.control import map_each
from ..engine.control import split as split_stream
from ..engine.node import Node
from ..engine.tracing.ref import Ref
from .batches import Array, Unlike, collate, joined, part_of, size_of
from .records import Record, Records, Source

T = TypeVar("T")
U = TypeVar("U")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Stage(Generic[In_contra, Out_co]):
    """A function from stream to stream: `stream >> stage` and `stage(stream)` are the same.

    In a graph it becomes one or more steps; anywhere else it reads an async iterator, as plain Python does.
    """

    def __init__(self, apply: Callable[[Any], Any]) -> None:
        self._apply = apply

    def __call__(self, stream: In_contra) -> Out_co:
        """Return the stream that comes of another one."""
        return cast("Out_co", self._apply(stream))

    def __rrshift__(self, stream: In_contra) -> Out_co:
        """Return the stream that comes of another one."""
        return cast("Out_co", self._apply(stream))


class KeepingStage:
    """A stage that passes on the values of a stream as they are: all or some, in this or another order."""

    def __init__(self, apply: Callable[[Any], Any]) -> None:
        self._apply = apply

    def __call__(self, stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """Return the stream that comes of another one."""
        return cast("AsyncIterator[T]", self._apply(stream))

    def __rrshift__(self, stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """Return the stream that comes of another one."""
        return cast("AsyncIterator[T]", self._apply(stream))


def stage_node(
    name: str, kind: type[AsyncIterator[Any]], *, capacity: int | None = None, **settings: Any
) -> Node[..., Any]:
    """Return the node of a stage.

    Args:
        name: how it is drawn and named.
        kind: what reads one stream; an instance for each that is open has the state of the stage.
        capacity: the values that its stream holds.
        **settings: the arguments of the instance, beside the stream.
    """
    return Node(functools.partial(kind, **settings), Policy(capacity=capacity), name=name)


class Reading(AsyncIterator[U], Generic[T, U]):
    """One stream on its way through a stage, with the state of the stage.

    Attributes:
        reads_another: that it has the state of the stage, and not that of what it reads.
        is_one_to_one: whether it gives one value for each.
    """

    reads_another = True
    is_one_to_one = False

    def __init__(self, values: AsyncIterator[T]) -> None:
        self._values = aiter(values)

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> U:
        """Return the next value that the stage gives."""

    def state(self) -> Any:
        """Return what it keeps between two values: nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Take a state that `state` has returned, before the first value."""

    async def aclose(self) -> None:
        """Stop reading."""
        await close_stream(self._values)


def stored(held: Sequence[Any]) -> Any:
    """Return values as a state: of records, columns of numbers, which take less time and room than objects."""
    if not held or any(type(one) is not Record for one in held):
        return list(held)
    records = cast("Sequence[Record[Any]]", held)
    columns = {name: np.array([getattr(one, name) for one in records], np.uint64) for name in _COLUMNS}
    values = None if all(one.value is None for one in records) else [one.value for one in records]
    return {**columns, "values": values}


def unstored(state: Any) -> list[Any]:
    """Return the values of which `stored` has made a state."""
    values: list[Any]
    if not hasattr(state, "keys"):
        values = state
        return values
    columns = [cast("Array", state[name]).tolist() for name in _COLUMNS]
    values = state["values"] or [None] * len(columns[0])
    return [Record(*row) for row in zip(*columns, values, strict=True)]


_COLUMNS = ("epoch", "position", "index", "seed")


# Reading records.


class ReadStage(Generic[U]):
    """The stage that reads the values of records: of each, or of a batch of them at once."""

    def __init__(self, apply: Callable[[Any], Any]) -> None:
        self._apply = apply

    @overload
    def __call__(self, stream: AsyncIterator[Record[Any]]) -> AsyncIterator[Record[U]]: ...
    @overload
    def __call__(self, stream: AsyncIterator[Records[Any]]) -> AsyncIterator[Records[Any]]: ...
    def __call__(self, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Return the records with their values."""
        return cast("AsyncIterator[Any]", self._apply(stream))

    @overload
    def __rrshift__(self, stream: AsyncIterator[Record[Any]]) -> AsyncIterator[Record[U]]: ...
    @overload
    def __rrshift__(self, stream: AsyncIterator[Records[Any]]) -> AsyncIterator[Records[Any]]: ...
    def __rrshift__(self, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Return the records with their values."""
        return cast("AsyncIterator[Any]", self._apply(stream))


class _Read(Reading[Any, Any]):
    """Reads on the event loop: for what is in memory, an item of a `map_each` would cost more than the value."""

    is_one_to_one = True

    def __init__(self, values: AsyncIterator[Any], source: Source[Any]) -> None:
        super().__init__(values)
        self._source = source

    async def __anext__(self) -> Any:
        return _value_of(self._source, await anext(self._values))


def read(source: Source[U], /, *, runs_on: Literal["thread", "loop"] = "thread", concurrency: int = 1) -> ReadStage[U]:
    """Read the value of each record from a source; of `Records`, the batch of their values, `source[records.index]`.

    Args:
        source: the source that `data.order` got; it may be a value of the graph.
        runs_on: "thread", so that the event loop does not wait for files; "loop" for data in memory.
        concurrency: how many records are read at a time. More than one needs a source that several threads may read: a
            dataset that seeks in one open file gives wrong records then.

    Returns:
        A stage that fills in the values of records, in the same order.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("runs_on", runs_on, one_of(Literal["thread", "loop"]), "data.read(")
    check("concurrency", concurrency, whole(1), "data.read(")
    given: Any = source
    is_ref = isinstance(given, Ref)
    if runs_on == "loop":
        if is_ref:
            on_loop: Node[..., Any] = Node(_Read, Policy(), name="read")
            return ReadStage(lambda records: on_loop(records, given))
        return ReadStage(stage_node("read", _Read, source=source))
    policy = Policy(runs_on=runs_on, concurrency=concurrency)
    if is_ref:
        in_thread: Node[..., Any] = Node(_value_of, policy, name="read")
        return _mapped(lambda record: in_thread(given, record))
    return _mapped(Node(functools.partial(_value_of, source), policy, name="read"))


def _mapped(body: Callable[[Any], Any]) -> ReadStage[Any]:
    return ReadStage(lambda records: map_each(body, records, name="read"))  # pyright: ignore[reportUnknownLambdaType]


def _value_of(source: Source[Any], record: "Record[Any] | Records[Any]") -> "Record[Any] | Records[Any]":
    try:
        index: Any = record.index  # of `Records`, an array, for a source that takes it
        return record.with_value(source[index])
    except Exception as error:
        if isinstance(record, Records):
            what = f"the {len(record)} records at positions {record.position.tolist()}"
            add_note(error, f"while data.read read {what}; order(batch=) is for a source that takes arrays of indexes")
        else:
            place = f"position {record.position} of epoch {record.epoch}, index {record.index} of {len(source):,}"
            add_note(error, f"while data.read read the record at {place}")
        raise


# Batches.


class _Batched(Reading[Any, Any]):
    """Attributes: held: the values of the batch that is being made, or records of them."""

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
    except Exception as error:  # noqa: BLE001 - user code; it is raised again
        first, last = _place_of(held[0], 0), _place_of(held[-1], len(held) - 1)
        add_note(error, f"while data.batched collated {first} to {last}")
        raise plain_error(error, "collate=")  # noqa: B904 - it is the error, or has it as its cause


def values_of(held: list[Any]) -> list[Any]:
    """Return the values of records; of what are none, these themselves."""
    return [cast("Record[Any]", one).value if type(one) is Record else one for one in held]  # type: ignore[redundant-cast]


def _place_of(value: Any, item: int) -> str:
    if type(value) is Record:
        return f"the record at position {value.position} of epoch {value.epoch} (index {value.index})"
    return f"value {item} of the batch"


@overload
def batched(size: int, /, *, drop_remainder: bool = ...) -> Stage[AsyncIterator[Any], AsyncIterator[Any]]: ...
@overload
def batched(
    size: int, /, *, drop_remainder: bool = ..., collate: Callable[[list[T]], U]
) -> Stage[AsyncIterator[T | Record[T]], AsyncIterator[U]]: ...
def batched(
    size: int, /, *, drop_remainder: bool = False, collate: Callable[[list[Any]], Any] = collate
) -> Stage[AsyncIterator[Any], AsyncIterator[Any]]:
    """Make batches of values; if the stream has records, of the values of the records.

    Args:
        size: how many values a batch has.
        drop_remainder: leave out the last batch if it is smaller.
        collate: makes a batch of a list of values, on the event loop; by default `data.collate`.

    Returns:
        A stage. Its stream raises what `collate` raises; by default a `DataError` that names the record and the leaf
        where values are not alike.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("size", size, whole(1), "data.batched(")
    check("drop_remainder", drop_remainder, SWITCH, "data.batched(")
    check("collate", collate, FUNCTION, "data.batched(")
    return Stage(stage_node("batched", _Batched, size=size, drop_remainder=drop_remainder, collate=collate))


class _Unbatched(Reading[Any, Any]):
    """Attributes: batch: the present one; next: which of its values is next."""

    def __init__(self, values: AsyncIterator[Any]) -> None:
        super().__init__(values)
        self.batch: Any = None
        self._size = 0
        self.next = 0

    def state(self) -> Any:
        """Return the present batch, if there are values left of it."""
        return None if self.next == self._size else {"batch": self.batch, "next": self.next}

    def restore(self, state: Any) -> None:
        """Go on with a batch."""
        if state is not None:
            self.batch, self.next = state["batch"], state["next"]
            self._size = size_of(self.batch)

    async def __anext__(self) -> Any:
        while self.next == self._size:
            self.batch = await anext(self._values)
            self._size, self.next = size_of(self.batch), 0
        self.next += 1
        return part_of(self.batch, self.next - 1)


def unbatched() -> Stage[AsyncIterator[Any], AsyncIterator[Any]]:
    """Yield the values of batches one by one; arrays are views of rows of the batch, not copies."""
    return Stage(stage_node("unbatched", _Unbatched))


class _Rebatched(Reading[Any, Any]):
    """Attributes: held: batches whose values have not been given on; count: how many values they have."""

    def __init__(self, values: AsyncIterator[Any], size: int, drop_remainder: bool) -> None:
        super().__init__(values)
        self._size = size
        self._drop_remainder = drop_remainder
        self.held: deque[Any] = deque()
        self.count = 0

    def state(self) -> Any:
        """Return the batches whose values have not been given on."""
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
            self.count += size_of(batch)
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


def rebatched(size: int, /, *, drop_remainder: bool = False) -> KeepingStage:
    """Make batches of one size from batches of any size.

    Args:
        size: how many values a batch has.
        drop_remainder: leave out the last batch if it is smaller.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("size", size, whole(1), "data.rebatched(")
    check("drop_remainder", drop_remainder, SWITCH, "data.rebatched(")
    return KeepingStage(stage_node("rebatched", _Rebatched, size=size, drop_remainder=drop_remainder))


# Rows of one length, made of sequences of many.


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
    """What packs one stream.

    Attributes:
        packer: the rows that wait for more.
        done: those that do not.
        rest: what is left of the sequence that is being put into rows.
        dtype: the type of all tokens.
    """

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
        """Return the rows that wait, those that are done, and what is left of a sequence."""
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
    cut into pieces, each of which is a sequence of its own; an empty one is left out.

    Args:
        length: how many tokens a row has.
        look_ahead: how many rows wait for sequences that still fit; more rows leave less padding and take more memory.

    Returns:
        A stage. Its stream raises a `DataError` that names the record if a value is no such sequence.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("length", length, whole(1), "data.packed(")
    check("look_ahead", look_ahead, whole(1), "data.packed(")
    return Stage(stage_node("packed", _Packing, length=length, look_ahead=look_ahead))


# The same values: some of them, sooner, or in another order.


class _Filtered(Reading[T, T]):
    def __init__(self, values: AsyncIterator[T], fn: Callable[[T], Any]) -> None:
        super().__init__(values)
        self._fn = fn

    async def __anext__(self) -> T:
        async for value in self._values:
            keeps = self._fn(value)
            if inspect.isawaitable(keeps):
                keeps = await keeps
            if keeps:
                return value
        raise StopAsyncIteration


def filtered(fn: Callable[[T], Any], /) -> Stage[AsyncIterator[T], AsyncIterator[T]]:
    """Keep the values for which a function returns a true value.

    Args:
        fn: a function of one value (of a record, if the stream has records), plain or async. It runs on the event loop,
            for one value at a time.

    Raises:
        OptionsError: `fn` is not a function.
    """
    check("fn", fn, FUNCTION, "data.filtered(")
    return Stage(stage_node("filtered", _Filtered, fn=fn))


class _Prefetched(Reading[T, T]):
    is_one_to_one = True

    async def __anext__(self) -> T:
        return await anext(self._values)


def prefetched(count: int, /) -> KeepingStage:
    """Keep up to `count` values ready before the reader asks for them; without it, each step of a stream keeps 16.

    Raises:
        OptionsError: `count` is not a whole number of at least 1.
    """
    check("count", count, whole(1), "data.prefetched(")
    return KeepingStage(stage_node("prefetched", _Prefetched, capacity=count))


class _Shuffled(Reading[T, T]):
    """Attributes: held: the values to choose from; given: how many were given, which is the counter of chance."""

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
    """Return 64 random bits: those of splitmix64 (Steele, Lea and Flood, 2014), which has a counter for a state."""
    word = (seed * 0xD1342543DE82EF95 + (count + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


_WORD = (1 << 64) - 1


def shuffled(buffer: int, /, seed: int) -> KeepingStage:
    """Shuffle the values of a stream in a buffer: each value is chosen at random among the next `buffer` ones.

    For streams without an index. With an index, `data.order(source, shuffle_seed=)` shuffles the whole source, and
    takes no memory.

    Args:
        buffer: how many values the stage holds, to choose from.
        seed: the seed; the same seed gives the same order.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("buffer", buffer, whole(1), "data.shuffled(")
    check("seed", seed, whole(0), "data.shuffled(")
    return KeepingStage(stage_node("shuffled", _Shuffled, buffer=buffer, seed=seed))


# Several streams.


class SplitStage:
    """The stage that gives the values of a stream to several readers."""

    def __init__(self, count: int, ahead: int) -> None:
        self._count = count
        self._ahead = ahead

    def __call__(self, stream: AsyncIterator[T]) -> tuple[AsyncIterator[T], ...]:
        """Return the streams."""
        return split_stream(stream, self._count, self._ahead)

    def __rrshift__(self, stream: AsyncIterator[T]) -> tuple[AsyncIterator[T], ...]:
        """Return the streams."""
        return split_stream(stream, self._count, self._ahead)


def split(count: int, /, *, ahead: int = DEFAULT_CAPACITY) -> SplitStage:
    """Give the values of a stream to several readers, each of which gets all of them: `a, b = stream >> data.split(2)`.

    A reader that has left, or a branch without a reader, does not hold back the others.

    Args:
        count: how many readers there are.
        ahead: how many values the slowest reader may be behind the fastest. Readers that wait for each other further
            apart, such as a node that reads one branch to its end and then the other, fail with a `DataError`.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    check("count", count, whole(2), "data.split(")
    check("ahead", ahead, whole(1), "data.split(")
    return SplitStage(count, ahead)


class _InTurns(AsyncIterator[T]):
    """Attributes: open: the streams that have not ended, the next one first."""

    takes_turns = True

    def __init__(self, *streams: AsyncIterator[T]) -> None:
        self.open = deque(map(aiter, streams))

    def state(self) -> None:
        """Return nothing: where all streams have given as many values, it is the turn of the first."""

    def restore(self, state: None) -> None:
        """Do nothing."""

    def __aiter__(self) -> Self:
        return self

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

    async def aclose(self) -> None:
        for stream in self.open:
            await close_stream(stream)


class _AsTheyCome(AsyncIterator[T]):
    """Attributes: open: the streams that have not ended, each with the task that waits for its next value, if any."""

    def __init__(self, *streams: AsyncIterator[T]) -> None:
        self.open: dict[AsyncIterator[T], asyncio.Task[T] | None] = dict.fromkeys(map(aiter, streams))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while self.open:
            for stream, task in list(self.open.items()):
                if task is None and isinstance(stream, Reader) and stream.buffer.held:
                    del self.open[stream]
                    self.open[stream] = None  # behind the others, so that none is forgotten
                    held: T = stream.buffer.take()
                    return held
                if task is not None and task.done():
                    del self.open[stream]
                    try:
                        value = task.result()
                    except _Ended:
                        continue
                    self.open[stream] = None
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
        if asked:
            await asyncio.wait(asked)
        for task in asked:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it
        for stream in self.open:
            await close_stream(stream)


class _Ended(Exception):
    """A stream has ended."""


async def _next(stream: AsyncIterator[T]) -> T:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise _Ended from None


class MergedStage:
    """The stage that makes one stream of several."""

    def __init__(self, node: Node[..., Any]) -> None:
        self._node = node

    def __call__(self, streams: tuple[AsyncIterator[T], ...]) -> AsyncIterator[T]:
        """Return the stream that has the values of all."""
        return cast("AsyncIterator[T]", self._node(*streams))

    def __rrshift__(self, streams: tuple[AsyncIterator[T], ...]) -> AsyncIterator[T]:
        """Return the stream that has the values of all."""
        return cast("AsyncIterator[T]", self._node(*streams))


def merged(how: Literal["turns", "arrival"] = "turns", /) -> MergedStage:
    """Make one stream of several: `(a, b) >> data.merged("turns")`.

    Args:
        how: "turns" takes one value of each stream in turn, always in the same order, and leaves out streams that have
            ended. "arrival" takes the values as they come.

    Raises:
        OptionsError: `how` is neither.
    """
    check("how", how, one_of(Literal["turns", "arrival"]), "data.merged(")
    return MergedStage(Node(_InTurns if how == "turns" else _AsTheyCome, Policy(), name="merged"))


class _Mixed(AsyncIterator[T]):
    """What mixes streams.

    Attributes:
        open: the streams that have not ended, each with its weight and number.
        ended: those that had ended before a restart. They may have more epochs since, so each is asked once more.
        given: how many values were given.
        taken: how many of them were those of each stream.
        mixes: that it is the source, for checkpoints: what it reads goes on by the number of values taken.
        reads_another: that its state is not that of the streams.
    """

    mixes = reads_another = True

    def __init__(
        self, *streams: AsyncIterator[T], weights: tuple[float, ...], seed: int, until: str, count: int | None
    ) -> None:
        self._seed = seed
        self._until = until
        self._count = count
        self.open = list(zip(map(aiter, streams), weights, range(len(streams)), strict=True))
        self.ended: list[tuple[AsyncIterator[T], float, int]] = []
        self._first: dict[int, T] = {}  # what those of them that have not ended any more have given, by their numbers
        self.given = 0
        self.taken = [0] * len(streams)

    def state(self) -> Any:
        """Return how many values were taken from each stream, and which streams have not ended."""
        return {"given": self.given, "taken": list(self.taken), "open": [number for _, _, number in self.open]}

    def restore(self, state: Any) -> None:
        """Go on from so many values; those of each stream begin behind them."""
        self.given, self.taken = state["given"], state["taken"]
        self.ended = [one for one in self.open if one[2] not in state["open"]]
        self.open = [one for one in self.open if one[2] in state["open"]]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self.ended:
            await self._ask_again()
        while self.open and self.given != self._count:
            place = self._chosen()
            stream, _, number = self.open[place]
            try:
                value = self._first.pop(number) if number in self._first else await anext(stream)
            except StopAsyncIteration:
                if self._until == "first":
                    break
                del self.open[place]
            else:
                self.given += 1
                self.taken[number] += 1
                return value
        raise StopAsyncIteration

    async def _ask_again(self) -> None:
        """Open those that had ended, and have not any more."""
        asked, self.ended = self.ended, []
        for one in asked:
            with contextlib.suppress(StopAsyncIteration):
                self._first[one[2]] = await anext(one[0])
                self.open.append(one)
        self.open.sort(key=lambda one: one[2])

    def _chosen(self) -> int:
        """Return which stream is next: that depends on the seed, and on how many values were given."""
        point = _chance(self._seed, self.given) / 2**64 * sum(weight for _, weight, _ in self.open)
        for place, (_, weight, _) in enumerate(self.open):
            point -= weight
            if point < 0:
                return place
        return len(self.open) - 1  # the sum was rounded

    async def aclose(self) -> None:
        for stream, _, _ in (*self.open, *self.ended):
            await close_stream(stream)


def mix(
    weighted: Sequence[tuple[AsyncIterator[T], float]],
    /,
    seed: int,
    *,
    until: Literal["first", "all"] = "first",
    count: int | None = None,
) -> AsyncIterator[T]:
    """Make one stream of several, each with its share: `data.mix([(code, 0.7), (text, 0.3)], seed=1)`.

    The seed decides which stream is next, so the mix is the same every time. A stream cannot begin again; to repeat a
    source that is too small, give it no end: `data.order(source, epochs=None)`.

    Args:
        weighted: streams, each with a number that is proportional to its share.
        seed: the seed, a whole number.
        until: "first" ends the mix when the stream whose turn it is has ended. "all" goes on with the other streams.
        count: the most values that the mix gives; None for no such limit.

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
    kind = functools.partial(_Mixed, weights=weights, seed=seed, until=until, count=count)
    return cast("AsyncIterator[T]", Node(kind, Policy(), name="mix")(*streams))
