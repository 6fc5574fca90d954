"""How many items a device node takes at a time: sizes are tried, and the knee is recommended."""

import asyncio
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from .._errors import DeviceError
from ..actors.accepted import Accepted, check, is_whole, optional, whole
from ..engine.drawing.svg import framed
from ..engine.engine import default_engine
from ..engine.node import Node
from ..engine.options import resolve
from ..telemetry.rendered import Rendered
from ..telemetry.tables import Column, Table, count, milliseconds, rate, scaled
from .arguments import on_host
from .benchmarking import quartiles
from .device_batch import DeviceBatch, PackedBatch
from .device_pool import DevicePool
from .dispatch import is_out_of_memory
from .engine_device import DeviceCall, EngineDevice, SingleCallQueue
from .executor import DeviceExecutor
from .machine import read_free_memory, read_resident_memory
from .platform_status import Status, status
from .selection import AUTO
from .untyped_jax import jax

if TYPE_CHECKING:
    from ..engine.pools import Pools
    from .arguments import Arguments
    from .compiling import Executable, JittedFunction

Approach: TypeAlias = Literal["all in memory", "over a mesh", "in chunks", "as a stream"]

# What neither XLA's analysis nor the allocator counts: fragments, the code of programs, what other nodes hold.
_RESERVE_SHARE: Final = 0.1
# The knee gives this share of the best throughput. On two cores, medians of one size differ by some percent.
_KNEE_SHARE: Final = 0.9
# The search ends when so many sizes in a row have given no more than the best before, or one run has taken so long.
_MOST_IN_VAIN: Final = 3
_LONGEST_RUN_SECONDS: Final = 2.0
_LARGEST: Final = 1 << 20
# Each size is run for so long, and at least so often.
_SECONDS_A_SIZE: Final = 0.1
_FEWEST_RUNS: Final = 3
_MOST_RUNS: Final = 30


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """A limit on memory.

    Attributes:
        bytes: how much memory may be taken.
        source: what sets the limit, in words, with the amounts that are subtracted from it.
        reserve_bytes: how much of the free memory is left in reserve; 0 if the limit was given.
    """

    bytes: int
    source: str
    reserve_bytes: int


@dataclass(frozen=True, kw_only=True)
class TriedSize:
    """A size that was tried.

    Attributes:
        size: items in a call.
        bytes: the memory on each device: the arguments, outputs and temporaries of the program, as XLA says, and the
            arguments of the calls that are transferred meanwhile (`prefetch=`).
        median_seconds: from the call until the result is there; None if it did not run.
        low_seconds: a quarter of the runs took at most this.
        high_seconds: three quarters of the runs took at most this.
        items_per_second: at the median.
        why_not: why it did not run ("over the limit"), or not to its end ("no memory left"); empty if it did.
    """

    size: int
    bytes: int
    median_seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    items_per_second: float | None = None
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to compute all items.

    Attributes:
        approach: "all in memory": one call with all items; "over a mesh": one call, its rows split over devices; "in
            chunks": calls of the recommended size, from data in the memory of the host; "as a stream": the same, from
            data that the memory of the host does not hold.
        is_possible: whether the memory suffices.
        reason: why, or why not, with the bytes.
        formula: the memory that it takes, as a formula with numbers.
    """

    approach: Approach
    is_possible: bool
    reason: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class FitPlan(Rendered):
    """How many items a device node takes at a time, and how to compute all of them. `str()` shows it as a table.

    Attributes:
        node: name of the node.
        device: the device on which sizes were tried.
        limit: the memory on a device.
        host_limit: the memory for the data on the host.
        tried: the sizes, in ascending order.
        recommended_size: the knee: the smallest size that gives at least nine tenths of the best throughput.
        largest_size: the most items that fit, by the formula; None if the memory does not grow with the items.
        fixed_bytes: the memory of a call for parameters and constants, however many items it has.
        bytes_per_item: the memory that each item adds.
        items: how many items there are; None if unknown.
        strategies: all strategies, the best possible one first.
    """

    node: str
    device: str
    limit: MemoryLimit
    host_limit: MemoryLimit
    tried: tuple[TriedSize, ...]
    recommended_size: int
    largest_size: int | None
    fixed_bytes: int
    bytes_per_item: int
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
    limit: "int | Literal['auto']" = AUTO,
    items: int | None = None,
    *,
    resources: Mapping[str, Any] | None = None,
) -> FitPlan:
    """Find out how many items a device node should take at a time, by trying.

    The sizes 1, 2, 4 and so on are compiled, for as many copies of the sample, and run several times, transfers
    included. The search ends at a size whose memory, by XLA's analysis, exceeds the limit (it is not run), when larger
    sizes have no higher throughput, or when one run takes seconds. If an accelerator runs out of memory, that size
    fails; on a CPU the system would kill the process, so only the limit protects it.

    Args:
        node: a device node; one without `batch=` is tried as if it had one.
        sample: the arguments of one item, without those that come from resources, as in `sample_input=`.
        limit: the most bytes on each device; "auto" takes what `devices.status()` says is free there, or for a CPU the
            least of what the control group, a SLURM job and the machine have left, less a tenth as a reserve.
        items: how many items there are to compute, for the strategy.
        resources: by parameter, the arguments that will come from resources.

    Raises:
        DeviceError: there is no such device, not even one item fits, or the sample has nothing to stack.
        OptionsError: `limit` or `items` does not accept its value.
        TypeError: the node is not a device node, or the sample does not fit its parameters.
        Exception: what the function raised while it was traced, or ran.
    """
    check("limit", limit, _LIMIT, "fit(")
    check("items", items, optional(whole(1)), "fit(")
    executor: Any = getattr(node, "executor", None)
    if not isinstance(executor, DeviceExecutor):
        raise TypeError(f"devices.fit takes a node made by @ps.device_node, got {node!r}")
    given: Any = sample
    if not isinstance(given, tuple):
        raise TypeError(f"devices.fit takes a tuple, of the arguments of one item, got {given!r}: write (argument,)")
    if isinstance(executor.options.batch, PackedBatch):
        raise TypeError(f"devices.fit tries sizes of batches, and node {executor.name!r} packs its items into rows")
    found = resources or {}
    if executor.options.batch is None:
        batched = replace(executor.options, batch=DeviceBatch(1))
        executor = DeviceExecutor(executor.name, executor.fn, batched, executor.passes)
    arguments = executor.arguments(frozenset(found))
    pools, options = default_engine()._runtime.pools, resolve("Engine", {}, {})
    async with pools.other(DevicePool, DevicePool).fitting:
        return await fit_executor(
            executor,
            pools,
            options.device_strategy,
            arguments,
            arguments.merge(sample, found),
            limit=limit,
            items=items,
        )


_LIMIT: Final = Accepted('"auto" or a whole number of bytes of at least 1', lambda one: one == AUTO or is_whole(one, 1))


async def fit_executor(
    executor: DeviceExecutor,
    pools: "Pools",
    device_strategy: str,
    arguments: "Arguments",
    values: tuple[Any, ...],
    *,
    limit: "int | Literal['auto']" = AUTO,
    items: int | None = None,
) -> FitPlan:
    """Do what `fit` does, for the executor of a batched node in an Engine, and all arguments of a call."""
    options = executor.options
    pool = pools.other(DevicePool, DevicePool)
    name = device_strategy if options.device == AUTO else options.device
    (device, *_) = pool.opened(name, options.replicas) or await pool.open(name, options.replicas)
    seen = await asyncio.to_thread(status)
    most, host = _limits(seen, device, limit)
    trial = _Trial(executor, device, arguments, values, most.bytes)
    tried = await trial.run(items)
    ran = [one for one in tried if one.items_per_second is not None]
    if not ran:
        raise DeviceError(f"not even one item of node {executor.name!r} fits: {tried[-1].why_not}")
    best = max(one.items_per_second or 0.0 for one in ran)
    recommended = next(one.size for one in ran if (one.items_per_second or 0.0) >= _KNEE_SHARE * best)
    fixed, per_item = _formula(tried)
    largest = max((most.bytes - fixed) // per_item, ran[-1].size) if per_item else None
    devices = 0  # of a mesh, the rows are split already
    if device.placement.mesh is None:
        others = [one for one in seen.devices if one.is_local and one.platform == _platform(device)]
        devices = 1 if _platform(device) == "cpu" else len(others)  # those of a CPU share the memory of the host
    return FitPlan(
        node=executor.name,
        device=device.name,
        limit=most,
        host_limit=host,
        tried=tuple(tried),
        recommended_size=recommended,
        largest_size=largest,
        fixed_bytes=fixed,
        bytes_per_item=per_item,
        items=items,
        strategies=_strategies(items, fixed, per_item, most, host, trial.item_bytes, recommended, devices),
    )


async def find_size(
    executor: DeviceExecutor, pools: "Pools", device_strategy: str, arguments: "Arguments", values: tuple[Any, ...]
) -> int:
    """Return how many items pay."""
    return (await fit_executor(executor, pools, device_strategy, arguments, values)).recommended_size


class _Trial:
    """Tries sizes of one node, on one device or mesh.

    Attributes:
        item_bytes: of the arguments of one item that are stacked.
    """

    def __init__(
        self,
        executor: DeviceExecutor,
        device: EngineDevice,
        arguments: "Arguments",
        values: tuple[Any, ...],
        limit_bytes: int,
    ) -> None:
        assert arguments.stacker is not None
        self._executor = executor
        self._device = device
        self._arguments = arguments
        self._jitted: JittedFunction = executor.jitted(device.placement, arguments)
        item, self._group = arguments.looked_at(values)
        self._item = on_host(item)
        self._limit_bytes = limit_bytes
        self._can_run_out = _platform(device) != "cpu"
        self.item_bytes = self._item.size_bytes
        (self._least,) = executor.batch_sizes(DeviceBatch(1), arguments)  # over so many devices rows are split
        self._queue = SingleCallQueue(executor.name, device, self._jitted, arguments.parameters)

    async def run(self, items: int | None) -> list[TriedSize]:
        """Return what sizes in ascending order have given."""
        tried: list[TriedSize] = []
        best, in_vain, size = 0.0, 0, self._least
        while size <= min(_LARGEST, items or _LARGEST) or not tried:
            one = await self._try(size)
            tried.append(one)
            if one.items_per_second is None or one.median_seconds is None:
                break
            in_vain = in_vain + 1 if one.items_per_second <= best else 0
            best = max(best, one.items_per_second)
            if in_vain >= _MOST_IN_VAIN or one.median_seconds > _LONGEST_RUN_SECONDS:
                break
            size *= 2
        return tried

    async def _try(self, size: int) -> TriedSize:
        executable = await self._compiled(size)
        memory = executable.memory
        taken = 0
        if memory is not None:
            taken = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            taken -= memory.alias_size_in_bytes
        taken += (self._executor.options.prefetch - 1) * size * self.item_bytes // self._least
        if taken > self._limit_bytes:
            return TriedSize(size=size, bytes=taken, why_not="over the limit")
        args, _ = self._arguments.stack([self._item], self._group, size)
        try:
            seconds = await self._timed(args, size)
        except Exception as error:
            if self._can_run_out and any(map(is_out_of_memory, _causes(error))):
                return TriedSize(size=size, bytes=taken, why_not="no memory left")
            raise
        low, middle, high = quartiles(seconds)
        return TriedSize(
            size=size, bytes=taken, median_seconds=middle, low_seconds=low, high_seconds=high,
            items_per_second=size / middle,
        )  # fmt: skip

    async def _compiled(self, size: int) -> "Executable":
        """Return the program for so many items, compiled off the loop from shapes alone."""
        args = [*self._arguments.stack([self._item], self._group, self._least)[0]]
        for position in (*self._arguments.stacked, *range(len(self._arguments.names), len(args))):
            args[position] = jax.tree.map(functools.partial(_shape_of, size), args[position])
        return await self._device.compile(self._jitted, tuple(args))

    async def _timed(self, args: tuple[Any, ...], size: int) -> list[float]:
        """Return how long runs took, without the first, which may set up what later ones find."""
        seconds: list[float] = []
        until = math.inf
        while len(seconds) < _MOST_RUNS and (len(seconds) <= _FEWEST_RUNS or perf_counter() < until):
            began = perf_counter()
            call = DeviceCall(self._jitted, args, size * self.item_bytes)
            await self._queue.run(call)
            seconds.append(perf_counter() - began)
            if len(seconds) == 1:
                until = perf_counter() + _SECONDS_A_SIZE
                if seconds[0] > _LONGEST_RUN_SECONDS:
                    return seconds
        return seconds[1:]


def _shape_of(size: int, rows: Any) -> Any:
    return jax.ShapeDtypeStruct((size, *rows.shape[1:]), rows.dtype)


def _platform(device: EngineDevice) -> str:
    return device.placement.devices[0].platform


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _formula(tried: list[TriedSize]) -> tuple[int, int]:
    """Return what a call takes however many items it has, and what each item adds, by the two largest sizes."""
    last = tried[-1]
    if len(tried) == 1:
        return 0, last.bytes // last.size
    before = tried[-2]
    per_item = max(0, -(-(last.bytes - before.bytes) // (last.size - before.size)))
    return max(0, last.bytes - per_item * last.size), per_item


def _limits(seen: Status, device: EngineDevice, limit: "int | Literal['auto']") -> tuple[MemoryLimit, MemoryLimit]:
    """Return how much memory there is on each device of a node, and on the host."""
    host = _less_reserve(*min(_of_host(seen)))
    if not isinstance(limit, str):
        return MemoryLimit(bytes=limit, source="as given", reserve_bytes=0), host
    numbers = {one.id for one in device.placement.devices}
    found = [
        (one.memory_bytes_limit - (one.memory_bytes_in_use or 0), f"what {one.name} has free")
        for one in seen.devices
        if one.memory_bytes_limit is not None and one.platform == _platform(device) and one.id in numbers
    ]
    return _less_reserve(*min(found)) if found else host, host


def _of_host(seen: Status) -> Iterator[tuple[int, str]]:
    resident = read_resident_memory() or 0
    if seen.cgroup.memory_bytes is not None:
        yield max(0, seen.cgroup.memory_bytes - resident), "what the control group allows, less what the process has"
    if seen.slurm is not None and seen.slurm.memory_bytes_per_node is not None:
        tasks = -(-(seen.slurm.tasks or 1) // (seen.slurm.nodes or 1))
        share = seen.slurm.memory_bytes_per_node // tasks
        yield max(0, share - resident), "what the SLURM job has for each task, less what the process has"
    free = read_free_memory()
    if free is not None:
        yield free, "what the machine has free"
    yield 1 << 62, "nothing is known to limit it"


def _less_reserve(free: int, source: str) -> MemoryLimit:
    reserve = int(free * _RESERVE_SHARE)
    text = f"{source}, {scaled(free, 'B')}, less {scaled(reserve, 'B')} in reserve"
    return MemoryLimit(bytes=free - reserve, source=text, reserve_bytes=reserve)


def _strategies(
    items: int | None,
    fixed: int,
    per_item: int,
    limit: MemoryLimit,
    host: MemoryLimit,
    item_bytes: int,
    size: int,
    devices: int,
) -> tuple[Strategy, ...]:
    """Return all ways to compute so many items, the best one that is possible first."""

    def shown(number: float) -> str:
        return scaled(number, "B")

    def way(approach: Approach, rows: int, most: MemoryLimit, each: str) -> Strategy:
        taken = fixed + per_item * rows
        fits = taken <= most.bytes
        formula = f"{shown(fixed)} + {rows:,} × {shown(per_item)} = {shown(taken)}"
        told = f"{'within' if fits else 'more than'} the limit of {shown(most.bytes)}"
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
    data = items * item_bytes
    holds = data <= host.bytes
    told = f"the data take {shown(data)}, and the host has {shown(host.bytes)}"
    found = [way("all in memory", items, limit, "one call takes")]
    rows = -(-items // max(devices, 1))
    over = way("over a mesh", rows, limit, f"on each of {devices} devices one call takes")
    if devices == 1:
        over = replace(over, is_possible=False, reason="there is no other device with memory of its own")
    if devices:
        found.append(over)
    chunks = f"{-(-items // size):,} calls of {size:,} take {shown(chunk)} each; {told}"
    found.append(
        Strategy(
            approach="in chunks", is_possible=holds, reason=chunks, formula=f"{formula}; {items:,} × {item_bytes:,} B"
        )
    )
    found.append(Strategy(approach="as a stream", is_possible=True, reason=chunks, formula=formula))
    return tuple(sorted(found, key=lambda one: not one.is_possible))


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
