"""Inboxes: one that is so small that the node before it stands still, although the one behind it is not busy."""

from collections.abc import Iterator
from typing import Final

from ...sums import Name, Sums
from ..evidence import Evidence
from .limit import Limit, Verdict

# Behind a node that is busy, a full inbox is what it should be.
_LEAST_FREE: Final = 0.1
# Who never stands still for long is not held up.
_LEAST_BLOCKED: Final = 0.1


def inboxes(evidence: Evidence) -> Iterator[Limit]:
    """Yield the inboxes that hold up the nodes before them."""
    sums = evidence.sums
    for name in sums.nodes:
        busy, blocked = _shares(sums, name)
        if blocked < _LEAST_BLOCKED:
            continue
        following = [(name[0], reader) for reader in sums.nodes[name].reading.consumers]
        behind = max(
            (each for each in following if each in sums.nodes),
            key=lambda each: sums.nodes[each].put_wait_seconds,
            default=None,
        )
        if behind is not None and sum(_shares(sums, behind)) <= 1 - _LEAST_FREE:
            yield Limit(min(busy + blocked, 1.0), 0, _verdict_of_inbox(sums, name, behind, blocked))


def _shares(sums: Sums, name: Name) -> tuple[float, float]:
    """Return how much of the time the places of a node were busy, and how much they held items that are done.

    Those that call sites may share (`concurrency=`, a stateful node) are given back before an item waits for room.
    """
    node = sums.nodes[name]
    groups = sums.own_places(node)
    busy = max((group.utilisation for group in groups), default=0.0)
    place_seconds = sum(group.place_seconds for group in groups)
    if not place_seconds or any(group.bound in ("concurrency", "state") for group in groups):
        return busy, 0.0
    return busy, node.blocked_seconds / place_seconds


def _verdict_of_inbox(sums: Sums, before: Name, name: Name, blocked: float) -> Verdict:
    node = sums.nodes[name]
    capacity = node.reading.inbox_capacity or 0
    reason = (
        f'its inbox holds {capacity:,} item{"s" * (capacity != 1)}, so that "{before[1]}" stands still for '
        f"{blocked:.0%} of the time, although it is busy for only {_shares(sums, name)[0]:.0%} itself"
    )
    return Verdict(name[1], reason, "raise its capacity=", name[0], "inbox")
