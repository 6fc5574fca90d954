"""Regions: a planning pass that makes one program of adjacent device nodes."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from ...actors.policy import Policy
from ...engine.node import Node
from ...engine.passes import Draft, PassReport
from ...engine.tracing.template import reads
from ...engine.tracing.tracer import Step
from ..device_executor import DeviceExecutor
from .region_node import region_node, static_templates

# The most nodes of one region. Time to compile grows with it, and all of it passes before the first result: 50 nodes
# took 1.5 to 3.7 times as long as one of them alone (sin, three elementwise operations, a dot product, a layer of a
# network; JAX 0.10.1 on two CPU cores, 30-70 ms when these are idle), 200 took 3.3 to 8.4 times as long. What a larger
# region could still save is one call of the device in 50.
MAX_NODES: Final = 50

_PLAIN: Final = Policy(pure=True)
_Chain: TypeAlias = tuple[Step, ...]


def fuse_regions(draft: Draft) -> tuple[Draft, PassReport]:
    """Make one device node of adjacent pure ones that run in the same place, where nobody else reads between them.

    A region has one value that leaves it: that of its last step, and all readers of the others are inside. So it can
    have no path that leaves it and comes back, and fusing makes no cycle. A node is left out of a region that waits for
    something the node itself does not wait for: by itself, it may run meanwhile.
    """
    survey = _Survey(draft)
    steps: list[_Chain] = []
    changes: list[str] = []
    for index, chain in enumerate(draft.steps):
        region = survey.region_of[index]
        if region is None or len(region.members) == 1:
            steps.append(chain)
        elif index == region.members[0]:  # its last step, where all that it reads is there
            members = [draft.steps[member][0] for member in reversed(region.members)]
            node, arguments = region_node(members)
            last = members[-1]
            steps.append((Step(node, last.source, arguments, {}, (), last.location),))
            changes.append(f"one program for {node.name}: {len(members) - 1} calls of the device less")
    report = PassReport("regions", len(draft.steps), len(steps), tuple(changes), survey.notes())
    return replace(draft, steps=tuple(steps)), report


@dataclass
class _Region:
    """Steps that become one program.

    Attributes:
        kind: what they have in common.
        waits_for: what each of them waits for.
        members: indexes of the steps, the last one first.
    """

    kind: Hashable
    waits_for: int
    members: list[int] = field(default_factory=list[int])


class _Survey:
    """Finds the regions of a draft, in time that is linear in its steps.

    Attributes:
        region_of: for each step the region that it is in; None for what is not fused.
    """

    def __init__(self, draft: Draft) -> None:
        self._chains = draft.steps
        self._alone: dict[str, None] = {}
        self._kinds = [self._kind(chain) for chain in draft.steps]
        self._waits_for = self._find_waits()
        self.region_of: list[_Region | None] = [None] * len(draft.steps)
        self._find_regions({read.source for read in reads(draft.result)})

    def notes(self) -> tuple[str, ...]:
        """Return which device nodes were left as they are, and why."""
        return tuple(self._alone)

    def _kind(self, chain: _Chain) -> Hashable | None:
        """Return what the steps of a region have in common with this one; None if it is in none."""
        callee = chain[0].callee
        executor = callee.runs_in if isinstance(callee, Node) else None
        if not isinstance(callee, Node) or not isinstance(executor, DeviceExecutor):
            return None
        reason = _reason_to_stay_alone(callee, executor)
        if reason is not None:
            self._alone[f"{callee.name} stays a program of its own: {reason}"] = None
            return None
        options = executor.programs.options
        return options.device, options.batch, options.replicas, options.prefetch

    def _find_waits(self) -> list[int]:
        """Return for each step the set of those before it that cannot be in its region, as the bits of a number.

        What one device computes it computes one after the other, so there is nothing to gain from beginning early with
        what waits only for other nodes of the same kind.
        """
        waits: list[int] = []
        produced: dict[int, tuple[Hashable | None, int, int]] = {}  # kind, what it waits for, its own bit
        for index, chain in enumerate(self._chains):
            kind, mask = self._kinds[index], 0
            for read in _reads(chain):
                if read in produced:
                    other, further, bit = produced[read]
                    mask |= further if kind is not None and kind == other else further | bit
            waits.append(mask)
            produced[chain[-1].source] = kind, mask, 1 << index
        return waits

    def _find_regions(self, result: set[int]) -> None:
        escapes = _Region(None, 0)
        into = dict.fromkeys(result, escapes)  # for each value the region that has all of its readers
        for index in reversed(range(len(self._chains))):
            chain, kind = self._chains[index], self._kinds[index]
            region = into.get(chain[-1].source, escapes)
            if kind is None:
                region = escapes
            else:
                region = self._joined(region, index, kind)
                region.members.append(index)
                self.region_of[index] = region
            for source in _reads(chain):
                if into.setdefault(source, region) is not region:
                    into[source] = escapes
            if kind is not None:  # what a program is compiled for cannot be computed by a part of it
                into.update((read.source, escapes) for read in reads(*static_templates(chain[0])))

    def _joined(self, region: _Region, index: int, kind: Hashable) -> _Region:
        """Return the region of the readers if a step can join it, else a new one."""
        waits_for = self._waits_for[index]
        if region.kind != kind or len(region.members) >= MAX_NODES:
            return _Region(kind, waits_for)
        if region.waits_for != waits_for:
            name, last = self._chains[index][0].callee.name, self._chains[region.members[0]][0].callee.name
            self._alone[f"{name} is not in one program with {last}, which waits for more: it runs meanwhile"] = None
            return _Region(kind, waits_for)
        return region


def _reads(chain: _Chain) -> Iterable[int]:
    return {read.source for step in chain for read in step.reads()}


def _reason_to_stay_alone(node: Node[..., object], executor: DeviceExecutor) -> str | None:
    options = executor.programs.options
    if not options.pure:
        return "it is declared pure=False"
    if options.donate:
        return "it may overwrite its arguments, by donate=True"
    if node.policy != _PLAIN:
        return "it has a concurrency, timeout, retry or fallback of its own"
    if options.in_specs is not None or options.out_specs is not None:
        return "it says by in_specs or out_specs how its values are split"
    if options.batch is not None and options.batch.pad_axes:
        return "it has pad_axes, and its masks belong to its own arguments"
    if node.bound_to is not None:
        return "it is a method"
    return None
