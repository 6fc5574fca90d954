"""Sizes of values: the bytes of the arrays, bytes and texts in values, and how many of these are on devices."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeGuard

from ..actors.own_loops import bytes_of
from ..actors.stream_buffer import Reader


def size_of(value: Any) -> int:
    """Return the size of the arrays, bytes and texts in a value, but not in its streams; each object counts once."""
    return sizes_of([value], with_streams=False)[0]


def sizes_of(values: Iterable[Any], *, with_streams: bool = True) -> tuple[int, int]:
    """Return the size of all objects in some values, each counted once, and the share of JAX arrays in that size."""
    sizes: dict[int, tuple[int, bool]] = {}
    left = [*values]
    passed: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in passed:
            continue
        passed.add(id(value))
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            left += value
        elif is_reader(value):
            left += value.buffer.held if with_streams else ()
        elif is_dataclass(value) and not isinstance(value, type):
            left += [getattr(value, one.name, None) for one in fields(value)]
        elif size := bytes_of(value):
            sizes[id(value)] = size, hasattr(value, "sharding")
    return sum(size for size, _ in sizes.values()), sum(size for size, there in sizes.values() if there)


def is_reader(value: object) -> TypeGuard[Reader[Any]]:
    """Whether a value is a stream of values that a step reads."""
    return isinstance(value, Reader)
