"""Progress of a stream: whether it is shown, and what is said of it."""

import asyncio
import importlib
import operator
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from .._errors import MissingExtraError
from ..actors.accepted import SWITCH, check
from ..actors.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from ..telemetry.progress.standing import Standing
    from .streaming import StreamStatistics

# Rate and bottleneck are those of this time: long enough for a calm number, short enough to follow a change.
_MEMORY_SECONDS: Final = 10.0


def is_shown(wanted: bool) -> bool:
    """Return whether progress can be shown, if that is wanted: standard error is a terminal.

    Raises:
        OptionsError: `progress=` is neither True nor False.
        MissingExtraError: it is, and rich is not installed.
    """
    check("progress", wanted, SWITCH)
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        return False
    try:
        importlib.import_module("..telemetry.progress.display", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        raise MissingExtraError(
            'progress=True needs rich to show something on a terminal: pip install "penstock[rich]"', name=error.name
        ) from error
    return True


def length_of(calls: object) -> int | None:
    """Return how many calls there are, if they say so; a generator does not."""
    try:
        length = operator.length_hint(calls, -1)
    except Exception:  # noqa: BLE001 - user code; a bar without an end is better than no stream
        return None
    return None if length < 0 else length


class StreamProgress:
    """The bar of a stream that has begun.

    Args:
        loop: that of the stream.
        name: says what is streamed.
        total: how many items there will be; None if unknown.
        statistics: the counters of the stream.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: Callable[[], str],
        total: int | None,
        statistics: "Callable[[], StreamStatistics]",
    ) -> None:
        from ..telemetry.progress.display import Bar

        self._name = name
        self._total = total
        self._statistics = statistics
        self._past: deque[StreamStatistics] = deque()
        self._bar = Bar(self._look, loop)

    def end(self) -> None:
        """Show what has been reached, and nothing of what the end of the stream does to the counters."""
        self._bar.end()

    async def aclose(self) -> None:
        """End, and wait until the last numbers are on the terminal, also while being cancelled."""
        self.end()
        await uninterrupted(self._bar.drawn())

    def _look(self) -> "Standing":
        from ..telemetry.progress.standing import Standing

        now, past = self._statistics(), self._past
        while past and (now.elapsed_seconds or 0.0) - (past[0].elapsed_seconds or 0.0) > _MEMORY_SECONDS:
            past.popleft()
        lately = now.since(past[0]) if past else now
        past.append(now)
        ended = lately.completed + lately.failed
        return Standing(
            self._name(),
            now.completed + now.failed,
            now.failed,
            self._total,
            ended / lately.elapsed_seconds if lately.elapsed_seconds else None,
            "" if lately.bottleneck is None else lately.bottleneck.node,
        )
