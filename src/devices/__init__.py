"""Actors that own an accelerator, through JAX. Importing this loads no JAX; the first use of a device does."""

from .actor import DeviceActor as DeviceActor
from .actor import actor as actor
from .benchmarking import Benchmark as Benchmark
from .benchmarking import Measurement as Measurement
from .benchmarking import benchmark as benchmark
from .device_batch import DeviceBatch as DeviceBatch
from .einsum import einsum as einsum
from .jax_import import Device as Device
from .jax_import import persistent_compile_cache as persistent_compile_cache
from .machine import CgroupLimits as CgroupLimits
from .machine import CpuStatus as CpuStatus
from .machine import SlurmAllocation as SlurmAllocation
from .platform_status import DeviceStatus as DeviceStatus
from .platform_status import Recommendation as Recommendation
from .platform_status import Status as Status
from .platform_status import status as status
from .selection import DeviceMesh as DeviceMesh
from .selection import select as select
from .self_check import SelfCheckResult as SelfCheckResult
from .statistics import BatchStatistics as BatchStatistics
from .statistics import CompileStatistics as CompileStatistics
from .statistics import Recompilation as Recompilation
from .statistics import Transfer as Transfer
