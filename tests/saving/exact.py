"""Interrupted runs are compared to the last bit, to a type, and to the order of the axes of an array.

Also parts of saved calls: sources and stages that tell their state.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

import penstock as ps
from penstock import data, engine


class Keeping:
    """An object whose state is what it holds; the base of nodes, sources and readers."""

    held: Any

    def state(self) -> Any:
        return self.held

    def restore(self, state: Any) -> None:
        self.held = state


class Lines(Keeping):
    """An iterator over a sequence, which can tell and restore its position."""

    def __init__(self, values: Sequence[Any] = range(40)) -> None:
        self.values = values
        self.held = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.held == len(self.values):
            raise StopIteration
        self.held += 1
        return self.values[self.held - 1]


@ps.node
class Counting(Keeping):
    """A class that is a source."""

    def __init__(self, last: int = 60) -> None:
        self.last = last
        self.held = 0

    async def __call__(self) -> AsyncIterator[float]:
        while self.held < self.last:
            self.held += 1
            yield self.held / 3


@ps.node
class Triples(Keeping):
    """Reads a stream and gives another stream with fewer values."""

    def __init__(self) -> None:
        self.held: list[float] = []

    async def __call__(self, values: AsyncIterator[Any]) -> AsyncIterator[float]:
        async for value in values:
            self.held.append(float(np.sum(value)))
            if len(self.held) == 3:
                yield sum(self.held)
                self.held = []


def ordered(source: Any = range(40), **options: Any) -> Any:
    """Returns the records of a source, in an order that a seed draws."""
    return data.order(source, **{"shuffle_seed": 3, **options})


def over(pipeline: Callable[[Any], Any], records: Any = None) -> Any:
    """Returns a call of a graph with this body, which may await."""

    @ps.graph
    async def made(records: AsyncIterator[Any]) -> AsyncIterator[Any]:
        stream = pipeline(records)
        return await stream if asyncio.iscoroutine(stream) else stream  # type: ignore[no-any-return]

    return made(ordered() if records is None else records)


async def taken(
    call: Any, checkpoint: ps.Checkpoint | None = None, limit: int | None = None, *, saves: bool = False
) -> list[tuple[int, Any]]:
    """Returns the values of a call, with their positions.

    Args:
        call: the call.
        checkpoint: where its snapshots are.
        limit: the number of values after which the reader leaves.
        saves: whether the reader asks for a snapshot before it leaves.
    """
    got: list[tuple[int, Any]] = []
    async with engine.stream(call, checkpoint=checkpoint) as stream:
        async for value in stream:
            got.append((stream.position, value))
            if len(got) == limit:
                if saves:
                    await stream.checkpoint()
                break
    return got


async def up_to(stream: Any, limit: int | None) -> AsyncIterator[Any]:
    """Gives values until the stream ends, or at most `limit` values; the stream stays open."""
    given = 0
    with suppress(StopAsyncIteration):
        while given != limit:
            yield await anext(stream)
            given += 1


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


async def exactly(*args: Any, **options: Any) -> list[tuple[int, Any]]:
    """Returns the values of a call as `taken` does, in a form that is the same for values of the same bits."""
    return [(position, exact(value)) for position, value in await taken(*args, **options)]


async def goes_on(make: Callable[[], Any], folder: Path, *limits: int, **interval: int) -> list[int]:
    """Reads a call in several lives, the last one to its end, and compares their values with those of one whole run.

    The end of a life waits for a snapshot that is being written, and starts none. Returns the positions before the
    first values of all lives.
    """
    whole, begins = await exactly(make()), list[int]()
    for limit in (*limits, None):
        got = await exactly(make(), ps.Checkpoint(folder, **interval), limit)
        begins.append(got[0][0] - 1)
        assert got == whole[begins[-1] :][: len(got)]
    assert got[-1] == whole[-1]
    return begins


async def check_interrupted(make: Callable[[], Any], folder: Path, *stops: int) -> None:
    """Compares one whole run of a call with runs that end with a snapshot at each of `stops`, and a last one."""
    whole, got = await exactly(make()), list[tuple[int, Any]]()
    for stop in stops:
        got += await exactly(make(), ps.Checkpoint(folder), stop - len(got), saves=True)
    assert got + await exactly(make(), ps.Checkpoint(folder)) == whole
    assert len(whole) > stops[-1]
