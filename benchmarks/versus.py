"""`python -m benchmarks.versus BASE`: this checkout beside another commit, pair by pair, and that commit beside itself.

Each round has three processes in rotating order: the base, the base again (the control), the present checkout. A
process imports the `src` of its side and measures every speed row. The ratio of two processes next to each other
cancels disturbances of both. New processes average over random properties of a process (addresses, hash seeds). A base
that has this file runs its own copy, since names may have changed in between.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import loops, report
from .speed_rows import measured
from .summary import ratio

ROOT = Path(__file__).parents[1]
LIMIT = 1.03  # the largest upper end of an interval for a change that must not slow anything down
SIDES = ("base", "control", "present")


def _sample_in_child(checkout: Path, loop: str, *, servers: bool) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(checkout / "typings")}
    has_own = (checkout / "benchmarks" / "versus.py").exists()
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.versus", "--sample", "--loop", loop, *["--servers"] * servers],
        cwd=checkout if has_own else ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if child.returncode != 0:
        raise RuntimeError(f"a sample of {checkout} ended with {child.returncode}:\n{child.stderr}")
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def _compare(base: Path, pairs: int, loop: str, *, servers: bool) -> dict[str, dict[str, list[float]]]:
    """Return samples by workload and side, round by round."""
    taken: dict[str, dict[str, list[float]]] = {}
    for turn in range(pairs):
        first = turn % len(SIDES)
        for side in (*SIDES[first:], *SIDES[:first]):
            print(f"\r{loop}: {side} of pair {turn + 1} of {pairs}   ", end="", file=sys.stderr, flush=True)
            for name, seconds in _sample_in_child(ROOT if side == "present" else base, loop, servers=servers).items():
                taken.setdefault(name, {one: [] for one in SIDES})[side].append(seconds)
    print(file=sys.stderr)
    return taken


def main() -> int:
    """Return 1 if the upper end of an interval is above the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus", description=__doc__)
    parser.add_argument("base", nargs="?", default="HEAD", help="the commit to compare with (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--loop", choices=loops.NAMES, default="asyncio")
    parser.add_argument(
        "--servers", action="store_true", help="measure the rows of a tuned web server instead; needs wrk"
    )
    parser.add_argument("--sample", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.sample:
        print(json.dumps(loops.run(chosen.loop, measured(servers=chosen.servers))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(base), chosen.base], cwd=ROOT, check=True)
        try:
            taken = _compare(base, chosen.pairs, chosen.loop, servers=chosen.servers)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(base)], cwd=ROOT, check=True)
    lines: list[tuple[str, ...]] = []
    for name, sides in taken.items():
        if not all(sides.values()):  # a row that the base does not have
            continue
        change, control = ratio(sides["present"], sides["base"]), ratio(sides["control"], sides["base"])
        verdict = "must" if change.high <= LIMIT else "missed"
        lines.append((name, *report.of_ratio(change), *report.of_ratio(control), verdict))
    columns = ("workload", "present / base", "95 % interval", "control", "95 % interval", "met")
    report.print_table(f"{chosen.base} and what became of it, on {chosen.loop}, {chosen.pairs} pairs", columns, lines)
    return 1 if any(line[-1] == "missed" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
