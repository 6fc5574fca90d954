"""What a node is doing while its graph runs: numbers that are drawn beside it."""

from dataclasses import dataclass

from ...telemetry.tables.quantities import count, of, rate


@dataclass(frozen=True, slots=True)
class Places:
    """Items in flight, and how many may be.

    Args:
        key: what tells these places from others; nodes that share them have the same.
        in_flight: places taken.
        limit: how many there are; None if unlimited.
    """

    key: int
    in_flight: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """The numbers of one node, or of several that are drawn as one.

    Args:
        places: its places.
        depth: items in its inbox.
        capacity: how many the inbox may hold; None if unbounded.
        completed: items that it finished with a result.
        failed: items that ended in an error.
        per_second: items that ended in it each second, on average; None if unknown.
        state: why it handles nothing, in a word; empty if it runs.
    """

    places: frozenset[Places]
    depth: int
    capacity: int | None
    completed: int
    failed: int
    per_second: float | None
    state: str = ""

    def __add__(self, other: "Load") -> "Load":
        """Return the load of both; places that they share count once."""
        unbounded = self.capacity is None or other.capacity is None
        unknown = self.per_second is None or other.per_second is None
        return Load(
            self.places | other.places,
            self.depth + other.depth,
            None if unbounded else (self.capacity or 0) + (other.capacity or 0),
            self.completed + other.completed,
            self.failed + other.failed,
            None if unknown else (self.per_second or 0.0) + (other.per_second or 0.0),
            self.state or other.state,
        )

    def words(self) -> tuple[str, ...]:
        """Return what is shown, a word or two for each number; empty where there is nothing to say."""
        limits = [places.limit for places in self.places]
        in_flight = sum(places.in_flight for places in self.places)
        limit = None if None in limits else sum(limit or 0 for limit in limits)
        return (
            self.state,
            f"inbox {count(self.depth) if self.capacity is None else of(self.depth, self.capacity)}",
            f"in flight {count(in_flight) if limit is None else of(in_flight, limit)}",
            f"{count(self.completed)} done",
            f"{count(self.failed)} failed" if self.failed else "",
            "" if self.per_second is None else rate(self.per_second),
        )
