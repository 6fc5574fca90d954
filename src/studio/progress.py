"""Progress: the progress of a stream, and its bar in a terminal."""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..actors.tasks import uninterrupted
from ..engine import StreamStatistics
from ..telemetry.tables import count, duration, rate
from ..telemetry.text import printable


@dataclass(frozen=True, slots=True)
class Standing:
    """The progress of a stream at one moment.

    Attributes:
        name: the name to show.
        done: how many items have ended.
        failed: how many of these ended in an error.
        total: how many items there will be; None if unknown.
        per_second: how many items have ended each second lately; None if unknown.
        limits: the name of the node that limits; empty if none is known to.
    """

    name: str
    done: int
    failed: int
    total: int | None
    per_second: float | None
    limits: str = ""

    @property
    def remaining_seconds(self) -> float | None:
        """How long the remaining items take at this rate, in seconds; None if unknown."""
        if self.total is None or not self.per_second or self.done >= self.total:
            return None
        return (self.total - self.done) / self.per_second

    def words(self) -> str:
        """Return the text beside the bar."""
        remaining = self.remaining_seconds
        said = (
            count(self.done) + ("" if self.total is None else f"/{count(self.total)}"),
            "" if self.per_second is None else rate(self.per_second),
            "" if remaining is None else f"{_whole(remaining)} left",
            f"{count(self.failed)} failed" if self.failed else "",
            f"{printable(self.limits)} limits" if self.limits else "",
        )
        return "  ".join(filter(None, said))


def _whole(seconds: float) -> str:
    return duration(seconds) if seconds > 59 else f"{ceil(seconds)} s"


# The display draws all bars of the process on standard error, with rich. It has a thread of its own, because a terminal
# can be slow, or stopped with Ctrl-S, and must not block an event loop.

_REFRESH_SECONDS: Final = 0.25


class Bar:
    """A bar. Its numbers are read in the thread of the event loop, and drawn in the thread of the display.

    Args:
        look: returns the present progress.
        loop: the event loop on which `look` is called.
    """

    def __init__(self, look: Callable[[], Standing], loop: asyncio.AbstractEventLoop) -> None:
        self._look = look
        self._loop = loop
        self._is_drawn: asyncio.Future[threading.Thread | None] = loop.create_future()
        self.standing = look()
        self.has_ended = False
        _DISPLAY.add(self)

    def end(self) -> None:
        """Read the last numbers."""
        if not self.has_ended:
            self.standing = self._look()
            self.has_ended = True
            _DISPLAY.wake()

    async def drawn(self) -> None:
        """Wait until the last numbers are on the terminal, and the thread is gone if this was the last bar."""
        thread = await self._is_drawn
        if thread is not None:
            thread.join()  # it has nothing left to do

    def refresh_soon(self) -> bool:
        """Schedule a reading of the numbers; return False if the loop is closed."""
        return self._call_soon(self._refresh)

    def was_drawn(self, ending: threading.Thread | None) -> None:
        """Note that the last numbers are on the terminal.

        Args:
            ending: the thread of the display, if it ends now.
        """
        self._call_soon(partial(self._say_drawn, ending))

    def _say_drawn(self, ending: threading.Thread | None) -> None:
        if not self._is_drawn.done():  # the task that waited may have been cancelled
            self._is_drawn.set_result(ending)

    def _refresh(self) -> None:
        if not self.has_ended:
            self.standing = self._look()

    def _call_soon(self, callback: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop was closed, but its streams were not
            return False
        return True


class _Display:
    """All bars of the process, below each other; bars that have ended stay until the last one has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: list[Bar] = []
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()

    def add(self, bar: Bar) -> None:
        """Draw a bar from now on."""
        with self._lock:
            self._bars.append(bar)
            if self._thread is None:
                # A daemon, so that a loop that was stopped in the middle cannot keep the interpreter from ending.
                self._thread = threading.Thread(target=self._draw, name="penstock-progress", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Draw now."""
        self._woken.set()

    def _draw(self) -> None:
        ending: list[Bar] = []
        while True:
            for bar in ending:
                bar.was_drawn(None)
            ending = self._draw_until_all_ended()
            with self._lock:
                if not self._bars:
                    self._thread = None
                    break
        for bar in ending:
            bar.was_drawn(threading.current_thread())

    def _draw_until_all_ended(self) -> list[Bar]:
        """Return the bars that ended last, once the display is closed."""
        tasks: dict[Bar, TaskID] = {}
        # Output of the program appears above the bars, if it goes to a terminal as well.
        goes_to_terminal = sys.stdout is not None and sys.stdout.isatty()
        with Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            TextColumn("{task.fields[words]}", markup=False),
            console=Console(stderr=True),
            auto_refresh=False,
            redirect_stdout=goes_to_terminal,
        ) as progress:
            while True:
                with self._lock:
                    bars = list(self._bars)
                ended = [bar for bar in bars if bar.has_ended]
                for bar in bars:
                    _update(progress, tasks, bar)
                progress.refresh()
                with self._lock:
                    self._bars = [bar for bar in self._bars if bar not in ended]
                    if not self._bars:
                        return ended
                for bar in ended:
                    bar.was_drawn(None)
                self._woken.wait(_REFRESH_SECONDS)
                self._woken.clear()
                self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            bars = list(self._bars)
        lost = [bar for bar in bars if not bar.refresh_soon()]
        if lost:
            with self._lock:
                self._bars = [bar for bar in self._bars if bar not in lost]


def _update(progress: Progress, tasks: dict[Bar, TaskID], bar: Bar) -> None:
    standing = bar.standing
    if bar not in tasks:
        tasks[bar] = progress.add_task("", total=standing.total, words="")
    progress.update(
        tasks[bar],
        description=printable(standing.name),
        completed=standing.done,
        total=standing.done if bar.has_ended and standing.total is None else standing.total,
        words=standing.words(),
    )


_DISPLAY: Final = _Display()

# The bar shows the rate and the bottleneck of this time: long enough for a calm number, short enough to follow changes.
_MEMORY_SECONDS: Final = 10.0


class StreamProgress:
    """The progress bar of a stream that has begun.

    Args:
        loop: the event loop of the stream.
        name: returns the name to show.
        total: how many items there will be; None if unknown.
        statistics: returns the counters of the stream.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: Callable[[], str],
        total: int | None,
        statistics: Callable[[], StreamStatistics],
    ) -> None:
        self._name = name
        self._total = total
        self._statistics = statistics
        self._past: deque[StreamStatistics] = deque()
        self._bar = Bar(self._look, loop)

    def end(self) -> None:
        """Show the present numbers as the last ones, before the end of the stream changes the counters."""
        self._bar.end()

    async def aclose(self) -> None:
        """End, and wait until the last numbers are on the terminal, even if the caller is cancelled."""
        self.end()
        await uninterrupted(self._bar.drawn())

    def _look(self) -> Standing:
        now, past = self._statistics(), self._past
        while past and (now.elapsed_seconds or 0.0) - (past[0].elapsed_seconds or 0.0) > _MEMORY_SECONDS:
            past.popleft()
        lately = now.since(past[0]) if past else now
        past.append(now)
        ended = lately.completed + lately.failed
        return Standing(
            self._name(), now.completed + now.failed, now.failed, self._total,
            ended / lately.elapsed_seconds if lately.elapsed_seconds else None,
            "" if lately.bottleneck is None else lately.bottleneck.node,
        )  # fmt: skip
