"""Functions that tests run in worker processes, in a separate module so that a worker imports little."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def add(a: int, b: int = 0) -> int:
    return a + b


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def pid(*_: object) -> int:
    return os.getpid()


def echo(value: Any) -> Any:
    return value


def double(array: Any) -> Any:
    array *= 2
    return array


def die_with_a_forked_child(pid_file: str) -> None:
    child = os.fork()
    if not child:
        threading.Event().wait()
    Path(pid_file).write_text(str(child))
    os._exit(4)


class ForksAndBlocks:
    def __init__(self, pid_file: str) -> None:
        self.pid_file = pid_file

    def __call__(self, path: str) -> None:
        """Leave a child that holds the sockets of this worker, then block."""
        child = os.fork()
        if not child:
            threading.Event().wait()
        Path(self.pid_file).write_text(str(child))
        block(path)


def block(path: str) -> None:
    """Send the process id to the Unix socket at `path`, then block for ever."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(str(os.getpid()).encode())
    threading.Event().wait()


def hold(path: str, result: Any) -> Any:
    """Return `result` once the Unix socket at `path` answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.recv(1)
    return result


def terminate_what_it_has_started() -> list[int]:
    """Start a program and fork a process, terminate both with SIGTERM, and return how they end."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    reads, writes = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(writes, b"here")
        time.sleep(60)
        os._exit(0)
    os.read(reads, 4)
    program.terminate()
    os.kill(forked, signal.SIGTERM)
    return [program.wait(30), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]


def raise_error(kind: type[BaseException], *args: object) -> None:
    raise kind(*args)


class NotedError(Exception):
    pass


def raise_noted(*args: object) -> None:
    error = NotedError(*args)
    error.add_note("a note from the worker")
    raise error


class TwoArguments(Exception):
    """An error that pickles, but cannot be rebuilt from its `args`."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())


def make_generator() -> Any:
    return (number for number in range(3))


class OnlyThere:
    """An object that pickles in one process, but cannot be rebuilt in another."""

    def __init__(self, home: int) -> None:
        self.home = home

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        return rebuild_at_home, (self.home,)


def rebuild_at_home(home: int) -> OnlyThere:
    if os.getpid() != home:
        raise ValueError("not at home")
    return OnlyThere(home)


def make_only_there() -> OnlyThere:
    return OnlyThere(os.getpid())


class FakeNode:
    """Stands for the object that a decorator leaves in the module; it keeps the function in `fn`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("the worker calls the function, not the node")


@FakeNode
def shadowed(value: int) -> int:
    return -value


def outer() -> Callable[[], None]:
    def inner() -> None:
        pass

    return inner


a_lambda = lambda: None  # noqa: E731


def renamed() -> int:
    return 1


another_name = renamed


def renamed() -> int:  # type: ignore[no-redef]
    return 2


class Tools:
    @staticmethod
    def triple(value: int) -> int:
        return 3 * value


def ones(size: int) -> Any:
    import numpy as np

    return np.ones(size, np.uint8)


class RebuiltAsNoException(Exception):
    def __reduce__(self) -> tuple[type[dict[str, int]], tuple[()]]:
        return dict, ()


class RebuiltAsInterrupt(Exception):
    def __reduce__(self) -> tuple[type[KeyboardInterrupt], tuple[()]]:
        return KeyboardInterrupt, ()


class ExitsWhenRebuilt(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (1,)


class RefusesAttributes(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


@dataclass(frozen=True)
class Frozen(Exception):
    number: int


class RebuiltOnlyThere(Exception):
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        return rebuild_at_home, (os.getpid(),)


def note(path: str, number: int, act: str = "") -> int:
    """Append `number` and the process id to a file; then do nothing, die, wait, or hold at a socket, as `act` says."""
    with Path(path).open("a") as file:
        file.write(f"{number} {os.getpid()}\n")
    if act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "wait":
        time.sleep(0.02)
    elif act:
        hold(act, None)
    return number
