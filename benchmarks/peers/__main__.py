"""`python -m benchmarks.peers`: every peer beside hand-written asyncio, each in a process of its own."""

import argparse
import importlib.metadata
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .. import loops, report
from ..harness import Measured
from .shared import BY_HAND

RESULTS = Path(__file__).parents[1] / "results" / "peers-latest.json"

# The module of each peer, and the distribution that it needs.
PEERS = {
    "penstock_engine": "penstock",
    "anyio_streams": "anyio",
    "grain_dataset": "grain",
    "xoscar_actors": "xoscar",
    "hamilton_dag": "apache-hamilton",
    "spdl_pipeline": "spdl",
    "langgraph_graphs": "langgraph",
    "ray_actors": "ray",
}
TIMEOUT_SECONDS = 600
COLUMNS = ("workload", "what", "loop", "measured", "95 % interval", "by hand, same run", "control")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter samples: a look, not a claim")
    parser.add_argument("--only", metavar="PEER", action="append", choices=PEERS, help=f"one of: {', '.join(PEERS)}")
    parser.add_argument("--loop", choices=[*loops.NAMES, "both"], default="asyncio")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go (default: %(default)s)")
    return parser.parse_args()


@dataclass
class Outcome:
    """The rows of one peer on one loop, and the reason if rows are missing."""

    peer: str
    version: str
    loop: str
    rows: list[Measured] = field(default_factory=list[Measured])
    skipped: str = ""


def run_peer(module: str, loop: str, *, quick: bool) -> Outcome:
    """Run a peer in a process of its own, so that its loop, its threads and a crash cannot disturb other peers."""
    distribution = PEERS[module]
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Outcome(distribution, "", loop, skipped="not installed: see what `make bench-peers` printed")
    outcome = Outcome(distribution, version, loop)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.child"]
        command += [module, loop, "quick" if quick else "full", str(path)]
        try:
            child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            outcome.skipped = f"stopped after {TIMEOUT_SECONDS} s"
        else:
            if child.returncode != 0:
                outcome.skipped = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        if path.exists():
            outcome.rows = pickle.loads(path.read_bytes())
    return outcome


def lines(outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    """Return the lines of the table, by workload; the peers of a workload are in the order of their runs."""
    table: list[tuple[str, ...]] = []
    for outcome in outcomes:
        by_hand = {row.workload: row for row in outcome.rows if row.row.title == BY_HAND}
        for row in outcome.rows:
            if row.row.title != BY_HAND:
                beside = by_hand.get(row.workload)
                shown = report.number(beside.value.median) if beside else "1"
                workload, what, loop, value, spread, control = report.cells(row)[:6]
                table.append((workload, what, loop, value, spread, shown, control))
    workloads = ("chain", "call", "io", "threads")
    return sorted(table, key=lambda line: workloads.index(line[0]))


def main() -> int:
    chosen = arguments()
    outcomes: list[Outcome] = []
    for loop in loops.NAMES if chosen.loop == "both" else (chosen.loop,):
        for module in chosen.only or PEERS:
            print(f"{module} on {loop} ...", file=sys.stderr, flush=True)
            outcomes.append(run_peer(module, loop, quick=chosen.quick))
    report.print_table("peers beside hand-written asyncio", COLUMNS, lines(outcomes))
    for outcome in outcomes:
        if outcome.skipped:
            print(f"{outcome.peer} on {outcome.loop} SKIPPED: {outcome.skipped}")
    report.write_json(
        chosen.json,
        [row for outcome in outcomes for row in outcome.rows],
        quick=chosen.quick,
        extra={
            "peers": [{"peer": o.peer, "version": o.version, "loop": o.loop, "skipped": o.skipped} for o in outcomes]
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
