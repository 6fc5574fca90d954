"""A job over documents that takes the advice of its verdict, and shows the gain beside the one that was predicted.

    python examples/documents.py                  2,000 pages of HTML, which it makes
    python examples/documents.py ~/mirror         the pages of a folder
    python examples/documents.py --paragraphs 400 --pages 200

Pages are read, parsed, embedded by a service and written to a file. The job begins as one writes it at first. A profile
says which step limits, which option to type at which line, and what that brings. The program types that, and runs
again, until no option helps: what is left then is a larger machine, or other code.
"""

import argparse
import asyncio
import hashlib
import json
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import penstock as ps
from penstock import engine, telemetry

SERVICE_SECONDS = 0.04  # what the service takes for a request, however many texts it has


class Text(HTMLParser):
    """The words of a page, without those of its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        self.words += () if self._skipped > 0 else data.split()


def read(path: Path) -> str:
    return path.read_text(errors="replace")


def parse(page: str) -> str:
    text = Text()
    text.feed(page)
    return " ".join(text.words)


async def embed(texts: list[str]) -> list[list[float]]:
    await asyncio.sleep(SERVICE_SECONDS)  # stands for a request with all of these texts
    return [[byte / 255 for byte in hashlib.sha256(text.encode()).digest()[:4]] for text in texts]


# As it is written at first. The service takes several texts, so that one node has an option from the beginning.
Options = dict[str, dict[str, Any]]
FIRST: Options = {"read": {}, "parse": {}, "embed": {"batch": ps.Batch(8)}, "stream": {}}


def job(options: Options) -> ps.Graph[[Path], list[float]]:
    def node(function: Callable[..., Any]) -> Any:
        with_options: Any = ps.node
        return with_options(**options[function.__name__])(function)

    chain: ps.Graph[[Path], list[float]] = node(read) >> node(parse) >> node(embed)
    return chain


async def write(vectors: AsyncIterator[list[float]], target: Path) -> None:
    with target.open("w") as file:
        async for vector in vectors:
            file.write(json.dumps(vector) + "\n")


async def run(options: Options, paths: Sequence[Path], target: Path) -> telemetry.Profile:
    """Run the job, and return its profile; before that, a few pages have worker processes start."""
    vector = job(options)
    async with engine.Engine() as own:
        async with own.stream(vector(path) for path in paths[:32]) as vectors:
            await write(vectors, target)
        with telemetry.profile() as profile:
            async with own.stream((vector(path) for path in paths), **options["stream"]) as vectors:
                await write(vectors, target)
    return profile


# --- Taking the advice ---

OPTION = re.compile(r'(\w+)=("\w+"|ps\.Batch\(\d+\)|\d+) at (?:(\w+) \()?')


def typed(verdict: telemetry.Verdict) -> Options:
    """Return the options that a verdict says, each by its step; of others than those of steps and the stream, none."""
    advice, gain, _ = verdict.remedy.partition(" times as fast")
    found: Options = {}
    for name, text, step in OPTION.findall(advice) if gain else ():
        number = re.search(r"\d+", text)
        value = text.strip('"') if number is None else ps.Batch(int(number[0])) if "(" in text else int(number[0])
        found.setdefault(step or "stream", {})[name] = value
    return found


class Round(NamedTuple):
    """One run of the job: how long it took, what limited it, and what it wrote."""

    seconds: float
    verdict: telemetry.Verdict
    target: Path

    def same_as(self, other: "Round") -> bool:
        return self.target.read_bytes() == other.target.read_bytes()


async def follow(paths: Sequence[Path], folder: Path, rounds: int) -> AsyncIterator[Round]:
    """Run the job, and again with what the verdict says, at most so many times."""
    options: Options = FIRST
    for number in range(rounds):
        target = folder / f"vectors-{number}"
        profile = await run(options, paths, target)
        verdict = profile.verdict
        yield Round(profile.elapsed_seconds, verdict, target)
        advice = typed(verdict)
        if not advice:
            return
        options = {step: {**before, **advice.get(step, {})} for step, before in options.items()}


@contextmanager
def pages(count: int, paragraphs: int) -> Generator[list[Path]]:
    """Make pages in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number:05}.html") for number in range(count)]
        for number, path in enumerate(paths):
            text = f'<p class="x">A page says <b>{number}</b> &amp; more, <a href="#">here</a>.</p>\n' * paragraphs
            path.write_text(f"<html><head><title>{number}</title></head><body>{text}</body></html>")
        yield paths


async def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run a job over documents, take the advice of its verdict, run again.")
    parser.add_argument("folder", nargs="?", type=Path, help="whose *.html to take; without, pages are made")
    parser.add_argument("--pages", type=int, default=2000, help="how many to make, or to take at most (2000)")
    parser.add_argument("--paragraphs", type=int, default=40, help="in each page that is made (40)")
    parser.add_argument("--rounds", type=int, default=6, help="how many times to run at most (6)")
    given = parser.parse_args(arguments)
    with pages(0 if given.folder else given.pages, given.paragraphs) as paths, tempfile.TemporaryDirectory() as folder:
        if given.folder:
            paths = sorted(given.folder.rglob("*.html"))[: given.pages]
        before: Round | None = None
        async for now in follow(paths, Path(folder), given.rounds):
            if before is not None:
                gain, predicted = before.seconds / now.seconds, before.verdict.factor or 1.0
                same = "the same results" if now.same_as(before) else "OTHER RESULTS"
                print(f"measured: {gain:.1f} times as fast, predicted: {predicted:.1f}; {same}\n")
            print(f"{len(paths):,} pages in {now.seconds:.2f} s. {now.verdict}.")
            before = now


if __name__ == "__main__":
    asyncio.run(main())
