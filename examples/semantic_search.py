"""Search Python code by meaning: the standard library of this interpreter, or any folder.

    python examples/semantic_search.py                                 fill two indexes, then ask them at a prompt
    python examples/semantic_search.py ~/project --query "try again later"
    python examples/semantic_search.py --embed sentences.json --out vectors.npy
    python examples/semantic_search.py --trace examples                 send spans to Jaeger: how-to/jaeger.md
    python examples/semantic_search.py --studio                         show the running graphs: how-to/live.md

Files are read in threads and parsed in processes. Their definitions are embedded on a device, in batches. One index
ranks definitions by meaning, another by keywords, at the same time. Then a deployment answers many callers at once.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda _signal, _frame: sys.exit(130))  # until `main` handles Ctrl-C: no traceback
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import examples`: the path has only this file's folder

# Every worker process imports this file, so only functions that use JAX import JAX.
import argparse
import asyncio
import json
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from rich.markup import escape
from rich.table import Table

from examples.search_job import (
    Job,
    begin,
    compare,
    console,
    follow,
    inboxes,
    prompt,
    questions,
    read_options,
    reporting_interrupts,
    show_found,
)
from penstock import engine, telemetry

if TYPE_CHECKING:
    from examples.code_search import Definition
    from examples.semantic_index import Answer

SAMPLE_QUERIES = (
    "which values occur most often",
    "delete a folder and all that is in it",
    "how long does a piece of code take",
    "a temporary folder that is removed in the end",
    "make text safe to put into a web page",
    "wait until several tasks are done",
)
CALLERS = 64


# --- Search ---


async def serve(job: Job, queries: Sequence[str], *, everything: bool) -> None:
    """Fill the indexes, then answer the queries; without queries, answer the person at the prompt."""
    from examples.embedding import encode
    from examples.semantic_index import ask, fill

    console.print("The weights of the model are read ...")
    async with engine.deploy(ask, fill, max_in_flight=CALLERS) as service:
        job.began = perf_counter()
        calls = (fill(path, everything) for path in job.paths)
        with telemetry.profile() as profile:
            async with service.stream(calls, ordered=False, max_in_flight=CALLERS) as filling:

                def now() -> str:
                    statistics = filling.statistics()
                    texts = sum(node.completed for node in statistics.actors if node.node == encode.name)
                    rate, programs = texts / (perf_counter() - job.began), encode.compile_statistics().programs
                    embedded = f"{texts:,} texts embedded, {rate:.0f}/s, by {programs} compiled programs"
                    return f"{embedded}\n{inboxes(statistics, fill.name)}"

                await follow(job, filling, now)
        await service("")  # the first query ranks everything
        job.seconds = perf_counter() - job.began
        show_found(job, profile.verdict)
        answers = await ask_at_once(service, queries or SAMPLE_QUERIES)
        for query in queries:
            show_answer(job, query, answers[query])
        while not queries and (query := await prompt()):
            show_answer(job, query, await service(query))
        console.print("", service.statistics())


async def ask_at_once(service: "engine.Service[[str], Answer]", queries: Sequence[str]) -> "dict[str, Answer]":
    """Ask the queries for all callers at the same time, and return the answers."""
    asked = list(islice(cycle(queries), CALLERS))
    began = perf_counter()
    answers = await asyncio.gather(*map(service, asked))
    seconds = perf_counter() - began
    console.print(f"[bold]{CALLERS} callers at once[/] had their answers after {seconds:.2f} s")
    return dict(zip(asked, answers, strict=True))


def run_plain_loop(job: Job, *, everything: bool) -> None:
    """Do the same job without an engine: a node that is called outside of a graph runs just its function."""
    from examples import minilm
    from examples.code_search import Definition, Index, parse, read
    from examples.plain_embedding import embed_plain
    from examples.semantic_index import Meanings, choose, describe

    job.began = perf_counter()
    model = minilm.find_model()
    chosen: list[Definition] = []
    for path in job.paths:
        try:
            found = choose(parse(path, read(path)), everything)
        except Exception as error:  # noqa: BLE001 - an error in one file must not keep other files out
            job.count(path, None, error)
        else:
            job.count(path, len(found))
            chosen += found
    vectors = embed_plain(
        minilm.load_parameters(model), minilm.load_tokenizer(model), [describe(each) for each in chosen]
    )
    keywords, meanings = Index(), Meanings()
    keywords(chosen)
    meanings(chosen, list(vectors))
    keywords("")
    job.seconds = perf_counter() - job.began


def is_public(path: Path) -> bool:
    """Whether a module is for other programs: it is no test, and its name does not begin with an underscore."""
    return not any(
        part in ("test", "tests") or part.startswith("test_") or (part.startswith("_") and part != "__init__.py")
        for part in path.parts
    )


@contextmanager
def watched() -> Generator[None]:
    """Show the graphs of this process on a page, which a second process serves."""
    with TemporaryDirectory() as folder, telemetry.expose(Path(folder) / "search.sock") as path:
        command = [sys.executable, "-m", "penstock", "studio", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
            assert page.stdout is not None
            console.print(f"Watch at {page.stdout.readline().strip()}", markup=False, soft_wrap=True)
            try:
                yield
            finally:
                page.terminate()


def search(options: argparse.Namespace) -> int:
    jobs = [Job(options.folder)]
    everything: bool = options.all
    with reporting_interrupts(jobs), watched() if options.studio else nullcontext():
        if not begin(jobs[0], options.limit, (lambda _path: True) if everything else is_public):
            return 1
        if not everything:
            console.print("Searched are public functions and classes with a docstring; --all searches everything.")
        console.print("JAX is imported ...")
        from examples.semantic_index import ask, fill

        console.print(f"\n{fill}\n\n{ask}\n", markup=False, soft_wrap=True)
        asyncio.run(serve(jobs[0], questions(options, SAMPLE_QUERIES), everything=everything))
        if options.compare:
            compare(jobs, lambda job: run_plain_loop(job, everything=everything))
    return 0


def show_answer(job: Job, query: str, answer: "Answer") -> None:
    by_meaning, by_keyword = answer
    table = Table(title=f"\n{escape(query)}", title_justify="left", title_style="bold", box=None, expand=True)
    for title in ("by meaning", "by keyword"):
        table.add_column(title, ratio=1, no_wrap=True, overflow="ellipsis", header_style="dim", justify="left")
    left = [shown(job, found, f"{closeness:.2f} ") for found, closeness in by_meaning] or ["[dim]nothing fits[/]"]
    right = [shown(job, found) for found in by_keyword] or ["[dim]nothing fits[/]"]
    for row in range(max(len(left), len(right))):
        table.add_row(*("".join(column[row : row + 1]) for column in (left, right)))
    console.print(table)


def shown(job: Job, found: "Definition", before: str = "") -> str:
    where = f"{before}[cyan]{job.short(found.path)}:{found.line}[/]  {escape(found.signature)}"
    return f"{where}\n[dim]{' ' * len(before)}{escape(found.summary)}[/]"


# --- Embed a file of sentences ---


def read_sentences(path: Path) -> list[str]:
    """Read a JSON list of strings.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a JSON list of strings.
    """
    try:
        sentences: object = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:  # also for bytes that are not UTF-8
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(sentences, list):
        raise ValueError(f"it must be a list of strings, not a {type(sentences).__name__}")
    for index, sentence in enumerate(cast("list[object]", sentences)):
        if not isinstance(sentence, str):
            raise ValueError(f"it must be a list of strings, and item {index} is {json.dumps(sentence)[:80]}")
        try:
            sentence.encode()
        except UnicodeEncodeError as error:  # JSON can write half of a pair of surrogates
            raise ValueError(f"item {index} is no valid Unicode: {error.reason}") from error
    return cast("list[str]", sentences)


def embed(sentences: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the vectors of sentences, in their order: float32 [sentences, 384], each vector of length 1."""
    from examples.embedding import embed_all

    return asyncio.run(embed_all(sentences))


@contextmanager
def refusing(parser: argparse.ArgumentParser, attempt: str) -> Generator[None]:
    """End the program with one line that names the failed attempt and the reason."""
    try:
        yield
    except OSError as error:
        parser.error(f"cannot {attempt}: {error.strerror}")
    except ValueError as error:
        parser.error(f"cannot {attempt}: {error}")


def embed_file(parser: argparse.ArgumentParser, source: Path, target: Path) -> int:
    with refusing(parser, f"embed {source}"):
        sentences = read_sentences(source)
    # Check now, before all the work, that the file can be written; its old content stays until the end.
    with refusing(parser, f"write {target}"), target.open("ab"):
        pass
    vectors = embed(sentences)
    # With a path, `np.save` would add .npy to the name of a file with another ending.
    with refusing(parser, f"write {target}"), target.open("wb") as file:
        np.save(file, vectors)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Search Python code by meaning, or embed sentences.")
    parser.add_argument(
        "--all", action="store_true", help="also search private and nested definitions, and such without a docstring"
    )
    parser.add_argument("--embed", type=Path, metavar="FILE", help="embed a JSON list of strings instead")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file for their vectors, as .npy")
    parser.add_argument(
        "--trace", action="store_true", help="send spans to Jaeger, or to the address in OTEL_* variables"
    )
    parser.add_argument("--studio", action="store_true", help="serve a page that shows the running graphs")
    options = read_options(parser, arguments)
    if (options.embed is None) != (options.out is None):
        parser.error("--embed and --out need each other")
    try:
        if options.trace:
            telemetry.setup(service_name="semantic-search")
        return search(options) if options.embed is None else embed_file(parser, options.embed, options.out)
    except ImportError as error:  # JAX, the weights of the model, or the exporter of spans
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
