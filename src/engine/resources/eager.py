"""Graphs that are called without an engine: what they open is closed when the call ends."""

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

from .registry import Resources
from .resource import opened_eagerly


async def run_eagerly(running: Coroutine[Any, Any, Any]) -> Any:
    """Run the function of a graph to its end; the outermost call closes what was opened on the way."""
    around = opened_eagerly.get()
    if around is not None and not around.closed:
        return await running
    resources = Resources(closes_unused=False)
    token = opened_eagerly.set(resources)
    is_stream = False
    result: Any
    try:
        result = await running
        is_stream = isinstance(result, AsyncIterator) and resources.has_opened
    finally:
        opened_eagerly.reset(token)
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
