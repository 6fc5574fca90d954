"""Rate limits: a node that passes its input on, so many times per second."""

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from ..actors.inbox import Inbox
from ..actors.lanes import Lanes
from ..actors.own_loop import Actor
from ..actors.token_bucket import TokenBucket
from ..actors.work import Work
from .decorator import node

T = TypeVar("T")


@node
class RateLimit(Actor[Any, Any]):
    """A node that passes its input on, at a limited rate: `limited = ps.RateLimit(per_second=10, burst=5)`.

    Items of higher priority pass first. One that is cancelled or expires while it waits uses nothing up. The limit is
    that of a scope: one for all calls of a deployment or a stream, and one for each `engine.run`.

    Args:
        per_second: items per second, in the long run.
        burst: items that may pass at once after a pause.

    Raises:
        OptionsError: a number is out of its range.
    """

    def __init__(self, *, per_second: float, burst: int = 1) -> None:
        self._bucket = TokenBucket(per_second, burst)

    if TYPE_CHECKING:

        async def __call__(self, value: T, /) -> T:
            """Return the value, in its turn."""
            ...

    async def loop(self, inbox: Inbox[Work[Any, Any]], /) -> None:
        """Take everything in, and let it out at the rate; so the end of the scope is noticed while nothing may pass."""
        clock = asyncio.get_running_loop().time
        bucket = self._bucket
        waiting: Lanes[Work[Any, Any]] = Lanes()
        while True:
            ready_at = bucket.ready_at if waiting else None
            now = 0.0
            try:
                async with asyncio.timeout_at(ready_at):
                    work = await inbox.get()
                    waiting.push(work, work.priority)
            except TimeoutError:
                now = bucket.ready_at  # a timer may run a clock's tick too early
            now = max(now, clock())
            while waiting and now >= bucket.ready_at:
                work = waiting.pop()
                if not work.cancelled and (work.deadline is None or now < work.deadline):
                    bucket.take(now)
                    work.finish(work.value)
