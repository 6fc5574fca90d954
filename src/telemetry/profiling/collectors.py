"""The profiles that are being taken now, and the Engines that report to them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from ..counters import SavedSnapshots
    from .records import DeviceWork, Execution, Host, ProfiledScope, ProfiledStream


# While no profile is taken, the opening and closing of a scope reads one empty list, and registers nothing.


class Collector:
    """A profile that is being taken; it leaves alone what it does not need."""

    def scope_opened(self, scope: "ProfiledScope") -> None:
        """Count the work of a new scope, from zero."""

    def scope_closed(self, scope: "ProfiledScope") -> None:
        """Take the last numbers of a scope."""

    def scope_vanished(self, scope: "ProfiledScope") -> None:
        """Take the last numbers of a scope that is being collected as garbage; in any thread, without waiting."""

    def reader_opened(self, reader: "ProfiledStream") -> None:
        """Count how long the reader of a new stream waits, from zero."""

    def reader_closed(self, reader: "ProfiledStream") -> None:
        """Take the last number of a stream."""

    def executed(self, graph: str, node: str, executions: "Sequence[Execution]") -> None:
        """Take timed executions of a node."""

    def depth_changed(self, graph: str, node: str, points: Sequence[tuple[float, int]]) -> None:
        """Take how many items were in the inbox of a node, and when, in seconds of `time.perf_counter`."""

    def device_worked(self, work: "DeviceWork") -> None:
        """Take a piece of work of a device; on any thread."""

    def worker_started(self, began: float, ended: float) -> None:
        """Take when a worker process started, while no other one had done any work; on any thread."""

    def snapshots_saved(self, graph: str, snapshots: "SavedSnapshots") -> None:
        """Take what a part of a snapshot of a call has cost."""


hosts: "WeakSet[Host]" = WeakSet()
# While a profile is taken: for each thread, by the number that the operating system gives it, graph and name of the
# node that it has worked for last, and its processor time when it began with that.
node_of_thread: dict[int, tuple[tuple[str, str], float]] = {}
# The profiles that are being taken; empty nearly always, which any thread may look at.
running: list[Collector] = []


def begin(collector: Collector) -> None:
    """Report the opening and closing of scopes and streams to a collector from now on."""
    running.append(collector)


def end(collector: Collector) -> None:
    """End the reports to a collector."""
    running.remove(collector)
    if not running:
        node_of_thread.clear()


def scope_opened(scope: "ProfiledScope") -> None:
    """Report a new scope, whose counters are zero, to the profiles that are being taken."""
    for collector in tuple(running):
        collector.scope_opened(scope)


def scope_closed(scope: "ProfiledScope") -> None:
    """Report a scope that has closed."""
    for collector in tuple(running):
        collector.scope_closed(scope)


def scope_vanished(scope: "ProfiledScope") -> None:
    """Report a scope that was never closed and is being collected as garbage."""
    for collector in tuple(running):
        collector.scope_vanished(scope)


def reader_opened(reader: "ProfiledStream") -> None:
    """Report a new stream."""
    for collector in tuple(running):
        collector.reader_opened(reader)


def reader_closed(reader: "ProfiledStream") -> None:
    """Report a stream that has ended."""
    for collector in tuple(running):
        collector.reader_closed(reader)


def executed(graph: str, node: str, executions: "Sequence[Execution]") -> None:
    """Report timed executions of a node."""
    for collector in tuple(running):
        collector.executed(graph, node, executions)


def depth_changed(graph: str, node: str, points: Sequence[tuple[float, int]]) -> None:
    """Report how many items were in the inbox of a node, and when, in seconds of `time.perf_counter`."""
    for collector in tuple(running):
        collector.depth_changed(graph, node, points)


def device_worked(work: "DeviceWork") -> None:
    """Report a piece of work of a device; callable from any thread."""
    for collector in tuple(running):
        collector.device_worked(work)


def worker_started(began: float, ended: float) -> None:
    """Report the start of a worker process, for which its calls have waited; callable from any thread."""
    for collector in tuple(running):
        collector.worker_started(began, ended)


def snapshots_saved(graph: str, snapshots: "SavedSnapshots") -> None:
    """Report what a part of a snapshot of a call has cost."""
    for collector in tuple(running):
        collector.snapshots_saved(graph, snapshots)
