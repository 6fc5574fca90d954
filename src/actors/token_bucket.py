"""Token bucket: how many items may pass, and when the next one may."""

import math

from .accepted import POSITIVE, check, whole


class TokenBucket:
    """A rate with bursts: a state machine without a clock.

    It holds up to `burst` tokens, gets `per_second` of them each second, and an item takes one. What is kept is not
    their number but when the bucket would be full again, which is exact over any time (the "generic cell rate
    algorithm", ITU-T I.371).

    Args:
        per_second: tokens per second.
        burst: tokens that it holds, and begins with.

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
        """Take a token; returns whether there was one."""
        if now < self.ready_at:
            return False
        self._full_at = max(now, self._full_at) + self._seconds_per_token
        return True
