"""`python -m benchmarks.peers.feeds`: feeds of a training by Penstock, Grain and PyTorch's DataLoader.

The loaders take turns, and each sample is taken in a process of its own: no loader has the threads, the imports or the
waiting workers of another loader. A sample begins once the workers have started and the batches read ahead are used up.
"""

import argparse
import asyncio
import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import report
from ..harness import CONTROL, Measured, Row, evaluate
from ..summary import Limits
from . import feed_work

RESULTS = Path(__file__).parents[1] / "results" / "feeds-latest.json"

# The module of each loader, and the distribution that it needs.
LOADERS = {"penstock_feed": "penstock", "grain_feed": "grain", "torch_feed": "torch"}
OURS = "Penstock"
ROUNDS = (7, 3)
TIMEOUT_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Feed:
    """A feed to measure.

    Attributes:
        title: The title of its rows.
        unit: The unit of its numbers.
        batch: How many files or records a batch has.
        batches: How many batches a sample counts.
        uncounted: How many batches come before the sample; more than any loader reads ahead.
        limits: The limits of Penstock's ratio to the loaders in `held_to`.
        held_to: The names of loaders for which the limits hold.
    """

    title: str
    unit: str
    batch: int
    batches: int
    uncounted: int
    limits: Limits
    held_to: tuple[str, ...]


FEEDS = {
    "files": Feed(
        title="2,000 files read, parsed, tokenised, batched",
        unit="files/s",
        batch=feed_work.FILES_BATCH,
        batches=feed_work.FILES // feed_work.FILES_BATCH,
        uncounted=25,
        limits=Limits(must=1.1, at_least=True),
        held_to=("Grain", "Grain, 16 threads", "DataLoader"),
    ),
    "memory": Feed(
        title="100,000 records of 1 KB in memory, batched",
        unit="records/s",
        batch=feed_work.RECORDS_BATCH,
        batches=feed_work.RECORDS // feed_work.RECORDS_BATCH,
        uncounted=50,
        limits=Limits(must=1.0, at_least=True),
        held_to=("Grain", "Grain, IterDataset"),
    ),
}

Read = Callable[[Any], AsyncIterator[Any]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.feeds", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples: a look, not a claim")
    parser.add_argument("--only", choices=FEEDS, action="append", help="one of the feeds; may be given again")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go (default: %(default)s)")
    parser.add_argument("--sample", nargs=3, metavar=("LOADER", "FEED", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


async def sample(read: Read, feed: Feed, source: Any) -> float:
    """Return how many files or records are read in a second."""
    batches = read(source)
    count, began = 0, 0.0
    async with aclosing(batches):
        async for values in batches:
            first = values[0] if isinstance(values, list | tuple) else values
            assert len(first) == feed.batch
            count += 1
            if count == feed.uncounted:
                began = time.perf_counter()
            elif count == feed.uncounted + feed.batches:
                return feed.batches * feed.batch / (time.perf_counter() - began)
    raise ValueError("the feed has ended")


def sample_here(loader: str, name: str, contender: str, folder: Path) -> float:
    read: Read = importlib.import_module(f".{loader}", __package__).WORKLOADS[name][contender]
    source = feed_work.records() if name == "memory" else sorted(map(str, folder.iterdir()))
    return asyncio.run(sample(read, FEEDS[name], source))


def sample_in_child(loader: str, name: str, contender: str, folder: Path) -> float:
    """Take one sample in another process.

    Raises:
        RuntimeError: The process failed; the message is the last line that it has printed.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.feeds", "--folder", str(folder)]
    command += ["--sample", loader, name, contender]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    if child.returncode != 0:
        raise RuntimeError((child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1])
    return float(child.stdout.split()[-1])


@dataclass
class Outcome:
    """The version of a loader that was measured, or the reason why the loader was skipped."""

    peer: str
    version: str = ""
    skipped: str = ""


def opened(loader: str) -> tuple[Outcome, dict[str, list[str]]]:
    """Return the names of the contenders for each feed; no names if the loader is not installed."""
    outcome = Outcome(LOADERS[loader])
    try:
        outcome.version = importlib.metadata.version(outcome.peer)
        found = importlib.import_module(f".{loader}", __package__).WORKLOADS
    except ImportError as error:
        outcome.skipped = f"not installed ({error}): see benchmarks/peers/requirements.txt"
        return outcome, {}
    return outcome, {name: list(contenders) for name, contenders in found.items()}


def rows(feed: Feed, contenders: list[str]) -> list[Row]:
    """Return a row with the number of each loader, and a row with Penstock's ratio to each loader."""
    found = [Row(title=name, subject=name, unit=feed.unit) for name in contenders]
    for name in contenders:
        if not name.startswith(OURS):
            limits = feed.limits if name in feed.held_to else None
            found.append(Row(title=f"{OURS} / {name}", subject=OURS, reference=name, limits=limits))
    return found


def measure(name: str, contenders: dict[str, str], folder: Path, *, quick: bool) -> list[Measured]:
    """Let the contenders of a feed take turns.

    Args:
        name: The feed.
        contenders: The names of the contenders, each with its loader.
        folder: The folder with the files.
        quick: Whether to take fewer samples.
    """
    feed = FEEDS[name]
    entries = {**contenders, CONTROL: contenders[OURS]}
    samples: dict[str, list[float]] = {contender: [] for contender in entries}
    for turn in range(ROUNDS[1 if quick else 0]):
        order = list(entries)
        for contender in order if turn % 2 == 0 else reversed(order):
            print(f"{name}: {contender}, {turn + 1} ...", file=sys.stderr, flush=True)
            asked = OURS if contender == CONTROL else contender
            samples[contender].append(sample_in_child(entries[contender], name, asked, folder))
    return evaluate(feed.title, rows(feed, list(contenders)), "asyncio", samples, OURS)


def main() -> int:
    """Return 1 if a limit that must be kept was missed."""
    chosen = arguments()
    if chosen.sample:
        print(sample_here(*chosen.sample, chosen.folder))
        return 0
    loaders = {loader: opened(loader) for loader in LOADERS}
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        feed_work.write_files(Path(folder))
        for name in chosen.only or FEEDS:
            contenders = {one: loader for loader, (_, named) in loaders.items() for one in named.get(name, ())}
            measured += measure(name, contenders, Path(folder), quick=chosen.quick)
    report.print_table("what feeds a training", report.COLUMNS, map(report.cells, measured))
    outcomes = [outcome for outcome, _ in loaders.values()]
    for outcome in outcomes:
        if outcome.skipped:
            print(f"{outcome.peer} SKIPPED: {outcome.skipped}")
    report.write_json(chosen.json, measured, quick=chosen.quick, extra={"peers": [asdict(each) for each in outcomes]})
    return 1 if any(row.verdict == "missed" for row in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
