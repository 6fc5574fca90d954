"""Look: what the nodes of a process have done since the look before, and what they are doing now."""

from dataclasses import dataclass

from ..profiling.verdicts.limits.limit import Verdict


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One node, over all scopes of its graph.

    Attributes:
        graph: name of its graph, or of the body of control flow that it belongs to.
        node: name of the node, as drawn.
        runs_on: "loop", "thread", "process", or where else.
        completed: items that it finished with a result since the look before.
        failed: items that ended in an error here since then.
        total_completed: items that it has finished with a result in the scopes that are open now.
        total_failed: items that have ended in an error there.
        busy_share: how much of the time since the look before its places were busy, of the items that left it
            meanwhile; of a node without a limit, the items that it had at a time. None if it is not known.
        inbox_depth: items that wait in its inbox now.
        inbox_capacity: how many may; None if unbounded.
        in_flight: items in it now.
        limit: how many may be; None if unlimited.
    """

    graph: str
    node: str
    runs_on: str
    completed: int
    failed: int
    total_completed: int
    total_failed: int
    busy_share: float | None
    inbox_depth: int
    inbox_capacity: int | None
    in_flight: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """What a process does.

    Attributes:
        process: its number.
        seconds: how long ago the look before was; None if this is the first, which has no rates.
        nodes: those of the scopes that are open, and of those that have ended since the look before.
        verdict: what limits; None if nothing has left a node since the look before.
    """

    process: int
    seconds: float | None
    nodes: tuple[NodeLook, ...]
    verdict: Verdict | None
