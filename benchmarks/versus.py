"""`python -m benchmarks.versus BASE`: this checkout beside another commit, pair by pair, and that commit beside itself.

Each round is three processes in an order that turns: the base, the base again (the control), the present checkout. A
process imports the `src` of its side and measures every workload. The ratio of two processes next to each other
cancels what both suffer alike; new processes average over what one is born with (addresses, hash seeds). A base that
has this file runs its own copy, since names may have changed in between.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from . import loops, report
from .baselines.calls import call_from_many, median_call_seconds
from .harness import Sample
from .summary import Interval, ratio

ROOT = Path(__file__).parents[1]
LIMIT = 1.03  # what a change that is to leave speed alone may cost: the upper end of the interval
SIDES = ("base", "control", "present")


def negate(value: int) -> int:
    return -value


async def samples() -> dict[str, float]:
    """Seconds of each workload, on the running loop, with the `penstock` that this process imports."""
    import jax
    import numpy as np

    import penstock as ps
    from penstock import engine

    @ps.node(capacity=16)
    async def pass_on(value: int) -> int:
        return value

    @ps.node(concurrency=16)
    async def wait_once(value: int) -> int:
        await asyncio.sleep(0)
        return value

    @ps.device_node(device="cpu")
    def tiny(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    def line(node: Any, length: int) -> Any:
        @ps.graph
        async def stages(value: Any) -> Any:
            for _ in range(length):
                step = node(value)
                value = await step if node.is_async else step  # what a plain node gives is not awaited
            return value

        return stages

    chain, waiting_chain = line(pass_on, 10), line(wait_once, 10)
    in_process = line(ps.node(runs_on="process", concurrency=1)(negate), 1)
    x = jax.device_put(np.ones(16, np.float32))
    async with engine.deploy(chain) as service, engine.deploy(line(tiny, 1)) as device:
        workloads: dict[str, Sample] = {
            "chain": lambda: _stream((chain(value) for value in range(8_000)), engine.stream),
            "waiting chain": lambda: _stream((waiting_chain(value) for value in range(1_500)), engine.stream),
            "deployment": lambda: call_from_many(service, 6_000, 64),
            "process node": lambda: _stream((in_process(value) for value in range(2_000)), engine.stream),
            "device latency": lambda: median_call_seconds(lambda: device(x), 400),
        }
        return {name: await _median_of_three(sample) for name, sample in workloads.items()}


async def _stream(calls: Iterable[Any], stream: Callable[..., Any]) -> float:
    began = time.perf_counter()
    async with stream(calls) as results:
        async for _ in results:
            pass
    return time.perf_counter() - began


async def _median_of_three(sample: Sample) -> float:
    await sample()  # imports, traces, threads and caches are not what is measured
    return median([await sample() for _ in range(3)])


def _sample_in_child(checkout: Path, loop: str) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(checkout / "typings")}
    has_own = (checkout / "benchmarks" / "versus.py").exists()
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.versus", "--sample", "--loop", loop],
        cwd=checkout if has_own else ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if child.returncode != 0:
        raise RuntimeError(f"a sample of {checkout} ended with {child.returncode}:\n{child.stderr}")
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def _compare(base: Path, pairs: int, loop: str) -> dict[str, dict[str, list[float]]]:
    """Return samples by workload and side, round by round."""
    taken: dict[str, dict[str, list[float]]] = {}
    for turn in range(pairs):
        first = turn % len(SIDES)
        for side in (*SIDES[first:], *SIDES[:first]):
            print(f"\r{loop}: {side} of pair {turn + 1} of {pairs}   ", end="", file=sys.stderr, flush=True)
            for name, seconds in _sample_in_child(ROOT if side == "present" else base, loop).items():
                taken.setdefault(name, {one: [] for one in SIDES})[side].append(seconds)
    print(file=sys.stderr)
    return taken


def main() -> int:
    """Return 1 if the upper end of an interval is above the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus", description=__doc__)
    parser.add_argument("base", nargs="?", default="HEAD", help="the commit to compare with (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--loop", choices=loops.NAMES, default="asyncio")
    parser.add_argument("--sample", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.sample:
        print(json.dumps(loops.run(chosen.loop, samples())))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(base), chosen.base], cwd=ROOT, check=True)
        try:
            taken = _compare(base, chosen.pairs, chosen.loop)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(base)], cwd=ROOT, check=True)
    lines: list[tuple[str, ...]] = []
    for name, sides in taken.items():
        change, control = ratio(sides["present"], sides["base"]), ratio(sides["control"], sides["base"])
        verdict = "must" if change.high <= LIMIT else "missed"
        lines.append((name, *_cells(change), *_cells(control), verdict))
    columns = ("workload", "present / base", "95 % interval", "control", "95 % interval", "met")
    report.print_table(f"{chosen.base} and what became of it, on {chosen.loop}, {chosen.pairs} pairs", columns, lines)
    return 1 if any(line[-1] == "missed" for line in lines) else 0


def _cells(value: Interval) -> tuple[str, str]:
    return f"{value.median:.3f}", f"{value.low:.3f} – {value.high:.3f}"


if __name__ == "__main__":
    sys.exit(main())
