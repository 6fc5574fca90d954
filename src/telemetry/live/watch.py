"""Watch: what all nodes of this process do between two looks, seen from a thread of its own."""

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from ..profiling import registry
from ..profiling.execution import Execution
from ..profiling.readings import Host, NodeReading, Reader, Scope
from ..profiling.sums import Sums
from ..profiling.timelines.device_work import DeviceWork
from ..profiling.verdicts.evidence import Evidence, ReaderSum
from ..profiling.verdicts.verdict import find_verdict
from .look import Look
from .nodes import node_looks
from .thread_time import thread_seconds

T = TypeVar("T")

# A collection may change while it is copied. That happens now and then, and not so often in a row.
_ATTEMPTS = 100


class _Since(NamedTuple):
    """A scope at the look before, or when it was opened."""

    seconds: float
    nodes: dict[Hashable, NodeReading]


class _ReaderSince(NamedTuple):
    """A stream at the look before, or when it was opened."""

    seconds: float
    waited_seconds: float


class Watch:
    """Looks at everything, again and again. Nothing is asked of event loops, so one that is blocked is seen as well.

    Scopes that are opened and closed between two looks count: whoever opens and closes them, in whichever thread, says
    so here.
    """

    def __init__(self) -> None:
        # Held for a moment only: event loops wait for it when they open and close scopes. Reentrant, because the
        # garbage collector may call anything while it is held.
        self._lock = threading.RLock()
        self._sums = Sums()  # of the scopes that have closed since
        # Weakly: the scope that the runs of a graph share is gone when the graph is, and nobody says so.
        self._scopes: WeakKeyDictionary[Scope, _Since] = WeakKeyDictionary()
        self._readers: dict[Reader, _ReaderSince] = {}
        self._read: dict[str, tuple[float, float]] = {}
        self._threads: dict[int, float] = {}
        self._looked: float | None = None
        self._ended = False
        registry.begin(self)

    def look(self) -> Look:
        """Return what has happened since the last look, and what goes on."""
        now, before = perf_counter(), self._looked
        hosts = _settled(lambda: registry.hosts)
        nodes = [reading for host in hosts for reading in self._look_at(host)]
        self._look_at_readers(hosts)
        with self._lock:
            sums, self._sums = self._sums, Sums()
            read, self._read = self._read, {}
        self._looked = now
        seconds = None if before is None else now - before
        readers = tuple(ReaderSum(name, *times) for name, times in read.items())
        evidence = Evidence(sums, seconds or 0.0, self._loop_seconds(hosts), readers)
        verdict = find_verdict(evidence) if seconds and sums.nodes else None
        return Look(os.getpid(), seconds, node_looks(sums, nodes), verdict)

    def end(self) -> None:
        """Look no more."""
        registry.end(self)
        with self._lock:
            self._ended = True
            for host in _settled(lambda: registry.hosts):
                for scope in _settled(host.open_scopes):
                    if self._scopes.pop(scope, None) is not None:
                        host.call_soon(partial(scope.measure, on=False))
            self._readers.clear()

    def scope_opened(self, scope: Scope) -> None:
        """Count what a new scope does, from zero."""
        with self._lock:
            if self._ended:  # meanwhile, in another thread
                return
            self._scopes[scope] = _Since(perf_counter(), {})
        scope.measure(on=True)

    def scope_closed(self, scope: Scope) -> None:
        """Take the last numbers of a scope."""
        with self._lock:
            since = self._scopes.pop(scope, None)
            if since is not None:
                self._sums.add(since.nodes, scope.node_readings(), since.seconds, perf_counter())
        if since is not None:
            scope.measure(on=False)

    def reader_opened(self, reader: Reader) -> None:
        """Count how long the reader of a new stream waits, from zero."""
        with self._lock:
            self._readers[reader] = _ReaderSince(perf_counter(), 0.0)

    def reader_closed(self, reader: Reader) -> None:
        """Take the last number of a stream."""
        with self._lock:
            since = self._readers.pop(reader, None)
            if since is not None:
                self._add_reader(reader, since, perf_counter())

    def executed(self, graph: str, node: str, executions: Sequence[Execution]) -> None:
        """Nothing is asked of single executions."""

    def depth_changed(self, graph: str, node: str, points: Sequence[tuple[float, int]]) -> None:
        """Nothing is asked of the past of an inbox."""

    def device_worked(self, work: DeviceWork) -> None:
        """Nothing is asked of single pieces of work of a device."""

    def _look_at(self, host: Host) -> list[NodeReading]:
        found: list[NodeReading] = []
        for scope in _settled(host.open_scopes):
            readings, now = _settled(scope.node_readings), perf_counter()
            with self._lock:
                since = self._scopes.get(scope)
                if since is not None:
                    self._sums.add(since.nodes, readings, since.seconds, now)
                self._scopes[scope] = _Since(now, {reading.key: reading for reading in readings})
            if since is None:  # it was open before
                host.call_soon(partial(scope.measure, on=True))
            found += readings
        return found

    def _look_at_readers(self, hosts: Iterable[Host]) -> None:
        readers = [reader for host in hosts for reader in _settled(host.open_readers)]
        with self._lock:
            now = perf_counter()
            for reader, since in self._readers.items():
                self._add_reader(reader, since, now)
            self._readers = {reader: _ReaderSince(now, reader.reader_wait_seconds) for reader in readers}

    def _add_reader(self, reader: Reader, since: _ReaderSince, now: float) -> None:
        [name] = _settled(lambda: [reader.name])
        open_seconds, waited_seconds = self._read.get(name, (0.0, 0.0))
        waited = reader.reader_wait_seconds - since.waited_seconds
        self._read[name] = open_seconds + now - since.seconds, waited_seconds + waited

    def _loop_seconds(self, hosts: Iterable[Host]) -> float | None:
        """Return how long the busiest of the event loops' threads has run since the last look; None if unknown."""
        before, self._threads = self._threads, {}
        for thread in {host.loop_thread for host in hosts}:
            ran = None if thread is None else thread_seconds(thread)
            if thread is not None and ran is not None:
                self._threads[thread] = ran
        return max((ran - before[thread] for thread, ran in self._threads.items() if thread in before), default=None)


def _settled(read: Callable[[], Iterable[T]]) -> list[T]:
    """Return what `read` gives. The threads whose collections it reads go on meanwhile, and do not lock them for us."""
    for _ in range(_ATTEMPTS):
        try:
            return list(read())
        except RuntimeError:  # "changed size during iteration"
            pass
    return list(read())
