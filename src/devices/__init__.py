"""Actors that own an accelerator, through JAX. Importing this loads no JAX; the first use of a device does."""

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
    "fit", "jit", "persistent_compile_cache", "select", "set_program_cache", "status", "try_sizes",
]  # fmt: skip

if TYPE_CHECKING:
    from ..advice.device_benchmark import Benchmark, Measurement, benchmark
    from ..advice.fitting import FitPlan, Strategy, fit
    from ..advice.platform_status import DeviceStatus, Recommendation, Status, status
    from .compiling import set_program_cache
    from .placing import Placer
    from .size_search import MemoryLimit, TriedSize, TriedSizes, try_sizes
    from .untyped_jax import Array
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            "Array": ".untyped_jax",
            "Benchmark": "..advice.device_benchmark",
            "DeviceStatus": "..advice.platform_status",
            "FitPlan": "..advice.fitting",
            "Measurement": "..advice.device_benchmark",
            "MemoryLimit": ".size_search",
            "Placer": ".placing",
            "Recommendation": "..advice.platform_status",
            "Status": "..advice.platform_status",
            "Strategy": "..advice.fitting",
            "TriedSize": ".size_search",
            "TriedSizes": ".size_search",
            "benchmark": "..advice.device_benchmark",
            "fit": "..advice.fitting",
            "set_program_cache": ".compiling",
            "status": "..advice.platform_status",
            "try_sizes": ".size_search",
        },
    )
