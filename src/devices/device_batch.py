"""Batches on a device: their sizes, the axes that are padded, and the lengths that those are padded to."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, cast

from .._errors import OptionsError
from ..actors.accepted import Accepted, check_fields, is_whole
from ..actors.batching import BATCH_FIELDS, Batch

Buckets: TypeAlias = Literal["powers_of_two"] | tuple[int, ...]


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A `penstock.Batch` for device nodes, with the sizes and lengths that arrays are padded to.

    Arrays of different lengths are stacked if `pad_axes` names their parameter. They are padded with zeros to the next
    of `length_buckets`, and a mask tells the function which elements are real: an array of bool of the padded lengths,
    True for each element of the item. So the function has a parameter `<name>_mask=None` for each padded parameter
    `<name>`, behind those that callers pass; if only one is padded, it may be called `mask`. The mask is None when the
    function is called by itself, for one item as it is. Results that keep a padded axis have its padded length.

    Args:
        max_size: the most items in one batch; "auto" is what `devices.fit` recommends for the node's `sample_input=`,
            found out at warm-up or before the first call.
        max_wait_seconds: how long the first item of a batch waits for further items, in seconds; with 0, a batch has
            the items that are waiting already.
        max_queue: how many items may wait in addition to those of the next batch; further items are refused with
            `Overloaded`. None: all callers wait.
        buckets: the sizes that a batch is padded to, in ascending order; `max_size` is always one of them. Each size
            needs a program.
        pad_axes: by name of the parameter: the axis, or axes, whose length differs from item to item, counted from 0 in
            the array of one item. If an argument holds several arrays, all need the same length there.
        length_buckets: the lengths that those axes are padded to, in ascending order; an item that is longer fails
            alone. The powers of two begin at 8.

    Raises:
        OptionsError: an argument has a value that it does not accept.
    """

    _: KW_ONLY
    buckets: Buckets = "powers_of_two"
    # Left out of the hash: a mapping has none, and equal batches have equal hashes without it.
    pad_axes: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict[str, Any], hash=False)
    length_buckets: Buckets = "powers_of_two"

    def __post_init__(self) -> None:
        check_fields(self, _DEVICE_BATCH_FIELDS, "DeviceBatch(")
        if isinstance(self.buckets, tuple) and (self.max_size == "auto" or self.buckets[-1] > self.max_size):
            raise OptionsError(f"DeviceBatch(buckets={self.buckets!r}): none of them above max_size={self.max_size}")
        for name, axes in self.pad_axes.items():
            if not _are_axes(axes):
                raise OptionsError(
                    f"DeviceBatch(pad_axes={{{name!r}: {axes!r}}}): an axis, counted from 0, or a tuple of them"
                )
        if self.length_buckets != "powers_of_two" and not self.pad_axes:
            raise OptionsError(
                f"DeviceBatch(length_buckets={self.length_buckets!r}) needs pad_axes=, which names the axes"
            )
        object.__setattr__(self, "pad_axes", MappingProxyType(dict(self.pad_axes)))  # and read-only from here on


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


_BUCKETS: Final = Accepted(
    '"powers_of_two" or a tuple of whole numbers of at least 1, in ascending order', _are_buckets
)
_DEVICE_BATCH_FIELDS: Final = {
    **BATCH_FIELDS,
    "buckets": _BUCKETS,
    "pad_axes": Accepted("a mapping of names of parameters to axes", _are_parameters),
    "length_buckets": _BUCKETS,
}


def on_device(batch: Batch | None) -> DeviceBatch | None:
    """Return the batch of a node as a `DeviceBatch`, with the defaults for what `penstock.Batch` does not say."""
    if batch is None or isinstance(batch, DeviceBatch):
        return batch
    return DeviceBatch(**{each.name: getattr(batch, each.name) for each in fields(batch)})


# Programs and batches of their own for lengths of 1, 2 and 4 would cost more than at most 7 elements of padding.
SHORTEST_LENGTH = 8


def batch_sizes(batch: DeviceBatch, multiple: int = 1) -> tuple[int, ...]:
    """Return the sizes that batches are padded to, in ascending order; the last one holds `max_size` items.

    Args:
        batch: the batch of a node.
        multiple: each size is a multiple of this: the number of devices that share the rows of a batch.
    """
    largest = batch.max_size
    assert largest != "auto"  # by now it is known
    if isinstance(batch.buckets, tuple):
        sizes = [*batch.buckets, largest]
    else:
        sizes = [*(1 << exponent for exponent in range((largest - 1).bit_length())), largest]
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))


def padded_length(length: int, buckets: Buckets) -> int | None:
    """Return the length that an axis is padded to; None if it is longer than the last bucket."""
    if isinstance(buckets, tuple):
        index = bisect_left(buckets, length)
        return buckets[index] if index < len(buckets) else None
    return 1 << (length - 1).bit_length() if length > SHORTEST_LENGTH else SHORTEST_LENGTH
