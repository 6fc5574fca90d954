"""Watch: what all nodes of this process do between two looks, seen from a thread of its own."""

import os
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import NamedTuple

from ..profiling import registry
from ..profiling.execution import Execution
from ..profiling.open_scopes import OpenScopes, settled
from ..profiling.readings import Host, Reader, Scope
from ..profiling.thread_time import thread_seconds
from ..profiling.timelines.device_work import DeviceWork
from ..profiling.verdicts.evidence import Evidence, ReaderSum
from ..profiling.verdicts.verdict import find_verdict
from .look import Look
from .nodes import node_looks


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
        self._scopes = OpenScopes()
        self._lock = self._scopes.lock
        self._readers: dict[Reader, _ReaderSince] = {}
        self._read: dict[str, tuple[float, float]] = {}
        self._threads: dict[int, float] = {}
        self._looked: float | None = None
        registry.begin(self)

    def look(self) -> Look:
        """Return what has happened since the last look, and what goes on."""
        now, before = perf_counter(), self._looked
        hosts = settled(lambda: registry.hosts)
        nodes = [reading for host in hosts for _, readings in self._scopes.look(host) for reading in readings]
        self._look_at_readers(hosts)
        with self._lock:
            sums = self._scopes.taken()
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
        self._scopes.end()
        with self._lock:
            self._readers.clear()

    def scope_opened(self, scope: Scope) -> None:
        """Count what a new scope does, from zero."""
        self._scopes.opened(scope)

    def scope_closed(self, scope: Scope) -> None:
        """Take the last numbers of a scope."""
        self._scopes.closed(scope)

    def scope_vanished(self, scope: Scope) -> None:
        """Take the last numbers of a scope that is being collected as garbage; in any thread, at any moment."""
        self._scopes.vanished(scope)

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

    def _look_at_readers(self, hosts: Iterable[Host]) -> None:
        readers = [reader for host in hosts for reader in settled(host.open_readers)]
        with self._lock:
            now = perf_counter()
            for reader, since in self._readers.items():
                self._add_reader(reader, since, now)
            self._readers = {reader: _ReaderSince(now, reader.reader_wait_seconds) for reader in readers}

    def _add_reader(self, reader: Reader, since: _ReaderSince, now: float) -> None:
        [name] = settled(lambda: [reader.name])
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
