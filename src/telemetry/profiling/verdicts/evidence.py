"""Evidence: what a verdict is based on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..loop_watch import WindowSum
from ..sums import Name, Sums


@dataclass(frozen=True)
class ReaderSum:
    """Who reads streams of one name, over all of them.

    Attributes:
        name: what is read.
        open_seconds: how long they were open.
        waited_seconds: how long their readers waited for items.
        window: what their items did; None if nobody looked, or they have no places.
    """

    name: str
    open_seconds: float
    waited_seconds: float
    window: WindowSum | None = None

    @property
    def busy_share(self) -> float:
        """How much of the time the reader did something else than to wait."""
        return max(0.0, 1 - self.waited_seconds / self.open_seconds) if self.open_seconds else 0.0


@dataclass(frozen=True)
class Evidence:
    """What a verdict is based on.

    Attributes:
        sums: what the nodes did.
        elapsed_seconds: how long the profile was taken.
        loop_cpu_seconds: how much of that the thread of the event loop ran; None if unknown.
        readers: who read streams.
        loop_late_share: for how much of the time something held the event loop, as far as somebody looked.
        loop_delay_seconds: how long a handler waited for its turn on the loop, once what it awaited was there.
        disturbed: nodes during whose executions others began or ended, so that they do not hold the event loop.
        covered_seconds: for nodes on devices, how long they had at least one item.
    """

    sums: Sums
    elapsed_seconds: float
    loop_cpu_seconds: float | None = None
    readers: tuple[ReaderSum, ...] = ()
    loop_late_share: float = 0.0
    loop_delay_seconds: float = 0.0
    disturbed: frozenset[Name] = frozenset()
    covered_seconds: Mapping[Name, float] = field(default_factory=dict[Name, float])
