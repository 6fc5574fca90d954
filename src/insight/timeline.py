"""Timeline: the newest events, in bounded memory: when each node ran, for which item, and how full inboxes were."""

import os
import secrets
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..telemetry.observation import Collector, DeviceSlice, Execution


def write_whole(path: "str | os.PathLike[str]", parts: Iterable[str]) -> None:
    """Write a file of text; readers see the old file until the new one is complete, and a failure leaves the old one.

    Args:
        path: the file; its folder exists.
        parts: the text.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(parts)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # it still exists only if it could not be renamed


# The most slices and points of curves that are kept: some 20 MB of JSON, which Perfetto opens at once.
MAX_SLICES: Final = 100_000
MAX_POINTS: Final = 50_000
MAX_DEVICE_SLICES: Final = 20_000

# A node that computes may also wait now and then, such as the first time.
_FEW: Final = 0.05


@dataclass(frozen=True, slots=True)
class Slice:
    """One execution of a node.

    Attributes:
        graph: the name of the graph.
        node: the name of the node, as drawn.
        began_seconds: when it began, since the begin of the profile; negative if it began before the profile.
        ended_seconds: when it ended, since the begin of the profile.
        frame: a number that identifies the item on its whole way through the graph; None if unknown.
        item: the index of the item in its stream, deployment or `map_each`; None if unknown.
    """

    graph: str
    node: str
    began_seconds: float
    ended_seconds: float
    frame: int | None
    item: int | None


@dataclass(frozen=True, slots=True)
class DepthPoint:
    """The number of items in the inbox of a node, from a moment on.

    Attributes:
        graph: the name of the graph.
        node: the name of the node, as drawn.
        at_seconds: the moment, since the begin of the profile.
        depth: how many items are in the inbox from this moment on.
    """

    graph: str
    node: str
    at_seconds: float
    depth: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The newest events of nodes and devices during a profile, in the order in which they were reported.

    Attributes:
        slices: the executions of nodes that were timed.
        depths: how many items were in inboxes; of several changes within a millisecond, one change is kept.
        device_slices: the pieces of work of devices.
        dropped: how many older slices were dropped.
        dropped_depths: how many older depths were dropped.
        dropped_device_slices: how many older slices of devices were dropped.
    """

    slices: tuple[Slice, ...]
    depths: tuple[DepthPoint, ...]
    device_slices: tuple[DeviceSlice, ...]
    dropped: int
    dropped_depths: int
    dropped_device_slices: int


class TimelineRecorder(Collector):
    """Keeps the newest events that nodes and devices report during a profile.

    Args:
        began: the begin of the profile, in seconds of `time.perf_counter`.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._batches: deque[tuple[str, str, Sequence[Execution]]] = deque()
        self._kept = 0
        self._dropped = 0
        self._points: deque[DepthPoint] = deque(maxlen=MAX_POINTS)
        self._device_work: deque[DeviceSlice] = deque(maxlen=MAX_DEVICE_SLICES)
        self._device_work_seen = 0
        self._points_seen = 0
        self._lock = threading.Lock()  # devices have threads of their own

    def timeline(self) -> Timeline:
        """Return the events that are kept now."""
        slices = [
            Slice(graph, node, began - self._began, ended - self._began, frame, item)
            for graph, node, executions in list(self._batches)
            for began, ended, frame, item in executions
        ]
        points = tuple(self._points)
        with self._lock:
            works, seen = tuple(self._device_work), self._device_work_seen
        dropped_points = max(0, self._points_seen - len(points))
        return Timeline(tuple(slices), points, works, self._dropped, dropped_points, seen - len(works))

    def covered_seconds(self, names: Collection[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Return for how long each of these nodes had at least one item, as far as its executions were timed."""
        found: dict[tuple[str, str], list[Execution]] = {name: [] for name in names}
        for graph, node, executions in list(self._batches):
            if (graph, node) in found:
                found[graph, node] += executions
        return {name: union_seconds(executions, self._began) for name, executions in found.items()}

    def disturbed(self) -> frozenset[tuple[str, str]]:
        """Return the nodes that do not hold the event loop, because other executions began or ended during theirs."""
        batches = list(self._batches)
        moments = sorted(moment for _, _, executions in batches for each in executions for moment in each[:2])
        counts: Counter[tuple[str, str]] = Counter()
        all_of: Counter[tuple[str, str]] = Counter()
        for graph, node, executions in batches:
            all_of[graph, node] += len(executions)
            counts[graph, node] += sum(
                bisect_left(moments, ended) > bisect_right(moments, began) for began, ended, _, _ in executions
            )
        return frozenset(name for name, count in counts.items() if count > _FEW * all_of[name])

    def executed(self, graph: str, node: str, executions: Sequence[Execution]) -> None:
        """Keep executions of a node; not those that ended before the profile began."""
        if executions[0][0] < self._began:
            executions = [execution for execution in executions if execution[1] > self._began]
        # `timeline` makes the records: making them here would take longer than all other work of a profile.
        self._batches.append((graph, node, executions))
        self._kept += len(executions)
        while self._kept > MAX_SLICES and self._batches:  # event loops in several threads may make the count inexact
            _, _, oldest = self._batches.popleft()
            self._kept -= len(oldest)
            self._dropped += len(oldest)

    def depth_changed(self, graph: str, node: str, points: Sequence[tuple[float, int]]) -> None:
        """Keep how many items were in the inbox of a node."""
        self._points_seen += len(points)
        self._points.extend(DepthPoint(graph, node, at - self._began, depth) for at, depth in points)

    def device_worked(self, work: DeviceSlice) -> None:
        """Keep the work of a device, unless it ended before the profile began; callable from any thread."""
        began, ended = work.began_seconds - self._began, work.ended_seconds - self._began
        if ended > 0:
            with self._lock:
                self._device_work_seen += 1
                self._device_work.append(replace(work, began_seconds=began, ended_seconds=ended))


def union_seconds(executions: list[Execution], began: float) -> float:
    """Return for how long at least one of the executions ran, since `began`."""
    seconds, covered_until = 0.0, began
    for execution in sorted(executions, key=lambda each: each[0]):
        seconds += max(0.0, execution[1] - max(execution[0], covered_until))
        covered_until = max(covered_until, execution[1])
    return seconds
