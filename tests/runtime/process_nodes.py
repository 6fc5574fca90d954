"""Process nodes of tests, in a separate module so that a worker imports little."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import penstock as ps
from penstock import engine


@ps.node(batch=ps.Batch(4), runs_on="process")
def squares(numbers: list[int]) -> list[int | Exception]:
    """Gives the square of each number, or an error for a negative number; 13 kills the worker."""
    if 13 in numbers:
        os.kill(os.getpid(), 9)
    if 99 in numbers:
        Path(os.environ["PENSTOCK_TEST_FILE"]).write_text("begun")
        time.sleep(60)
    return [ValueError(f"no {number}") if number < 0 else number**2 for number in numbers]


class ApiError(Exception):
    """An error that pickles, but cannot be rebuilt: its `args` do not fit its constructor, as with many errors."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")


class Unbuilt:
    """A result that pickles, but cannot be rebuilt."""

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return ApiError, (400,)


class AsList(Sequence[object]):
    """A sequence that unpickles as a list."""

    def __init__(self, items: list[object]) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __reduce__(self) -> tuple[type, tuple[list[object]]]:
        return list, (self._items,)


@ps.node(batch=ps.Batch(16), runs_on="process")
def with_table(numbers: list[int]) -> AsList:
    """Pairs each number with one shared table, in a sequence that is no list."""
    table = list(range(100))
    return AsList([(number, table) for number in numbers])


@ps.node(batch=ps.Batch(16), runs_on="process")
def sharing(numbers: list[int]) -> list[object]:
    """Maps each number to a table that all results share."""
    table = list(range(100))
    return [{number: table} for number in numbers]


@ps.node(batch=ps.Batch(16), runs_on="process")
def unlocked(values: list[object]) -> tuple[object, ...]:
    """Gives each value; a text makes the object that it names."""
    shared = bytearray(b"shared")
    made: dict[str, Callable[[], object]] = {
        "lock": threading.Lock,
        "api error": lambda: ApiError(400, "empty"),
        "unbuilt": Unbuilt,
        "shared": lambda: shared,
    }
    return tuple([made[value]() if isinstance(value, str) else value for value in values])


@ps.node(runs_on="process", timeout_seconds=0.6)
def timed(seconds: float) -> float:
    """Sleeps for `seconds`."""
    time.sleep(seconds)
    return seconds


@ps.node(runs_on="process")
def slow(x: int) -> None:
    """Takes a minute."""
    time.sleep(60)


_failed = set[int]()


@ps.node(runs_on="process", retry=ps.Retry(attempts=2))
def failing_once(x: int) -> int:
    """Takes a twentieth of a second, and fails at the first attempt of each number."""
    time.sleep(0.05)
    if x not in _failed:
        _failed.add(x)
        raise ValueError(x)
    return x


class Offset:
    """Has a batched method."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    @ps.node(batch=ps.Batch(4), runs_on="process")
    def added(self, numbers: list[int]) -> list[int]:
        """Adds the offset, in a worker process."""
        return [number + self.offset for number in numbers]


@ps.node(runs_on="process")
class Model:
    """A model that is slow to make, and writes its events to a file."""

    def __init__(self, path: str, factor: int = 1) -> None:
        self.path = path
        self.factor = factor
        self.calls = 0

    def _tell(self, what: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def __enter__(self) -> None:
        if self.factor < 0:
            raise ValueError("no such model")
        self._tell("entered")

    def __exit__(self, *exc_info: object) -> None:
        self._tell("left")

    def __call__(self, number: int) -> tuple[int, int, int]:
        """Gives the product, the process id and the number of calls of this instance; 13 kills the worker."""
        if number == 13:
            os.kill(os.getpid(), 9)
        self.calls += 1
        return number * self.factor, os.getpid(), self.calls


@ps.node
async def fails(number: int) -> int:
    """Raises an error with its argument."""
    raise ValueError(f"no {number}")


@ps.graph
async def failing(number: int) -> int:
    """A graph whose runs end with an error."""
    return await fails(number)


@ps.node(runs_on="process")
def runs_a_graph(number: int, in_group: bool) -> int:
    """Runs a graph in an Engine of the worker."""
    try:
        return asyncio.run(engine.run(failing(number)))
    except ValueError as error:
        if in_group:
            raise ExceptionGroup("all", [error, error]) from None
        raise
