"""Standing: how far something has got, and what is said of that beside its bar."""

from dataclasses import dataclass
from math import ceil

from ..tables.characters import printable
from ..tables.table import count, duration, rate


@dataclass(frozen=True, slots=True)
class Standing:
    """How far something has got.

    Attributes:
        name: what it is.
        done: items that have ended.
        failed: those of them that ended in an error.
        total: how many there will be; None if unknown.
        per_second: how many have ended each second lately; None if there is nothing to say.
        limits: name of the node that limits; empty if none is known to.
    """

    name: str
    done: int
    failed: int
    total: int | None
    per_second: float | None
    limits: str = ""

    @property
    def remaining_seconds(self) -> float | None:
        """How long the rest takes at this rate; None if nobody can tell."""
        if self.total is None or not self.per_second or self.done >= self.total:
            return None
        return (self.total - self.done) / self.per_second

    def words(self) -> str:
        """Return what stands beside the bar."""
        remaining = self.remaining_seconds
        said = (
            count(self.done) + ("" if self.total is None else f"/{count(self.total)}"),
            "" if self.per_second is None else rate(self.per_second),
            "" if remaining is None else f"{_whole(remaining)} left",
            f"{count(self.failed)} failed" if self.failed else "",
            f"{printable(self.limits)} limits" if self.limits else "",
        )
        return "  ".join(filter(None, said))


def _whole(seconds: float) -> str:
    return duration(seconds) if seconds > 59 else f"{ceil(seconds)} s"
