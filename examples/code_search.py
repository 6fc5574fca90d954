"""Search real Python code: the standard library of this interpreter, or any folder.

    python examples/code_search.py                                     fill an index, then ask it at a prompt
    python examples/code_search.py ~/project --query "retry a request"
    python examples/code_search.py --compare                           and the same job as a plain loop

Two graphs live in one deployment. `fill` reads a file in a thread, parses it in a process, and adds what it defines to
an index; `ask` answers a query from the same index.
"""

import signal
import sys

if __name__ == "__main__":  # until `main` handles Ctrl-C, it ends the program without a traceback
    signal.signal(signal.SIGINT, lambda _signal, _frame: sys.exit(130))

import argparse
import ast
import asyncio
import gc
import importlib
import linecache
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self, overload

import anyio
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import penstock as ps
from penstock import engine, telemetry

SAMPLE_QUERIES = (
    "parse a json document",
    "create a temporary directory",
    "insert into a sorted list",
    "split a command line like a shell",
)
HITS, SKIPPED = 3, 5  # shown for a query, and of the files that were skipped
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+")

console = Console(highlight=False)


class Definition(NamedTuple):
    """A function or a class, where it is, and what it is found by."""

    path: Path
    line: int
    summary: str
    words: list[str]


class Hit(NamedTuple):
    """A definition that answers a query, with its first line of code."""

    definition: Definition
    code: str


# --- The graphs ---


@ps.node(runs_on="thread")
def read(path: Path) -> bytes:
    if not path.is_file():  # a pipe would keep its thread for ever
        raise OSError("no regular file")
    return path.read_bytes()


# A file that keeps a parser busy for a minute is given up, and its process with it.
@ps.node(runs_on="process", timeout_seconds=60)
def parse(path: Path, source: bytes) -> list[Definition]:
    with warnings.catch_warnings():  # an invalid escape in the code that is searched is not our concern
        warnings.simplefilter("ignore")
        return list(definitions(path, ast.parse(source, path)))


@ps.node(runs_on="thread")
class Index:
    """All definitions so far, ranked by BM25. A stateful node has one item in it at a time, so it needs no lock."""

    def __init__(self) -> None:
        self._definitions: list[Definition] = []
        self._documents = Documents()
        self._vocabulary: dict[str, int] = {}
        self._ranking: Any = None

    async def __aenter__(self) -> Self:
        # Not at the top of the file, which every worker process imports, and not on the event loop: it takes a while.
        await asyncio.to_thread(importlib.import_module, "bm25s")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._ranking = None

    @overload
    def __call__(self, message: list[Definition]) -> int: ...
    @overload
    def __call__(self, message: str) -> list[Definition]: ...
    def __call__(self, message: list[Definition] | str) -> int | list[Definition]:
        return self._find(message) if isinstance(message, str) else self._add(message)

    def _add(self, found: list[Definition]) -> int:
        known = self._vocabulary
        self._definitions += found
        self._documents += [[known.setdefault(word, len(known)) for word in each.words] for each in found]
        self._ranking = None
        return len(found)

    def _find(self, query: str) -> list[Definition]:
        if not self._definitions:
            return []
        ranking = self._ranking or self._rank()
        numbers, scores = ranking.retrieve([split(query)], k=min(HITS, len(self._definitions)), show_progress=False)
        return [self._definitions[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]

    def _rank(self) -> Any:
        """Rank everything, for the first query after files were added."""
        self._ranking = importlib.import_module("bm25s").BM25(b=0.3)
        self._ranking.index((self._documents, self._vocabulary), show_progress=False)
        return self._ranking


class Documents(list[list[int]]):
    """The words of each definition, by number. Whoever iterates is stopped once nobody waits for the result."""

    def __iter__(self) -> Iterator[list[int]]:
        # A thread cannot be killed: this is what makes Ctrl-C short while a large index is ranked.
        for number, document in enumerate(super().__iter__()):
            if number % 1000 == 0:
                ps.current().check_cancelled()
            yield document


@ps.node(runs_on="thread")
def quote(found: Definition) -> Hit:
    return Hit(found, linecache.getline(str(found.path), found.line).strip())


index = Index()


@ps.graph
async def fill(path: Path) -> int:
    """Add a file to the index; returns how many functions and classes it defines."""
    return index(parse(path, read(path)))


@ps.graph
async def ask(query: str) -> list[Hit]:
    """Return what fits a query best."""
    return await ps.map_each(quote, index(query))


def definitions(path: Path, tree: ast.AST) -> Iterator[Definition]:
    """Yield every function and class of a module, also nested ones."""
    parents = [(tree, "")]
    while parents:
        parent, prefix = parents.pop()
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name, text = f"{prefix}{child.name}.", ast.get_docstring(child) or ""
                yield Definition(path, child.lineno, text.partition("\n")[0], split(f"{path.stem} {name} {text}"))
                parents.append((child, name))
            elif not isinstance(child, ast.expr):  # expressions define nothing, and are most of a tree
                parents.append((child, prefix))


def split(text: str) -> list[str]:
    """Return the words of a name or a sentence, in the singular: `HTTPServers_for` gives http, server and for."""
    return [word.lower().removesuffix("s") for word in WORD.findall(text)]


# --- The job ---


@dataclass
class Job:
    """What is to be done, and what has been."""

    root: Path
    paths: list[Path] = field(default_factory=list[Path])
    files: int = 0
    found: int = 0
    skipped: list[tuple[Path, Exception]] = field(default_factory=list[tuple[Path, Exception]])
    began: float = field(default_factory=perf_counter)
    seconds: float = 0.0  # until everything was found and ranked

    def count(self, path: Path, found: int | None, error: Exception | None = None) -> None:
        self.files += 1
        self.found += found or 0
        if error is not None:
            self.skipped.append((path, error))

    def short(self, path: Path) -> str:
        return escape(str(path.relative_to(self.root)))


def look_for_files(root: Path, limit: int | None) -> list[Path]:
    """Return the Python files of a folder, at most `limit`, and report folders that cannot be read."""
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root, onerror=lambda error: show_left_out(root, error)):
        subfolders[:] = sorted(name for name in subfolders if name not in ("site-packages", "__pycache__"))
        paths += sorted(Path(folder, name) for name in files if name.endswith(".py"))
        if limit is not None and len(paths) >= limit:
            break
    return paths[:limit]


async def serve(job: Job, queries: Sequence[str]) -> None:
    """Fill the index, then answer: the queries, or without any those of the person at the prompt."""
    async with engine.deploy(ask, fill) as service:
        job.began = perf_counter()
        with telemetry.profile() as profile:
            async with service.stream((fill(path) for path in job.paths), ordered=False) as filling:
                columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[now]}")
                with Progress(*columns, console=console) as bar:
                    task = bar.add_task("", total=len(job.paths), now="worker processes start ...")
                    async for outcome in filling.outcomes():
                        job.count(job.paths[outcome.index], outcome.value, outcome.error)
                        rate = job.files / (perf_counter() - job.began)
                        now = f"{rate:.0f} files/s  in line: {inboxes(filling.statistics())}"
                        bar.update(task, completed=job.files, now=now)
        await service("")  # the first query ranks everything
        job.seconds = perf_counter() - job.began
        show_found(job, profile.verdict)
        for query in queries:
            console.print(f"\n[bold]{escape(query)}[/]")
            show_hits(job, await service(query))
        while not queries and (query := await prompt()):
            show_hits(job, await service(query))
        console.print("", service.statistics())


def run_plain_loop(job: Job) -> None:
    """Do the same without an engine: a node that is called outside of a graph is just its function.

    About half of its time is the garbage collector's, which walks over all that was found so far whenever a large file
    is parsed; in a worker process there is little to walk over. So the pipeline gains more than its processes explain.
    """
    job.began = perf_counter()
    own_index = Index()
    for path in job.paths:
        try:
            job.count(path, own_index(parse(path, read(path))))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one file, the others are indexed
            job.count(path, None, error)
    own_index("")
    job.seconds = perf_counter() - job.began


def main() -> int:
    parser = argparse.ArgumentParser(description="Search Python code: a pipeline fills an index, and you ask it.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--query", action="append", help="answer this instead of prompting; repeatable")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after the first N files")
    parser.add_argument("--compare", action="store_true", help="run the same job as a plain loop as well")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    if options.limit is not None and options.limit < 1:
        parser.error("--limit must be at least 1")
    interactive = sys.stdin and sys.stdin.isatty() and console.is_terminal and not options.compare
    job = Job(options.folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job.paths = look_for_files(options.folder, options.limit)
        console.print(f"[bold]{len(job.paths):,} Python files[/] in {escape(str(job.root))}")
        if not job.paths:
            console.print("[red]There is nothing to search.[/]")
            return 1
        console.print(f"\n{fill}\n\n{ask}\n", markup=False)
        asyncio.run(serve(job, options.query or (() if interactive else SAMPLE_QUERIES)))
        if options.compare:
            gc.collect()  # what the pipeline has left is not to be paid for by the loop
            console.print("\nNow the same as a plain loop, whose files are in the page cache already ...")
            pipeline, job = job, Job(job.root, job.paths)
            run_plain_loop(job)
            show_comparison(pipeline, job)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the report is left
        show_interrupted(job)
        return 130
    return 0


# --- The display: all of its numbers are those that streams and deployments keep anyway ---


async def prompt() -> str:
    console.print("\n[bold cyan]search ❯[/] ", end="")
    await anyio.wait_readable(sys.stdin)  # a terminal hands over whole lines, so this holds up nobody
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


def show_hits(job: Job, hits: Sequence[Hit]) -> None:
    for found, code in hits:
        line(f"  [cyan]{job.short(found.path)}:{found.line}[/]  {escape(code)}")
        if found.summary:
            line(f"      [dim]{escape(found.summary)}[/]")
    if not hits:
        console.print("  [dim]nothing fits[/]")


def inboxes(filled: engine.StreamStatistics) -> str:
    """Show how many items wait for each node, red where there is no room for more."""
    shown = [(node.node, node.inbox.depth, node.inbox.capacity) for node in filled.actors if node.graph == fill.name]
    return "  ".join(f"{name} [{'red' if held == room else 'green'}]{held:2}/{room}[/]" for name, held, room in shown)


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


if __name__ == "__main__":
    sys.exit(main())
