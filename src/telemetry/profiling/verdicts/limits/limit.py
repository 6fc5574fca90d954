"""Limit: something of which there is only so much, how much of it was used, and what to say if it is the reason."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from ....tables.characters import printable

# Places of a node; a pool of threads or processes; `max_in_flight`; what the order of a stream holds up; the inbox
# after a node; the event loop; a device: what it computes, compiles or copies; who reads a stream; its source; the
# longest path of calls that come one by one; those who call; and nothing, if nothing ran.
Kind: TypeAlias = Literal[
    "places", "pool", "in_flight", "order", "inbox", "loop", "device", "compilation", "transfer", "reader", "source",
    "path", "callers", "nothing",
]  # fmt: skip

# What is free half of the time met a burst, and limits nothing.
LEAST_USED: Final = 0.5


@dataclass(frozen=True)
class Verdict:
    """What limits. `str()` says it in one sentence.

    Attributes:
        node: name of the node that limits, as drawn; None if none does.
        reason: what the counters say.
        remedy: what to do.
        graph: name of its graph; None if no node limits.
        limit: what there is too little of.
        headroom: how many times faster the whole gets if that node, or else the reader, takes no time; None if that
            cannot be said. See `Profile.what_if`.
    """

    node: str | None
    reason: str
    remedy: str
    graph: str | None = None
    limit: Kind = "nothing"
    headroom: float | None = None

    def __str__(self) -> str:
        subject = "" if self.node is None else f'"{self.node}" limits the pipeline: '
        return printable("; ".join(filter(None, (f"{subject}{self.reason}", self.remedy, self.gain))))

    @property
    def gain(self) -> str:
        """What `headroom` says, in words; empty if that is None."""
        if self.headroom is None:
            return ""
        if self.headroom >= MOST_HEADROOM:
            return "nothing else limits"
        if self.headroom < 1.05:
            return "without it something else limits as much"
        return f"without it up to {self.headroom:.{1 if self.headroom < 9.95 else 0}f} times as fast"


# More than that cannot be told from a profile: the rest is too small to be measured beside it.
MOST_HEADROOM: Final = 100.0


class Limit(NamedTuple):
    """What could limit.

    Args:
        used: how much of it was used, from 0 to 1.
        precedence: which to prefer of those that were used as much.
        verdict: what to say.
    """

    used: float
    precedence: int
    verdict: Verdict
