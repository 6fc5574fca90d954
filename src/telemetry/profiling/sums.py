"""What all scopes did while a profile was taken, added up by graph and node."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from .durations import NO_DEPTH, NO_DEVICE, DepthTotals, DeviceSeconds, Durations
from .readings import Bound, NodeReading, Places, TimedReading

Name = tuple[str, str]  # graph and node


@dataclass
class NodeSum:
    """One node, over all scopes.

    Attributes:
        reading: the last of its readings: where it runs, and who waits for it.
        completed, failed, busy_seconds, put_wait_seconds: as in a reading.
        durations, blocked_seconds: as in what a reading says while a profile is taken.
        queue: how full its inboxes were.
        queue_seconds: how long they were watched, together.
        open_seconds: how long its scopes were open, together.
        device: what its items waited for on devices.
        places: the keys of the groups whose places its items take.
    """

    reading: NodeReading
    completed: int = 0
    failed: int = 0
    busy_seconds: float | None = None
    put_wait_seconds: float = 0.0
    durations: Durations = field(default_factory=Durations)
    blocked_seconds: float = 0.0
    queue: DepthTotals = NO_DEPTH
    queue_seconds: float = 0.0
    open_seconds: float = 0.0
    device: DeviceSeconds = NO_DEVICE
    places: dict[Hashable, None] = field(default_factory=dict[Hashable, None])

    @property
    def compile_seconds(self) -> float:
        """Time that its items waited for programs to be compiled."""
        return self.device.compile_seconds

    @property
    def transfer_seconds(self) -> float:
        """Time that its items waited for arrays on their way to a device, from another one or back."""
        return self.device.transfer_seconds

    @property
    def device_seconds(self) -> float:
        """Time that devices computed for its items."""
        return self.device.compute_seconds

    @property
    def mean_seconds(self) -> float:
        """Mean time that an item takes in its handler; 0 if there was none, or it is not timed."""
        return (self.busy_seconds or 0.0) / max(1, self.completed + self.failed)

    @property
    def spread_seconds(self) -> float:
        """How much longer its slowest items take than half of them do."""
        return (self.durations.quantile(1.0) or 0.0) - (self.durations.quantile(0.5) or 0.0)

    @property
    def occupancy(self) -> float:
        """Share of the time that items waited in its inbox."""
        return self.queue.occupied_seconds / self.queue_seconds if self.queue_seconds else 0.0

    @property
    def inbox_full_share(self) -> float:
        """Share of the time that its inbox was full."""
        return self.queue.full_seconds / self.queue_seconds if self.queue_seconds else 0.0

    def share_of_busy(self, seconds: float) -> float | None:
        """Return how much of its busy time this is, from 0 to 1; None if that is not known, or there is none.

        What a device does for a result that was handed on before it was ready is busy time as well.
        """
        total = max(self.busy_seconds or 0.0, sum(self.device))
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
                sharing.setdefault(places.key, set()).add((reading.graph, reading.node))
        counted: set[Hashable] = set()
        opened: set[Name] = set()
        for reading in after:
            name = reading.graph, reading.node
            total = self.nodes.setdefault(name, NodeSum(reading))
            total.reading = reading
            earlier = _comparable(before.get(reading.key), reading)
            busy_seconds = _add_node(total, reading, earlier)
            if reading.timed is not None:
                total.queue_seconds += ended - began
                _add_timed(total, reading.timed, None if earlier is None else earlier.timed)
            if name not in opened:
                opened.add(name)
                total.open_seconds += ended - began
            for index, places in enumerate(reading.places):
                key = places.key if places.is_shared else (places.bound, frozenset(sharing[places.key]))
                group = self.groups.setdefault(key, Group(places.bound, places.limit, is_pool=index > 0))
                total.places[key] = None
                group.busy[name] = group.busy.get(name, 0.0) + busy_seconds
                if places.key not in counted:
                    counted.add(places.key)
                    _add_time(group, places, began, ended)

    def copy(self) -> "Sums":
        """Return the same sums, to which more can be added."""
        twin = Sums()
        twin.nodes = {
            name: replace(node, places=dict(node.places), durations=node.durations.since(None))
            for name, node in self.nodes.items()
        }
        twin.groups = {key: replace(group, busy=dict(group.busy)) for key, group in self.groups.items()}
        return twin

    def items(self, graph: str) -> int:
        """Return how many items went through a graph: those that ended in the node that most of them reached."""
        return max((node.completed + node.failed for name, node in self.nodes.items() if name[0] == graph), default=0)

    def own_places(self, total: NodeSum) -> list[Group]:
        """Return the groups of places that are a node's own, not those of a pool."""
        return [group for group in map(self.groups.__getitem__, total.places) if not group.is_pool]


def _ended(reading: NodeReading | None) -> int:
    return 0 if reading is None else reading.completed + reading.failed


def _comparable(before: NodeReading | None, now: NodeReading) -> NodeReading | None:
    """Return a reading without what has begun anew since: the profiles that had it counted ended meanwhile."""
    if before is None or before.timed is None or now.timed is None or before.timed.begin == now.timed.begin:
        return before
    return replace(before, timed=None, busy_seconds=None if now.timed.counts_busy else before.busy_seconds)


def _add_node(total: NodeSum, now: NodeReading, before: NodeReading | None) -> float:
    total.completed += now.completed - (before.completed if before else 0)
    total.failed += now.failed - (before.failed if before else 0)
    total.put_wait_seconds += now.put_wait_seconds - (before.put_wait_seconds if before else 0.0)
    if now.busy_seconds is None:
        return 0.0
    busy_seconds = now.busy_seconds - ((before.busy_seconds or 0.0) if before else 0.0)
    total.busy_seconds = (total.busy_seconds or 0.0) + busy_seconds
    return busy_seconds


def _add_timed(total: NodeSum, now: TimedReading, before: TimedReading | None) -> None:
    total.durations.merge(now.durations.since(None if before is None else before.durations))
    total.blocked_seconds += now.blocked_seconds - (0.0 if before is None else before.blocked_seconds)
    total.device = total.device.plus(now.device.minus(NO_DEVICE if before is None else before.device))
    total.queue += now.queue - (NO_DEPTH if before is None else before.queue)


def _add_time(group: Group, places: Places, began: float, ended: float) -> None:
    group.limit = max(group.limit, places.limit)
    if not places.is_shared:
        group.place_seconds += places.limit * (ended - began)
        return
    group.began = began if group.began is None else min(group.began, began)
    group.place_seconds = max(group.place_seconds, places.limit * (ended - group.began))
