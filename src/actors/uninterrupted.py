"""Finishing what has to be finished, also while being cancelled."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio


async def until(is_over: Callable[[], bool], wait: Callable[[], Awaitable[object]]) -> None:
    """Wait until something is over, also while being cancelled; the cancellation is raised afterwards.

    Args:
        is_over: whether it is.
        wait: waits for a change; called again for as long as it is not over.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile.
    """
    try:
        while not is_over():
            await wait()
        return
    except asyncio.CancelledError as error:
        cancelled = error
    # `Task.cancel()` arrives once, whatever shields there are. A cancel scope of anyio cancels again in every turn of
    # the loop, which would keep the processor busy until all is over: from that, its own shield protects.
    with anyio.CancelScope(shield=True):
        while not is_over():
            try:
                await wait()
            except asyncio.CancelledError as error:
                cancelled = error  # perhaps a scope was first: it must not catch what another has sent
    try:
        raise cancelled
    finally:
        del cancelled  # it refers to this frame


async def uninterrupted(work: Any) -> Any:
    """Finish some work also while being cancelled; the cancellation is raised afterwards.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile.
        Exception: what the work raised.
    """
    task = asyncio.ensure_future(work)
    try:
        await until(task.done, lambda: asyncio.wait([task]))
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # it is retrieved; the cancellation is what the caller has to see
        raise
    return task.result()
