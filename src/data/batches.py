"""Collate: many values become one batch, whose arrays have a leading axis; and the parts of a batch."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from .._errors import DataError
from .._machine import aligned, aligned_copy

Array = npt.NDArray[Any]


class Ragged(NamedTuple):
    """Arrays of different sizes in one batch.

    Attributes:
        values: [batch, ...], each axis as long as that of the longest array; shorter arrays are padded.
        lengths: the lengths of the arrays, int32: [batch] for arrays of one axis, otherwise [batch, axes].
    """

    values: Array
    lengths: npt.NDArray[np.int32]


def collate(values: Sequence[Any], /, *, ragged: Mapping[str, float] | None = None) -> Any:
    """Make a batch of values of one structure: arrays and numbers are stacked, leaf by leaf.

    Arrays, NumPy's and Python's numbers, and lists of numbers become arrays with a leading axis. Strings, bytes and
    None become lists. Dicts, tuples, named tuples and dataclasses become a structure of the same kind, whose leaves are
    batches.

    Args:
        values: the values, at least one.
        ragged: the leaves whose shapes may differ, each with the number that it is padded with. The keys are paths,
            such as "tokens", "image.pixels", "0", or "" for the value itself. Each such leaf becomes a `Ragged`.

    Raises:
        DataError: a value differs in structure from the first; the message names the value and the leaf.
    """
    if not values:
        raise DataError("data.collate got no values: pass at least one")
    return _collated(values, "", ragged or {})


class Unlike(DataError):
    """A value of a batch is not like the first.

    Attributes:
        item: the place of the value in the batch.
        reason: what differs.
    """

    def __init__(self, item: int, reason: str) -> None:
        super().__init__(f"value {item} of the batch: {reason}")
        self.item = item
        self.reason = reason


def _collated(values: Sequence[Any], path: str, ragged: Mapping[str, float]) -> Any:
    first = values[0]
    kind: type[Any] = type(cast("object", first))
    if kind is np.ndarray:
        return _stacked(values, path, ragged)
    for item, value in enumerate(values):
        if type(value) is not kind:
            raise Unlike(item, f"{_leaf(path)} is a {type(value).__name__}, and in value 0 a {kind.__name__}")
    if isinstance(first, str | bytes) or first is None:
        return list(values)
    if isinstance(first, bool | int | float | complex | np.generic):
        stacked = aligned_copy(np.array(values))
        if kind is int and stacked.dtype.kind != "i":  # larger numbers become floats, or an array of objects, in NumPy
            item = next(item for item, value in enumerate(values) if not -(2**63) <= value < 2**63)
            raise Unlike(item, f"{_leaf(path)} is {values[item]}, which int64 does not hold; take np.uint64 or a float")
        return stacked
    members = _members(first)
    if members is not None:
        names, rebuild = members
        taken = [_taken(value, names, item, path) for item, value in enumerate(values)]
        columns = zip(*taken, strict=True)
        return rebuild(
            [_collated(column, _join(path, name), ragged) for name, column in zip(names, columns, strict=True)]
        )
    if isinstance(first, list) or hasattr(first, "__array__"):
        return _stacked([_as_array(value, item, path) for item, value in enumerate(values)], path, ragged)
    raise Unlike(
        0,
        f"{_leaf(path)} is a {kind.__name__}, which makes no array; pass collate=, a function of a list of values, "
        "or turn the value into arrays, numbers or text before",
    )


def _stacked(arrays: Sequence[Any], path: str, ragged: Mapping[str, float]) -> Any:
    first = arrays[0]
    shape, dtype = first.shape, first.dtype
    is_ragged = path in ragged
    for item, array in enumerate(arrays):
        if type(array) is not np.ndarray:
            raise Unlike(item, f"{_leaf(path)} is a {type(array).__name__}, and in value 0 a ndarray")
        if array.dtype != dtype:
            raise Unlike(item, f"{_leaf(path)} is {array.dtype}, and in value 0 {dtype}")
        if array.shape != shape and not (is_ragged and array.ndim == len(shape)):
            raise Unlike(
                item,
                f"{_leaf(path)} has shape {array.shape}, and in value 0 {shape}; arrays of different sizes are padded "
                f"with collate=functools.partial(data.collate, ragged={{{path!r}: 0}})",
            )
    if not is_ragged:
        batch = aligned((len(arrays), *shape), dtype)
        np.stack(arrays, out=batch)
        return batch
    shapes = np.array([array.shape for array in arrays], np.int32).reshape(len(arrays), -1)
    padded = aligned((len(arrays), *shapes.max(axis=0)), dtype)
    padded[...] = ragged[path]
    for row, array in zip(padded, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return Ragged(padded, shapes[:, 0] if shapes.shape[1] == 1 else shapes)


def _as_array(value: Any, item: int, path: str) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:  # a list of lists of different lengths
        raise Unlike(item, f"{_leaf(path)} is a {type(value).__name__} that makes no array: {error}") from error
    if array.dtype.kind not in "biufc":
        raise Unlike(
            item, f"{_leaf(path)} is a {type(value).__name__}, and its elements are no numbers ({array.dtype})"
        )
    return array


def _members(value: Any) -> tuple[tuple[Any, ...], Callable[[list[Any]], Any]] | None:
    """Return the names of a structure's members, and a function that makes such a structure; None for a leaf."""
    kind: Any = type(cast("object", value))
    if kind is dict:
        keys = tuple(value)
        return keys, lambda members: dict(zip(keys, members, strict=True))
    if tuple in kind.__mro__:
        numbers = tuple(range(len(value)))
        return numbers, kind._make if hasattr(kind, "_make") else tuple
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        return names, lambda members: kind(**dict(zip(names, members, strict=True)))
    return None


def _taken(value: Any, names: tuple[Any, ...], item: int, path: str) -> list[Any]:
    """Return the members of a structure in the order of `names`."""
    found = _members(value)
    assert found is not None
    if set(found[0]) != set(names):
        shown = ", ".join(map(repr, found[0])), ", ".join(map(repr, names))
        raise Unlike(item, f"{_leaf(path)} has the members {shown[0]}, and in value 0 {shown[1]}")
    if isinstance(cast("object", value), dict | tuple):
        return [value[name] for name in names]
    return [getattr(value, name) for name in names]


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _leaf(path: str) -> str:
    return f"leaf {path!r}" if path else "it"


# Batches: the size of a batch, a part of a batch, and several batches as one.


def size_of(batch: Any) -> int:
    """Return how many values a batch has.

    Raises:
        DataError: the leaves of the batch have different lengths, or there is no leaf.
    """
    sizes = {len(leaf) for leaf in _leaves(batch)}
    if len(sizes) != 1:
        raise DataError(
            f"a batch is made of arrays and lists of one length, got {', '.join(map(str, sorted(sizes))) or 'none'}"
        )
    return sizes.pop()


def part_of(batch: Any, which: "int | slice") -> Any:
    """Return one value of a batch, or a smaller batch. Arrays are views of the batch."""
    if type(batch) is np.ndarray:  # a tenth of the time that the code below takes
        return batch[which]
    return _mapped([batch], lambda leaves: leaves[0][which])


def joined(batches: Sequence[Any]) -> Any:
    """Return several batches as one batch.

    Raises:
        DataError: the batches are not alike.
    """
    return _mapped(batches, _concatenated)


def _concatenated(leaves: list[Any]) -> Any:
    if isinstance(leaves[0], list):
        return [value for leaf in leaves for value in leaf]
    if len({(leaf.dtype, leaf.shape[1:]) for leaf in leaves}) > 1:
        raise DataError(
            f"batches of {', '.join(f'{leaf.dtype}{list(leaf.shape)}' for leaf in leaves)} cannot be joined; batches "
            "of data.Ragged have different lengths: batch the values once, with the size that you want"
        )
    return np.concatenate(leaves, out=aligned((sum(map(len, leaves)), *leaves[0].shape[1:]), leaves[0].dtype))


def _leaves(batch: Any) -> Iterable[Any]:
    members = _members(batch)
    if members is None:
        kind: type[Any] = type(cast("object", batch))
        if kind is not list and (kind is not np.ndarray or not batch.ndim):
            raise DataError(f"a batch is made of arrays and lists, got {kind.__name__}")
        yield batch
        return
    for member in _taken(batch, members[0], 0, ""):
        yield from _leaves(member)


def _mapped(batches: Sequence[Any], of_leaves: Callable[[list[Any]], Any]) -> Any:
    members = _members(batches[0])
    if members is None:
        return of_leaves(list(batches))
    names, rebuild = members
    taken = [_taken(batch, names, item, "") for item, batch in enumerate(batches)]
    return rebuild([_mapped(column, of_leaves) for column in zip(*taken, strict=True)])
