"""Profile: it records what nodes do inside a `with`, and says which of them limits."""

import asyncio
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import perf_counter, thread_time
from typing import NamedTuple

from ..counters import SavedCuts
from ..rendered import Rendered
from ..tables import UNKNOWN, Column, Table, by_graph, count, duration, milliseconds, seconds
from ..text import printable
from . import collectors
from .limits import Verdict, is_held
from .perfetto import trace
from .records import DeviceWork, Execution, ProfiledScope, ProfiledStream
from .sums import CriticalPath, Evidence, NodeProfile, ReaderSum, critical_paths, node_profile_of
from .timeline import Timeline, write_whole
from .verdict import Prediction, find_verdict, predict
from .watching import GilWatch, LoopWatch, OpenScopes, running_loop, settled, thread_seconds

_COLUMNS = (
    Column("node", is_number=False),
    Column("done"),
    Column("failed"),
    Column("busy"),
    Column("mean"),
    Column("p50"),
    Column("p99"),
    Column("queue wait"),
    Column("occupancy"),
    Column("blocked"),
    Column("p90"),
)


class _ReaderLook(NamedTuple):
    seconds: float
    waited_seconds: float


class _Recording:
    """The collector that the engine reports to while a profile is taken.

    Attributes:
        timeline: which node worked on which item, and when.
        cuts: what cuts have cost, by graph.
    """

    def __init__(self) -> None:
        self._scopes = OpenScopes()
        self._readers: dict[ProfiledStream, _ReaderLook] = {}
        self._read: dict[str, tuple[float, float]] = {}
        self._began = perf_counter()
        # The processor time of threads at the beginning, and which of them run event loops.
        self._threads: dict[int, float] = {threading.get_native_id(): thread_time()}
        self._loop_threads: set[int] = set()
        self._watches: dict[asyncio.AbstractEventLoop, LoopWatch] = {}
        self._gil_watch = GilWatch(self._loop_threads)
        self._final: Evidence | None = None
        self.timeline = Timeline(self._began)
        self.cuts: dict[str, SavedCuts] = {}

    def scope_opened(self, scope: ProfiledScope) -> None:
        """Count what a new scope does, from zero."""
        if self._scopes.opened(scope):
            self._watch_loop_of(scope)

    def scope_closed(self, scope: ProfiledScope) -> None:
        """Take the last numbers of a scope."""
        if self._scopes.closed(scope):
            with self._scopes.lock:
                for watch in self._watches.values():
                    watch.scopes.discard(scope)

    def scope_vanished(self, scope: ProfiledScope) -> None:
        """Take the last numbers of a scope that is being collected as garbage; in any thread, at any moment."""
        self._scopes.vanished(scope)

    def reader_opened(self, reader: ProfiledStream) -> None:
        """Count how long the reader of a new stream waits, from zero."""
        with self._scopes.lock:
            self._readers[reader] = _ReaderLook(perf_counter(), reader.reader_wait_seconds)
            self._watch(reader.loop).readers.add(reader)

    def reader_closed(self, reader: ProfiledStream) -> None:
        """Take the last number of a stream."""
        with self._scopes.lock:
            look = self._readers.pop(reader, None)
            for watch in self._watches.values():
                watch.readers.discard(reader)
            if look is not None:
                _add_reader(self._read, reader, look)

    def executed(self, graph: str, node: str, executions: Sequence[Execution]) -> None:
        """Keep executions for the timeline."""
        self.timeline.add_executions(graph, node, executions)

    def depth_changed(self, graph: str, node: str, points: Sequence[tuple[float, int]]) -> None:
        """Keep how many items were in an inbox for the timeline."""
        self.timeline.add_depths(graph, node, points)

    def device_worked(self, work: DeviceWork) -> None:
        """Keep a piece of work of a device for the timeline; on any thread."""
        self.timeline.add_device_work(work)

    def cuts_saved(self, graph: str, cuts: SavedCuts) -> None:
        """Add what cuts have cost."""
        self.cuts[graph] = self.cuts.get(graph, SavedCuts()).plus(cuts)

    def begin(self) -> None:
        """Begin to record: the engine reports to this object from now on."""
        collectors.begin(self)
        self._gil_watch.start()
        for host in settled(lambda: collectors.hosts):
            if host.loop is None or host.loop_thread is None:
                continue  # nothing has run there yet
            ran = thread_seconds(host.loop_thread)
            with self._scopes.lock:
                self._loop_threads.add(host.loop_thread)
                if ran is not None:
                    self._threads.setdefault(host.loop_thread, ran)
                for scope, _ in self._scopes.look(host):
                    self._watch(host.loop).scopes.add(scope)
                for reader in settled(host.open_readers):
                    self._readers[reader] = _ReaderLook(perf_counter(), reader.reader_wait_seconds)
                    self._watch(reader.loop).readers.add(reader)

    def end(self) -> None:
        """Take the last numbers."""
        self._gil_watch.stop()
        with self._scopes.lock:
            for watch in self._watches.values():
                watch.stop()
            try:
                self._final = self.evidence()  # it still brings executions for the timeline
            finally:
                collectors.end(self)
                self._scopes.end()
            # A profile that is kept must not keep alive the scopes that it has seen.
            self._scopes.taken()
            self._readers.clear()
            self._watches.clear()

    def evidence(self) -> Evidence:
        """Return the evidence so far, of scopes that have ended and of those that are open."""
        if self._final is not None:
            return self._final
        with self._scopes.lock:
            now = perf_counter()
            sums = self._scopes.sums()
            read = dict(self._read)
            for reader, reader_look in self._readers.items():
                _add_reader(read, reader, reader_look)
            cpu_seconds = self._loop_seconds()
            watches = list(self._watches.values())
        windows = {name: window for watch in watches for name, window in watch.windows.items()}
        readers = tuple(ReaderSum(name, *times, windows.get(name)) for name, times in read.items())
        looked = max(watches, key=lambda watch: watch.seconds, default=None)
        gil = self._gil_watch.use()
        late, delay_seconds = (0.0, 0.0) if looked is None else (looked.late_share, looked.delay_seconds)
        late = max(0.0, late - gil.beside_loop)  # a loop that waits for the GIL is late as well
        on_devices = {
            name for name, node in sums.nodes.items() if node.timed.outside.device_seconds and node.reading.gathers
        }
        covered = self.timeline.covered_seconds(on_devices)
        evidence = Evidence(
            sums, now - self._began, cpu_seconds, readers, late, delay_seconds, covered_seconds=covered, gil=gil
        )
        # Only if needed: it takes a while to look through the timeline, which only shows which nodes do not hold the
        # loop.
        return replace(evidence, disturbed=self.timeline.disturbed()) if is_held(evidence) else evidence

    def _loop_seconds(self) -> float | None:
        """Return how long the busiest of the event loops' threads has run; None if unknown, as it has ended."""
        here = threading.get_native_id()
        ran = {thread: thread_time() if thread == here else thread_seconds(thread) for thread in self._loop_threads}
        return max(
            (
                seconds - self._threads[thread]
                for thread, seconds in ran.items()
                if seconds is not None and thread in self._threads
            ),
            default=None,
        )

    def _watch_loop_of(self, scope: ProfiledScope) -> None:
        """Look at the running loop from now on, and at the time of its thread."""
        thread = threading.get_native_id()
        with self._scopes.lock:
            self._loop_threads.add(thread)
            self._threads.setdefault(thread, thread_time())
            self._watch(asyncio.get_running_loop()).scopes.add(scope)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> LoopWatch:
        """Return the watch of a loop, and start it."""
        watch = self._watches.get(loop)
        if watch is None:
            watch = self._watches[loop] = LoopWatch(loop)
        if running_loop() is loop:
            watch.start()
        else:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(watch.start)
        return watch


class Profile(Rendered):
    """A profile of all nodes of the process, taken by `telemetry.profile()`.

    It shows itself as a table: printed, with rich, and in a notebook. Inside of its `with`, it covers the time up to
    now; after it, the time of the block.
    """

    def __init__(self) -> None:
        self._recording = _Recording()

    @property
    def elapsed_seconds(self) -> float:
        """How long the profile has been taken so far, or was taken, in seconds."""
        return self._recording.evidence().elapsed_seconds

    @property
    def nodes(self) -> tuple[NodeProfile, ...]:
        """The nodes of all scopes that were open during the profile; nodes of one graph in topological order."""
        evidence = self._recording.evidence()
        return tuple(node_profile_of(evidence, node) for node in evidence.sums.nodes.values())

    @property
    def verdict(self) -> Verdict:
        """The verdict: which node limits, why, and what helps."""
        return find_verdict(self._recording.evidence())

    @property
    def critical_path(self) -> CriticalPath | None:
        """The chain of nodes of a graph that takes longest in one run; None if nothing ran.

        If several graphs ran, it is that of the graph in which most time was spent.
        """
        sums = self._recording.evidence().sums
        paths = critical_paths(sums.nodes).values()
        return max(paths, key=lambda path: path.seconds * sums.items(path.graph), default=None)

    def what_if(
        self, node: str, *, graph: str | None = None, speedup: float = 1.0, concurrency: int | None = None
    ) -> Prediction:
        """Predict the throughput after a change of one node.

        Each bounded thing was used for a share of the time: the places of nodes, pools, the event loop, a device, the
        window of a stream, its reader and its source. The change alters the part of the node in each share; the thing
        that is then used most bounds the throughput. This is operational analysis; waits are not simulated.

        Args:
            node: the name of the node, as drawn.
            graph: the name of its graph; needed if several graphs have a node of that name.
            speedup: how many times as fast the handler of the node becomes.
            concurrency: how many items the node may handle at a time.

        Returns:
            The prediction, whose `str()` is a sentence.

        Raises:
            ValueError: no such node ran, or it cannot be changed in that way.
        """
        return predict(self._recording.evidence(), node, graph=graph, speedup=speedup, concurrency=concurrency)

    def to_perfetto(self, path: "str | os.PathLike[str]") -> None:
        """Write the timeline as a trace that Perfetto (https://ui.perfetto.dev) and Chrome open.

        Each node is a track, or several if its executions overlap; so is each device. An item is a flow through the
        tracks, and the depths of inboxes are counters. The trace has the newest events, at most some 50 MB of them, and
        says under "otherData" how many older ones it lacks.

        Args:
            path: the file; it is replaced once the new one is complete.

        Raises:
            OSError: the file cannot be written.
        """
        timeline = self._recording.timeline
        facts = {
            "profile": f"penstock, {duration(self.elapsed_seconds)}",
            "verdict": str(self.verdict),
            "dropped_slices": timeline.dropped,
            "dropped_device_slices": timeline.dropped_device_slices,
            "dropped_depths": timeline.dropped_depths,
        }
        write_whole(path, trace(timeline, facts))

    def to_html(self, path: "str | os.PathLike[str]") -> None:
        """Write the profile as one self-contained page: the graph, a table of the nodes, and the timeline.

        The timeline has the newest events, at most some 2 MB of them, and says how many older ones it lacks.

        Args:
            path: the file; it is replaced once the new one is complete.

        Raises:
            OSError: the file cannot be written.
        """
        from .page.graph_picture import ProfiledNode  # what most programs never need
        from .page.page import Shown, page

        evidence, verdict = self._recording.evidence(), self.verdict
        sums = evidence.sums
        nodes = [
            ProfiledNode(
                node_profile_of(evidence, node), node.reading, f"node-{number}", (verdict.graph, verdict.node) == name
            )
            for number, (name, node) in enumerate(sums.nodes.items(), start=1)
        ]  # fmt: skip
        write_whole(path, page(Shown(nodes, verdict, self._recording.timeline, evidence.elapsed_seconds)))

    def _table(self) -> Table:
        nodes = self.nodes
        facts = [("profile", f"over {duration(self.elapsed_seconds)}"), ("verdict", str(self.verdict))]
        facts += [("cuts", _cost(graph, cuts)) for graph, cuts in self._recording.cuts.items()]
        ordered = [nodes[at] for at in by_graph([node.graph for node in nodes])]
        return Table(tuple(facts), _COLUMNS, tuple(map(_row, ordered)), headings=tuple(node.graph for node in ordered))


@contextmanager
def profile() -> Generator[Profile, None, None]:
    """Take a profile of everything that this process runs inside of the `with`.

    All streams, deployments and runs of the process count, whichever task opens them. A scope that was open before
    counts from the beginning of the block; a scope that goes on afterwards, up to its end. Profiles may be nested.

    It costs nothing before the block. Inside, executions are timed and inboxes are watched, which slows down nodes that
    do hardly anything by a few percent; of nodes that run very often, only a sample is timed.

    Returns:
        A context manager, whose value is the `Profile`; it can be read inside of the block and after it.
    """
    taken = Profile()
    taken._recording.begin()
    try:
        yield taken
    finally:
        taken._recording.end()


def _add_reader(read: dict[str, tuple[float, float]], reader: ProfiledStream, look: _ReaderLook) -> None:
    open_seconds, waited_seconds = read.get(reader.name, (0.0, 0.0))
    read[reader.name] = (
        open_seconds + perf_counter() - look.seconds,
        waited_seconds + reader.reader_wait_seconds - look.waited_seconds,
    )


def _cost(graph: str, cuts: SavedCuts) -> str:
    """Return a sentence about the cuts of a graph."""
    told = f"{count(cuts.saved)} of {printable(graph)}"
    if cuts.saved:
        mean = cuts.bytes / cuts.saved / 1e6
        told += f", {mean:.3g} MB and {milliseconds(cuts.write_seconds / cuts.saved)} beside the pipeline each"
    told += f"; steps waited {duration(cuts.copy_seconds)} for copies"
    told += f"; {count(cuts.skipped)} left out" if cuts.skipped else ""
    return told + (f"; {count(cuts.failed)} failed" if cuts.failed else "")


def _row(node: NodeProfile) -> tuple[str, ...]:
    return (
        node.node,
        count(node.count),
        count(node.errors),
        UNKNOWN if node.busy_share is None else f"{node.busy_share:.0%}",
        milliseconds(node.mean_seconds),
        milliseconds(node.p50_seconds),
        milliseconds(node.p99_seconds),
        milliseconds(node.mean_queue_wait_seconds),
        f"{node.occupancy:.0%}",
        seconds(node.blocked_seconds),
        milliseconds(node.p90_seconds),
    )
