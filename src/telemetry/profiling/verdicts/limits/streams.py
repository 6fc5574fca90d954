"""Streams: who reads them, their sources, and what may be in flight."""

from collections.abc import Iterator
from typing import Final

from ...loop_watch import WindowSum
from ...sums import Name
from ..critical_path import critical_paths
from ..evidence import Evidence, ReaderSum
from .limit import Limit, Verdict

# Who reads last is starved unless it limits itself: if items are always there, nothing before it can be the reason.
_NEVER_WAITS: Final = 0.9
SOONER: Final = "have the source give items sooner: read ahead, or in several tasks"


def streams(evidence: Evidence) -> Iterator[Limit]:
    """Yield readers, sources and what may be in flight."""
    for reader in evidence.readers:
        yield _reader(reader)
        window = reader.window
        if window is not None and window.seconds:
            yield _source(reader, window)
            yield from _in_flight(evidence, reader, window)


def _reader(reader: ReaderSum) -> Limit:
    used = reader.busy_share
    reason = f"the reader of {reader.name} limits: it waited for items for only {1 - used:.0%} of the time"
    remedy = "do less for each item outside of the graph, or make a node of it"
    verdict = Verdict(None, reason, remedy, limit="reader")
    return Limit(1.0, 6, verdict) if used >= _NEVER_WAITS else Limit(used, 0, verdict)


def _source(reader: ReaderSum, window: WindowSum) -> Limit:
    used = min(window.asking_seconds / window.seconds, 1.0)
    reason = f"the source limits: the stream of {reader.name} waits for it for {used:.0%} of the time"
    return Limit(used, 0, Verdict(None, reason, SOONER, limit="source"))


def _in_flight(evidence: Evidence, reader: ReaderSum, window: WindowSum) -> Iterator[Limit]:
    """Yield the places of a stream: by Little's law, items a second times what each takes without any queue.

    To that belongs what it waits for in its turn, because another one before it takes longer.
    """
    path = critical_paths(evidence.sums.nodes).get(reader.name)
    if path is None or not path.seconds:
        return
    running = path.seconds * evidence.sums.items(reader.name) / evidence.elapsed_seconds
    behind = window.behind_seconds / window.seconds
    used = min((running + behind) / window.size, 1.0)
    names: list[Name] = [(reader.name, node) for node in path.nodes]
    nodes = evidence.sums.nodes
    if behind <= running or not window.ordered:
        name = max(names, key=lambda each: nodes[each].mean_seconds)
        reason = f"the {window.size:,} items in flight (max_in_flight=) are busy for {used:.0%} of the time"
        yield Limit(used, 2, Verdict(name[1], reason, "raise max_in_flight=", name[0], "in_flight"))
        return
    of_graph = [name for name in nodes if name[0] == reader.name]
    graph, node = max(of_graph, key=lambda each: nodes[each].spread_seconds)
    reason = (
        f"its slow items hold up the order of the results: {behind / window.size:.0%} of the {window.size:,} items in "
        "flight have ended, and wait for one before them"
    )
    remedy = "take results as they come (ordered=False), or raise max_in_flight="
    yield Limit(used, 2, Verdict(node, reason, remedy, graph, "order"))
