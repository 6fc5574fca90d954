"""`Batch`: how many items of many requests are handled together, and when."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, cast

from .._errors import OptionsError
from .accepted import NOT_NEGATIVE, Accepted, check_fields, instance, is_whole, optional, whole

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
        OptionsError: an argument has a value that it does not accept.
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
        check_fields(self, _BATCH, "Batch(")
        if isinstance(self.buckets, tuple) and self.buckets[-1] > self.max_size:
            raise OptionsError(f"Batch(buckets={self.buckets!r}): none of them above max_size={self.max_size}")
        for name, axes in self.pad_axes.items():
            if not _are_axes(axes):
                raise OptionsError(
                    f"Batch(pad_axes={{{name!r}: {axes!r}}}): an axis, counted from 0, or a tuple of them"
                )
        if self.length_buckets != "powers_of_two" and not self.pad_axes:
            raise OptionsError(
                f"Batch(length_buckets={self.length_buckets!r}): pad_axes= says of which axes, and is missing"
            )
        object.__setattr__(self, "pad_axes", MappingProxyType(dict(self.pad_axes)))  # nobody changes it later


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
_BATCH: Final = {
    "max_size": whole(1),
    "max_wait_seconds": NOT_NEGATIVE,
    "max_queue": optional(whole(0)),
    "buckets": _BUCKETS,
    "pad_axes": Accepted("a mapping of names of parameters to axes", _are_parameters),
    "length_buckets": _BUCKETS,
}
# What `batch=` of a node accepts.
BATCH: Final = optional(instance(Batch, "a Batch, such as penstock.Batch(max_size=32)"))
