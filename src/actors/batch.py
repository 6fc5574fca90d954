"""`Batch`: how many items of many requests are handled together, and when."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

from .whole_numbers import is_whole

Buckets: TypeAlias = Literal["powers_of_two"] | tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Handle items of many requests together.

    With `@node`, the function takes a list and returns a list. With `@device_node` it is written for one item: the
    arrays of the items are stacked, padded to one of a few sizes, and computed by one vectorised program.

    Arrays of different lengths are stacked if `pad_axes` names their parameter. They are padded with zeros to the next
    of `length_buckets`, and a mask tells the function what is real: an array of bool of the padded lengths, True where
    there is an element of the item. So the function has a parameter `<name>_mask=None` for each padded parameter
    `<name>`, behind those that callers pass; if only one is padded, it may be called `mask`. The mask is None when the
    function is called by itself, for one item as it is. Results that keep a padded axis have its padded length.

    Args:
        max_size: the most items in one batch.
        max_wait_seconds: how long the first item of a batch waits for others; 0 takes what is there.
        max_queue: items that may wait beside those of the next batch; more are refused with `Overloaded`. None: their
            callers wait.
        buckets: sizes in ascending order that a batch on a device is padded to, and `max_size`; each is a program.
        pad_axes: of arguments on a device, by name of the parameter: the axis, or axes, whose length differs from item
            to item, counted from 0 in the array of one item. Where an argument holds several arrays, all have the same
            length there.
        length_buckets: lengths in ascending order that those axes are padded to; longer items fail alone. The powers of
            two begin at 8.

    Raises:
        ValueError: a number is out of its range.
        TypeError: an argument is of the wrong kind.
    """

    max_size: int
    _: KW_ONLY
    max_wait_seconds: float = 0.0
    max_queue: int | None = None
    buckets: Buckets = "powers_of_two"
    # Equal batches have equal hashes without it, and mappings have none.
    pad_axes: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict[str, Any], hash=False)
    length_buckets: Buckets = "powers_of_two"

    def __post_init__(self) -> None:
        for name, value, least in (("max_size", self.max_size, 1), ("max_queue", self.max_queue, 0)):
            if value is not None and not is_whole(value, least):
                raise ValueError(f"Batch({name}={value!r}): a whole number of at least {least}")
        if not 0 <= self.max_wait_seconds < math.inf:
            raise ValueError(f"Batch(max_wait_seconds={self.max_wait_seconds!r}): 0 or more, and finite")
        _check_buckets("buckets", self.buckets)
        if isinstance(self.buckets, tuple) and self.buckets[-1] > self.max_size:
            raise ValueError(f"Batch(buckets={self.buckets!r}): none of them above max_size={self.max_size}")
        _check_buckets("length_buckets", self.length_buckets)
        _check_pad_axes(self.pad_axes)
        if self.length_buckets != "powers_of_two" and not self.pad_axes:
            raise ValueError(
                f"Batch(length_buckets={self.length_buckets!r}): pad_axes= says of which axes, and is missing"
            )
        object.__setattr__(self, "pad_axes", MappingProxyType(dict(self.pad_axes)))  # nobody changes it later


def _check_buckets(name: str, buckets: object) -> None:
    if buckets == "powers_of_two":
        return
    if not isinstance(buckets, tuple):
        raise TypeError(f'Batch({name}={buckets!r}): "powers_of_two" or a tuple of whole numbers')
    sizes = cast("tuple[int, ...]", buckets)
    if not sizes or not all(is_whole(size, 1) for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"Batch({name}={sizes!r}): whole numbers of at least 1, in ascending order")


def _check_pad_axes(pad_axes: object) -> None:
    if not isinstance(pad_axes, Mapping):
        raise TypeError(f"Batch(pad_axes={pad_axes!r}): a mapping of names of parameters to axes")
    for name, axes in cast("Mapping[object, object]", pad_axes).items():
        if not isinstance(name, str):
            raise TypeError(f"Batch(pad_axes=...): {name!r} is not the name of a parameter")
        each = cast("tuple[object, ...]", axes) if isinstance(axes, tuple) else (axes,)
        if not each or not all(is_whole(axis, 0) for axis in each) or len(set(each)) < len(each):
            raise ValueError(f"Batch(pad_axes={{{name!r}: {axes!r}}}): an axis, counted from 0, or a tuple of them")
