"""What a look says of each node: what it did, added up over scopes, and what all of its scopes show now."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from ..profiling.node_profile import node_profile_of
from ..profiling.readings import NodeReading
from ..profiling.sums import Name, Sums
from .look import NodeLook


@dataclass
class _Now:
    """A node in all scopes that are open."""

    runs_on: str
    completed: int = 0
    failed: int = 0
    depth: int = 0
    capacity: int | None = 0
    # By places, because scopes may share them.
    in_flight: dict[Hashable, tuple[int, int | None]] = field(default_factory=dict[Hashable, tuple[int, int | None]])

    def add(self, reading: NodeReading) -> None:
        self.completed += reading.completed
        self.failed += reading.failed
        self.depth += reading.inbox_depth
        unbounded = self.capacity is None or reading.inbox_capacity is None
        self.capacity = None if unbounded else (self.capacity or 0) + (reading.inbox_capacity or 0)
        own = reading.places[0] if reading.places else None
        self.in_flight[reading.key if own is None else own.key] = reading.in_flight, None if own is None else own.limit

    @property
    def limit(self) -> int | None:
        limits = [limit for _, limit in self.in_flight.values()]
        return None if None in limits or not limits else sum(limit or 0 for limit in limits)


def node_looks(sums: Sums, readings: Iterable[NodeReading]) -> tuple[NodeLook, ...]:
    """Return what there is to say of each node, those of one graph together.

    Args:
        sums: what they did since the look before.
        readings: what the counters of all that are open say now.
    """
    found: dict[Name, _Now] = {}
    for reading in readings:
        found.setdefault((reading.graph, reading.node), _Now(reading.runs_on)).add(reading)
    for name, node in sums.nodes.items():  # also of what has ended meanwhile
        found.setdefault(name, _Now(node.reading.runs_on))
    graphs = {graph: place for place, graph in enumerate(dict.fromkeys(graph for graph, _ in found))}
    return tuple(_look_of(name, found[name], sums) for name in sorted(found, key=lambda name: graphs[name[0]]))


def _look_of(name: Name, now: _Now, sums: Sums) -> NodeLook:
    node = sums.nodes.get(name)
    share = 0.0 if node is None else node_profile_of(sums, node).busy_share
    if share is not None and now.limit is not None:
        share = min(share, 1.0)  # the time of an item counts when it leaves, so there may be more than there was time
    return NodeLook(
        *name,
        now.runs_on,
        0 if node is None else node.completed,
        0 if node is None else node.failed,
        now.completed,
        now.failed,
        share,
        now.depth,
        now.capacity,
        sum(in_flight for in_flight, _ in now.in_flight.values()),
        now.limit,
    )
