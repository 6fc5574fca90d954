"""The resources that the machine gives to this process: cores, control-group limits, a SLURM allocation."""

import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class CgroupLimits:
    """The limits of the control groups of this process; of nested groups, the tightest limits.

    Attributes:
        version: the version, 1 or 2, of the groups that can limit CPU and memory; None if there are none.
        cpu_quota: how many cores' worth of CPU time the process may use; None if unlimited.
        memory_bytes: how much memory the process may use, in bytes; None if unlimited.
    """

    version: int | None
    cpu_quota: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class _Hierarchy:
    controllers: frozenset[str]  # empty: version 2, which has all of them
    mount_point: Path
    mount_root: str

    def groups(self, path: str) -> Iterator[Path]:
        """Yield the folder of a group and those above it; only the mount point if the group is not seen from here."""
        try:
            inside = PurePosixPath(path).relative_to(self.mount_root)
        except ValueError:
            inside = PurePosixPath()
        folder = self.mount_point / inside
        while folder != self.mount_point:
            yield folder
            folder = folder.parent
        yield self.mount_point


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of this process.

    Args:
        root: the folder below which `proc` and the mounted groups are.
    """
    quotas: list[float] = []
    memory: list[int] = []
    versions: set[int] = set()
    paths = dict(_paths(root))
    for hierarchy in _hierarchies(root):
        limiting = hierarchy.controllers & {"cpu", "memory"}
        if not hierarchy.controllers:
            versions.add(2)
        elif limiting:
            versions.add(1)
        for folder in hierarchy.groups(paths.get(hierarchy.controllers, "/")):
            quotas += _cpu_quota(folder)
            memory += _memory(folder)
    return CgroupLimits(
        version=min(versions, default=None),  # mixed: version 1 has the controllers
        cpu_quota=min(quotas, default=None),
        memory_bytes=min(memory, default=None),
    )


def _cpu_quota(folder: Path) -> list[float]:
    match _text(folder / "cpu.max").split():
        case [quota, period] if quota.isdecimal() and period.isdecimal():
            return [int(quota) / int(period)]
        case _:
            pass
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []  # -1: none


def _memory(folder: Path) -> list[int]:
    texts = (_text(folder / "memory.max"), _text(folder / "memory.limit_in_bytes"))
    return [int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT]


def _paths(root: Path) -> Iterator[tuple[frozenset[str], str]]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        yield frozenset(controllers.split(",")) - {""}, path


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    known = {controllers for controllers, _ in _paths(root)}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        controllers: frozenset[str] | None = frozenset()
        if kind == "cgroup":
            mounted = frozenset(options.split(","))
            controllers = next((group for group in known if group and group <= mounted), None)
        if controllers is not None:
            fields = mount.split(" ")
            yield _Hierarchy(controllers, root / fields[4].lstrip("/"), fields[3])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# The functions below read files and variables. They work without JAX, and change nothing.


@dataclass(frozen=True, kw_only=True)
class CpuStatus:
    """The processor, and the cores that this process may use.

    Attributes:
        model: the name of the processor; empty if unknown.
        architecture: its instruction set: "x86_64", "aarch64".
        cores: how many logical cores the machine has; None if unknown.
        affinity: the numbers of the cores that this process may run on; None on systems without CPU affinity.
        features: instruction-set extensions, as Linux names them; empty on other systems.
    """

    model: str
    architecture: str
    cores: int | None
    affinity: tuple[int, ...] | None
    features: tuple[str, ...]

    @property
    def usable_cores(self) -> int | None:
        """How many cores this process may run on."""
        return self.cores if self.affinity is None else len(self.affinity)


@dataclass(frozen=True, kw_only=True)
class SlurmAllocation:
    """The allocation of a SLURM job; a field is None if SLURM does not set its variable.

    Attributes:
        job_id: number of the job.
        node_list: names of its nodes, as SLURM shortens them.
        nodes: how many nodes it has.
        tasks: how many tasks (processes) it has.
        task: number of this task, from 0.
        cpus_per_task: cores of each task.
        gpus_on_node: GPUs of the job on this node.
        memory_bytes_per_node: memory of the job on each node.
    """

    job_id: str
    node_list: str | None
    nodes: int | None
    tasks: int | None
    task: int | None
    cpus_per_task: int | None
    gpus_on_node: int | None
    memory_bytes_per_node: int | None


def read_cpu(proc: Path = Path("/proc")) -> CpuStatus:
    """Return the processor of this machine.

    Args:
        proc: the folder of the kernel's tables.
    """
    fields: dict[str, str] = {}
    for line in _text(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    get_affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return CpuStatus(
        model=fields.get("model name") or platform.processor(),
        architecture=platform.machine(),
        cores=os.cpu_count(),
        affinity=tuple(sorted(get_affinity(0))) if get_affinity else None,
        features=tuple(sorted((fields.get("flags") or fields.get("features") or "").split())),  # x86, ARM
    )


_MEGABYTE: Final = 1 << 20


def read_slurm(environment: Mapping[str, str]) -> SlurmAllocation | None:
    """Return the allocation in the environment variables of a process; None outside of SLURM.

    Args:
        environment: the variables.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        return None

    def number(name: str) -> int | None:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else None

    megabytes = number("SLURM_MEM_PER_NODE")
    return SlurmAllocation(
        job_id=job_id,
        node_list=environment.get("SLURM_JOB_NODELIST"),
        nodes=number("SLURM_JOB_NUM_NODES"),
        tasks=number("SLURM_NTASKS"),
        task=number("SLURM_PROCID"),
        cpus_per_task=number("SLURM_CPUS_PER_TASK"),
        gpus_on_node=number("SLURM_GPUS_ON_NODE"),
        memory_bytes_per_node=None if megabytes is None else megabytes * _MEGABYTE,
    )


def read_free_memory(proc: Path = Path("/proc")) -> int | None:
    """Return the bytes that the machine could give to programs now; None if the system does not tell."""
    for line in _text(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split()[0].isdecimal():
            return int(rest.split()[0]) << 10
    return None


def read_resident_memory(proc: Path = Path("/proc")) -> int | None:
    """Return the bytes of memory that this process has now; None if the system does not tell."""
    fields = _text(proc / "self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else None


def has_nvidia_gpu(device_files: Path = Path("/dev")) -> bool:
    """Whether the driver offers an NVIDIA GPU to this process.

    Args:
        device_files: the folder of the device files.
    """
    return any(device_files.glob("nvidia[0-9]*"))


# Arrays. XLA on CPU computes with one of NumPy where it lies, if that is at a multiple of 64, and copies any other. The
# copy of a smaller one than this takes 0.2 us, and to find such a place 2 us.
LARGE_BYTES: Final = 32 * 1024


def aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new array of NumPy, whose elements are not set, that XLA on CPU takes without a copy."""
    import numpy as np

    dtype = np.dtype(dtype)
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < LARGE_BYTES or dtype.hasobject:
        return np.empty(shape, dtype)
    memory = np.empty(size_bytes + 64, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % 64)


def aligned_copy(array: Any) -> Any:
    """Return such an array with the elements of another one."""
    if array.nbytes < LARGE_BYTES:
        import numpy as np

        return np.array(array, order="C")
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


_NETWORK_FILE_SYSTEMS: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.beegfs", "fuse.ceph", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs",
    "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "pvfs2", "smb2", "smb3", "smbfs",
})  # fmt: skip
_MOUNTS: Final = Path("/proc/self/mountinfo")


def network_file_system_of(folder: Path) -> str:
    """Return the kind of network file system of a folder, as Linux names it; empty if there is none, or unknown."""
    if sys.platform != "linux" or not _MOUNTS.exists():
        return ""
    place, found, longest = folder.resolve(), "", -1
    for line in _MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Spaces and similar characters are written in octal, as \040.
        mounted = Path(before.split()[4].encode().decode("unicode_escape"))
        if (place == mounted or mounted in place.parents) and len(mounted.parts) >= longest:
            found, longest = after.split()[0], len(mounted.parts)
    return found if found in _NETWORK_FILE_SYSTEMS else ""
