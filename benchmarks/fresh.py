"""Samples that need an interpreter of their own, because resident memory never shrinks back.

`python -m benchmarks.fresh SUITE WORKLOAD CONTENDER LOOP quick|full` takes one sample and prints it.
"""

import importlib
import subprocess
import sys

from . import loops
from .harness import Measured, Workload, evaluate


def suite(name: str) -> tuple[Workload, ...]:
    """Return the workloads of "workloads" or "devices"; only "devices" imports JAX."""
    module = importlib.import_module(f".{name}", __package__)
    workloads: tuple[Workload, ...] = module.WORKLOADS
    return workloads


def measure(suite_name: str, workload: Workload, loop: str, *, quick: bool) -> list[Measured]:
    """Measure a workload with every sample in a process of its own."""
    names = sorted({name for row in workload.rows for name in (row.subject, row.reference) if name is not None})
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(workload.rounds[1 if quick else 0]):
        for name in names if turn % 2 == 0 else reversed(names):
            samples[name].append(_sample_in_child(suite_name, workload.name, name, loop, quick=quick))
    return evaluate(workload.name, workload.rows, loop, samples, workload.control)


def _sample_in_child(suite_name: str, workload: str, contender: str, loop: str, *, quick: bool) -> float:
    size = "quick" if quick else "full"
    command = [sys.executable, "-m", "benchmarks.fresh", suite_name, workload, contender, loop, size]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {child.returncode}:\n{child.stderr}")
    return float(child.stdout.split()[-1])


async def _sample(workload: Workload, contender: str, *, quick: bool) -> float:
    async with workload.contenders(quick) as contenders:
        return await contenders[contender]()


def main() -> None:
    suite_name, name, contender, loop, size = sys.argv[1:]
    workload = next(workload for workload in suite(suite_name) if workload.name == name)
    print(loops.run(loop, _sample(workload, contender, quick=size == "quick")))


if __name__ == "__main__":
    main()
