"""The event loop: what holds it, because it computes on it or does not wait where it should."""

from collections.abc import Iterator
from typing import Final

from ...sums import Name
from ..evidence import Evidence
from .limit import LEAST_USED, Limit, Verdict

# The loop's thread does its share of everything; it limits when hardly anything of a core is left.
_LEAST_CPU: Final = 0.9
_OFF_LOOP: Final = 'move it off the event loop: runs_on="thread", or "process" if it computes'


def loop(evidence: Evidence) -> Iterator[Limit]:
    """Yield the event loop."""
    elapsed, cpu_seconds = evidence.elapsed_seconds, evidence.loop_cpu_seconds or 0.0
    held = _held_seconds(evidence)
    total = sum(held.values())
    if held and total >= cpu_seconds / 2:
        name = max(held, key=held.__getitem__)
        others = f", of which it takes {held[name] / total:.0%}" if len(held) > 1 and total else ""
        used = min(total / elapsed, 1)
        reason = f"plain functions hold the event loop for {used:.0%} of the time{others}"
        yield Limit(used, 5, Verdict(name[1], reason, _OFF_LOOP, name[0], "loop"))
    holder = holding(evidence)
    if holder is not None:
        used = min((evidence.sums.nodes[holder].busy_seconds or 0.0) / elapsed, 1)
        reason = f"it holds the event loop for {used:.0%} of the time without a wait"
        yield Limit(used, 5, Verdict(holder[1], reason, _OFF_LOOP, holder[0], "loop"))
    elif cpu_seconds >= _LEAST_CPU * elapsed and total < cpu_seconds / 2:
        used = min(cpu_seconds / elapsed, 1)
        reason = (
            f"the event loop limits: it computes for {used:.0%} of the time, most of it in what async handlers, the "
            "reader and the engine do between two waits"
        )
        remedy = 'have fewer and larger items (batch=), and move what computes to runs_on="thread" or "process"'
        yield Limit(used, 5, Verdict(None, reason, remedy, limit="loop"))


def holding(evidence: Evidence) -> Name | None:
    """Return the async node that keeps the loop to itself, because it computes or blocks; None if none does.

    A node that waits has several items at a time, or takes little of the time, and others go on meanwhile.
    """
    elapsed, seconds = evidence.elapsed_seconds, _taken_seconds(evidence)
    if not is_held(evidence) or sum(_held_seconds(evidence).values()) >= seconds / 2:
        return None
    found = {
        name: node.busy_seconds
        for name, node in evidence.sums.nodes.items()
        if node.reading.runs_on == "loop"
        and not node.reading.holds_loop
        and name not in evidence.disturbed
        and node.busy_seconds
        and node.busy_seconds <= elapsed * 1.01  # clocks are read one after the other
    }
    name = max(found, key=found.__getitem__, default=None)
    return None if name is None or found[name] < seconds / 2 else name


def is_held(evidence: Evidence) -> bool:
    """Return whether somebody leaves little of the event loop to others."""
    return _taken_seconds(evidence) >= LEAST_USED * evidence.elapsed_seconds > 0


def _taken_seconds(evidence: Evidence) -> float:
    """Return how long the loop computed, if it did nearly all of the time, or else how long it was held."""
    cpu_seconds = evidence.loop_cpu_seconds or 0.0
    computed = cpu_seconds if cpu_seconds >= _LEAST_CPU * evidence.elapsed_seconds else 0.0
    return max(computed, evidence.loop_late_share * evidence.elapsed_seconds)


def _held_seconds(evidence: Evidence) -> dict[Name, float]:
    """Return how long each plain function held the event loop."""
    nodes = evidence.sums.nodes
    return {name: node.busy_seconds or 0.0 for name, node in nodes.items() if node.reading.holds_loop}
