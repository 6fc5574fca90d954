"""Graphs that are called without an engine: what they open is closed when the call ends."""

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextvars import ContextVar
from typing import Any

from .opening import Opening
from .registry import Resources

_resources: ContextVar[Resources | None] = ContextVar("penstock_eager_resources", default=None)


def open_eagerly(opening: Opening) -> Coroutine[Any, Any, Any] | None:
    """Return what opens a resource until the present call ends; None outside of any such call."""
    resources = _resources.get()
    return None if resources is None or resources.closed else resources.value_of(opening)


async def run_eagerly(running: Coroutine[Any, Any, Any]) -> Any:
    """Run the function of a graph to its end; the outermost call closes what was opened on the way."""
    around = _resources.get()
    if around is not None and not around.closed:
        return await running
    resources = Resources(closes_unused=False)
    token = _resources.set(resources)
    is_stream = False
    result: Any
    try:
        result = await running
        is_stream = isinstance(result, AsyncIterator) and resources.has_opened
    finally:
        _resources.reset(token)
        if not is_stream:
            await resources.close()
    if is_stream:
        return _reading(result, resources)
    return result  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of Any


async def _reading(values: Any, resources: Resources) -> AsyncGenerator[Any, None]:
    """Yield the values of a stream that the call gave: what it was opened for ends with the last of them."""
    try:
        async for value in values:
            yield value
    finally:
        try:
            aclose = getattr(values, "aclose", None)
            if aclose is not None:
                await aclose()
        finally:
            await resources.close()
