"""Programs that run in forks of a process that has imported modules: the imports take longer than most programs."""

import importlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 150  # below the limit of a test, so that a program that hangs does not hold up the next one


class Forks:
    """A process that forks itself for each program."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, program: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Runs a program to its end; returns its exit status, and what it wrote to standard output and error.

        On a busy machine, a node may seem to block the loop: the line that says so is left out.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("out", "err")]
            asked = {"program": program, "arguments": arguments, "variables": variables, "files": [*map(str, files)]}
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
            said, errors = (_without_blocked_loop(file.read_text()) for file in files)
        return status, said, errors


def _without_blocked_loop(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if "node.blocks_loop" not in line)


@contextmanager
def forking(*modules: str) -> Iterator[Forks]:
    """Starts a process that imports these modules, and then forks; it ends with the block."""
    command = [sys.executable, "-W", "error", "-m", "tests.forked", *modules]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Forks(process)
        process.communicate()


# --- The program ---


def become(asked: dict[str, Any]) -> None:
    """Turns a fork into the program that was asked for; the fork ends as that program does."""
    signal.alarm(MOST_SECONDS)
    os.environ.update(asked["variables"])
    sys.argv[1:] = asked["arguments"]
    for file, number in zip(asked["files"], (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    exec(compile(asked["program"], "<program>", "exec"), {"__name__": "__main__"})


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    while line := sys.stdin.readline():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of every fork, also if nothing of JAX has started
            child = os.fork()
        if not child:
            become(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
