"""Search real Python code: the standard library of this interpreter, or any folder.

    python examples/code_search.py                                     fill an index, then ask it at a prompt
    python examples/code_search.py ~/project --query "retry a request"
    python examples/code_search.py --compare                           also run the same job as a plain loop

Two graphs are in one deployment. `fill` reads a file in a thread, parses the file in a process, and adds its
definitions to an index; `ask` answers a query from the same index.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda _signal, _frame: sys.exit(130))  # until `main` handles Ctrl-C: no traceback
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import examples`: the path has only this file's folder

import argparse
import ast
import asyncio
import importlib
import linecache
import re
import warnings
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Self, overload

from rich.markup import escape

import penstock as ps
from examples.search_job import (
    Job,
    begin,
    compare,
    console,
    follow,
    inboxes,
    line,
    prompt,
    questions,
    read_options,
    reporting_interrupts,
    show_found,
)
from penstock import engine, telemetry

SAMPLE_QUERIES = (
    "parse a json document",
    "create a temporary directory",
    "insert into a sorted list",
    "split a command line like a shell",
)
HITS = 3  # how many definitions are shown for a query
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+")


class Definition(NamedTuple):
    """A function or a class, with its place and the words by which the search finds it."""

    path: Path
    line: int
    signature: str  # Cache.evict(self, count)
    summary: str  # the first paragraph of its docstring, as one line
    words: list[str]


class Hit(NamedTuple):
    """A definition that answers a query, with its first line of code."""

    definition: Definition
    code: str


# --- The graphs ---


@ps.node(runs_on="thread")
def read(path: Path) -> bytes:
    if not path.is_file():  # reading a pipe would block the thread for ever
        raise OSError("no regular file")
    return path.read_bytes()


# A file that keeps a parser busy for a minute fails, and the timeout kills the worker process.
@ps.node(runs_on="process", timeout_seconds=60)
def parse(path: Path, source: bytes) -> list[Definition]:
    with warnings.catch_warnings():  # hide warnings about invalid escapes in the searched code
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
        # Not at the top of the file, which every worker process imports; and in a thread, because the import is slow.
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
    """The words of each definition, by number. The iteration stops once the caller of the search has left."""

    def __iter__(self) -> Iterator[list[int]]:
        # A thread cannot be killed: this check makes Ctrl-C quick while a large index is ranked.
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
    """Add a file to the index; return how many functions and classes the file defines."""
    return index(parse(path, read(path)))


@ps.graph
async def ask(query: str) -> list[Hit]:
    """Return the definitions that fit a query best."""
    return await ps.map_each(quote, index(query))


def definitions(path: Path, tree: ast.AST) -> Iterator[Definition]:
    """Yield every function and class of a module, including nested functions and classes."""
    parents = [(tree, "")]
    while parents:
        parent, prefix = parents.pop()
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name, text = prefix + child.name, ast.get_docstring(child) or ""
                summary = " ".join(text.partition("\n\n")[0].split())
                words = split(f"{path.stem} {name} {text}")
                yield Definition(path, child.lineno, name + parameters(child), summary, words)
                parents.append((child, f"{name}."))
            elif not isinstance(child, ast.expr):  # expressions define nothing, and are most of a tree
                parents.append((child, prefix))


def parameters(definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the names of a function's parameters, in parentheses; for a class, an empty text."""
    if isinstance(definition, ast.ClassDef):
        return ""
    declared = definition.args
    names = [each.arg for each in (*declared.posonlyargs, *declared.args)]
    names += [f"*{declared.vararg.arg}"] if declared.vararg else []
    names += [each.arg for each in declared.kwonlyargs]
    names += [f"**{declared.kwarg.arg}"] if declared.kwarg else []
    return f"({', '.join(names)})"


def split(text: str) -> list[str]:
    """Return the words of a name or a sentence, in the singular: `HTTPServers_for` gives http, server and for."""
    return [word.lower().removesuffix("s") for word in WORD.findall(text)]


# --- The job ---


async def serve(job: Job, queries: Sequence[str]) -> None:
    """Fill the index, then answer the queries; without queries, answer the person at the prompt."""
    async with engine.deploy(ask, fill) as service:
        job.began = perf_counter()
        with telemetry.profile() as profile:
            async with service.stream((fill(path) for path in job.paths), ordered=False) as filling:
                await follow(job, filling, lambda: inboxes(filling.statistics(), fill.name))
        await service("")  # the first query ranks everything
        job.seconds = perf_counter() - job.began
        show_found(job, profile.verdict)
        for query in queries:
            console.print(f"\n[bold]{escape(query)}[/]")
            show_hits(job, await service(query))
        while not queries and (query := await prompt()):
            show_hits(job, await service(query))
        console.print("", service.statistics())


def show_hits(job: Job, hits: Sequence[Hit]) -> None:
    for found, code in hits:
        line(f"  [cyan]{job.short(found.path)}:{found.line}[/]  {escape(code)}")
        if found.summary:
            line(f"      [dim]{escape(found.summary)}[/]")
    if not hits:
        console.print("  [dim]nothing fits[/]")


def run_plain_loop(job: Job) -> None:
    """Do the same job without an engine: a node that is called outside of a graph runs just its function.

    The garbage collector takes about half of the time: whenever a large file is parsed, it walks over all definitions
    found so far. A worker process has few objects to walk over. So the pipeline gains more than its processes explain.
    """
    job.began = perf_counter()
    own_index = Index()
    for path in job.paths:
        try:
            job.count(path, own_index(parse(path, read(path))))
        except Exception as error:  # noqa: BLE001 - an error in one file must not keep other files out
            job.count(path, None, error)
    own_index("")
    job.seconds = perf_counter() - job.began


def main() -> int:
    parser = argparse.ArgumentParser(description="Search Python code: a pipeline fills an index, and you ask it.")
    options = read_options(parser)
    jobs = [Job(options.folder)]
    with reporting_interrupts(jobs):
        if not begin(jobs[0], options.limit):
            return 1
        console.print(f"\n{fill}\n\n{ask}\n", markup=False)
        asyncio.run(serve(jobs[0], questions(options, SAMPLE_QUERIES)))
        if options.compare:
            compare(jobs, run_plain_loop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
