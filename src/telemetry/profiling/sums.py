"""What all scopes did while a profile was taken, added up by graph and node."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from ..counters import ActorStatistics, counted, total
from .readings import Bound, NodeReading, Places, TimedReading

Name = tuple[str, str]  # graph and node


@dataclass
class NodeSum:
    """One node, over all scopes.

    Attributes:
        reading: the last of its readings: where it runs, and who waits for it.
        counters: what was counted while the profile was taken.
        timed: what is only counted meanwhile.
        queue_seconds: how long its inboxes were watched, together.
        open_seconds: how long its scopes were open, together.
        places: the keys of the groups whose places its items take.
    """

    reading: NodeReading
    counters: ActorStatistics
    timed: TimedReading = field(default_factory=TimedReading)
    queue_seconds: float = 0.0
    open_seconds: float = 0.0
    places: dict[Hashable, None] = field(default_factory=dict[Hashable, None])

    @property
    def ended(self) -> int:
        """Items that left it."""
        return self.counters.completed + self.counters.failed

    @property
    def busy_seconds(self) -> float | None:
        """Time in its handler, over all items; None if it is not timed."""
        return self.counters.busy_seconds

    @property
    def put_wait_seconds(self) -> float:
        """Time that items waited for room in its inbox, over all items."""
        return self.counters.inbox.put_wait_seconds

    @property
    def blocked_seconds(self) -> float:
        """Time that items which it had finished waited for room in the inboxes after it."""
        return self.timed.blocked_seconds

    @property
    def compile_seconds(self) -> float:
        """Time that its items waited for programs to be compiled."""
        return self.timed.device.compile_seconds

    @property
    def transfer_seconds(self) -> float:
        """Time that its items waited for arrays on their way to a device, from another one or back."""
        return self.timed.device.transfer_seconds

    @property
    def device_seconds(self) -> float:
        """Time that devices computed for its items."""
        return self.timed.device.compute_seconds

    @property
    def mean_seconds(self) -> float:
        """Mean time that an item takes in its handler; 0 if there was none, or it is not timed."""
        return (self.busy_seconds or 0.0) / max(1, self.ended)

    @property
    def spread_seconds(self) -> float:
        """How much longer its slowest items take than half of them do."""
        return (self.timed.durations.quantile(1.0) or 0.0) - (self.timed.durations.quantile(0.5) or 0.0)

    @property
    def occupancy(self) -> float:
        """Share of the time that items waited in its inbox."""
        return self.timed.queue.occupied_seconds / self.queue_seconds if self.queue_seconds else 0.0

    @property
    def inbox_full_share(self) -> float:
        """Share of the time that its inbox was full."""
        return self.timed.queue.full_seconds / self.queue_seconds if self.queue_seconds else 0.0

    def share_of_busy(self, seconds: float) -> float | None:
        """Return how much of its busy time this is, from 0 to 1; None if that is not known, or there is none.

        What a device does for a result that was handed on before it was ready is busy time as well.
        """
        total = max(self.busy_seconds or 0.0, sum(self.timed.device))
        return None if self.busy_seconds is None or not total else seconds / total


@dataclass
class Group:
    """Places that some nodes share, over all scopes.

    Attributes:
        bound: what makes them that many.
        limit: how many in one scope.
        is_pool: whether they are those of a pool, and not the nodes' own.
        busy: for each of the nodes, how long its items were in its handler.
        place_seconds: places times the seconds that they were there.
    """

    bound: Bound
    limit: int
    is_pool: bool
    busy: dict[Name, float] = field(default_factory=dict[Name, float])
    place_seconds: float = 0.0
    began: float | None = None  # of places that outlive scopes: scopes that overlap do not have more of them

    @property
    def utilisation(self) -> float:
        """How much of the places was used, from 0 to 1."""
        return min(sum(self.busy.values()) / self.place_seconds, 1.0) if self.place_seconds else 0.0


class Sums:
    """Adds up what scopes did."""

    def __init__(self) -> None:
        self.nodes: dict[Name, NodeSum] = {}
        self.groups: dict[Hashable, Group] = {}

    def add(
        self, before: dict[Hashable, NodeReading], after: Iterable[NodeReading], began: float, ended: float
    ) -> None:
        """Add what a scope did between two looks at it; nothing, if nothing left any of its nodes.

        Args:
            before: the first look, by key; without what is new since.
            after: the second.
            began: when the first was, in seconds.
            ended: when the second was.
        """
        after = list(after)
        if not any(_ended(reading) > _ended(before.get(reading.key)) for reading in after):
            return
        sharing: dict[Hashable, set[Name]] = {}
        for reading in after:
            for places in reading.places:
                sharing.setdefault(places.key, set()).add(reading.name)
        known: set[Hashable] = set()
        opened: set[Name] = set()
        for reading in after:
            name = reading.name
            earlier = _comparable(before.get(reading.key), reading)
            done = counted(reading.counters, None if earlier is None else earlier.counters)
            node = self.nodes.get(name)
            if node is None:
                node = self.nodes[name] = NodeSum(reading, done)
            else:
                node.reading, node.counters = reading, total((node.counters, done))
            if reading.timed is not None:
                node.queue_seconds += ended - began
                node.timed = node.timed.plus(reading.timed, None if earlier is None else earlier.timed)
            if name not in opened:
                opened.add(name)
                node.open_seconds += ended - began
            for index, places in enumerate(reading.places):
                key = places.key if places.is_shared else (places.bound, frozenset(sharing[places.key]))
                group = self.groups.setdefault(key, Group(places.bound, places.limit, is_pool=index > 0))
                node.places[key] = None
                group.busy[name] = group.busy.get(name, 0.0) + (done.busy_seconds or 0.0)
                if places.key not in known:
                    known.add(places.key)
                    _add_time(group, places, began, ended)

    def copy(self) -> "Sums":
        """Return the same sums, to which more can be added."""
        twin = Sums()
        twin.nodes = {name: replace(node, places=dict(node.places)) for name, node in self.nodes.items()}
        twin.groups = {key: replace(group, busy=dict(group.busy)) for key, group in self.groups.items()}
        return twin

    def items(self, graph: str) -> int:
        """Return how many items went through a graph: those that ended in the node that most of them reached."""
        return max((node.ended for name, node in self.nodes.items() if name[0] == graph), default=0)

    def own_places(self, node: NodeSum) -> list[Group]:
        """Return the groups of places that are a node's own, not those of a pool."""
        return [group for group in map(self.groups.__getitem__, node.places) if not group.is_pool]


def _ended(reading: NodeReading | None) -> int:
    return 0 if reading is None else reading.counters.completed + reading.counters.failed


def _comparable(before: NodeReading | None, now: NodeReading) -> NodeReading | None:
    """Return a reading without what has begun anew since: the profiles that had it counted ended meanwhile."""
    if before is None or before.timed is None or now.timed is None or before.timed.begin == now.timed.begin:
        return before
    busy_seconds = None if now.timed.counts_busy else before.counters.busy_seconds
    return replace(before, timed=None, counters=replace(before.counters, busy_seconds=busy_seconds))


def _add_time(group: Group, places: Places, began: float, ended: float) -> None:
    group.limit = max(group.limit, places.limit)
    if not places.is_shared:
        group.place_seconds += places.limit * (ended - began)
        return
    group.began = began if group.began is None else min(group.began, began)
    group.place_seconds = max(group.place_seconds, places.limit * (ended - group.began))
