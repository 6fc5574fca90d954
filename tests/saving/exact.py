"""Interrupted runs are compared to the last bit, to a type, and to the order of the axes of an array."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock import engine


class Keeping:
    """An object whose state is what it holds; the base of nodes, sources and readers."""

    held: Any

    def state(self) -> Any:
        return self.held

    def restore(self, state: Any) -> None:
        self.held = state


def exact(value: Any) -> Any:
    """Returns texts, bytes and tuples that are equal if, and only if, the values are the same to the last bit."""
    kind = type(value).__name__
    if hasattr(value, "sharding"):  # a JAX array
        if str(value.dtype).startswith("key"):  # of random keys
            return kind, str(value.dtype), np.asarray(value._base_array).tobytes()
        where = (
            value.committed,
            sorted(device.id for device in value.devices()),
            str(getattr(value.sharding, "spec", "")),
        )
        return kind, exact(np.asarray(value)), str(value.dtype), bool(value.weak_type), where
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        order = array.dtype.str, array.shape, array.flags.c_contiguous, array.flags.f_contiguous
        return kind, *order, repr(array.dtype.descr), array.tobytes("A")
    if isinstance(value, dict):
        return kind, *((exact(key), exact(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return kind, *map(exact, value)
    if isinstance(value, set | frozenset):
        return kind, *sorted(map(repr, map(exact, value)))
    if dataclasses.is_dataclass(value):
        return kind, *((field.name, exact(getattr(value, field.name))) for field in dataclasses.fields(value))
    if hasattr(value, "model_fields_set"):  # a pydantic model
        return kind, exact(value.__getstate__())
    return kind, value.hex() if isinstance(value, float) else repr(value)


async def check_interrupted(make: Callable[[], Any], folder: Path, *stops: int) -> None:
    """Compares one whole run of a call with runs that end with a snapshot at each of `stops`, and a last one."""
    whole = [exact(value) async for value in engine.stream(make())]
    got: dict[int, Any] = {}
    for stop in (*stops, None):
        async with engine.stream(make(), checkpoint=ps.Checkpoint(folder)) as values:
            assert values.position == len(got)
            async for value in values:
                got[values.position - 1] = exact(value)
                if values.position == stop:
                    await values.checkpoint()
                    break
    assert list(got.values()) == whole
    assert len(whole) > stops[-1]
