"""What to do about what was found: advice as data, each with a code, what is the matter, and the remedy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .cgroups import CgroupLimits
from .machine import CpuStatus, SlurmAllocation
from .self_check import JAX_REQUIREMENT, SelfCheckResult

if TYPE_CHECKING:
    from .platform_status import DeviceStatus

_OLDEST_JAX: Final = (0, 9, 2)
# Above this share an allocator that is asked for a batch of another size is likely to fail.
_NEARLY_FULL: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Something that could be better.

    Attributes:
        code: a name for programs, which stays: "jax-missing", "cpu-quota".
        text: what is the matter.
        remedy: what to do.
    """

    code: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}. {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What recommendations follow from."""

    jax_version: str | None
    backend_error: str | None
    devices: "Sequence[DeviceStatus]"
    self_checks: Sequence[SelfCheckResult]
    cpu: CpuStatus
    cgroup: CgroupLimits
    slurm: SlurmAllocation | None
    nvidia_gpu: bool
    backend_started: bool


def recommend(found: Findings) -> tuple[Recommendation, ...]:
    """Return what could be better, the most important first."""
    return (*_about_jax(found), *_about_devices(found), *_about_cores(found))


def _about_jax(found: Findings) -> Iterator[Recommendation]:
    if found.jax_version is None:
        yield Recommendation(
            code="jax-missing",
            text="JAX is not installed, so there are no devices to compute on",
            remedy='pip install "penstock[jax]"; for an NVIDIA GPU also: pip install "jax[cuda13]"',
        )
        return
    if _numbers(found.jax_version) < _OLDEST_JAX:
        yield Recommendation(
            code="jax-version",
            text=f"JAX {found.jax_version} is older than what Penstock is made for",
            remedy=f"pip install {JAX_REQUIREMENT}",
        )
    if found.backend_error is not None:
        yield Recommendation(
            code="backend-failed",
            text="JAX finds no device",
            remedy=found.backend_error,
        )
    for check in found.self_checks:
        if check.error is not None:
            yield Recommendation(
                code="wrong-values",
                text=f"{check.platform} devices have failed the self-check, and are refused",
                remedy=check.error,
            )


def _about_devices(found: Findings) -> Iterator[Recommendation]:
    gpus = [device for device in found.devices if device.platform == "gpu"]
    if found.nvidia_gpu and not gpus and found.jax_version is not None and found.backend_started:
        yield Recommendation(
            code="accelerator-unused",
            text="there is an NVIDIA GPU, and JAX does not use it",
            remedy='pip install "jax[cuda13]", or "jax[cuda12]" for an older driver; and see that neither '
            "JAX_PLATFORMS nor CUDA_VISIBLE_DEVICES hides it",
        )
    for device in found.devices:
        used, limit = device.memory_bytes_in_use, device.memory_bytes_limit
        if used is not None and limit and used / limit > _NEARLY_FULL:
            yield Recommendation(
                code="memory-nearly-full",
                text=f"{used / limit:.0%} of the memory of {device.name} is in use",
                remedy="Make batches smaller, donate what is not needed any more, or drop references to old arrays",
            )
    simulated = [device for device in found.devices if device.platform == "cpu"]
    if len(simulated) > 1:
        yield Recommendation(
            code="simulated-devices",
            text=f"the {len(simulated)} CPU devices are simulated and share the same cores",
            remedy="That is right for tests of meshes; to compute fast on a CPU, leave jax_num_cpu_devices alone",
        )


def _about_cores(found: Findings) -> Iterator[Recommendation]:
    usable, quota = found.cpu.usable_cores, found.cgroup.cpu_quota
    if usable is None:
        return
    if quota is not None and quota < usable:
        cores = found.cpu.affinity or tuple(range(usable))
        chosen = ",".join(map(str, cores[: max(1, int(quota))]))
        yield Recommendation(
            code="cpu-quota",
            text=f"the control group allows the time of {quota:g} cores, and JAX starts a thread for each of {usable}: "
            "when they have used it up, all of them stand still",
            remedy=f"Start Python with as many cores as it may use: taskset -c {chosen} python ...",
        )
    per_task = found.slurm.cpus_per_task if found.slurm else None
    if per_task is not None and usable < per_task:
        yield Recommendation(
            code="slurm-cores",
            text=f"SLURM has allocated {per_task} cores for each task, and this process may run on {usable}",
            remedy=f"Give the step its cores: srun --cpus-per-task={per_task} ...",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 10, 1) of "0.10.1.dev5"."""
    numbers: list[int] = []
    for part in version.split(".")[:3]:
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
