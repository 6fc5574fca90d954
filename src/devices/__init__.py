"""Actors that own an accelerator, through JAX. Importing this loads no JAX; the first use of a device does."""

from typing import TYPE_CHECKING

from .._public import public as _public
from .benchmarking import Benchmark, Measurement, benchmark
from .device_actor import BoundFunction, DeviceActor, actor
from .device_batch import DeviceBatch, PackedBatch
from .einsum_node import einsum
from .jax_import import Device, persistent_compile_cache
from .machine import CgroupLimits, CpuStatus, SlurmAllocation
from .platform_status import DeviceStatus, Recommendation, Status, status
from .selection import DeviceMesh, select
from .self_check import SelfCheckResult
from .statistics import BatchStatistics, CompileStatistics, Recompilation, Transfer

__all__ = [
    "Array", "BatchStatistics", "Benchmark", "BoundFunction", "CgroupLimits", "CompileStatistics", "CpuStatus",
    "Device", "DeviceActor", "DeviceBatch", "DeviceMesh", "DeviceStatus", "FitPlan", "Measurement", "MemoryLimit",
    "PackedBatch", "Recommendation", "Recompilation", "SelfCheckResult", "SlurmAllocation", "Status", "Strategy",
    "Transfer", "TriedSize", "actor", "benchmark", "einsum", "fit", "persistent_compile_cache", "select",
    "set_program_cache", "status",
]  # fmt: skip

if TYPE_CHECKING:
    from .compiling import set_program_cache
    from .fitting import FitPlan, MemoryLimit, Strategy, TriedSize, fit
    from .untyped_jax import Array
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            "Array": ".untyped_jax",
            "FitPlan": ".fitting",
            "MemoryLimit": ".fitting",
            "Strategy": ".fitting",
            "TriedSize": ".fitting",
            "fit": ".fitting",
            "set_program_cache": ".compiling",
        },
    )
