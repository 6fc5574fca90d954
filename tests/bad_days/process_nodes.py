"""Nodes that run in worker processes; these import the nodes from this module."""

import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

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


def fork_and_leave(item: tuple[int, str]) -> tuple[int, int]:
    """Fork a child that leaves the handler as the item says; return the number of the item, and the child's status."""
    number, way = item
    child = os.fork() if way else 0
    if child:
        return number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if way == "raise":
        raise FileNotFoundError(number)
    if way == "exit":
        sys.exit(3)
    return number, -1 if way else 0


class ForksWhenPickled:
    """A result whose reducer forks."""

    def __init__(self, item: tuple[int, str]) -> None:
        self.item = item

    def __reduce__(self) -> Any:
        return tuple, (fork_and_leave(self.item),)


fork = ps.node(runs_on="process", name="fork")(fork_and_leave)


@ps.node(runs_on="process", batch=ps.Batch(4))
def fork_in_batch(items: list[tuple[int, str]]) -> list[tuple[int, int]]:
    return [fork_and_leave(item) for item in items]


@ps.node(runs_on="process")
class Forks:
    def __call__(self, item: tuple[int, str]) -> tuple[int, int]:
        return fork_and_leave(item)


@ps.node(runs_on="process")
def fork_in_reducer(item: tuple[int, str]) -> Any:
    return ForksWhenPickled(item)


@ps.node(runs_on="process")
def write_to_sockets(item: tuple[int, str]) -> tuple[int, int]:
    """Write into all sockets of this process, as a program does that mixes up its descriptors."""
    number, way = item
    for descriptor in range(3, 64) if way else ():
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"\xff" * 64)
        except OSError:
            pass
    return number, 0


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
