"""Batches on a device: batches of stacked and padded items, and of rows that several items share."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, cast

from .._errors import OptionsError
from ..actors.accepted import OptionRule, is_whole, one_of, whole
from ..actors.batching import BATCH_FIELDS, Batch
from ..actors.packing import Rows

Buckets: TypeAlias = Literal["powers_of_two"] | tuple[int, ...]


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A `penstock.Batch` for device nodes, with the sizes and lengths that arrays are padded to.

    Arrays of different lengths are stacked if `pad_axes` names their parameter. They are padded with zeros to the next
    length of `length_buckets`. A mask tells the function which elements are real: an array of bool with the padded
    lengths, True for each element of the item. So the function needs a parameter `<name>_mask=None` for each padded
    parameter `<name>`, behind the parameters that callers pass; if only one parameter is padded, its mask may be called
    `mask`. The mask is None when the function is called directly, with one item without padding. Results that keep a
    padded axis have its padded length.

    Args:
        max_size: the most items in one batch. "auto" takes the size that `devices.fit` recommends for the node's
            `sample_input=`, which is found at warm-up or before the first call.
        max_wait_seconds: how long the first item of a batch waits for further items, in seconds. With 0, a batch has
            the items that are waiting already.
        max_queue: how many items may wait in addition to those of the next batch. Further items are refused with
            `Overloaded`. None: all callers wait.
        max_cost: the most that the items of one batch may cost together; see `penstock.Batch`.
        cost: a function that returns the cost of an item, called with the arguments that are stacked.
        buckets: the sizes that a batch is padded to, in ascending order; `max_size` is always one of the sizes. Each
            size needs a program.
        pad_axes: by name of the parameter, the axis or axes whose length differs from item to item, counted from 0 in
            the array of one item. If an argument holds several arrays, all need the same length along these axes.
        length_buckets: the lengths that these axes are padded to, in ascending order. An item that is longer than the
            last length fails alone. The powers of two begin at 8.

    Raises:
        OptionsError: an argument has a value that it does not accept.
    """

    _: KW_ONLY
    buckets: Buckets = "powers_of_two"
    # Left out of the hash: a mapping has no hash, and equal batches have equal hashes without the field.
    pad_axes: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict[str, Any], hash=False)
    length_buckets: Buckets = "powers_of_two"

    def __post_init__(self) -> None:
        self._check(_DEVICE_BATCH_FIELDS)
        if isinstance(self.buckets, tuple) and (self.max_size == "auto" or self.buckets[-1] > self.max_size):
            raise OptionsError(
                f"DeviceBatch(buckets={self.buckets!r}): no bucket may be above max_size={self.max_size}"
            )
        for name, axes in self.pad_axes.items():
            if not _are_axes(axes):
                raise OptionsError(
                    f"DeviceBatch(pad_axes={{{name!r}: {axes!r}}}): an axis, counted from 0, or a tuple of them"
                )
        if self.length_buckets != "powers_of_two" and not self.pad_axes:
            raise OptionsError(
                f"DeviceBatch(length_buckets={self.length_buckets!r}) needs pad_axes=, which names the axes"
            )
        object.__setattr__(self, "pad_axes", MappingProxyType(dict(self.pad_axes)))  # a read-only copy


# How many items that do not fit a batch are passed over for later items that do. With 512, 64 texts of 3 to 256 tokens
# fill rows of 256 to 0.93 in the median; the search takes 0.2 ms of the event loop for a batch.
LOOK_AHEAD: Final = 512


@dataclass(frozen=True)
class PackedBatch(Batch):
    """A `penstock.Batch` for device nodes whose items are sequences. Several items share a row, which saves padding.

    The function is written for rows instead of one item. Each array that callers pass, of shape [length, ...], is put
    into an array of shape [rows, row length, ...] beside the arrays of other callers; padding is 0. All arrays of an
    item have the same length. Arguments that are named in `shared=`, come from resources or are written in the graph
    are passed as they are.

    The function needs a parameter `segments=None`, behind the parameters that callers pass, and may have
    `positions=None`. Both are arrays of int32 [rows, row length]. `segments` is 1 for the first item of a row, 2 for
    the next, and 0 for padding. `positions` is the place of an element in its item, from 0. The function has to keep
    the items of a row apart, such as by attention that is masked where segments differ. Called outside of a graph, the
    node is the plain function of rows.

    A batch has the oldest item of the highest priority, and as many later items as fill the rows. At most 512 items
    that do not fit are passed over. There is a second program with a single row, for a single caller and for the items
    that are left.

    Args:
        lengths: how many elements (such as tokens) a row has: one number, or a few in ascending order. An item goes
            into rows of the first length that holds it. An item that is longer than the last length fails alone. Each
            length has its programs.
        rows: how many rows run at once. There is one program for this number of rows, and one for a single row. On a
            mesh that splits the rows, both numbers are rounded up to a multiple of its devices.
        items_per_row: the most items that share a row.
        results: the form of each array that the function returns. "items": one entry for each item, of shape [rows,
            items_per_row, ...], where entry 0 belongs to segment 1. "tokens": one entry for each element, of shape
            [rows, row length, ...]. A caller gets the entry of its item, or an array of the entries of its elements.
        max_wait_seconds: how long the first item of a batch waits for further items, in seconds. With 0, a batch has
            the items that are waiting already.
        max_queue: how many items may wait in addition to those of a full batch. Further items are refused with
            `Overloaded`. None: all callers wait.

    Attributes:
        max_size: the most items of one batch, in all of its rows.

    Raises:
        OptionsError: an argument has a value that it does not accept.
    """

    max_size: int = field(init=False)
    max_cost: None = field(init=False, default=None)
    cost: None = field(init=False, default=None)
    _: KW_ONLY
    lengths: tuple[int, ...]
    rows: int = 4
    items_per_row: int = 32
    results: Literal["items", "tokens"] = "items"

    def __post_init__(self) -> None:
        self._check(_PACKED_BATCH_FIELDS)
        object.__setattr__(self, "max_size", self.rows * self.items_per_row)

    @property
    def _rows(self) -> Rows:
        return Rows(self.lengths, self.items_per_row, LOOK_AHEAD)


def _are_lengths(value: object) -> bool:
    return isinstance(value, tuple) and _are_buckets(cast("object", value))


def _are_buckets(value: object) -> bool:
    if isinstance(value, str):
        return value == "powers_of_two"
    sizes = cast("tuple[int, ...]", value) if isinstance(value, tuple) else ()
    return bool(sizes) and all(is_whole(size, 1) for size in sizes) and list(sizes) == sorted(set(sizes))


def _are_parameters(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in cast("Mapping[object, object]", value))


def _are_axes(value: object) -> bool:
    axes = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return bool(axes) and all(is_whole(axis, 0) for axis in axes) and len(set(axes)) == len(axes)


_BUCKETS: Final = OptionRule(
    '"powers_of_two" or a tuple of whole numbers of at least 1, in ascending order', _are_buckets
)
_DEVICE_BATCH_FIELDS: Final = {
    **BATCH_FIELDS,
    "buckets": _BUCKETS,
    "pad_axes": OptionRule("a mapping of names of parameters to axes", _are_parameters),
    "length_buckets": _BUCKETS,
}
_PACKED_BATCH_FIELDS: Final = {
    **BATCH_FIELDS,
    "lengths": OptionRule("a tuple of whole numbers of at least 1, in ascending order", _are_lengths),
    "rows": whole(1),
    "items_per_row": whole(1),
    "results": one_of(Literal["items", "tokens"]),
}


def on_device(batch: Batch | None) -> DeviceBatch | PackedBatch | None:
    """Return the batch of a node as a `DeviceBatch`, with defaults for the options that `penstock.Batch` lacks."""
    if batch is None or isinstance(batch, DeviceBatch | PackedBatch):
        return batch
    return DeviceBatch(**{each.name: getattr(batch, each.name) for each in fields(batch)})


# Separate programs and batches for lengths of 1, 2 and 4 would cost more than at most 7 elements of padding.
SHORTEST_LENGTH = 8


def batch_sizes(batch: DeviceBatch | PackedBatch, multiple: int = 1) -> tuple[int, ...]:
    """Return how many rows batches are padded to, in ascending order; the last number holds `max_size` items.

    Args:
        batch: the batch of a node.
        multiple: the number of devices that share the rows of a batch; each size is a multiple of this number.
    """
    largest = batch.max_size
    assert largest != "auto"  # the size was found before
    if isinstance(batch, PackedBatch):
        sizes = [1, batch.rows]
    elif isinstance(batch.buckets, tuple):
        sizes = [*batch.buckets, largest]
    else:
        sizes = [*(1 << exponent for exponent in range((largest - 1).bit_length())), largest]
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))


def padded_length(length: int, buckets: Buckets) -> int | None:
    """Return the length that an axis is padded to; None if the axis is longer than the last bucket."""
    if isinstance(buckets, tuple):
        index = bisect_left(buckets, length)
        return buckets[index] if index < len(buckets) else None
    return 1 << (length - 1).bit_length() if length > SHORTEST_LENGTH else SHORTEST_LENGTH
