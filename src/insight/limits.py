"""Limits: each bounded thing that can limit the throughput, how much of it was used, and the verdict that names it."""

import os
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal, NamedTuple, TypeAlias

from ..telemetry.observation import LEAST_USED, Bound, full_inboxes, name_of
from ..telemetry.tables import Rendered, Table, figure_cells, figure_columns, milliseconds, significant
from ..telemetry.text import printable
from .sums import POOLS, Evidence, Group, Holder, Name, NodeSum, ReaderSum, Sums, TimeBreakdown, WindowSum

# In this order: places of a node; a pool of threads or processes; `max_in_flight`; the order of a stream, in which
# finished items wait for an earlier item; the inbox after a node; the event loop; the GIL; a device, as it computes,
# compiles or copies; the reader of a stream; its source; the longest path of calls that come one after the other; the
# callers; and nothing, if nothing ran.
Kind: TypeAlias = Literal[
    "places", "pool", "in_flight", "order", "inbox", "loop", "gil", "device", "compilation", "transfer", "reader",
    "source", "path", "callers", "nothing",
]  # fmt: skip


@dataclass(frozen=True)
class Verdict(Rendered):
    """What limits the throughput. `str()` gives one sentence; rich and notebooks show a table.

    Attributes:
        node: the name of the node that limits, as drawn; None if no node does.
        reason: the reason, in words: what the counters show.
        remedy: what to do about it.
        graph: the name of the graph of that node; None if no node limits.
        limit: the kind of resource that limits.
        headroom: how many times as fast everything would be if that node, or else the reader, took no time; None if
            unknown.
        spent: how the node spends its busy time, in words, if it uses threads or waits for its turn; and its figures.
            Otherwise empty.
        factor: how many times as fast everything would be with the first option of the remedy; None if unknown.
    """

    node: str | None
    reason: str
    remedy: str
    graph: str | None = None
    limit: Kind = "nothing"
    headroom: float | None = None
    spent: str = ""
    factor: float | None = None

    def __str__(self) -> str:
        subject = "" if self.node is None else f'"{self.name}" limits the pipeline: '
        return printable("; ".join(filter(None, (f"{subject}{self.reason}", self.spent, self.remedy, self.gain))))

    def _table(self) -> Table:
        values = self.name, self.reason, self.spent, self.remedy, self.gain
        facts = zip(("limits", "because", "spent", "try", "gain"), values, strict=True)
        return Table(tuple((label, value) for label, value in facts if value))

    @property
    def name(self) -> str:
        """The name of the node that limits, after the body of control flow that it is in; empty if no node limits."""
        return "" if self.node is None else name_of(self.graph or "", self.node)

    @property
    def gain(self) -> str:
        """The headroom in words; empty if it is None."""
        if self.headroom is None:
            return ""
        if self.headroom >= MOST_HEADROOM:
            return "nothing else limits"
        if self.headroom < 1.05:
            return "without it something else limits as much"
        return f"without it up to {self.headroom:.{1 if self.headroom < 9.95 else 0}f} times as fast"


# A profile cannot show a larger headroom: the time of all other nodes is too small to be measured beside the limit.
MOST_HEADROOM: Final = 100.0


class Option(NamedTuple):
    """An option to type, and where to type it.

    Args:
        text: the option, with {} for its value.
        now: its value now; 0 for an option without a number.
        changes: what the option raises: a group of places, by its key; the items in flight of a stream, by its name;
            or None, for a node that becomes faster.
        at: the node or call that has the option, such as 'parse (job.py:31)'.
    """

    text: str
    now: int = 0
    changes: Hashable = None
    at: str = ""


class Limit(NamedTuple):
    """A bounded resource that could limit.

    Args:
        used: how much of the resource was used, from 0 to 1.
        precedence: which limit to prefer of several that were used equally.
        verdict: the verdict that names the resource; if there are options, its remedy says what else helps.
        options: the options that help; if there are several, they help only together.
        most: how many times as fast the options make the node at most, for a reason that no other limit shows.
        at_once: how many times as fast the node becomes by the first change of the options, whatever their new value.
    """

    used: float
    precedence: int
    verdict: Verdict
    options: tuple[Option, ...] = ()
    most: float = inf
    at_once: float = 1.0


def _short(at: str) -> str:
    """Return a "file:line", with a path relative to the working directory if the file is below that."""
    return at and at.removeprefix(f"{os.getcwd()}{os.sep}")  # noqa: PTH109 - ten times as fast as Path.cwd()


def _where(at: str) -> str:
    return f" ({_short(at)})" if at else ""


def of_node(node: NodeSum) -> str:
    """Return the name of a node and where it is written."""
    return name_of(*node.name) + _where(node.step.at)


_REASONS: Final[dict[Kind, str]] = {
    "compilation": "it waits for its first compilation: {share:.0%} of what its items take there",
    "transfer": "it copies rather than computes: arrays on their way to its device and back are {share:.0%} of what "
    "its items take there",
    "device": "its device has an item for {used:.0%} of the time",
}
_REMEDIES: Final[dict[Kind, str]] = {
    "compilation": "have it compiled before the first call, with deploy(warmup=True), node.warmup(...) or the "
    "warmup(...) of a bound function, and begin the profile after that",
    "transfer": "have the nodes before and after it run on its device as well, send less (smaller dtypes), or keep "
    "there what does not change (a resource)",
    "device": "or have it take more items at once (batch=), if these do not fill its device",
}


def devices(evidence: Evidence) -> Iterator[Limit]:
    """Yield the devices that nodes have used."""
    for name, seconds in evidence.covered_seconds.items():
        node = evidence.sums.nodes[name]
        kind, share = _most(node)
        used = min(seconds / evidence.elapsed_seconds, 1.0)
        if kind == "compilation":  # while it compiles, its places are taken, too: name the compilation, not the places
            used = max(used, _shares(evidence.sums, name)[0])
        reason, remedy = _REASONS[kind].format(share=share, used=used), _REMEDIES[kind]
        again = [causes for program, causes in evidence.sums.compiled_again if program == name[1]]
        if kind == "compilation" and again:
            [((what, remedy), _)] = Counter(cause for causes in again for cause in causes).most_common(1)
            often = f"again and again, {len(again):,} times" if len(again) > 1 else "again"
            reason = f"it is compiled {often}, because of the {what}: {share:.0%} of what its items take there"
        found = Limit(used, 4, Verdict(name[1], reason, remedy, name[0], kind))
        options = (Option("twice the devices (mesh=)"),) if kind == "device" else ()
        yield found._replace(options=options, most=2.0 if options else 1 / max(1 - share, 1 / MOST_HEADROOM))


def _most(node: NodeSum) -> tuple[Kind, float]:
    """Return the kind of work that takes most of the items' time on their device, and its share of this time."""
    compiles, transfers, computes = node.timed.outside[:3]
    seconds: dict[Kind, float] = {"device": computes, "compilation": compiles, "transfer": transfers}
    kind = max(seconds, key=seconds.__getitem__)
    return kind, seconds[kind] / (sum(seconds.values()) or 1.0)


_MORE_IN_LOOP: Final = "have its loop work on more items at a time, or make it faster"


def untimed(evidence: Evidence) -> Iterator[Limit]:
    """Yield the nodes with full inboxes whose busy time is not measured, such as readers of streams.

    An actor that owns its loop takes as many items out of its inbox as it has room for. If items wait in the inbox, the
    actor has no room.
    """
    nodes = evidence.sums.nodes.values()
    for node, waiting, share in full_inboxes((node.counters, node.open_seconds) for node in nodes):
        if share is None and node.busy_seconds is None:
            reason = f"on average {significant(waiting)} items waited for room in its inbox"
            yield Limit(min(waiting, 1.0), 0, Verdict(node.node, reason, "make it faster", node.graph, "places"))
    for total in nodes:
        if total.counters.busy_seconds is None and total.step.owns_loop and total.occupancy >= LEAST_USED:
            reason = f"its loop takes no more: items wait in its inbox for {total.occupancy:.0%} of the time"
            verdict = Verdict(total.name[1], reason, _MORE_IN_LOOP, total.name[0], "places")
            yield Limit(total.occupancy, 0, verdict)


def without_workers(evidence: Evidence) -> Iterator[Limit]:
    """Yield nodes in processes for which items wait although places are free: workers start, or do other work.

    The busy time of such a node counts from when a worker has begun the item.
    """
    groups, started = evidence.sums.groups, evidence.starting_seconds / evidence.elapsed_seconds
    for (graph, name), node in evidence.sums.nodes.items():
        if node.step.pool != "processes":
            continue
        if started >= _LEAST_SAID:
            reason = f"for {started:.0%} of the time it waits for worker processes, which start"
            yield Limit(
                started, 2, Verdict(name, reason, _KEPT_WORKERS, graph, "pool"), most=1 / max(1 - started, 0.01)
            )
        is_idle = all(groups[key].utilisation < LEAST_USED for key in node.places)
        if is_idle and node.inbox_full_share >= LEAST_USED:
            used = node.inbox_full_share
            reason = f"its inbox is full for {used:.0%} of the time, while it waits for worker processes"
            yield Limit(used, 2, Verdict(name, reason, _KEPT_WORKERS, graph, "pool"))


_KEPT_WORKERS: Final = "keep one Engine or deployment, so that workers start once, and let less import at their start"


# The share of the time for which a node must be free, as the inbox of a busy node is full anyway.
_LEAST_FREE: Final = 0.1
# The share of the time for which a full inbox must block the node before, so that this node counts as held up.
_LEAST_BLOCKED: Final = 0.1


def inboxes(evidence: Evidence) -> Iterator[Limit]:
    """Yield the inboxes that hold up the nodes before them."""
    sums = evidence.sums
    for name, node in sums.nodes.items():
        if not node.timed.blocked_seconds:
            continue
        busy, blocked = _shares(sums, name)
        if blocked < _LEAST_BLOCKED:
            continue
        following = [(name[0], reader) for reader in node.step.consumers]
        waits = {each: sums.nodes[each].counters.inbox.put_wait_seconds for each in following if each in sums.nodes}
        behind = max(waits, key=waits.__getitem__, default=None)
        found = None if behind is None else sums.nodes[behind]
        # Items that wait for worker processes wait in the inbox: with a larger inbox they begin no sooner.
        if found is None or behind is None or found.step.pool == "processes":
            continue
        if sum(_shares(sums, behind)) <= 1 - _LEAST_FREE:
            more = Option(f"capacity={max(16, 4 * (found.step.counters.inbox.capacity or 0))}", at=of_node(found))
            yield Limit(min(busy + blocked, 1.0), 0, _verdict_of_inbox(sums, name, behind, blocked), (more,))


def _shares(sums: Sums, name: Name) -> tuple[float, float]:
    """Return for which share of the time a node's places were busy, and for which share they held finished items.

    The second share is 0 for places that call sites share (`concurrency=`, a stateful node): an item gives such a place
    back before it waits for room.
    """
    node = sums.nodes[name]
    groups = sums.own_places(node)
    busy = max((group.utilisation for group in groups), default=0.0)
    place_seconds = sum(group.place_seconds for group in groups)
    if not place_seconds or any(group.bound in ("concurrency", "state") for group in groups):
        return busy, 0.0
    return busy, node.timed.blocked_seconds / place_seconds


def _verdict_of_inbox(sums: Sums, before: Name, name: Name, blocked: float) -> Verdict:
    node = sums.nodes[name]
    capacity = node.step.counters.inbox.capacity or 0
    reason = (
        f'its inbox holds {capacity:,} item{"s" * (capacity != 1)}, so that "{before[1]}" stands still for '
        f"{blocked:.0%} of the time, although it is busy for only {_shares(sums, name)[0]:.0%} itself"
    )
    return Verdict(name[1], reason, "", name[0], "inbox")


# The loop limits only if its thread uses nearly all of a core: all work passes through the loop, so less is normal.
_LEAST_CPU: Final = 0.9


def _off_loop(evidence: Evidence, found: Limit, held_seconds: float) -> Limit:
    """Return a limit of a node that holds the loop, with a thread or a process as its remedy."""
    node = evidence.sums.nodes[found.verdict.graph or "", found.verdict.node or ""]
    computed = evidence.loop_cpu_seconds or 0.0
    where, places = ("process", _cores()) if computed >= held_seconds / 2 else ("thread", _THREADS)
    option = Option(f'runs_on="{where}"', at=of_node(node) + ("" if node.step.holds_loop else ", as a plain `def`"))
    most = places / held_seconds if held_seconds else inf
    if where == "thread" and computed:  # threads and the loop share one GIL
        most = min(most, 1 / computed)
    return _remedied(found, "", (option,), most * evidence.elapsed_seconds)


# The default number of threads of an Engine.
_THREADS: Final = 32


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loop(evidence: Evidence) -> Iterator[Limit]:
    """Yield the event loop."""
    elapsed, cpu_seconds = evidence.elapsed_seconds, evidence.loop_cpu_seconds or 0.0
    held = evidence.held_seconds
    total = sum(held.values())
    if held and total >= cpu_seconds / 2:
        name = max(held, key=held.__getitem__)
        others = f", of which it takes {held[name] / total:.0%}" if len(held) > 1 and total else ""
        used = min(total / elapsed, 1)
        reason = f"plain functions hold the event loop for {used:.0%} of the time{others}"
        yield _off_loop(evidence, Limit(used, 5, Verdict(name[1], reason, "", name[0], "loop")), held[name])
    holder = holding(evidence)
    if holder is not None:
        seconds = evidence.sums.nodes[holder].busy_seconds or 0.0
        used = min(seconds / elapsed, 1)
        reason = f"it holds the event loop for {used:.0%} of the time without a wait"
        yield _off_loop(evidence, Limit(used, 5, Verdict(holder[1], reason, "", holder[0], "loop")), seconds)
    elif cpu_seconds >= _LEAST_CPU * elapsed and total < cpu_seconds / 2:
        used = min(cpu_seconds / elapsed, 1)
        reason = (
            f"the event loop limits: it computes for {used:.0%} of the time, most of it in what async handlers, the "
            "reader and the engine do between two waits"
        )
        remedy = 'have fewer and larger items (batch=), and move what computes to runs_on="thread" or "process"'
        yield Limit(used, 5, Verdict(None, reason, remedy, limit="loop"))
    elif is_held(evidence) and total < _taken_seconds(evidence) / 2:
        used = min(_taken_seconds(evidence) / elapsed, 1)
        reason = f"the event loop limits: something holds it for {used:.0%} of the time"
        remedy = (
            "find the call that blocks, in a handler that has not ended or beside the engine: asyncio's debug mode "
            "names it, and so does the log, by node.blocks_loop"
        )
        yield Limit(used, 5, Verdict(None, reason, remedy, limit="loop"))


def holding(evidence: Evidence) -> Name | None:
    """Return the `async def` node that holds the event loop, because it computes or blocks; None if no node does.

    A node that really waits shows it: it has several items at a time, or takes little of the time, or other nodes run
    during its executions.
    """
    elapsed, seconds = evidence.elapsed_seconds, _taken_seconds(evidence)
    if not is_held(evidence) or sum(evidence.held_seconds.values()) >= seconds / 2:
        return None
    most = elapsed * 1.01  # clocks are read one after the other
    found = [
        (busy, name)
        for name, node in evidence.sums.nodes.items()
        if (busy := node.counters.busy_seconds) is not None and seconds / 2 <= busy <= most
        if node.step.is_on_loop and not node.step.holds_loop and name not in evidence.disturbed
    ]
    return max(found, key=lambda each: each[0], default=(0.0, None))[1]


def is_held(evidence: Evidence) -> bool:
    """Whether the event loop is held for most of the time."""
    return _taken_seconds(evidence) >= LEAST_USED * evidence.elapsed_seconds > 0


def _taken_seconds(evidence: Evidence) -> float:
    """Return for how long the loop computed, if it computed nearly all of the time; otherwise how long it was held."""
    cpu_seconds = evidence.loop_cpu_seconds or 0.0
    computed = cpu_seconds if cpu_seconds >= _LEAST_CPU * evidence.elapsed_seconds else 0.0
    return max(computed, evidence.loop_late_share * evidence.elapsed_seconds)


# A node that waits for the GIL for a smaller share of its time is slow for another reason.
_LEAST_GIL: Final = 0.25
# A node that computes, or waits for the GIL, for a larger share of its time does not get faster with more places.
_MOSTLY: Final = 0.75
# Smaller shares of the time are not mentioned.
_LEAST_SAID: Final = 0.05
_BESIDE: Final = "or move it to code that computes without the GIL"


def gil(evidence: Evidence) -> Iterator[Limit]:
    """Yield the GIL, if a node in threads holds it for most of the time."""
    name = _holder(evidence)
    if name is not None:
        used = min(sum(evidence.gil.held.values()), 1.0)
        verdict = Verdict(name[1], _holds(evidence, name), _BESIDE, name[0], "gil")
        yield _beside(evidence, name, Limit(used, 4, verdict))


def _beside(evidence: Evidence, holder: Name, found: Limit) -> Limit:
    """Return a limit with worker processes as the remedy; for a node with one place, their gain is unknown."""
    node = evidence.sums.nodes[holder]
    places = min([_cores(), *[group.limit for group in evidence.sums.own_places(node)]])
    return found._replace(options=(Option('runs_on="process"', at=of_node(node)),), most=places if places > 1 else 0.0)


def _holder(evidence: Evidence) -> Name | None:
    """Return the node in threads that holds the GIL longer than any other holder; None if no node does."""
    held = evidence.gil.held
    holder = max(held, key=held.__getitem__, default=None)
    node = evidence.sums.nodes.get(holder) if isinstance(holder, tuple) else None
    return None if node is None or node.step.pool != "threads" else node.name


def _holds(evidence: Evidence, holder: Name) -> str:
    return f"its threads hold the GIL for {evidence.gil.held[holder]:.0%} of the time"


def explained(found: Limit, evidence: Evidence) -> Limit:
    """Return a limit that also says how its node spends its busy time, or that names the holder of the GIL."""
    verdict = found.verdict
    name = (verdict.graph or "", verdict.node or "")
    node = evidence.sums.nodes.get(name)
    if node is None or verdict.limit not in ("places", "pool", "in_flight", "inbox", "order", "path", "device"):
        return found
    spent, holder = TimeBreakdown.by(node, evidence), _holder(evidence)
    share = node.share_of_busy(spent.gil_seconds) or 0.0
    computed = node.share_of_busy(spent.cpu_seconds) or 0.0
    told = found._replace(verdict=replace(verdict, spent=_in_words(node, spent, evidence)))
    if holder is None:
        return told
    if holder == name and computed + share >= _MOSTLY and evidence.gil.held[holder] >= _LEAST_GIL:
        verdict = replace(verdict, reason=_holds(evidence, holder), remedy=_BESIDE, limit="gil")
        return _beside(evidence, holder, found._replace(verdict=verdict))
    if share >= _LEAST_GIL:
        waits = "waits for it itself" if holder == name else f'"{name_of(*name)}" waits for it'
        reason = f"{_holds(evidence, holder)}, and {waits} for {share:.0%} of its own"
        return _beside(evidence, holder, Limit(found.used, 4, Verdict(holder[1], reason, _BESIDE, holder[0], "gil")))
    return told


def _in_words(node: NodeSum, spent: TimeBreakdown, evidence: Evidence) -> str:
    """Return a text about how a node spends its busy time; empty if no share is worth mentioning."""
    owner = max(evidence.gil.held, key=evidence.gil.held.__getitem__, default=None)
    seconds = {
        "computing on its device": node.timed.outside.compute_seconds,
        "computing in its threads": spent.cpu_seconds,
        f"waiting for the GIL{_held_by(owner)}": spent.gil_seconds,
        "waiting for the event loop": spent.loop_seconds,
        "on the way to a thread and back": spent.hop_seconds,
    }
    shares = {what: node.share_of_busy(each) or 0.0 for what, each in seconds.items()}
    parts = [f"{share:.0%} {what}" for what, share in shares.items() if share >= _LEAST_SAID]
    now = node.counters
    beside = {"got a second attempt": now.hedged, "went on with the failover": now.failed_over}
    ended = now.completed + now.failed
    told = [f"{count / ended:.0%} of its items {what}" for what, count in beside.items() if count]
    figures = node.step.counters.figures  # levels: the newest values, and not a difference of two snapshots
    columns = figure_columns([figures])
    if columns:
        cells = figure_cells(figures, columns)
        told.append(f"it tells {', '.join(map(' '.join, zip(columns, cells, strict=True)))}")
    # A node that gathers items counts as busy while they wait for their turn; its device is busy for a part of it.
    whose = "of the time in it, an item" if node.step.gathers else "of that it"
    return "; ".join([*([f"{whose} spends {', '.join(parts)}"] if parts else []), *told])


def _held_by(holder: Holder | None) -> str:
    if holder is None:
        return ""
    name = holder if isinstance(holder, str) else f'"{name_of(*holder)}"'
    return f" (held most by {name})"


_WHAT: Final[dict[Bound, str]] = {
    "concurrency": "its {n} place{s} (concurrency=)",
    "state": "its {n} place{s}, a stateful node's own,",
    "loop": "its only place on the event loop",
    "threads": "the {n} thread{s}",
    "processes": "the {n} worker process{es}",
    "max_workers": "its {n} place{s} (max_workers=)",
    "max_in_flight": "the {n} item{s} in flight (max_in_flight=)",
    "map_each": "the {n} place{s} of its map_each",
    "call": "the only call",
}
_MORE: Final[dict[Bound, tuple[str, str]]] = {
    "concurrency": ("concurrency={}", ""),
    "state": ("concurrency={}", "if it may have several items at a time"),
    "threads": ("max_workers={}", 'or move what computes to runs_on="process"'),
    "processes": (
        "Engine(max_processes={})",
        "or give it less to do, or items that hold more (each is sent to its process and back)",
    ),
    "max_workers": ("concurrency={}", "or raise max_workers="),
    "max_in_flight": ("max_in_flight={}", ""),
    "map_each": ("map_each(concurrency={})", ""),
}


def places(evidence: Evidence) -> Iterator[Limit]:
    """Yield the node's own places that are used most, and the pool that is used most: no other places can limit."""
    most: dict[bool, tuple[float, Hashable, Group]] = {}
    for key, group in evidence.sums.groups.items():
        least = most[group.is_pool][0] if group.is_pool in most else 0.0
        # Compare without rounding first, for speed: there are many groups, and each change that is tried comes here.
        if sum(group.busy.values()) > least * group.place_seconds and (used := round(group.utilisation, 2)) > least:
            most[group.is_pool] = used, key, group
    for _, key, group in sorted(most.values(), key=lambda each: each[2].is_pool):
        yield _limit_of_places(evidence, key, group)


def _limit_of_places(evidence: Evidence, key: Hashable, group: Group) -> Limit:
    sums = evidence.sums
    name = max(group.busy, key=group.busy.__getitem__)
    node = sums.nodes[name]
    several = group.limit != 1
    what = _WHAT[group.bound].format(n=f"{group.limit:,}", s="s" * several, es="es" * several)
    others = f", of which it takes {group.busy[name] / sum(group.busy.values()):.0%}" if len(group.busy) > 1 else ""
    verb = "is" if group.limit == 1 or group.bound in ("loop", "call") else "are"
    if group.limit == 1 and group.bound in ("concurrency", "state"):
        what = "its only place"
    if node.step.gathers and group.bound not in ("map_each", "max_in_flight"):
        what, verb = "what it may have at a time", "is"
    reason = f"{what} {verb} busy for {group.utilisation:.0%} of the time{others}{waiting(node)}{_starved(sums, node)}"
    kind: Kind = "pool" if group.is_pool else "places"
    found = Limit(group.utilisation, 3 if group.is_pool else 1, Verdict(name[1], reason, "", name[0], kind))
    if group.bound == "loop":
        return _off_loop(evidence, found, group.busy[name])
    if group.bound == "call":
        return _remedied(found, "make it faster, or have more calls at a time")
    if group.bound == "map_each" and not group.at:  # several limits multiplied, so there is no one place to name
        return _remedied(found, "raise map_each(concurrency=)")
    return _with_more(evidence, found, node, key, group)


def _with_more(evidence: Evidence, found: Limit, node: NodeSum, key: Hashable, group: Group) -> Limit:
    """Return a limit with more places of a group as the remedy."""
    (option, text), bound, stream = _MORE[group.bound], group.bound, node.name[0]
    opened = "" if stream not in evidence.sums.readers else _short(evidence.sums.readers[stream].at)
    at = {"map_each": _short(group.at), "max_in_flight": opened, "threads": "", "processes": ""}
    changes: Hashable = stream if bound == "max_in_flight" else key
    more = Option(option, group.limit, changes, at[bound] if bound in at else of_node(node))
    if node.step.gathers:
        return _more_at_a_time(found, node, more)
    if bound == "processes" and group.limit >= _cores():
        return _remedied(found, f"{text.removeprefix('or ')}, or more cores")
    most = inf
    if bound in POOLS:  # at most one of them computes on each core
        computed = sum(each.timed.outside.cpu_seconds for each in evidence.sums.nodes.values())
        most = _cores() / (group.limit if bound == "processes" else computed / evidence.elapsed_seconds or 0.1)
    elif node.step.pool == "threads":
        text = 'or move it to runs_on="process" if it computes'
    elif node.step.is_on_loop and bound in ("concurrency", "state"):
        text = ", ".join(filter(None, (text, "or have it take many items at once (batch=)")))
    return _remedied(found, text, (more,), most)


def _remedied(found: Limit, text: str, options: tuple[Option, ...] = (), most: float = inf) -> Limit:
    return found._replace(verdict=replace(found.verdict, remedy=text), options=options, most=most)


def _more_at_a_time(found: Limit, node: NodeSum, more: Option) -> Limit:
    """Return a limit with the remedy for a node that gathers items, for which more places alone may not be enough.

    Larger or more batches need places for their items, and more places need batches for their items. A batch is taken
    to last as long however many items it has.
    """
    step, places = node.step, more.now
    if step.holds is None and step.owns_loop and node.occupancy >= LEAST_USED:
        return _remedied(found, _MORE_IN_LOOP)
    if step.holds is None:
        return _remedied(found, "or have it take many items at once (batch=)" if step.gathers else "", (more,))
    larger = Option("batch=ps.Batch({})", step.batch_size, at=of_node(node))
    more, text = more._replace(changes=None), "or a larger concurrency= (batches at a time)"
    # Batches are full if there are places for the items of the next batch, too.
    if places >= 4 * step.holds:
        return _remedied(found, text, (larger,), places / (2 * step.holds))
    if places >= step.holds:
        together = _remedied(found, text, (more._replace(now=2 * step.holds), larger))
        if places > step.holds:
            return together
        # There are places for one batch only, so its items wait for the last items of the batch, which come late.
        least = min(node.timed.durations.quantile(0.0) or inf, node.mean_seconds)
        return together._replace(most=2.0, at_once=node.mean_seconds / least if least else 1.0)
    waited = min(step.batch_wait_seconds / (node.mean_seconds or 1.0), 1 - 1 / MOST_HEADROOM)
    told, text = found.verdict, ""
    if waited >= _LEAST_SAID:
        why = f"its batches hold {step.holds:,}, and wait for more in vain for {waited:.0%} of the time"
        told, text = replace(told, reason=f"{told.reason}; {why}"), "or max_wait_seconds=0 in its batch="
    found = _remedied(found._replace(verdict=told), text, (more,), step.holds / places)
    return found._replace(at_once=1 / (1 - waited))


def _starved(sums: Sums, node: NodeSum) -> str:
    """Return a text about a batch after this node that it cannot fill within the batch's wait; or an empty text."""
    places = min((group.limit for group in sums.own_places(node)), default=0)
    for reader in map(sums.nodes.get, [(node.name[0], consumer) for consumer in node.step.consumers]):
        if reader is None or not reader.step.batch_wait_seconds or not node.mean_seconds:
            continue
        given = places * (1 + int(reader.step.batch_wait_seconds / node.mean_seconds))
        if 0 < given < reader.step.batch_size:
            waits = f"wait for more in vain, {milliseconds(reader.step.batch_wait_seconds)} each time"
            return (
                f'; the batches of "{reader.name[1]}" hold {reader.step.batch_size:,}, and {waits}: "{node.name[1]}" '
                f"gives it {given:,} in that time"
            )
    return ""


def waiting(node: NodeSum) -> str:
    """Return a text about the inbox of a node, if the inbox shows that the node limits; otherwise an empty text."""
    if node.inbox_full_share >= LEAST_USED:
        return f", and its inbox is full for {node.inbox_full_share:.0%} of it"
    return f", and items wait in its inbox for {node.occupancy:.0%} of it" if node.occupancy >= LEAST_USED else ""


# If items are always ready for the reader of a stream, no node before the reader can limit: the reader limits.
_NEVER_WAITS: Final = 0.9
SOONER: Final = "have the source give items sooner: read ahead, or in several tasks"
_LESS: Final = "do less for each item outside of the graph, or make a node of it"


def streams(evidence: Evidence) -> Iterator[Limit]:
    """Yield the readers, the sources and the windows of streams."""
    for reader in evidence.sums.readers.values():
        yield _reader(reader)
        window = reader.window
        if window is not None and window.seconds:
            yield _source(reader, window)
            yield from _in_flight(evidence, reader, window)


def _reader(reader: ReaderSum) -> Limit:
    used = reader.busy_share
    reason = f"the reader of {reader.name} limits: it waited for items for only {1 - used:.0%} of the time"
    verdict = Verdict(None, reason, _LESS + _where(reader.at), limit="reader")
    return Limit(1.0, 6, verdict) if used >= _NEVER_WAITS else Limit(used, 0, verdict)


def _source(reader: ReaderSum, window: WindowSum) -> Limit:
    used = min(window.asking_seconds / window.seconds, 1.0)
    reason = f"the source limits: the stream of {reader.name} waits for it for {used:.0%} of the time"
    return Limit(used, 0, Verdict(None, reason, SOONER + _where(reader.at), limit="source"))


def _in_flight(evidence: Evidence, reader: ReaderSum, window: WindowSum) -> Iterator[Limit]:
    """Yield the window of a stream, the items that may be in flight.

    By Little's law, the used part of the window is the items a second, times the time of an item without its waits in
    queues. This time includes the wait of a finished item for its turn, because an item before it takes longer.
    """
    path = evidence.sums.critical_paths.get(reader.name)
    if path is None or not path.seconds:
        return
    running = path.seconds * evidence.sums.items(reader.name) / evidence.elapsed_seconds
    behind, keyed = window.behind_seconds / window.seconds, window.key_seconds / window.seconds
    used = min((running + behind + keyed) / window.size, 1.0)
    if keyed > running + behind:
        waits = f"{keyed / window.size:.0%} of the {window.size:,} items in flight wait for their keys (order_by=)"
        reason = f"the order by key limits: {waits}, most of them for {window.key}"
        remedy = "use keys with fewer calls each; if one has most of the calls, the stream has its speed"
        yield Limit(used, 2, Verdict(None, reason, remedy + _where(reader.at), limit="order"))
        return
    names: list[Name] = [(reader.name, node) for node in path.nodes]
    nodes = evidence.sums.nodes
    if behind <= running or not window.ordered:
        name = max(names, key=lambda each: nodes[each].mean_seconds)
        are = "item in flight (max_in_flight=) is" if window.size == 1 else "items in flight (max_in_flight=) are"
        reason = f"the {window.size:,} {are} busy for {used:.0%} of the time"
        found = Limit(used, 2, Verdict(name[1], reason, "", name[0], "in_flight"))
        yield _more_at_a_time(
            found, nodes[name], Option("max_in_flight={}", window.size, reader.name, _short(reader.at))
        )
        return
    of_graph = [name for name in nodes if name[0] == reader.name]
    graph, node = max(of_graph, key=lambda each: nodes[each].spread_seconds)
    reason = (
        f"its slow items hold up the order of the results: {behind / window.size:.0%} of the {window.size:,} items in "
        "flight have ended, and wait for one before them"
    )
    verdict = Verdict(node, reason, "or raise max_in_flight=", graph, "order")
    yield Limit(
        used, 2, verdict, (Option("ordered=False", at=_short(reader.at)),), (running + behind) / (running or 1.0)
    )


def limits(evidence: Evidence) -> Iterator[Limit]:
    """Yield all limits, each with the share of the time for which it was used."""
    yield from untimed(evidence)
    yield from without_workers(evidence)
    yield from places(evidence)
    yield from loop(evidence)
    yield from gil(evidence)
    yield from devices(evidence)
    yield from streams(evidence)
