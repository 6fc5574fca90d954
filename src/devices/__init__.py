"""Actors that own an accelerator, through JAX. Importing this loads no JAX; the first use of a device does."""

from typing import TYPE_CHECKING

from .._public import public as _public
from .batches.batch_statistics import BatchStatistics
from .batches.device_batch import DeviceBatch
from .device_actor import DeviceActor, actor
from .jax_types import Device
from .platform.benchmarking import Benchmark, Measurement, benchmark
from .platform.machine import CgroupLimits, CpuStatus, SlurmAllocation
from .platform.platform_status import DeviceStatus, Recommendation, Status, status
from .platform.selection import DeviceMesh, select
from .platform.self_check import SelfCheckResult
from .programs.compile_statistics import CompileStatistics, Recompilation, Transfer
from .programs.persistent_cache import persistent_compile_cache
from .regions.einsum import einsum

__all__ = [
    "Array", "BatchStatistics", "Benchmark", "CgroupLimits", "CompileStatistics", "CpuStatus", "Device",
    "DeviceActor", "DeviceBatch", "DeviceMesh", "DeviceStatus", "Measurement", "Recommendation", "Recompilation",
    "SelfCheckResult", "SlurmAllocation", "Status", "Transfer", "actor", "benchmark", "einsum",
    "persistent_compile_cache", "select", "status",
]  # fmt: skip

if TYPE_CHECKING:
    from .untyped_jax import Array
else:
    __getattr__, __dir__ = _public(__name__, {"Array": ".untyped_jax"})
