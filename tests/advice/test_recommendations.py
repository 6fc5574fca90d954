"""Each recommendation is given where it applies, and nowhere else."""

from dataclasses import replace
from typing import Any

import pytest

from penstock._machine import CgroupLimits, CpuStatus, read_slurm
from penstock.advice.platform_status import DeviceStatus, Recommendation, Status, recommend
from penstock.devices.self_check import SelfCheckResult


def device(platform: str, index: int = 0, used: int | None = None) -> DeviceStatus:
    return DeviceStatus(
        name=f"{platform}:{index}", id=index, platform=platform, kind="some", process=0, is_local=True,
        memory_bytes_in_use=used, memory_bytes_limit=None if used is None else 100,
    )  # fmt: skip


def slurm_job(cpus_per_task: int) -> Any:
    return read_slurm({"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": str(cpus_per_task)})


def check(error: str | None) -> SelfCheckResult:
    return SelfCheckResult(platform="cpu", kind="cpu", passed=error is None, seconds=0.05, error=error)


FINE = Status(
    jax_version="0.10.1",
    jaxlib_version="0.10.1",
    default_platform="gpu",
    platforms=("gpu", "cpu"),
    backend_error=None,
    devices=(device("gpu", used=50), device("cpu")),
    self_checks=(check(None),),
    cpu=CpuStatus(model="", architecture="", cores=8, affinity=(2, 3, 5, 7), features=()),
    cgroup=CgroupLimits(version=2, cpu_quota=4.0, memory_bytes=None),
    slurm=slurm_job(4),
    recommendations=(),
)


def recommended(**changes: Any) -> tuple[Recommendation, ...]:
    return recommend(replace(FINE, **changes), has_nvidia_gpu=True)


def test_a_machine_without_fault_gets_none() -> None:
    assert recommended() == ()
    assert recommended(devices=(), self_checks=(), default_platform=None, platforms=()) == ()


@pytest.mark.parametrize(
    ("changes", "code", "remedy"),
    [
        ({"jax_version": None, "devices": ()}, "jax-missing", 'pip install "penstock[jax]"'),
        ({"jax_version": "0.9.1"}, "jax-version", '"jax>=0.9.2"'),
        ({"jax_version": "0.10.2", "self_checks": (check("install X"),)}, "wrong-values", "install X"),
        ({"backend_error": "unset Y"}, "backend-failed", "unset Y"),
        ({"devices": (device("cpu"),)}, "accelerator-unused", "jax[cuda13]"),
        ({"devices": (device("gpu", used=95),)}, "memory-nearly-full", "smaller"),
        ({"devices": (device("gpu"), device("cpu"), device("cpu", 1))}, "simulated-devices", "jax_num_cpu_devices"),
        ({"cgroup": CgroupLimits(version=2, cpu_quota=2.5, memory_bytes=None)}, "cpu-quota", "taskset -c 2,3 python"),
        ({"cgroup": CgroupLimits(version=2, cpu_quota=0.5, memory_bytes=None)}, "cpu-quota", "taskset -c 2 python"),
        ({"slurm": slurm_job(6)}, "slurm-cores", "srun --cpus-per-task=6"),
    ],
)
def test_one_fault_gets_one_recommendation(changes: dict, code: str, remedy: str) -> None:
    [found] = recommended(**changes)
    assert found.code == code
    assert remedy in found.remedy
    assert str(found).startswith(f"{code}: {found.text}. {found.remedy[:10]}")


@pytest.mark.parametrize("version", ["0.9.2", "0.10.2", "0.10.3", "0.11.0.dev20261101", "1.0"])
def test_versions_that_are_new_enough(version: str) -> None:
    assert recommended(jax_version=version) == ()
