"""Actors that own an accelerator, through JAX. Importing this loads no JAX; the first use of a device does."""

from .actor import DeviceActor as DeviceActor
from .actor import actor as actor
from .batches.batch_statistics import BatchStatistics as BatchStatistics
from .batches.device_batch import DeviceBatch as DeviceBatch
from .jax_types import Device as Device
from .platform.benchmarking import Benchmark as Benchmark
from .platform.benchmarking import Measurement as Measurement
from .platform.benchmarking import benchmark as benchmark
from .platform.machine import CgroupLimits as CgroupLimits
from .platform.machine import CpuStatus as CpuStatus
from .platform.machine import SlurmAllocation as SlurmAllocation
from .platform.platform_status import DeviceStatus as DeviceStatus
from .platform.platform_status import Recommendation as Recommendation
from .platform.platform_status import Status as Status
from .platform.platform_status import status as status
from .platform.selection import DeviceMesh as DeviceMesh
from .platform.selection import select as select
from .platform.self_check import SelfCheckResult as SelfCheckResult
from .programs.compile_statistics import CompileStatistics as CompileStatistics
from .programs.compile_statistics import Recompilation as Recompilation
from .programs.compile_statistics import Transfer as Transfer
from .programs.persistent_cache import persistent_compile_cache as persistent_compile_cache
from .regions.einsum import einsum as einsum
