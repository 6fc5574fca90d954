"""Samples of a soak: memory, tasks, threads, children and descriptors at rest, and whether they grow."""

import asyncio
import gc
import statistics
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.leaks import child_processes, open_descriptors

_PAGE_BYTES = 4096
# An allocator gives memory back at any time: growth below this bound is no leak that a night would show.
_SLACK_MIB = 6.0
_SLACK_SHARE = 0.04


@dataclass(frozen=True)
class Sample:
    """Memory, tasks, threads, children and descriptors of the process while no call runs."""

    rss_mib: float
    tasks: int
    threads: int
    children: int
    descriptors: int

    @classmethod
    async def take(cls) -> "Sample":
        """Wait until ending tasks, threads and children have ended, and take a sample."""
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(0.05)
        rss_mib = _rss_mib()
        return cls(
            rss_mib, len(asyncio.all_tasks()), threading.active_count(), len(child_processes()), len(open_descriptors())
        )


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / 2**20


def growth(samples: list[Sample], bounds: Sample) -> list[str]:
    """Return a line for each figure that has grown.

    Args:
        samples: one sample after each round, without the rounds of the warm-up.
        bounds: the most threads, children and descriptors that the pools may come to, and the tasks at rest.
    """
    found: list[str] = []
    for name in ("tasks", "threads", "children", "descriptors"):
        most, bound = max(getattr(sample, name) for sample in samples), getattr(bounds, name)
        if most > bound:
            found.append(f"{most} {name}, and {bound} would be all that it needs")
    third = max(1, len(samples) // 3)
    first = statistics.median(sample.rss_mib for sample in samples[:third])
    last = statistics.median(sample.rss_mib for sample in samples[-third:])
    if last > first * (1 + _SLACK_SHARE) + _SLACK_MIB:
        found.append(f"memory went from {first:.0f} to {last:.0f} MiB")
    return found
