"""Verdict: which node limits, why, what to do about it, and what a change would bring."""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Final

from ..telemetry.observation import LEAST_USED, NO_DEPTH, changed, name_of
from ..telemetry.tables import Rendered, Table, milliseconds, rate, significant
from ..telemetry.text import printable
from .limits import (
    MOST_HEADROOM,
    SOONER,
    Limit,
    Option,
    Verdict,
    explained,
    holding,
    inboxes,
    limits,
    of_node,
    without_workers,
)  # fmt: skip
from .sums import POOLS, CriticalPath, Evidence, Group, Name, NodeSum, Sums, TimeBreakdown, WindowSum

# Model: a profile as a network of limits, and how the limits change when a node changes.
#
# Operational analysis (Denning and Buzen, 1978): each resource is used for a share of the observed time. This share is
# the throughput times the time for which an item needs the resource (the utilisation law). No share exceeds 1, so the
# resource that is used most bounds the throughput: with `u` the largest share, at most 1/u times as many items can go
# through. The items in flight are such a resource as well, by Little's law (1961): throughput times how long an item
# stays.
#
# The model has the resources, but not the waits for them. So it compares the bound before a change with the bound after
# it, and expects the measured throughput to grow by the same factor: the measured throughput stays as far below the
# bound as it was.


@dataclass(frozen=True)
class Model:
    """A profile without its waits.

    Attributes:
        evidence: the numbers, without the time for which handlers waited for threads, processes, the GIL and the event
            loop.
        callers: the callers of the graph; None if items come from the source of a stream.
    """

    evidence: Evidence
    callers: "Callers | None"

    @classmethod
    def of(cls, evidence: Evidence, graph: str | None = None) -> "Model":
        """Return the model of a profile, with the callers of `graph`, or by default of the most called graph."""
        plain = _without_turns(without_pool_waits(evidence))
        return cls(plain, None if evidence.has_source else _callers(plain, graph))

    @cached_property
    def bound(self) -> float:
        """The highest utilisation of any limit: the measured throughput, divided by the possible throughput."""
        used = [limit.used for limit in limits(self.evidence)]
        delay_seconds, nodes = self.evidence.loop_delay_seconds, self.evidence.sums.nodes.values()
        batches = max((node.batch_seconds(delay_seconds) for node in nodes), default=0.0)
        used.append(min(batches / self.evidence.elapsed_seconds, 1.0))
        if self.callers is not None:
            used.append(self.callers.used(self.evidence))
        return max(used, default=0.0)

    def faster(self, name: Name, times: float) -> "Model":
        """Return the model as if the handler of a node had been `times` times as fast."""
        evidence, factor = self.evidence, 1 / times
        node = evidence.sums.nodes[name]
        saved = (node.busy_seconds or 0.0) * (1 - factor)
        sums = _scaled(evidence.sums, {name: factor})
        # An async handler that only waits does not hold the loop, so a faster one frees no time of the loop.
        freed = saved if node.step.holds_loop or holding(evidence) == name else 0.0
        before, after = evidence.sums.critical_paths, sums.critical_paths
        sums.readers = {
            name: reader
            if reader.window is None
            else replace(reader, window=_order_of(reader.window, before.get(name), after.get(name)))
            for name, reader in sums.readers.items()
        }
        covered, held = dict(evidence.covered_seconds), dict(evidence.gil.held)
        if name in covered:
            covered[name] *= factor
        if name in held:
            held[name] *= factor
        left = replace(
            evidence, sums=sums, loop_cpu_seconds=max(0.0, (evidence.loop_cpu_seconds or 0.0) - freed),
            loop_late_share=max(0.0, evidence.loop_late_share - freed / evidence.elapsed_seconds),
            covered_seconds=covered, gil=replace(evidence.gil, held=held),
        )  # fmt: skip
        return replace(self, evidence=left)

    def with_places(self, name: Name, concurrency: int) -> "Model":
        """Return the model as if a node had had `concurrency` places of its own."""
        groups = self.evidence.sums.groups
        own = [key for key in self.evidence.sums.nodes[name].places if not groups[key].is_pool]
        changed = self
        for key in [key for key in own if groups[key].is_of_runs] or own:
            changed = changed.more(key, concurrency / groups[key].limit)
        return changed

    def more(self, what: Hashable, times: float) -> "Model":
        """Return the model as if a group had had `times` times as many places, or a stream as many items in flight.

        Args:
            what: the key of a group, the name of a stream, or `CALLS` for the callers.
            times: the factor.
        """
        sums, callers, changes = self.evidence.sums, self.callers, dict[Hashable, Group]()
        pool = sums.groups[what].bound if what in sums.groups else None
        pool = pool if pool in POOLS else None  # nodes without a limit of their own share the pool
        for key, group in sums.groups.items():
            is_window = group.bound == "max_in_flight" and any(graph == what for graph, _ in group.busy)
            if key == what or group.bound == pool or is_window:
                limit, place_seconds = round(group.limit * times), group.place_seconds * times
                changes[key] = changed(group, limit=limit, place_seconds=place_seconds)
                if group.is_of_runs and callers is not None and any(graph == callers.graph for graph, _ in group.busy):
                    callers = replace(callers, growth=callers.growth * times)
        raised = sums.with_changes(groups=changes)
        raised.readers = {
            name: replace(reader, window=replace(reader.window, size=round(reader.window.size * times)))
            if reader.window is not None and name == what
            else reader
            for name, reader in sums.readers.items()
        }
        if callers is not None and what is CALLS:
            callers = replace(callers, count=round(callers.count * times))
        return Model(replace(self.evidence, sums=raised), callers)

    def sped_up(self, factor: float) -> "Model":
        """Return the model as if the same items had come `factor` times as fast."""
        evidence, sums = self.evidence, self.evidence.sums.copy()
        for group in sums.groups.values():
            group.place_seconds /= factor
        for node in sums.nodes.values():
            # Nobody knows how full inboxes would have been.
            node.timed, node.queue_seconds = node.timed._replace(queue=NO_DEPTH, blocked_seconds=0.0), 0.0
        sums.readers = {
            name: replace(
                reader, open_seconds=reader.open_seconds / factor,
                waited_seconds=max(0.0, reader.waited_seconds - reader.open_seconds * (1 - 1 / factor)),
                window=reader.window and replace(reader.window, seconds=reader.window.seconds / factor),
            )
            for name, reader in sums.readers.items()
        }  # fmt: skip
        faster = replace(
            evidence, sums=sums, elapsed_seconds=evidence.elapsed_seconds / factor,
            loop_late_share=min(1.0, evidence.loop_late_share * factor),
            gil=replace(evidence.gil, held={name: share * factor for name, share in evidence.gil.held.items()}),
        )  # fmt: skip
        return replace(self, evidence=faster)


@dataclass(frozen=True)
class Callers:
    """The callers of a graph, each of which makes one call after the other.

    The callers of the body of a `map_each` are the places of the `map_each`.

    Attributes:
        graph: the name of the graph.
        count: how many callers there are.
        pause_seconds: the time between the end of a call and the next call of the same caller.
        growth: how many times as many callers there are after a change; the sum of their pauses stays.
    """

    graph: str
    count: int
    pause_seconds: float
    growth: float = 1.0

    def used(self, evidence: Evidence) -> float:
        """Return the share of the callers' time that their calls and pauses take at least, by Little's law."""
        path = evidence.sums.critical_paths[self.graph]
        per_second = evidence.sums.items(self.graph) / evidence.elapsed_seconds
        return min(per_second * (self.pause_seconds + path.seconds / self.growth) / self.count, 1.0)


def _callers(evidence: Evidence, wanted: str | None) -> Callers | None:
    """Return the callers of the wanted graph, or of the graph with most calls at a time; None without any calls."""
    found: list[tuple[float, Callers]] = []
    for graph, path in evidence.sums.critical_paths.items():
        items = evidence.sums.items(graph)
        if not items or wanted not in (None, graph):
            continue
        nodes = (evidence.sums.nodes[graph, node] for node in path.nodes)
        waited = sum((node.counters.inbox.put_wait_seconds + node.timed.queue.waited_seconds) / items for node in nodes)
        stay = path.seconds + waited
        at_a_time = stay * items / evidence.elapsed_seconds
        groups = (group for node in path.nodes for group in evidence.sums.own_places(evidence.sums.nodes[graph, node]))
        places = max((group.limit for group in groups if group.is_of_runs), default=1)
        count = max(places, math.ceil(at_a_time - 0.05))  # measurements are never exact
        pause = max(0.0, count * evidence.elapsed_seconds / items - stay)
        found.append((at_a_time, Callers(graph, count, pause)))
    return max(found, key=lambda each: each[0], default=(0.0, None))[1]


def without_pool_waits(evidence: Evidence) -> Evidence:
    """Return evidence without the time in which handlers waited for threads and processes."""
    factors: dict[Name, float] = {}
    for group in evidence.sums.groups.values():
        total = sum(group.busy.values())
        if group.is_pool and total > group.place_seconds > 0:
            factors |= dict.fromkeys(group.busy, group.place_seconds / total)
    return replace(evidence, sums=_scaled(evidence.sums, factors))


def _without_turns(evidence: Evidence) -> Evidence:
    """Return evidence without the time in which handlers waited for the GIL, and for their turn on the event loop."""
    holder = holding(evidence)
    factors: dict[Name, float] = {}
    for name, node in evidence.sums.nodes.items():
        waits = node.timed.outside.hops or (evidence.loop_delay_seconds and not node.step.holds_loop)
        if waits and node.busy_seconds and name != holder and not node.step.gathers:
            spent = TimeBreakdown.by(node, evidence)
            factors[name] = max(0.0, 1 - (spent.gil_seconds + spent.loop_seconds) / node.busy_seconds)
    return replace(evidence, sums=_scaled(evidence.sums, factors))


def _scaled(sums: Sums, factors: Mapping[Name, float]) -> Sums:
    """Return sums in which the times of some handlers are multiplied by their factors."""
    factors = {name: factor for name, factor in factors.items() if factor != 1}
    nodes: dict[Name, NodeSum] = {}
    groups: dict[Hashable, Group] = {}
    for name, factor in factors.items():
        node = sums.nodes[name]
        if node.busy_seconds is not None:
            counters = changed(node.counters, busy_seconds=node.busy_seconds * factor)
            nodes[name] = changed(node, counters=counters, scale=node.scale * factor)
        for key in node.places:
            if name in sums.groups[key].busy:
                if key not in groups:
                    groups[key] = changed(sums.groups[key], busy=dict(sums.groups[key].busy))
                groups[key].busy[name] *= factor
    return sums.with_changes(nodes, groups)


def _order_of(window: WindowSum, before: CriticalPath | None, after: CriticalPath | None) -> WindowSum:
    """Return a window in which items wait for their turn in proportion to the time of the critical path."""
    if before is None or after is None or not before.seconds:
        return window
    return replace(window, behind_seconds=window.behind_seconds * after.seconds / before.seconds)


# Verdict: which node limits, why, and what to do about it.
#
# Any bounded resource can limit: the places of a node, the threads or processes of a pool, the event loop, a device,
# the items in flight, the reader of a stream and its source. The resource that was used for most of the time limits.
# If no resource was used for long, the callers limit: they call one after the other, or hardly at all. Then the longest
# path through the graph of a call counts, because nodes that run side by side take the time of the slowest.
#
# The `bottleneck` of statistics is a part of this: `full_inboxes`, which needs no times of handlers.


def find_verdict(evidence: Evidence) -> Verdict:
    """Return the verdict of a profile."""
    nodes = evidence.sums.nodes
    if evidence.elapsed_seconds <= 0 or not any(node.ended or node.held_seconds for node in nodes.values()):
        return Verdict(None, "nothing ran while the profile was taken", "put the calls inside of its `with` block")
    # Here, unlike in the model, the time that a handler waits for its turn on the loop counts: it takes a place then.
    plain = without_pool_waits(evidence)
    return _choose([*limits(plain), *inboxes(plain)], Model.of(evidence), evidence)


def _choose(found: list[Limit], model: Model, evidence: Evidence) -> Verdict:
    most = _most_used(found)
    if most is not None and most.used >= LEAST_USED:
        most = explained(most, evidence)
        return _advised(model, most, _headroom(model, most))
    idle = "no node is busy for more than half of the time that it could be"
    taken, places = evidence.admitted
    if taken >= LEAST_USED:
        are = "place is" if places == 1 else f"{places:,} places are"
        reason = f"max_in_flight= limits: its {are} taken for {taken:.0%} of the time, and {idle}"
        return Verdict(None, reason, "raise max_in_flight=, or have the calls take less time", limit="in_flight")
    started = max(without_workers(evidence), key=lambda limit: limit.used, default=None)
    if started is not None:  # readers wait because workers start, so the source is not to blame
        return _advised(model, started, started.most)
    if evidence.has_source:
        reason, bound = f"the source limits: {idle}, and readers wait for items", model.bound
        headroom = min(1 / bound, MOST_HEADROOM) if bound else MOST_HEADROOM
        return Verdict(None, reason, SOONER, limit="source", headroom=headroom, factor=headroom)
    path = _longest_path(model, evidence)
    return path or Verdict(None, f"the callers limit: {idle}", "have more calls at a time", limit="callers")


def _most_used(found: Iterable[Limit]) -> Limit | None:
    return max(found, key=lambda limit: (round(limit.used, 2), limit.precedence), default=None)


def _headroom(model: Model, most: Limit) -> float | None:
    """Return how many times as fast everything would be without the node, or else the limit; None if unknown."""
    verdict = most.verdict
    node = model.evidence.sums.nodes.get((verdict.graph or "", verdict.node or ""))
    if node is not None and node.busy_seconds is None:
        return None
    if verdict.limit == "pool" and most.most < inf and not most.options:
        return most.most  # worker processes start, which is no work of the node
    if verdict.node is not None and verdict.graph is not None:
        rest = model.faster((verdict.graph, verdict.node), inf).bound
    else:
        others = [limit.used for limit in limits(model.evidence) if limit.verdict.limit != verdict.limit]
        rest = max(others, default=0.0)
    return min(most.used / rest, MOST_HEADROOM) if rest else MOST_HEADROOM


# The factors by which an option may be raised: beyond four, a prediction is too far from the measurement.
_TIMES: Final = (2, 3, 4)
CALLS: Final = "calls at a time"


def _advised(model: Model, found: Limit, headroom: float | None) -> Verdict:
    """Return a verdict whose remedy says what to type, with a value that is as large as helps, and the gain."""
    verdict, options = replace(found.verdict, headroom=headroom), found.options
    if not options or found.most <= 0 or headroom is None:
        factor = None if options or headroom is None else min(headroom, found.most)
        said = " and ".join(_typed(option, _TIMES[0]) for option in options)
        return replace(verdict, remedy="; ".join(filter(None, (said, verdict.remedy))), factor=factor)
    said, factor, changed = _typed_as_needed(model, found)
    gain = f"{factor:.1f} times as fast"
    if factor < _LEAST_GAIN and (other := _most_used(limits(changed.evidence))) is not None:
        also, both, _ = _typed_as_needed(changed, other) if other.options and other.most > 0 else ("", 1.0, changed)
        name = f'"{other.verdict.name}"' if other.verdict.node else f"the {other.verdict.limit}"
        why = other.verdict.reason if other.verdict.node == verdict.node else f"{name} limits as much"
        gain = f"alone no faster, as {why}"
        if both >= _LEAST_GAIN:
            said, factor = f"{said} together with {also}", factor * both
            gain = f"{factor:.1f} times as fast"
    remedy = "; ".join(filter(None, (f"{said}, {gain}", verdict.remedy)))
    return replace(verdict, remedy=remedy, factor=factor)


# A smaller gain counts as no gain.
_LEAST_GAIN: Final = 1.05


def _typed_as_needed(model: Model, found: Limit) -> tuple[str, float, Model]:
    """Return the text of a limit's options, with the smallest values that gain the most; the gain; and the model then.

    The gain says how many times as fast everything becomes.
    """
    times = _TIMES[-1]
    factor, changed = _factor(model, found, times)
    for fewer in _TIMES[:-1] if any(option.now for option in found.options) else ():
        less = _factor(model, found, fewer)
        if less[0] >= 0.95 * factor:
            times, (factor, changed) = fewer, less
            break
    return " together with ".join(_typed(option, times) for option in found.options), factor, changed


def _typed(option: Option, times: int) -> str:
    return " at ".join(filter(None, (option.text.format(option.now * times), option.at)))


def _factor(model: Model, found: Limit, times: float) -> tuple[float, Model]:
    """Return how many times as fast everything becomes with `times` as large options of a limit; and the model then."""
    name = found.verdict.graph or "", found.verdict.node or ""
    has_number = any(option.now for option in found.options)
    gain = min(times * found.at_once, found.most * found.at_once) if has_number else found.most
    changed = model
    for what in (option.changes for option in found.options):
        changed = changed.more(what, times) if what is not None else changed
    is_inbox = found.verdict.limit == "inbox"
    if changed is model and name in model.evidence.sums.nodes and not is_inbox:
        changed = model.faster(name, gain)
    # An inbox that holds up a node is not in the model. So for an inbox, compare its own use with the unchanged model.
    used, rest = found.used if is_inbox else model.bound, changed.bound
    return max(1.0, min(gain, used / rest if rest else MOST_HEADROOM)), changed


def _longest_path(model: Model, evidence: Evidence) -> Verdict | None:
    """Return a verdict about the slowest node of the longest path; None if calls do not come one after the other."""
    nodes, elapsed = model.evidence.sums.nodes, model.evidence.elapsed_seconds
    paths = model.evidence.sums.critical_paths.values()
    path = max(paths, key=lambda each: each.seconds * model.evidence.sums.items(each.graph), default=None)
    if path is None or path.seconds * model.evidence.sums.items(path.graph) < LEAST_USED * elapsed:
        return None
    slowest = max(path.nodes, key=lambda node: nodes[path.graph, node].mean_seconds)
    seconds = nodes[path.graph, slowest].mean_seconds
    share = seconds / path.seconds
    reason = f"of the longest path through the graph it takes {share:.0%}, {milliseconds(seconds)} each time"
    free = model.faster((path.graph, slowest), inf).bound
    headroom = min(model.bound / free, MOST_HEADROOM) if free else MOST_HEADROOM
    found = Limit(1.0, 0, Verdict(slowest, reason, "or make it faster", path.graph, "path"))
    node, count = nodes[path.graph, slowest], 1 if model.callers is None else model.callers.count
    holds, waited = node.step.holds or 0, node.step.batch_wait_seconds / (seconds or 1.0)
    found = found._replace(options=(Option("{} calls at a time", count, CALLS),))
    if holds > count and waited >= LEAST_USED:  # a batch waits for calls that do not come
        verdict = replace(found.verdict, remedy=f"or have {holds:,} calls at a time")
        option = Option("max_wait_seconds=0 in the batch=", at=of_node(node))
        found = found._replace(verdict=verdict, options=(option,), most=1 / max(1 - waited, 1 / MOST_HEADROOM))
    return _advised(model, explained(found, evidence), headroom)


@dataclass(frozen=True)
class Prediction(Rendered):
    """The effect of more places of a node. `str()` gives a sentence, notebooks show a table.

    Attributes:
        node: the name of the node.
        graph: the name of its graph.
        concurrency: how many items the node may have at a time.
        items_per_second: the items that went through the graph each second.
        predicted_items_per_second: the items that would have gone through the graph each second.
        factor: the predicted rate, divided by the measured rate.
        verdict: the verdict with these places.
    """

    node: str
    graph: str
    concurrency: int
    items_per_second: float
    predicted_items_per_second: float
    factor: float
    verdict: Verdict

    def __str__(self) -> str:
        return printable(f"{self._change()}: {self._effect()}; then {self.verdict}")

    def _change(self) -> str:
        return f'"{name_of(self.graph, self.node)}" with {self.concurrency:,} place{"s" * (self.concurrency != 1)}'

    def _effect(self) -> str:
        predicted, measured = rate(self.predicted_items_per_second, "items"), rate(self.items_per_second, "items")
        return f"{predicted} instead of {measured} ({significant(self.factor)} times as many)"

    def _table(self) -> Table:
        return Table((("what if", self._change()), ("throughput", self._effect()), ("then", str(self.verdict))))


def predict(evidence: Evidence, node: str, concurrency: int, graph: str | None = None) -> Prediction:
    """Return the effect of `concurrency` places of a node.

    Raises:
        ValueError: there is no such node, or several, or the node has no places of its own.
    """
    name = _found(evidence, node, graph)
    total = evidence.sums.nodes[name]
    if concurrency < 1:
        raise ValueError(f"concurrency= is a number of places, at least 1, not {concurrency!r}")
    if total.step.gathers or not evidence.sums.own_places(total):
        raise ValueError(f"node {name[1]!r} has no concurrency= of its own that could change")
    model = Model.of(evidence, name[0])
    changed = model.with_places(name, concurrency)
    bound = changed.bound
    factor = model.bound / bound if bound else 1.0
    per_second = evidence.sums.items(name[0]) / evidence.elapsed_seconds if evidence.elapsed_seconds else 0.0
    then = changed.sped_up(factor)
    verdict = _choose([*limits(then.evidence)], then, then.evidence)
    return Prediction(name[1], name[0], concurrency, per_second, per_second * factor, factor, verdict)


def _found(evidence: Evidence, node: str, graph: str | None) -> Name:
    names = [name for name, total in evidence.sums.nodes.items() if total.ended]
    found = [name for name in names if name[1] == node and graph in (None, name[0])]
    if len(found) == 1:
        return found[0]
    if found:
        graphs = ", ".join(repr(name[0]) for name in found)
        raise ValueError(f"several graphs have a node {node!r}: say which, with graph= one of {graphs}")
    known = ", ".join(repr(name[1]) for name in names) or "none"
    raise ValueError(f"no node {node!r} ran while the profile was taken; these nodes did: {known}")
