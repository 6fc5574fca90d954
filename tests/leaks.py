"""Threads, file descriptors and child processes of this process: a test must not leave any of them behind.

Each test looks twice, and JAX alone has twenty threads. So the files of the kernel are read without `Path`, which would
take four times as long.
"""

# ruff: noqa: PTH112, PTH115, PTH123, PTH208 - see above
import gc
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DESCRIPTORS = next((folder for folder in ("/proc/self/fd", "/dev/fd") if os.path.isdir(folder)), None)
THREADS_OF_PROCESS = "/proc/self/task"

# For how long a test waits for the end of what it has ended: a guard, since on a busy machine that takes a while.
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Holdings:
    """The threads, descriptors and children of this process at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: dict[int, str]
    children: frozenset[int]

    @classmethod
    def now(cls) -> "Holdings":
        return cls(frozenset(threading.enumerate()), open_descriptors(), child_processes())

    def added_since(self, before: "Holdings") -> list[str]:
        """Names the threads, descriptors and children that were added since `before`."""
        # A foreign thread that once called Python shows as a dummy for as long as it lives. No test could end it.
        threads = [thread for thread in self.threads - before.threads if not thread.name.startswith("Dummy-")]
        return [
            *(f"thread {thread.name!r}" for thread in threads),
            *(
                f"file descriptor {number} ({target})"
                for number, target in self.descriptors.items()
                if before.descriptors.get(number) != target
            ),
            *(f"child process {pid}" for pid in self.children - before.children),
        ]


def left_since(before: Holdings) -> list[str]:
    """Names what was added since `before` and is still there after `PATIENCE_SECONDS`."""
    left = Holdings.now().added_since(before)
    give_up = time.monotonic() + PATIENCE_SECONDS
    while left and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.01)
        left = Holdings.now().added_since(before)
    return left


def open_descriptors() -> dict[int, str]:
    """Returns the target of each open descriptor of this process; that of a socket or pipe contains its number."""
    found: dict[int, str] = {}
    for number in os.listdir(DESCRIPTORS) if DESCRIPTORS else ():
        try:
            found[int(number)] = os.readlink(f"{DESCRIPTORS}/{number}")
        except OSError:  # the descriptor that read the folder is closed by now, or the system has no such links (macOS)
            continue
    return found


def child_processes() -> frozenset[int]:
    """Returns the children that were not waited for, zombies included (only those of multiprocessing if not Linux)."""
    if not os.path.isdir(THREADS_OF_PROCESS):
        return frozenset(child.pid for child in multiprocessing.active_children() if child.pid)
    pids: set[int] = set()
    for thread in os.listdir(THREADS_OF_PROCESS):
        try:
            with open(f"{THREADS_OF_PROCESS}/{thread}/children", "rb", buffering=0) as children:
                pids.update(map(int, children.readall().split()))
        except OSError:  # the thread has ended, or this kernel keeps no such list
            continue
    return frozenset(pids)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f": {record.exc_info[1]!r}"
        self.messages.append(message)


@contextmanager
def loop_errors() -> Iterator[list[str]]:
    """Collects the errors that event loops log because no caller gets them.

    Both asyncio and uvloop log an error of a callback, "Task was destroyed but it is pending" and "exception was never
    retrieved". A test that means to cause one of these errors installs its own handler on its loop.
    """
    records = _Records()
    logger = logging.getLogger("asyncio")
    logger.addHandler(records)
    try:
        yield records.messages
    finally:
        logger.removeHandler(records)
