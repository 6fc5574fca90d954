"""The profiles that are being taken now, and the Engines that report to them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec
from weakref import WeakSet

if TYPE_CHECKING:
    from ..counters import SavedSnapshots
    from .records import DeviceSlice, Execution, Host, ProfiledScope, ProfiledStream


P = ParamSpec("P")

# While no profile is taken, a scope that opens or closes reads one empty list, and registers nothing.


class Collector:
    """A profile that is being taken; subclasses override the methods for the events that they need."""

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
        """Take points of an inbox's depth: the moment, in seconds of `time.perf_counter`, and the number of items."""

    def device_worked(self, work: "DeviceSlice") -> None:
        """Take a piece of work of a device, with its times in seconds of `time.perf_counter`; called in any thread."""

    def worker_started(self, began: float, ended: float) -> None:
        """Take the start of a worker process, while no other worker had done any work; called in any thread."""

    def snapshots_saved(self, graph: str, snapshots: "SavedSnapshots") -> None:
        """Take the cost of a part of a snapshot of a call."""


hosts: "WeakSet[Host]" = WeakSet()
# The profiles that are being taken: nearly always empty. Any thread may read it.
running: list[Collector] = []


def begin(collector: Collector) -> None:
    """Report the opening and closing of scopes and streams to a collector from now on."""
    running.append(collector)


def end(collector: Collector) -> None:
    """End the reports to a collector."""
    running.remove(collector)


def report(event: Callable[Concatenate[Collector, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Report an event to each profile that is being taken; callable from any thread.

    Args:
        event: the method of `Collector` that takes the event.
        args: the arguments of the method.
        kwargs: the arguments of the method that are given by name.
    """
    for collector in tuple(running):
        getattr(collector, event.__name__)(*args, **kwargs)
