"""Arguments of device nodes: bound, stacked for a batch, and results split."""

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, cast

import numpy as np

from .._machine import LARGE_BYTES, aligned, aligned_copy
from ..actors.packing import in_order
from ..engine.tracing.annotations import signature_of as parameters_of
from ..telemetry import metrics, names
from ..telemetry.metrics import CounterSource, Reading, series
from .batch_items import WEAK, Array, BatchItem, BatchItems, ItemSignature
from .device_batch import DeviceBatch, PackedBatch
from .parameter_checks import check_names, check_shared, made_by_batches
from .programs import (
    WeakRows,
    are_arrays,
    current,
    is_random_key,
    on_host_of,
    static_part,
)
from .statistics import BatchStatistics
from .untyped_jax import jax

# Stacking: arrays of several items become one array each, with a row per item; results become rows again.
#
# Arrays are stacked on the host, in NumPy: 27 rows of 256 float32 take 13 us to stack there, and 228 us with jax.numpy.
# Only `on_host` and `split` may wait for a device, because they read arrays that may not be computed yet. The thread of
# the device calls both.


@dataclass(frozen=True, slots=True)
class Stacked:
    """The arguments of a batch.

    The buffers are new. On a CPU, JAX may use a buffer in place, so once the buffers were passed to JAX, no code may
    write to them or use them for another batch.

    Attributes:
        arguments: one pytree for each parameter; its arrays have one row per item, and rows of padding.
        masks: for each padded parameter an array of bool, with the padded lengths as the shape of a row. With packed
            rows: the segments and the positions.
        count: number of items.
        size: number of rows, padding included.
        real_elements: number of elements of the items' arrays.
        elements: number of elements of the arguments' arrays, padding included.
        parts: for each item of packed rows, the index of its part of a result; None if each item has a row of its own.
        tokens: number of elements along the packed axis, in all rows; 0 without packed rows.
        item_tokens: number of elements along the packed axis that belong to items.
    """

    arguments: tuple[Any, ...]
    masks: tuple[Array, ...]
    count: int
    size: int
    real_elements: int
    elements: int
    parts: list[Any] | None = None
    tokens: int = 0
    item_tokens: int = 0

    @property
    def padding_share(self) -> float:
        """Share of the elements that are padding, whether rows or lengths are padded: 0 to 1."""
        return 1 - self.real_elements / self.elements if self.elements else 0.0

    @property
    def packed_tokens(self) -> tuple[int, int] | None:
        """Number of tokens of the items in packed rows, and of all computed tokens; None without packed rows."""
        return None if self.parts is None else (self.item_tokens, self.tokens)


class Stacker(BatchItems):
    """Describes the arguments of one node's items, and stacks them."""

    # Ownership: threads of devices stack, several at once where a node has replicas.

    def stack(self, items: Sequence[BatchItem], size: int) -> Stacked:
        """Stack items with equal signatures. Copies of the last row pad the batch, and zeros pad arrays to a length.

        A copy of a row gives no NaN that the row itself does not give.

        Args:
            items: at least one item, with arrays that are `on_host`.
            size: number of rows to make: at least one for each item, or as many packed rows as hold the items.
        """
        columns = zip(*[item.arrays for item in items], strict=True)
        lengths = [item.lengths for item in items]
        if self.packed is None:
            return self.stack_columns(items[0].signature, columns, lengths, size)
        length = _row_length(items[0])
        segments, positions = aligned((size, length), np.int32), aligned((size, length), np.int32)
        segments[...] = positions[...] = 0
        counted = np.arange(length, dtype=np.int32)
        places: list[tuple[int, slice]] = []
        parts: list[Any] = []
        for row, members in enumerate(self.rows_of(items)):
            start = 0
            for number, item in enumerate(members):
                (count,) = item.lengths[0]
                place = row, slice(start, start + count)
                segments[place] = number + 1
                positions[place] = counted[:count]
                places.append(place)
                # Indexing with an ellipsis gives an array even for a number, as in `_rows`.
                parts.append((row, number, ...) if self.packed.results == "items" else place)
                start += int(item.cost)
        return replace(
            self.stack_columns(items[0].signature, columns, lengths, size, places),
            masks=(segments, positions), parts=parts,
            tokens=segments.size, item_tokens=sum([count for (count,), *_ in lengths]),
        )  # fmt: skip

    def stack_columns(
        self,
        signature: ItemSignature,
        columns: Iterator[tuple[Array, ...]],
        all_lengths: Sequence[tuple[tuple[int, ...], ...]],
        size: int,
        places: Sequence[Any] | None = None,
    ) -> Stacked:
        """Stack items as `stack` does, given column by column.

        Args:
            signature: the signature of the items.
            columns: for each array of an item, that array of every item.
            all_lengths: for each item, the lengths of its padded arguments.
            size: number of rows to make.
            places: for each item, its place in packed rows; None if each item has a row of its own.
        """
        count = len(all_lengths)
        arguments: list[Any] = []
        masks: list[Array] = []
        real_elements = elements = 0
        for (_, axes), (structure, kinds) in zip(self.parameters, signature, strict=True):
            stacked: list[Array] = []
            for (dtype, shape, besides), rows in zip(kinds, columns, strict=False):
                make = partial(_column_of_lengths, places) if axes else _column
                if besides is None:
                    column = make(rows, dtype, shape, size)
                elif besides is WEAK:
                    column = make(rows, dtype, shape, size).view(WeakRows)
                else:
                    of_key = rows[0].shape[len(shape) :]  # behind the axes of the array of keys
                    column = KeyRows(make(rows, rows[0].dtype, shape + of_key, size), besides)
                stacked.append(column)
                elements += size * math.prod(shape)
                real = [math.prod(row.shape[: len(shape)]) for row in rows] if axes else [count * math.prod(shape)]
                real_elements += sum(real)
            if axes and places is None:
                lengths = [each[len(masks)] for each in all_lengths]
                masks.append(_mask(lengths, [kinds[0][1][axis] for axis in axes], size))
            arguments.append(structure.unflatten(stacked))
        return Stacked(tuple(arguments), tuple(masks), count, size, real_elements, elements)

    def rows_of(self, items: Sequence[BatchItem]) -> list[list[BatchItem]]:
        """Return items of one group row by row, for packed rows."""
        assert self.packed is not None
        return in_order(items, attrgetter("cost"), _row_length(items[0]), self.packed.items_per_row)

    def check_packed(self, result: Iterable[Array], shape: tuple[int, int]) -> None:
        """Check the arrays of a result for packed rows.

        Args:
            result: the arrays of the result.
            shape: the shape of the segments, [rows, length].

        Raises:
            ValueError: an array does not have an entry for each item, or each token, of each row.
        """
        node, packed = self.node, self.packed
        assert packed is not None
        wanted = (shape[0], packed.items_per_row) if packed.results == "items" else shape
        for array in result:
            found: tuple[int, ...] = getattr(array, "shape", ())  # a Python number has no shape
            if found[:2] != wanted:
                raise ValueError(
                    f"node {node!r} has PackedBatch(results={packed.results!r}), so each array of its result begins "
                    f"with the axes [rows, {packed.results}], here {[*wanted]}, and one has the shape {[*found]}"
                )


class BatchLog(CounterSource):
    """Counts the batches of a node on all of its devices, as `BatchStatistics` describes.

    Args:
        name: name of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = [0] * len(fields(BatchStatistics))

    def add(self, stacked: Stacked) -> None:
        """Count a batch."""
        if not self._counts[0]:
            metrics.opened(self)
        elements, tokens = (stacked.real_elements, stacked.elements), (stacked.item_tokens, stacked.tokens)
        more = 1, stacked.count, stacked.size, *elements, *tokens
        self._counts = [count + one for count, one in zip(self._counts, more, strict=True)]

    def statistics(self) -> BatchStatistics:
        """Return a snapshot."""
        return BatchStatistics(*self._counts)

    def counters(self) -> Iterable[Reading]:
        """Return what was counted, for metrics."""
        of = names.NODE, self._name
        batches, calls, _, real, elements, *_ = self._counts
        return [
            (series(names.METRIC_BATCH_RUNS, of), batches, None),
            (series(names.METRIC_BATCH_ITEMS, of), calls, None),
            (series(names.METRIC_BATCH_ELEMENTS, of, (names.PADDING, False)), real, None),
            (series(names.METRIC_BATCH_ELEMENTS, of, (names.PADDING, True)), elements - real, None),
        ]

    def __del__(self) -> None:
        if self._counts[0]:  # the node is gone, and its batches still count
            metrics.registry.vanished(self)


def on_host(item: BatchItem) -> BatchItem:
    """Return an item whose arrays are all NumPy arrays. This blocks until a device has computed them.

    Raises:
        Exception: the error with which the computation of an array has failed.
    """
    if item.is_on_host:
        return item
    return item._replace(arrays=tuple(map(_fetched, item.arrays)), is_on_host=True)


def split(result: Any, stacked: Stacked, node: str) -> list[Any]:
    """Split the result of a batch into the results of its items. This blocks until the result is computed.

    Args:
        result: a pytree of arrays with one row per row of the arguments.
        stacked: the arguments of the batch.
        node: name of the node, for errors.

    Returns:
        One pytree for each item. Its arrays are read-only views of the arrays of the batch, and keep these alive.

    Raises:
        ValueError: an array of the result does not have one row for each row of the arguments.
    """
    leaves, structure = jax.tree.flatten(result)
    columns: list[list[Array]] = []
    for leaf in leaves:
        array = _fetched(leaf)
        if array.shape[:1] != (stacked.size,):
            raise ValueError(
                f"node {node!r} has batch=, and an array of its result has the shape {array.shape}: the first axis "
                f"must be that of the batch, which has {stacked.size} rows"
            )
        if array.flags.writeable:
            array = array.view()
            array.flags.writeable = False
        parts = stacked.parts
        rows = _rows(array, stacked.count) if parts is None else [array[part] for part in parts]
        if is_random_key(leaf):
            kind = jax.random.key_impl(leaf)
            rows = [jax.random.wrap_key_data(row, impl=kind) for row in rows]
        columns.append(rows)
    if not columns:
        return [result] * stacked.count
    if leaves[0] is result:
        return columns[0]
    return [structure.unflatten(row) for row in zip(*columns, strict=True)]


def _row_length(item: BatchItem) -> int:
    """Return the length of the rows that an item goes into, which is the length of the arrays in its signature."""
    (_, ((_, shape, _), *_)), *_ = item.signature
    return shape[0]


def _rows(array: Array, count: int) -> list[Array]:
    # Without the ellipsis, the rows of a vector would be scalars of NumPy, instead of arrays as without a batch.
    return list(array[:count]) if array.ndim > 1 else [array[row, ...] for row in range(count)]


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Typed random keys of several items. NumPy stacks the numbers that the keys are made of.

    This class is a pytree of one array. `of` is a part of its structure, so a program is compiled for one
    implementation of keys.

    Attributes:
        words: the numbers of the keys, with one axis more than the keys.
        of: the implementation of the keys.
    """

    words: Array
    of: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys: a class of the user that holds keys may read the attribute."""
        return cast("tuple[int, ...]", self._abstract().shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the keys."""
        return self._abstract().dtype

    def _abstract(self) -> Any:
        words = jax.ShapeDtypeStruct(self.words.shape, self.words.dtype)
        return jax.eval_shape(partial(jax.random.wrap_key_data, impl=self.of), words)

    def keys(self) -> Array:
        """Return the keys. Called while a program is traced."""
        return jax.random.wrap_key_data(self.words, impl=self.of)


jax.tree_util.register_dataclass(KeyRows, data_fields=["words"], meta_fields=["of"])


def unwrapped(argument: Any) -> Any:
    """Return an argument of a batch as the node's function takes it: with keys in the place of `KeyRows`."""

    def is_keys(node: object) -> bool:
        return isinstance(node, KeyRows)

    def keys(leaf: object) -> object:
        return leaf.keys() if isinstance(leaf, KeyRows) else leaf

    return jax.tree.map(keys, argument, is_leaf=is_keys)


def _fetched(array: Array) -> Array:
    """Wait until an array is computed, and return it as a NumPy array."""
    return np.asarray(jax.random.key_data(array) if is_random_key(array) else array)


def _column(rows: tuple[Array, ...], dtype: Any, shape: tuple[int, ...], size: int) -> Array:
    column = (np.empty if size * rows[0].nbytes < LARGE_BYTES else aligned)((size, *shape), dtype)
    # The rows are stacked in their own dtype first: NumPy would refuse all rows if one scalar is too large for 32 bits.
    column[: len(rows)] = rows if shape else np.array(rows)
    column[len(rows) :] = column[len(rows) - 1]
    return column


def _column_of_lengths(
    places: Sequence[Any] | None, rows: tuple[Array, ...], dtype: Any, shape: tuple[int, ...], size: int
) -> Array:
    column = aligned((size, *shape), dtype)
    column[...] = 0
    for index, row in enumerate(rows):
        place: Any = (index, *map(slice, row.shape)) if places is None else places[index]
        column[place] = row
    if places is None:
        column[len(rows) :] = column[len(rows) - 1]
    return column


def _mask(lengths: list[tuple[int, ...]], padded: list[int], size: int) -> Array:
    """Return the mask of the real elements: a row of the padded lengths for each row of the batch."""
    by_axis = np.array(lengths + [lengths[-1]] * (size - len(lengths))).T
    masks: list[Array] = []
    for axis, (real, length) in enumerate(zip(by_axis, padded, strict=True)):
        along = [1] * len(padded)
        along[axis] = length
        masks.append((np.arange(length) < real[:, None]).reshape(size, *along))
    mask: Array = aligned_copy(reduce(np.logical_and, masks))
    return mask


class Arguments:
    """Puts the arguments of a call in the order of the parameters, and has those of a batched node stacked.

    Args:
        name: name of the node, for errors.
        fn: the function of the node.
        static: parameters whose values the program is compiled for.
        resources: parameters whose arguments come from resources.
        shared: other parameters whose arguments are the same for all calls of a batch.
        batch: how calls run together; None if they run one by one.

    Attributes:
        name: name of the node.
        names: the parameters that callers pass.
        masks: the parameters that take the masks of padded parameters, or the segments and positions of packed rows.
        masked: for each parameter in `masks`, a parameter whose argument has the same rows.
        shared: positions of the arguments that are the same for all calls of a batch, including the arguments of
            resources and the static ones.
        stacked: positions of the other arguments.
        items: describes and stacks these arguments; None without a batch.
        parameters: positions of the arguments that come from resources and are not static.
        static: positions of the static arguments.

    Raises:
        TypeError: the function has `*args` or `**kwargs`, or an option names a parameter that it does not have.
    """

    # Ownership: event loops bind and describe, and threads of devices stack. Only `_last` changes: a loop replaces it
    # as a whole, and reads it once for each item. So loops of several threads may share a node.

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        static: tuple[str, ...],
        resources: frozenset[str],
        shared: frozenset[str],
        batch: DeviceBatch | PackedBatch | None,
    ) -> None:
        self.name = name
        self._signature = parameters_of(fn)
        found = self._signature.parameters
        check_names(name, found, static=static, shared=shared, resources=resources)
        check_shared(name, shared, static, batch)
        self.masks = made_by_batches(self._signature, batch, name)
        self.names = tuple(one for one in found if one not in self.masks)
        self.static = tuple(i for i, one in enumerate(self.names) if one in static)
        self.parameters = tuple(i for i, one in enumerate(self.names) if one in resources and one not in static)
        self.shared = tuple(i for i, one in enumerate(self.names) if one in shared or one in resources or one in static)
        self.stacked = tuple(i for i in range(len(self.names)) if i not in self.shared)
        self._shared_of, self._stacked_of = _picker(self.shared), _picker(self.stacked)
        self._by_keyword = tuple(
            i for i, one in enumerate(self.names) if found[one].kind is inspect.Parameter.KEYWORD_ONLY
        )
        self._last: _LastItem | None = None
        self.items: Stacker | None = None
        self.masked: tuple[str, ...] = ()
        if batch is not None:
            if self.names and {*self.names} <= {*static, *shared}:
                raise TypeError(
                    f"device node {name!r} has batch=, and all of its parameters are named in shared= or static=: "
                    "leave out the one that differs from call to call"
                )
            self.items = Stacker(name, [self.names[i] for i in self.stacked], batch)
            self.masked = self.items.padded
            if isinstance(batch, PackedBatch):
                self.masked = self.masked[:1] * len(self.masks)
        self._cost = None if batch is None or batch.cost is None else batch._cost_of

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return one argument for each parameter, in their order."""
        if len(args) == len(self.names) and not kwargs:
            return args
        bound = self._signature.bind(*args, **kwargs)
        for name in self.masks:
            if name in bound.arguments:
                raise TypeError(f"node {self.name!r}: its batch makes the argument {name!r}, so leave it out")
        bound.apply_defaults()
        return tuple([bound.arguments[name] for name in self.names])

    def merge(self, sample: tuple[Any, ...], resources: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return one argument for each parameter, taken from a sample and from resources.

        Raises:
            TypeError: the sample has too many arguments, or too few.
        """
        bound = self._signature.bind_partial(**resources)
        rest = [name for name in self.names if name not in bound.arguments]
        bound.arguments.update(zip(rest, sample, strict=False))
        bound.apply_defaults()
        missing = [name for name in self.names if name not in bound.arguments]
        if missing or len(sample) > len(rest):
            raise TypeError(
                f"a sample of device node {self.name!r} has {len(sample)} arguments: give one for each of the "
                f"parameters that do not come from resources, {', '.join(rest)}"
            )
        return tuple([bound.arguments[name] for name in self.names])

    def alike(self, items: Sequence[tuple[Any, ...]]) -> tuple[Hashable, int] | None:
        """Return the group of the arguments of some calls, and the bytes of each call, if all are like the last item.

        Nearly always they are, and to see that takes less time than to describe each item. The arguments stay as they
        are; their signature is part of the group.
        """
        if (last := self._last) is None:
            return None
        kinds, versions, alike = last
        for position, version in versions:
            for item in items:
                if id(item[position]) != version:
                    return None
        for position, kind, dtype, shape in kinds:
            for item in items:
                array = item[position]
                if type(array) is not kind or array.dtype is not dtype or array.shape != shape:
                    return None
        return alike

    def describe_item(self, values: tuple[Any, ...]) -> tuple[BatchItem, tuple[Any, ...]]:
        """Return the arguments of one call of a batched node as a `BatchItem`, and their group.

        Raises:
            TypeError: an argument cannot be stacked.
            ValueError: an argument is too long.
        """
        assert self.items is not None
        arrays, shared = self._stacked_of(values), self._shared_of(values)
        item = self.items.item(arrays, current(), shared)
        if self._cost is not None:
            item = item._replace(cost=self._cost(arrays, self.name))
        # A batch has one version of each shared argument. Versions are compared by identity.
        versions = [*map(id, shared)]
        if len(self.shared) > len(self.parameters):
            kept: list[Any] = []
            versions = [self._version(i, value, kept) for i, value in zip(self.shared, shared, strict=True)]
            if kept:
                item = item._replace(kept=tuple(kept))
        elif not self.items.padded and self._cost is None and all(map(_is_of_any_configuration, arrays)):
            kinds: list[tuple[int, Any, Any, tuple[int, ...]]] = [
                (i, array.__class__, array.dtype, array.shape) for i, array in zip(self.stacked, arrays, strict=True)
            ]
            known = [*zip(self.shared, versions, strict=True)]
            self._last = kinds, known, ((item.signature, *versions), item.size_bytes)
        return item, (item.signature, *versions)

    def as_item(self, args: tuple[Any, ...], group: Hashable) -> BatchItem:
        """Return arguments of a group as a `BatchItem`, which they may be already."""
        if isinstance(args, BatchItem):
            return args
        signature, *_ = cast("tuple[Any, ...]", group)
        return BatchItem(signature, self._stacked_of(args), (), True, 0, self._shared_of(args))

    def stack(self, given: Sequence[tuple[Any, ...]], group: Hashable, size: int) -> tuple[tuple[Any, ...], Stacked]:
        """Stack arguments of one group, or `BatchItem`s, into `size` rows. Their arrays are on the host.

        Returns:
            The arguments of the vectorised program (stacked arguments, shared arguments, and masks), and the stacked
            arguments with their sizes.
        """
        assert self.items is not None
        if {*map(type, given)} == {tuple}:  # nearly always
            columns, (signature, *_) = tuple(zip(*given, strict=True)), cast("tuple[Any, ...]", group)
            of_arrays = iter(self._stacked_of(columns))
            stacked = self.items.stack_columns(signature, of_arrays, [()] * len(given), size)
            shared = self._shared_of(given[0])
        else:
            items = [self.as_item(args, group) for args in given]
            stacked, shared = self.items.stack(items, size), items[0].shared
        args: list[Any] = [None] * len(self.names)
        for position, argument in zip(self.stacked, stacked.arguments, strict=True):
            args[position] = argument
        for position, argument in zip(self.shared, shared, strict=True):
            args[position] = argument
        return (*args, *stacked.masks[: len(self.masks)]), stacked  # a function need not take positions

    def _version(self, position: int, value: Any, kept: list[Any]) -> Any:
        """Return the part of a group that stands for a shared argument, and add the leaves to keep alive to `kept`."""
        if position in self.static:
            return static_part(value, self, position)
        if position in self.parameters:
            return id(value)
        # Each call may make a new list or dictionary of the same arrays.
        leaves, structure = jax.tree.flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:
            kept += leaves
        return (structure, *map(id, leaves))

    def parameter(self, position: int) -> str:
        """Return the name of a parameter."""
        return self.names[position]

    def positions(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the positions of parameters."""
        return tuple(sorted(self.names.index(name) for name in names))

    def on_host_of(self, values: tuple[Any, ...]) -> int:
        """Return how many bytes of the arguments are not on a device yet."""
        stacked = self._stacked_of(values)
        return on_host_of(stacked if are_arrays(stacked) else jax.tree.leaves(stacked))

    def call(self, fn: Callable[..., Any], values: tuple[Any, ...], masks: tuple[Any, ...] = ()) -> Any:
        """Call the function with arguments in the order of the parameters."""
        if not self._by_keyword and not masks:
            return fn(*values)
        by_name = dict(zip(self.masks, masks, strict=False))
        by_name.update({self.names[i]: values[i] for i in self._by_keyword})
        return fn(*[value for i, value in enumerate(values) if i not in self._by_keyword], **by_name)


# A description of the last item, which as a rule fits the next item as well. It holds no array, but position, type,
# dtype and shape of each stacked argument, position and identity of each other argument, and the item's group and size.
_LastItem: TypeAlias = tuple[
    list[tuple[int, Any, Any, tuple[int, ...]]], list[tuple[int, int]], tuple[tuple[Any, ...], int]
]


def _is_of_any_configuration(array: Any) -> bool:
    """Return whether an array is NumPy's, with a dtype that JAX keeps under any configuration: not one of 64 bits."""
    kind: type[Any] = array.__class__
    return (kind is np.ndarray or issubclass(kind, np.generic)) and array.dtype.itemsize <= 4


def _picker(positions: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the values at these positions as a tuple. It is called for each item of a batch."""
    # `itemgetter` of one position returns no tuple. That of a slice does, in half the time of a Python function.
    first = positions[0] if positions else 0
    picker = itemgetter(*positions) if len(positions) > 1 else itemgetter(slice(first, first + len(positions)))
    return cast("Callable[[tuple[Any, ...]], tuple[Any, ...]]", picker)
