"""`python -m benchmarks.servers`: requests a second, over the same server written by hand, under load by wrk.

A round starts each server anew, warms it up, puts it under load and ends it; every second round has reverse order. Two
servers are written by hand: as a careful person writes it, and with the promises of a call of Penstock. In a full run,
the first of these is measured twice a round, as the control.
"""

import argparse
import importlib.util
import itertools
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from .. import report
from ..harness import CONTROL, Measured, Row, evaluate
from ..summary import Limits
from . import process
from .process import Load

RESULTS = Path(__file__).parents[1] / "results" / "servers-latest.json"
PENSTOCK, BY_HAND = "with_penstock", "by_hand"
PROMISED = "by_hand_with_promises"  # shows the cost of the promises of a call in asyncio
LOOP = "uvloop"
# Servers made for models, with their defaults, on the one row that they can serve.
PEERS = ("litserve", "mosec")
PEERS_ROW = "thread batch"
# The names of other sides in tables, if they differ from the name of the module.
NAMES = {PROMISED: "by hand, with promises"}
PEERS_PYTHON = process.ROOT / ".venv-server-peers/bin/python"


@dataclass(frozen=True)
class Number:
    """A number of a server under load: its name, its unit, and a function that reads it."""

    name: str
    unit: str
    value: Callable[[Load], float]


REQUESTS = Number("requests", "/s", lambda load: load.requests_per_second)
P99 = Number("p99", "ms", lambda load: 1e3 * load.p99_seconds)
CPU = Number("CPU", "µs", lambda load: 1e6 * load.cpu_seconds)
NUMBERS = (REQUESTS, P99, CPU)

# For each row: the work of one request, and the limits of requests a second over the server by hand, untuned and tuned.
ROWS: dict[str, tuple[str, Limits, Limits]] = {
    name: (what, Limits(must=untuned, aim=0.95, at_least=True), Limits(must=tuned, aim=1, at_least=True))
    for name, what, untuned, tuned in (
        ("async", "an async def of 5 ms", 0.88, 0.92),
        ("async batch", "one of a batch, async def", 0.9, 0.93),
        ("thread batch", "the same, def in a thread", 0.87, 0.93),
        ("device batch", "one of a batch of a JAX model", 0.75, 0.8),
        ("run", "the first by engine.run", 0.85, 0.9),
        ("events", "50 events, 5 ms apart", 0.9, 0.92),
    )
}
UNTUNED_P99 = Limits(must=1.2, aim=1)
TUNINGS = ("untuned", "tuned")
COLUMNS = (
    "row", "process", "measured", "by hand", "CPU", "95 %", "p99", "95 %", "promised", "requests", "95 %",
    "control", "must", "aim", "met",
)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: a look, not a claim")
    parser.add_argument("--only", metavar="ROW", action="append", choices=ROWS, help=f"one of: {', '.join(ROWS)}")
    parser.add_argument("--peers", action="store_true", help=f"{' and '.join(PEERS)} beside the row {PEERS_ROW!r}")
    parser.add_argument("--tuning", choices=[*TUNINGS, "both"], default="both")
    parser.add_argument("--rounds", type=int, help="how often each server is measured (default: 9, quick: 3)")
    parser.add_argument("--seconds", type=int, help="of load in a round (default: 4, quick: 2)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Return 1 if a limit that must be kept was missed."""
    chosen = arguments()
    check_what_is_needed(peers=chosen.peers)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end servers, as after Ctrl-C
    rounds = chosen.rounds or (3 if chosen.quick else 9)
    seconds = chosen.seconds or (2 if chosen.quick else 4)
    measured: list[Measured] = []
    lines: list[tuple[str, ...]] = []
    for row in chosen.only or ROWS:
        for tuning in TUNINGS if chosen.tuning == "both" else (chosen.tuning,):
            others = (PROMISED, *(PEERS if chosen.peers and (row, tuning) == (PEERS_ROW, "untuned") else ()))
            sides = (PENSTOCK, *others, BY_HAND, *(() if chosen.quick else (CONTROL,)))
            loads = samples(row, tuning, sides, rounds, seconds)
            for side in (PENSTOCK, *others):
                found = {number: evaluated(row, tuning, number, side, loads) for number in NUMBERS}
                measured += itertools.chain.from_iterable(found.values())
                lines.append(line(row if side == PENSTOCK else NAMES.get(side, f"by {side}"), tuning, found))
    title = f"web servers: requests/s, p99 (ms) and CPU (µs a request), and ratios over by hand; {rounds} × {seconds} s"
    report.print_table(title, COLUMNS, lines)
    report.write_json(chosen.json, measured, quick=chosen.quick)
    return 1 if any(each.verdict == "missed" for each in measured) else 0


def check_what_is_needed(*, peers: bool) -> None:
    """Exit if a program or a module that the numbers depend on is not installed."""
    if shutil.which("wrk") is None:
        sys.exit("the load comes from wrk, which is not installed: `apt install wrk` on Debian and Ubuntu, "
                 "`brew install wrk` on macOS, else https://github.com/wg/wrk")  # fmt: skip
    for module in ("uvloop", "httptools"):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"{module} is not installed, with which uvicorn is measured: `make bench-servers` installs it")
    if peers and not PEERS_PYTHON.exists():
        sys.exit("the peers are in an environment of their own: make bench-servers ARGS=--peers")
    if not process.PROC.exists():
        sys.exit("the processor time of a server is read from /proc, which this system does not have")


def samples(row: str, tuning: str, sides: tuple[str, ...], rounds: int, seconds: int) -> dict[str, list[Load]]:
    """Return the loads of each side, round by round."""
    taken: dict[str, list[Load]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            print(f"\r{row}, {tuning}, round {turn + 1} of {rounds}: {side:20}", end="", file=sys.stderr, flush=True)
            with serving(BY_HAND if side == CONTROL else side, row, tuning) as (url, pid):
                process.ask(url)
                process.load(url, pid, 1)  # imports, compiles and caches
                taken[side].append(process.load(url, pid, seconds))
    print(file=sys.stderr)
    return taken


def serving(side: str, row: str, tuning: str) -> AbstractContextManager[tuple[str, int]]:
    if side in PEERS:
        return process.peer(side, PEERS_PYTHON)
    return process.server(side, row, tuned=tuning == "tuned")


def evaluated(row: str, tuning: str, number: Number, side: str, loads: dict[str, list[Load]]) -> list[Measured]:
    """Return the rows for one number: the ratio, and the number of each side."""
    _, untuned, tuned = ROWS[row]
    limits = None
    if side != PENSTOCK:
        pass
    elif number is REQUESTS:
        limits = tuned if tuning == "tuned" else untuned
    elif number is P99 and tuning == "untuned":
        limits = UNTUNED_P99
    name = "penstock" if side == PENSTOCK else side
    title = f"{number.name} with {name}"
    rows = [
        Row(title=f"{title} over by hand", subject=side, reference=BY_HAND, limits=limits),
        Row(title=title, subject=side, unit=number.unit),
        Row(title=f"{number.name} by hand", subject=BY_HAND, unit=number.unit),
    ]
    if side == PENSTOCK:
        rows.append(Row(title=f"{title} over {NAMES[PROMISED]}", subject=side, reference=PROMISED))
    values = {each: [number.value(load) for load in found] for each, found in loads.items()}
    return evaluate(f"{row}, {tuning}", rows, LOOP, values, BY_HAND)


def line(row: str, tuning: str, found: dict[Number, list[Measured]]) -> tuple[str, ...]:
    """Return one line of the table."""
    (requests, _, _, *promised), (p99, *_), (cpu, *_) = (found[number] for number in NUMBERS)
    mine, other = (", ".join(report.number(found[number][side].value.median) for number in NUMBERS) for side in (1, 2))
    ratios = itertools.chain.from_iterable(
        (report.number(ratio.value.median), report.spread(ratio.value)) for ratio in (cpu, p99)
    )
    over_promised = report.number(promised[0].value.median) if promised else ""
    return (row, tuning, mine, other, *ratios, over_promised, *report.cells(requests)[3:])


if __name__ == "__main__":
    sys.exit(main())
