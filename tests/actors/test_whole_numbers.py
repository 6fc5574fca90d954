"""Options that are whole numbers: one rule wherever one is asked for, and an error that names option and value."""

import re
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock import devices, engine


@ps.node
async def half(x: int) -> int:
    return x // 2


@ps.graph
async def halved(x: int) -> int:
    return await half(x)


# With the name of the option, the least value, and what takes it.
OPTIONS: list[tuple[str, int, Callable[[Any], Any]]] = [
    ("concurrency", 1, lambda value: ps.node(concurrency=value)(lambda x: x)),
    ("capacity", 1, lambda value: ps.node(capacity=value)(lambda x: x)),
    ("max_bytes", 1, lambda value: ps.node(max_bytes=value)(lambda x: x)),
    ("attempts", 1, ps.Retry),
    ("max_size", 1, ps.Batch),
    ("max_queue", 0, lambda value: ps.Batch(8, max_queue=value)),
    ("burst", 1, lambda value: ps.RateLimit(per_second=1, burst=value)),
    ("max_iterations", 0, lambda value: ps.while_loop(half, half, 1, max_iterations=value)),
    ("concurrency", 1, lambda value: ps.map_each(half, [1], concurrency=value)),
    ("max_restarts", 0, lambda value: engine.Engine().deploy(halved, max_restarts=value)),
    ("max_in_flight", 1, lambda value: ps.ExecutionOptions(max_in_flight=value)),
    ("max_workers", 1, lambda value: ps.ExecutionOptions(max_workers=value)),
    ("max_queue", 0, lambda value: ps.ExecutionOptions(max_queue=value)),
    ("shape", 1, lambda value: devices.DeviceMesh(shape=(value,), axis_names=("x",))),
]


@pytest.mark.parametrize(("name", "least", "take"), OPTIONS)
def test_what_is_no_whole_number_is_refused_where_one_is_asked_for(
    name: str, least: int, take: Callable[[Any], Any]
) -> None:
    for value in ("2", 2.0, True, least - 1):
        with pytest.raises((ValueError, ps.OptionsError), match=rf"{name}=\(?{re.escape(repr(value))}.*whole number"):
            take(value)
    taken = take(least)
    if hasattr(taken, "close"):
        taken.close()


async def test_priority_may_be_negative_and_is_no_bool() -> None:
    assert ps.ExecutionOptions(priority=-2).priority == -2
    for value in ("2", 2.0, True):
        with pytest.raises(ps.OptionsError, match=f"priority={value!r}: a whole number"):
            ps.ExecutionOptions(priority=value)  # type: ignore[arg-type]
