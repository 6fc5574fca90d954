"""Actors that own an accelerator, through JAX. Importing this package loads no JAX; the first use of a device does."""

from typing import TYPE_CHECKING

from .._machine import CgroupLimits, CpuStatus, SlurmAllocation
from .._public import public as _public
from .device_actor import BoundFunction, DeviceActor, actor
from .device_batch import DeviceBatch, PackedBatch
from .einsum_node import einsum
from .jax_import import Device, jit, persistent_compile_cache
from .selection import DeviceMesh, by_platform, select
from .self_check import SelfCheckResult, check_device
from .statistics import BatchStatistics, CompileStatistics, Recompilation, Transfer

__all__ = [
    "Array", "BatchStatistics", "Benchmark", "BoundFunction", "CgroupLimits", "CompileStatistics", "CpuStatus",
    "Device", "DeviceActor", "DeviceBatch", "DeviceMesh", "DeviceStatus", "FitPlan", "Measurement", "MemoryLimit",
    "PackedBatch", "Placer", "Recommendation", "Recompilation", "SelfCheckResult", "SlurmAllocation", "Status",
    "Strategy", "Transfer", "TriedSize", "TriedSizes", "actor", "benchmark", "by_platform", "check_device", "einsum",
    "fit", "jit", "persistent_compile_cache", "select", "set_program_cache", "status", "to_host", "try_sizes",
]  # fmt: skip

if TYPE_CHECKING:
    from ..advice.device_benchmark import Benchmark, Measurement, benchmark
    from ..advice.fitting import FitPlan, Strategy, fit
    from ..advice.platform_status import DeviceStatus, Recommendation, Status, status
    from .compiling import set_program_cache
    from .device_pool import to_host
    from .placing import Placer
    from .size_search import MemoryLimit, TriedSize, TriedSizes, try_sizes
    from .untyped_jax import Array
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            ".untyped_jax": "Array",
            "..advice.device_benchmark": "Benchmark Measurement benchmark",
            "..advice.platform_status": "DeviceStatus Recommendation Status status",
            "..advice.fitting": "FitPlan Strategy fit",
            ".size_search": "MemoryLimit TriedSize TriedSizes try_sizes",
            ".placing": "Placer",
            ".compiling": "set_program_cache",
            ".device_pool": "to_host",
        },
    )
