"""Runs the Python snippets of a Markdown page, one after the other in one namespace, and compares their output.

A fenced `python` block is run. A `text` block right after it has the expected output, with `...` for any text, and the
expected error: type, message and notes. A block that only includes a file (between two lines `--8<--`) runs as a
separate program, as process nodes need. A block with a title is a file of that name. Messages name the file, and its
first line is the first line of the block. A page with `<!-- snippets: own process -->` changes state of the whole
process, so it runs in a fork, and in its own folder. The output of a page with
`<!-- snippets: virtual time -->` shows times, so it runs on a clock that jumps. A page with
`<!-- snippets: real time -->` shows what a busy machine changes: it belongs to `make test-timed`.
"""

import ast
import asyncio
import contextlib
import doctest
import io
import linecache
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tests.forked import Forks
from tests.telemetry.virtual_time import VirtualTime, telling

ROOT = Path(__file__).parents[2]

# Warnings that depend on the machine, and that pages do not show: a busy processor, and a JAX that may compute wrong
# values on CPU.
_ELSEWHERE = "node.blocks_loop", "jax.may_compute_wrong_values"
_OWN_PROCESS, _VIRTUAL_TIME = "<!-- snippets: own process -->", "<!-- snippets: virtual time -->"
_REAL_TIME = "<!-- snippets: real time -->"

_FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})[ ]*(?P<language>[\w-]*)(?P<rest>[^\n]*)\n"
    r"(?P<body>.*?)^(?P=indent)(?P=ticks)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')
_INCLUDE = re.compile(r"--8<--\n(\S+)\n--8<--\s*")  # the longer form, which formatters do not parse as Python


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: the word after the backticks.
        text: the lines of the block, without their indentation in the page.
        line: the number, in the page, of the first line of the block.
        title: the name of the file that the block shows; None without a title.
    """

    language: str
    text: str
    line: int
    title: str | None


def blocks_of(page: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page, also blocks inside lists, notes and tabs."""
    for match in _FENCE.finditer(page):
        title = _TITLE.search(match["rest"])
        line = page.count("\n", 0, match.start("body")) + 1
        yield Block(match["language"], dedent(match["body"]), line, title and title[1])


def has_snippets(page: Path) -> bool:
    """Whether a page has Python blocks to run."""
    return any(block.language == "python" for block in blocks_of(page.read_text()))


# Runs a page in a fork, in a folder for the files that the page writes.
RUN_PAGE = """
import contextlib, sys, tempfile
from pathlib import Path
from tests.docs.snippets import run_page
with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    run_page(Path(sys.argv[1]))
"""


def is_timed(page: Path) -> bool:
    """Whether a page shows what only an idle machine does."""
    return _REAL_TIME in page.read_text()


def check_page(page: Path, forks: Forks) -> None:
    """Runs the snippets of a page, in this process or in a fork.

    Raises:
        AssertionError: the output of a snippet differs from the page.
        Exception: the error of a snippet, with a note that names its line in the page.
    """
    if _OWN_PROCESS in page.read_text():
        # A page that shows how to send traces would find no receiver.
        nowhere = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
        status, _, errors = forks.run(RUN_PAGE, str(page), **nowhere)
        assert status == 0, errors
    else:
        run_page(page)


def run_page(page: Path) -> None:
    """Runs the snippets of a page in this process; raises as `check_page` does."""
    module = types.ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
    sys.modules[module.__name__] = module
    try:
        with contextlib.ExitStack() as stack:
            text = page.read_text()
            virtual = VirtualTime() if _VIRTUAL_TIME in text else None
            if virtual is not None:
                stack.enter_context(telling(virtual))
            runner = stack.enter_context(asyncio.Runner() if virtual is None else virtual.runner())
            blocks = list(blocks_of(text))
            for block, following in zip(blocks, [*blocks[1:], None], strict=True):
                if block.language != "python":
                    continue
                printed, error = run_block(block, module, page, runner)
                expected = following if following is not None and following.language == "text" else None
                if error is not None and expected is None:
                    error.add_note(f"in the snippet at {page.relative_to(ROOT)}:{block.line}")
                    raise error
                if expected is not None:
                    _compare(expected, printed + ("" if error is None else _shown(error)), page)
    finally:
        del sys.modules[module.__name__]


def run_block(
    block: Block, module: types.ModuleType, page: Path, runner: asyncio.Runner
) -> tuple[str, Exception | None]:
    """Runs a block; returns its output and its error."""
    if included := _INCLUDE.fullmatch(block.text):
        done = subprocess.run([sys.executable, ROOT / included[1]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout, None
    filename = block.title or f"<{page.name}, line {block.line}>"
    # Without a modification time, `linecache` keeps these lines; a graph reads its source when it is decorated.
    linecache.cache[filename] = (len(block.text), None, block.text.splitlines(keepends=True), filename)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            code = compile(block.text, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, module.__dict__)
            if asyncio.iscoroutine(result):
                runner.run(result)
        except Exception as error:  # noqa: BLE001 - a page may show any error
            return output.getvalue(), error
    return output.getvalue(), None


def _shown(error: Exception) -> str:
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return "".join(f"{line}\n" for line in lines)


def _compare(expected: Block, printed: str, page: Path) -> None:
    lines = printed.splitlines(keepends=True)
    printed = "".join(line for line in lines if not any(f" {event} " in line for event in _ELSEWHERE))
    same = doctest.OutputChecker().check_output(expected.text, printed, doctest.ELLIPSIS)
    assert same, (
        f"{page.relative_to(ROOT)}:{expected.line} says\n{expected.text}\nbut the snippet before it printed\n{printed}"
    )
