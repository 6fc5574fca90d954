"""How many items one call of a device node should take: sizes are tried within the free memory, up to the knee."""

import asyncio
import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

from .._errors import DeviceError
from .._machine import (
    CgroupLimits,
    SlurmAllocation,
    read_cgroup_limits,
    read_free_memory,
    read_resident_memory,
    read_slurm,
)
from ..actors.accepted import OptionRule, check, is_whole, optional, whole
from ..engine.engine import default
from ..engine.node import Node
from ..engine.options import resolve
from ..telemetry.tables import quartiles, scaled
from .arguments import on_host
from .device_batch import DeviceBatch, PackedBatch
from .device_errors import is_out_of_memory
from .device_pool import DevicePool
from .engine_device import DeviceCall, EngineDevice, SingleCallQueue
from .executor import DeviceExecutor
from .jax_import import local_devices
from .selection import AUTO
from .untyped_jax import jax

if TYPE_CHECKING:
    from ..engine.pools import Pools
    from .arguments import Arguments
    from .compiling import JittedFunction
    from .programs import Executable

# A reserve for memory that neither XLA's analysis nor the allocator counts: fragments, program code, other nodes.
_RESERVE_SHARE: Final = 0.1
# The knee gives this share of the best throughput. On two cores, medians of one size differ by some percent.
_KNEE_SHARE: Final = 0.9
# The search ends when so many sizes in a row were no better than the best size before, or one run has taken so long.
_MOST_IN_VAIN: Final = 3
_LONGEST_RUN_SECONDS: Final = 2.0
_LARGEST: Final = 1 << 20
# Each size runs for at least so long, and at least so often.
_SECONDS_A_SIZE: Final = 0.1
_FEWEST_RUNS: Final = 3
_MOST_RUNS: Final = 30

_LIMIT: Final = OptionRule(
    '"auto" or a whole number of bytes of at least 1', lambda one: one == "auto" or is_whole(one, 1)
)


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """A limit on memory.

    Attributes:
        bytes: how much memory may be taken.
        source: where the limit comes from, in words, with the amounts that were subtracted.
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
        median_seconds: time from the call until the result is there; None if the size did not run.
        low_seconds: a quarter of the runs took at most this time.
        high_seconds: three quarters of the runs took at most this time.
        items_per_second: items a second, at the median time.
        why_not: why the size did not run ("over the limit") or did not end ("no memory left"); empty if it ran.
    """

    size: int
    bytes: int
    median_seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    items_per_second: float | None = None
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class TriedSizes:
    """The sizes of calls of a device node that were tried, and the size to use.

    Attributes:
        node: name of the node.
        device: the device on which sizes were tried.
        platform: name of the device's platform.
        is_mesh: whether the device is a mesh, over which rows are split.
        limit: the memory that may be taken on a device.
        host_limit: the memory that the data may take on the host.
        tried: the sizes, in ascending order.
        recommended_size: the knee: the smallest size that gives at least nine tenths of the best throughput.
        largest_size: the most items that fit, by the formula; None if the memory does not grow with the items.
        fixed_bytes: the memory of a call for parameters and constants, however many items it has.
        bytes_per_item: the memory that each item adds.
        item_bytes: the bytes of the arguments of one item that are stacked.
    """

    node: str
    device: str
    platform: str
    is_mesh: bool
    limit: MemoryLimit
    host_limit: MemoryLimit
    tried: tuple[TriedSize, ...]
    recommended_size: int
    largest_size: int | None
    fixed_bytes: int
    bytes_per_item: int
    item_bytes: int


async def try_sizes(
    node: Node[..., Any],
    sample: tuple[Any, ...],
    limit: "int | Literal['auto']" = AUTO,
    items: int | None = None,
    *,
    resources: Mapping[str, Any] | None = None,
) -> TriedSizes:
    """Try sizes of calls of a device node, as `fit` does. `fit` also says how to compute all items.

    Args:
        node: a device node. A node without `batch=` is tried as if it had a batch.
        sample: the arguments of one item, without those that come from resources.
        limit: the most bytes on each device; "auto" takes the free memory.
        items: how many items there are to compute; larger sizes are not tried.
        resources: by parameter, the arguments that will come from resources.

    Raises:
        DeviceError: there is no such device, not even one item fits, or the sample has nothing to stack.
        OptionsError: `limit` or `items` does not accept its value.
        TypeError: the node is not a device node, or the sample does not fit its parameters.
        Exception: the error that the function raised while it was traced or ran.
    """
    check("limit", limit, _LIMIT, "fit(")
    check("items", items, optional(whole(1)), "fit(")
    executor: Any = getattr(node, "_runs_on", None)
    if not isinstance(executor, DeviceExecutor):
        raise TypeError(f"devices.fit takes a node made by @ps.device_node, got {node!r}")
    given: Any = sample
    if not isinstance(given, tuple):
        raise TypeError(f"devices.fit takes a tuple of the arguments of one item, got {given!r}: write (argument,)")
    if isinstance(executor.options.batch, PackedBatch):
        raise TypeError(f"devices.fit tries sizes of batches, and node {executor.name!r} packs its items into rows")
    if executor.options.batch is None:
        batched = replace(executor.options, batch=DeviceBatch(1))
        executor = DeviceExecutor(executor.name, executor.fn, batched, executor._passes)
    known = resources or {}
    arguments = executor.arguments(frozenset(known))
    pools, options = default._runtime.pools, resolve("Engine", {}, {})
    async with pools.pool("devices", DevicePool).fitting:
        values = arguments.merge(sample, known)
        return await search_sizes(
            executor, pools, options.device_strategy, arguments, values, limit=limit, items=items
        )  # fmt: skip


async def search_sizes(
    executor: DeviceExecutor,
    pools: "Pools",
    device_strategy: str,
    arguments: "Arguments",
    values: tuple[Any, ...],
    *,
    limit: "int | Literal['auto']" = AUTO,
    items: int | None = None,
) -> TriedSizes:
    """Try sizes of a batched node in an Engine, with all arguments of a call."""
    options = executor.options
    pool = pools.pool("devices", DevicePool)
    name = device_strategy if options.device == AUTO else options.device
    (device, *_) = await pool.open(name, options.replicas)
    most, host = await asyncio.to_thread(_limits, device, limit)
    trial = _Trial(executor, device, arguments, values, most.bytes)
    tried = await trial.run(items)
    ran = [one for one in tried if one.items_per_second is not None]
    if not ran:
        takes, limit_bytes = scaled(tried[-1].bytes, "B"), scaled(most.bytes, "B")
        raise DeviceError(
            f"not even one item of node {executor.name!r} fits on {device.name}, {tried[-1].why_not}: a batch of "
            f"{tried[-1].size} takes {takes}, and the limit is {limit_bytes}, {most.source}; raise limit=, or have "
            "smaller items"
        )
    best = max(one.items_per_second or 0.0 for one in ran)
    recommended = next(one.size for one in ran if (one.items_per_second or 0.0) >= _KNEE_SHARE * best)
    fixed, per_item = _formula(tried)
    return TriedSizes(
        node=executor.name, device=device.name, platform=platform_of(device),
        is_mesh=device.placement.mesh is not None, limit=most, host_limit=host, tried=tuple(tried),
        recommended_size=recommended,
        largest_size=max((most.bytes - fixed) // per_item, ran[-1].size) if per_item else None,
        fixed_bytes=fixed, bytes_per_item=per_item, item_bytes=trial.item_bytes,
    )  # fmt: skip


async def find_size(
    executor: DeviceExecutor, pools: "Pools", device_strategy: str, arguments: "Arguments", values: tuple[Any, ...]
) -> int:
    """Return the smallest size of a batch that gives at least nine tenths of the best throughput."""
    return (await search_sizes(executor, pools, device_strategy, arguments, values)).recommended_size


@dataclass
class _Trial:
    """Tries sizes of one node, on one device or mesh.

    Attributes:
        item_bytes: bytes of the arguments of one item that are stacked.
    """

    executor: DeviceExecutor
    device: EngineDevice
    arguments: "Arguments"
    values: tuple[Any, ...]
    limit_bytes: int

    def __post_init__(self) -> None:
        self._jitted: JittedFunction = self.executor.jitted(self.device.placement, self.arguments)
        item, self._group = self.arguments.describe_item(self.values)
        self._item = on_host(item)
        self.item_bytes = self._item.size_bytes
        # The rows are split over so many devices.
        (self._least,) = self.executor.batch_sizes(DeviceBatch(1), self.arguments)
        self._queue = SingleCallQueue(self.executor.name, self.device, self._jitted, self.arguments.parameters)

    async def run(self, items: int | None) -> list[TriedSize]:
        """Try sizes in ascending order, and return the results."""
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
        taken += (self.executor.options.prefetch - 1) * size * self.item_bytes // self._least
        if taken > self.limit_bytes:
            return TriedSize(size=size, bytes=taken, why_not="over the limit")
        args, _ = self.arguments.stack([self._item], self._group, size)
        try:
            seconds = await self._timed(args, size)
        except (DeviceError, jax.errors.JaxRuntimeError) as error:
            runs_out = is_out_of_memory(error) or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
            if runs_out and platform_of(self.device) != "cpu":
                return TriedSize(size=size, bytes=taken, why_not="no memory left")
            raise
        low, middle, high = quartiles(seconds)
        return TriedSize(
            size=size, bytes=taken, median_seconds=middle, low_seconds=low, high_seconds=high,
            items_per_second=size / middle,
        )  # fmt: skip

    async def _compiled(self, size: int) -> "Executable":
        """Return the program for `size` items, compiled off the event loop, from shapes alone."""
        args = [*self.arguments.stack([self._item], self._group, self._least)[0]]
        for position in (*self.arguments.stacked, *range(len(self.arguments.names), len(args))):
            args[position] = jax.tree.map(functools.partial(_shape_of, size), args[position])
        return await self.device.compile(self._jitted, tuple(args))

    async def _timed(self, args: tuple[Any, ...], size: int) -> list[float]:
        """Return how long the runs took, without the first run, which may set up things for later runs."""
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


def platform_of(device: EngineDevice) -> str:
    """Return the platform of a device or mesh."""
    return device.placement.devices[0].platform


def _formula(tried: list[TriedSize]) -> tuple[int, int]:
    """Return the bytes of a call without items, and the bytes that each item adds, from the two largest sizes."""
    last = tried[-1]
    if len(tried) == 1:
        return 0, last.bytes // last.size
    before = tried[-2]
    per_item = max(0, -(-(last.bytes - before.bytes) // (last.size - before.size)))
    return max(0, last.bytes - per_item * last.size), per_item


def _limits(device: EngineDevice, limit: "int | Literal['auto']") -> tuple[MemoryLimit, MemoryLimit]:
    """Return how much memory there is on each device of a node, and on the host. Call it in a thread."""
    host = _less_reserve(*min(_of_host(read_cgroup_limits(), read_slurm(os.environ))))
    if not isinstance(limit, str):
        return MemoryLimit(bytes=limit, source="as given", reserve_bytes=0), host
    found = list(_of_devices(device))
    return _less_reserve(*min(found)) if found else host, host


def _of_devices(device: EngineDevice) -> Iterator[tuple[int, str]]:
    for number, one in enumerate(local_devices(platform_of(device))):
        memory = (one.memory_stats() if one in device.placement.devices else None) or {}
        if "bytes_limit" in memory:
            yield memory["bytes_limit"] - memory.get("bytes_in_use", 0), f"what {one.platform}:{number} has free"


def _of_host(cgroup: CgroupLimits, slurm: SlurmAllocation | None) -> Iterator[tuple[int, str]]:
    resident = read_resident_memory() or 0
    if cgroup.memory_bytes is not None:
        yield max(0, cgroup.memory_bytes - resident), "what the control group allows, less what the process has"
    if slurm is not None and slurm.memory_bytes_per_node is not None:
        tasks = -(-(slurm.tasks or 1) // (slurm.nodes or 1))
        share = slurm.memory_bytes_per_node // tasks
        yield max(0, share - resident), "what the SLURM job has for each task, less what the process has"
    free = read_free_memory()
    if free is not None:
        yield free, "what the machine has free"
    yield 1 << 62, "nothing is known to limit it"


def _less_reserve(free: int, source: str) -> MemoryLimit:
    reserve = int(free * _RESERVE_SHARE)
    text = f"{source}, {scaled(free, 'B')}, less {scaled(reserve, 'B')} in reserve"
    return MemoryLimit(bytes=free - reserve, source=text, reserve_bytes=reserve)
