"""Nodes that run in worker processes; these import the nodes from this module."""

import os
import signal
from pathlib import Path

import penstock as ps


@ps.node(runs_on="process")
def square(x: int) -> int:
    return x * x


@ps.node(runs_on="process", concurrency=2)
def die_at_three(x: int) -> int:
    if x == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@ps.node(runs_on="process")
def raise_it(x: int) -> int:
    raise LookupError(x)


@ps.node(runs_on="process", timeout_seconds=0.05)
def block_for_ever(x: int) -> int:
    import time

    while True:
        time.sleep(3600)


@ps.node(runs_on="process")
def leave(x: int) -> int:
    raise SystemExit(x)


@ps.node(runs_on="process")
def wait_at(begun: str, go_on: str) -> str:
    """Write this process's id to one named pipe, and wait until the test writes to the other."""
    write(begun, str(os.getpid()))
    read(go_on)
    return "went on"


def write(pipe: str, text: str) -> None:
    Path(pipe).write_text(text)


def read(pipe: str) -> str:
    return Path(pipe).read_text()
