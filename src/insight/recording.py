"""Profile: it records the work of nodes inside a `with` block, and says which node limits."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

from ..telemetry import observation
from ..telemetry.observation import Execution, SavedSnapshots, StepSnapshot
from ..telemetry.tables import (
    UNKNOWN,
    Column,
    Rendered,
    Table,
    by_graph,
    count,
    duration,
    milliseconds,
    seconds,
    table_with_figures,
)  # fmt: skip
from ..telemetry.text import printable
from .limits import Verdict, is_held
from .sums import CriticalPath, Evidence, NodeProfile, node_profile_of
from .timeline import Timeline, TimelineRecorder, union_seconds, write_whole
from .verdict import Prediction, find_verdict, predict
from .watching import OpenScopes, settled

_COLUMNS = (
    Column("node", is_number=False), Column("done"), Column("failed"), Column("busy"), Column("mean"), Column("p50"),
    Column("p99"), Column("queue wait"), Column("occupancy"), Column("blocked"), Column("p90"),
)  # fmt: skip


class _Recording(OpenScopes):
    """The collector that the engine reports to while a profile is taken.

    Attributes:
        timeline: which node worked on which item, and when.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began = perf_counter()
        self._starts: list[Execution] = []
        self._final: Evidence | None = None
        self.timeline = TimelineRecorder(self._began)

    def worker_started(self, began: float, ended: float) -> None:
        """Keep when a worker process started; callable from any thread."""
        self._starts.append((began, ended, None, None))

    def begin(self) -> None:
        """Begin to record: the engine reports to this object from now on."""
        observation.begin(self)
        observation.begin(self.timeline)
        for host in settled(lambda: observation.hosts):
            self.look(host)

    def end(self) -> None:
        """Take the last numbers."""
        with self.lock:
            try:
                self._final = self.evidence()  # before reports end: it still reports executions for the timeline
            finally:
                observation.end(self)
                observation.end(self.timeline)
                super().end()
            # An application may keep a profile, which must not keep scopes alive.
            self.taken()

    def evidence(self) -> Evidence:
        """Return the evidence so far, from ended and from open scopes."""
        if self._final is not None:
            return self._final
        with self.lock:
            now = perf_counter()
            sums = self.sums()
            clocks = self.loop_seconds(), self.core_wait_seconds()
        evidence = replace(
            self.evidence_of(sums, now - self._began, *clocks),
            covered_seconds=self.timeline.covered_seconds(sums.on_devices()),
            starting_seconds=union_seconds(self._starts, self._began),
        )
        # The search for disturbed nodes in the timeline takes a while: it runs only if a node seems to hold the loop.
        return replace(evidence, disturbed=self.timeline.disturbed()) if is_held(evidence) else evidence


class Profile(Rendered):
    """A profile of all nodes of the process, taken by `telemetry.profile()`.

    `print`, rich and notebooks show it as a table. Inside of its `with` block, it covers the time up to now; after the
    block, the time of the block.
    """

    def __init__(self, evidence: Callable[[], Evidence], recorder: TimelineRecorder) -> None:
        self._evidence = evidence
        self._recorder = recorder

    @property
    def elapsed_seconds(self) -> float:
        """How long the profile has been taken so far, or was taken, in seconds."""
        return self._evidence().elapsed_seconds

    @property
    def nodes(self) -> tuple[NodeProfile, ...]:
        """The nodes of all scopes that were open during the profile; nodes of one graph in topological order."""
        evidence = self._evidence()
        return tuple(node_profile_of(evidence, node) for node in evidence.sums.nodes.values())

    @property
    def steps(self) -> tuple[StepSnapshot, ...]:
        """The last snapshot of each node, in the order of `nodes`: where the node runs, and which nodes wait for it."""
        return tuple(node.step for node in self._evidence().sums.nodes.values())

    @property
    def verdict(self) -> Verdict:
        """The verdict: which node limits, why, and what helps."""
        return find_verdict(self._evidence())

    @property
    def timeline(self) -> Timeline:
        """The newest events: which node or device worked on which item, and when; and how full inboxes were."""
        return self._recorder.timeline()

    @property
    def critical_path(self) -> CriticalPath | None:
        """The chain of nodes of a graph that takes longest in one run; None if nothing ran.

        If several graphs ran, it is the path of the graph that took the most time.
        """
        sums = self._evidence().sums
        paths = sums.critical_paths.values()
        return max(paths, key=lambda path: path.seconds * sums.items(path.graph), default=None)

    def what_if(self, node: str, *, concurrency: int, graph: str | None = None) -> Prediction:
        """Predict the throughput with another number of places of one node.

        Each bounded resource was used for a share of the time: the places of nodes, pools, the event loop, a device,
        the window of a stream, its reader and its source. With more places, the node's places are used for a smaller
        share; the resource that is then used most bounds the throughput. This is operational analysis; waits are not
        simulated.

        Args:
            node: the name of the node, as drawn.
            concurrency: how many items the node may handle at a time; for a node in a `map_each` over a list, how many
                in each run of the `map_each`.
            graph: the name of its graph; needed if several graphs have a node of that name.

        Returns:
            The prediction, whose `str()` is a sentence.

        Raises:
            ValueError: no such node ran, or it has no places of its own.
        """
        return predict(self._evidence(), node, concurrency, graph)

    def to_perfetto(self, path: "str | os.PathLike[str]") -> None:
        """Write the timeline as a trace that Perfetto (https://ui.perfetto.dev) and Chrome open.

        Each node and each device is a track, or several tracks if its executions overlap. An item is a flow through the
        tracks, and the depths of inboxes are counters. The trace has the newest events, at most some 50 MB of them; its
        "otherData" says how many older events are missing.

        Args:
            path: the file; it is replaced once the new one is complete.

        Raises:
            OSError: the file cannot be written.
        """
        from ..studio.perfetto import trace

        timeline = self.timeline
        facts = {
            "profile": f"penstock, {duration(self.elapsed_seconds)}", "verdict": str(self.verdict),
            "dropped_slices": timeline.dropped, "dropped_device_slices": timeline.dropped_device_slices,
            "dropped_depths": timeline.dropped_depths,
        }  # fmt: skip
        write_whole(path, trace(timeline, facts))

    def to_html(self, path: "str | os.PathLike[str]") -> None:
        """Write the profile as one self-contained page: the graph, a table of the nodes, and the timeline.

        The timeline has the newest events, at most some 2 MB of them, and says how many older events are missing.

        Args:
            path: the file; it is replaced once the new one is complete.

        Raises:
            OSError: the file cannot be written.
        """
        from ..studio.page.page import page_of

        evidence = self._evidence()  # once, so that all parts of the page cover the same time
        write_whole(path, page_of(Profile(lambda: evidence, self._recorder)))

    def _table(self) -> Table:
        nodes, steps, snapshots = self.nodes, self.steps, self._evidence().sums.snapshots
        facts = [("profile", f"over {duration(self.elapsed_seconds)}"), ("verdict", str(self.verdict))]
        facts += [("snapshots", _cost(graph, cost)) for graph, cost in snapshots.items()]
        of_places = [[one for one in step.counters.figures if one.place] for step in steps]
        found = ((nodes[at].graph, _row(nodes[at]), of_places[at]) for at in by_graph([node.graph for node in nodes]))
        return table_with_figures(tuple(facts), _COLUMNS, found)


@contextmanager
def profile() -> Generator[Profile, None, None]:
    """Take a profile of everything that this process runs inside of the `with` block.

    All streams, deployments and runs of the process count, whichever task opens them. A scope that was open before
    counts from the beginning of the block; a scope that goes on afterwards, up to its end. Profiles may be nested.

    Without the block, nothing is measured. Inside, executions are timed and inboxes are watched, which slows down nodes
    that do hardly any work by a few percent. If a node runs very often, only a sample of its executions is timed.

    Returns:
        A context manager, whose value is the `Profile`; it can be read inside of the block and after it.
    """
    recording = _Recording()
    recording.begin()
    try:
        yield Profile(recording.evidence, recording.timeline)
    finally:
        recording.end()


def _cost(graph: str, snapshots: SavedSnapshots) -> str:
    """Return a sentence about the snapshots of a graph."""
    told = f"{count(snapshots.saved)} of {printable(graph)}"
    if snapshots.saved:
        mean = snapshots.bytes / snapshots.saved / 1e6
        told += (
            f", {mean:.3g} MB and {milliseconds(snapshots.write_seconds / snapshots.saved)} beside the pipeline each"
        )
    told += (
        f"; for copies, steps waited {duration(snapshots.copy_seconds)}, "
        f"the reader {duration(snapshots.reader_seconds)}"
    )
    told += f"; at most {count(snapshots.most_values)} values apart" if snapshots.most_values else ""
    told += f"; {count(snapshots.skipped)} left out" if snapshots.skipped else ""
    return told + (f"; {count(snapshots.failed)} failed" if snapshots.failed else "")


def _row(node: NodeProfile) -> tuple[str, ...]:
    return (
        node.node, count(node.count), count(node.errors),
        UNKNOWN if node.busy_share is None else f"{node.busy_share:.0%}", milliseconds(node.mean_seconds),
        milliseconds(node.p50_seconds), milliseconds(node.p99_seconds), milliseconds(node.mean_queue_wait_seconds),
        f"{node.occupancy:.0%}", seconds(node.blocked_seconds), milliseconds(node.p90_seconds),
    )  # fmt: skip
