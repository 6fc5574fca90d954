"""Runs an example as a visitor does: as a program, with or without a terminal."""

import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CTRL_C = "\x03"  # the terminal sends SIGINT to every process of the program, as a person does
# A program that a shell starts in the background ignores SIGINT, and so do its children, without this statement.
HEAR_CTRL_C = "signal.signal(signal.SIGINT, signal.SIG_DFL)"
PATIENCE_SECONDS = 120  # far below the test's timeout, so that a failure shows the output


def command(program: Path, arguments: tuple[str | Path, ...], before: str) -> list[str | Path]:
    """Return a command that runs the program in a process, after the statement `before`.

    `preexec_fn` would fork, and warn if threads run.
    """
    words = [program, *arguments]
    if not before:
        return [sys.executable, *words]
    launcher = (
        f"import ctypes, fcntl, os, signal, sys, termios; {before}; "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return [sys.executable, "-c", launcher, *words]


def run(program: Path, *arguments: str | Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program to its end; the end of its output shows that none of its processes is left."""
    return subprocess.run(  # noqa: PLW1510 - tests check the exit code
        command(program, arguments, before),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "COLUMNS": "120"},
    )


class Terminal:
    """The program in its own terminal, with its output so far."""

    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self._master = master
        self.process = process
        self.printed = ""

    def until(self, pattern: str) -> None:
        """Wait until the program has printed a match of `pattern`."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not re.search(pattern, self.printed):
            if not self._read(give_up):
                pytest.fail(f"{pattern!r} is not in what was printed:\n{self.printed}")

    def end(self) -> int:
        """Wait until the last process has left the terminal; returns the exit code."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while self._read(give_up):
            pass
        if time.monotonic() > give_up:
            pytest.fail(f"it did not end:\n{self.printed}")
        return self.process.wait(PATIENCE_SECONDS)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def worker_started(self) -> None:
        """Wait until the program has started a worker process."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while "spawn_main" not in "".join(map(_command, _children(self.process.pid))):
            assert time.monotonic() < give_up
            assert self._read(time.monotonic() + 0.01) or self.process.poll() is None

    def _read(self, give_up: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(give_up - time.monotonic(), 0))
        try:
            data = os.read(self._master, 65536) if ready else b""
        except OSError:  # on Linux: the last process has closed the other end
            data = b""
        # Tests ignore colours and cursor movements.
        self.printed += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode(errors="replace"))
        return bool(data)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # the thread has ended meanwhile
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@contextmanager
def terminal(program: Path, *arguments: str | Path, typing: bool) -> Iterator[Terminal]:
    """Run the program in a terminal; without `typing`, its standard input is not the terminal."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (50, 100))
    process = subprocess.Popen(
        command(program, arguments, f"fcntl.ioctl(1, termios.TIOCSCTTY, 0); {HEAR_CTRL_C}"),
        stdin=slave if typing else subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(master)
