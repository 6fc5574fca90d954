"""How many items a device node takes at a time: a table and a picture of the sizes that were tried, and strategies."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from .. import Node
from ..devices import TriedSizes, try_sizes
from ..studio.drawing import framed
from ..telemetry.tables import Column, Rendered, Table, count, milliseconds, rate, scaled
from .platform_status import status

Approach: TypeAlias = Literal["all in memory", "over a mesh", "in chunks", "as a stream"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to compute all items.

    Attributes:
        approach: "all in memory": one call with all items; "over a mesh": one call, its rows split over devices; "in
            chunks": calls of the recommended size, from data in the memory of the host; "as a stream": such calls, from
            data that do not fit into the memory of the host.
        is_possible: whether the memory suffices.
        reason: why the strategy is possible, or why not, with the bytes.
        formula: the memory that the strategy takes, as a formula with numbers.
    """

    approach: Approach
    is_possible: bool
    reason: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class FitPlan(TriedSizes, Rendered):
    """The sizes that were tried, and how to compute all items. `str()` shows it as a table.

    Attributes:
        items: how many items there are; None if unknown.
        strategies: all strategies, the best possible one first.
    """

    items: int | None
    strategies: tuple[Strategy, ...]

    @property
    def strategy(self) -> Strategy:
        """The best strategy to compute all items."""
        return self.strategies[0]

    def to_svg(self) -> str:
        """Return a picture: throughput over the size of a call, with the knee and what does not fit."""
        return _drawn(self)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _table(self) -> Table:
        return Table(
            facts=(
                ("node", f"{self.node} on {self.device}"),
                ("limit", f"{scaled(self.limit.bytes, 'B')}: {self.limit.source}"),
                ("memory", f"{scaled(self.fixed_bytes, 'B')} + {scaled(self.bytes_per_item, 'B')} an item"),
                ("recommended", f"{count(self.recommended_size)} items a call; {_most(self.largest_size)}"),
                *((one.approach, f"{'' if one.is_possible else 'no: '}{one.reason}") for one in self.strategies),
            ),
            columns=(*map(Column, ("size", "items/s", "median", "from", "to", "memory")), Column("", is_number=False)),
            rows=tuple(
                (
                    count(one.size),
                    rate(one.items_per_second),
                    *map(milliseconds, (one.median_seconds, one.low_seconds, one.high_seconds)),
                    scaled(one.bytes, "B"),
                    one.why_not or ("recommended" if one.size == self.recommended_size else ""),
                )
                for one in self.tried
            ),
            remark="From and to are the quartiles; memory is that of each device",
        )


def _most(size: int | None) -> str:
    return "any number fits" if size is None else f"{count(size)} fit"


async def fit(
    node: Node[..., Any],
    sample: tuple[Any, ...],
    limit: "int | Literal['auto']" = "auto",
    items: int | None = None,
    *,
    resources: Mapping[str, Any] | None = None,
) -> FitPlan:
    """Find out how many items a device node should take at a time, by trying.

    The sizes 1, 2, 4 and so on are compiled, each for as many copies of the sample, and run several times, transfers
    included. The search ends at a size whose memory, by XLA's analysis, exceeds the limit; such a size is not run. It
    also ends when larger sizes have no higher throughput, or when one run takes seconds. If an accelerator runs out of
    memory, that size fails. On a CPU the system would kill the process, so only the limit protects it.

    Args:
        node: a device node. A node without `batch=` is tried as if it had a batch.
        sample: the arguments of one item, without those that come from resources, as in `sample_input=`.
        limit: the most bytes on each device. "auto" takes the free memory that `devices.status()` shows; for a CPU, the
            least free memory of the control group, a SLURM job and the machine; less a tenth as a reserve.
        items: how many items there are to compute, for the strategy.
        resources: by parameter, the arguments that will come from resources.

    Raises:
        DeviceError: there is no such device, not even one item fits, or the sample has nothing to stack.
        OptionsError: `limit` or `items` does not accept its value.
        TypeError: the node is not a device node, or the sample does not fit its parameters.
        Exception: the error that the function raised while it was traced or ran.
    """
    found = await try_sizes(node, sample, limit, items, resources=resources)
    devices = 0
    if not found.is_mesh:  # of a mesh, the rows are split already
        seen = await asyncio.to_thread(status)
        others = [one for one in seen.devices if one.is_local and one.platform == found.platform]
        devices = 1 if found.platform == "cpu" else len(others)  # those of a CPU share the memory of the host
    return FitPlan(**vars(found), items=items, strategies=_strategies(items, found, devices))


def _strategies(items: int | None, found: TriedSizes, devices: int) -> tuple[Strategy, ...]:
    """Return all ways to compute so many items, the best one that is possible first.

    Args:
        items: how many items; None if unknown.
        found: the sizes that were tried.
        devices: how many devices with separate memory could share the rows; 0 if the rows are split already.
    """
    fixed, per_item, size = found.fixed_bytes, found.bytes_per_item, found.recommended_size

    def shown(number: float) -> str:
        return scaled(number, "B")

    def way(approach: Approach, rows: int, each: str) -> Strategy:
        taken = fixed + per_item * rows
        fits = taken <= found.limit.bytes
        formula = f"{shown(fixed)} + {rows:,} × {shown(per_item)} = {shown(taken)}"
        told = f"{'within' if fits else 'more than'} the limit of {shown(found.limit.bytes)}"
        reason = f"{each} {shown(taken)}, {told}"
        return Strategy(approach=approach, is_possible=fits, reason=reason, formula=formula)

    chunk = fixed + per_item * size
    formula = f"{shown(fixed)} + {size:,} × {shown(per_item)} = {shown(chunk)} a call"
    if items is None:
        stream = Strategy(
            approach="as a stream",
            is_possible=True,
            reason=f"how many items there are is not known; calls of {size:,} take {shown(chunk)} each",
            formula=formula,
        )
        return (stream,)
    data = items * found.item_bytes
    holds = data <= found.host_limit.bytes
    told = f"the data take {shown(data)}, and the host has {shown(found.host_limit.bytes)}"
    ways = [way("all in memory", items, "one call takes")]
    rows = -(-items // max(devices, 1))
    over = way("over a mesh", rows, f"on each of {devices} devices one call takes")
    if devices == 1:
        over = replace(over, is_possible=False, reason="there is no other device with memory of its own")
    if devices:
        ways.append(over)
    chunks = f"{-(-items // size):,} calls of {size:,} take {shown(chunk)} each; {told}"
    ways.append(
        Strategy(
            approach="in chunks",
            is_possible=holds,
            reason=chunks,
            formula=f"{formula}; {items:,} × {found.item_bytes:,} B",
        )
    )
    ways.append(Strategy(approach="as a stream", is_possible=True, reason=chunks, formula=formula))
    return tuple(sorted(ways, key=lambda one: not one.is_possible))


# The picture.

_WIDTH, _HEIGHT = 460.0, 220.0
_LEFT, _BOTTOM = 64.0, 34.0


def _drawn(plan: FitPlan) -> str:
    sizes = [one.size for one in plan.tried]
    best = max(one.items_per_second or 0.0 for one in plan.tried)
    span = max(math.log2(sizes[-1] / sizes[0]), 1.0)

    def x(size: int) -> float:
        return _LEFT + 16 + (_WIDTH - _LEFT - 40) * math.log2(size / sizes[0]) / span

    def y(items_per_second: float) -> float:
        return 20 + (_HEIGHT - _BOTTOM - 20) * (1 - items_per_second / best)

    base = _HEIGHT - _BOTTOM
    ran = [(x(one.size), y(one.items_per_second)) for one in plan.tried if one.items_per_second is not None]
    elements = [
        f'<path class="edge" d="M{_LEFT:.1f} 10V{base:.1f}H{_WIDTH:.1f}"/>',
        f'<path class="edge" d="M{"L".join(f"{left:.1f} {top:.1f}" for left, top in ran)}"/>',
        f'<text class="detail" x="{_LEFT - 6:.1f}" y="{y(best) + 4:.1f}" text-anchor="end">{rate(best)}</text>',
        f'<text class="detail" x="{_LEFT - 6:.1f}" y="{base + 4:.1f}" text-anchor="end">0</text>',
        f'<text class="detail" x="{_LEFT:.1f}" y="{_HEIGHT:.1f}">items a call</text>',
    ]
    for one in plan.tried:
        left = x(one.size)
        kind, top, about = "control", base, one.why_not
        if one.items_per_second is not None:
            kind = "output" if one.size == plan.recommended_size else "node"
            top, about = y(one.items_per_second), rate(one.items_per_second, "items")
        about = f"{one.size:,}: {about}, {scaled(one.bytes, 'B')}"
        elements += [
            f'<circle class="{kind}" cx="{left:.1f}" cy="{top:.1f}" r="5"><title>{about}</title></circle>',
            f'<text class="detail" x="{left:.1f}" y="{base + 16:.1f}" text-anchor="middle">{one.size:,}</text>',
        ]
    return framed(f"{plan.node} on {plan.device}", elements, _WIDTH, _HEIGHT)
