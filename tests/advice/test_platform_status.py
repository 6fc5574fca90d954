"""Status reports the platform and changes nothing; each recommendation is given where it applies, and nowhere else."""

import dataclasses
import os
from typing import Any

import pytest

from penstock import devices
from penstock._machine import CgroupLimits, CpuStatus, read_slurm
from penstock.advice.platform_status import DeviceStatus, Recommendation, Status, recommend
from penstock.devices.self_check import SelfCheck, SelfCheckResult
from tests.devices.processes import run_program

jax = pytest.importorskip("jax")

READ = """
import os
os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)  # set by the JAX of the test's own process
before = dict(os.environ)
from penstock import devices
found = devices.status()
devices.select()
devices.benchmark(seconds=0.01)
assert found.devices, found
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""
PASSIVE = """
import sys
from penstock import devices
found = devices.status(start_backend=False)
print("jax" in sys.modules, found.devices, found.default_platform, found.jax_version, found.recommendations)
"""


@pytest.mark.several_devices
def test_it_has_the_devices_of_jax() -> None:
    found = devices.status()
    assert found.jax_version == jax.__version__
    assert found.default_platform == jax.default_backend()
    assert devices.by_platform()["cpu"] == jax.devices("cpu")
    cpus = [device for device in found.devices if device.platform == "cpu"]
    assert [device.name for device in cpus] == [f"cpu:{index}" for index in range(8)]
    assert [devices.select(device.name).id for device in cpus] == [device.id for device in cpus]
    assert all(device.is_local and device.process == 0 for device in cpus)
    assert ("cpu", True) in [(check.kind, check.passed) for check in found.self_checks]
    assert "simulated-devices" in [advice.code for advice in found.recommendations]
    for part in (jax.__version__, "self-check cpu  right values", "cpu:7", "simulated-devices: "):
        assert part in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.jax_version = "2"


@pytest.mark.several_devices
def test_reading_changes_neither_environment_nor_configuration() -> None:
    environment, configuration = dict(os.environ), dict(jax.config.values)
    devices.status()
    devices.select("cpu:1")
    devices.DeviceMesh(shape=(2,), axis_names=("data",), device="cpu").resolve()
    devices.benchmark("cpu", seconds=0.01)
    assert dict(os.environ) == environment
    # The first use of JAX imports parts of it, and these bring options of their own.
    assert {name: jax.config.values[name] for name in configuration} == configuration


@pytest.mark.parametrize("variables", [{}, pytest.param({"TPU_SKIP_MDS_QUERY": "0"}, marks=pytest.mark.long)])
def test_reading_changes_nothing_when_it_is_what_loads_jax(variables: dict[str, str]) -> None:
    run_program(READ, **variables)


def test_without_starting_a_backend_jax_is_not_even_loaded() -> None:
    assert run_program(PASSIVE) == f"False () None {jax.__version__} ()\n"


def test_a_jax_that_computes_wrong_values_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SelfCheck(lambda device, matrix: matrix[0])
    monkeypatch.setattr("penstock.devices.self_check.SELF_CHECK", wrong)
    found = devices.status()
    assert [check.passed for check in found.self_checks] == [False] * len(found.self_checks)
    assert "wrong-values" in [advice.code for advice in found.recommendations]
    assert "WRONG VALUES" in str(found)


# --- Recommendations ---


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
    return recommend(dataclasses.replace(FINE, **changes), has_nvidia_gpu=True)


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
