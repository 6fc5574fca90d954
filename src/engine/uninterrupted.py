"""Finishing what has to be finished."""

import asyncio
from typing import Any


async def uninterrupted(work: Any) -> Any:
    """Finish what has to be finished also while being cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # it is retrieved; the cancellation is what the caller has to see
        raise cancelled
    return task.result()
