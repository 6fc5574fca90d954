"""Limits of the control groups that this process is in, versions 1 and 2: what a container is allowed to use."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class CgroupLimits:
    """What the control groups of this process allow it; of nested groups, the tightest.

    Attributes:
        version: 1 or 2, of the groups that can limit CPU and memory; None where there are none.
        cpu_quota: cores' worth of CPU time; None if unlimited.
        memory_bytes: most memory; None if unlimited.
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
        return path.read_text().strip()
    except OSError:
        return ""
