"""The common parts of the two search programs: files to search, options, progress, Ctrl-C, and reports.

All numbers on the screen come from the statistics that streams and deployments keep anyway.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import anyio
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from penstock import engine, telemetry

SKIPPED = 5  # how many skipped files are shown

console = Console(highlight=False)


@dataclass
class Job:
    """The files to search, and the results so far."""

    root: Path
    paths: list[Path] = field(default_factory=list[Path])
    files: int = 0
    found: int = 0
    skipped: list[tuple[Path, Exception]] = field(default_factory=list[tuple[Path, Exception]])
    began: float = field(default_factory=perf_counter)
    seconds: float = 0.0  # how long it took until everything was found and ranked

    def count(self, path: Path, found: int | None, error: Exception | None = None) -> None:
        self.files += 1
        self.found += found or 0
        if error is not None:
            self.skipped.append((path, error))

    def short(self, path: Path) -> str:
        return escape(str(path.relative_to(self.root)))


def look_for_files(root: Path, limit: int | None, is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Return the wanted Python files of a folder, at most `limit`; report folders that cannot be read."""
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root, onerror=lambda error: show_left_out(root, error)):
        subfolders[:] = sorted(name for name in subfolders if name not in ("site-packages", "__pycache__"))
        found = sorted(Path(folder, name) for name in files if name.endswith(".py"))
        paths += [path for path in found if is_wanted(path.relative_to(root))]
        if limit is not None and len(paths) >= limit:
            break
    return paths[:limit]


async def follow(job: Job, filling: engine.Stream[int], now: Callable[[], str]) -> None:
    """Count the results of a stream, and show its progress."""
    columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[now]}")
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(job.paths), now="worker processes start ...")

        def show() -> None:
            rate = job.files / (perf_counter() - job.began)
            bar.update(task, completed=job.files, now=f"{rate:.0f} files/s  {now()}")

        async def keep_showing() -> None:  # also while no file is done
            while True:
                await asyncio.sleep(0.25)
                show()

        showing = asyncio.create_task(keep_showing())
        try:
            async for outcome in filling.outcomes():
                job.count(job.paths[outcome.index], outcome.value, outcome.error)
                show()
        finally:
            showing.cancel()


# --- The program ---


def read_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--query", action="append", help="answer this query instead of prompting; repeatable")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after the first N files")
    parser.add_argument("--compare", action="store_true", help="also run the same job as a plain loop")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    if options.limit is not None and options.limit < 1:
        parser.error("--limit must be at least 1")
    return options


def questions(options: argparse.Namespace, samples: Sequence[str]) -> Sequence[str]:
    """Return the queries to answer; none if a person at a terminal can ask."""
    is_interactive = sys.stdin and sys.stdin.isatty() and console.is_terminal and not options.compare
    return options.query or (() if is_interactive else samples)


@contextmanager
def reporting_interrupts(jobs: Sequence[Job]) -> Generator[None]:
    """Let Ctrl-C end the program with a report of the last job."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = send_interrupt_again
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the report is left
        show_interrupted(jobs[-1])
        sys.exit(130)


def send_interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
    """Repeat a Ctrl-C that came while the garbage collector called a function of JAX, where exceptions are ignored."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()  # then that function has returned
    else:
        sys.__unraisablehook__(lost)


def begin(job: Job, limit: int | None, is_wanted: Callable[[Path], bool] = lambda _path: True) -> bool:
    """Look for the files of a job, and return whether there are any; `is_wanted` gets paths relative to its folder."""
    job.paths = look_for_files(job.root, limit, is_wanted)
    console.print(f"[bold]{len(job.paths):,} Python files[/] in {escape(str(job.root))}")
    if not job.paths:
        console.print("[red]There is nothing to search.[/]")
    return bool(job.paths)


def compare(jobs: list[Job], run_plain: Callable[[Job], None]) -> None:
    """Do a job once more, as a plain loop."""
    gc.collect()  # so that the loop does not pay for the garbage of the pipeline
    console.print("\nNow the same as a plain loop, whose files are in the page cache already ...")
    [pipeline] = jobs
    jobs.append(Job(pipeline.root, pipeline.paths))
    run_plain(jobs[-1])
    show_comparison(pipeline, jobs[-1])


# --- The display ---


async def prompt() -> str:
    console.print("\n[bold cyan]search ❯[/] ", end="")
    await anyio.wait_readable(sys.stdin)  # a terminal gives whole lines, so `readline` does not block
    return sys.stdin.readline().strip()


def line(text: str) -> None:
    console.print(text, no_wrap=True, overflow="ellipsis")


def show_left_out(root: Path, error: OSError) -> None:
    line(f"[yellow]A folder is left out:[/] {escape(f'{os.path.relpath(error.filename, root)}: {error.strerror}')}")


def show_found(job: Job, verdict: telemetry.Verdict) -> None:
    console.print(f"[bold]{job.found:,} functions and classes[/] found and ranked in {job.seconds:.1f} s")
    console.print(f"{verdict}.")
    if job.skipped:
        console.print(f"[yellow]{counted(len(job.skipped), 'file')} skipped:[/]")
    for path, error in job.skipped[:SKIPPED]:
        line(f"  {job.short(path)}  [dim]{escape(f'{type(error).__name__}: {error}')}[/]")
    if len(job.skipped) > SKIPPED:
        console.print(f"  [dim]and {len(job.skipped) - SKIPPED} more[/]")


def inboxes(filled: engine.StreamStatistics, *graphs: str) -> str:
    """Show how many items wait for each node of some graphs; full inboxes are red."""
    shown = [(node.node, node.inbox.depth, node.inbox.capacity) for node in filled.actors if node.graph in graphs]
    return "in line: " + "  ".join(
        f"{name} [{'red' if held == room else 'green'}]{held:2}/{room}[/]" for name, held, room in shown
    )


def show_comparison(pipeline: Job, plain: Job) -> None:
    console.print(
        f"Pipeline [bold]{pipeline.seconds:.1f} s[/], plain loop [bold]{plain.seconds:.1f} s[/]: "
        f"{pipeline.seconds / plain.seconds:.2f} times as long, on {os.cpu_count()} cores."
    )
    same = (plain.found, len(plain.skipped)) == (pipeline.found, len(pipeline.skipped))
    console.print("Both found the same." if same else "[red]They did not find the same.[/]")


def show_interrupted(job: Job) -> None:
    console.print(
        f"\n[yellow]Interrupted[/] after {perf_counter() - job.began:.1f} s: {job.files:,} of "
        f"{counted(len(job.paths), 'file')} done, {job.found:,} functions and classes found, {len(job.skipped)} skipped"
    )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun} was" if number == 1 else f"{number:,} {noun}s were"
