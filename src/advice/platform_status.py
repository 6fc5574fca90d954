"""The devices and the machine, with recommendations. Looking changes neither the environment nor JAX."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final, cast

from .._errors import DeviceError, MissingExtraError
from .._machine import has_nvidia_gpu, read_cgroup_limits, read_cpu, read_slurm
from ..devices import CgroupLimits, CpuStatus, Device, SelfCheckResult, SlurmAllocation, by_platform, check_device
from ..telemetry.tables import UNKNOWN, Column, Rendered, Table, scaled

_OLDEST_JAX: Final = (0, 9, 2)
# If a larger share of the memory is in use, an allocation for a batch of another size is likely to fail.
_NEARLY_FULL: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A recommendation for this machine.

    Attributes:
        code: a stable name, for programs: "jax-missing", "cpu-quota".
        text: what could be better.
        remedy: what to do about it.
    """

    code: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}. {self.remedy}"


def recommend(found: "Status", *, has_nvidia_gpu: bool) -> tuple[Recommendation, ...]:
    """Return the recommendations for a machine, the most important first."""
    return (*_about_jax(found), *_about_devices(found, has_nvidia_gpu), *_about_cores(found))


def _about_jax(found: "Status") -> Iterator[Recommendation]:
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
            remedy=f'pip install "jax>={".".join(map(str, _OLDEST_JAX))}"',
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


def _about_devices(found: "Status", has_nvidia_gpu: bool) -> Iterator[Recommendation]:
    gpus = [device for device in found.devices if device.platform == "gpu"]
    is_started = found.default_platform is not None or found.backend_error is not None
    if has_nvidia_gpu and not gpus and found.jax_version is not None and is_started:
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
                remedy="Make batches smaller, donate what is no longer needed, or drop references to old arrays",
            )
    simulated = [device for device in found.devices if device.platform == "cpu"]
    if len(simulated) > 1:
        yield Recommendation(
            code="simulated-devices",
            text=f"the {len(simulated)} CPU devices are simulated and share the same cores",
            remedy="That is right for tests of meshes; to compute fast on a CPU, leave jax_num_cpu_devices alone",
        )


def _about_cores(found: "Status") -> Iterator[Recommendation]:
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


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """A device.

    Attributes:
        name: the name that `select` takes, "gpu:0"; for a device of another process, its name in JAX.
        id: the number that JAX gives it, unique in its platform over all processes.
        platform: the name of its platform: "cpu", "gpu", "tpu".
        kind: the name of its hardware.
        process: the number of the process that it belongs to; 0 unless `jax.distributed` is in use.
        is_local: whether it belongs to this process.
        memory_bytes_in_use: how much memory arrays of this process take; None if unknown.
        memory_bytes_limit: how much memory they may take; None if unknown.
    """

    name: str
    id: int
    platform: str
    kind: str
    process: int
    is_local: bool
    memory_bytes_in_use: int | None
    memory_bytes_limit: int | None


@dataclass(frozen=True, kw_only=True)
class Status(Rendered):
    """The devices and the machine. `str()` shows them as a table, with the recommendations below.

    Attributes:
        jax_version: the version of JAX; None if it is not installed.
        jaxlib_version: the version of jaxlib; None if it is not installed.
        default_platform: the platform that "auto" stands for; None if no backend was started.
        platforms: the names of the platforms that JAX has started.
        devices: the devices; those of the default platform come first.
        backend_error: the reason why no backend could be started; None if there was no error.
        self_checks: for each kind of device in this process, whether it computes right values.
        cpu: the processor.
        cgroup: the limits of the control group.
        slurm: the allocation of a SLURM job; None outside of one.
        recommendations: the recommendations, the most important first.
    """

    jax_version: str | None
    jaxlib_version: str | None
    default_platform: str | None
    platforms: tuple[str, ...]
    devices: tuple[DeviceStatus, ...]
    backend_error: str | None
    self_checks: tuple[SelfCheckResult, ...]
    cpu: CpuStatus
    cgroup: CgroupLimits
    slurm: SlurmAllocation | None
    recommendations: tuple[Recommendation, ...]

    def _table(self) -> Table:
        columns = ("device", "id", "kind", "process", "memory in use", "memory limit")
        numbers = {"id", "process", "memory in use", "memory limit"}
        return Table(
            facts=tuple(_facts(self)),
            columns=tuple(Column(title, is_number=title in numbers) for title in columns),
            rows=tuple(
                (
                    device.name,
                    str(device.id),
                    device.kind,
                    str(device.process),
                    scaled(device.memory_bytes_in_use, "B"),
                    scaled(device.memory_bytes_limit, "B"),
                )
                for device in self.devices
            ),
            remark="\n".join(map(str, self.recommendations)),
        )


def status(*, start_backend: bool = True) -> Status:
    """Return the devices and the machine. It works without JAX, too: then the first recommendation is to install it.

    Only the backends of JAX know the devices. So the first call imports JAX and starts the backends, if they have not
    started: that takes about a second, and on a GPU reserves memory as every JAX program does. It also runs the
    self-check once for each kind of device. Do not call it on the event loop, but in a thread:
    `await asyncio.to_thread(devices.status)`.

    Args:
        start_backend: whether to start JAX. With False, `devices` is empty; use it before
            `jax.distributed.initialize()`, or beside a program that needs the memory of the GPU.

    Returns:
        The `Status`.
    """
    found: dict[str, list[Device]] = {}
    names: dict[Device, str] = {}
    default = error = None
    checks: list[SelfCheckResult] = []
    if start_backend:
        try:
            found = by_platform()
            names = _local_names(found)
            default = next(iter(found))
            checks = list(map(check_device, {device.device_kind: device for device in names}.values()))
        except MissingExtraError:
            pass  # said by a recommendation
        except DeviceError as failure:
            error = str(failure)
        except RuntimeError as failure:  # of the self-check: a device that cannot compute at all
            error = f"{type(failure).__name__}: {failure}"
    devices = tuple(_device_status(one, names.get(one)) for several in found.values() for one in several)
    seen = Status(
        jax_version=_version("jax") if find_spec("jax") and find_spec("jaxlib") else None,
        jaxlib_version=_version("jaxlib"),
        default_platform=default,
        platforms=tuple(found),
        devices=devices,
        backend_error=error,
        self_checks=tuple(checks),
        cpu=read_cpu(),
        cgroup=read_cgroup_limits(),
        slurm=read_slurm(os.environ),
        recommendations=(),
    )
    return replace(seen, recommendations=recommend(seen, has_nvidia_gpu=has_nvidia_gpu()))


def _local_names(found: dict[str, list[Device]]) -> dict[Device, str]:
    """Return the names of the devices that belong to this process."""
    import jax

    here = cast("Callable[[str], int]", jax.process_index)  # pyright: ignore[reportUnknownMemberType]
    return {
        device: f"{platform}:{index}"
        for platform, devices in found.items()
        for index, device in enumerate(one for one in devices if one.process_index == here(platform))
    }


def _device_status(device: Device, local: str | None) -> DeviceStatus:
    memory = (device.memory_stats() if local else None) or {}
    return DeviceStatus(
        name=local or str(device),
        id=device.id,
        platform=device.platform,
        kind=device.device_kind,
        process=device.process_index,
        is_local=local is not None,
        memory_bytes_in_use=memory.get("bytes_in_use"),
        memory_bytes_limit=memory.get("bytes_limit"),
    )


def _facts(status: Status) -> Iterator[tuple[str, str]]:
    yield "JAX", status.jax_version or "not installed"
    yield "platforms", ", ".join(status.platforms) or UNKNOWN
    for check in status.self_checks:
        yield f"self-check {check.kind}", "right values" if check.passed else "WRONG VALUES"
    yield "processor", status.cpu.model or status.cpu.architecture
    yield "cores", f"{status.cpu.usable_cores or UNKNOWN} of {status.cpu.cores or UNKNOWN}"
    yield "features", ", ".join(name for name in status.cpu.features if name in _NOTABLE) or UNKNOWN
    if status.cgroup.cpu_quota is not None:
        yield "CPU quota", f"{status.cgroup.cpu_quota:g} cores"
    if status.cgroup.memory_bytes is not None:
        yield "memory limit", scaled(status.cgroup.memory_bytes, "B")
    if status.slurm is not None:
        yield "SLURM job", status.slurm.job_id


# The features, of about a hundred, that decide how fast numbers are computed.
_NOTABLE = frozenset(
    {
        *("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni"),
        *("amx_bf16", "amx_int8", "amx_tile", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
    }
)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
