"""Who takes a profile now, and which Engines could be profiled."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from .records import DeviceWork, Execution, Host, Reader, Scope


# Who profiles now, and who could be profiled.
#
# While no profile is taken, opening and closing a scope looks at one empty list, and registers nothing.


class Collector(Protocol):
    """A profile that is being taken."""

    def scope_opened(self, scope: "Scope") -> None:
        """Count what it does, from zero."""
        ...

    def scope_closed(self, scope: "Scope") -> None:
        """Take its last numbers."""
        ...

    def scope_vanished(self, scope: "Scope") -> None:
        """Take the last numbers of one that is being collected as garbage; in any thread, and wait for nothing."""
        ...

    def reader_opened(self, reader: "Reader") -> None:
        """Count how long it waits, from zero."""
        ...

    def reader_closed(self, reader: "Reader") -> None:
        """Take its last number."""
        ...

    def executed(self, graph: str, node: str, executions: "Sequence[Execution]") -> None:
        """Take executions of a node that were timed."""
        ...

    def depth_changed(self, graph: str, node: str, points: Sequence[tuple[float, int]]) -> None:
        """Take how many items were in the inbox of a node, and when, in seconds of `time.perf_counter`."""
        ...

    def device_worked(self, work: "DeviceWork") -> None:
        """Take what a device did; on any thread."""
        ...


hosts: "WeakSet[Host]" = WeakSet()
# While a profile is taken: for each thread, by the number that the operating system gives it, graph and name of the
# node that it has worked for last, and its processor time when it began with that.
node_of_thread: dict[int, tuple[tuple[str, str], float]] = {}
# The profiles that are being taken; empty nearly always, which any thread may look at.
running: list[Collector] = []


def begin(collector: Collector) -> None:
    """Tell a collector of all that is opened and closed from now on."""
    running.append(collector)


def end(collector: Collector) -> None:
    """Tell it of nothing more."""
    running.remove(collector)
    if not running:
        node_of_thread.clear()


def scope_opened(scope: "Scope") -> None:
    """Tell the profiles that are being taken of a new scope, whose counters are zero."""
    for collector in tuple(running):
        collector.scope_opened(scope)


def scope_closed(scope: "Scope") -> None:
    """Tell them that a scope counts nothing more."""
    for collector in tuple(running):
        collector.scope_closed(scope)


def scope_vanished(scope: "Scope") -> None:
    """Tell them of a scope that was never closed and is being collected as garbage."""
    for collector in tuple(running):
        collector.scope_vanished(scope)


def reader_opened(reader: "Reader") -> None:
    """Tell them of a new stream."""
    for collector in tuple(running):
        collector.reader_opened(reader)


def reader_closed(reader: "Reader") -> None:
    """Tell them that a stream has ended."""
    for collector in tuple(running):
        collector.reader_closed(reader)


def executed(graph: str, node: str, executions: "Sequence[Execution]") -> None:
    """Tell them of executions of a node that were timed."""
    for collector in tuple(running):
        collector.executed(graph, node, executions)


def depth_changed(graph: str, node: str, points: Sequence[tuple[float, int]]) -> None:
    """Tell them how many items were in the inbox of a node, and when, in seconds of `time.perf_counter`."""
    for collector in tuple(running):
        collector.depth_changed(graph, node, points)


def device_worked(work: "DeviceWork") -> None:
    """Tell them what a device did; callable from any thread."""
    for collector in tuple(running):
        collector.device_worked(work)
