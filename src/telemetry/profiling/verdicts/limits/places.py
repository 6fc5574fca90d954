"""Places: those of a node, and the threads or processes of a pool."""

from collections.abc import Iterator
from typing import Final

from ...readings import Bound
from ...sums import Group, NodeSum, Sums
from ..evidence import Evidence
from .limit import LEAST_USED, Limit, Verdict

_WHAT: Final[dict[Bound, str]] = {
    "concurrency": "its {n} places (concurrency=)",
    "state": "its {n} places, a stateful node's own,",
    "line": "its only place on the event loop",
    "threads": "the {n} threads",
    "processes": "the {n} worker processes",
    "max_workers": "its {n} places (max_workers=)",
    "max_in_flight": "the {n} items in flight (max_in_flight=)",
    "map_each": "the {n} places of its map_each",
    "call": "the only call",
}
_MORE: Final[dict[Bound, str]] = {
    "concurrency": "raise its concurrency=",
    "state": "raise its concurrency= if it may have several items at a time",
    "line": 'move it off the event loop: runs_on="thread", or "process" if it computes',
    "threads": 'raise max_workers=, or move what computes to runs_on="process"',
    "processes": "give it less to do, items that hold more (each is sent to its process and back), or more cores",
    "max_workers": "raise max_workers=, or give it a concurrency= of its own",
    "max_in_flight": "raise max_in_flight=",
    "map_each": "raise map_each(concurrency=)",
    "call": "make it faster, or have more calls at a time",
}


def places(evidence: Evidence) -> Iterator[Limit]:
    """Yield the places of every node that was busy, and those of pools."""
    for group in evidence.sums.groups.values():
        if any(group.busy.values()):  # whoever was never busy limits nothing
            yield Limit(group.utilisation, 3 if group.is_pool else 1, _verdict_of_places(evidence.sums, group))


def _verdict_of_places(sums: Sums, group: Group) -> Verdict:
    name = max(group.busy, key=group.busy.__getitem__)
    node = sums.nodes[name]
    what = _WHAT[group.bound].format(n=f"{group.limit:,}")
    others = f", of which it takes {group.busy[name] / sum(group.busy.values()):.0%}" if len(group.busy) > 1 else ""
    verb = "is" if group.limit == 1 or group.bound in ("line", "call") else "are"
    if group.limit == 1 and group.bound in ("concurrency", "state"):
        what = "its only place"
    if node.reading.gathers:
        what, verb = "what it may have at a time", "is"
    reason = f"{what} {verb} busy for {group.utilisation:.0%} of the time{others}{waiting(node)}"
    return Verdict(name[1], reason, _remedy(node, group), name[0], "pool" if group.is_pool else "places")


def _remedy(node: NodeSum, group: Group) -> str:
    reading = node.reading
    if reading.gathers:
        return "have it take more items at once (batch=), or work on more at a time"
    remedies = [_MORE[group.bound]]
    if reading.runs_on == "thread" and group.bound != "threads":
        remedies.append('or move it to runs_on="process" if it computes')
    elif reading.runs_on == "loop" and group.bound in ("concurrency", "state"):
        remedies.append("or have it take many items at once (batch=)")
    return ", ".join(remedies)


def waiting(node: NodeSum) -> str:
    """Return what the inbox of a node says, if it says that the node limits."""
    if node.inbox_full_share >= LEAST_USED:
        return f", and its inbox is full for {node.inbox_full_share:.0%} of it"
    return f", and items wait in its inbox for {node.occupancy:.0%} of it" if node.occupancy >= LEAST_USED else ""
