"""Order: the records of a source in a known order, for each epoch and process; records and their random bits."""

import hashlib
import os
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from .. import Ref
from .._errors import CheckpointError, DataError, Noted, OptionsError, PlanError
from .._machine import read_slurm
from ..actors.accepted import SWITCH, OptionRule, check, is_whole, optional, whole
from ..extension import StageIterator, StageRole, ThreadIterator, has_state, is_stream, stage_node
from ..telemetry import logs

T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)

Shard: TypeAlias = "str | tuple[int, int]"
_Words: TypeAlias = npt.NDArray[np.uint64]

# How many positions are permuted at a time. One position costs 100 µs in NumPy's calls, 1024 positions cost 300 µs, or
# 0.3 µs each. Batches permute more at a time: each position costs less, and the event loop has fewer steps to run.
_BLOCK, _BLOCK_OF_BATCHES = 1024, 4096
# A Feistel network of four rounds is a pseudo-random permutation of a large domain (Luby and Rackoff, 1988). A small
# domain needs more: with 12, the 24 orders of four records are equally frequent, as far as 100,000 keys can tell.
_ROUNDS = 12

# An order whose numbers have at most so many bits keeps the permutation of all numbers: 32 KB.
_TABLE_BITS = 12


class Source(Protocol[T_co]):
    """Data with a length and a record for each index: a list, an array, a dataset of PyTorch or Hugging Face."""

    def __len__(self) -> int:
        """Return how many records there are."""
        ...

    def __getitem__(self, index: int, /) -> T_co:
        """Return the record of an index."""
        ...


@dataclass(slots=True, eq=False)
class Record(Generic[T_co]):
    """One place in the order of a source, and, once the record was read, the value at that place.

    Attributes:
        epoch: the pass over the source, from 0.
        position: the place in the order of this epoch, from 0, counted over all shards.
        index: the index of the record in the source.
        seed: 64 random bits. They depend on the shuffle seed, the epoch and the index alone, not on shards or batches.
        value: the value; None until it is read.
    """

    epoch: int
    position: int
    index: int
    seed: int
    value: T_co

    def with_value(self, value: U) -> "Record[U]":
        """Return a record with another value, at the same place and with the same random bits."""
        return Record(self.epoch, self.position, self.index, self.seed, value)

    def rng(self) -> np.random.Generator:
        """Return a new generator of random numbers. Every generator of this record gives the same numbers."""
        return np.random.Generator(np.random.Philox(key=self.seed))

    @property
    def key(self) -> npt.NDArray[np.uint32]:
        """The raw key for JAX, uint32[2]: `jax.random.wrap_key_data(record.key, impl="threefry2x32")`."""
        return np.array((self.seed >> 32, self.seed & 0xFFFFFFFF), np.uint32)


@dataclass(slots=True, eq=False)
class Records(Generic[T_co]):
    """Several places in the order of a source, and, once the records were read, a batch of the values at these places.

    Attributes:
        epoch: the epoch of each record, int64 [records]; see `Record` for this field and the next ones.
        position: the position of each record, int64 [records].
        index: the index of each record, int64 [records].
        seed: the random bits of each record, uint64 [records].
        value: the batch that the source returned for `index`; None until it is read.
    """

    epoch: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    seed: _Words
    value: T_co

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.index)

    def with_value(self, value: U) -> "Records[U]":
        """Return records with another batch, at the same places and with the same random bits."""
        return Records(self.epoch, self.position, self.index, self.seed, value)

    @property
    def key(self) -> npt.NDArray[np.uint32]:
        """The raw keys for JAX, uint32 [records, 2]."""
        return self.seed.astype(">u8").view(">u4").astype(np.uint32).reshape(-1, 2)


class Permutation:
    """A random order of the numbers below `length` that takes no memory: the index at each position is computed.

    A Feistel network permutes all numbers of some bits. A number that is not below `length` goes through the network
    again until it is. The network uses only integer arithmetic modulo 2^64, so it is the same on every machine.

    Args:
        length: how many numbers there are; at least 1.
        key: a text that tells one order from another, such as seed and epoch.
    """

    def __init__(self, length: int, key: str) -> None:
        bits = max(2, (length - 1).bit_length())
        self._length = length
        self._right_bits = np.uint64(bits // 2)
        self._right_mask = np.uint64((1 << bits // 2) - 1)
        self._left_shift, self._right_shift = np.uint64(64 - (bits - bits // 2)), np.uint64(64 - bits // 2)
        digest = hashlib.shake_256(f"penstock order {key}".encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)
        # Few numbers are permuted all at once: a number outside is then looked up instead of computed again and again.
        self._table = self._encrypted(np.arange(1 << bits, dtype=np.uint64)) if bits <= _TABLE_BITS else None

    def indexes(self, positions: _Words) -> _Words:
        """Return the numbers at these positions."""
        found = self._permuted(positions)
        outside = np.flatnonzero(found >= self._length)
        while outside.size:
            again = self._permuted(found[outside])
            found[outside] = again
            outside = outside[again >= self._length]
        return found

    def _permuted(self, numbers: _Words) -> _Words:
        return self._encrypted(numbers) if self._table is None else self._table[numbers]

    def _encrypted(self, numbers: _Words) -> _Words:
        left, right = numbers >> self._right_bits, numbers & self._right_mask
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            left ^= _scrambled(right + even) >> self._left_shift
            right ^= _scrambled(left + odd) >> self._right_shift
        return left << self._right_bits | right


def _scrambled(words: _Words) -> _Words:
    """Change words in place so that their high bits depend on all bits (multipliers of splitmix64)."""
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0x94D049BB133111EB)
    return words


def _seeds(indexes: _Words, key: str) -> _Words:
    """Return 64 random bits for each index. Different indexes get different bits, because each step can be undone."""
    offset = int.from_bytes(hashlib.sha256(f"penstock records {key}".encode()).digest()[:8], "little")
    words = _scrambled((indexes + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(offset))
    words ^= words >> np.uint64(31)
    return words


class Order(StageIterator[Record[None]]):
    """The records of a source in their order, for one open stream.

    Args:
        source: an object with a length.
        shuffle_seed, epochs, shard, drop_remainder, pad: see `order`.

    Attributes:
        epoch: the epoch of the next record.
        step: how many records of this epoch came before it, in this shard.
    """

    role = StageRole("order")
    _block_size = _BLOCK

    def __new__(cls, source: Any, *settings: Any) -> Any:
        """Return an order, or an `UnindexedOrder` if an argument of the graph turns out to have no index."""
        if _has_no_index(source):
            _refuse_order(source, *settings)
            return UnindexedOrder(source, *settings[1:3])
        return super().__new__(cls)

    def __init__(  # pyright: ignore[reportInconsistentConstructor] - its `__new__` may give something else
        self, source: Any, shuffle_seed: int | None, epochs: int | None, shard: Shard, drop_remainder: bool, pad: bool
    ) -> None:
        check("shuffle_seed", shuffle_seed, optional(whole(0)), "data.order(")
        check("epochs", epochs, optional(whole(1)), "data.order(")
        check("shard", shard, _SHARD, "data.order(")
        check("drop_remainder", drop_remainder, SWITCH, "data.order(")
        check("pad", pad, SWITCH, "data.order(")
        if drop_remainder and pad:
            raise OptionsError(
                "data.order(drop_remainder=True, pad=True): either leave records out, or repeat some; pass one of the "
                "two"
            )
        super().__init__()
        self._source = source.value if isinstance(source, _SourceCell) else source
        self._length = _length_of(self._source)
        self._seed = shuffle_seed
        self._epochs = epochs
        number, count = _shard_of(shard)
        self._settings = {"shard": [number, count], "drop_remainder": drop_remainder, "pad": pad}
        end = self._length
        if drop_remainder:
            end -= end % count
        elif pad:
            end += -end % count
        self._places = range(number, end, count)  # the positions of an epoch that this shard has
        self._permutation: Permutation | None = None  # of this epoch
        self._block: list[tuple[int, int, int]] = []  # position, index and seed of the next records, the last one first
        self.epoch = 0
        self.step = 0

    def state(self) -> dict[str, int]:
        """Return the place of the next record."""
        return {"epoch": self.epoch, "step": self.step}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a place. A late place takes no longer, because the index at each position is computed."""
        self.epoch, self.step = state["epoch"], state["step"]
        self._block, self._permutation = [], None

    def __length_hint__(self) -> Any:
        """Return how many records are left."""
        return NotImplemented if self._epochs is None else (self._epochs - self.epoch) * len(self._places) - self.step

    def after(self, count: int, epochs: int | None) -> dict[str, int]:
        """Return the place behind `count` records of an order that had `epochs` epochs."""
        epoch, step = divmod(count, len(self._places)) if self._places else (0, 0)
        return {"epoch": epoch, "step": step}

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return {"length": self._length, "seed": self._seed, "epochs": self._epochs, **self._settings}

    async def __anext__(self) -> Record[None]:
        """Return the next record."""
        if not self._block:
            columns = (column.tolist() for column in self._next_places())
            self._block = list(zip(*columns, strict=True))[::-1]
        position, index, seed = self._block.pop()
        self.step += 1
        return Record(self.epoch, position, index, seed, None)

    def _next_places(self) -> tuple[_Words, _Words, _Words]:
        """Return positions, indexes and seeds of the next records, in this epoch or a later one.

        Raises:
            StopAsyncIteration: there are no more records.
        """
        if not self._places or self.epoch == self._epochs:
            raise StopAsyncIteration
        if self.step == len(self._places):
            self.epoch, self.step, self._permutation = self.epoch + 1, 0, None
            if self.epoch == self._epochs:
                raise StopAsyncIteration
            if _length_of(self._source) != self._length:
                raise DataError(
                    f"data.order: its source had {self._length:,} records when it began, and has "
                    f"{_length_of(self._source):,} at the beginning of epoch {self.epoch}; a source must not change"
                )
        places = self._places[self.step : self.step + self._block_size]
        positions = np.arange(places.start, places.stop, places.step, dtype=np.uint64)
        indexes = positions % np.uint64(self._length)  # `pad` fills up a shard with records from the beginning
        if self._seed is not None:
            if self._permutation is None:
                self._permutation = Permutation(self._length, f"{self._seed} {self.epoch}")
            indexes = self._permutation.indexes(indexes)
        return positions, indexes, _seeds(indexes, f"{self._seed or 0} {self.epoch}")


class OrderOfBatches(Order):
    """The same order in batches. A batch may have records of two epochs.

    Args:
        batch: how many records a batch has.
    """

    role = StageRole("order", may_change=("batch",))
    _block_size = _BLOCK_OF_BATCHES

    def __init__(self, source: Any, *settings: Any) -> None:
        *settings_of_order, batch = settings
        check("batch", batch, whole(1), "data.order(")
        super().__init__(source, *settings_of_order)
        self._size: int = batch
        self._places_left: tuple[_Words, ...] = ()  # the next places of this epoch that are computed already

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a place."""
        super().restore(state)
        self._places_left = ()

    def __length_hint__(self) -> Any:
        """Return how many batches are left."""
        if self._epochs is None:
            return NotImplemented
        records, size = super().__length_hint__(), self._size
        return records // size if self._settings["drop_remainder"] else -(-records // size)

    def after(self, count: int, epochs: int | None) -> dict[str, int]:
        """Return the place behind `count` batches of an order that had `epochs` epochs.

        Raises:
            CheckpointError: the last batch had fewer records, and there are more epochs now.
        """
        records = count * self._size
        if epochs is not None and records > (end := epochs * len(self._places)):
            if epochs != self._epochs:
                raise CheckpointError(
                    f"data.order(batch={self._size}, epochs={self._epochs}): with epochs={epochs} its last batch had "
                    f"{records - end} records less, so a mix cannot count by batches where to go on; keep "
                    f"epochs={epochs}, or begin anew, with drop_remainder=True if epochs should grow later"
                )
            records = end
        return super().after(records, epochs)

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return {**super().fingerprint(), "batch": self._size}

    async def __anext__(self) -> Any:
        """Return the next batch of records."""
        parts: list[tuple[Any, ...]] = []
        missing = self._size
        while missing:
            if not self._places_left:
                try:
                    self._places_left = self._next_places()
                except StopAsyncIteration:
                    if not parts or self._settings["drop_remainder"]:
                        raise
                    break
            left = self._places_left
            taken = min(missing, len(left[0]))
            parts.append((np.full(taken, self.epoch), *[column[:taken] for column in left]))
            self._places_left = tuple(column[taken:] for column in left) if taken < len(left[0]) else ()
            self.step += taken
            missing -= taken
        columns = parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))
        epochs, positions, indexes, seeds = columns
        return Records(epochs, positions.astype(np.int64), indexes.astype(np.int64), seeds, None)


class UnindexedOrder(StageIterator[Record[Any]]):
    """The records of a source without an index, such as a queue or a file, in the order in which they come.

    Args:
        values: an iterator, plain or async, or a function that returns an iterator for each epoch.
        epochs, shard: see `order`.

    Attributes:
        epoch: the epoch of the next record.
        position: how many records of this epoch came so far, including records of other shards.
    """

    role = StageRole("records")

    def __init__(self, values: Any, epochs: int | None, shard: Shard) -> None:
        check("epochs", epochs, optional(whole(1)), "data.order(")
        check("shard", shard, _SHARD, "data.order(")
        if isinstance(values, _SourceCell):
            values = values.take()
        self._given = values  # the iterator that is asked for its state
        self._restored: Any = None  # the state for the iterator that the function will return for this epoch
        self._begin: Callable[[], Any] | None = None if _is_iterator(values) else values
        super().__init__(*([] if self._begin else [_async_iterator(values)]))  # a function's iterator is opened later
        self._epochs = epochs
        self._shard, self._shards = _shard_of(shard)
        self.epoch = 0
        self.position = 0

    def state(self) -> dict[str, Any]:
        """Return the place of the next record, and the state of the iterator of the values.

        Raises:
            PlanError: the iterator has no state.
        """
        if not self.streams and self.epoch != self._epochs:
            self._open()
        # After the last epoch, no iterator of a function is open. A stream of the graph has its own state.
        has_none = not self.streams or is_stream(self._given)
        values = None if has_none else self._stateful().state()
        return {"epoch": self.epoch, "position": self.position, "values": values}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a place."""
        self.epoch, self.position = state["epoch"], state["position"]
        if self._begin is not None:
            self._restored, self.streams = state["values"], []
        elif not is_stream(self._given):
            self._stateful().restore(state["values"])

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return {"epochs": self._epochs, "shard": [self._shard, self._shards]}

    def _stateful(self) -> Any:
        if not has_state(self._given):
            raise PlanError(
                f"data.order cannot tell where this {type(self._given).__name__} is, and checkpoint= would begin "
                "with its first value again: give it methods state() and restore(state), or pass a source with a "
                "length and an index"
            )
        return self._given

    def _open(self) -> None:
        """Open the iterator of an epoch, and restore its state if there is one."""
        assert self._begin is not None
        with Noted(f"while data.order opened its source for epoch {self.epoch}"):
            self._given = self._begin()
            if self._restored is not None:
                self._stateful().restore(self._restored)
                self._restored = None
            self.streams = [_async_iterator(self._given)]

    async def __anext__(self) -> Record[Any]:
        """Return the next record."""
        while self.epoch != self._epochs:
            if not self.streams:
                self._open()
            async for value in self.streams[0]:
                epoch, position = self.epoch, self.position
                self.position += 1
                if position % self._shards == self._shard:
                    [seed] = _seeds(np.array([position], np.uint64), f"0 {epoch}").tolist()
                    return Record(epoch, position, position, seed, value)
            if not self.position:  # an empty epoch: beginning again would never end
                break
            await self.aclose()
            self.epoch, self.position, self.streams = self.epoch + 1, 0, []
        raise StopAsyncIteration


def _async_iterator(values: Any) -> AsyncIterator[Any]:
    if isinstance(values, AsyncIterable):
        return aiter(cast("AsyncIterable[Any]", values))  # type: ignore[redundant-cast]
    return ThreadIterator(iter(values), "penstock-order")


def _is_iterator(source: object) -> bool:
    return isinstance(source, AsyncIterable | Iterator)


def _has_no_index(source: object) -> bool:
    return _is_iterator(source) or (callable(source) and not hasattr(source, "__getitem__"))


def _refuse_order(source: object, *settings: Any) -> None:
    """Refuse options that need a source with an index."""
    shuffle_seed, epochs, _, drop_remainder, pad, *batch = settings
    if any(one is not None for one in batch):
        raise OptionsError(
            "data.order(batch=): a source without an index gives its values one by one; write `>> data.batched(size)`"
        )
    if shuffle_seed is not None or drop_remainder or pad:
        raise OptionsError(
            "data.order: a source without an index has an unknown length, and its own order; use "
            "`>> data.shuffled(buffer, seed)` to shuffle its values"
        )
    if epochs != 1 and _is_iterator(source):
        raise OptionsError(
            f"data.order(epochs={epochs}): an iterator cannot begin again; pass a function that returns a new one for "
            "each epoch, such as a generator function"
        )


class _SourceCell:
    """Holds a source that is written in a graph. Otherwise a list would be copied for each call.

    An iterator in it can be read only once.
    """

    def __init__(self, value: object) -> None:
        self.value = value
        self._is_taken = False

    def take(self) -> Any:
        """Return a source without an index, for one stream.

        Raises:
            DataError: the source is an iterator that another stream reads.
        """
        if self._is_taken and _is_iterator(self.value):
            raise DataError(
                "data.order: the iterator that is written in this graph was read by another call; make it an argument "
                "of the graph, or pass a function that returns a new one"
            )
        self._is_taken = True
        return self.value


_ORDER, _BATCHES, _NUMBERED = (stage_node("order", kind) for kind in (Order, OrderOfBatches, UnindexedOrder))


class _OrderOptions(TypedDict, total=False):
    shuffle_seed: int | None
    epochs: int | None
    shard: Shard
    drop_remainder: bool
    pad: bool


@overload
def order(source: AsyncIterable[T] | Iterator[T], /, *, shard: Shard = ...) -> AsyncIterator[Record[T]]: ...
@overload
def order(
    source: Callable[[], AsyncIterable[T] | Iterable[T]], /, *, epochs: int | None = ..., shard: Shard = ...
) -> AsyncIterator[Record[T]]: ...
@overload
def order(source: Source[Any], /, **options: Unpack[_OrderOptions]) -> AsyncIterator[Record[None]]: ...
@overload
def order(source: Source[Any], /, *, batch: int, **options: Unpack[_OrderOptions]) -> AsyncIterator[Records[None]]: ...
def order(
    source: Any,
    /,
    *,
    batch: int | None = None,
    shuffle_seed: int | None = None,
    epochs: int | None = 1,
    shard: Shard = "process",
    drop_remainder: bool = False,
    pad: bool = False,
) -> AsyncIterator[Any]:
    """Return the records of a source in a known order, as a stream; `data.read(source)` reads their values.

    In a graph, each argument may be a value of the graph. Outside of a graph, pass the stream to a graph.

    Args:
        source: an object with `__len__` and `__getitem__`. Or a source without an index: an iterator, plain (it runs in
            a thread) or async, or a function that returns a new iterator for each epoch. The values of such a source
            come in their own order, and cannot be shuffled.
        shuffle_seed: a whole number. The records of each epoch come in another random order, which is the same on every
            machine and takes no memory. None: the records come in the order of the source.
        epochs: how often each record comes; None for no end.
        shard: the part of each epoch, as (number, count), counted from 0. "process" is the part of this process, as
            `jax.distributed` numbers processes, or all records if `jax.distributed` is not initialized. No two shards
            have a record in common, and together they have all records; their lengths differ by one at most.
        batch: return so many records as one `Records`, for data in memory. `data.read` asks the source for all of these
            records at once, `source[array of indexes]`, as NumPy's arrays take it. A batch may have records of two
            epochs.
        drop_remainder: leave out the last records of an epoch if they are too few for all shards; with `batch`, also
            leave out a smaller batch at the very end.
        pad: repeat first records of an epoch in the shards that have one record less.

    Returns:
        A stream of records, or of `Records`, without values. If the source has no index, the records have values.

    Raises:
        OptionsError: an argument does not accept its value.
        DataError: in a SLURM job of several tasks, `jax.distributed` is not initialized, so shard="process" cannot tell
            the part of this task; or the length of the source has changed when an epoch begins.
    """
    is_ref = isinstance(source, Ref)
    if is_stream(source) if is_ref else _has_no_index(source):
        _refuse_order(source, shuffle_seed, epochs, shard, drop_remainder, pad, batch)
        return cast("AsyncIterator[Any]", _NUMBERED(source if is_ref else _SourceCell(source), epochs, shard))
    if not is_ref:
        _length_of(source)
        source = _SourceCell(source)
    node, last = (_ORDER, ()) if batch is None else (_BATCHES, (batch,))
    return cast("AsyncIterator[Any]", node(source, shuffle_seed, epochs, shard, drop_remainder, pad, *last))


def _is_shard(value: Any) -> bool:
    if value == "process":
        return True
    if not isinstance(value, tuple) or len(cast("tuple[Any, ...]", value)) != 2:  # type: ignore[redundant-cast]
        return False
    number, count = cast("tuple[Any, Any]", value)
    return is_whole(number, 0) and is_whole(count, 1) and number < count


_SHARD = OptionRule('"process", or its number and how many there are, such as (0, 4)', _is_shard)


def _length_of(source: Any) -> int:
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise TypeError(
            f"data.order takes an object with __len__ and __getitem__, such as a list or a dataset, or an iterator; "
            f"got {type(source).__name__}. For an object that is only iterable, pass iter(...), or a function of it"
        )
    with Noted("while data.order asked its source for its length"):
        return len(source)


def _shard_of(shard: Shard) -> tuple[int, int]:
    """Return the number of a shard, and the number of all shards.

    Raises:
        DataError: the shard of this process is not known.
    """
    # The number that `jax.process_index()` would return; calling that would start a backend.
    distributed: Any = sys.modules.get("jax._src.distributed")
    state = None if distributed is None or distributed.global_state.client is None else distributed.global_state
    if not isinstance(shard, str):
        if state is not None and shard[1] == state.num_processes and shard[0] != state.process_id:
            logs.warning(
                "data.shard_of_another_process", shard=shard, process=state.process_id,
                remedy='pass shard="process"; if two processes read the same shard, one shard is read by none',
            )  # fmt: skip
        return shard
    if state is not None:
        return state.process_id, state.num_processes
    slurm = read_slurm(os.environ)
    if slurm is not None and slurm.tasks is not None and slurm.tasks > 1:
        raise DataError(
            f'data.order(shard="process"): this is one of {slurm.tasks} tasks of a SLURM job, and jax.distributed is '
            "not initialized, so each task would read all records; call jax.distributed.initialize() before, or "
            'pass shard=(int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])), or shard=(0, 1) for all'
        )
    return 0, 1
