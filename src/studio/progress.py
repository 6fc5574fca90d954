"""The progress of a stream, and its bar in a terminal."""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn

from ..actors.tasks import uninterrupted
from ..engine import StreamStatistics
from ..telemetry.tables import count, duration, rate
from ..telemetry.text import printable


def words(done: int, failed: int, total: int | None, per_second: float | None, limits: str) -> str:
    """Return the text beside the bar.

    Args:
        done: how many items have ended.
        failed: how many of these items ended with an error.
        total: how many items there will be; None if unknown.
        per_second: how many items have ended each second lately; None if unknown.
        limits: the name of the node that limits; empty if unknown.
    """
    left = 0 if total is None else total - done
    said = (
        count(done) + ("" if total is None else f"/{count(total)}"),
        "" if per_second is None else rate(per_second),
        f"{_whole(left / per_second)} left" if left > 0 and per_second else "",
        f"{count(failed)} failed" if failed else "",
        f"{printable(limits)} limits" if limits else "",
    )
    return "  ".join(filter(None, said))


def _whole(seconds: float) -> str:
    return duration(seconds) if seconds > 59 else f"{ceil(seconds)} s"


_REFRESHES_A_SECOND: Final = 4


class _Display:
    """All bars of the process, below each other on standard error; each bar stays until the last bar has ended.

    rich draws the bars in threads: a terminal can be slow, or stopped with Ctrl-S, and must not block an event loop.
    The threads are daemons, so that a loop that was stopped in the middle cannot keep the interpreter from ending.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: list[asyncio.AbstractEventLoop] = []  # the event loop of each bar
        self._last: threading.Thread | None = None

    def enter(self, loop: asyncio.AbstractEventLoop) -> Progress:
        """Return the `Progress` to add a bar to; its numbers are drawn from now on."""
        with self._lock:
            if not self._loops:
                # This `Progress` is never started, so bars that are added to it do not draw themselves.
                self._progress = Progress(
                    TextColumn("{task.description}", markup=False),
                    BarColumn(20),
                    TextColumn("{task.fields[words]}", markup=False),
                )
                # Output of the program appears above the bars, if it goes to a terminal as well.
                goes_to_terminal = sys.stdout is not None and sys.stdout.isatty()
                self._live = Live(
                    get_renderable=self._shown, console=Console(stderr=True), refresh_per_second=_REFRESHES_A_SECOND,
                    redirect_stdout=goes_to_terminal,
                )  # fmt: skip
                self._draw(partial(self._live.start, refresh=True))
            self._loops.append(loop)
            return self._progress

    def leave(self, loop: asyncio.AbstractEventLoop) -> threading.Thread | None:
        """Draw the last numbers of a bar; return the thread that draws them, and then ends."""
        with self._lock:
            if loop in self._loops:
                self._loops.remove(loop)
                self._draw(self._live.refresh if self._loops else self._live.stop)
            return self._last

    def _shown(self) -> Progress:
        """Return the bars. Do not wait for a bar any more if its loop was closed before its stream."""
        for loop in [loop for loop in [*self._loops] if loop.is_closed()]:
            self.leave(loop)
        return self._progress

    def _draw(self, draw: Callable[[], None]) -> None:
        before = self._last

        def draw_next() -> None:
            if before is not None:
                before.join()
            draw()

        self._last = threading.Thread(target=draw_next, name="penstock-progress", daemon=True)
        self._last.start()


_DISPLAY: Final = _Display()

# The bar shows the rate and the bottleneck of these last seconds: enough for a calm number, few enough to show changes.
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
        self._loop = loop
        self._ending: threading.Thread | None = None
        self._has_ended = False
        self._bars = _DISPLAY.enter(loop)
        self._bar = self._bars.add_task("", total=total, words="")
        self._refresh()

    def _refresh(self) -> None:
        self._show()
        self._timer = self._loop.call_later(1 / _REFRESHES_A_SECOND, self._refresh)

    def end(self) -> None:
        """Show the present numbers as the last ones, before the end of the stream changes the counters."""
        if not self._has_ended:
            self._has_ended = True
            self._timer.cancel()
            self._show(is_last=True)
            self._ending = _DISPLAY.leave(self._loop)

    async def aclose(self) -> None:
        """End the bar; wait until its last numbers are on the terminal, even if the caller is cancelled."""
        self.end()
        if self._ending is not None:
            await uninterrupted(asyncio.to_thread(self._ending.join))

    def _show(self, *, is_last: bool = False) -> None:
        now, past = self._statistics(), self._past
        while past and (now.elapsed_seconds or 0.0) - (past[0].elapsed_seconds or 0.0) > _MEMORY_SECONDS:
            past.popleft()
        lately = now.since(past[0]) if past else now
        past.append(now)
        done, ended = now.completed + now.failed, lately.completed + lately.failed
        per_second = ended / lately.elapsed_seconds if lately.elapsed_seconds else None
        limits = "" if lately.bottleneck is None else lately.bottleneck.node
        self._bars.update(
            self._bar, description=printable(self._name()), completed=done,
            total=done if is_last and self._total is None else self._total,
            words=words(done, now.failed, self._total, per_second, limits),
        )  # fmt: skip
