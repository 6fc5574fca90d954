"""Verdict: what limits, and what to do about it.

Everything that is bounded and shared is a candidate: the places of a node, a pool, the event loop, the reader of a
stream. What was used most of the time limits; behind it inboxes are full, after it they are empty. Durations are not
added up: nodes that run side by side take the time of the slowest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..tables.quantities import milliseconds, significant
from .readings import Bound
from .sums import Group, Name, NodeSum, Sums

# What is free half of the time met a burst, and limits nothing.
LEAST_USED: Final = 0.5
# The loop's thread does its share of everything; it limits when hardly anything of a core is left.
LEAST_LOOP_CPU: Final = 0.9
# Who reads last is starved unless it limits itself: if items are always there, nothing before it can be the reason.
NEVER_WAITS: Final = 0.9

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
_OFF_LOOP: Final = 'move it off the event loop: runs_on="thread", or "process" if it computes'


@dataclass(frozen=True)
class Verdict:
    """What limits. `str()` says it in one sentence.

    Attributes:
        node: name of the node that limits, as drawn; None if none does.
        reason: what the counters say.
        remedy: what to do.
        graph: name of its graph; None if no node limits.
    """

    node: str | None
    reason: str
    remedy: str
    graph: str | None = None

    def __str__(self) -> str:
        subject = "" if self.node is None else f"{self.node} limits it: "
        return f"{subject}{self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Evidence:
    """What a verdict is based on.

    Attributes:
        sums: what the nodes did.
        elapsed_seconds: how long the profile was taken.
        loop_cpu_seconds: how much of that the thread of the event loop ran; None if unknown.
        readers: for each stream, what was read, how long it was open, and how long its reader waited.
    """

    sums: Sums
    elapsed_seconds: float
    loop_cpu_seconds: float | None
    readers: tuple[tuple[str, float, float], ...]


class _Candidate(NamedTuple):
    """What could limit.

    Args:
        used: how much of it was used, from 0 to 1.
        precedence: which to prefer of those that were used as much.
        verdict: what to say.
    """

    used: float
    precedence: int
    verdict: Verdict


def find_verdict(evidence: Evidence) -> Verdict:
    """Return what limits."""
    nodes = evidence.sums.nodes
    if evidence.elapsed_seconds <= 0 or not any(node.completed or node.failed for node in nodes.values()):
        return Verdict(None, "nothing ran while the profile was taken", "put the calls inside of its `with` block")
    candidates = [*_places(evidence.sums), *_loop(evidence), *_readers(evidence)]
    most = max(candidates, key=lambda candidate: candidate[:2], default=None)
    if most is not None and most.used >= LEAST_USED:
        return most.verdict
    idle = "no node is busy for more than half of the time that it could be"
    if evidence.readers:
        remedy = "have the source give items sooner: read ahead, or in several tasks"
        return Verdict(None, f"the source limits: {idle}, and readers wait for items", remedy)
    return _longest_path(evidence) or Verdict(None, f"the callers limit: {idle}", "have more calls at a time")


def _places(sums: Sums) -> Iterator[_Candidate]:
    for group in sums.groups.values():
        if any(group.busy.values()):  # whoever was never busy limits nothing
            yield _Candidate(round(group.utilisation, 2), 2 if group.is_pool else 1, _of_places(sums, group))


def _readers(evidence: Evidence) -> Iterator[_Candidate]:
    for name, open_seconds, waited_seconds in evidence.readers:
        used = max(0.0, 1 - waited_seconds / open_seconds) if open_seconds else 0.0
        reason = f"the reader of {name} limits: it waited for items for only {1 - used:.0%} of the time"
        verdict = Verdict(None, reason, "do less for each item outside of the graph, or make a node of it")
        yield _Candidate(1.0, 4, verdict) if used >= NEVER_WAITS else _Candidate(round(used, 2), 0, verdict)


def _of_places(sums: Sums, group: Group) -> Verdict:
    name = max(group.busy, key=group.busy.__getitem__)
    node = sums.nodes[name]
    what = _WHAT[group.bound].format(n=f"{group.limit:,}")
    others = f", of which it takes {group.busy[name] / sum(group.busy.values()):.0%}" if len(group.busy) > 1 else ""
    verb = "is" if group.limit == 1 or group.bound in ("line", "call") else "are"
    if group.limit == 1 and group.bound in ("concurrency", "state"):
        what = "its only place"
    if node.reading.gathers:
        what, verb = "what it may have at a time", "is"
    reason = f"{what} {verb} busy for {group.utilisation:.0%} of the time{others}{_waited_for(node)}"
    return Verdict(name[1], reason, _remedy(node, group), name[0])


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


def _waited_for(node: NodeSum) -> str:
    waiting = node.put_wait_seconds / node.open_seconds if node.open_seconds else 0.0
    return f", and {significant(waiting)} items wait for room in its inbox" if waiting >= LEAST_USED else ""


def _loop(evidence: Evidence) -> Iterator[_Candidate]:
    elapsed, cpu_seconds = evidence.elapsed_seconds, evidence.loop_cpu_seconds or 0.0
    nodes = evidence.sums.nodes
    held = {name: node.busy_seconds or 0.0 for name, node in nodes.items() if node.reading.holds_loop}
    total = sum(held.values())
    if held and total >= cpu_seconds / 2:
        name = max(held, key=held.__getitem__)
        others = f", of which it takes {held[name] / total:.0%}" if len(held) > 1 and total else ""
        used = min(total / elapsed, 1)
        reason = f"plain functions hold the event loop for {used:.0%} of the time{others}"
        yield _Candidate(round(used, 2), 3, Verdict(name[1], reason, _OFF_LOOP, name[0]))
    elif cpu_seconds >= LEAST_LOOP_CPU * elapsed:
        used = min(cpu_seconds / elapsed, 1)
        reason = (
            f"the event loop limits: it computes for {used:.0%} of the time, most of it in what async handlers, the "
            "reader and the engine do between two waits"
        )
        remedy = 'have fewer and larger items (batch=), and move what computes to runs_on="thread" or "process"'
        yield _Candidate(round(used, 2), 3, _computing(evidence, cpu_seconds) or Verdict(None, reason, remedy))


def _computing(evidence: Evidence, cpu_seconds: float) -> Verdict | None:
    """Return the async node that has the loop: one that waits has several items at a time, or takes little of it."""
    found = {
        name: node.busy_seconds
        for name, node in evidence.sums.nodes.items()
        if node.reading.runs_on == "loop" and node.busy_seconds and node.busy_seconds <= evidence.elapsed_seconds
    }
    name = max(found, key=found.__getitem__, default=None)
    if name is None or found[name] < cpu_seconds / 2:
        return None
    share = found[name] / evidence.elapsed_seconds
    return Verdict(name[1], f"it holds the event loop for {share:.0%} of the time without a wait", _OFF_LOOP, name[0])


def _longest_path(evidence: Evidence) -> Verdict | None:
    """Return the node that takes most of the time of the calls, where these come one by one; None if they do not."""
    nodes = evidence.sums.nodes
    longest: tuple[float, tuple[Name, ...]] = 0.0, ()
    found: dict[Name, tuple[float, tuple[Name, ...]]] = {}
    for name in _consumers_first(nodes):
        following = [found[name[0], reader] for reader in nodes[name].reading.consumers if (name[0], reader) in found]
        seconds, path = max(following, default=(0.0, ()))
        found[name] = seconds + (nodes[name].busy_seconds or 0.0), (name, *path)
        longest = max(longest, found[name])
    seconds, path = longest
    if seconds < LEAST_USED * evidence.elapsed_seconds:
        return None
    slowest = max(path, key=lambda name: nodes[name].busy_seconds or 0.0)
    node = nodes[slowest]
    mean = (node.busy_seconds or 0.0) / max(1, node.completed + node.failed)
    share = (node.busy_seconds or 0.0) / seconds
    reason = f"of the longest path through the graph it takes {share:.0%}, {milliseconds(mean)} each time"
    return Verdict(slowest[1], reason, "make it faster, or have more calls at a time", slowest[0])


def _consumers_first(nodes: dict[Name, NodeSum]) -> Iterable[Name]:
    order: dict[Name, None] = {}
    for first in nodes:
        stack = [(first, False)]
        while stack:
            name, is_done = stack.pop()
            if is_done:
                order[name] = None
            elif name in nodes and name not in order:
                stack.append((name, True))
                stack += [((name[0], reader), False) for reader in nodes[name].reading.consumers]
    return order
