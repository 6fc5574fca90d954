"""Facts about the machine that files and variables tell, for kinds of machines that this one is not."""

import os
from pathlib import Path

import pytest

from penstock._machine import CgroupLimits, SlurmAllocation, has_nvidia_gpu, read_cgroup_limits, read_cpu, read_slurm

V1 = {
    "proc/self/cgroup": "3:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/job\n",
    "proc/self/mountinfo": (
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
        "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "34 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    ),
}
V1_NONE = {
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}
V1_LIMITS = {
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1073741824\n",
}
V2 = {
    "proc/self/cgroup": "0::/a.slice/b.scope\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
}
V2_LIMITS = {
    "sys/fs/cgroup/a.slice/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/a.slice/memory.max": "max\n",
    "sys/fs/cgroup/a.slice/b.scope/cpu.max": "400000 100000\n",
    "sys/fs/cgroup/a.slice/b.scope/memory.max": "536870912\n",
}
# A container that sees its own group as the root of the mount, while its path is the one on the host.
CONTAINER = {
    "proc/self/cgroup": "0::/docker/123\n",
    "proc/self/mountinfo": "30 23 0:26 /docker/123 /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
    "sys/fs/cgroup/cpu.max": "200000 100000\n",
}
# The path on the host is not mounted in this container.
UNSEEN = {**CONTAINER, "proc/self/mountinfo": "30 23 0:26 /docker/456 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"}


def limits(version, cpu_quota=None, memory_bytes=None) -> CgroupLimits:
    return CgroupLimits(version=version, cpu_quota=cpu_quota, memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, limits(None)),
        (V1, limits(1)),
        (V1 | V1_NONE, limits(1)),
        (V1 | V1_NONE | V1_LIMITS, limits(1, 2.5, 1 << 30)),
        (V2, limits(2)),
        (V2 | V2_LIMITS, limits(2, 1.5, 1 << 29)),
        (CONTAINER, limits(2, 2.0)),
        (UNSEEN, limits(2, 2.0)),
    ],
    ids=["none", "v1", "v1-unlimited", "v1-limits", "v2", "v2-nested", "container", "unseen"],
)
def test_control_groups(tmp_path: Path, files: dict[str, str], expected: CgroupLimits) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_cgroup_limits(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "model", "features"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fma avx2\n\nprocessor\t: 1\nflags\t: none\n", "Some CPU",
         ("avx2", "fma")),
        ("processor\t: 0\nFeatures\t: fp asimd\n", None, ("asimd", "fp")),
    ],
)  # fmt: skip
def test_processors(tmp_path: Path, text: str, model: str | None, features: tuple[str, ...]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    cpu = read_cpu(tmp_path)
    assert cpu.features == features
    assert model is None or cpu.model == model


def test_affinity_is_what_this_process_may_use() -> None:
    cpu = read_cpu()
    assert cpu.affinity == tuple(sorted(os.sched_getaffinity(0)))
    assert cpu.usable_cores == len(os.sched_getaffinity(0))


def test_a_system_without_these_files_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    cpu = read_cpu(tmp_path)
    assert (cpu.features, cpu.affinity, cpu.usable_cores) == ((), None, os.cpu_count())


def test_slurm() -> None:
    assert read_slurm({}) is None
    variables = {
        "JOB_ID": "17", "JOB_NODELIST": "node[1-2]", "JOB_NUM_NODES": "2", "NTASKS": "8", "PROCID": "3",
        "CPUS_PER_TASK": "4", "GPUS_ON_NODE": "two", "MEM_PER_NODE": "2048",
    }  # fmt: skip
    job = read_slurm({f"SLURM_{name}": value for name, value in variables.items()})
    assert job == SlurmAllocation(
        job_id="17", node_list="node[1-2]", nodes=2, tasks=8, task=3, cpus_per_task=4, gpus_on_node=None,
        memory_bytes_per_node=2 << 30,
    )  # fmt: skip


def test_a_gpu_has_a_file_with_a_number(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not has_nvidia_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_nvidia_gpu(tmp_path)
