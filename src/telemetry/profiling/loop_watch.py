"""Loop watch: what the streams of an event loop do, and whether something holds it, at moments spread over the time.

It looks now and then instead of counting, so that an item does not pay for it.
"""

import asyncio
import sys
from dataclasses import dataclass
from math import sqrt
from time import clock_gettime
from typing import Final
from weakref import WeakSet

from .readings import Reader, Scope, WindowLook


def thread_seconds(thread: int) -> float | None:
    """Return the processor time of a thread of this process, in seconds; None if it has ended, or nobody tells.

    Args:
        thread: its number, as `threading.get_native_id` gives it.
    """
    if sys.platform != "linux":
        return None
    try:
        # The number of a thread's clock, as the kernel makes it of that of the thread, and pthread_getcpuclockid(3)
        # returns it: that function must not be asked for a thread that may have ended, the kernel may.
        return clock_gettime(~thread << 3 | 6)
    except OSError:
        return None


# At first every millisecond, so that a short profile has enough looks; then fewer and fewer, some 180 each time that
# the time doubles, however long it takes.
_LEAST_PAUSE_SECONDS: Final = 0.001
_PAUSE_SHARE: Final = 1 / 256
# Multiples of the golden ratio are spread evenly: looks at equal distances would fall in step with the handlers.
_GOLDEN: Final = (sqrt(5) - 1) / 2
# A timer is late by a millisecond anyhow.
_LATE_SECONDS: Final = 0.003
# And now and then by more: whoever looks seldom must not take that for a habit, unless it was most of the time.
_LEAST_LATE: Final = 3
_MOST: Final = 0.5


@dataclass
class WindowSum:
    """What looks at a stream add up to: each counts for the time since the one before.

    Attributes:
        size: the most items that count at a time.
        ordered: whether they are taken out in input order.
        seconds: the time that the looks stand for.
        in_flight_seconds: time that items counted, over all items.
        behind_seconds: time that items which had ended waited for one before them, over all items.
        asking_seconds: time that the source was asked for an item, and had not given it.
    """

    size: int
    ordered: bool
    seconds: float = 0.0
    in_flight_seconds: float = 0.0
    behind_seconds: float = 0.0
    asking_seconds: float = 0.0

    def add(self, look: WindowLook, seconds: float) -> None:
        """Add a look, which stands for some time."""
        self.size = max(self.size, look.size)
        self.ordered = look.ordered
        self.seconds += seconds
        self.in_flight_seconds += look.in_flight * seconds
        self.behind_seconds += 0 if look.is_ready else look.ended * seconds
        self.asking_seconds += look.is_asking * seconds


class LoopWatch:
    """Looks at what runs on one event loop, from the first scope that is opened until it is stopped.

    Attributes:
        scopes: the scopes that are open.
        readers: the streams that are open.
        windows: what was seen of streams, by their names.
        seconds: the time that its looks stand for.
        late_seconds: that of it for which the loop was held: a timer was late.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None
        self._looks = 0
        self._is_on = True
        self.scopes: WeakSet[Scope] = WeakSet()
        self.readers: set[Reader] = set()
        self.windows: dict[str, WindowSum] = {}
        self.seconds = 0.0
        self.late_seconds = 0.0
        self._delays = 0.0
        self._late = 0
        self._held_seconds = 0.0

    @property
    def late_share(self) -> float:
        """Share of the time for which something held the loop."""
        return self.late_seconds / self.seconds if self._is_habit else 0.0

    @property
    def delay_seconds(self) -> float:
        """Mean time that a handler waits for its turn on the loop: by which timers were late, if by more than usual."""
        return self._delays / self.seconds if self._is_habit else 0.0

    @property
    def _is_habit(self) -> bool:
        return self._late >= _LEAST_LATE or self._held_seconds > _MOST * self.seconds

    def start(self) -> None:
        """Look from now on, as long as something is open; called in the thread of the loop."""
        if self._is_on and self._timer is None:
            if self._began is None:
                self._began = self._loop.time()
            self._wait()

    def stop(self) -> None:
        """Look no more; from any thread."""
        self._is_on = False
        self.scopes, self.readers = WeakSet(), set()
        if self._timer is not None and not self._loop.is_closed():
            self._timer.cancel()

    def _wait(self) -> None:
        assert self._began is not None
        now = self._loop.time()
        self._looks += 1
        pause = max(_LEAST_PAUSE_SECONDS, (now - self._began) * _PAUSE_SHARE)
        pause *= 0.5 + self._looks * _GOLDEN % 1
        self._timer = self._loop.call_later(pause, self._look, now, now + pause)

    def _look(self, began: float, due: float) -> None:
        self._timer = None
        if not self._is_on or not (self.scopes or self.readers):
            return
        now = self._loop.time()
        self.seconds += now - began
        if now - due > _LATE_SECONDS:
            self.late_seconds += now - began
            self._late += 1
            self._held_seconds += now - due
            self._delays += (now - due) * (now - began)
        for reader in tuple(self.readers):
            look = reader.look()
            if look is not None:
                found = self.windows.setdefault(reader.name, WindowSum(look.size, look.ordered))
                found.add(look, now - began)
        self._wait()
