"""Rate limits: a node that passes its input on, so many times per second."""

import asyncio
import math
from typing import TYPE_CHECKING, Any, TypeVar

from ..actors.accepted import POSITIVE, check, whole
from ..actors.channel import PriorityFifo
from ..actors.loop_host import Actor
from ..actors.own_loops import Inbox, Work
from .decorator import node


class TokenBucket:
    """A rate with bursts: a state machine without a clock.

    The bucket holds up to `burst` tokens, gets `per_second` of them each second, and an item takes one. It does not
    store the number of tokens but the time at which it would be full again, which is exact over any time (the "generic
    cell rate algorithm", ITU-T I.371).

    Args:
        per_second: how many tokens it gets per second.
        burst: how many tokens it holds at most, and at the beginning.

    Raises:
        OptionsError: a number is out of its range.
    """

    def __init__(self, per_second: float, burst: int) -> None:
        check("per_second", per_second, POSITIVE)
        check("burst", burst, whole(1))
        self._seconds_per_token = 1 / per_second
        self._slack = (burst - 1) / per_second
        self._full_at = -math.inf

    @property
    def ready_at(self) -> float:
        """The time from which there is a token."""
        return self._full_at - self._slack

    def take(self, now: float) -> bool:
        """Take a token at the time `now`; return whether there was one."""
        if now < self.ready_at:
            return False
        self._full_at = max(now, self._full_at) + self._seconds_per_token
        return True


T = TypeVar("T")


@node(stateless=True)
class RateLimit(Actor[Any, Any]):
    """A node that passes its input on, at a limited rate: `limited = ps.RateLimit(per_second=10, burst=5)`.

    Items of higher priority pass first. An item that is cancelled or expires while it waits does not count. All calls
    of a deployment or of a stream share one limit; each `engine.run` has its own.

    Args:
        per_second: how many items may pass per second, in the long run.
        burst: how many items may pass at once after a pause.

    Raises:
        OptionsError: a number is out of its range.
    """

    def __init__(self, *, per_second: float, burst: int = 1) -> None:
        self._bucket = TokenBucket(per_second, burst)

    if TYPE_CHECKING:

        async def __call__(self, value: T, /) -> T:
            """Return the value when the limit lets it pass."""
            ...

    async def loop(self, inbox: Inbox[Work[Any, Any]], /) -> None:
        """Take all work out of the inbox at once, and finish it at the limited rate."""
        # The loop waits in `inbox.get` also while nothing may pass, so that it notices the end of its scope at once.
        clock = asyncio.get_running_loop().time
        bucket = self._bucket
        waiting: PriorityFifo[Work[Any, Any]] = PriorityFifo()
        while True:
            ready_at = bucket.ready_at if waiting else None
            now = 0.0
            try:
                async with asyncio.timeout_at(ready_at):
                    work = await inbox.get()
                    waiting.push(work, work.priority)
            except TimeoutError:
                now = bucket.ready_at  # not the clock: a timer may run up to one tick of the clock too early
            now = max(now, clock())
            while waiting and now >= bucket.ready_at:
                work = waiting.pop()
                if not work.cancelled and (work.deadline is None or now < work.deadline):
                    bucket.take(now)
                    work.finish(work.value)
