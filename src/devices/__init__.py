"""Actors that own an accelerator, through JAX. Importing this loads no JAX; the first use of a device does."""

from .actor import DeviceActor as DeviceActor
from .actor import actor as actor
from .benchmarking import benchmark as benchmark
from .cgroups import CgroupLimits as CgroupLimits
from .compile_statistics import CompileStatistics as CompileStatistics
from .compile_statistics import Recompilation as Recompilation
from .compile_statistics import Transfer as Transfer
from .device_mesh import DeviceMesh as DeviceMesh
from .einsum import einsum as einsum
from .jax_types import Device as Device
from .machine import CpuStatus as CpuStatus
from .machine import SlurmAllocation as SlurmAllocation
from .measurements import Benchmark as Benchmark
from .measurements import Measurement as Measurement
from .persistent_cache import persistent_compile_cache as persistent_compile_cache
from .platform_status import DeviceStatus as DeviceStatus
from .platform_status import Status as Status
from .platform_status import status as status
from .recommendations import Recommendation as Recommendation
from .selection import select as select
from .self_check import SelfCheckResult as SelfCheckResult
