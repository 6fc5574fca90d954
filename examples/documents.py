"""A job over documents that takes the advice of its verdict, and shows the measured gain beside the predicted gain.

    python examples/documents.py                  2,000 pages of HTML, which the program makes
    python examples/documents.py ~/mirror         the pages of a folder
    python examples/documents.py --paragraphs 400 --pages 200

Pages are read, parsed, embedded by a service and written to a file. The job begins without any options. A profile says
which step limits the job, which option to type at which line, and how much faster the job becomes. The program sets
that option and runs again, until no option helps. Then only a larger machine or other code helps.
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

SERVICE_SECONDS = 0.04  # the time of the service for a request, with any number of texts


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


# The job at first. The service takes several texts in a request, so its node has an option from the beginning.
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
    """Run the job, and return its profile; a few pages before it make the worker processes start."""
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
    """Return the options that a verdict advises for steps and for the stream, by step; other advice is left out."""
    advice, gain, _ = verdict.remedy.partition(" times as fast")
    found: Options = {}
    for name, text, step in OPTION.findall(advice) if gain else ():
        number = re.search(r"\d+", text)
        value = text.strip('"') if number is None else ps.Batch(int(number[0])) if "(" in text else int(number[0])
        found.setdefault(step or "stream", {})[name] = value
    return found


class Round(NamedTuple):
    """One run of the job: how long it took, the verdict of its profile, and the file that it wrote."""

    seconds: float
    verdict: telemetry.Verdict
    target: Path

    def same_as(self, other: "Round") -> bool:
        return self.target.read_bytes() == other.target.read_bytes()


async def follow(paths: Sequence[Path], folder: Path, rounds: int) -> AsyncIterator[Round]:
    """Run the job again and again, each time with the advice of the last verdict, at most `rounds` times."""
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
    parser.add_argument("folder", nargs="?", type=Path, help="a folder with *.html files; made pages without it")
    parser.add_argument("--pages", type=int, default=2000, help="how many pages to make, or to take at most (2000)")
    parser.add_argument("--paragraphs", type=int, default=40, help="how many paragraphs a made page has (40)")
    parser.add_argument("--rounds", type=int, default=6, help="how many times to run the job at most (6)")
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
