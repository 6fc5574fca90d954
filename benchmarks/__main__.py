"""`python -m benchmarks`: measure penstock against hand-written asyncio, and print the table."""

import argparse
import sys
from pathlib import Path

from . import fresh, harness, loops, report
from .harness import Measured, Workload

RESULTS = Path(__file__).parent / "results" / "latest.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--devices", action="store_true", help="measure the workloads on devices, instead of the others"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter samples: a look, not a claim")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="one workload, of either kind; may be given again"
    )
    parser.add_argument("--loop", choices=[*loops.NAMES, "both"], default="both")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Return 1 if a limit that must be kept was missed."""
    chosen = arguments()
    workloads = _chosen("devices" if chosen.devices else "workloads", chosen.only)
    measured: list[Measured] = []
    for loop in loops.NAMES if chosen.loop == "both" else (chosen.loop,):
        for suite, workload in workloads:
            print(f"{workload.name} on {loop} ...", file=sys.stderr, flush=True)
            measured += _measure(suite, workload, loop, quick=chosen.quick)
    report.print_table("penstock beside hand-written asyncio", report.COLUMNS, map(report.cells, measured))
    report.write_json(chosen.json, measured, quick=chosen.quick)
    return 1 if any(row.verdict == "missed" for row in measured) else 0


def _chosen(suite: str, names: list[str] | None) -> list[tuple[str, Workload]]:
    """Return the workloads of a suite, or the named workloads; load the other suite only for a name in it."""
    found = {workload.name: (suite, workload) for workload in fresh.suite(suite)}
    if names is None:
        return list(found.values())
    if not found.keys() >= set(names):
        other = "workloads" if suite == "devices" else "devices"
        found |= {workload.name: (other, workload) for workload in fresh.suite(other)}
    unknown = [name for name in names if name not in found]
    if unknown:
        sys.exit(f"--only {unknown[0]}: one of {', '.join(found)}")
    return [found[name] for name in names]


def _measure(suite: str, workload: Workload, loop: str, *, quick: bool) -> list[Measured]:
    if workload.fresh_process:
        return fresh.measure(suite, workload, loop, quick=quick)
    return loops.run(loop, harness.measure(workload, loop, quick=quick))


if __name__ == "__main__":
    sys.exit(main())
